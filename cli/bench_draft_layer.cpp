#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <set>
#include <tuple>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/json_file.h"
#include "cli/progress.h"
#include "drafter/linears.h"
#include "io/synth.h"
#include "measure/draft_chain.h"
#if TWOSTEP_CUDA
#include "measure/draft_layer.h"
#endif

namespace twostep::cli {
namespace {

constexpr const char* kPlace = "twostep bench draft-layer";

struct DraftLayerArguments {
  std::string model = "k3.1";
  int tp = 8;
  int rank = 0;
  int rows = 7;
  std::string json;
  std::string device = "auto";
};

// As `twostep draft` runs them.
std::vector<ChainLinear> linears_of(const DraftLayerArguments& a) {
  const std::int64_t requests = draft_requests(a.rows);
  std::vector<ChainLinear> linears;
  for (const StepLinear& linear : draft_linears(synth_preset(a.model), a.tp, a.rank))
    linears.push_back({linear.label(), linear.layer, linear.n, linear.k,
                       static_cast<int>(rows_of(linear.rows, requests, kDraftTokens))});
  return linears;
}

#if TWOSTEP_CUDA
std::string command_of(const DraftLayerArguments& a) {
  return fmt::format("{} --model {} --tp {} --rank {} --rows {} --device {}", kPlace, a.model, a.tp, a.rank, a.rows,
                     a.device);
}

std::string us(const Summary& time) {
  return time.kept > 0 ? fmt::format("{:.2f} ({:.2f})", time.median, time.spread()) : "-";
}

void print_chains(const std::vector<DraftChainRow>& rows) {
  fmt::print("us per chain, median (spread = p90 - p10); limit: a kernel that only reads the weights\n");
  fmt::print("{:<12} {:<9} {:>7} {:>8} {:>16} {:>16} {:>9} {:>11} {:>13}  {:<4}  {}\n", "linears of", "chain",
             "linears", "MB", "ours us", "cuBLAS us", "limit us", "ours/limit", "cuBLAS/limit", "", "bar");
  for (const DraftChainRow& row : rows) {
    const Chain& c = row.chain;
    const auto bar = row.bar();
    fmt::print("{:<12} {:<9} {:>7} {:>8.1f} {:>16} {:>16} {:>9.2f} {:>11.3f} {:>13}  {:<4}  {}\n", row.name, c.name,
               row.linears.size(), row.bytes() * 1e-6, us(c.ours), us(c.baseline), c.limit.median, row.over_limit(),
               c.baseline.kept > 0 ? fmt::format("{:.3f}", c.baseline.median / c.limit.median) : "-", row.verdict(),
               bar ? fmt::format("{:.2f} {}", *bar, row.bar_verdict()) : "-");
  }
}

// What served each shape of the step.
void print_choices(const DraftChainRow& step) {
  fmt::print("{:<18} {:>13} {:>4} {:<6} {}\n", "linear", "shape", "rows", "kind", "tactic or reason");
  std::set<std::tuple<std::int64_t, std::int64_t, int>> seen;
  for (std::size_t i = 0; i < step.linears.size(); ++i) {
    const ChainLinear& linear = step.linears[i];
    const LinearChoice& choice = step.choices[i];
    if (!seen.insert({linear.n, linear.k, linear.rows}).second) continue;
    fmt::print("{:<18} {:>13} {:>4} {:<6} {}\n", linear.name, fmt::format("{}x{}", linear.n, linear.k), linear.rows,
               kind_name(choice.kind), choice.kind == Kind::kWarp ? choice.tactic : choice.why);
  }
}

int bench_on_gpu(const DraftLayerArguments& a, std::vector<ChainLinear> linears, int index) {
  JsonFile json(a.json, kPlace);
  const MeasureDevice device(index);
  Machine machine = this_machine(command_of(a));
  std::vector<DraftChainRow> rows;
  {
    Progress progress("bench");
    rows = measure_draft_layer(
        device, {a.model, a.tp, a.rank, a.rows, std::move(linears)}, machine,
        [&](const std::string& stage, std::size_t done, std::size_t all) { progress.update(done, all, stage); });
  }
  fmt::print("{}, driver {}, NVRTC {}, SM clock {} MHz; {}\n", machine.device,
             machine.driver.empty() ? "-" : machine.driver, machine.nvrtc.empty() ? "-" : machine.nvrtc,
             machine.sm_clock_mhz, machine.command);
  print_chains(rows);
  print_choices(rows.back());
  for (const DraftChainRow& row : rows) json.add(json_line(row, machine));
  json.publish();
  return 0;
}
#endif

int bench_draft_layer(const DraftLayerArguments& a) {
  const std::vector<ChainLinear> linears = linears_of(a);
  const std::string device = a.device == "auto" ? "cuda:0" : a.device;  // without a GPU, the refusal says why
  const auto index = device.starts_with("cuda:") ? parse_number(std::string_view(device).substr(5), 0) : std::nullopt;
  if (!index || *index > 255)
    fail(device == "cpu" ? StatusCode::kUnsupported : StatusCode::kInvalidArgument, kPlace, "--device", a.device,
         "auto, cuda:0, cuda:1, ..",
         "the chains are graphs of GPU kernels; twostep draft times the linears of a step on a CPU");
#if TWOSTEP_CUDA
  return bench_on_gpu(a, linears, parse_device(kPlace, device).value());
#else
  fail(StatusCode::kUnavailable, kPlace, "--device", a.device, "a GPU", "this build has no GPU rooms");
#endif
}

}  // namespace

void add_bench_draft_layer(CLI::App& bench, int& exit_code) {
  auto* command = bench.add_subcommand(
      "draft-layer", "The linears of a layer, of all layers and of a draft step, each on the result of the one before");
  auto a = std::make_shared<DraftLayerArguments>();
  command->add_option("--model", a->model, "k3 or k3.1")->check(CLI::IsMember({"k3", "k3.1"}))->capture_default_str();
  command->add_option("--tp", a->tp, "Tensor-parallel size")->capture_default_str();
  command->add_option("--rank", a->rank, "The rank whose share of the weights is read")->capture_default_str();
  command->add_option("--rows", a->rows, "Rows of the block linears: requests times 7 drafted tokens")
      ->capture_default_str();
  command->add_option("--json", a->json, "Write one JSON line for each chain, when all are measured");
  command->add_option("--device", a->device, "auto, cuda:0, ..")->capture_default_str();
  command->callback([a, &exit_code] { exit_code = bench_draft_layer(*a); });
}

}  // namespace twostep::cli
