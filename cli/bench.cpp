#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <set>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/json_file.h"
#include "cli/progress.h"
#include "io/cases.h"
#include "measure/bench_host.h"
#if TWOSTEP_CUDA
#include "measure/bench_gemm.h"
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
};

std::string command_of(const BenchOptions& options) {
  std::string text = fmt::format("{} --device {} --rows {}", kPlace, options.device, options.rows);
  if (options.shapes.empty()) text += fmt::format(" --model {} --tp {}", options.model, options.tp);
  for (const std::string& shape : options.shapes) text += " --shape " + shape;
  if (options.strict) text += " --strict";
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
  JsonFile json(options.json, kPlace);
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
      json.add(json_lines(rows.back(), machine));
    }
  fmt::print("read bandwidth {:.2f} GB/s\n", rate * 1e-3);
  print_table(rows, machine);
  json.publish();
  return 0;
}

#if TWOSTEP_CUDA
int bench_on_gpu(const BenchOptions& options, int index) {
  const std::vector<int> row_counts = parse_rows(kPlace, options.rows);
  const std::vector<GemmCase> cases = cases_of(options);
  JsonFile json(options.json, kPlace);
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
        json.add(json_lines(rows.back(), machine));
      }
    }
  }
  print_table(rows, machine);
  json.publish();
  return 0;
}

#endif

int bench_gemm(const BenchOptions& options) {
  if (const std::optional<int> device = parse_device(kPlace, options.device)) {
#if TWOSTEP_CUDA
    return bench_on_gpu(options, *device);
#endif
  }
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
  add_bench_draft(*bench, exit_code);
  add_bench_mailbox(*bench, exit_code);
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
  gemm->add_option("--json", options->json, "Write one JSON line for each row and chain, when all are measured");
  gemm->add_option("--device", options->device, "auto, cpu, cuda:0, ..")->capture_default_str();
  gemm->add_flag("--strict", options->strict, "Plans whose rows have the same bits for every M");
  gemm->callback([options, &exit_code] {
    options->device = resolve_device(options->device);
    exit_code = bench_gemm(*options);
  });
}

}  // namespace twostep::cli
