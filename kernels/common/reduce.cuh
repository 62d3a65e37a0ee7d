// Sums over a warp and over a CTA, in a fixed order; pairs of BF16 as FP32.
#pragma once

#include "common/ptx.cuh"

namespace twostep {

constexpr int kWarp = 32;

__device__ inline float low_bf16(u32 two) { return __uint_as_float(two << 16); }
__device__ inline float high_bf16(u32 two) { return __uint_as_float(two & 0xffff0000u); }
// Each sum has one rounding.
__device__ inline u32 add_bf16(u32 a, u32 b) {
  return pack_bf16(low_bf16(a) + low_bf16(b), high_bf16(a) + high_bf16(b));
}

template <class T>
__device__ inline T warp_sum(T v) {
  for (int lane = kWarp / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(0xffffffffu, v, lane);
  return v;
}

// The sum over the CTA's kThreads threads, in all of them. `parts` holds one value per warp; it may be used again at
// once.
template <int kThreads, class T>
__device__ inline T cta_sum(T v, T* parts) {
  v = warp_sum(v);
  __syncthreads();  // parts may still be read from the sum before
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = v;
  __syncthreads();  // parts are written
  T sum = 0;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) sum += parts[warp];
  return sum;
}

}  // namespace twostep
