// Enumerate, rank, choose: which tactic serves a row bucket. Pure: no driver call, no GPU needed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "twostep/gemm.h"

namespace twostep {

// Changes when tactic_valid or the meaning of a tactic's field changes: old cubins are then not loaded.
inline constexpr const char* kTacticRules = "gemm-rules-4";

// The grid that is searched for the bucket of m, in a fixed order: valid and not.
std::vector<Tactic> candidate_tactics(int m, std::int64_t k, const DeviceFacts& facts);
// The valid ones of it.
std::vector<Tactic> valid_tactics(int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts);

// What fixes the order of summation (5.1).
struct Family {
  Mma mma = Mma::kMmaSync;
  int k_slices = 1;
  int cluster_k = 1;
  friend bool operator==(const Family&, const Family&) = default;
};
inline Family family_of(const Tactic& t) { return {t.mma, t.k_slices, t.cluster_k}; }
// The one family in which `strict` serves all rows of a shape: wgmma on sm_90, with the split of the table's few rows.
Family strict_family(std::int64_t n, std::int64_t k, const DeviceFacts& facts);

// What a checked-in table (tactics/<gpu>.json) says of a row count: the measured choice and both times.
struct TableEntry {
  std::int64_t n = 0;
  std::int64_t k = 0;
  int rows = 0;  // measured M; serves every M up to it that no smaller entry serves
  Tactic tactic;
  double warp_us = 0;
  double cublas_us = 0;
  bool warp_wins() const { return warp_us <= cublas_us; }
};
std::optional<TableEntry> table_entry(int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts);

// The rows of x that the wgmma kernel of m's bucket is compiled for: 8, 16, 32 or 64. The instruction would take any
// multiple of 8; fewer kernels serve as fast, since its time hardly depends on them.
int wgmma_rows(int m);

// Dynamic shared memory of a tactic's CTA for the bucket of m, as the kernel computes it.
int tactic_smem_bytes(const Tactic& tactic, int m);
// Fills the fields that follow from the others: smem_bytes, ctas_per_sm, weight_align.
Tactic complete(Tactic tactic, int m, const DeviceFacts& facts);

// Microseconds by a model of bytes and launches, for shapes without a measured entry.
double model_us(const Tactic& tactic, int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts);

// Text that instantiates a kernel for one shape, bucket and tactic; see jit/compile.h.
struct KernelText {
  std::string name;   // "gemm-n2304-k1536-m8"
  std::string entry;  // extern "C" name
  std::string text;
  std::string rules;
};
struct TestSwitches {
  const char* fault = "kNone";  // tests alone: turns one synchronisation rule off
  bool debug = false;           // bounded device waits
};
KernelText warp_kernel_text(int m, std::int64_t n, std::int64_t k, const Tactic& tactic, const TestSwitches& = {});
KernelText pack_kernel_text(std::int64_t n, std::int64_t k, const Tactic& tactic);

int warp_grid(const Tactic& tactic, std::int64_t n);
inline int warp_threads(const Tactic& tactic) { return (tactic.warps + 1) * 32; }

// Known GPUs, for compiling without one: "h200", "h100". Throws kInvalidArgument with the list.
DeviceFacts known_gpu(const std::string& name);

}  // namespace twostep
