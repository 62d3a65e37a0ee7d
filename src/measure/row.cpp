#include "measure/row.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <measure_commit.h>  // made by each build
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/env.h"

namespace twostep {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kPastL2 = 240'000'000;  // four times the largest L2 that is meant

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) return line.substr(std::min(line.size(), line.find(':') + 2));
  return "CPU";
}

const char* verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::kWin: return "win";
    case Verdict::kTie: return "tie";
    case Verdict::kLoss: return "loss";
    case Verdict::kNone: return "none";
  }
  return "unknown";
}

// Whether the copies of a weight pass the cache: plan_ring makes no more than 128 of a small one.
const char* cache_state(const BenchRow& row) {
  const std::int64_t cache = row.kind == Kind::kCpu ? last_cache_bytes() : 0;
  const auto past = static_cast<double>(cache > 0 ? 4 * cache : kPastL2);
  return row.ring.weights * row.bytes() < past ? "warm" : "cold";
}

Json row_json(const BenchRow& row, const Chain& chain, const Machine& machine) {
  const bool cpu = row.kind == Kind::kCpu;
  Json json;
  json["case"] = {{"model", row.model}, {"layer", row.layer}, {"tp", row.tp},        {"n", row.n},
                  {"k", row.k},         {"rows", row.rows},   {"dtype", "bfloat16"}, {"ranks", 1}};
  json["choice"] = {{"kind", kind_name(row.kind)}, {"strict", row.strict}, {"tactic", row.tactic}, {"key", row.key},
                    {"why_code", row.why_code},    {"why", row.why}};
  json["origin"] = origin_json(machine);
  json["machine"] = machine_json(machine);
  json["protocol"] = {{"chain", chain.name},
                      {"l2", cache_state(row)},
                      {"rotated_weights", row.ring.weights},
                      {"launches_per_graph", row.ring.launches},
                      {"graph", !cpu},
                      {"pdl", chain.name == "early" && row.kind == Kind::kWarp}};
  json["time"] = summary_json(chain.ours);
  json["bytes"] = row.bytes();
  json["bytes_formula"] = "2 * n * k";
  json["gb_per_s"] = row.bytes() / chain.ours.median * 1e-3;
  json["limit"] = summary_json(chain.limit);
  json["percent_of_limit"] = 100 * chain.limit.median / chain.ours.median;
  json["baseline"] = row.baseline;
  json["baseline_time"] = summary_json(chain.baseline);
  json["verdict"] = verdict_name(verdict_of(chain));
  json["values"] = {{"worst_of_bound", row.values.worst},
                    {"relative_norm", row.values.norm},
                    {"elements", row.values.elements},
                    {"nans", row.values.nans}};
  return json;
}

}  // namespace

Ring plan_ring(std::int64_t weight_bytes) {
  constexpr std::int64_t kLarge = 1'500'000'000;       // above this, copies are dear
  constexpr std::int64_t kGraphBytes = 4'000'000'000;  // about a millisecond of reading: replays stay short
  const std::int64_t bytes = std::max<std::int64_t>(weight_bytes, 1);
  // Two large weights in turn would find a tenth of themselves in an L2 that does not replace the oldest first.
  const std::int64_t least = bytes < kLarge ? 5 : 3;
  const auto weights = std::clamp<std::int64_t>((kPastL2 + bytes - 1) / bytes, least, 128);
  const auto wanted = std::clamp<std::int64_t>(kGraphBytes / bytes, 4, 24);
  return {static_cast<int>(weights), static_cast<int>((wanted + weights - 1) / weights * weights)};
}

std::int64_t last_cache_bytes() { return std::max(::sysconf(_SC_LEVEL3_CACHE_SIZE), 0L); }

Verdict verdict_of(const Chain& chain) {
  if (chain.baseline.kept == 0) return Verdict::kNone;
  const double gain = chain.baseline.median - chain.ours.median;
  const double noise = std::max(chain.ours.spread(), chain.baseline.spread());
  if (gain > noise) return Verdict::kWin;
  return gain < -noise ? Verdict::kLoss : Verdict::kTie;
}

Machine this_machine(std::string command) {
  Machine machine;
  machine.device = cpu_name();
  const int threads = environment().threads;
  machine.threads = threads > 0 ? threads : static_cast<int>(std::thread::hardware_concurrency());
  machine.commit = TWOSTEP_COMMIT;
  machine.date = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
  machine.command = std::move(command);
  return machine;
}

std::string build_version() {
  const std::string commit = TWOSTEP_COMMIT;
  return TWOSTEP_VERSION + (commit.empty() ? "" : " (" + commit + ")");
}

nlohmann::ordered_json origin_json(const Machine& machine) {
  return {{"commit", machine.commit}, {"date", machine.date}, {"command", machine.command}};
}

nlohmann::ordered_json machine_json(const Machine& machine) {
  return {{"device", machine.device},
          {"driver", machine.driver},
          {"nvrtc", machine.nvrtc},
          {"clocks", "sampled"},
          {"sm_clock_mhz", machine.sm_clock_mhz},
          {"memory_clock_mhz", machine.memory_clock_mhz},
          {"power_limit_w", machine.power_limit_w},
          {"threads", machine.threads}};
}

nlohmann::ordered_json summary_json(const Summary& s) {
  if (s.kept == 0) return nullptr;
  return {{"median_us", s.median}, {"p10_us", s.p10}, {"p90_us", s.p90}, {"kept", s.kept}, {"dropped", s.dropped}};
}

std::string json_lines(const BenchRow& row, const Machine& machine) {
  std::string lines;
  for (const Chain& chain : row.chains) lines += row_json(row, chain, machine).dump() + "\n";
  return lines;
}

}  // namespace twostep
