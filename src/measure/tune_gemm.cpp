#include "measure/tune_gemm.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "core/check.h"
#include "gemm/contract.h"

namespace twostep {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kPlace = "measure.tune";

}  // namespace

TuneTask tune_task(const GemmTask& task) {
  return {table_key(kGemmList, {{"n", task.n}, {"k", task.k}, {"rows", task.rows}}),
          fmt::format("{}x{} rows {}", task.n, task.k, task.rows)};
}

GemmTask gemm_task(const std::string& key) {
  const auto json = Json::parse(key);
  return {json.at("n").get<std::int64_t>(), json.at("k").get<std::int64_t>(), json.at("rows").get<int>()};
}

std::vector<GemmTask> gemm_tasks(const std::vector<std::pair<std::int64_t, std::int64_t>>& shapes,
                                 const std::vector<int>& rows) {
  std::vector<GemmTask> tasks;
  std::set<GemmTask> seen;
  constexpr std::int64_t kMostN = std::int64_t{1} << 30;  // as tactic_valid has it
  for (const auto& [n, k] : shapes) {
    if (!warp_eligible(n, k) || n >= kMostN)
      fail(StatusCode::kInvalidArgument, kPlace, "shape", fmt::format("{},{}", n, k),
           "N a multiple of 16 below 2^30 and K a multiple of 64", "others are served by cuBLAS and have no tactics");
    for (const int m : rows) {
      if (m < 1 || m > kMaxWarpRows)
        fail(StatusCode::kInvalidArgument, kPlace, "rows", std::to_string(m), fmt::format("1 to {}", kMaxWarpRows),
             "more rows are served by cuBLAS and have no tactics");
      const GemmTask task{n, k, bucket_of(m)};
      if (seen.insert(task).second) tasks.push_back(task);
    }
  }
  return tasks;
}

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

std::map<std::string, Tactic> gemm_candidates(const GemmTask& task, const DeviceFacts& facts, int count) {
  std::map<std::string, Tactic> named;
  for (const Tactic& tactic : sweep_candidates(task.rows, task.n, task.k, facts, count))
    named.emplace(to_string(tactic), tactic);
  return named;
}

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

TuneKind gemm_kind(const std::vector<GemmTask>& tasks, int count) {
  constexpr std::size_t kFinalists = 6;
  TuneKind kind;
  kind.list = kGemmList;
  for (const GemmTask& task : tasks) kind.tasks.push_back(tune_task(task));
  kind.worker = {"--candidates", std::to_string(count)};
  kind.limit = std::chrono::seconds(30);  // operands of 7 GB are made, and a kernel compiled, in a few
  kind.plan = [count](const TuneTask& task, const DeviceFacts& facts) {
    TunePlan plan;
    plan.finalists = kFinalists;
    plan.references = {kTimeCublas, kTimeLimit};
    for (const auto& [name, tactic] : gemm_candidates(gemm_task(task.key), facts, count))
      plan.candidates.emplace(name, tactic.smem_bytes);
    return plan;
  };
  kind.entry = [count](const TuneResult& result, const DeviceFacts& facts) {
    const GemmTask task = gemm_task(result.task.key);
    const Finalist& best = result.best();
    const Summary& cublas = result.references.at(kTimeCublas);
    MeasuredEntry measured;
    measured.entry = {task.n,           task.k,       task.rows, gemm_candidates(task, facts, count).at(best.tactic),
                      best.time.median, cublas.median};
    measured.warp_spread_us = best.time.spread();
    measured.cublas_spread_us = cublas.spread();
    measured.limit_us = result.references.at(kTimeLimit).median;
    measured.runner_up_us = result.runner_up_us();
    return entry_json(measured);
  };
  return kind;
}

}  // namespace twostep
