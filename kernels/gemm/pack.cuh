// packed = the bytes of w [kN, kK] BF16 (rows w_pitch bytes apart) in the order in which warp_split_k with
// Load::kPacked reads them: tile of kTileN rows by tile, in it box of 64 columns by box, in a box row by row,
// 128 bytes a row, its 16-byte chunk c at place c ^ (row % 8). N*K*2 bytes; kN % kTileN == 0, kK % 64 == 0.
// One thread moves one chunk. Grid: enough CTAs of 256 threads for kN * kK / 8 chunks.
#pragma once

#include "common/ptx.cuh"

namespace twostep::gemm {

template <int kN, int kK, int kTileN>
__device__ inline void pack(const u8* w, i64 w_pitch, u8* packed) {
  pdl_wait();
  const i64 chunk = i64(blockIdx.x) * 256 + threadIdx.x;  // in packed order
  constexpr i64 kChunks = i64(kN) * kK / 8;
  if (chunk >= kChunks) return;
  const int place = int(chunk % 8);
  const int row = int(chunk / 8 % kTileN);
  const i64 box = chunk / (8 * kTileN);
  const i64 column_box = box % (kK / 64);
  const i64 n = box / (kK / 64) * kTileN + row;
  const u8* from = w + n * w_pitch + column_box * 128 + (place ^ (row & 7)) * 16;
  *reinterpret_cast<uint4*>(packed + chunk * 16) = *reinterpret_cast<const uint4*>(from);
}

}  // namespace twostep::gemm
