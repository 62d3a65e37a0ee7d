// The warp kernel of one weight: loaded kernels by row bucket, and the launch.
#pragma once

#include <array>
#include <memory>

#include "cuda/launch.h"
#include "gemm/contract.h"
#include "gemm/tactics.h"
#include "jit/kernel_cache.h"

namespace twostep {

// A loaded kernel and all that its launch needs.
struct WarpKernel {
  Tactic tactic;
  std::shared_ptr<const CompiledKernel> compiled;
  int grid = 0;
  int threads = 0;
};

CompileRequest compile_request(const KernelText& text, int arch);

// Builds or fetches, and loads, the kernel of m's bucket into the current context.
WarpKernel load_warp_kernel(int m, const Weight& weight, const Tactic& tactic, int arch, bool allow_compile,
                            LoadReport* report);

// The TMA descriptor that the tactic reads the weight through; unused by other loads.
TensorMap warp_tensor_map(const Weight& weight, const Tactic& tactic);

// One launch. `w` is the weight, or its packed copy where the tactic reads that. A wgmma kernel reads x through a
// descriptor that is made here: host work without a driver lock. Allocates nothing.
void launch_warp(const WarpKernel& kernel, const TensorMap& map, const void* w, const Weight& weight,
                 const MatrixView& x, const MatrixView& out, bool programmatic, Stream stream);

}  // namespace twostep
