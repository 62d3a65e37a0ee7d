// Calls of a mailbox with the values that they must give, and what a measurement of them says (spec: mailbox 11). Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "measure/row.h"
#include "twostep/mailbox.h"

namespace twostep {

const char* op_name(MailboxOp op);  // "all_gather"

struct MailboxCase {
  enum class Gamma { kNone, kBF16, kF32 };
  MailboxOp op = MailboxOp::kAllGather;
  std::int64_t rows = 1;
  std::int64_t cols = 8;  // of a rank; words of all_gather_words
  std::int64_t pad = 0;   // columns behind every row, which nobody may write
  bool in_place = false;  // in is the rank's part of out; of the reduction, residual_out is residual and norm_out is in
  bool residual = false;  // of the reduction, as below
  bool integers = false;  // sums that BF16 holds exactly, in every order
  Gamma gamma = Gamma::kNone;
};
std::string to_string(const MailboxCase& c);

// One after the other, on all ranks; from a graph that is replayed, or called as they are.
struct MailboxSequence {
  std::vector<MailboxCase> calls;
  int replays = 0;  // 0: not captured
};

struct MailboxLimits {
  std::int64_t rows = 64;
  std::int64_t cols = 8192;
  std::int64_t hidden = 7168;
  std::int64_t words = 4096;
};
// Depends on its arguments alone, so that all ranks have the same. No `op`: all three.
std::vector<MailboxSequence> mailbox_sequences(std::uint64_t seed, int count, const MailboxLimits& limits,
                                               std::optional<MailboxOp> op);

// What is timed: each row count of each operation. Empty or 0: those of mailbox 11.2, a K3 vocabulary in shards, hidden
// 7168, a pair of words for each row.
std::vector<MailboxCase> mailbox_bench_cases(int ranks, const std::vector<std::int64_t>& rows, std::int64_t cols,
                                             std::optional<MailboxOp> op);

// The memory of one call on one rank. What a call does not have is empty; 32-bit words are two elements.
struct CallMemory {
  std::vector<std::uint16_t> in, out, residual, norm, gamma;
};
// Before the call: inputs by seed, with the bit patterns that are hard among them; outputs and padding are poisoned.
CallMemory memory_before(const MailboxCase& c, int ranks, int rank, std::uint64_t seed);
// Empty, or what is wrong with the memory after the call: the place, and what should be there. Gathers and sums are
// judged bit for bit, padding too; the norm within a step of BF16.
std::string wrong_after(const MailboxCase& c, int ranks, int rank, std::uint64_t seed, const CallMemory& after);

// ---- Time

// Microseconds of a call in a replayed graph: the target of mailbox 11.2. None where it states none.
std::optional<double> mailbox_target_us(const MailboxCase& c, int ranks);
std::int64_t mailbox_bytes(const MailboxCase& c);  // that a rank pushes to one peer

struct RankTimes {  // microseconds of a call: of each sample the slowest rank
  double p50 = 0, p99 = 0, max = 0;
  int kept = 0;
};
// samples[rank][i], the same i for the same replay.
RankTimes over_ranks(const std::vector<std::vector<double>>& samples);

struct MailboxRow {
  MailboxCase what;
  int ranks = 2;
  int gpus = 2;  // fewer than ranks: virtual ranks, whose times say nothing of a link
  std::string transport;
  int ctas = 0;  // the most of a call
  int calls = 20;
  RankTimes time;
  std::string baseline;     // "NCCL 2.28.9"; empty: none
  std::string no_baseline;  // why
  RankTimes baseline_time;  // with the permute, in the same run
};
std::string json_line(const MailboxRow& row, const Machine& machine);

}  // namespace twostep
