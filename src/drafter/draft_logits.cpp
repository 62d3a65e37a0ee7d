// DraftLogits: the product of DraftGemm over the rows without padding, then the last stage in place.
#include "core/check.h"
#include "drafter/logits.h"

namespace twostep {
namespace {

std::unique_ptr<LogitsPlan> make_plan(Device device, const CapAndScale& what) {
  check_cap_and_scale(what);
  if (!device.is_cuda()) return make_cpu_logits(what);
#if TWOSTEP_CUDA
  return make_cuda_logits(device, what);
#else
  fail(StatusCode::kUnavailable, "logits.LogitsStage", "device", to_string(device), "cpu",
       "this build has no GPU rooms: build with TWOSTEP_CUDA=ON");
#endif
}

// The rows of a head that are no padding. Padding is never read, and the result needs no cut.
TensorView rows_of(TensorView head, std::int64_t vocab) {
  if (head.rank != 2 || vocab == 0) return head;  // DraftGemm refuses the first
  if (vocab < 0 || vocab > head.shape[0])
    fail(StatusCode::kInvalidArgument, "logits.DraftLogits", "vocab", std::to_string(vocab),
         "0 to " + std::to_string(head.shape[0]) + ", the rows of the head");
  head.shape[0] = vocab;
  return head;
}

}  // namespace

struct LogitsStage::Impl {
  Device device;
  CapAndScale what;
  std::unique_ptr<LogitsPlan> plan;
};

LogitsStage::LogitsStage(Device device, std::optional<float> soft_cap, float scale)
    : impl_(std::make_unique<Impl>(Impl{device, {soft_cap, scale}, make_plan(device, {soft_cap, scale})})) {}
LogitsStage::LogitsStage(LogitsStage&&) noexcept = default;
LogitsStage& LogitsStage::operator=(LogitsStage&&) noexcept = default;
LogitsStage::~LogitsStage() = default;

void LogitsStage::run(const TensorView& logits, const TensorView& out, Stream stream) const {
  LogitsStep step;
  throw_if_error(check_logits_step(logits, out, impl_->device, &step));
  if (step.rows == 0 || step.cols == 0 || (step.logits == step.out && impl_->what.changes_nothing())) return;
  impl_->plan->run(step, stream);
}

DraftLogits::DraftLogits(const TensorView& head, LogitsOptions options)
    : rows_(head.shape[0]), gemm_(rows_of(head, options.vocab), options.gemm) {
  const CapAndScale what{options.soft_cap, options.scale};
  check_cap_and_scale(what);
  if (!what.changes_nothing()) stage_.emplace(head.device, what.soft_cap, what.scale);
}

void DraftLogits::run(const TensorView& hidden, const TensorView& out, Stream stream) {
  gemm_.run(hidden, out, stream);
  if (stage_) stage_->run(out, out, stream);
}

void DraftLogits::run(const TensorView& head, const TensorView& hidden, const TensorView& out, Stream stream) {
  if (head.rank == 2 && head.shape[0] != rows_)
    fail(StatusCode::kWeightChanged, "logits.run", "head.shape[0]", std::to_string(head.shape[0]),
         std::to_string(rows_), "build a new plan for this head");
  gemm_.run(rows_of(head, vocab()), hidden, out, stream);
  if (stage_) stage_->run(out, out, stream);
}

}  // namespace twostep
