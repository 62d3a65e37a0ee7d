// KdaMemory on a GPU, and the kernels of many problems compiled at once.
#pragma once

#include <vector>

#include "measure/device.h"
#include "measure/kda_case.h"

namespace twostep {

// `device` must outlive the memory, `stream` too. On a stream of its own a thread beside others does not wait for them.
class KdaCudaMemory final : public KdaMemory {
 public:
  explicit KdaCudaMemory(const MeasureDevice& device) : KdaCudaMemory(device, device.stream()) {}
  KdaCudaMemory(const MeasureDevice& device, Stream stream) : device_(device), stream_(stream) {}
  Device device() const override { return device_.device(); }
  Stream stream() const override { return stream_; }
  std::unique_ptr<KdaMemory> fresh() const override { return std::make_unique<KdaCudaMemory>(device_, stream_); }
  void* allocate(std::size_t bytes) override;
  void write(void* to, const void* host, std::size_t bytes) override;
  void read(void* host, const void* from, std::size_t bytes) override;
  void fill(void* to, std::int64_t count, std::uint64_t base, float scale) override;

 private:
  const MeasureDevice& device_;
  Stream stream_;
  std::vector<DeviceBuffer> buffers_;
};

// Fills the memory and disk cache of the jit room. A failure shows again, with its sentence, when the kernel is
// loaded.
void compile_kda(const std::vector<KdaBuild>& builds, const DeviceFacts& facts);

}  // namespace twostep
