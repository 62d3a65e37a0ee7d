// DraftMachine on a GPU, and the last step of a loop in graphs.
#pragma once

#include <memory>

#include "measure/chain.h"
#include "measure/draft_step.h"

namespace twostep {

// `device` must outlive it. Stages are timed by events between ordinary launches, which the GPU finds enqueued: it
// reads ballast while the host is at it. Weights come from device memory after that, as in a step of a model.
std::unique_ptr<DraftMachine> cuda_machine(const MeasureDevice& device);

// After a step of a loop on that machine. Readers of the same bytes are timed in turn with the graphs; the fastest is
// the limit. Describes the GPU while it is busy. The drafter's observer hears of nothing afterwards.
DraftGraphs time_draft_graphs(const MeasureDevice& device, DraftLoop& loop, const DraftLoopOptions& options,
                              Machine& machine, Replays replays = {});

}  // namespace twostep
