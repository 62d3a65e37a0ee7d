// What a measurement of PreparedKda says, and the JSON line that keeps it (spec: style 7.4, kda 15). Pure.
#pragma once

#include <string>

#include "measure/kda_bytes.h"
#include "measure/kda_case.h"
#include "measure/row.h"

namespace twostep {

struct KdaRow {
  KdaShape shape;
  bool cpu = false;
  bool early_caches = false;
  KdaTactic tactic;
  std::string source;  // of the tactic: "table", "rule", "forced", "sweep"; empty on the CPU
  std::string kernel;  // name and hash, or the CPU path
  KdaRing ring;
  Summary time;          // microseconds per call
  double rate = 0;       // bytes per microsecond of the same mix of reads and writes: the fastest kernel that was found
  double copy_rate = 0;  // on a CPU, of a copy: what its bar is stated in
  KdaErrors values;
  std::string baseline;   // the chain of public kernels; empty: none
  Summary baseline_time;  // of the same shape, with slots

  double bytes() const { return static_cast<double>(kda_step_bytes(shape)); }
  double floor_us() const { return bytes() / rate; }
  double share() const { return floor_us() / time.median; }
  std::optional<double> bar_us() const;
  const char* verdict() const;  // "holds", "misses", "none"; "noisy": spread above half of the median, or faster than f
  std::string mix() const;      // "1:8": reads to writes; "1:1.04" with records
};

std::string json_line(const KdaRow& row, const Machine& machine);

}  // namespace twostep
