#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/json_file.h"
#include "cli/progress.h"
#include "cli/seed.h"
#include "core/check.h"
#include "core/timer.h"
#include "drafter/sampling.h"
#include "measure/bench_host.h"
#include "measure/draft_step.h"
#include "measure/row.h"
#if TWOSTEP_CUDA
#include "measure/draft_loop_cuda.h"
#endif

namespace twostep::cli {
namespace {

constexpr const char* kPlace = "draft";
constexpr int kShown = 4;  // requests whose tokens are printed

struct DraftOptions {
  std::string checkpoint;
  DraftLoopOptions loop;
  std::string device = "auto";
  std::string method = "block";
  std::string seed_text = "1";
  std::string json;
  bool check_finite = false;
};

struct Result {
  std::vector<DraftStage> rows;
  Summary draft, ingest;              // of whole calls
  double read_rate = 0;               // bytes per microsecond
  std::optional<DraftGraphs> graphs;  // on a GPU
  double accept_length = 0;
  bool targets_own = false;  // greedy loops only
  std::vector<std::int32_t> status;
};

// Exit status where the run is whole and what it computed is not right.
constexpr int kWrong = 4;
bool is_right(const Result& result, const DraftLoopOptions& options) {
  return (options.temperature > 0 || result.targets_own) &&
         std::all_of(result.status.begin(), result.status.end(), [](std::int32_t bits) { return bits == 0; });
}

std::string status_text(std::int32_t bits) {
  std::string text;
  for (const auto& [bit, name] :
       {std::pair(kBadPage, "bad page"), std::pair(kNonFinite, "no finite logit"), std::pair(kBadInput, "bad input")})
    if (bits & bit) text += (text.empty() ? "" : ", ") + std::string(name);
  return text.empty() ? "fine" : text;
}

std::string command_of(const DraftOptions& o) {
  return fmt::format(
      "twostep draft --checkpoint {} --requests {} --draft-tokens {} --context {} --temperature {} --steps {} "
      "--method {} --tp {} --rank {} --seed {} --device {}",
      o.checkpoint, o.loop.requests, o.loop.draft_tokens, o.loop.context, o.loop.temperature, o.loop.steps, o.method,
      o.loop.shard.ranks, o.loop.shard.rank, o.loop.seed, o.device);
}

// ---- Measurement

Result measure(DraftLoop& loop, const DraftLoopOptions& options) {
  Progress progress("draft");
  for (std::int64_t i = 0; i < options.steps; ++i) {
    progress.update(static_cast<std::uint64_t>(i), static_cast<std::uint64_t>(options.steps));
    loop.step();
  }
  progress.update(static_cast<std::uint64_t>(options.steps), static_cast<std::uint64_t>(options.steps));

  Result result;
  result.rows = draft_stages(loop, options);
  const int warmup = options.steps > 2 ? 1 : 0;
  std::vector<double> draft(static_cast<std::size_t>(options.steps), 0), ingest = draft;
  for (std::size_t i = 0; i < kNumStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    const std::vector<double>& times = loop.stage_times(stage);
    for (std::size_t step = 0; step < times.size(); ++step) {
      if (is_ingest(stage)) ingest[step] += times[step];
      else if (stage != Stage::kVerify) draft[step] += times[step];
    }
  }
  result.draft = summarize(std::move(draft), warmup);
  result.ingest = summarize(std::move(ingest), warmup);
  result.accept_length = loop.accept_length();
  for (int r = 0; r < options.requests; ++r) result.status.push_back(loop.status(r));
  result.targets_own = options.temperature == 0 && loop.is_targets_own();
  return result;
}

// ---- Output

std::string share_text(std::int64_t bytes, double rate, double us) {
  return bytes == 0 ? "-" : fmt::format("{:.0f}%", 100 * static_cast<double>(bytes) / rate / us);
}

void print(const Result& result, DraftLoop& loop, const DraftOptions& options) {
  const DraftLoopOptions& o = options.loop;
  fmt::print("{}, {} requests, {} draft tokens, context {}, temperature {}, {} verification, rank {} of {}, seed {}\n",
             options.device, o.requests, o.draft_tokens, o.context, o.temperature, options.method, o.shard.rank,
             o.shard.ranks, o.seed);
  for (int r = 0; r < std::min(o.requests, kShown); ++r) {
    const auto& tokens = loop.tokens(r);
    fmt::print("request {}: last draft [{}], emitted {}: .. {}\n", r, fmt::join(loop.drafts(r), " "), loop.emitted(r),
               fmt::join(tokens.end() - std::min<std::ptrdiff_t>(8, loop.emitted(r)), tokens.end(), " "));
  }
  std::map<std::int32_t, std::vector<int>> requests_by_status;
  for (int r = 0; r < o.requests; ++r) requests_by_status[result.status[static_cast<std::size_t>(r)]].push_back(r);
  for (const auto& [bits, requests] : requests_by_status)
    fmt::print("status {}, {}: {}\n", bits, status_text(bits),
               requests_by_status.size() == 1 ? "every request" : fmt::format("request {}", fmt::join(requests, ", ")));
  fmt::print("accepted {:.2f} tokens per step, the target's own included", result.accept_length);
  if (o.temperature == 0)
    fmt::print("; what was emitted {} the target's greedy decoding", result.targets_own ? "is" : "IS NOT");
  fmt::print("\n\n{:<16} {:>10} {:>9} {:>9} {:>7}\n", "stage", "us", "MB", "GB/s", "limit");
  std::int64_t draft_bytes = 0, ingest_bytes = 0;
  for (const DraftStage& row : result.rows) {
    const auto bytes = static_cast<double>(row.bytes);
    fmt::print("{:<16} {:>10.1f} {:>9} {:>9} {:>7}\n", stage_name(row.stage), row.time.median,
               row.bytes ? fmt::format("{:.2f}", bytes * 1e-6) : "-",
               row.bytes ? fmt::format("{:.1f}", bytes * 1e-3 / row.time.median) : "-",
               share_text(row.bytes, result.read_rate, row.time.median));
    (is_ingest(row.stage) ? ingest_bytes : draft_bytes) += row.bytes;
  }
  for (const auto& [name, time, bytes] :
       {std::tuple("ingest", result.ingest, ingest_bytes), std::tuple("draft", result.draft, draft_bytes)})
    fmt::print("{:<16} {:>10.1f} {:>9.2f} {:>9.1f} {:>7}\n", name, time.median, static_cast<double>(bytes) * 1e-6,
               static_cast<double>(bytes) * 1e-3 / time.median, share_text(bytes, result.read_rate, time.median));
  fmt::print(
      "medians over steps; all layers together. limit: time to read the bytes from memory at {:.1f} GB/s, as a\n"
      "share of the time taken; above 100% they came from caches\n",
      result.read_rate * 1e-3);
  if (!result.graphs) return;
  const DraftGraphs& g = *result.graphs;
  fmt::print("these are ordinary launches with an event after each stage. Captured, {} launches, {} PDL edges:\n",
             g.launches, g.programmatic);
  for (const auto& [name, time, limit] :
       {std::tuple("draft", g.draft, g.draft_limit), std::tuple("ingest", g.ingest, g.ingest_limit),
        std::tuple("verify", g.verify, Summary{}), std::tuple("all three", g.step, Summary{})})
    fmt::print("{:<16} {:>10.1f} us{}\n", name, time.median,
               limit.kept == 0 ? ""
                               : fmt::format(", {:.2f} of {:.1f} us to only read its bytes", time.median / limit.median,
                                             limit.median));
}

nlohmann::ordered_json to_json(const Result& result, DraftLoop& loop, const DraftOptions& options,
                               const Machine& machine) {
  const DraftLoopOptions& o = options.loop;
  nlohmann::ordered_json out = {{"origin", origin_json(machine)},
                                {"machine", machine_json(machine)},
                                {"device", options.device},
                                {"protocol", result.graphs ? "steps in a row, an event after each stage"
                                                           : "steps in a row, host clock between stages"},
                                {"checkpoint", options.checkpoint},
                                {"requests", o.requests},
                                {"draft_tokens", o.draft_tokens},
                                {"context", o.context},
                                {"temperature", o.temperature},
                                {"method", options.method},
                                {"steps", o.steps},
                                {"tp", o.shard.ranks},
                                {"rank", o.shard.rank},
                                {"seed", o.seed},
                                {"accept_length", result.accept_length},
                                {"read_gb_per_s", result.read_rate * 1e-3}};
  if (o.temperature == 0) out["is_targets_own"] = result.targets_own;
  out["status"] = result.status;
  for (int r = 0; r < o.requests; ++r) {
    const auto& tokens = loop.tokens(r);
    out["emitted"].push_back(std::vector(tokens.end() - static_cast<std::ptrdiff_t>(loop.emitted(r)), tokens.end()));
  }
  for (const DraftStage& row : result.rows)
    out["stages"].push_back({{"name", stage_name(row.stage)}, {"bytes", row.bytes}, {"time", summary_json(row.time)}});
  out["draft"] = summary_json(result.draft);
  out["ingest"] = summary_json(result.ingest);
  if (result.graphs) {
    const DraftGraphs& g = *result.graphs;
    out["graphs"] = {{"draft", summary_json(g.draft)},   {"draft_limit", summary_json(g.draft_limit)},
                     {"ingest", summary_json(g.ingest)}, {"ingest_limit", summary_json(g.ingest_limit)},
                     {"verify", summary_json(g.verify)}, {"step", summary_json(g.step)},
                     {"launches", g.launches},           {"pdl_edges", g.programmatic}};
  }
  return out;
}

int run_draft(DraftOptions options) {
  options.loop.seed = parse_seed(kPlace, options.seed_text);
  if (options.method != "block" && options.method != "standard")
    fail(StatusCode::kInvalidArgument, kPlace, "--method", options.method, "block, standard");
  options.loop.method = options.method == "block" ? VerifyMethod::kBlock : VerifyMethod::kStandard;
  options.device = resolve_device(options.device);
  const std::optional<int> gpu = parse_device(kPlace, options.device);
  // Then all is greedy, the toy target and the judgement too.
  if (options.loop.temperature >= 0 && is_greedy(options.loop.temperature)) options.loop.temperature = 0;
  JsonFile json(options.json, kPlace);
  DrafterWeights::Options weight_options;
  weight_options.check_finite = options.check_finite;
  const DrafterWeights weights = DrafterWeights::load(options.checkpoint, weight_options);
  Machine machine = this_machine(command_of(options));
#if TWOSTEP_CUDA
  const std::optional<MeasureDevice> device = gpu ? std::optional<MeasureDevice>(std::in_place, *gpu) : std::nullopt;
  auto memory = device ? cuda_machine(*device) : host_machine();
#else
  auto memory = host_machine();
#endif
  std::optional<DraftLoop> loop;
  {
    Progress progress("load");
    loop.emplace(
        weights, options.loop, [&](std::uint64_t done, std::uint64_t all) { progress.update(done, all); },
        std::move(memory));
  }
  Result result = measure(*loop, options.loop);
#if TWOSTEP_CUDA
  if (device) {
    result.graphs = time_draft_graphs(*device, *loop, options.loop, machine);
    result.read_rate = result.graphs->draft_bytes / result.graphs->draft_limit.median;
  }
#endif
  if (!gpu) result.read_rate = HostStream().rate();
  print(result, *loop, options);
  // A path need not be UTF-8; JSON must be.
  json.add(
      to_json(result, *loop, options, machine).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) +
      "\n");
  json.publish();
  return is_right(result, options.loop) ? 0 : kWrong;
}

}  // namespace

