#include "mailbox/peer_memory.h"

#include <fmt/format.h>

#include <cstring>
#include <mutex>

#include "core/check.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "mailbox.create";
constexpr int kAttributeVirtualMemory = 102;
constexpr int kAttributePosixFd = 103;
constexpr CUresult kPeerAccessAlreadyEnabled = 704;
constexpr int kGranularityMinimum = 0;

CUdevice device_of(int ordinal) {
  CUdevice device = 0;
  TWOSTEP_CUDA_CHECK(cuDeviceGet(&device, ordinal), kPlace);
  return device;
}

AllocationProperties properties_of(int ordinal) {
  AllocationProperties properties;
  properties.handle_types = kHandlePosixFd;
  properties.location.id = device_of(ordinal);
  return properties;
}

CUdeviceptr address_of(const std::byte* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

}  // namespace

std::uint32_t possible_transports(int ordinal) {
  const auto attribute = [device = device_of(ordinal)](int id) {
    int value = 0;
    TWOSTEP_CUDA_CHECK(cuDeviceGetAttribute(&value, id, device), kPlace);
    return value != 0;
  };
  const auto bit = [](PeerTransport transport) { return 1u << static_cast<unsigned>(transport); };
  std::uint32_t possible = bit(PeerTransport::kSameProcess) | bit(PeerTransport::kCudaIpc);
  if (attribute(kAttributeVirtualMemory) && attribute(kAttributePosixFd)) possible |= bit(PeerTransport::kVmmFd);
  return possible;
}

std::array<std::uint8_t, 16> uuid_of(int ordinal) {
  std::array<std::uint8_t, 16> uuid{};
  TWOSTEP_CUDA_CHECK(cuDeviceGetUuid(uuid.data(), device_of(ordinal)), kPlace);
  return uuid;
}

void require_peer_access(int ordinal, const std::array<std::uint8_t, 16>& peer_uuid) {
  if (peer_uuid == uuid_of(ordinal)) return;  // ranks of one GPU
  for (int peer = 0; peer < device_count(); ++peer) {
    if (uuid_of(peer) != peer_uuid) continue;
    int can = 0;
    TWOSTEP_CUDA_CHECK(cuDeviceCanAccessPeer(&can, device_of(ordinal), device_of(peer)), kPlace);
    if (!can)
      fail(StatusCode::kUnavailable, kPlace, "peer access", fmt::format("cuda:{} cannot reach cuda:{}", ordinal, peer),
           "GPUs joined by NVLink or PCIe peer access", "use NCCL for this group");
    // Once per pair and process, however many mailboxes there are.
    const CUresult result = driver().cuCtxEnablePeerAccess(primary_context(peer), 0);
    if (result != kPeerAccessAlreadyEnabled) check_cuda(result, "cuCtxEnablePeerAccess", kPlace);
    return;
  }
  fail(StatusCode::kUnavailable, kPlace, "device of a peer", "not visible to this process", "GPUs of all ranks",
       "let CUDA_VISIBLE_DEVICES of each process name the GPUs of all, and choose one by its number");
}

void SharedRegion::allocate(int device, PeerTransport transport, std::size_t bytes) {
  device_ = device;
  transport_ = transport;
  bytes_ = bytes;
  if (transport == PeerTransport::kVmmFd) {
    const AllocationProperties properties = properties_of(device);
    std::size_t granularity = 0;
    TWOSTEP_CUDA_CHECK(cuMemGetAllocationGranularity(&granularity, &properties, kGranularityMinimum), kPlace);
    bytes_ = (bytes + granularity - 1) / granularity * granularity;
    TWOSTEP_CUDA_CHECK(cuMemCreate(&memory_, bytes_, &properties, 0), kPlace);
    own_ = map_handle(memory_);
  } else {
    CUdeviceptr address = 0;
    TWOSTEP_CUDA_CHECK(cuMemAlloc(&address, bytes_), kPlace);
    own_ = reinterpret_cast<std::byte*>(address);
  }
}

