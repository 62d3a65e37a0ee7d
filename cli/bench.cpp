#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <memory>
#include <set>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "io/cases.h"
#include "measure/bench_host.h"
#if TWOSTEP_CUDA
#include "gemm/cublas.h"
#include "measure/bench_gemm.h"
#include "measure/table_file.h"
#endif

namespace twostep::cli {
namespace {

constexpr const char* kPlace = "twostep bench gemm";

struct BenchOptions {
  std::string model = "k3.1";
  int tp = 8;
  std::vector<std::string> shapes;
  std::string rows = "1,8,16,32,64";
  std::string json;
  std::string device = "auto";
  bool strict = false;
  bool sweep = false;
  int candidates = 40;
  std::string table;
};

std::string command_of(const BenchOptions& options) {
  std::string text = fmt::format("{} --device {} --rows {}", kPlace, options.device, options.rows);
  if (options.shapes.empty()) text += fmt::format(" --model {} --tp {}", options.model, options.tp);
  for (const std::string& shape : options.shapes) text += " --shape " + shape;
  if (options.strict) text += " --strict";
  if (options.sweep) text += fmt::format(" --sweep --candidates {}", options.candidates);
  return text;
}

// What is measured: a case of the file, or a shape without a name.
std::vector<GemmCase> cases_of(const BenchOptions& options) {
  std::vector<GemmCase> cases;
  for (const std::string& text : options.shapes) {
    const Shape shape = parse_shape(kPlace, text);
    GemmCase item;
    item.n = shape.n;
    item.k = shape.k;
    item.tp = 0;
    cases.push_back(item);
  }
  if (!cases.empty()) return cases;
  std::set<Shape> seen;
  for (const GemmCase& item : gemm_cases({options.model, options.tp, {}}))
    if (seen.insert({item.n, item.k}).second) cases.push_back(item);
  if (cases.empty())
    fail(StatusCode::kInvalidArgument, kPlace, "--model, --tp", fmt::format("{}, {}", options.model, options.tp),
         "k3 or k3.1 with tp 1, 4, 8 or 16");
  return cases;
}

void name_row(BenchRow& row, const GemmCase& item) {
  row.model = item.model;
  row.layer = item.layer;
  row.tp = item.tp;
}

// Rows as JSON lines, each written when it is measured.
class JsonFile {
 public:
  explicit JsonFile(const std::string& path) : path_(path) {
    if (!path.empty()) file_.open(path);
    check();
  }
  void add(const BenchRow& row, const Machine& machine) {
    if (path_.empty()) return;
    file_ << json_lines(row, machine) << std::flush;
    check();
  }