void add_draft(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<DraftOptions>();
  CLI::App* command =
      app.add_subcommand("draft", "run whole draft steps of a checkpoint against a toy target, and time their stages");
  DraftLoopOptions& loop = options->loop;
  command->add_option("--checkpoint", options->checkpoint, "folder of config.json and model.safetensors")->required();
  command->add_option("--requests", loop.requests, "requests of each step")->capture_default_str();
  command->add_option("--draft-tokens", loop.draft_tokens, "tokens drafted per request")->capture_default_str();
  command->add_option("--context", loop.context, "tokens of each prompt")->capture_default_str();
  command->add_option("--temperature", loop.temperature, "of drafts and target; below 1e-5: greedy")
      ->capture_default_str();
  command->add_option("--steps", loop.steps, "draft, verify, ingest")->capture_default_str();
  command->add_option("--method", options->method, "verification: block or standard")->capture_default_str();
  command->add_option("--tp", loop.shard.ranks, "tensor-parallel size")->capture_default_str();
  command->add_option("--rank", loop.shard.rank, "act as this rank: partial results, for timing")
      ->capture_default_str();
  command->add_option("--device", options->device, "auto, cpu, cuda:0, ..")->capture_default_str();
  command->add_option("--seed", options->seed_text, "of prompts, features and draws")->capture_default_str();
  command->add_flag("--check-finite", options->check_finite, "refuse weights that are NaN or infinite, by name");
  command->add_option("--json", options->json, "file for the result");
  command->callback([options, &exit_code] { exit_code = run_draft(*options); });
}

}  // namespace twostep::cli
