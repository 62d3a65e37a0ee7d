#include "measure/draft_step.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace twostep {
namespace {

using Json = nlohmann::ordered_json;

bool is_of_layers(Stage stage) { return stage >= Stage::kQkvA && stage <= Stage::kDown; }

}  // namespace

bool is_ingest(Stage stage) { return stage <= Stage::kContextCache; }

std::vector<DraftStage> draft_stages(DraftLoop& loop, const DraftLoopOptions& options) {
  const int warmup = options.steps > 2 ? 1 : 0;
  const bool gate = loop.drafter().config().mla_use_output_gate;
  std::vector<DraftStage> stages;
  for (std::size_t i = 0; i < kNumStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    if (stage == Stage::kGate && !gate) continue;
    stages.push_back({stage, summarize(loop.stage_times(stage), warmup),
                      stage_bytes(stage, model_of(loop.drafter()), gate, options.requests,
                                  options.context + options.draft_tokens, markov_reads_of(loop.drafter()))});
  }
  return stages;
}

std::vector<std::int64_t> draft_pieces(const StepModel& model, bool gate, bool ingest, std::int64_t requests,
                                       std::int64_t keys, int markov_reads) {
  std::vector<std::int64_t> pieces;
  for (std::size_t i = 0; i < kNumStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    if (is_ingest(stage) != ingest) continue;
    const std::int64_t reads = is_of_layers(stage) ? model.layers : stage == Stage::kSampling ? markov_reads : 1;
    const std::int64_t bytes = stage_bytes(stage, model, gate, requests, keys, markov_reads) / reads;
    if (bytes > 0) pieces.insert(pieces.end(), static_cast<std::size_t>(reads), bytes);
  }
  return pieces;
}

std::optional<double> DraftStepRow::bar() const {
  const bool named = model == "k3.1" && options.requests == 1 && options.draft_tokens == 7 && options.context == 4096;
  if (named && options.shard.ranks == 8) return kDraftBar;
  return named && options.shard.ranks == 1 ? std::optional(kDraftBarOfOne) : std::nullopt;
}

const char* DraftStepRow::bar_verdict() const {
  if (!bar()) return "none";
  return graphs.over_limit() <= *bar() ? "holds" : "misses";
}

std::string json_line(const DraftStepRow& row, const Machine& machine) {
  const DraftLoopOptions& o = row.options;
  const DraftGraphs& g = row.graphs;
  const auto bar = row.bar();
  Json json;
  json["case"] = {{"model", row.model},   {"layer", "draft_step"},  {"tp", o.shard.ranks},
                  {"rank", o.shard.rank}, {"requests", o.requests}, {"draft_tokens", o.draft_tokens},
                  {"context", o.context}, {"dtype", "bfloat16"},    {"ranks", 1}};
  json["origin"] = origin_json(machine);
  json["machine"] = machine_json(machine);
  json["protocol"] = {{"l2", "cold"},
                      {"graph", true},
                      {"launches_per_graph", g.launches},
                      {"pdl_edges", g.programmatic},
                      {"interleaved", true},
                      {"stages", "ordinary launches with an event after each stage"}};
  json["time"] = summary_json(g.draft);
  json["bytes"] = g.draft_bytes;
  json["bytes_formula"] =
      "weights of draft once, W2 at each draft where it does not stay on chip, cache rows of all layers";
  json["gb_per_s"] = g.draft_bytes / g.draft.median * 1e-3;
  json["limit"] = summary_json(g.draft_limit);
  json["percent_of_limit"] = 100 / g.over_limit();
  json["bar_over_limit"] = bar ? Json(*bar) : Json();
  json["bar_verdict"] = row.bar_verdict();
  json["baseline"] = row.baseline;
  json["baseline_time"] = summary_json(row.baseline_time);
  json["ingest"] = {
      {"time", summary_json(g.ingest)}, {"bytes", g.ingest_bytes}, {"limit", summary_json(g.ingest_limit)}};
  json["verify"] = {{"time", summary_json(g.verify)}};
  json["step"] = {{"time", summary_json(g.step)}};
  for (const DraftStage& stage : row.stages)
    json["stages"].push_back(
        {{"name", stage_name(stage.stage)}, {"bytes", stage.bytes}, {"time", summary_json(stage.time)}});
  return json.dump() + "\n";
}

}  // namespace twostep
