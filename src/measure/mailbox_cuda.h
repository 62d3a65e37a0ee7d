// A mailbox and NCCL on GPUs: values of calls and their time. Each rank is a thread of this process.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "measure/mailbox_case.h"

namespace twostep {

struct MailboxRanks {
  int ranks = 2;
  std::vector<int> devices;  // of rank r: devices[r % size]. Ranks of one GPU are virtual, with at most 32 CTAs each
  PeerTransport transport = PeerTransport::kAuto;
  int gpus() const { return static_cast<int>(std::set<int>(devices.begin(), devices.end()).size()); }
};

// Why NCCL cannot run beside the mailbox: it is missing, or ranks share a GPU. Empty: it can. First in a process, this
// sets NCCL_NVLS_ENABLE=0: it is measured without multicast, as the mailbox is.
std::string why_no_nccl(const MailboxRanks& ranks);

using Tell = std::function<void(std::size_t done, std::size_t all)>;

struct MailboxCheck {
  std::size_t calls[3] = {};  // by operation: of one rank, replays counted
  std::size_t captured = 0, in_place = 0, padded = 0;
  std::size_t through_nccl = 0;
  std::string transport;
  std::string failure;  // the first that was found; empty: none
};
// Every call of every sequence on every rank; gathers, and sums that are exact, through NCCL too. Throws Error where
// the group itself fails.
MailboxCheck check_mailbox(const MailboxRanks& ranks, const std::vector<MailboxSequence>& sequences, std::uint64_t seed,
                           const Tell& tell);

// Each case in a graph of `calls` calls, replayed `replays` times back to back; then NCCL the same way. A value that is
// wrong is kInternal.
std::vector<MailboxRow> bench_mailbox(const MailboxRanks& ranks, const std::vector<MailboxCase>& cases, int calls,
                                      int replays, Machine& machine, const Tell& tell);

}  // namespace twostep
