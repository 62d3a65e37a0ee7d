#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>
#include <memory>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/kda_arguments.h"
#include "gemm/tactics.h"
#include "kda/tactics.h"
#include "measure/kda_bytes.h"
#include "measure/kda_case.h"
#if TWOSTEP_CUDA
#include "cuda/driver.h"
#endif

namespace twostep::cli {
namespace {

constexpr const char* kPlace = "twostep why kda";

struct KdaWhyArguments {
  std::vector<int> heads{12};
  std::vector<std::int64_t> requests{1, 8, 32, 128};
  std::vector<int> tokens{1};
  int conv_len = 0;
  std::string mode = "slots";
  std::string tactic;
  std::string gpu = "h200";
  std::string device;
};

DeviceFacts facts_of(const KdaWhyArguments& a) {
  if (a.device.empty()) return known_gpu(a.gpu);
  const std::optional<int> index = parse_device(kPlace, a.device);
  if (!index) fail(StatusCode::kUnsupported, kPlace, "--device", a.device, "a GPU", "the CPU backend has no tactics");
#if TWOSTEP_CUDA
  return device_facts(*index);
#else
  return {};
#endif
}

// The whole grid: rule and how many tactics broke it first.
void print_rejections(int tokens, const DeviceFacts& facts, int folded) {
  std::map<std::string, int> rejected;
  for (const int split : {1, 2, 4, 8})
    for (const int warps : {4, 8, 16})
      for (const int pass_rows : {1, 2, 4})
        for (const bool stream : {false, true})
          if (const Status status = kda_tactic_valid({split, warps, pass_rows, stream}, tokens, facts, folded);
              !status.ok())
            ++rejected[fmt::format("{}: accepted: {}", status.argument, status.accepted)];
  fmt::print("    {} tactics are valid\n", valid_kda_tactics(tokens, facts, folded).size());
  for (const auto& [rule, count] : rejected) fmt::print("    {:>5} rejected by {}\n", count, rule);
}

// False where the key is refused.
bool explain(int heads, KdaKey key, int conv_len, StateMode mode, const std::optional<KdaTactic>& forced,
             const DeviceFacts& facts) {
  const int folded = kda_folded(mode, conv_len);
  fmt::print("key {}: ", to_string(key));
  KdaTactic tactic;
  try {
    KdaProblem problem;
    problem.heads = heads;
    problem.requests = key.requests;
    problem.tokens = problem.window = key.tokens;
    problem.conv_len = conv_len;
    problem.records = mode == StateMode::kRecords;
    check_problem_shape(problem);
    tactic = forced ? *forced : kda_tactic(heads, key, facts, folded);
    throw_if_error(kda_tactic_valid(tactic, key.tokens, facts, folded));
  } catch (const Error& error) {
    fmt::print("refused: {}\n", error.what());
    return false;
  }
  const auto entry = kda_table_entry(heads, key, facts, mode);
  std::string source = "by the rule: no entry for this mode, these heads and tokens on this GPU";
  if (forced) source = "forced";
  else if (entry && entry->tactic == tactic)
    source = fmt::format("from the table: {:.2f} us measured at B = {}", entry->us, entry->requests);
  else if (entry) source = "by the rule: the table's tactic does not fit this GPU";
  fmt::print("{}, {}\n", to_string(tactic), source);
  fmt::print("    {} CTAs of {} threads in clusters of {}, {} bytes of shared memory each\n",
             kda_grid(heads, key.requests, tactic, facts), kda_threads(tactic), tactic.split,
             kda_smem_bytes(key.tokens, tactic, folded));
  return true;
}

bool why_kda(const KdaWhyArguments& a) {
  const DeviceFacts facts = facts_of(a);
  std::optional<KdaTactic> forced;
  if (!a.tactic.empty()) forced = parse_tactic(kPlace, a.tactic);
  const StateMode mode = a.mode == "records" ? StateMode::kRecords : StateMode::kSlots;
  bool served = true;
  for (const int heads : a.heads) {
    fmt::print("H = {}, state mode {}, on {}\n", heads, a.mode, facts.name);
    for (const int tokens : a.tokens) {
      const int conv_len = a.conv_len > 0 ? a.conv_len : least_conv_len(tokens, a.mode == "records");
      for (const std::int64_t requests : a.requests)
        served = explain(heads, {requests, tokens}, conv_len, mode, forced, facts) && served;
      print_rejections(tokens, facts, kda_folded(mode, conv_len));
    }
  }
  return served;
}

}  // namespace

void add_why_kda(CLI::App& why, int& exit_code) {
  auto* kda = why.add_subcommand("kda", "Which tactic of PreparedKda serves a key");
  auto a = std::make_shared<KdaWhyArguments>();
  add_list(*kda, "--heads", a->heads, "Heads on one GPU", 1, kKdaMaxHeads);
  add_list(*kda, "--requests", a->requests, "Requests", 1, 1 << 20);
  add_list(*kda, "--tokens", a->tokens, "Tokens of each request", 1, kKdaMaxTokens);
  kda->add_option("--conv-len", a->conv_len, "Positions of a conv line; default: the least")
      ->check(CLI::Range(3, 4096));
  kda->add_option("--mode", a->mode, "State mode: slots or records")
      ->check(CLI::IsMember({"slots", "records"}))
      ->capture_default_str();
  kda->add_option("--tactic", a->tactic, "Whether split,warps,pass_rows would be served");
  auto* gpu = kda->add_option("--gpu", a->gpu, "A known GPU model, no GPU needed")->capture_default_str();
  kda->add_option("--device", a->device, "A GPU of this machine: cuda:0")->excludes(gpu);
  kda->callback([a, &why, &exit_code] {
    refuse_options_of(why);
    exit_code = why_kda(*a) ? 0 : 1;
  });
}

}  // namespace twostep::cli
