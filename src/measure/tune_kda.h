// PreparedKda, as a kind that twostep tune searches. Pure.
#pragma once

#include <compare>
#include <map>
#include <string>
#include <vector>

#include "measure/kda_layers.h"
#include "measure/tune.h"

namespace twostep {

struct KdaTask {
  StateMode mode = StateMode::kSlots;
  int tokens = 1;
  int heads = 1;
  std::int64_t requests = 1;
  friend auto operator<=>(const KdaTask&, const KdaTask&) = default;
};
TuneTask tune_task(const KdaTask& task);   // "records H 12 q 8 B 32"
KdaTask kda_task(const std::string& key);  // throws nlohmann::json::exception

struct KdaTuneKeys {
  std::vector<StateMode> modes = {StateMode::kSlots, StateMode::kRecords};
  std::vector<int> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<int> heads = {12, 24, 48, 96};
  std::vector<std::int64_t> requests = {1, 2, 4, 8, 16, 32, 64, 128, 256};
};
// Every combination once, in this order: request counts of the same kernels lie together. Throws what construction and
// prepare throw of such a key.
std::vector<KdaTask> kda_tasks(const KdaTuneKeys& keys);

// What is measured for a task. The shortest conv line; a decode step with records has that of the longest verify step,
// for it runs on the caches of verify.
KdaBenchOptions bench_options(const KdaTask& task);

// Whether a tactic may be the fastest for so many heads of all requests. False where a head has far more warps than the
// GPU then holds at once, or far fewer than would fill it.
bool may_win(const KdaTactic& tactic, std::int64_t request_heads, const DeviceFacts& facts);
// The valid tactics that may win, by their names. Equal on both sides of the pipe.
std::map<std::string, KdaTactic> kda_candidates(const KdaTask& task, const DeviceFacts& facts);

TuneKind kda_kind(const KdaTuneKeys& keys);

// An entry of the table, without times beside this one.
nlohmann::ordered_json kda_entry_json(const KdaTask& task, const KdaTactic& tactic, double us);

}  // namespace twostep