 private:
  void check() {
    if (!path_.empty() && !file_) fail(StatusCode::kUnavailable, kPlace, "--json", path_, "a file that can be written");
  }
  std::string path_;
  std::ofstream file_;
};

const char* mark(Verdict verdict) {
  switch (verdict) {
    case Verdict::kWin: return "win";
    case Verdict::kTie: return "tie";
    case Verdict::kLoss: return "LOSS";
    case Verdict::kNone: return "-";
  }
  return "-";
}

void print_counts(const std::vector<BenchRow>& rows, const std::string& chain) {
  int counts[4] = {};
  for (const BenchRow& row : rows)
    for (const Chain& c : row.chains)
      if (c.name == chain) ++counts[static_cast<int>(verdict_of(c))];
  if (counts[0] + counts[1] + counts[2] > 0)
    fmt::print("{} chain against {}: {} wins, {} ties, {} losses\n", chain, rows.front().baseline, counts[0], counts[1],
               counts[2]);
}

void print_table(const std::vector<BenchRow>& rows, const Machine& machine) {
  fmt::print("{}, driver {}, NVRTC {}, SM clock {} MHz; {}\n", machine.device,
             machine.driver.empty() ? "-" : machine.driver, machine.nvrtc.empty() ? "-" : machine.nvrtc,
             machine.sm_clock_mhz, machine.command);
  for (const char* chain : {"early", "isolated"}) print_counts(rows, chain);
  fmt::print("us per launch, median (spread = p90 - p10); limit: a kernel that only reads the weight\n");
  fmt::print("{:<13} {:>14} {:>4} {:<6} {:<8} {:>17} {:>8} {:>8} {:>6} {:>7} {:<4} {}\n", "layer", "shape", "rows",
             "kind", "chain", "ours", "cuBLAS", "limit", "/limit", "cuBLAS/", "", "tactic or reason");
  for (const BenchRow& row : rows)
    for (const Chain& c : row.chains) {
      const bool baseline = c.baseline.kept > 0;
      fmt::print("{:<13} {:>14} {:>4} {:<6} {:<8} {:>9.2f} ({:>5.2f}) {:>8} {:>8.2f} {:>6.2f} {:>7} {:<4} {}\n",
                 row.layer.empty() ? "-" : row.layer, fmt::format("{}x{}", row.n, row.k), row.rows, kind_name(row.kind),
                 c.name, c.ours.median, c.ours.spread(), baseline ? fmt::format("{:.2f}", c.baseline.median) : "-",
                 c.limit.median, c.ours.median / c.limit.median,
                 baseline ? fmt::format("{:.2f}", c.baseline.median / c.ours.median) : "-", mark(verdict_of(c)),
                 row.kind == Kind::kWarp ? row.tactic : row.why);
    }
}

int bench_on_cpu(const BenchOptions& options) {
  const std::vector<int> row_counts = parse_rows(kPlace, options.rows);
  const std::vector<GemmCase> cases = cases_of(options);
  JsonFile json(options.json);
  const Machine machine = this_machine(command_of(options));
  Progress progress("bench");
  progress.update(0, 1, "read bandwidth");
  const double rate = HostStream().rate();
  std::vector<BenchRow> rows;
  for (const GemmCase& item : cases)
    for (const int m : row_counts) {
      progress.update(rows.size(), cases.size() * row_counts.size(), fmt::format("{},{}", item.n, item.k));
      rows.push_back(bench_host(item.n, item.k, m, rate));
      name_row(rows.back(), item);
      json.add(rows.back(), machine);
    }
  fmt::print("read bandwidth {:.2f} GB/s\n", rate * 1e-3);
  print_table(rows, machine);
  return 0;
}

#if TWOSTEP_CUDA
int bench_on_gpu(const BenchOptions& options, int index) {
  const std::vector<int> row_counts = parse_rows(kPlace, options.rows);
  const std::vector<GemmCase> cases = cases_of(options);
  JsonFile json(options.json);
  const MeasureDevice device(index);
  Machine machine = this_machine(command_of(options));
  std::vector<BenchRow> rows;
  {
    Progress progress("bench");
    for (const GemmCase& item : cases) {
      progress.update(rows.size(), cases.size() * row_counts.size(), fmt::format("{},{}", item.n, item.k));
      Options plan;
      plan.strict = options.strict;
      GemmBench bench(device, item.n, item.k, *std::max_element(row_counts.begin(), row_counts.end()), plan);
      bench.describe_under_load(machine);
      for (const int m : row_counts) {
        rows.push_back(bench.measure(m, true));
        name_row(rows.back(), item);
        json.add(rows.back(), machine);
      }
    }
  }
  print_table(rows, machine);
  return 0;
}

void print_ranking(const GemmCase& item, int bucket, const std::vector<Candidate>& ranking, const Chain& now) {
  const auto failed = std::count_if(ranking.begin(), ranking.end(), [](const auto& c) { return !c.failure.empty(); });
  fmt::print("{}x{} rows {}: limit {:.2f} us, cuBLAS {:.2f} us, now {:.2f} us, {} tried, {} failed\n", item.n, item.k,
             bucket, now.limit.median, now.baseline.median, now.ours.median, ranking.size(), failed);
  constexpr int kShown = 8;
  int shown = 0;
  for (const Candidate& c : ranking) {
    if (!c.failure.empty()) fmt::print("    failed: {}: {}\n", to_string(c.tactic), c.failure);
    else if (shown++ < kShown)
      fmt::print("  {:>8.2f} us {} (spread {:.2f}, model {:.2f})  {}\n",
                 c.full.kept > 0 ? c.full.median : c.screening.median, c.full.kept > 0 ? "full     " : "screening",
                 c.full.kept > 0 ? c.full.spread() : c.screening.spread(), c.model_us, to_string(c.tactic));
  }
  std::fflush(stdout);
}

// What a sweep searches for. Refuses what it would have to leave out.
std::set<int> sweep_buckets(const BenchOptions& options) {
  std::set<int> buckets;
  for (const int m : parse_rows(kPlace, options.rows))
    if (m <= kMaxWarpRows) buckets.insert(bucket_of(m));
  if (buckets.empty())
    fail(StatusCode::kInvalidArgument, kPlace, "--rows", options.rows,
         fmt::format("for --sweep at least one count from 1 to {}", kMaxWarpRows));
  return buckets;
}

std::vector<GemmCase> sweep_cases(const BenchOptions& options) {
  std::vector<GemmCase> cases = cases_of(options);
  for (const GemmCase& item : cases)
    if (!warp_eligible(item.n, item.k))
      fail(StatusCode::kInvalidArgument, kPlace, "--shape", fmt::format("{},{}", item.n, item.k),
           "for --sweep N a multiple of 16 and K a multiple of 64", "others are served by cuBLAS and have no tactics");
  return cases;
}

int sweep_on_gpu(const BenchOptions& options, int index) {
  constexpr int kFinalists = 6;
  const std::set<int> buckets = sweep_buckets(options);
  const std::vector<GemmCase> cases = sweep_cases(options);
  // The table says where cuBLAS is faster: without it every choice would be a guess.
  if (!options.table.empty()) throw_if_error(cublas_status());
  const MeasureDevice device(index);
  Machine machine = this_machine(command_of(options));
  device.describe(machine);
  Progress progress("sweep");
  std::size_t done = 0;
  bool failed = false;
  for (const GemmCase& item : cases) {
    std::vector<MeasuredEntry> entries;
    std::optional<GemmBench> bench;
    for (const int bucket : buckets) {
      progress.update(done++, cases.size() * buckets.size(), fmt::format("{},{} rows {}", item.n, item.k, bucket));
      if (!bench) bench.emplace(device, item.n, item.k, kMaxWarpRows);
      const std::vector<Candidate> ranking = bench->sweep(bucket, options.candidates, kFinalists);
      const Chain now = bench->measure(bucket, false).chains.front();
      print_ranking(item, bucket, ranking, now);
      if (ranking.empty() || !ranking.front().failure.empty()) {
        failed = true;
        continue;
      }
      MeasuredEntry measured;
      measured.entry = {item.n, item.k, bucket, ranking[0].tactic, ranking[0].full.median, now.baseline.median};
      measured.warp_spread_us = ranking[0].full.spread();
      measured.cublas_spread_us = now.baseline.spread();
      measured.limit_us = now.limit.median;
      measured.runner_up_us = ranking.size() > 1 ? ranking[1].full.median : 0;
      entries.push_back(measured);
    }
    if (!options.table.empty() && !entries.empty()) merge_table(options.table, machine, entries);
  }
  return failed ? 1 : 0;
}
#endif

int bench_gemm(const BenchOptions& options) {
  if (const std::optional<int> device = parse_device(kPlace, options.device)) {
#if TWOSTEP_CUDA
    return options.sweep ? sweep_on_gpu(options, *device) : bench_on_gpu(options, *device);
#endif
  }
  if (options.sweep)
    fail(StatusCode::kUnsupported, kPlace, "--device", options.device, "a GPU for --sweep",
         "the CPU backend has no tactics");
  if (options.strict)
    fail(StatusCode::kUnsupported, kPlace, "--device", options.device, "a GPU for --strict",
         "strict plans choose among tactics, and the CPU backend has none");
  return bench_on_cpu(options);
}

}  // namespace

void add_bench(CLI::App& app, int& exit_code) {
  auto* bench = app.add_subcommand("bench", "Time against cuBLAS and the limits of the memory");
  bench->require_subcommand(1);
  add_bench_kda(*bench, exit_code);
  add_bench_draft_layer(*bench, exit_code);
  auto* gemm = bench->add_subcommand("gemm", "DraftGemm in graphs over rotating weights");
  auto options = std::make_shared<BenchOptions>();
  gemm->add_option("--model", options->model, "k3 or k3.1")
      ->check(CLI::IsMember({"k3", "k3.1"}))
      ->capture_default_str();
  gemm->add_option("--tp", options->tp, "Tensor-parallel size")
      ->check(CLI::IsMember({1, 4, 8, 16}))
      ->capture_default_str();
  gemm->add_option("--shape", options->shapes, "N,K in place of a model; may be repeated")->allow_extra_args(false);
  gemm->add_option("--rows", options->rows, "Row counts and ranges: 1,8,16-20")->capture_default_str();
  auto* json = gemm->add_option("--json", options->json, "Write one JSON line for each row and chain");
  gemm->add_option("--device", options->device, "auto, cpu, cuda:0, ..")->capture_default_str();
  auto* strict = gemm->add_flag("--strict", options->strict, "Plans whose rows have the same bits for every M");
  auto* sweep = gemm->add_flag("--sweep", options->sweep, "Search tactics for the bucket of each row count")
                    ->excludes(json)
                    ->excludes(strict);
  gemm->add_option("--candidates", options->candidates, "Tactics that a sweep tries for one bucket")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str()
      ->needs(sweep);
  gemm->add_option("--table", options->table, "Merge the winners into this tactics file")->needs(sweep);
  gemm->callback([options, &exit_code] {
    options->device = resolve_device(options->device);
    exit_code = bench_gemm(*options);
  });
}

}  // namespace twostep::cli
