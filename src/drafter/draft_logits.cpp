// DraftLogits. One rank: the product of DraftGemm over the rows without padding, then the last stage in place. Several:
// each its shard into its own columns, the gather around them, then the last stage.
#include <fmt/format.h>

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
    : rows_(head.shape[0]),
      vocab_(options.vocab),
      gemm_(options.mailbox ? head : rows_of(head, options.vocab), options.gemm),
      mailbox_(options.mailbox) {
  const std::int64_t rows = rows_ * (mailbox_ ? mailbox_->size() : 1);
  if (vocab_ == 0) vocab_ = rows;
  const CapAndScale what{options.soft_cap, options.scale};
  check_cap_and_scale(what);
  if (mailbox_) {
    if (vocab_ < 0 || vocab_ > rows)
      fail(StatusCode::kInvalidArgument, "logits.DraftLogits", "vocab", std::to_string(vocab_),
           fmt::format("0 to {}, the {} rows of the head on each of {} ranks", rows, rows_, mailbox_->size()));
    const std::int64_t most = mailbox_->config().max_rows;
    throw_if_error(mailbox_->accepts(MailboxOp::kAllGather, most, rows_, DType::kBF16));
    in_out_ = vocab_ == rows && what.changes_nothing();
#if TWOSTEP_CUDA
    gathered_ = make_cuda_logits_memory(head.device, static_cast<std::size_t>(2 * most * rows));
#endif
  }
  if (mailbox_ || !what.changes_nothing()) stage_.emplace(head.device, what.soft_cap, what.scale);
}

void DraftLogits::run(const TensorView& hidden, const TensorView& out, Stream stream) {
  if (mailbox_) return gather(nullptr, hidden, out, stream);
  gemm_.run(hidden, out, stream);
  if (stage_) stage_->run(out, out, stream);
}

void DraftLogits::run(const TensorView& head, const TensorView& hidden, const TensorView& out, Stream stream) {
  if (head.rank == 2 && head.shape[0] != rows_)
    fail(StatusCode::kWeightChanged, "logits.run", "head.shape[0]", std::to_string(head.shape[0]),
         std::to_string(rows_), "build a new plan for this head");
  if (mailbox_) return gather(&head, hidden, out, stream);
  gemm_.run(rows_of(head, vocab()), hidden, out, stream);
  if (stage_) stage_->run(out, out, stream);
}

// Where they are gathered is each rank's own affair: what goes over the links is the same.
void DraftLogits::gather(const TensorView* head, const TensorView& hidden, const TensorView& out, Stream stream) {
  const std::int64_t m = hidden.shape[0], width = rows_ * mailbox_->size();
  throw_if_error(mailbox_->accepts(MailboxOp::kAllGather, m, rows_, DType::kBF16));
  if (out.rank != 2 || out.shape[0] != m || out.shape[1] != vocab_ || out.dtype != DType::kBF16)
    fail(StatusCode::kInvalidArgument, "logits.run", "out", to_string(out), fmt::format("BF16[{}, {}]", m, vocab_));
  const bool in_out = in_out_ && reinterpret_cast<std::uintptr_t>(out.data) % 16 == 0 &&
                      (m <= 1 || (out.stride[0] % 8 == 0 && out.stride[0] >= width));
  const TensorView all = in_out ? out : TensorView::matrix(gathered_.get(), m, width, out.device);
  TensorView own = all;
  own.data = static_cast<std::uint16_t*>(all.data) + mailbox_->rank() * rows_;
  own.shape[1] = rows_;
  if (head) gemm_.run(*head, hidden, own, stream);
  else gemm_.run(hidden, own, stream);
  mailbox_->all_gather(own, all, stream);
  if (!in_out) stage_->run(all, out, stream);
}

}  // namespace twostep
