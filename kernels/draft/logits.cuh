// out[i, j] = bf16( scale * cap(l[i, j]) )   cap(l) = soft_cap * tanh(l / soft_cap), or l itself. FP32, one rounding.
//   l    [rows, cols] BF16   rows l_stride elements apart
//   out  [rows, cols] BF16   rows out_stride elements apart; may be l itself
// Grid: any; a CTA takes pieces of kPiece columns, block kThreads. All offsets are 64-bit: rows * stride passes 2^31.
// PDL: l is what the kernel before wrote, so nothing is read before pdl_wait().
#pragma once

#include "common/ptx.cuh"

namespace twostep::draft {

constexpr int kThreads = 256;
constexpr int kPiece = 8 * kThreads;

// tanhf is within 2 ulp, 2^-22 of the value; tanh.approx, at 2^-11, would show in the BF16 result.
template <bool kCap>
__device__ inline void cap_and_scale(const u16* l, i64 l_stride, u16* out, i64 out_stride, i64 rows, i64 cols,
                                     float soft_cap, float scale) {
  pdl_launch();
  pdl_wait();
  const i64 pieces_of_row = (cols + kPiece - 1) / kPiece;
  for (i64 piece = blockIdx.x; piece < rows * pieces_of_row; piece += gridDim.x) {
    const i64 row = piece / pieces_of_row;
    const i64 begin = piece % pieces_of_row * kPiece;
    const i64 end = begin + kPiece < cols ? begin + kPiece : cols;
    for (i64 j = begin + threadIdx.x; j < end; j += kThreads) {
      float y = __uint_as_float(u32(l[row * l_stride + j]) << 16);
      if (kCap) y = soft_cap * tanhf(y / soft_cap);
      out[row * out_stride + j] = to_bf16(scale * y);
    }
  }
}

}  // namespace twostep::draft
