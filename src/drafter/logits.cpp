#include "drafter/logits.h"

#include <fmt/format.h>

#include <cmath>

#include "core/bf16.h"
#include "core/check.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "logits.run";

Status check_matrix(const char* name, const TensorView& view, Device device) {
  const auto refuse = [&](StatusCode code, const char* field, std::string value, const char* accepted) {
    return refusal(code, kPlace, std::string(name) + field, std::move(value), accepted);
  };
  if (view.rank != 2) return refuse(StatusCode::kInvalidArgument, ".rank", std::to_string(view.rank), "2");
  if (view.dtype != DType::kBF16) return refuse(StatusCode::kUnsupported, ".dtype", dtype_name(view.dtype), "BF16");
  if (view.shape[0] < 0 || view.shape[1] < 0)
    return refuse(StatusCode::kInvalidArgument, ".shape", to_string(view), "sizes >= 0");
  if (view.device != device)
    return refusal(StatusCode::kWrongDevice, kPlace, std::string(name) + ".device", to_string(view.device),
                   to_string(device));
  if (view.shape[0] == 0 || view.shape[1] == 0) return {};
  if (view.shape[1] > 1 && view.stride[1] != 1)
    return refuse(StatusCode::kBadLayout, " column stride", std::to_string(view.stride[1]), "1");
  if (view.shape[0] > 1 && (view.stride[0] < view.shape[1] || view.stride[0] > std::int64_t{1} << 40))
    return refuse(StatusCode::kBadLayout, " row stride", std::to_string(view.stride[0]), "its columns, up to 2^40");
  if (reinterpret_cast<std::uintptr_t>(view.data) % 2 != 0)
    return refuse(StatusCode::kBadLayout, ".data", "an odd address", "multiples of 2 bytes");
  if (view.data == nullptr) return refuse(StatusCode::kInvalidArgument, ".data", "null", "memory of the view");
  return {};
}

std::int64_t row_stride(const TensorView& view) { return view.shape[0] > 1 ? view.stride[0] : view.shape[1]; }

// One past the last element.
const std::uint16_t* end_of(const TensorView& view, std::int64_t cols) {
  return static_cast<const std::uint16_t*>(view.data) + (view.shape[0] - 1) * row_stride(view) + cols;
}

class CpuLogits final : public LogitsPlan {
 public:
  explicit CpuLogits(const CapAndScale& what) : what_(what) {}

  void run(const LogitsStep& s, Stream) override {
    const float cap = what_.soft_cap.value_or(1.0f);
#pragma omp parallel for schedule(static) if (s.rows * s.cols > (1 << 16))
    for (std::int64_t i = 0; i < s.rows; ++i)
      for (std::int64_t j = 0; j < s.cols; ++j) {
        float y = bf16_to_float(s.logits[i * s.logits_stride + j]);
        if (what_.soft_cap) y = cap * std::tanh(y / cap);
        s.out[i * s.out_stride + j] = float_to_bf16(what_.scale * y);
      }
  }

 private:
  const CapAndScale what_;
};

}  // namespace

void check_cap_and_scale(const CapAndScale& what) {
  const char* place = "logits.LogitsStage";
  if (const auto cap = what.soft_cap; cap && !(std::isfinite(*cap) && *cap > 0))
    fail(StatusCode::kInvalidArgument, place, "soft_cap", fmt::format("{}", *cap), "finite values above 0",
         "leave it out for no cap");
  if (!std::isfinite(what.scale))
    fail(StatusCode::kInvalidArgument, place, "scale", fmt::format("{}", what.scale), "finite values");
}

Status check_logits_step(const TensorView& logits, const TensorView& out, Device device, LogitsStep* step) {
  if (auto status = check_matrix("logits", logits, device); !status.ok()) return status;
  if (auto status = check_matrix("out", out, device); !status.ok()) return status;
  if (out.shape[0] != logits.shape[0] || out.shape[1] > logits.shape[1])
    return refusal(StatusCode::kInvalidArgument, kPlace, "out.shape",
                   fmt::format("[{}, {}]", out.shape[0], out.shape[1]),
                   fmt::format("[{}, at most {}]", logits.shape[0], logits.shape[1]));
  *step = {static_cast<const std::uint16_t*>(logits.data),
           static_cast<std::uint16_t*>(out.data),
           row_stride(logits),
           row_stride(out),
           out.shape[0],
           out.shape[1]};
  if (step->rows == 0 || step->cols == 0) return {};
  const bool in_place = logits.data == out.data && (step->rows == 1 || step->logits_stride == step->out_stride);
  if (!in_place && end_of(logits, logits.shape[1]) > step->out && end_of(out, step->cols) > step->logits)
    return refusal(StatusCode::kOverlap, kPlace, "out", to_string(out), "memory of its own, or logits itself",
                   "give out its own memory");
  return {};
}

std::unique_ptr<LogitsPlan> make_cpu_logits(const CapAndScale& what) { return std::make_unique<CpuLogits>(what); }

}  // namespace twostep
