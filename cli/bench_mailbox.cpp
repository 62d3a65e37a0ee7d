#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "cli/commands.h"
#include "cli/json_file.h"
#include "cli/mailbox_arguments.h"
#include "cli/progress.h"
#include "measure/mailbox_case.h"
#if TWOSTEP_CUDA
#include "measure/mailbox_cuda.h"
#endif

namespace twostep::cli {
namespace {

constexpr const char* kPlace = "twostep bench mailbox";

struct MailboxBenchArguments {
  MailboxArguments group;
  int calls = 20;
  int replays = 200;
  std::string json;
};

#if TWOSTEP_CUDA
void print_row(const MailboxRow& row) {
  const double target = row.gpus == row.ranks ? mailbox_target_us(row.what, row.ranks).value_or(0) : 0;  // 0: none
  const RankTimes &t = row.time, &b = row.baseline_time;
  fmt::print("{:<20} {:>3} {:>6} {:>8.2f} {:>8.2f} {:>8.2f} {:>8} {:>6}  {:>8} {:>8} {:>6}\n", op_name(row.what.op),
             row.what.rows, row.what.cols, t.p50, t.p99, t.max, target > 0 ? fmt::format("{:.1f}", target) : "-",
             target > 0 ? fmt::format("{:.2f}", t.p50 / target) : "-", b.kept ? fmt::format("{:.2f}", b.p50) : "-",
             b.kept ? fmt::format("{:.2f}", b.p99) : "-", b.kept ? fmt::format("{:.2f}", b.p50 / t.p50) : "-");
}
#endif

int bench_mailbox_command(MailboxBenchArguments& a) {
  complete(kPlace, &a.group);
#if TWOSTEP_CUDA
  const MailboxRanks ranks{a.group.ranks, a.group.devices, transport_of(a.group)};
  const auto cases = mailbox_bench_cases(ranks.ranks, a.group.rows, a.group.cols, op_of(a.group));
  JsonFile json(a.json, kPlace);
  Machine machine =
      this_machine(fmt::format("{}{} --calls {} --replays {}", kPlace, to_options(a.group), a.calls, a.replays));
  Progress progress("bench");
  const auto rows = bench_mailbox(ranks, cases, a.calls, a.replays, machine,
                                  [&](std::size_t done, std::size_t all) { progress.update(done, all); });
  progress.update(1, 1);
  fmt::print("{}, driver {}, SM clock {} MHz; {} ranks on {} GPU(s), {}, up to {} CTAs; {}\n", machine.device,
             machine.driver, machine.sm_clock_mhz, ranks.ranks, ranks.gpus(), rows.front().transport, rows.front().ctas,
             machine.command);
  fmt::print("us per call in a graph of {} calls, {} replays: of each the slowest rank; target: mailbox 11.2\n",
             a.calls, a.replays);
  if (rows.front().no_baseline.empty())
    fmt::print("beside it {} with its permute, in the same run\n", rows.front().baseline);
  else fmt::print("NCCL is not measured: {}\n", rows.front().no_baseline);
  if (ranks.gpus() < ranks.ranks) fmt::print("virtual ranks: values are checked, and times say nothing of a link\n");
  fmt::print("{:<20} {:>3} {:>6} {:>8} {:>8} {:>8} {:>8} {:>6}  {:>8} {:>8} {:>6}\n", "", "M", "C", "p50", "p99", "max",
             "target", "ratio", "NCCL p50", "p99", "ratio");
  for (const MailboxRow& row : rows) {
    print_row(row);
    json.add(json_line(row, machine));
  }
  json.publish();
  return 0;
#else
  return 1;
#endif
}

}  // namespace

void add_bench_mailbox(CLI::App& bench, int& exit_code) {
  auto* mailbox =
      bench.add_subcommand("mailbox", "Mailbox in replayed graphs, against its target and NCCL in the same run");
  auto a = std::make_shared<MailboxBenchArguments>();
  add_mailbox_options(*mailbox, a->group);
  mailbox->add_option("--rows", a->group.rows, "Rows; default: 1,4,8,16,32,64")
      ->delimiter(',')
      ->check(CLI::Range(1, 256));
  mailbox
      ->add_option("--cols", a->group.cols,
                   "Columns of a rank, hidden size, words; default: 163840 / ranks, 7168, 2 for each row")
      ->check(CLI::Range(8, 163840));
  mailbox->add_option("--calls", a->calls, "Calls of one graph")->check(CLI::Range(1, 1000))->capture_default_str();
  mailbox->add_option("--replays", a->replays, "Replays")->check(CLI::Range(1, 10000))->capture_default_str();
  mailbox->add_option("--json", a->json, "Write one JSON line for each row, when all are measured");
  mailbox->callback([a, &exit_code] { exit_code = bench_mailbox_command(*a); });
}

}  // namespace twostep::cli
