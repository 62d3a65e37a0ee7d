// What device text uses of kernels/common/sm90_wgmma.cuh, for the emulator: each thread computes its own sums.
#pragma once

#include "common/ptx.cuh"

namespace twostep {

inline void wgmma_fence() {}
template <int kSums>
void wgmma_fence(float (&)[kSums]) {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}
inline u64 wgmma_operand(std::uintptr_t address) { return address; }
inline u64 wgmma_further(u64 operand, int bytes) { return operand + static_cast<u64>(bytes); }

// Element `column` of row `row` of an operand: rows of 128 bytes, bits 4 to 6 of an address turned by bits 7 to 9.
inline float wgmma_element(u64 operand, unsigned row, unsigned column) {
  const u64 at = operand + row / 8 * 1024 + row % 8 * 128 + 2 * column;
  u16 bits;
  std::memcpy(&bits, reinterpret_cast<const void*>(at ^ (at >> 3 & 0x70)), 2);
  return bf16_to_float(bits);
}

template <int kSums, class ElementOfA>
void wgmma_sums(float (&d)[kSums], ElementOfA a, u64 b) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (unsigned i = 0; i < kSums; ++i)
    for (unsigned k = 0; k < 16; ++k)
      d[i] += a(16 * warp + lane / 4 + i / 2 % 2 * 8, k) * wgmma_element(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k);
}
template <int kSums>
void wgmma(float (&d)[kSums], u64 a, u64 b) {
  wgmma_sums(
      d, [a](unsigned row, unsigned k) { return wgmma_element(a, row, k); }, b);
}
template <int kSums>
void wgmma_columns(float (&d)[kSums], u64 a, u64 b) {
  wgmma_sums(
      d, [a](unsigned row, unsigned k) { return wgmma_element(a, k, row); }, b);
}

}  // namespace twostep
