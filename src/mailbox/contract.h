// What a mailbox accepts, and what it says otherwise. Pure: values that are the same on all ranks alone decide.
// MailboxPlan is what runs a call that was checked.
#pragma once

#include <memory>
#include <optional>

#include "mailbox/set_up.h"

namespace twostep {

// Who makes a call. Of all_gather, NCCL takes every dtype and width, at the addresses of its elements.
enum class Carrier : std::uint8_t { kMailbox, kNccl };

// The config as create takes it; peer_limit_s is filled in.
Status check_mailbox_config(MailboxConfig* config, int size_of_group, Carrier by = Carrier::kMailbox);
Status mailbox_accepts(const MailboxConfig& config, MailboxOp op, std::int64_t rows, std::int64_t cols, DType dtype,
                       Carrier by = Carrier::kMailbox);

Status check_all_gather(const MailboxConfig& config, Device device, const TensorView& in, const TensorView& out,
                        GatherStep* step, Carrier by = Carrier::kMailbox);
Status check_all_gather_words(const MailboxConfig& config, Device device, const TensorView& in, const TensorView& out,
                              GatherStep* step, Carrier by = Carrier::kMailbox);
Status check_add_norm(const MailboxConfig& config, Device device, const TensorView& in,
                      const std::optional<TensorView>& residual, const TensorView& residual_out,
                      const std::optional<TensorView>& gamma, float eps, const std::optional<TensorView>& norm_out,
                      AddNormStep* step, Carrier by = Carrier::kMailbox);

// CTAs of a call, from its sizes and the most that are resident.
std::uint32_t mailbox_grid(MailboxOp op, std::int64_t rows, std::int64_t vectors, int most);

// Throws what a call of `op` on this stream would throw for the mailbox's own state, and binds nothing.
void require_ready(const Mailbox& mailbox, MailboxOp op, Stream stream);

// What NCCL leaves to do, as NcclPlan launches it: the rank's rows without gaps; [ranks, rows, cols] as it gathers them
// into out [rows, ranks * cols]; in gathered words, the pattern that a mailbox does not let through.
MoveStep pack_step(const void* in, std::int64_t in_stride, std::int64_t rows, std::int64_t cols, DType dtype, void* to);
MoveStep permute_step(const GatherStep& step, int ranks, const void* gathered);
MoveStep words_step(const GatherStep& step, int ranks);

const char* mailbox_op_name(MailboxOp op);  // "all_gather"
// kOk without a report.
Status status_of(const MailboxReport& report, double peer_limit_s);

// The stream of a group's calls: that of the first one, but for streams that capture, which come and go.
class BoundStream {
 public:
  // Throws kInvalidArgument for another stream.
  void require(const std::string& place, Stream stream, bool capturing) const;
  void keep(Stream stream, bool capturing) {
    if (!capturing) handle_ = stream.handle;
  }

 private:
  std::optional<void*> handle_;
};

// The GPU side of a mailbox: its kernels, its memory and that of the peers.
class MailboxPlan : public PeerMemory {
 public:
  virtual void all_gather(const GatherStep& step, Stream stream) = 0;
  virtual void all_gather_words(const GatherStep& step, Stream stream) = 0;
  virtual void all_reduce_add_norm(const AddNormStep& step, Stream stream) = 0;
  virtual bool is_capturing(Stream stream) const = 0;
  virtual const MailboxReport& report() const = 0;
  virtual void abort() = 0;
  virtual int most_ctas() const = 0;  // that are resident together
};

// Loads the kernels. Throws kUnavailable, kUnsupported (architecture), kCompileFailed, kDeviceError.
std::unique_ptr<MailboxPlan> make_cuda_mailbox(Device device, const MailboxConfig& config);  // plan.cpp

// Opens NCCL, loads the kernels, allocates. Throws kUnavailable, kUnsupported (architecture), kCompileFailed,
// kOutOfMemory, kDeviceError.
std::unique_ptr<NcclPlan> make_cuda_nccl(Device device, const MailboxConfig& config);  // nccl_plan.cpp

}  // namespace twostep
