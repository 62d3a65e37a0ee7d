// The parts of the attention of sm90_attention.cuh, merged, and the half of kv_b behind them, in one launch (spec:
// drafter 5.6 B7, B8; 5.8).
//
//   o[row, c] = sum over parts of 2^(base - largest base) scale v[row, c]  /  sum over parts of 2^(..) total
//   out[row, d] = bf16( sum over c of bf16(o[row, c]) W_UV[d, c] ), then times sigmoid(gate) where it is on
//
// A cluster has a head and kMergedRows rows of the batch; each of its CTAs kValueColumns of the values and as many of
// the columns of o: it merges these, and all get them through distributed shared memory. W_UV goes straight into
// operands: with so little shared memory, CTAs are there beside those of the attention when these end, and the weights
// of the next linear are under way at once.
#pragma once

#include "draft/block.cuh"
#include "draft/keys.cuh"

namespace twostep::draft {

constexpr int kMergedRows = 8;

template <class Model>
struct MergeValuesShared {
  alignas(16) u16 o[kMergedRows][Model::kKvLora + kPad];
  float parts[kHalfThreads / kWarp][kMergedRows][kValueColumns];
};

// As values(), with what sm90_attend() left in more than one part.   sums [R, splits, kK * heads, kKvLora] FP16;
// stats alike, without columns.   Grid (kV / kValueColumns, heads, row groups of kMergedRows), clusters of the whole x,
// block kHalfThreads.   memory: MergeValuesShared.
template <class Model>
__device__ inline void merge_values(const u16* sums, const PartStats* stats, int splits, const u16* kv_b,
                                    const u16* gate, i64 rows, u16* out, void* memory) {
  constexpr int kCtas = Model::kV / kValueColumns;
  constexpr int kColumns = Model::kKvLora / kCtas;  // of o, of a CTA
  constexpr int kVectors = kColumns / 8;            // of eight: of so many lanes
  constexpr int kSlots = kWarp / kVectors;          // lanes that share the parts of a vector
  constexpr int kAtOnce = kWarp / kSlots;           // loads under way: 32 parts
  constexpr int kRows = Model::kK * Model::kHeads, kWarps = kHalfThreads / kWarp;
  constexpr int kSteps = (Model::kKvLora / 32 + kWarps - 1) / kWarps;  // of 32 columns of o, of a warp
  static_assert(Model::kV % kValueColumns == 0 && kCtas <= 8 && kVectors <= kWarp && kWarp % kVectors == 0);
  static_assert(kWarps == kMergedRows && Model::kKvLora % 32 == 0);
  auto& s = *static_cast<MergeValuesShared<Model>*>(memory);
  const int head = blockIdx.y, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int slot = lane / kVectors, vector = lane % kVectors;
  const i64 first = i64(blockIdx.z) * kMergedRows;
  const int count = rows - first < kMergedRows ? int(rows - first) : kMergedRows;
  cluster_arrive_relaxed();  // this CTA is there
  pdl_launch();

  // ---- Load W_UV, as operands of the multiply
  const auto step_of = [&](int i) { return 32 * (warp + i * kWarps); };
  const u16* w =
      kv_b +
      (i64(head) * (Model::kNope + Model::kV) + Model::kNope + blockIdx.x * kValueColumns + lane / 4) * Model::kKvLora +
      lane % 4 * 2;
  u32 b[kSteps][2][4];  // [step][8 values][8 columns of o]
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        b[i][n][c] = step_of(i) < Model::kKvLora
                         ? *reinterpret_cast<const u32*>(w + n * 8 * Model::kKvLora + step_of(i) + 8 * c)
                         : 0u;
  pdl_wait();

  // ---- Merge this CTA's columns: a warp has a row
  const int column = blockIdx.x * kColumns + 8 * vector;
  const int slab = 2 * column / Model::kKvLora * 4 + column % 64 / 16;
  const u32 row = u32(first) + warp;  // its part 0, then the others: below 2^31
  const u32 part0 = row / Model::kK * u32(splits) * kRows + row % Model::kK * Model::kHeads + head;
  const auto part = [&](int split) { return part0 + u32(split) * kRows; };
  const auto stats_of = [&](int split) {
    return split < splits ? *reinterpret_cast<const float2*>(&stats[part(split)]) : make_float2(-infinity(), 0);
  };
  float sum[8] = {}, total = 0;
  if (warp < count) {
    float highest = -infinity();
    for (int split = lane; split < splits; split += kWarp) highest = fmaxf(highest, stats_of(split).x);
    for (int step = kWarp / 2; step > 0; step /= 2)
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
    for (int of_first = 0; of_first < splits; of_first += kWarp) {
      const float2 own = stats_of(of_first + lane);  // lane l has the weight of part l
      float scale[kAtOnce];
      uint4 value[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int split = of_first + slot + i * kSlots;
        scale[i] = split < splits ? stats[part(split)].scale[slab] : 0.0f;
        value[i] = split < splits ? *reinterpret_cast<const uint4*>(sums + u64(part(split)) * Model::kKvLora + column)
                                  : make_uint4(0, 0, 0, 0);
      }
      const float own_weight = own.y == 0 ? 0.0f : exp2_approx(own.x - highest);
      total += own_weight * own.y;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = __shfl_sync(0xffffffffu, own_weight, slot + i * kSlots);
        if (weight == 0) continue;  // an empty part: what lies there is of another step
        const u32 two[4] = {value[i].x, value[i].y, value[i].z, value[i].w};
#pragma unroll
        for (int c = 0; c < 8; ++c)
          sum[c] += weight * scale[i] * f16_to_float(u16(c % 2 == 0 ? two[c / 2] : two[c / 2] >> 16));
      }
    }
  }
  total = warp_sum(total);
#pragma unroll
  for (int step = kVectors; step < kWarp; step *= 2)
#pragma unroll
    for (int c = 0; c < 8; ++c) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], step);
  const float scale = total == 0 ? 0.0f : 1.0f / total;
  const uint4 merged = make_uint4(pack_bf16(sum[0] * scale, sum[1] * scale), pack_bf16(sum[2] * scale, sum[3] * scale),
                                  pack_bf16(sum[4] * scale, sum[5] * scale), pack_bf16(sum[6] * scale, sum[7] * scale));
  cluster_wait();  // the others are there
  for (int cta = slot; cta < kCtas; cta += kSlots) store_cluster(smem_address(&s.o[warp][column]), merged, cta);
  cluster_arrive();
  cluster_wait();  // o is there

  // ---- Multiply: a warp has every eighth step of 32 of the latent; rows 8 to 15 of the operand are none
  float of_values[2][4] = {};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (step_of(i) >= Model::kKvLora) break;
    u32 a[4];  // of 8 columns each
    load_matrices(a, smem_address(&s.o[lane % 8][step_of(i) + lane / 8 * 8]));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma_16x8x16(of_values[n], {a[0], 0, a[1], 0}, b[i][n][0], b[i][n][1]);
      mma_16x8x16(of_values[n], {a[2], 0, a[3], 0}, b[i][n][2], b[i][n][3]);
    }
  }

  // ---- Reduce over the warps, and store
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) s.parts[warp][lane / 4][8 * n + lane % 4 * 2 + i] = of_values[n][i];
  __syncthreads();  // parts are there
  const int of_row = threadIdx.x / kValueColumns, of_column = threadIdx.x % kValueColumns;
  if (of_row >= count) return;
  float value_sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) value_sum += s.parts[i][of_row][of_column];
  const i64 at = ((first + of_row) * Model::kHeads + head) * Model::kV + blockIdx.x * kValueColumns + of_column;
  out[at] = Model::kGate ? to_bf16(round_bf16(value_sum) * sigmoid(bf16_at(gate, at))) : to_bf16(value_sum);
}

}  // namespace twostep::draft
