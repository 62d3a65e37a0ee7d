#include "measure/draft_chain.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/check.h"

namespace twostep {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kPlace = "measure.draft_chain";

bool same_shape(const ChainLinear& a, const ChainLinear& b) { return a.n == b.n && a.k == b.k && a.rows == b.rows; }

// The linears of a layer are neighbours, and layers follow each other.
std::vector<LinearRange> layers_of(std::span<const ChainLinear> step) {
  std::vector<LinearRange> layers;
  int last = -1;
  for (std::size_t i = 0; i < step.size(); ++i) {
    if (step[i].layer < 0) continue;
    if (step[i].layer != last) layers.push_back({i, 0});
    last = step[i].layer;
    ++layers.back().count;
  }
  return layers;
}

Json choices_json(const DraftChainRow& row) {
  Json list = Json::array();
  for (std::size_t i = 0; i < row.linears.size(); ++i) {
    const ChainLinear& linear = row.linears[i];
    const LinearChoice& choice = row.choices[i];
    list.push_back({{"layer", linear.name},
                    {"n", linear.n},
                    {"k", linear.k},
                    {"rows", linear.rows},
                    {"kind", kind_name(choice.kind)},
                    {"tactic", choice.tactic},
                    {"key", choice.key},
                    {"why_code", choice.why_code},
                    {"why", choice.why}});
  }
  return list;
}

}  // namespace

std::int64_t draft_requests(int rows) {
  constexpr int kMostRequests = 512;  // as twostep draft
  if (rows < 1 || rows > kMostRequests * kDraftTokens || rows % kDraftTokens != 0)
    fail(StatusCode::kInvalidArgument, kPlace, "rows", std::to_string(rows),
         fmt::format("multiples of {} from {} to {}", kDraftTokens, kDraftTokens, kMostRequests * kDraftTokens),
         "these are the rows of whole requests; bench gemm takes any count");
  return rows / kDraftTokens;
}

double bytes_of(std::span<const ChainLinear> step, const LinearRange& range) {
  double bytes = 0;
  for (const ChainLinear& linear : step.subspan(range.first, range.count)) bytes += linear.bytes();
  return bytes;
}

std::vector<DraftChain> draft_chains(std::span<const ChainLinear> step) {
  const std::vector<LinearRange> layers = layers_of(step);
  if (layers.empty())
    fail(StatusCode::kInvalidArgument, kPlace, "step", fmt::format("{} linears", step.size()), "one layer or more");
  const auto first = step.subspan(layers.front().first, layers.front().count);
  for (const LinearRange& layer : layers) {
    const auto here = step.subspan(layer.first, layer.count);
    if (!std::equal(first.begin(), first.end(), here.begin(), here.end(), same_shape))
      fail(StatusCode::kInvalidArgument, kPlace, "layer", here.front().name, "the shapes of " + first.front().name);
  }
  const std::size_t end = layers.back().first + layers.back().count;
  return {{"layer", layers},
          {layers.size() == 5 ? "five_layers" : fmt::format("{}_layers", layers.size()),
           {{layers.front().first, end - layers.front().first}}},
          {"step", {{0, step.size()}}}};
}

std::vector<ChainBuffer> chain_buffers(std::span<const ChainLinear> step) {
  std::vector<ChainBuffer> buffers(step.size() + 1);
  const auto hold = [](ChainBuffer& buffer, std::int64_t rows, std::int64_t columns) {
    buffer = {std::max(buffer.rows, rows), std::max(buffer.columns, columns)};
  };
  for (std::size_t i = 0; i < step.size(); ++i) {
    hold(buffers[i], step[i].rows, step[i].k);
    hold(buffers[i + 1], step[i].rows, step[i].n);
  }
  return buffers;
}

double DraftChainRow::bytes() const { return bytes_of(linears, {0, linears.size()}); }

const char* DraftChainRow::verdict() const {
  switch (verdict_of(chain)) {
    case Verdict::kWin: return "win";
    case Verdict::kTie: return "tie";
    case Verdict::kLoss: return "loss";
    case Verdict::kNone: return "none";
  }
  return "unknown";
}

std::optional<double> DraftChainRow::bar() const {
  const bool named = model == "k3.1" && tp == 8 && rows == 7 && name == "five_layers" && chain.name == "early";
  return named ? std::optional(kFiveLayerBar) : std::nullopt;
}

const char* DraftChainRow::bar_verdict() const {
  if (!bar()) return "none";
  return over_limit() <= *bar() ? "holds" : "misses";
}

std::string json_line(const DraftChainRow& row, const Machine& machine) {
  // As plan_ring: four times the largest L2 that is meant.
  constexpr double kPastL2 = 240e6;
  const bool warp = std::any_of(row.choices.begin(), row.choices.end(),
                                [](const LinearChoice& choice) { return choice.kind == Kind::kWarp; });
  const auto bar = row.bar();
  Json json;
  json["case"] = {{"model", row.model}, {"layer", row.name},   {"tp", row.tp}, {"rank", row.rank},
                  {"rows", row.rows},   {"dtype", "bfloat16"}, {"ranks", 1}};
  json["choice"] = choices_json(row);
  json["origin"] = origin_json(machine);
  json["machine"] = machine_json(machine);
  json["protocol"] = {{"chain", row.chain.name},
                      {"l2", row.graph_bytes < kPastL2 ? "warm" : "cold"},
                      {"rotated_weights", row.units},
                      {"launches_per_graph", row.units * row.linears.size()},
                      {"graph", true},
                      {"pdl", row.chain.name == "early" && warp},
                      {"dependent", true},
                      {"interleaved", true},
                      {"ordinary_kernels", row.ordinary_kernels},
                      {"ordinary_time", summary_json(row.ordinary)}};
  json["time"] = summary_json(row.chain.ours);
  json["bytes"] = row.bytes();
  json["bytes_formula"] = "sum of 2 * n * k";
  json["gb_per_s"] = row.bytes() / row.chain.ours.median * 1e-3;
  json["limit"] = summary_json(row.chain.limit);
  json["percent_of_limit"] = 100 / row.over_limit();
  json["bar_over_limit"] = bar ? Json(*bar) : Json();
  json["bar_verdict"] = row.bar_verdict();
  json["baseline"] = row.baseline;
  json["baseline_time"] = summary_json(row.chain.baseline);
  json["verdict"] = row.verdict();
  json["values"] = {{"worst_of_bound", row.values.worst},
                    {"relative_norm", row.values.norm},
                    {"elements", row.values.elements},
                    {"nans", row.values.nans}};
  return json.dump() + "\n";
}

}  // namespace twostep
