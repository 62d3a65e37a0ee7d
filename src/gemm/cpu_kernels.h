// The CPU side of DraftGemm below its plan: one path per instruction set, all with one contract.
#pragma once

#include <cstdint>
#include <span>

#include "gemm/contract.h"

namespace twostep {

// Operands that check_operands took; strides in elements. m, n, k > 0.
struct CpuGemm {
  const std::uint16_t* x;  // [m, k]
  std::int64_t x_stride;
  const std::uint16_t* w;  // [n, k]; w_stride is that of its columns when transposed
  std::int64_t w_stride;
  bool transposed;
  std::uint16_t* out;  // [m, n]
  std::int64_t out_stride;
  std::int64_t m, n, k;
};

// How one instruction set multiplies a slab of at most kSlabRows rows of x.
// Bits of out[i, j] depend on row i of x, row j of w and the path: not on m, n, the strides or the threads.
struct CpuPath {
  const char* name;  // "AVX-512 BF16"
  bool (*available)();
  bool serves_transposed;
  // Bytes of `panel`: the slab's x in the order in which `multiply` reads it. Null with pack: x is read in place.
  std::int64_t (*panel_bytes)(std::int64_t rows, std::int64_t k);
  void (*pack)(const CpuGemm& slab, void* panel);
  // Columns [begin, end) of out.
  void (*multiply)(const CpuGemm& slab, const void* panel, std::int64_t begin, std::int64_t end);
};
inline constexpr int kSlabRows = 64;

// The paths that this machine can run, fastest first; plain C++ is the last and always there.
std::span<const CpuPath> cpu_paths();

// Makes the calling thread's panel and OpenMP team, so that cpu_gemm neither allocates nor starts a thread.
void cpu_reserve(const CpuPath& path, std::int64_t m, std::int64_t k, int threads);

// Re-entrant. Threads split N, never K.
void cpu_gemm(const CpuPath& path, const CpuGemm& gemm, int threads);

}  // namespace twostep
