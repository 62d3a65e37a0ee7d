// The draft step's kernels on a GPU: what `compile` needs of them.
#pragma once

#include <vector>

#include "drafter/device_phases.h"

namespace twostep {

// Every kernel of the step for one architecture. Throws kUnsupported where it, or the model, has none of ours.
std::vector<CompileRequest> step_kernel_requests(const StepKernelModel& model, int arch);

StepGpu step_gpu(const DeviceFacts& facts);

}  // namespace twostep
