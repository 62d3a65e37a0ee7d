#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "cli/commands.h"
#include "cli/mailbox_arguments.h"
#include "cli/progress.h"
#include "cli/seed.h"
#include "measure/mailbox_case.h"
#if TWOSTEP_CUDA
#include "measure/mailbox_cuda.h"
#endif

namespace twostep::cli {
namespace {

constexpr const char* kPlace = "twostep check mailbox";

struct MailboxCheckArguments {
  MailboxArguments group;
  std::int64_t rows = 64;
  std::string seed = "1";
  int sequences = 100;
};

int check_mailbox_command(MailboxCheckArguments& a) {
  const std::uint64_t seed = parse_seed(kPlace, a.seed);
  complete(kPlace, &a.group);
#if TWOSTEP_CUDA
  MailboxLimits limits;
  limits.rows = a.rows;
  if (a.group.cols > 0) limits.cols = limits.hidden = limits.words = a.group.cols;
  const MailboxRanks ranks{a.group.ranks, a.group.devices, transport_of(a.group)};
  const auto sequences = mailbox_sequences(seed, a.sequences, limits, op_of(a.group));
  const std::string no_nccl = why_no_nccl(ranks);
  Progress progress("check");
  const MailboxCheck result =
      check_mailbox(ranks, sequences, seed, [&](std::size_t done, std::size_t all) { progress.update(done, all); });
  progress.update(1, 1);
  fmt::print("{} ranks on {} GPU(s), {}, seed {}: bit for bit against the host, the norm within a step of BF16\n",
             ranks.ranks, ranks.gpus(), result.transport, a.seed);
  for (int op = 0; op < 3; ++op)
    fmt::print("{:<20} {:>6} calls a rank\n", op_name(static_cast<MailboxOp>(op)), result.calls[op]);
  fmt::print("of them {} from a graph, {} in place, {} with wider rows; through NCCL too: {}\n", result.captured,
             result.in_place, result.padded,
             no_nccl.empty() ? std::to_string(result.through_nccl) : "none, " + no_nccl);
  if (result.failure.empty()) {
    fmt::print("ok\n");
    return 0;
  }
  fmt::print("FAILED: {}\n    {}{} --rows {} --seed {} --sequences {}\n", result.failure, kPlace, to_options(a.group),
             a.rows, a.seed, a.sequences);
  return 1;
#else
  (void)seed;
  return 1;
#endif
}

}  // namespace

void add_check_mailbox(CLI::App& check, int& exit_code) {
  auto* mailbox = check.add_subcommand(
      "mailbox", "Mailbox: random calls, eager and from graphs, in place and not; NCCL's results beside them");
  auto a = std::make_shared<MailboxCheckArguments>();
  add_mailbox_options(*mailbox, a->group);
  mailbox->add_option("--rows", a->rows, "The most rows of a call")->check(CLI::Range(1, 256))->capture_default_str();
  mailbox
      ->add_option("--cols", a->group.cols,
                   "The most columns of a rank, hidden size and words; default: 8192, 7168 and 4096")
      ->check(CLI::Range(8, 16384));
  mailbox->add_option("--seed", a->seed, "Of calls and values")->capture_default_str();
  mailbox->add_option("--sequences", a->sequences, "Each of 1 to 5 calls, eager or a graph that is replayed")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  mailbox->callback([a, &exit_code] { exit_code = check_mailbox_command(*a); });
}

}  // namespace twostep::cli
