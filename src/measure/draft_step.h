// The linears of one draft step on a GPU: each alone, and all of them in one graph.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

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
};

// Times are medians in microseconds of graph replays over cold weights.
struct DraftStepLinearResult {
  Kind kind = Kind::kWarp;
  std::string why;  // empty for 'warp'
  double microseconds = 0;
  double read_limit_us = 0;        // a kernel that only streams the weight, measured in the same run
  double cublas_us = 0;            // the same product pinned to cuBLAS; 0 where cuBLASLt is missing
  std::vector<std::uint16_t> out;  // [rows, n] BF16 of a run on x, for the caller to compare
};

struct DraftStepResult {
  std::vector<DraftStepLinearResult> linears;  // as the inputs
  double step_us = 0;                          // all linears in order, in one graph
  double step_read_limit_us = 0;               // the reader over the same weights, in one graph
  std::string device;                          // "NVIDIA H200"
};

// `progress(stage, done, all)` is called on this thread while loading, preparing and timing. Throws as DraftGemm
// does, and kOutOfMemory where the weights do not fit on the device. Restores the caller's current device.
DraftStepResult measure_draft_step_cuda(
    const DraftStepInputs& inputs, int device_index,
    const std::function<void(const std::string& stage, std::size_t done, std::size_t all)>& progress);

}  // namespace twostep
