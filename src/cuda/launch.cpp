#include "cuda/launch.h"

namespace twostep {
namespace {

// The thread's last launch: which capture, stream and node. A graph node that was destroyed may be reused at
// the same address, so the capture's id, unique in the process, is compared too.
struct LastLaunch {
  bool valid = false;
  bool capturing = false;
  unsigned long long capture_id = 0;
  CUcontext context = nullptr;  // the default stream has one handle on every device
  void* stream = nullptr;
  CUgraphNode node = nullptr;
};
thread_local LastLaunch last_launch;

struct CaptureInfo {
  unsigned long long id = 0;
  CUgraphNode dependency = nullptr;  // the only one, by a plain edge; else null
};

CaptureInfo capture_info(Stream stream) {
  CaptureStatus status = CaptureStatus::kNone;
  CaptureInfo info;
  const CUgraphNode* dependencies = nullptr;
  const GraphEdgeData* edges = nullptr;
  std::size_t count = 0;
  const CUresult result = driver().cuStreamGetCaptureInfo(static_cast<CUstream>(stream.handle), &status, &info.id,
                                                          nullptr, &dependencies, &edges, &count);
  if (result != kCudaSuccess || status != CaptureStatus::kActive || count != 1) return info;
  const bool plain = edges == nullptr || (edges[0].from_port == 0 && edges[0].to_port == 0 && edges[0].type == 0);
  if (plain) info.dependency = dependencies[0];
  return info;
}

}  // namespace

void launch(const Launch& what, Stream stream, void** arguments) {
  LaunchAttribute attributes[3];
  LaunchConfig config;
  config.grid_x = what.grid_x;
  config.grid_y = what.grid_y;
  config.grid_z = what.grid_z;
  config.block_x = what.block;
  config.shared_bytes = what.smem_bytes;
  config.stream = static_cast<CUstream>(stream.handle);
  config.attributes = attributes;
  if (what.programmatic) {
    attributes[config.num_attributes].id = kAttributeProgrammaticStreamSerialization;
    attributes[config.num_attributes++].flag = 1;
  }
  if (what.cooperative) {
    attributes[config.num_attributes].id = kAttributeCooperative;
    attributes[config.num_attributes++].flag = 1;
  }
  if (what.cluster_x > 1) {
    attributes[config.num_attributes].id = kAttributeClusterDimension;
    attributes[config.num_attributes++].cluster = {what.cluster_x, 1, 1};
  }
  TWOSTEP_CUDA_CHECK(cuLaunchKernelEx(&config, what.function, arguments, nullptr), "cuda.launch");
}

bool PdlChain::follows_own_kernel(CUcontext context, Stream stream, bool capturing, bool always) {
  const LastLaunch& last = last_launch;
  if (!last.valid || last.capturing != capturing || last.context != context || last.stream != stream.handle)
    return false;
  if (!capturing) return always;
  const CaptureInfo info = capture_info(stream);
  return info.dependency != nullptr && info.id == last.capture_id && info.dependency == last.node;
}

void PdlChain::record(CUcontext context, Stream stream, bool capturing) {
  LastLaunch& last = last_launch;
  last.valid = true;
  last.capturing = capturing;
  last.context = context;
  last.stream = stream.handle;
  if (!capturing) return;
  const CaptureInfo info = capture_info(stream);
  last.capture_id = info.id;
  last.node = info.dependency;
  last.valid = info.dependency != nullptr;
}

void PdlChain::forget() { last_launch.valid = false; }

TensorMap bf16_tensor_map(const void* data, std::int64_t rows, std::int64_t cols, std::int64_t pitch, int box_rows) {
  constexpr int kBFloat16 = 9, kInterleaveNone = 0, kSwizzle128B = 3, kNoL2Promotion = 0, kFillZero = 0;
  TensorMap map;
  const std::uint64_t dims[2] = {static_cast<std::uint64_t>(cols), static_cast<std::uint64_t>(rows)};
  const std::uint64_t strides[1] = {static_cast<std::uint64_t>(pitch)};
  const std::uint32_t box[2] = {64, static_cast<std::uint32_t>(box_rows)};
  const std::uint32_t steps[2] = {1, 1};
  TWOSTEP_CUDA_CHECK(cuTensorMapEncodeTiled(&map, kBFloat16, 2, const_cast<void*>(data), dims, strides, box, steps,
                                            kInterleaveNone, kSwizzle128B, kNoL2Promotion, kFillZero),
                     "cuda.bf16_tensor_map");
  return map;
}

}  // namespace twostep
