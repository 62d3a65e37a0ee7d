// What a measurement says, and the JSON line that keeps it (spec: style 7.4, 7.5). Pure.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/timer.h"
#include "measure/values.h"

namespace twostep {

// Rotating operands: so many copies of a weight that none is left in L2 when its turn comes again.
struct Ring {
  int weights = 1;
  int launches = 1;  // of one graph; a multiple of weights, so that replays rotate too
};
Ring plan_ring(std::int64_t weight_bytes);
std::int64_t last_cache_bytes();  // of this CPU; 0: not known

// One chain of launches. Microseconds per launch. A summary with kept = 0 was not measured.
struct Chain {
  std::string name;  // "early", "isolated"; "host" on the CPU
  Summary ours;
  Summary baseline;  // cuBLAS on the same operands
  Summary limit;     // a kernel that only reads the weight
};
enum class Verdict { kWin, kTie, kLoss, kNone };  // kNone: no baseline
Verdict verdict_of(const Chain& chain);           // a tie lies within the larger of the two spreads

struct BenchRow {
  std::string model, layer;  // may be empty: a shape of the user's
  int tp = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  int rows = 0;
  Kind kind = Kind::kWarp;
  std::string tactic, key;    // empty where no kernel of ours ran
  std::string why_code, why;  // empty for 'warp'
  bool strict = false;
  std::string baseline;  // "cuBLASLt 13.0.2"; empty: none
  Ring ring;
  std::vector<Chain> chains;
  ValueErrors values;
  double bytes() const { return 2.0 * static_cast<double>(n) * static_cast<double>(k); }
};

// Where and when. Empty or zero: not known on this machine.
struct Machine {
  std::string device;  // "NVIDIA H200", or the CPU's model name
  std::string driver;
  std::string nvrtc;
  std::string commit;
  std::string date;  // UTC, ISO 8601
  std::string command;
  int sm_clock_mhz = 0;  // sampled under load
  int memory_clock_mhz = 0;
  double power_limit_w = 0;
  int threads = 0;  // of the CPU backend
};
Machine this_machine(std::string command);  // commit, date, command, CPU; MeasureDevice::describe adds the rest
std::string build_version();                // "0.1.0 (a1b2c3d)"

// The two objects of every result that say where it comes from: "origin", and "machine".
nlohmann::ordered_json origin_json(const Machine& machine);
nlohmann::ordered_json machine_json(const Machine& machine);
nlohmann::ordered_json summary_json(const Summary& summary);  // null where nothing was kept

// One line for each chain of the row.
std::string json_lines(const BenchRow& row, const Machine& machine);

}  // namespace twostep
