#include "measure/check_gemm.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>
#include <tuple>

#include "core/embedded.h"

namespace twostep {
namespace {

// A plan, and the row counts for which it is asked.
struct Served {
  std::string name;
  DraftGemm plan;
  std::vector<int> rows;
};

bool aligned(const Placement& at, int m) {
  const bool strides = m == 1 || (at.x_stride % 8 == 0 && at.out_stride % 8 == 0);
  return strides && at.x_offset % 8 == 0 && at.out_offset % 8 == 0;
}

// Buckets compile at the same time. What fails shows in kind() and why().
void prepare_all(DraftGemm& plan, const std::vector<int>& rows) {
  std::set<int> firsts;
  std::vector<std::thread> threads;
  for (const int m : rows)
    if (m <= kMaxWarpRows && firsts.insert((m + kRowBucket - 1) / kRowBucket).second)
      threads.emplace_back([&plan, m] {
        try {
          plan.prepare(m);
        } catch (const Error&) {  // thrown again by the prepare of check_row, where it is reported
        }
      });
  for (auto& thread : threads) thread.join();
}

// Keeps what a run shows of the bounds. Empty, or the rule that it broke.
std::string judge(CheckReport& report, const ValueErrors& errors, Data data) {
  if (data == Data::kNormal) {
    report.worst = std::max(report.worst, errors.worst);
    report.norm = std::max(report.norm, errors.norm);
  }
  return broken_rule(errors, data);
}

std::string check_row(ValueCase& values, Served& served, int m, Data data, std::uint64_t seed, CheckReport& report) {
  try {
    served.plan.prepare(m);
    const TensorView& w = values.weight();
    const Placement at = placement_of(w.shape[0], w.shape[1], m, seed);
    const CaseRun run = values.run(served.plan, m, at);
    ++report.runs;
    report.warp_runs += run.ran == Kind::kWarp;
    if (run.ran != run.said) return fmt::format("kind said {}, {} ran", kind_name(run.said), kind_name(run.ran));
    if (aligned(at, m) && run.said != served.plan.kind(m))
      return fmt::format("kind(m) is {}, {} took aligned operands", kind_name(served.plan.kind(m)),
                         kind_name(run.said));
    return judge(report, run.errors, data);
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

std::vector<int> rows_to_check(std::int64_t n, std::int64_t k, bool quick) {
  constexpr std::int64_t kLarge = 200'000'000;  // products of one row
  if (quick) return {1, 7, 8, 9, 16, 17, 33, 64, 65};
  if (n * k > kLarge) return {1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 56, 63, 64, 65};
  std::vector<int> all;
  for (int m = 1; m <= kMaxWarpRows + 1; ++m) all.push_back(m);
  return all;
}

Placement placement_of(std::int64_t n, std::int64_t k, int m, std::uint64_t seed) {
  std::seed_seq mix{static_cast<std::uint64_t>(n), static_cast<std::uint64_t>(k), static_cast<std::uint64_t>(m), seed};
  std::mt19937_64 random(mix);
  const auto below = [&](std::uint64_t limit) { return static_cast<std::int64_t>(random() % limit); };
  const std::int64_t style = below(8);
  if (style < 3) return packed_placement(n, k);
  const auto wide = [&](std::int64_t width) { return (width + 7) / 8 * 8 + 8 * below(9); };
  if (style < 7) return {wide(k), 8 * below(3), wide(n), 8 * below(3)};
  return {k + below(9), below(8), n + below(9), below(8)};
}

CheckReport check_shape(ValueCase& values, const std::vector<int>& rows, std::uint64_t seed) {
  CheckReport report;
  std::vector<Served> routes;
  routes.push_back({"served", DraftGemm(values.weight()), rows});
  prepare_all(routes.front().plan, rows);
  if (values.weight().device.is_cuda()) {
    Served pinned{"pinned to warp", DraftGemm(values.weight()), {}};
    for (const int m : rows) {
      if (routes.front().plan.why_code(m) != WhyCode::kCublasFaster) continue;
      pinned.plan.pin(m, Kind::kWarp);
      pinned.rows.push_back(m);
    }
    prepare_all(pinned.plan, pinned.rows);
    Options fallback;
    fallback.warp = false;
    Served cublas{"cublas", DraftGemm(values.weight(), fallback), {}};
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(cublas.rows),
                 [](int m) { return m == 1 || m == 8 || m == 17 || m == 64; });
    routes.push_back(std::move(pinned));
    routes.push_back(std::move(cublas));
  }
  for (const Data data : {Data::kNormal, Data::kIntegers}) {
    values.set_data(data, seed);
    for (Served& served : routes)
      for (const int m : served.rows)
        if (auto sentence = check_row(values, served, m, data, seed, report); !sentence.empty())
          report.failures.push_back({m, data, served.name, std::move(sentence)});
  }
  return report;
}

std::vector<TableEntry> table_entries(const DeviceFacts& facts) {
  std::set<std::tuple<std::int64_t, std::int64_t, int>> keys;
  for (const EmbeddedText& file : embedded_tactics()) {
    const auto table = nlohmann::json::parse(file.text);
    if (table.at("gpu") != facts.name) continue;
    for (const auto& entry : table.at("entries"))
      keys.emplace(entry.at("n").get<std::int64_t>(), entry.at("k").get<std::int64_t>(), entry.at("rows").get<int>());
  }
  std::vector<TableEntry> entries;
  for (const auto& [n, k, rows] : keys) entries.push_back(table_entry(rows, n, k, facts).value());
  return entries;
}

std::vector<int> rows_of_entry(const TableEntry& entry) {
  const std::set<int> rows{1, std::max(1, entry.rows - kRowBucket + 1), entry.rows};
  return {rows.begin(), rows.end()};
}

CheckReport check_tactic(ValueCase& values, const std::vector<int>& rows, std::uint64_t seed, const RunTactic& run) {
  CheckReport report;
  const std::int64_t n = values.weight().shape[0], k = values.weight().shape[1];
  const auto failure = [&](int m, Data data) -> std::string {
    const Placement placement = placement_of(n, k, m, seed);
    try {
      const ValueErrors errors = run(m, aligned(placement, m) ? placement : packed_placement(n, k));
      ++report.runs;
      ++report.warp_runs;
      return judge(report, errors, data);
    } catch (const Error& error) {
      return error.what();
    }
  };
  for (const Data data : {Data::kNormal, Data::kIntegers}) {
    values.set_data(data, seed);
    for (const int m : rows)
      if (auto sentence = failure(m, data); !sentence.empty())
        report.failures.push_back({m, data, "tactic", std::move(sentence)});
    if (!report.failures.empty()) break;
  }
  return report;
}

}  // namespace twostep
