// out[r, c] = a value that depends on base and r * cols + c alone: the same on every device and with every stride.
//   out  [rows, cols] BF16   rows `stride` elements apart; what lies between rows is not touched
// mix64 is that of synthetic checkpoints. src/measure/values.cpp computes the same bits.
// Grid: any; one CTA takes whole rows.
#pragma once

#include "common/ptx.cuh"

namespace twostep::measure {

enum class Data { kNormal, kIntegers };

__device__ inline u64 mix64(u64 z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

__device__ inline float value_of(Data data, u64 bits, float scale) {
  if (data == Data::kIntegers) return float(int((bits >> 32) % 9) - 4);
  // Four 16-bit uniforms: their sum is close to normal, has this standard deviation, and is exact.
  const int sum = int(bits & 0xffff) + int(bits >> 16 & 0xffff) + int(bits >> 32 & 0xffff) + int(bits >> 48);
  return float(sum - 131070) * (1.0f / 37837.23f) * scale;
}

__device__ inline void fill(u16* out, i64 rows, i64 cols, i64 stride, u64 base, Data data, float scale) {
  for (i64 r = blockIdx.x; r < rows; r += gridDim.x)
    for (i64 c = threadIdx.x; c < cols; c += blockDim.x) {
      const u64 bits = mix64(base + u64(r * cols + c + 1) * 0x9e3779b97f4a7c15ull);
      out[r * stride + c] = u16(pack_bf16(value_of(data, bits, scale), 0.0f));
    }
}

}  // namespace twostep::measure
