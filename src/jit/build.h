// Cubins of this process: the one build table, over NVRTC and the folder of the environment.
#pragma once

#include <string>

#include "jit/build_table.h"

namespace twostep {

struct BuildOptions {
  bool allow_compile = true;  // false, or TWOSTEP_JIT=0: only what memory and disk hold
  std::string cache_dir;      // "": the environment's folder, none with TWOSTEP_CACHE=0
};

// Host work, no GPU, thread-safe. Throws kUnavailable (compiling is off, or there is no NVRTC, and the kernel is
// in no cache), kUnsupported (architecture newer than NVRTC), kCompileFailed.
Built build_cubin(const CompileRequest& request, const BuildOptions& options = {});

// For a build that the driver refused; the next build_cubin makes it anew.
void discard_build(const CompileRequest& request, const Built& refused, const BuildOptions& options = {});

}  // namespace twostep
