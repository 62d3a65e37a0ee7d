// tactics/<gpu>.json: the measured choices that src/gemm/tactics.cpp reads. Pure.
#pragma once

#include <string>
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

// The tactics worth timing: the best `count` by the model, at most two that differ in their stages alone, and at
// least one of each mma, load kind, tile_n, and cluster or none, of which the model is least sure.
std::vector<Tactic> sweep_candidates(int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts, int count);

// Writes `path`, keeping entries of an existing file for other (n, k, rows). Throws kDataError where that file is
// another GPU's or no table, kUnavailable where it cannot be written. Each entry says when and of which commit.
void merge_table(const std::string& path, const Machine& machine, const std::vector<MeasuredEntry>& entries);

}  // namespace twostep
