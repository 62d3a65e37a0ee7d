#include "measure/check_kda.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <new>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/kda_arguments.h"
#include "cli/progress.h"
#include "cli/seed.h"
#include "measure/kda_bytes.h"
#if TWOSTEP_CUDA
#include "measure/kda_case_cuda.h"
#endif

namespace twostep::cli {
namespace {

constexpr const char* kPlace = "twostep check kda";

struct KdaCheckArguments {
  std::string device = "auto";
  std::string seed = "1";
  bool quick = false;
  bool one = false;  // a problem of the user's
  KdaProblem problem;
  int conv_len = 0;
  int window = 0;
  std::string layout = "sd";
  std::string gate = "bound";
  std::string mode = "slots";
  std::string tactic;
};

std::vector<KdaProblem> problems_of(const KdaCheckArguments& a, bool gpu) {
  const std::uint64_t seed = parse_seed(kPlace, a.seed);
  if (!a.one) return kda_problems(seed, a.quick);
  KdaProblem p = a.problem;
  p.seed = seed;
  p.window = a.window > 0 ? a.window : p.tokens;
  p.conv_len = a.conv_len > 0 ? a.conv_len : p.window > 1 ? p.window + 2 : 3;
  p.dim_first = a.layout == "ds";
  p.softplus = a.gate == "softplus";
  p.records = a.mode == "records";
  if (!a.tactic.empty()) {
    if (!gpu)
      fail(StatusCode::kUnsupported, kPlace, "--device", a.device, "a GPU for --tactic",
           "the CPU backend has no tactics");
    p.tactic = parse_tactic(kPlace, a.tactic);
  }
  check_problem_shape(p);
  return {p};
}

void print_report(const KdaCheckArguments& a, const KdaProblem& p, const KdaReport& report) {
  const KdaErrors& e = report.errors;
  fmt::print(
      "H {:>3} B {} q {} w {:>2} L {:>2} {} {:<8} {:<7} {:>4} draws, {:>6.2f} % equal, RMS {:.1e}, state {:.1e} m: "
      "{}\n",
      p.heads, p.requests, p.tokens, p.window, p.conv_len, p.dim_first ? "DS" : "SD", p.softplus ? "softplus" : "bound",
      p.records ? "records" : "slots", report.draws, 100 * e.equal_share(), e.rms(), e.worst,
      report.failure.empty() ? "ok" : "FAILED");
  if (!report.failure.empty())
    fmt::print("  {}\n    twostep check kda --device {} {}\n", report.failure, a.device, to_options(p));
  std::fflush(stdout);
}

int check_kda_command(const KdaCheckArguments& a) {
  const std::optional<int> index = parse_device(kPlace, a.device);
  const std::vector<KdaProblem> problems = problems_of(a, index.has_value());
  std::unique_ptr<KdaMemory> memory = make_host_memory();
  Progress progress("check");
#if TWOSTEP_CUDA
  std::unique_ptr<MeasureDevice> device;
  if (index) {
    device = std::make_unique<MeasureDevice>(*index);
    memory = std::make_unique<KdaCudaMemory>(*device);
    progress.update(0, problems.size(), "kernels");
    std::vector<KdaBuild> builds;
    for (const KdaProblem& problem : problems) builds.push_back(kda_build_of(problem, device->facts()));
    compile_kda(builds, device->facts());
  }
#endif
  fmt::print("device {}, seed {}: against FP64 on the host within kda 11.1 (plain), all else bit for bit\n", a.device,
             a.seed);
  std::size_t failed = 0, skipped = 0, done = 0;
  for (const KdaProblem& problem : problems) {
    progress.update(done++, problems.size(), fmt::format("H {} q {}", problem.heads, problem.tokens));
    try {
      const KdaReport report = check_problem(*memory, problem);
      print_report(a, problem, report);
      failed += !report.failure.empty();
    } catch (const std::bad_alloc&) {
      fmt::print("H {:>3} B {} q {} skipped: not enough memory\n", problem.heads, problem.requests, problem.tokens);
      ++skipped;
    }
  }
  progress.update(done, problems.size());
  fmt::print("{} cases, {} failed, {} skipped\n", problems.size(), failed, skipped);
  return failed == 0 && skipped < problems.size() ? 0 : 1;
}

}  // namespace

void add_check_kda(CLI::App& check, int& exit_code) {
  auto* kda =
      check.add_subcommand("kda", "PreparedKda: keys, layouts, gates, state modes, strides, dead and ragged requests");
  auto a = std::make_shared<KdaCheckArguments>();
  KdaProblem& p = a->problem;
  kda->add_option("--device", a->device, "auto, cpu, cuda:0, ..")->capture_default_str();
  kda->add_option("--seed", a->seed, "Of values, tables and the choice of cases")->capture_default_str();
  auto* quick = kda->add_flag("--quick", a->quick, "Two head counts and four token counts");
  // One case in place of the list; each of the following chooses it.
  auto* one = kda->add_option_group("one case");
  one->add_option("--heads", p.heads, "Heads on this device")
      ->check(CLI::Range(1, kKdaMaxHeads))
      ->capture_default_str();
  one->add_option("--requests", p.requests, "Requests")->check(CLI::Range(1, 4096))->capture_default_str();
  one->add_option("--tokens", p.tokens, "Tokens of each request")
      ->check(CLI::Range(1, kKdaMaxTokens))
      ->capture_default_str();
  one->add_option("--conv-len", a->conv_len, "Positions of a conv line; default: the least")
      ->check(CLI::Range(3, 4096));
  one->add_option("--window", a->window, "Columns of slots; default: tokens")->check(CLI::Range(1, 64));
  one->add_option("--layout", a->layout, "Conv cache: sd [slots, L, 3D] or ds [slots, 3D, L]")
      ->check(CLI::IsMember({"sd", "ds"}))
      ->capture_default_str();
  one->add_option("--gate", a->gate, "bound or softplus")
      ->check(CLI::IsMember({"bound", "softplus"}))
      ->capture_default_str();
  one->add_option("--mode", a->mode, "State mode: slots or records")
      ->check(CLI::IsMember({"slots", "records"}))
      ->capture_default_str();
  one->add_flag("--bias", p.bias, "With a conv bias");
  one->add_flag("--bf16-weights", p.bf16_weights, "Conv weight, bias and norm weight in BF16");
  one->add_flag("--padded", p.padded, "Strides wider than dense, tables larger than used");
  one->add_flag("--lengths", p.lengths, "Ragged requests");
  one->add_flag("--dead", p.dead, "Dead and bad requests among the live");
  one->add_flag("--early-caches", p.early_caches, "The kernel with early_caches");
  one->add_option("--tactic", a->tactic, "split,warps,pass_rows");
  kda->callback([a, one, quick, &exit_code] {
    a->one = one->count_all() > 0;
    if (a->one && quick->count() > 0) throw CLI::ExcludesError("--quick", "the options of one case");
    a->device = resolve_device(a->device);
    exit_code = check_kda_command(*a);
  });
}

}  // namespace twostep::cli
