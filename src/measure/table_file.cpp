#include "measure/table_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "core/check.h"

namespace twostep {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kPlace = "measure.merge_table";

TableKey key_of(const Json& entry) {
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
           {{"mma", t.mma == Mma::kWgmma ? "wgmma" : "mma_sync"},
            {"load", load},
            {"tile_n", t.tile_n},
            {"tile_k", t.tile_k},
            {"stages", t.stages},
            {"k_slices", t.k_slices},
            {"warps", t.warps},
            {"cluster_n", t.cluster_n},
            {"cluster_k", t.cluster_k}}},
          {"warp_us", hundredths(e.warp_us)},
          {"cublas_us", hundredths(e.cublas_us)},
          {"warp_spread_us", hundredths(measured.warp_spread_us)},
          {"cublas_spread_us", hundredths(measured.cublas_spread_us)},
          {"limit_us", hundredths(measured.limit_us)},
          {"runner_up_us", hundredths(measured.runner_up_us)}};
}

// An existing table, or an empty one. What is there and cannot be read must not be taken for empty and written over.
Json read_table(const std::string& path, const std::string& gpu) {
  std::error_code failed;
  const bool there = std::filesystem::exists(path, failed);
  if (!there && !failed) return {{"gpu", gpu}, {"entries", Json::array()}};
  std::ifstream file(path);
  std::string text;
  std::getline(file, text, '\0');
  if (failed || !file.is_open() || file.bad())
    fail(StatusCode::kUnavailable, kPlace, path, failed ? failed.message() : "not readable", "a file that can be read");
  try {
    Json json = Json::parse(text);
    if (json.at("gpu") != gpu)
      fail(StatusCode::kDataError, kPlace, path, json.at("gpu").get<std::string>(), gpu,
           "write each GPU model to a file of its own");
    for (const Json& entry : json.at("entries")) (void)key_of(entry);
    return json;
  } catch (const nlohmann::json::exception& error) {
    fail(StatusCode::kDataError, kPlace, path, error.what(), "a table of tactics");
  }
}

// One entry a line: a changed choice is one changed line.
std::string lines_of(const Json& entries) {
  std::string text = "[";
  const char* separator = "\n";
  for (const Json& entry : entries) {
    text += separator + entry.dump();
    separator = ",\n";
  }
  return text + "\n]";
}

}  // namespace

std::vector<Tactic> sweep_candidates(int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts, int count) {
  std::vector<std::pair<double, Tactic>> ranked;
  for (const Tactic& tactic : valid_tactics(m, n, k, facts))
    ranked.emplace_back(model_us(tactic, m, n, k, facts), tactic);
  std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  // The best of each load, tile_n and kind of cluster; then three quarters wgmma, which the model does not compare well
  // with mma.sync; then what is left of either. Of mma.sync tactics that differ in their stages alone, two.
  std::map<std::tuple<Mma, WeightLoad, int, bool>, int> of_kind;
  std::map<std::tuple<Mma, WeightLoad, int, int, int, int, int, int>, int> of_ring;
  constexpr int kOfRing = 2;
  std::vector<Tactic> chosen, others, more;
  for (const auto& [us, t] : ranked) {
    int& rings = of_ring[{t.mma, t.weight_load, t.tile_n, t.tile_k, t.k_slices, t.warps, t.cluster_n, t.cluster_k}];
    if (rings++ >= kOfRing && t.mma == Mma::kMmaSync) continue;
    const bool cluster = t.cluster_n * t.cluster_k > 1;
    (of_kind[{t.mma, t.weight_load, t.tile_n, cluster}]++ == 0 ? chosen : others).push_back(t);
  }
  std::map<Mma, int> left = {{Mma::kWgmma, count * 3 / 4}, {Mma::kMmaSync, count / 4}};
  for (const Tactic& t : chosen) --left[t.mma];
  for (const Tactic& t : others) (left[t.mma]-- > 0 ? chosen : more).push_back(t);
  chosen.insert(chosen.end(), more.begin(), more.end());
  chosen.resize(std::min(chosen.size(), static_cast<std::size_t>(count)));
  return chosen;
}

std::set<TableKey> table_keys(const std::string& path, const std::string& gpu) {
  std::set<TableKey> keys;
  const Json table = read_table(path, gpu);
  for (const Json& entry : table.at("entries")) keys.insert(key_of(entry));
  return keys;
}

std::string real_path(const std::string& path) {
  std::error_code error;
  const auto real = std::filesystem::weakly_canonical(path, error);
  return error ? path : real.string();  // what cannot be followed cannot be read, which says why
}

void merge_table(const std::string& link, const Machine& machine, const std::vector<MeasuredEntry>& measured) {
  const std::string path = real_path(link);
  Json table = read_table(path, machine.device);
  std::map<TableKey, Json> entries;
  for (const Json& entry : table["entries"]) entries.emplace(key_of(entry), entry);
  for (const MeasuredEntry& entry : measured) {
    Json json = entry_json(entry);
    json["measured"] = {
        {"date", machine.date}, {"commit", machine.commit}, {"driver", machine.driver}, {"nvrtc", machine.nvrtc}};
    const TableKey key = key_of(json);
    entries[key] = std::move(json);
  }
  table["entries"] = Json::array();
  for (auto& [key, json] : entries) table["entries"].push_back(std::move(json));
  // Members that are not of this room, as "kda", stay as they are.
  std::string text = "{";
  const char* separator = "";
  for (const auto& [name, value] : table.items()) {
    text += separator + Json(name).dump() + ": " + (value.is_array() ? lines_of(value) : value.dump());
    separator = ", ";
  }
  text += "}\n";
  const std::string temporary = fmt::format("{}.{}.tmp", path, ::getpid());
  std::ofstream(temporary) << text << std::flush;
  std::error_code error;
  if (std::filesystem::file_size(temporary, error) == text.size()) std::filesystem::rename(temporary, path, error);
  else if (!error) error = std::make_error_code(std::errc::io_error);
  if (error) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    fail(StatusCode::kUnavailable, kPlace, path, error.message(), "a file that can be written");
  }
}

}  // namespace twostep
