#include "measure/table_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <tuple>

#include "core/check.h"

namespace twostep {
namespace {

using Json = nlohmann::ordered_json;
using EntryKey = std::tuple<std::int64_t, std::int64_t, int>;

EntryKey key_of(const Json& entry) {
  return {entry.at("n").get<std::int64_t>(), entry.at("k").get<std::int64_t>(), entry.at("rows").get<int>()};
}

double hundredths(double us) { return static_cast<double>(static_cast<std::int64_t>(us * 100 + 0.5)) / 100; }

Json entry_json(const MeasuredEntry& measured) {
  const TableEntry& e = measured.entry;
  const Tactic& t = e.tactic;
  const char* load = t.weight_order == WeightOrder::kPacked ? "packed"
                     : t.weight_load == WeightLoad::kRows   ? "rows"
                                                            : "tiles";
  return {{"n", e.n},
          {"k", e.k},
          {"rows", e.rows},
          {"tactic",
           {{"load", load},
            {"tile_n", t.tile_n},
            {"tile_k", t.tile_k},
            {"stages", t.stages},
            {"k_slices", t.k_slices},
            {"warps", t.warps},
            {"cluster_n", t.cluster_n}}},
          {"warp_us", hundredths(e.warp_us)},
          {"cublas_us", hundredths(e.cublas_us)},
          {"warp_spread_us", hundredths(measured.warp_spread_us)},
          {"cublas_spread_us", hundredths(measured.cublas_spread_us)},
          {"limit_us", hundredths(measured.limit_us)},
          {"runner_up_us", hundredths(measured.runner_up_us)}};
}

std::map<EntryKey, Json> read_entries(const std::string& path, const std::string& gpu) {
  std::map<EntryKey, Json> entries;
  std::ifstream file(path);
  if (!file) return entries;
  try {
    const Json json = Json::parse(file);
    if (json.at("gpu") != gpu)
      fail(StatusCode::kDataError, "measure.merge_table", path, json.at("gpu").get<std::string>(), gpu,
           "write each GPU model to a file of its own");
    for (const Json& entry : json.at("entries")) entries.emplace(key_of(entry), entry);
  } catch (const nlohmann::json::exception& error) {
    fail(StatusCode::kDataError, "measure.merge_table", path, error.what(), "a table of tactics");
  }
  return entries;
}

}  // namespace

std::vector<Tactic> sweep_candidates(int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts, int count) {
  std::vector<std::pair<double, Tactic>> ranked;
  for (const Tactic& tactic : valid_tactics(m, n, k, facts))
    ranked.emplace_back(model_us(tactic, m, n, k, facts), tactic);
  std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::map<std::tuple<WeightLoad, int, bool>, int> of_kind;
  std::map<std::tuple<WeightLoad, int, int, int, int, int>, int> of_family;  // all but the stages
  constexpr int kOfFamily = 2;
  std::vector<Tactic> chosen, rest;
  for (const auto& [us, t] : ranked) {
    if (of_family[{t.weight_load, t.tile_n, t.tile_k, t.k_slices, t.warps, t.cluster_n}]++ >= kOfFamily) continue;
    const bool first = of_kind[{t.weight_load, t.tile_n, t.cluster_n > 1}]++ == 0;
    (first ? chosen : rest).push_back(t);
  }
  for (std::size_t i = 0; i < rest.size() && static_cast<int>(chosen.size()) < count; ++i) chosen.push_back(rest[i]);
  return chosen;
}

void merge_table(const std::string& path, const Machine& machine, const std::vector<MeasuredEntry>& measured) {
  auto entries = read_entries(path, machine.device);
  for (const MeasuredEntry& entry : measured) {
    Json json = entry_json(entry);
    json["measured"] = {
        {"date", machine.date}, {"commit", machine.commit}, {"driver", machine.driver}, {"nvrtc", machine.nvrtc}};
    const EntryKey key = key_of(json);
    entries[key] = std::move(json);
  }
  // One entry a line: a changed choice is one changed line.
  std::string text = fmt::format("{{\"gpu\": {}, \"entries\": [", Json(machine.device).dump());
  const char* separator = "\n";
  for (const auto& [key, json] : entries) {
    text += separator + json.dump();
    separator = ",\n";
  }
  text += "\n]}\n";
  const std::string temporary = path + ".tmp";
  std::ofstream(temporary) << text << std::flush;
  std::error_code error;
  if (std::filesystem::file_size(temporary, error) == text.size()) std::filesystem::rename(temporary, path, error);
  else if (!error) error = std::make_error_code(std::errc::io_error);
  if (error) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    fail(StatusCode::kUnavailable, "measure.merge_table", path, error.message(), "a file that can be written");
  }
}

}  // namespace twostep
