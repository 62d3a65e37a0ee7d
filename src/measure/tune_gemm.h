// The linears, as a kind that twostep tune searches. Pure.
#pragma once

#include <compare>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "measure/tune.h"

namespace twostep {

struct GemmTask {
  std::int64_t n = 0;
  std::int64_t k = 0;
  int rows = 0;  // a bucket
  friend auto operator<=>(const GemmTask&, const GemmTask&) = default;
};
TuneTask tune_task(const GemmTask& task);
GemmTask gemm_task(const std::string& key);  // throws nlohmann::json::exception

// The buckets of `rows` for each shape (n, k), in order, each once. Throws kInvalidArgument for what the warp kernels
// do not serve.
std::vector<GemmTask> gemm_tasks(const std::vector<std::pair<std::int64_t, std::int64_t>>& shapes,
                                 const std::vector<int>& rows);

// The tactics worth timing, at most `count`: the best of each mma, load kind, tile_n, and cluster or none, of which the
// model is least sure; then the best by the model, three quarters of them wgmma where it has so many. At most two
// mma.sync tactics differ in their stages alone.
std::vector<Tactic> sweep_candidates(int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts, int count);
// The same, named by to_string. Equal on both sides of the pipe: same program, same facts.
std::map<std::string, Tactic> gemm_candidates(const GemmTask& task, const DeviceFacts& facts, int count);

inline constexpr const char* kTimeCublas = "cublas";
inline constexpr const char* kTimeLimit = "limit";

// `count` candidates for each task.
TuneKind gemm_kind(const std::vector<GemmTask>& tasks, int count);

struct MeasuredEntry {
  TableEntry entry;
  double warp_spread_us = 0;  // p90 - p10
  double cublas_spread_us = 0;
  double limit_us = 0;
  double runner_up_us = 0;
};
nlohmann::ordered_json entry_json(const MeasuredEntry& measured);

}  // namespace twostep
