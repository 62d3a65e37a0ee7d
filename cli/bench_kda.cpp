#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/json_file.h"
#include "cli/kda_arguments.h"
#include "cli/progress.h"
#include "measure/bench_kda_host.h"
#if TWOSTEP_CUDA
#include "measure/bench_kda.h"
#include "measure/torch_chain.h"
#include "measure/tune_kda.h"
#endif

namespace twostep::cli {
namespace {

constexpr const char* kPlace = "twostep bench kda";

struct KdaBenchArguments {
  std::string device = "auto";
  std::vector<int> heads;
  std::vector<std::int64_t> requests;
  std::vector<int> tokens;
  std::string mode = "slots";
  int conv_len = 0;  // 0: the least of each token count
  bool dim_first = false;
  bool early_caches = false;
  bool sweep = false;
  std::string tactic;
  std::string chain;
  std::string json;
};

template <class T>
std::string list_of(const std::vector<T>& values) {
  return fmt::format("{}", fmt::join(values, ","));
}

std::string command_of(const KdaBenchArguments& a) {
  std::string text = fmt::format("{} --device {} --heads {} --requests {} --tokens {}", kPlace, a.device,
                                 list_of(a.heads), list_of(a.requests), list_of(a.tokens));
  if (a.mode != "slots") text += " --mode " + a.mode;
  if (a.conv_len > 0) text += fmt::format(" --conv-len {}", a.conv_len);
  if (a.dim_first) text += " --dim-first";
  if (a.early_caches) text += " --early-caches";
  if (!a.tactic.empty()) text += " --tactic " + a.tactic;
  if (a.sweep) text += " --sweep";
  if (!a.chain.empty()) text += " --chain " + a.chain;
  return text;
}

// Every (mode, q, H) that is asked for, in the order of the rows.
std::vector<KdaBenchOptions> benches_of(const KdaBenchArguments& a) {
  std::vector<KdaBenchOptions> benches;
  for (const bool records : {false, true}) {
    if (a.mode == (records ? "slots" : "records")) continue;
    for (const int tokens : a.tokens)
      for (const int heads : a.heads)
        benches.push_back({heads, tokens, a.conv_len > 0 ? a.conv_len : least_conv_len(tokens, records), a.dim_first,
                           a.early_caches, records});
  }
  return benches;
}

// Every key that is asked for is one that construction and prepare take: said before anything is measured.
void check_keys(const KdaBenchArguments& a) {
  for (const KdaBenchOptions& bench : benches_of(a)) check_problem_shape(problem_of(bench));
}

void print_machine(const Machine& machine) {
  fmt::print("{}, driver {}, NVRTC {}, SM clock {} MHz; {}\n", machine.device,
             machine.driver.empty() ? "-" : machine.driver, machine.nvrtc.empty() ? "-" : machine.nvrtc,
             machine.sm_clock_mhz, machine.command);
}

void print_header() {
  fmt::print("us per call, median (spread = p90 - p10); f: the bytes of kda 15.1 at the rate of their mix\n");
  fmt::print("{:<7} {:>3} {:>2} {:>4} {:>9} {:>18} {:>7} {:>9} {:<6} {}\n", "mode", "H", "q", "B", "f", "measured",
             "share", "bar", "", "tactic");
}

void print_row(const KdaRow& row) {
  const auto bar = row.bar_us();
  fmt::print("{:<7} {:>3} {:>2} {:>4} {:>9.2f} {:>9.2f} ({:>6.2f}) {:>6.1f}% {:>9} {:<6} {}{}\n",
             row.shape.records ? "records" : "slots", row.shape.heads, row.shape.tokens, row.shape.requests,
             row.floor_us(), row.time.median, row.time.spread(), 100 * row.share(),
             bar ? fmt::format("{:.2f}", *bar) : "-", bar ? row.verdict() : "-",
             row.cpu ? row.kernel : fmt::format("{} ({})", to_string(row.tactic), row.source),
             row.baseline.empty()
                 ? ""
                 : fmt::format("; chain {:.2f} ({:.2f})", row.baseline_time.median, row.baseline_time.spread()));
  std::fflush(stdout);
}

int bench_on_cpu(const KdaBenchArguments& a) {
  const Machine machine = this_machine(command_of(a));
  JsonFile json(a.json, kPlace);
  Progress progress("bench");
  progress.update(0, 1, "memory rates");
  const HostRates rates = host_rates();
  print_machine(machine);
  fmt::print("copy {:.2f} GB/s, in place {:.2f} GB/s, read and written, {} threads\n", rates.copy * 1e-3,
             rates.in_place * 1e-3, machine.threads);
  print_header();
  std::size_t done = 0;
  const std::vector<KdaBenchOptions> benches = benches_of(a);
  for (const KdaBenchOptions& bench : benches)
    for (const std::int64_t requests : a.requests) {
      progress.update(done++, benches.size() * a.requests.size(),
                      fmt::format("H {} q {} B {}", bench.heads, bench.tokens, requests));
      const KdaRow row = bench_kda_host(bench, requests, rates);
      print_row(row);
      json.add(json_line(row, machine));
    }
  json.publish();
  return 0;
}

#if TWOSTEP_CUDA
std::string table_entry_of(const KdaRow& row) {
  const KdaShape& s = row.shape;
  const KdaTask task{s.records ? StateMode::kRecords : StateMode::kSlots, s.tokens, s.heads, s.requests};
  return kda_entry_json(task, row.tactic, row.time.median).dump();
}

// Every tactic for every request count. True if some tactic served each.
bool sweep_key(KdaBench& bench, const Machine& machine, JsonFile& json, std::vector<KdaRow>& winners) {
  constexpr int kFinalists = 3;
  KdaSweep sweep = bench.sweep(kFinalists);
  for (auto& [requests, rows] : sweep.ranking)
    for (KdaRow& row : rows) {
      row.source = &row == &rows.front() ? "sweep, best" : "sweep";
      print_row(row);
      json.add(json_line(row, machine));
    }
  for (const KdaFailure& failure : sweep.failures)
    fmt::print("    failed: {}: {}\n", to_string(failure.tactic), failure.sentence);
  for (const auto& [requests, rows] : sweep.ranking) winners.push_back(rows.front());
  return !sweep.ranking.empty() && sweep.failures.empty();
}

int bench_on_gpu(const KdaBenchArguments& a, int index) {
  const std::optional<KdaTactic> tactic =
      a.tactic.empty() ? std::nullopt : std::optional(parse_tactic(kPlace, a.tactic));
  const MeasureDevice device(index);
  const std::vector<KdaBenchOptions> benches = benches_of(a);
  if (tactic)
    for (const KdaBenchOptions& bench : benches)
      throw_if_error(
          kda_tactic_valid(*tactic, bench.tokens, device.facts(),
                           kda_folded(bench.records ? StateMode::kRecords : StateMode::kSlots, bench.conv_len)));
  JsonFile json(a.json, kPlace);
  Machine machine = this_machine(command_of(a));
  std::optional<TorchChain> chain;
  if (!a.chain.empty()) chain.emplace(kKdaChain, a.chain, index);
  Progress progress("bench");
  std::size_t done = 0;
  std::map<double, double> rates;  // by writes per read
  for (const KdaBenchOptions& bench : benches) {
    const double writes = kda_writes_per_read(bench.shape(1));
    if (!rates.contains(writes)) rates[writes] = kda_mix_rate(device, writes, machine);
  }
  print_machine(machine);
  if (chain) fmt::print("chain: {}; states stored after each token\n", chain->what());
  for (const auto& [writes, rate] : rates)
    fmt::print("mix 1:{:.3g}: {:.1f} GB/s, read and written\n", writes, rate * 1e-3);
  print_header();
  std::vector<KdaRow> winners;
  bool good = true;
  for (const KdaBenchOptions& options : benches) {
    progress.update(done++, benches.size(), fmt::format("H {} q {}", options.heads, options.tokens));
    KdaBench bench(device, options, a.requests, rates.at(kda_writes_per_read(options.shape(1))));
    if (a.sweep) {
      good &= sweep_key(bench, machine, json, winners);
      continue;
    }
    bench.prepare(tactic);
    for (const std::int64_t requests : a.requests) {
      KdaRow row = bench.measure(requests);
      if (chain) {
        row.baseline_time = chain->time(chain_request(row.shape, row.ring));
        row.baseline = chain->what();
      }
      print_row(row);
      json.add(json_line(row, machine));
    }
  }
  if (!winners.empty()) fmt::print("entries of a tactics file:\n");
  for (const KdaRow& row : winners) fmt::print("  {}\n", table_entry_of(row));
  json.publish();
  return good ? 0 : 1;
}
#endif

int bench_kda(KdaBenchArguments& a) {
  const std::optional<int> device = parse_device(kPlace, a.device);
  const KdaCases cases = kda_cases();
  if (a.heads.empty()) a.heads = device ? cases.heads : std::vector{12};
  if (a.requests.empty()) a.requests = device ? cases.requests : std::vector<std::int64_t>{8};
  if (a.tokens.empty()) a.tokens = device ? cases.tokens : std::vector{1};
  for (auto* list : {&a.heads, &a.tokens}) {
    std::sort(list->begin(), list->end());
    list->erase(std::unique(list->begin(), list->end()), list->end());
  }
  std::sort(a.requests.begin(), a.requests.end());
  a.requests.erase(std::unique(a.requests.begin(), a.requests.end()), a.requests.end());
  check_keys(a);
  if (device) {
#if TWOSTEP_CUDA
    return bench_on_gpu(a, *device);
#endif
  }
  if (a.sweep || !a.tactic.empty() || !a.chain.empty())
    fail(StatusCode::kUnsupported, kPlace, "--device", a.device, "a GPU for --sweep, --tactic and --chain",
         "the CPU backend has no tactics, and the chain no kernels for it");
  return bench_on_cpu(a);
}

}  // namespace

void add_bench_kda(CLI::App& bench, int& exit_code) {
  auto* kda =
      bench.add_subcommand("kda", "PreparedKda in graphs over rotating caches, against the mix of reads and writes");
  auto a = std::make_shared<KdaBenchArguments>();
  add_list(*kda, "--heads", a->heads, "Heads on this device; default: 12,24,48,96, on a CPU 12", 1, kKdaMaxHeads);
  add_list(*kda, "--requests", a->requests, "Requests; default: 1,2,4,..128, on a CPU 8", 1, 4096);
  add_list(*kda, "--tokens", a->tokens, "Tokens of each request; default: 1,8, on a CPU 1", 1, kKdaMaxTokens);
  kda->add_option("--mode", a->mode, "State mode: slots, records (of which a verify step folds q / 2 tokens), or both")
      ->check(CLI::IsMember({"slots", "records", "both"}))
      ->capture_default_str();
  kda->add_option("--conv-len", a->conv_len,
                  "Positions of a conv line; default: 3, 2 + tokens in verify, 10 with records in decode")
      ->check(CLI::Range(3, 4096));
  kda->add_flag("--dim-first", a->dim_first, "Conv cache [slots, 3D, L]");
  kda->add_flag("--early-caches", a->early_caches, "Slots and caches are read before the previous kernel has finished");
  auto* sweep = kda->add_flag("--sweep", a->sweep, "Time every valid tactic of each key");
  kda->add_option("--tactic", a->tactic, "split,warps,pass_rows for all keys")->excludes(sweep);
  kda->add_option(
         "--chain", a->chain,
         "A Python with torch and flash-linear-attention, to time an unfused chain of public kernels beside each")
      ->excludes(sweep);
  kda->add_option("--json", a->json, "Write one JSON line for each row, when all are measured");
  kda->add_option("--device", a->device, "auto, cpu, cuda:0, ..")->capture_default_str();
  kda->callback([a, &exit_code] {
    a->device = resolve_device(a->device);
    exit_code = bench_kda(*a);
  });
}

}  // namespace twostep::cli
