// One kernel launch: grid, cluster, programmatic dependent launch (PDL), TMA descriptors.
#pragma once

#include <cstdint>

#include "cuda/driver.h"

namespace twostep {

struct Launch {
  CUfunction function = nullptr;
  std::uint32_t grid_x = 1;
  std::uint32_t grid_y = 1;
  std::uint32_t grid_z = 1;
  std::uint32_t block = 1;       // threads
  std::uint32_t cluster_x = 1;   // CTAs of a cluster along x
  std::uint32_t smem_bytes = 0;  // dynamic
  bool cooperative = false;      // all CTAs are resident at once, or none starts
  bool programmatic = false;     // may start before the previous kernel of the stream has finished
};

// Enqueues one kernel. Allocates nothing. `arguments` are addresses of the parameters.
void launch(const Launch& what, Stream stream, void** arguments);

// Decides whether a launch may carry the programmatic attribute (draft-gemm 7.3): only if the last node on
// this stream is a kernel that this library put there, and every kernel of this library waits for its
// predecessor before it ends, so that completion is transitive along the chain.
class PdlChain {
 public:
  // Before a launch: `always` allows it outside capture (the caller's promise).
  static bool follows_own_kernel(CUcontext context, Stream stream, bool capturing, bool always);
  // After a launch of a kernel that keeps the rule.
  static void record(CUcontext context, Stream stream, bool capturing);
  // After anything else this thread puts on a stream through the library (cuBLAS, a memset).
  static void forget();
};

// A [rows, cols] BF16 matrix seen in boxes of box_rows x 64 columns, 128-byte swizzle; columns and rows past
// the end read as zero. `pitch` in bytes, a multiple of 16; address 16-byte aligned.
// Host work alone: may be called under capture.
TensorMap bf16_tensor_map(const void* data, std::int64_t rows, std::int64_t cols, std::int64_t pitch, int box_rows);

}  // namespace twostep
