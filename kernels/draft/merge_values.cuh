// The parts of the attention of sm90_attention.cuh, merged, and the half of kv_b behind them, in one launch (spec:
// drafter 5.6 B7, B8; 5.8).
//
//   o[row, c] = sum over parts of 2^(base - largest base) scale v[row, c]  /  sum over parts of 2^(..) total
//   out[row, d] = bf16( sum over c of bf16(o[row, c]) W_UV[d, c] ), then times sigmoid(gate) where it is on
//
// A cluster has a head and kBlockRows rows of the batch; each of its CTAs kValueColumns of the values and as many of
// the columns of o: it merges these, and all get them through distributed shared memory.
#pragma once

#include "draft/block.cuh"
#include "draft/keys.cuh"

namespace twostep::draft {

// As values(), with what sm90_attend() left in more than one part.   sums [R, splits, kK * heads, kKvLora] FP16;
// stats alike, without columns.   Grid (kV / kValueColumns, heads, row groups of kBlockRows), clusters of the whole x,
// block kHalfThreads.   memory: ValuesShared.
template <class Model>
__device__ inline void merge_values(const u16* sums, const PartStats* stats, int splits, const u16* kv_b,
                                    const u16* gate, i64 rows, u16* out, void* memory) {
  constexpr int kCtas = Model::kV / kValueColumns;
  constexpr int kColumns = Model::kKvLora / kCtas;  // of o, of a CTA
  constexpr int kVectors = kColumns / 8;            // of eight: of so many lanes
  constexpr int kSlots = kWarp / kVectors;          // lanes that share the parts of a vector
  constexpr int kAtOnce = 9;                        // loads under way
  constexpr int kRows = Model::kK * Model::kHeads, kWarps = kHalfThreads / kWarp;
  static_assert(Model::kV % kValueColumns == 0 && kCtas <= 8 && kVectors <= kWarp && kWarp % kVectors == 0);
  auto& s = *static_cast<ValuesShared<Model>*>(memory);
  const int head = blockIdx.y, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int slot = lane / kVectors, vector = lane % kVectors;
  const i64 first = i64(blockIdx.z) * kBlockRows;
  const int count = rows - first < kBlockRows ? int(rows - first) : kBlockRows;
  cluster_arrive_relaxed();  // this CTA is there
  pdl_launch();
  load_values(s, kv_b, head);
  pdl_wait();

  // ---- Merge this CTA's columns: a warp has every eighth row
  const int column = blockIdx.x * kColumns + 8 * vector;
  const int slab = 2 * column / Model::kKvLora * 4 + column % 64 / 16;
#pragma unroll 1
  for (int row = warp; row < kBlockRows; row += kWarps) {
    float sum[8] = {}, total = 0;
    if (row < count) {
      const i64 r = (first + row) / Model::kK, j = (first + row) % Model::kK;
      const auto part = [&](int split) { return (r * splits + split) * kRows + j * Model::kHeads + head; };
      float highest = -infinity();
      for (int split = lane; split < splits; split += kWarp) highest = fmaxf(highest, stats[part(split)].base);
      for (int step = kWarp / 2; step > 0; step /= 2)
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
      for (int of_slot = slot; of_slot < splits; of_slot += kAtOnce * kSlots) {
        float2 of_part[kAtOnce];
        float scale[kAtOnce];
        uint4 value[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int split = of_slot + i * kSlots;
          const bool has = split < splits;
          of_part[i] = has ? *reinterpret_cast<const float2*>(&stats[part(split)]) : make_float2(-infinity(), 0);
          scale[i] = has ? stats[part(split)].scale[slab] : 0.0f;
          value[i] = has ? *reinterpret_cast<const uint4*>(sums + part(split) * Model::kKvLora + column)
                         : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (of_part[i].y == 0) continue;  // empty: what lies there is of another step
          const float weight = exp2_approx(of_part[i].x - highest);
          total += weight * of_part[i].y;
          const u32 two[4] = {value[i].x, value[i].y, value[i].z, value[i].w};
#pragma unroll
          for (int c = 0; c < 8; ++c)
            sum[c] += weight * scale[i] * f16_to_float(u16(c % 2 == 0 ? two[c / 2] : two[c / 2] >> 16));
        }
      }
    }
#pragma unroll
    for (int step = kVectors; step < kWarp; step *= 2) {
      total += __shfl_xor_sync(0xffffffffu, total, step);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], step);
    }
    const float scale = total == 0 ? 0.0f : 1.0f / total;
    const uint4 merged =
        make_uint4(pack_bf16(sum[0] * scale, sum[1] * scale), pack_bf16(sum[2] * scale, sum[3] * scale),
                   pack_bf16(sum[4] * scale, sum[5] * scale), pack_bf16(sum[6] * scale, sum[7] * scale));
    if (row == warp) cluster_wait();  // the others are there
    for (int cta = slot; cta < kCtas; cta += kSlots) store_cluster(smem_address(&s.o[row][column]), merged, cta);
  }
  copy_async_commit();
  copy_async_wait<0>();
  cluster_arrive();
  cluster_wait();  // o and W are there
  multiply_values(s, gate, head, first, count, out);
}

}  // namespace twostep::draft
