// What a mailbox accepts, and what it says otherwise. Pure: values that are the same on all ranks alone decide.
#pragma once

#include "mailbox/protocol.h"

namespace twostep {

// The config as create takes it; peer_limit_s is filled in. `device_limit`: ranks 2 to 8.
Status check_mailbox_config(MailboxConfig* config);
Status mailbox_accepts(const MailboxConfig& config, MailboxOp op, std::int64_t rows, std::int64_t cols, DType dtype);

struct GatherStep {
  const void* in = nullptr;
  void* out = nullptr;
  std::int64_t in_stride = 0;
  std::int64_t out_stride = 0;
  std::uint32_t rows = 0;
  std::uint32_t cols = 0;  // of one rank; words of all_gather_words
};
Status check_all_gather(const MailboxConfig& config, Device device, const TensorView& in, const TensorView& out,
                        GatherStep* step);
Status check_all_gather_words(const MailboxConfig& config, Device device, const TensorView& in, const TensorView& out,
                              GatherStep* step);
Status check_add_norm(const MailboxConfig& config, Device device, const TensorView& in,
                      const std::optional<TensorView>& residual, const TensorView& residual_out,
                      const std::optional<TensorView>& gamma, float eps, const std::optional<TensorView>& norm_out,
                      AddNormStep* step);

// CTAs of a call, from its sizes and the most that are resident.
std::uint32_t mailbox_grid(MailboxOp op, std::int64_t rows, std::int64_t vectors, int most);

const char* mailbox_op_name(MailboxOp op);  // "all_gather"
// kOk without a report.
Status status_of(const MailboxReport& report, double peer_limit_s);

}  // namespace twostep
