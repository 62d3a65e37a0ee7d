#include "cuda/memory.h"

#include "core/check.h"

namespace twostep {

DeviceBuffer::DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
  const RelaxedCapture relaxed;
  TWOSTEP_CUDA_CHECK(cuCtxGetCurrent(&context_), "cuda.DeviceBuffer");
  if (bytes > 0) TWOSTEP_CUDA_CHECK(cuMemAlloc(&address_, bytes), "cuda.DeviceBuffer");
}

DeviceBuffer::~DeviceBuffer() {
  if (address_ == 0) return;
  CUcontext previous = nullptr;
  CaptureMode mode = CaptureMode::kRelaxed;
  const Driver& cu = driver();
  cu.cuThreadExchangeStreamCaptureMode(&mode);
  cu.cuCtxGetCurrent(&previous);
  cu.cuCtxSetCurrent(context_);
  cu.cuMemFree(address_);
  cu.cuCtxSetCurrent(previous);
  cu.cuThreadExchangeStreamCaptureMode(&mode);
}

OwnedStream::OwnedStream() {
  constexpr unsigned kNonBlocking = 1;
  TWOSTEP_CUDA_CHECK(cuStreamCreate(&stream_, kNonBlocking), "cuda.OwnedStream");
}

OwnedStream::~OwnedStream() {
  if (stream_ != nullptr) driver().cuStreamDestroy(stream_);
}

void OwnedStream::synchronize() const { TWOSTEP_CUDA_CHECK(cuStreamSynchronize(stream_), "cuda.OwnedStream"); }

// Of pageable memory the driver copies nothing before the stream is through, and may wait for that with a lock that
// launches of other threads need: where a kernel of this stream waits for theirs, for ever. So the wait is ours.
void copy_to_device(void* device, const void* host, std::size_t bytes, Stream stream) {
  const auto handle = static_cast<CUstream>(stream.handle);
  TWOSTEP_CUDA_CHECK(cuStreamSynchronize(handle), "cuda.copy");
  TWOSTEP_CUDA_CHECK(cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(device), host, bytes, handle), "cuda.copy");
  TWOSTEP_CUDA_CHECK(cuStreamSynchronize(handle), "cuda.copy");
}

void copy_to_host(void* host, const void* device, std::size_t bytes, Stream stream) {
  const auto handle = static_cast<CUstream>(stream.handle);
  TWOSTEP_CUDA_CHECK(cuStreamSynchronize(handle), "cuda.copy");
  TWOSTEP_CUDA_CHECK(cuMemcpyDtoHAsync(host, reinterpret_cast<CUdeviceptr>(device), bytes, handle), "cuda.copy");
  TWOSTEP_CUDA_CHECK(cuStreamSynchronize(handle), "cuda.copy");
}

}  // namespace twostep
