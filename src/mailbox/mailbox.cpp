// Mailbox: the public calls over a plan. What a call may be refused for is checked here, before any launch.
#include "twostep/mailbox.h"

#include <fmt/format.h>

#include <atomic>

#include "core/check.h"
#include "core/log.h"
#include "mailbox/contract.h"

namespace twostep {

struct Mailbox::Impl {
  MailboxConfig config;
  Device device;
  Bootstrap* bootstrap = nullptr;
  std::unique_ptr<MailboxPlan> plan;
  BoundStream stream;
  std::atomic<bool> aborted{false};
  std::atomic<bool> closed{false};

  Status status() const {
    const MailboxReport& report = plan->report();
    if (__atomic_load_n(&report.done, __ATOMIC_ACQUIRE) != 0) return status_of(report, config.peer_limit_s);
    if (aborted.load(std::memory_order_acquire))
      return refusal(StatusCode::kUnavailable, "mailbox", "the mailbox", "aborted", "no abort",
                     "close and create the mailbox on all ranks");
    return {};
  }

  // Poisoned and closed mailboxes take no call, and a call takes the stream of those before. Whether it captures.
  bool require_ready(MailboxOp op, Stream on) const {
    const std::string place = std::string("mailbox.") + mailbox_op_name(op);
    if (closed)
      fail(StatusCode::kInvalidArgument, place, "the mailbox", "closed", "an open mailbox",
           "create it again on all ranks");
    throw_if_error(status());
    const bool capturing = plan->is_capturing(on);
    stream.require(place, on, capturing);
    return capturing;
  }

  template <class Run>
  void call(MailboxOp op, Stream on, Run&& run) {
    const bool capturing = require_ready(op, on);
    run();
    stream.keep(on, capturing);
  }
};

void require_ready(const Mailbox& mailbox, MailboxOp op, Stream stream) { mailbox.impl().require_ready(op, stream); }

Mailbox::Mailbox(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Mailbox::Mailbox(Mailbox&&) noexcept = default;

Mailbox& Mailbox::operator=(Mailbox&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}

Mailbox::~Mailbox() {
  if (!impl_ || impl_->closed) return;
  log_warn("mailbox: destroyed without close(): its memory stays, since peers may still write to it");
  try {
    abort();
    impl_->plan->stop();  // calls that wait have given up
    impl_->plan->unmap();
  } catch (const std::exception& error) {
    log_warn(std::string("mailbox: all of it stays: ") + error.what());
    impl_->plan.release();
  }
}

Mailbox Mailbox::create(Bootstrap& bootstrap, const MailboxConfig& wanted, Device device) {
  auto impl = std::make_unique<Impl>();
  impl->config = wanted;
  impl->device = device;
  impl->bootstrap = &bootstrap;
  // What a rank finds wrong with its own is voted on: nobody waits for one that has gone.
  all_or_none(bootstrap, wanted.peer_limit_s, [&] {
    throw_if_error(check_mailbox_config(&impl->config, bootstrap.size()));
    if (!device.is_cuda())
      fail(StatusCode::kUnavailable, "mailbox.create", "device", to_string(device), "cuda:N",
           "a mailbox moves memory between GPUs; a CPU is one rank");
#if TWOSTEP_CUDA
    impl->plan = make_cuda_mailbox(device, impl->config);
#else
    fail(StatusCode::kUnavailable, "mailbox.create", "device", to_string(device), "none",
         "this build has no GPU rooms: build with TWOSTEP_CUDA=ON");
#endif
  });
  set_up_mailbox(bootstrap, &impl->config, *impl->plan);
  impl->config.max_ctas = impl->plan->most_ctas();
  return Mailbox(std::move(impl));
}

void Mailbox::all_gather(const TensorView& in, const TensorView& out, Stream stream) {
  GatherStep step;
  throw_if_error(check_all_gather(impl_->config, impl_->device, in, out, &step));
  impl_->call(MailboxOp::kAllGather, stream, [&] { impl_->plan->all_gather(step, stream); });
}

void Mailbox::all_gather_words(const TensorView& in, const TensorView& out, Stream stream) {
  GatherStep step;
  throw_if_error(check_all_gather_words(impl_->config, impl_->device, in, out, &step));
  impl_->call(MailboxOp::kAllGatherWords, stream, [&] { impl_->plan->all_gather_words(step, stream); });
}

void Mailbox::all_reduce_add_norm(const TensorView& in, const std::optional<TensorView>& residual,
                                  const TensorView& residual_out, const std::optional<TensorView>& gamma, float eps,
                                  const std::optional<TensorView>& norm_out, Stream stream) {
  AddNormStep step;
  throw_if_error(check_add_norm(impl_->config, impl_->device, in, residual, residual_out, gamma, eps, norm_out, &step));
  impl_->call(MailboxOp::kAllReduceAddNorm, stream, [&] { impl_->plan->all_reduce_add_norm(step, stream); });
}

Status Mailbox::accepts(MailboxOp op, std::int64_t rows, std::int64_t cols, DType dtype) const {
  return mailbox_accepts(impl_->config, op, rows, cols, dtype);
}
Status Mailbox::status() const { return impl_->status(); }
void Mailbox::check() const { throw_if_error(impl_->status()); }

void Mailbox::abort() {
  if (impl_->closed || impl_->aborted.exchange(true)) return;
  impl_->plan->abort();
}

void Mailbox::close() {
  if (impl_->closed) return;
  const Status status = tear_down_mailbox(*impl_->bootstrap, impl_->config, *impl_->plan);
  impl_->closed = true;  // not before: an abort may end what close waits for
  throw_if_error(status);
}

void Mailbox::rebind_stream(Stream stream) { impl_->stream.keep(stream, false); }
int Mailbox::rank() const { return impl_->config.rank; }
int Mailbox::size() const { return impl_->config.size; }
Device Mailbox::device() const { return impl_->device; }
const MailboxConfig& Mailbox::config() const { return impl_->config; }

}  // namespace twostep
