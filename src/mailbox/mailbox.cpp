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
  std::optional<void*> stream;  // of the first call
  std::atomic<bool> aborted{false};
  bool closed = false;

  Status status() const {
    if (closed) return {};
    const MailboxReport& report = plan->report();
    if (__atomic_load_n(&report.done, __ATOMIC_ACQUIRE) != 0) return status_of(report, config.peer_limit_s);
    if (aborted.load(std::memory_order_acquire))
      return refusal(StatusCode::kUnavailable, "mailbox", "the mailbox", "aborted", "no abort",
                     "close and create the mailbox on all ranks");
    return {};
  }

  // Poisoned and closed mailboxes take no call, and a call takes the stream of those before.
  void require_ready(MailboxOp op, Stream on) {
    const auto refuse = [&](const char* argument, std::string value, const char* accepted, const char* remedy) {
      fail(StatusCode::kInvalidArgument, std::string("mailbox.") + mailbox_op_name(op), argument, std::move(value),
           accepted, remedy);
    };
    if (closed) refuse("the mailbox", "closed", "an open mailbox", "create it again on all ranks");
    throw_if_error(status());
    if (!stream) stream = on.handle;
    if (*stream != on.handle && !plan->is_capturing(on))
      refuse("stream", fmt::format("{}", on.handle), "the stream of the first call, or one that captures",
             "call rebind_stream after a synchronisation");
  }
};

Mailbox::Mailbox(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Mailbox::Mailbox(Mailbox&&) noexcept = default;

Mailbox& Mailbox::operator=(Mailbox&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}

Mailbox::~Mailbox() {
  if (!impl_ || impl_->closed) return;
  log_warn("mailbox: destroyed without close(): its memory stays, since peers may still write to it");
  impl_->plan->unmap();
}

Mailbox Mailbox::create(Bootstrap& bootstrap, const MailboxConfig& wanted, Device device) {
  auto impl = std::make_unique<Impl>();
  impl->config = wanted;
  impl->device = device;
  impl->bootstrap = &bootstrap;
  // Without a number and a size there is no group to tell. All else that a rank finds wrong with its own is voted on:
  // nobody waits for one that has gone.
  throw_if_error(check_mailbox_ranks(wanted));
  all_or_none(bootstrap, wanted, [&] {
    throw_if_error(check_mailbox_config(&impl->config));
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
  impl_->require_ready(MailboxOp::kAllGather, stream);
  impl_->plan->all_gather(step, stream);
}

void Mailbox::all_gather_words(const TensorView& in, const TensorView& out, Stream stream) {
  GatherStep step;
  throw_if_error(check_all_gather_words(impl_->config, impl_->device, in, out, &step));
  impl_->require_ready(MailboxOp::kAllGatherWords, stream);
  impl_->plan->all_gather_words(step, stream);
}

void Mailbox::all_reduce_add_norm(const TensorView& in, const std::optional<TensorView>& residual,
                                  const TensorView& residual_out, const std::optional<TensorView>& gamma, float eps,
                                  const std::optional<TensorView>& norm_out, Stream stream) {
  AddNormStep step;
  throw_if_error(check_add_norm(impl_->config, impl_->device, in, residual, residual_out, gamma, eps, norm_out, &step));
  impl_->require_ready(MailboxOp::kAllReduceAddNorm, stream);
  impl_->plan->all_reduce_add_norm(step, stream);
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
  impl_->closed = true;
  throw_if_error(tear_down_mailbox(*impl_->bootstrap, impl_->config, *impl_->plan));
}

void Mailbox::rebind_stream(Stream stream) { impl_->stream = stream.handle; }
int Mailbox::rank() const { return impl_->config.rank; }
int Mailbox::size() const { return impl_->config.size; }
const MailboxConfig& Mailbox::config() const { return impl_->config; }

}  // namespace twostep
