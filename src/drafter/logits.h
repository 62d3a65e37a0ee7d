// The last stage of the logits: what it accepts, and its CPU side (spec: draft-gemm 10.4). Pure: no driver call.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "twostep/logits.h"

namespace twostep {

struct CapAndScale {
  std::optional<float> soft_cap;
  float scale = 1;
  bool changes_nothing() const { return !soft_cap && scale == 1; }
};
void check_cap_and_scale(const CapAndScale& what);  // throws kInvalidArgument

// Operands of one run, checked. Strides in elements.
struct LogitsStep {
  const std::uint16_t* logits = nullptr;
  std::uint16_t* out = nullptr;
  std::int64_t logits_stride = 0;
  std::int64_t out_stride = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};
Status check_logits_step(const TensorView& logits, const TensorView& out, Device device, LogitsStep* step);

// What runs a checked step on one kind of device.
class LogitsPlan {
 public:
  virtual ~LogitsPlan() = default;
  virtual void run(const LogitsStep& step, Stream stream) = 0;
};
std::unique_ptr<LogitsPlan> make_cpu_logits(const CapAndScale& what);                  // logits.cpp
std::unique_ptr<LogitsPlan> make_cuda_logits(Device device, const CapAndScale& what);  // logits_plan.cpp
std::shared_ptr<void> make_cuda_logits_memory(Device device, std::size_t bytes);       // logits_plan.cpp

}  // namespace twostep
