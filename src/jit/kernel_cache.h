// Kernels in a context: one per (context, key), published once, never replaced, never unloaded.
#pragma once

#include <memory>

#include "cuda/driver.h"
#include "jit/build.h"

namespace twostep {

struct CompiledKernel {
  CompileKey key;
  CUfunction function = nullptr;
  int registers = 0;          // per thread, as the driver says
  int local_bytes = 0;        // per thread: stack and spills
  int static_smem_bytes = 0;  // per CTA
};

struct LoadReport {
  BuiltFrom from = BuiltFrom::kMemory;
  double milliseconds = 0;
};

// Whether a result says that the image itself is no good here: damaged, for another GPU or driver, or without the
// kernel. Any other failure, such as the sticky one of an earlier launch, says nothing about the build.
bool refuses_image(CUresult result);

// Builds or fetches the kernel and loads it into the current context, with room for `smem_bytes` of dynamic
// shared memory. Everything a launch needs is loaded on return. Host work; enqueues nothing; thread-safe; does
// no harm to a capture of another thread. A build that the driver refuses is made anew once. Throws as
// build_cubin, and kOutOfMemory or kDeviceError for the load.
std::shared_ptr<const CompiledKernel> load_kernel(const CompileRequest& request, int smem_bytes,
                                                  const BuildOptions& options = {}, LoadReport* report = nullptr);

}  // namespace twostep
