// Four neighbouring numbers of a head. The operations leave the compiler no choice of what to fuse, wherever they
// stand: a fold must give the bits of the step that was recorded.
#pragma once

#include "common/ptx.cuh"

namespace twostep::kda {

constexpr int kDim = 128;  // keys and values of a head

// Four BF16 as they lie in memory.
__device__ inline float4 widen(uint2 raw) {
  return {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
          __uint_as_float(raw.y & 0xffff0000u)};
}
__device__ inline uint2 narrow(float4 v) { return {pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)}; }
__device__ inline uint2 load_four(const u16* from) { return *reinterpret_cast<const uint2*>(from); }
__device__ inline void store_four(u16* to, uint2 raw) { *reinterpret_cast<uint2*>(to) = raw; }

__device__ inline float4 multiply_add(float4 a, float4 b, float4 c) {
  return {__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y), __fmaf_rn(a.z, b.z, c.z), __fmaf_rn(a.w, b.w, c.w)};
}
__device__ inline float4 multiplied(float4 a, float4 b) {
  return {__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w)};
}
__device__ inline float4 scaled(float4 a, float s) { return {a.x * s, a.y * s, a.z * s, a.w * s}; }
__device__ inline float dot(float4 a, float4 b) {
  return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.x, b.x, __fmul_rn(a.y, b.y))));
}
__device__ inline float warp_sum(float v) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  return v;
}

}  // namespace twostep::kda
