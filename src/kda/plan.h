// PreparedKda on a GPU: what others need of it.
#pragma once

#include "jit/compile.h"
#include "kda/tactics.h"

namespace twostep {

// Throws kUnsupported where the architecture has no kernels of ours (kda 1.4).
CompileRequest kda_compile_request(const KdaKernelText& text, int arch);

}  // namespace twostep
