#include "measure/kda_row.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace twostep {

std::optional<double> KdaRow::bar_us() const {
  return cpu ? kda_cpu_bar_us(shape, copy_rate) : kda_bar_us(shape, floor_us(), early_caches);
}

const char* KdaRow::verdict() const {
  if (time.spread() > time.median / 2 || time.median < floor_us()) return "noisy";
  const auto bar = bar_us();
  if (!bar) return "none";
  return time.median <= *bar ? "holds" : "misses";
}

std::string KdaRow::mix() const { return fmt::format("1:{:.3g}", kda_writes_per_read(shape)); }

std::string json_line(const KdaRow& row, const Machine& machine) {
  nlohmann::ordered_json json;
  json["case"] = {{"model", "k3"},
                  {"layer", "kda"},
                  {"heads", row.shape.heads},
                  {"requests", row.shape.requests},
                  {"tokens", row.shape.tokens},
                  {"conv_len", row.shape.conv_len},
                  {"conv_dim_first", row.shape.dim_first},
                  {"state_mode", row.shape.records ? "records" : "slots"},
                  {"pending", row.shape.pending()},
                  {"dtype", "bfloat16, state float32"},
                  {"ranks", 1}};
  json["choice"] = {{"kind", row.cpu ? "cpu" : "kda"},
                    {"tactic", row.cpu ? "" : to_string(row.tactic)},
                    {"source", row.source},
                    {"key", row.kernel}};
  json["origin"] = origin_json(machine);
  json["machine"] = machine_json(machine);
  json["protocol"] = {{"chain", row.cpu ? "host" : "early"},
                      {"l2", "cold"},
                      {"rotated_weights", row.ring.layers},
                      {"rotated_slot_sets", row.ring.sets},
                      {"launches_per_graph", row.cpu ? 1 : row.ring.launches},
                      {"graph", !row.cpu},
                      {"pdl", !row.cpu},
                      {"early_caches", row.early_caches}};
  json["time"] = summary_json(row.time);
  json["bytes"] = row.bytes();
  json["bytes_formula"] = "kda 15.1";
  json["gb_per_s"] = row.bytes() / row.time.median * 1e-3;
  json["limit"] = {{"mix", row.mix()}, {"gb_per_s", row.rate * 1e-3}, {"floor_us", row.floor_us()}};
  if (row.cpu) json["limit"]["copy_gb_per_s"] = row.copy_rate * 1e-3;
  json["percent_of_limit"] = 100 * row.share();
  const auto bar = row.bar_us();
  json["bar_us"] = bar ? nlohmann::ordered_json(*bar) : nlohmann::ordered_json();
  json["verdict"] = row.verdict();
  json["baseline"] = row.baseline;
  json["baseline_time"] = summary_json(row.baseline_time);
  json["values"] = {{"outputs", row.values.outputs},
                    {"equal_share", row.values.equal_share()},
                    {"rms", row.values.rms()},
                    {"worst_state", row.values.worst},
                    {"nans", row.values.nans}};
  return json.dump() + "\n";
}

}  // namespace twostep
