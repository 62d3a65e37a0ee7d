// The linears of one draft step on a GPU: each alone, and all of them in one graph.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/timer.h"
#include "measure/row.h"
#include "twostep/gemm.h"

namespace twostep {

struct DraftStepLinear {
  std::string name;              // "layers.0.qkv_a"
  std::int64_t n = 0;            // output features of this rank
  std::int64_t k = 0;            // input features of this rank
  int rows = 0;                  // rows of x in this step
  std::vector<std::uint16_t> x;  // [rows, k] BF16, packed
  // Fills a host buffer [n, k], packed BF16. Called once, before anything is timed.
  std::function<void(std::span<std::uint16_t>)> read_weight;
};

struct DraftStepInputs {
  std::vector<DraftStepLinear> linears;  // in the order of a step
  int iterations = 5;                    // timed replays of each graph
  Machine machine;                       // of this_machine; the result has the GPU added
};

// Times are microseconds of graph replays over cold weights.
struct DraftStepLinearResult {
  Kind kind = Kind::kWarp;
  std::string why;          // empty for 'warp'
  std::string tactic, key;  // empty where no kernel of ours ran
  Summary time;
  Summary read_limit;              // a kernel that only streams the weight, measured in the same run
  std::string fallback;            // "cuBLASLt 13.0.2"; empty: missing
  Summary fallback_time;           // the same product pinned to cuBLAS; kept = 0 where it is missing
  std::vector<std::uint16_t> out;  // [rows, n] BF16 of a run on x, for the caller to compare
};

struct DraftStepResult {
  std::vector<DraftStepLinearResult> linears;  // as the inputs
  Summary step;                                // all linears in order, in one graph
  Summary step_read_limit;                     // the reader over the same weights, in one graph
  Machine machine;                             // clocks under load
};

// `progress(stage, done, all)` is called on this thread while loading, preparing and timing. Throws as DraftGemm
// does, and kOutOfMemory where the weights do not fit on the device. Restores the caller's current device.
DraftStepResult measure_draft_step_cuda(
    const DraftStepInputs& inputs, int device_index,
    const std::function<void(const std::string& stage, std::size_t done, std::size_t all)>& progress);

}  // namespace twostep
