// NcclGroup: the public calls over a plan. What a call may be refused for is checked here, before any launch.
#include <fmt/format.h>

#include "core/check.h"
#include "core/log.h"
#include "mailbox/contract.h"
#include "twostep/mailbox.h"

namespace twostep {

struct NcclGroup::Impl {
  MailboxConfig config;
  Device device;
  std::unique_ptr<NcclPlan> plan;
  BoundStream stream;
  bool closed = false;

  template <class Run>
  void call(MailboxOp op, Stream on, Run&& run) {
    const std::string place = std::string("nccl.") + mailbox_op_name(op);
    if (closed)
      fail(StatusCode::kInvalidArgument, place, "the group", "closed", "an open group", "create it again on all ranks");
    const bool capturing = plan->is_capturing(on);
    stream.require(place, on, capturing);
    run();
    stream.keep(on, capturing);
  }
};

NcclGroup::NcclGroup(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
NcclGroup::NcclGroup(NcclGroup&&) noexcept = default;

NcclGroup& NcclGroup::operator=(NcclGroup&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}

NcclGroup::~NcclGroup() {
  if (impl_ && !impl_->closed) log_warn("nccl: destroyed without close(): its communicator is aborted");
}

NcclGroup NcclGroup::create(Bootstrap& bootstrap, const MailboxConfig& wanted, Device device) {
  constexpr Carrier kBy = Carrier::kNccl;
  auto impl = std::make_unique<Impl>();
  impl->config = wanted;
  impl->device = device;
  all_or_none(bootstrap, wanted.peer_limit_s, [&] {
    throw_if_error(check_mailbox_config(&impl->config, bootstrap.size(), kBy));
    if (!device.is_cuda())
      fail(StatusCode::kUnavailable, "nccl.create", "device", to_string(device), "cuda:N", "a CPU is one rank");
#if TWOSTEP_CUDA
    impl->plan = make_cuda_nccl(device, impl->config);
#else
    fail(StatusCode::kUnavailable, "nccl.create", "device", to_string(device), "none",
         "this build has no GPU rooms: build with TWOSTEP_CUDA=ON");
#endif
  });
  set_up_nccl(bootstrap, impl->config, *impl->plan);
  return NcclGroup(std::move(impl));
}

void NcclGroup::all_gather(const TensorView& in, const TensorView& out, Stream stream) {
  GatherStep step;
  throw_if_error(check_all_gather(impl_->config, impl_->device, in, out, &step, Carrier::kNccl));
  impl_->call(MailboxOp::kAllGather, stream, [&] { impl_->plan->all_gather(step, stream); });
}

void NcclGroup::all_gather_words(const TensorView& in, const TensorView& out, Stream stream) {
  GatherStep step;
  throw_if_error(check_all_gather_words(impl_->config, impl_->device, in, out, &step, Carrier::kNccl));
  impl_->call(MailboxOp::kAllGatherWords, stream, [&] { impl_->plan->all_gather_words(step, stream); });
}

void NcclGroup::all_reduce_add_norm(const TensorView& in, const std::optional<TensorView>& residual,
                                    const TensorView& residual_out, const std::optional<TensorView>& gamma, float eps,
                                    const std::optional<TensorView>& norm_out, Stream stream) {
  AddNormStep step;
  throw_if_error(check_add_norm(impl_->config, impl_->device, in, residual, residual_out, gamma, eps, norm_out, &step,
                                Carrier::kNccl));
  impl_->call(MailboxOp::kAllReduceAddNorm, stream, [&] { impl_->plan->all_reduce_add_norm(step, stream); });
}

Status NcclGroup::accepts(MailboxOp op, std::int64_t rows, std::int64_t cols, DType dtype) const {
  return mailbox_accepts(impl_->config, op, rows, cols, dtype, Carrier::kNccl);
}
Status NcclGroup::status() const { return impl_->closed ? Status{} : impl_->plan->status(); }
void NcclGroup::check() const { throw_if_error(status()); }

void NcclGroup::close() {
  if (impl_->closed) return;
  impl_->closed = true;
  impl_->plan->close();
}

void NcclGroup::rebind_stream(Stream stream) { impl_->stream.keep(stream, false); }
int NcclGroup::rank() const { return impl_->config.rank; }
int NcclGroup::size() const { return impl_->config.size; }
const MailboxConfig& NcclGroup::config() const { return impl_->config; }

}  // namespace twostep
