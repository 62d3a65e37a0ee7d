#include "measure/tune_kda.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace twostep {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kRecordsWord = "records";  // slots is not written

template <class T>
std::vector<T> sorted(std::vector<T> values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

int folded(const KdaTask& task) { return kda_folded(task.mode, bench_options(task).conv_len); }

Json fields(const KdaTask& task) {
  Json json = Json::object();
  if (task.mode == StateMode::kRecords) json[kKdaList.word] = kRecordsWord;
  json.update({{"heads", task.heads}, {"tokens", task.tokens}, {"requests", task.requests}});
  return json;
}

}  // namespace

TuneTask tune_task(const KdaTask& task) {
  return {table_key(kKdaList, fields(task)),
          fmt::format("{} H {} q {} B {}", task.mode == StateMode::kRecords ? kRecordsWord : "slots", task.heads,
                      task.tokens, task.requests)};
}

KdaTask kda_task(const std::string& key) {
  const auto json = Json::parse(key);
  return {json.value(kKdaList.word, "") == kRecordsWord ? StateMode::kRecords : StateMode::kSlots,
          json.at("tokens").get<int>(), json.at("heads").get<int>(), json.at("requests").get<std::int64_t>()};
}

std::vector<KdaTask> kda_tasks(const KdaTuneKeys& keys) {
  std::vector<KdaTask> tasks;
  for (const StateMode mode : sorted(keys.modes))
    for (const int tokens : sorted(keys.tokens))
      for (const int heads : sorted(keys.heads))
        for (const std::int64_t requests : sorted(keys.requests)) {
          const KdaTask task{mode, tokens, heads, requests};
          KdaProblem problem = problem_of(bench_options(task));
          problem.requests = requests;
          check_problem_shape(problem);
          tasks.push_back(task);
        }
  return tasks;
}

KdaBenchOptions bench_options(const KdaTask& task) {
  KdaBenchOptions options;
  options.heads = task.heads;
  options.tokens = task.tokens;
  options.records = task.mode == StateMode::kRecords;
  options.conv_len = least_conv_len(task.tokens, options.records);
  return options;
}

// 16 warps of 128 registers fill an SM. What this leaves out was 37 % or more behind the best in the sweep d6be775 of
// the H200 (records, q = 8, 12 to 1536 heads), and no full sweep chose it for the table (q = 1 and 8, 12 to 12288).
bool may_win(const KdaTactic& t, std::int64_t request_heads, const DeviceFacts& facts) {
  constexpr int kFew = 8, kMany = 16;  // warps of a head
  const int of_head = t.split * t.warps;
  const std::int64_t warps = request_heads * of_head;
  if (of_head > kMany || t.split > 2) return warps <= std::int64_t{16} * facts.sm_count;
  return of_head > kFew || warps > std::int64_t{4} * facts.sm_count;
}

std::map<std::string, KdaTactic> kda_candidates(const KdaTask& task, const DeviceFacts& facts) {
  std::map<std::string, KdaTactic> named;
  for (const KdaTactic& tactic : valid_kda_tactics(task.tokens, facts, folded(task)))
    if (may_win(tactic, task.requests * task.heads, facts)) named.emplace(to_string(tactic), tactic);
  return named;
}

TuneKind kda_kind(const KdaTuneKeys& keys) {
  constexpr std::size_t kFinalists = 3;
  constexpr double kClose = 1.05;
  TuneKind kind;
  kind.list = kKdaList;
  for (const KdaTask& task : kda_tasks(keys)) kind.tasks.push_back(tune_task(task));
  kind.worker = {"--requests", fmt::format("{}", fmt::join(sorted(keys.requests), ","))};
  // The first answer of a (mode, q, H) makes caches of up to 45 GB and FP64 results on the host.
  kind.limit = std::chrono::seconds(60);
  kind.ahead = sorted(keys.requests).size();  // they share kernels
  kind.check_together = true;
  kind.plan = [](const TuneTask& task, const DeviceFacts& facts) {
    const KdaTask of = kda_task(task.key);
    TunePlan plan{{}, kFinalists, {}, kClose};
    for (const auto& [name, tactic] : kda_candidates(of, facts))
      plan.candidates.emplace(name, tactic.split * kda_smem_bytes(of.tokens, tactic, folded(of)));
    return plan;
  };
  kind.entry = [](const TuneResult& result, const DeviceFacts& facts) {
    const KdaTask task = kda_task(result.task.key);
    const Finalist& best = result.best();
    Json json = kda_entry_json(task, kda_candidates(task, facts).at(best.tactic), best.time.median);
    json["spread_us"] = hundredths(best.time.spread());
    json["runner_up_us"] = hundredths(result.runner_up_us());
    return json;
  };
  return kind;
}

Json kda_entry_json(const KdaTask& task, const KdaTactic& tactic, double us) {
  Json json = fields(task);
  json["tactic"] = {{"split", tactic.split}, {"warps", tactic.warps}, {"pass_rows", tactic.pass_rows}};
  if (tactic.stream) json["tactic"]["stream"] = true;
  json["us"] = hundredths(us);
  return json;
}

}  // namespace twostep