MemoryHandle SharedRegion::handle() const {
  MemoryHandle handle;
  switch (transport_) {
    case PeerTransport::kVmmFd:
      TWOSTEP_CUDA_CHECK(cuMemExportToShareableHandle(&handle.fd, memory_, kHandlePosixFd, 0), kPlace);
      break;
    case PeerTransport::kCudaIpc: {
      IpcMemHandle ipc;
      TWOSTEP_CUDA_CHECK(cuIpcGetMemHandle(&ipc, address_of(own_)), kPlace);
      static_assert(sizeof ipc == sizeof handle.bytes);
      std::memcpy(handle.bytes.data(), &ipc, sizeof ipc);
      break;
    }
    default: std::memcpy(handle.bytes.data(), &own_, sizeof own_);
  }
  return handle;
}

void SharedRegion::map(std::span<const MemoryHandle> handles, int rank) {
  regions_.assign(handles.size(), nullptr);
  rank_ = rank;
  for (std::size_t peer = 0; peer < handles.size(); ++peer) {
    const MemoryHandle& handle = handles[peer];
    std::byte*& region = regions_[peer];
    if (static_cast<int>(peer) == rank) {
      region = own_;
    } else if (transport_ == PeerTransport::kVmmFd) {
      CUmemHandle memory = 0;
      void* descriptor = reinterpret_cast<void*>(static_cast<std::intptr_t>(handle.fd));
      TWOSTEP_CUDA_CHECK(cuMemImportFromShareableHandle(&memory, descriptor, kHandlePosixFd), kPlace);
      try {
        region = map_handle(memory);
      } catch (...) {
        driver().cuMemRelease(memory);
        throw;
      }
      TWOSTEP_CUDA_CHECK(cuMemRelease(memory), kPlace);  // the mapping holds it
    } else if (transport_ == PeerTransport::kCudaIpc) {
      constexpr unsigned kLazyEnablePeerAccess = 1;
      IpcMemHandle ipc;
      std::memcpy(&ipc, handle.bytes.data(), sizeof ipc);
      CUdeviceptr address = 0;
      TWOSTEP_CUDA_CHECK(cuIpcOpenMemHandle(&address, ipc, kLazyEnablePeerAccess), kPlace);
      region = reinterpret_cast<std::byte*>(address);
    } else {
      std::memcpy(&region, handle.bytes.data(), sizeof region);
    }
  }
}

std::byte* SharedRegion::map_handle(CUmemHandle handle) {
  CUdeviceptr address = 0;
  TWOSTEP_CUDA_CHECK(cuMemAddressReserve(&address, bytes_, 0, 0, 0), kPlace);
  CUresult result = driver().cuMemMap(address, bytes_, 0, handle, 0);
  if (result == kCudaSuccess) {
    AccessDescription access;
    access.location.id = device_of(device_);
    result = driver().cuMemSetAccess(address, bytes_, &access, 1);
    if (result != kCudaSuccess) driver().cuMemUnmap(address, bytes_);
  }
  if (result != kCudaSuccess) driver().cuMemAddressFree(address, bytes_);
  check_cuda(result, "cuMemMap, cuMemSetAccess", kPlace);
  return reinterpret_cast<std::byte*>(address);
}

void SharedRegion::unmap_address(std::byte* address) noexcept {
  driver().cuMemUnmap(address_of(address), bytes_);
  driver().cuMemAddressFree(address_of(address), bytes_);
}

void SharedRegion::unmap() noexcept {
  for (std::size_t peer = 0; peer < regions_.size(); ++peer) {
    std::byte* region = regions_[peer];
    if (region == nullptr || static_cast<int>(peer) == rank_) continue;
    if (transport_ == PeerTransport::kVmmFd) unmap_address(region);
    if (transport_ == PeerTransport::kCudaIpc) driver().cuIpcCloseMemHandle(address_of(region));
  }
  regions_.clear();
}

void SharedRegion::release() noexcept {
  if (transport_ == PeerTransport::kVmmFd) {
    if (own_) unmap_address(own_);
    if (memory_) driver().cuMemRelease(memory_);
  } else if (own_) {
    driver().cuMemFree(address_of(own_));
  }
  own_ = nullptr;
  memory_ = 0;
}

}  // namespace twostep
