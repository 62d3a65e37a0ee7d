// Device memory and streams, owned.
#pragma once

#include <cstddef>
#include <utility>

#include "cuda/driver.h"

namespace twostep {

// Plain device memory of the current context. Allocated with the capture mode relaxed; freed on destruction.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes);
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceBuffer();
  void* data() const { return reinterpret_cast<void*>(address_); }
  CUdeviceptr address() const { return address_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void swap(DeviceBuffer& other) {
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    std::swap(context_, other.context_);
  }
  CUdeviceptr address_ = 0;
  std::size_t bytes_ = 0;
  CUcontext context_ = nullptr;
};

// A stream that does not synchronise with the legacy default stream.
class OwnedStream {
 public:
  OwnedStream();
  OwnedStream(OwnedStream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(OwnedStream&&) = delete;
  ~OwnedStream();
  Stream view() const { return {stream_}; }
  CUstream get() const { return stream_; }
  void synchronize() const;

 private:
  CUstream stream_ = nullptr;
};

void copy_to_device(void* device, const void* host, std::size_t bytes, Stream stream = {});  // returns when done
void copy_to_host(void* host, const void* device, std::size_t bytes, Stream stream = {});    // returns when done

}  // namespace twostep
