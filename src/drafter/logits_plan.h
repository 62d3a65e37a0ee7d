// The last stage of the logits on a GPU: what others need of it.
#pragma once

#include "jit/compile.h"

namespace twostep {

// Throws kUnsupported where the architecture has no kernels of ours.
CompileRequest logits_request(int arch, bool cap);

}  // namespace twostep
