#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>
#include <memory>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "gemm/contract.h"
#include "gemm/tactics.h"
#if TWOSTEP_CUDA
#include "cuda/driver.h"
#endif

namespace twostep::cli {
namespace {

constexpr const char* kPlace = "twostep why";

struct WhyOptions {
  std::string shape;
  std::string rows;
  std::string gpu = "h200";
  std::string device;
  bool strict = false;
};

DeviceFacts facts_of(const WhyOptions& options) {
  if (options.device.empty()) return known_gpu(options.gpu);
  const std::optional<int> index = parse_device(kPlace, options.device);
  if (!index)
    fail(StatusCode::kUnsupported, kPlace, "--device", options.device, "a GPU",
         "the CPU backend serves every shape on kind 'cpu'");
#if TWOSTEP_CUDA
  return device_facts(*index);
#else
  return {};
#endif
}

// The rejected part of the grid that a sweep draws from: rule and how many tactics broke it first.
void print_rejections(int m, Shape shape, const DeviceFacts& facts) {
  std::map<std::string, int> rejected;
  int valid = 0;
  for (const Tactic& tactic : candidate_tactics(m, shape.k, facts)) {
    const Status status = tactic_valid(tactic, m, shape.n, shape.k, facts);
    if (status.ok()) ++valid;
    else ++rejected[fmt::format("{}: accepted: {}", status.argument, status.accepted)];
  }
  fmt::print("    {} tactics are valid\n", valid);
  for (const auto& [rule, count] : rejected) fmt::print("    {:>5} rejected by {}\n", count, rule);
}

// The sentence of a kind other than 'warp', from the shape alone; empty where the warp kernel is defined.
std::string shape_refusal(int m, Shape shape) {
  alignas(16) static std::uint16_t memory[8];
  const Weight weight{TensorView::matrix(memory, shape.n, shape.k), shape.n, shape.k, shape.k, false};
  if (const FallbackReason reason = warp_takes_weight(weight, 16))
    return fmt::format("{}: {}", why_name(reason.code), reason.sentence);
  return m > kMaxWarpRows ? fmt::format("{}: {}", why_name(WhyCode::kRowsAbove64), rows_sentence(m)) : std::string();
}

void explain(int m, Shape shape, const DeviceFacts& facts, bool strict) {
  const auto print = [&](Kind kind, const std::string& why) {
    fmt::print("M = {}: {}{}\n", m, kind_name(kind), why.empty() ? "" : ": " + why);
  };
  if (const std::string refusal = shape_refusal(m, shape); !refusal.empty()) return print(Kind::kCublas, refusal);
  const std::optional<TableEntry> entry = table_entry(m, shape.n, shape.k, facts);
  std::optional<Tactic> tactic;
  try {
    tactic = warp_tactic(m, shape.n, shape.k, facts, strict);
  } catch (const Error& error) {
    print(Kind::kCublas, error.what());
    return print_rejections(m, shape, facts);
  }
  const bool faster = entry && !entry->warp_wins() && !strict;
  print(faster ? Kind::kCublas : Kind::kWarp,
        faster ? fmt::format("{}: {}", why_name(WhyCode::kCublasFaster),
                             faster_sentence(facts.name, entry->rows, entry->cublas_us, entry->warp_us))
               : "");
  fmt::print("    tactic {}, {:.2f} us by the model\n", to_string(*tactic),
             model_us(*tactic, m, shape.n, shape.k, facts));
  if (entry)
    fmt::print("    table: measured at M = {}: warp {:.2f} us, cuBLAS {:.2f} us, with {}\n", entry->rows,
               entry->warp_us, entry->cublas_us, to_string(entry->tactic));
  else
    fmt::print("    table: no entry for this shape on {}; the model chose\n",
               facts.name.empty() ? "this GPU" : facts.name);
  if (strict) {
    const Family family = family_of(*tactic);
    fmt::print("    strict: {} for every row count\n", family.mma == Mma::kWgmma
                                                           ? fmt::format("wgmma, cluster_k {}", family.cluster_k)
                                                           : fmt::format("mma_sync, {} slices", family.k_slices));
  }
  print_rejections(m, shape, facts);
}

void why(const WhyOptions& options) {
  const Shape shape = parse_shape(kPlace, options.shape);
  const std::vector<int> rows = parse_rows(kPlace, options.rows);
  const DeviceFacts facts = facts_of(options);
  fmt::print("N = {}, K = {} on {}\n", shape.n, shape.k, facts.name);
  for (const int m : rows) explain(m, shape, facts, options.strict);
}

}  // namespace

void add_why(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("why", "Which kind and tactic serve a shape, and why not others");
  auto options = std::make_shared<WhyOptions>();
  command->add_option("--shape", options->shape, "N,K");
  command->add_option("--rows", options->rows, "Row counts and ranges: 1,8,16-20");
  auto* gpu = command->add_option("--gpu", options->gpu, "A known GPU model, no GPU needed")->capture_default_str();
  command->add_option("--device", options->device, "A GPU of this machine: cuda:0")->excludes(gpu);
  command->add_flag("--strict", options->strict, "One order of summation for all row counts");
  add_why_kda(*command, exit_code);
  command->callback([options, command, &exit_code] {
    if (!command->get_subcommands().empty()) return;  // that has spoken
    for (const char* name : {"--shape", "--rows"})
      if (command->count(name) == 0) throw CLI::RequiredError(name);
    why(*options);
    exit_code = 0;
  });
}

}  // namespace twostep::cli
