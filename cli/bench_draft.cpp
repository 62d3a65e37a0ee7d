#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "io/checkpoint.h"
#include "io/partial_file.h"
#include "io/synth.h"
#include "measure/draft_step.h"
#if TWOSTEP_CUDA
#include "measure/draft_loop_cuda.h"
#include "measure/torch_chain.h"
#endif

namespace twostep::cli {
namespace {

constexpr const char* kPlace = "twostep bench draft";

struct DraftArguments {
  std::string model = "k3.1";
  DraftLoopOptions loop = {.context = 4096, .steps = 4, .shard = {8, 0}};
  std::string chain;
  std::string json;
  std::string device = "auto";
};

#if TWOSTEP_CUDA
std::string command_of(const DraftArguments& a) {
  std::string text = fmt::format(
      "{} --model {} --tp {} --rank {} --requests {} --draft-tokens {} --context {} --device {}", kPlace, a.model,
      a.loop.shard.ranks, a.loop.shard.rank, a.loop.requests, a.loop.draft_tokens, a.loop.context, a.device);
  if (!a.chain.empty()) text += " --chain " + a.chain;
  return text;
}

// A synthetic checkpoint in memory: of gigabytes that are read once, no file is made.
struct SyntheticWeights {
  explicit SyntheticWeights(const DrafterConfig& config) {
    Progress progress("weights");
    std::vector<ExpectedTensor> all = expected_tensors(config, false);
    for (ExpectedTensor& tensor : target_tensors(config)) all.push_back(std::move(tensor));
    std::map<std::string, TensorView> views;
    for (std::size_t i = 0; i < all.size(); ++i) {
      progress.update(i, all.size(), all[i].name);
      const std::vector<std::int64_t>& shape = all[i].shape;
      std::int64_t count = 1;
      for (const std::int64_t size : shape) count *= size;
      auto& values = memory.emplace_back(static_cast<std::size_t>(count));
      fill(all[i].name, 1, 0, value_kind(all[i].name, shape), shape.back(), values);
      views[all[i].name] = shape.size() == 1 ? TensorView::dense(values.data(), DType::kBF16, {shape[0]})
                                             : TensorView::matrix(values.data(), shape[0], shape[1]);
    }
    weights.emplace(DrafterWeights::from_memory(config, views, {}));
  }
  std::vector<std::vector<std::uint16_t>> memory;
  std::optional<DrafterWeights> weights;
};

void print(const DraftStepRow& row, const Machine& machine) {
  const DraftGraphs& g = row.graphs;
  fmt::print("{}, driver {}, NVRTC {}, SM clock {} MHz; {}\n", machine.device,
             machine.driver.empty() ? "-" : machine.driver, machine.nvrtc.empty() ? "-" : machine.nvrtc,
             machine.sm_clock_mhz, machine.command);
  if (!row.baseline.empty()) fmt::print("chain: {}; the modules of draft\n", row.baseline);
  fmt::print("us per replay, median (spread = p90 - p10); {} launches, {} PDL edges; limit: kernels that only read\n",
             g.launches, g.programmatic);
  fmt::print("{:<16} {:>8} {:>16} {:>9} {:>6}  {}\n", "graph", "MB", "us", "limit us", "ratio", "bar");
  const auto line = [](const char* name, const Summary& time, double bytes, const Summary& limit,
                       const std::string& bar) {
    const bool limited = limit.kept > 0;
    fmt::print("{:<16} {:>8} {:>16} {:>9} {:>6}  {}\n", name, limited ? fmt::format("{:.1f}", bytes * 1e-6) : "-",
               fmt::format("{:.1f} ({:.1f})", time.median, time.spread()),
               limited ? fmt::format("{:.1f}", limit.median) : "-",
               limited ? fmt::format("{:.2f}", time.median / limit.median) : "-", bar);
  };
  line("draft", g.draft, g.draft_bytes, g.draft_limit,
       row.bar() ? fmt::format("{:.2f} {}", *row.bar(), row.bar_verdict()) : "-");
  if (!row.baseline.empty()) line("draft, chain", row.baseline_time, g.draft_bytes, g.draft_limit, "-");
  line("ingest", g.ingest, g.ingest_bytes, g.ingest_limit, "-");
  line("verify", g.verify, 0, {}, "-");
  line("all three", g.step, 0, {}, "-");
  fmt::print("{:<16} {:>8} {:>16}   ordinary launches with an event after each stage, all layers together\n", "stage",
             "MB", "us");
  for (const DraftStage& stage : row.stages)
    fmt::print("{:<16} {:>8} {:>16}\n", stage_name(stage.stage),
               stage.bytes > 0 ? fmt::format("{:.1f}", static_cast<double>(stage.bytes) * 1e-6) : "-",
               fmt::format("{:.1f} ({:.1f})", stage.time.median, stage.time.spread()));
}

int bench_on_gpu(const DraftArguments& a, int index) {
  std::optional<PartialFile> json;  // gets its name when all is measured: an old one is kept until then
  if (!a.json.empty()) json.emplace(a.json, kPlace);
  const MeasureDevice device(index);
  Machine machine = this_machine(command_of(a));
  std::optional<TorchChain> chain;  // refused before weights are made
  if (!a.chain.empty()) chain.emplace(kDraftChain, a.chain, index);
  auto memory = cuda_machine(device);
  std::optional<SyntheticWeights> synthetic(std::in_place, synth_preset(a.model));
  DraftLoop loop(*synthetic->weights, a.loop, {}, std::move(memory));
  synthetic.reset();
  {
    Progress progress("steps");
    for (std::int64_t i = 0; i < a.loop.steps; ++i) {
      loop.step();
      progress.update(static_cast<std::uint64_t>(i + 1), static_cast<std::uint64_t>(a.loop.steps));
    }
  }
  DraftStepRow row{a.model, a.loop, draft_stages(loop, a.loop), {}, "", {}};
  row.graphs = time_draft_graphs(device, loop, a.loop, machine);
  if (chain) {
    row.baseline_time = chain->time(chain_request(model_of(loop.drafter()), loop.drafter().config(), a.loop));
    row.baseline = chain->what();
  }
  print(row, machine);
  if (json) {
    const std::string line = json_line(row, machine);
    json->write(std::as_bytes(std::span(line)));
    json->publish();
  }
  return 0;
}
#endif

int bench_draft(const DraftArguments& a) {
  const std::string device = a.device == "auto" ? "cuda:0" : a.device;  // without a GPU, the refusal says why
  const std::optional<int> index = parse_device(kPlace, device);
  if (!index)
    fail(StatusCode::kUnsupported, kPlace, "--device", a.device, "auto, cuda:0, cuda:1, ..",
         "twostep draft times a step on a CPU");
#if TWOSTEP_CUDA
  return bench_on_gpu(a, *index);
#else
  fail(StatusCode::kUnavailable, kPlace, "--device", a.device, "a GPU", "this build has no GPU rooms");
#endif
}

}  // namespace

void add_bench_draft(CLI::App& bench, int& exit_code) {
  auto a = std::make_shared<DraftArguments>();
  auto* command = bench.add_subcommand("draft", "A whole draft step of one rank, captured, against reading its bytes");
  command->add_option("--model", a->model, "preset of synth")
      ->check(CLI::IsMember(synth_presets()))
      ->capture_default_str();
  command->add_option("--tp", a->loop.shard.ranks, "Tensor-parallel size")->capture_default_str();
  command->add_option("--rank", a->loop.shard.rank, "The rank whose shapes are run")->capture_default_str();
  command->add_option("--requests", a->loop.requests, "Requests of a step")->capture_default_str();
  command->add_option("--draft-tokens", a->loop.draft_tokens, "Tokens drafted per request")->capture_default_str();
  command->add_option("--context", a->loop.context, "Tokens of each prompt")->capture_default_str();
  command->add_option("--steps", a->loop.steps, "Steps whose stages are timed")->capture_default_str();
  command->add_option("--chain", a->chain,
                      "A Python with torch, to time the same modules over cuBLAS in one CUDA graph beside ours");
  command->add_option("--json", a->json, "Write the row as one JSON line");
  command->add_option("--device", a->device, "auto, cuda:0, ..")->capture_default_str();
  command->callback([a, &exit_code] { exit_code = bench_draft(*a); });
}

}  // namespace twostep::cli
