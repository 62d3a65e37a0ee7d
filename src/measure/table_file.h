// tactics/<gpu>.json: the measured choices that src/gemm/tactics.cpp reads. Pure.
#pragma once

#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "gemm/tactics.h"
#include "measure/row.h"

namespace twostep {

struct MeasuredEntry {
  TableEntry entry;
  double warp_spread_us = 0;  // p90 - p10
  double cublas_spread_us = 0;
  double limit_us = 0;
  double runner_up_us = 0;  // the next best tactic: how much the choice matters
};

// The tactics worth timing, at most `count`: the best of each mma, load kind, tile_n, and cluster or none, of which the
// model is least sure; then the best by the model, three quarters of them wgmma where it has so many. At most two
// mma.sync tactics differ in their stages alone.
std::vector<Tactic> sweep_candidates(int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts, int count);

using TableKey = std::tuple<std::int64_t, std::int64_t, int>;  // n, k, rows
// The entries of a table; a missing file has none. Throws kDataError where it is another GPU's or no table,
// kUnavailable where it cannot be read.
std::set<TableKey> table_keys(const std::string& path, const std::string& gpu);

// `path` with its links followed: where a table is written, so that a link stays one.
std::string real_path(const std::string& path);

// Writes `path`, keeping entries of an existing file for other (n, k, rows). Throws as table_keys does, and
// kUnavailable where it cannot be written. Each entry says when and of which commit.
void merge_table(const std::string& path, const Machine& machine, const std::vector<MeasuredEntry>& entries);

}  // namespace twostep
