// The linears of a draft step on a GPU, each on the result of the one before: DraftGemm as users run it against cuBLAS
// and the read limit (draft-gemm 7.5, 12.1).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "measure/chain.h"
#include "measure/draft_chain.h"

namespace twostep {

struct DraftLayerInputs {
  std::string model;
  int tp = 1;
  int rank = 0;
  int rows = 0;                      // of the block linears
  std::vector<ChainLinear> linears;  // in the order of a step
};

// Each chain of draft_chains, early and isolated. All graphs of a chain are replayed in turn. A unit begins after an
// ordinary small kernel, as a step does in a model; in the isolated chain so does each linear; the time of these
// kernels alone is subtracted. Random weights, a distinct one for each linear. Checks the values of a replay first: a
// wrong kernel is kInternal and has no speed. Describes the GPU while it is busy. Throws as DraftGemm does, and
// kOutOfMemory where the weights do not fit.
std::vector<DraftChainRow> measure_draft_layer(
    const MeasureDevice& device, const DraftLayerInputs& inputs, Machine& machine,
    const std::function<void(const std::string& stage, std::size_t done, std::size_t all)>& progress,
    Replays replays = {});

}  // namespace twostep
