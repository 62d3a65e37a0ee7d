// Device memory that other ranks write: made, handed over, mapped, let go (spec: mailbox 7.1).
#pragma once

#include <array>
#include <span>
#include <vector>

#include "cuda/memory.h"
#include "mailbox/set_up.h"

namespace twostep {

std::uint32_t possible_transports(int device);
std::array<std::uint8_t, 16> uuid_of(int device);
// Throws kUnavailable unless `device` can reach the memory of the GPU with this UUID. Lets it, where plain pointers do.
void require_peer_access(int device, const std::array<std::uint8_t, 16>& peer);

// The context of the device is current in every call.
class SharedRegion {
 public:
  void allocate(int device, PeerTransport transport, std::size_t bytes);
  MemoryHandle handle() const;
  // By rank, that of `rank` left out. regions() has the own one at its place.
  void map(std::span<const MemoryHandle> handles, int rank);
  void unmap() noexcept;
  void release() noexcept;
  std::byte* data() const { return own_; }
  std::size_t bytes() const { return bytes_; }
  std::span<std::byte* const> regions() const { return regions_; }

 private:
  std::byte* map_handle(CUmemHandle handle);
  void unmap_address(std::byte* address) noexcept;

  int device_ = 0;
  PeerTransport transport_ = PeerTransport::kAuto;
  std::size_t bytes_ = 0;   // of every rank
  CUmemHandle memory_ = 0;  // of vmm_fd
  std::byte* own_ = nullptr;
  std::vector<std::byte*> regions_;
  int rank_ = 0;
};

}  // namespace twostep
