// What NCCL leaves to do after its own kernels: rows to their places, and residual with norm.
//
// Grids are any: move_rows has pieces of a row along x and rows along y, add_norm a row per CTA.
// PDL: nothing is read or written before pdl_wait().
#pragma once

#include "gather/mailbox.cuh"

namespace twostep::gather {

// `blocks` blocks of `rows` rows, from one layout to another. NCCL gathers [ranks, rows, cols], the caller wants
// [rows, ranks * cols]. to may be from, with the same strides. MoveStep of src/mailbox/protocol.h.
struct Move {
  const u8* from;
  u8* to;
  i64 from_block, from_row, to_block, to_row;  // bytes
  u32 blocks, rows, row_bytes;
  u32 unit;      // bytes moved at a time: 16, 4, 2 or 1, which divides addresses, strides and row_bytes
  u32 empty_as;  // what a 32-bit word with every bit set becomes, as a mailbox has it; itself: nothing changes
};
constexpr int kMoveThreads = 256;

__device__ inline uint4 filled_at(const uint4* row, u32 i, u32, u32 instead) { return filled(row[i], instead); }
__device__ inline u32 filled_at(const u32* row, u32 i, u32, u32 instead) { return filled(row[i], instead); }
// Half of a word, where words are pairs of a row.
__device__ inline u16 filled_at(const u16* row, u32 i, u32 units, u32 instead) {
  return units % 2 == 0 && row[i] == 0xffff && row[i ^ 1] == 0xffff ? u16(instead) : row[i];
}
__device__ inline u8 filled_at(const u8* row, u32 i, u32, u32) { return row[i]; }

template <class Unit>
__device__ inline void move_units(const Move& m) {
  const u32 units = m.row_bytes / u32(sizeof(Unit));
  const u32 first = blockIdx.x * kBatch * kMoveThreads + threadIdx.x;
  for (u32 line = blockIdx.y; line < m.blocks * m.rows; line += gridDim.y) {
    const u32 block = line / m.rows, row = line % m.rows;
    const auto* from = reinterpret_cast<const Unit*>(m.from + block * m.from_block + row * m.from_row);
    auto* to = reinterpret_cast<Unit*>(m.to + block * m.to_block + row * m.to_row);
    Unit x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + i * kMoveThreads < units) x[i] = filled_at(from, first + i * kMoveThreads, units, m.empty_as);
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + i * kMoveThreads < units) to[first + i * kMoveThreads] = x[i];
  }
}

__device__ inline void move_rows(const Move& m) {
  pdl_wait();
  switch (m.unit) {
    case 16: move_units<uint4>(m); break;
    case 4: move_units<u32>(m); break;
    case 2: move_units<u16>(m); break;
    default: move_units<u8>(m);
  }
  pdl_launch();
}

// s = bf16( in + residual );  residual_out = s;  norm_out = bf16( s * rsqrt(mean(s^2) + eps) * gamma )
// in is the rounded sum over the ranks; all else as all_reduce_add_norm has it. hidden is a multiple of 8.
template <int kThreads>
__device__ inline void add_norm(const AddNorm& a, float* parts) {
  pdl_wait();
  const u32 row_vectors = a.hidden / 8;
  const auto vector = [](const u16* base, i64 stride, u32 row, u32 v) {
    return *reinterpret_cast<const uint4*>(base + row * stride + v * 8);
  };
  for (u32 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    float squares = 0;
    for (u32 v = threadIdx.x; v < row_vectors; v += kThreads) {
      const uint4 x = vector(a.in, a.in_stride, row, v);
      const uint4 residual = a.residual ? vector(a.residual, a.residual_stride, row, v) : make_uint4(0, 0, 0, 0);
      const auto sum = [&](u32 in, u32 before) {
        const u32 s = add_bf16(in, before);
        squares += low_bf16(s) * low_bf16(s);
        squares += high_bf16(s) * high_bf16(s);
        return s;
      };
      *reinterpret_cast<uint4*>(a.residual_out + row * a.residual_out_stride + v * 8) =
          make_uint4(sum(x.x, residual.x), sum(x.y, residual.y), sum(x.z, residual.z), sum(x.w, residual.w));
    }
    if (a.gamma == nullptr) continue;
    const float scale = 1.0f / sqrtf(cta_sum<kThreads>(squares, parts) / float(a.hidden) + a.eps);
    for (u32 v = threadIdx.x; v < row_vectors; v += kThreads) {
      const uint4 s = vector(a.residual_out, a.residual_out_stride, row, v);  // of this thread
      const auto norm = [&](u32 two, u32 at) {
        return pack_bf16(low_bf16(two) * scale * gamma_at(a, at), high_bf16(two) * scale * gamma_at(a, at + 1));
      };
      const u32 i = v * 8;
      *reinterpret_cast<uint4*>(a.norm_out + row * a.norm_out_stride + i) =
          make_uint4(norm(s.x, i), norm(s.y, i + 2), norm(s.z, i + 4), norm(s.w, i + 6));
    }
  }
  pdl_launch();
}

}  // namespace twostep::gather
