// Values of DraftGemm on every kind that serves a shape, over many row counts and layouts (spec: draft-gemm 15).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gemm/tactics.h"
#include "measure/values.h"

namespace twostep {

// 1..64 and one beyond; for weights that are large, or `quick`, the edges of buckets alone.
std::vector<int> rows_to_check(std::int64_t n, std::int64_t k, bool quick);

// Depends on its arguments alone, so that one row count is replayed as it was: packed, wide rows, or rows and
// addresses that only the fallback takes.
Placement placement_of(std::int64_t n, std::int64_t k, int m, std::uint64_t seed);

struct CheckFailure {
  int m = 0;
  Data data = Data::kNormal;
  std::string route;     // "served", "cublas", "pinned to warp"; "tactic" of check_tactic
  std::string sentence;  // what is wrong
};

struct CheckReport {
  int runs = 0;
  int warp_runs = 0;
  double worst = 0;  // of the bound of 1.4 (a), normal data
  double norm = 0;   // 1.4 (b)
  std::vector<CheckFailure> failures;
};

// Runs normal data (1.4 a, b) and integers (1.4 c) for each row count: as DraftGemm serves it, on cuBLAS, and on
// the warp kernel where the table prefers cuBLAS. Asserts that what ran is what kind() said. A thrown Error is a
// failure of its row count.
CheckReport check_shape(ValueCase& values, const std::vector<int>& rows, std::uint64_t seed);

// Every entry of the embedded table of this GPU, by shape and rows.
std::vector<TableEntry> table_entries(const DeviceFacts& facts);

// The row counts that its tactic is checked at: both ends of its bucket, and one row, which it serves where no entry
// is smaller.
std::vector<int> rows_of_entry(const TableEntry& entry);

// Multiplies the m first rows of the case's x on one tactic, operands placed as said, and judges them.
using RunTactic = std::function<ValueErrors(int m, const Placement& placement)>;

// The rules of check_shape for one tactic. Operands lie as placement_of says, or packed where the warp kernel does not
// take that. Ends with the first kind of data that fails: a kernel that faulted takes the device with it.
CheckReport check_tactic(ValueCase& values, const std::vector<int>& rows, std::uint64_t seed, const RunTactic& run);

}  // namespace twostep
