// Decode MLA over the paged latent cache, split over the context (spec: drafter 5.6 B7, 5.7, 5.8).
//
//   score[j, head, key] = kScale * (q[j, head] . row[key])          row = [latent | rope] of the cache
//   o[j, head] = sum over visible keys of softmax(score) * row[key][0 .. kKvLora - 1]
//
// The k rows of a request and all heads share the keys: kK * kHeads query rows, kQueryRows of them per CTA. What is
// visible, and what becomes of the rest: keys.cuh. A part of the context is read by one CTA per query tile; parts meet
// in `merge`, in a fixed order, in FP32. The rows of a tile come by bulk copies, kStages tiles under way at once; each
// has a thread that looks up its page a tile ahead. On sm_90a: sm90_attention.cuh.
#pragma once

#include "draft/keys.cuh"

namespace twostep::draft {

constexpr int kQueryRows = 32;  // two tiles of 16
constexpr int kStages = 2;      // tiles of keys under way
constexpr int kAttendThreads = 512;
constexpr int kScoreSlices = 4;  // of the dot products of a tile: each is summed by other warps
constexpr int kMergeThreads = 256;
constexpr int kMergeColumns = 8 * kWarp;  // of one CTA: eight per lane
constexpr int kMaxSplits = 256;           // parts of a context

template <class Model>
struct AttendShared {
  static constexpr int kStride = Model::kCacheWidth + 8;  // rows 16 bytes apart modulo 128: ldmatrix without conflicts
  static constexpr int kPStride = kKeys + 8;
  u16 q[kQueryRows][kStride];
  u16 keys[kStages][kKeys][kStride];
  u16 p[kQueryRows][kPStride];
  float scores[kScoreSlices][kQueryRows][kKeys + 4];
  float maximum[kQueryRows], total[kQueryRows], shrink[kQueryRows];
  u64 arrived[kStages];  // mbarrier: each key's owner, and its bytes
  int state[kStages][kKeys];
};

// One request's part of the context for kQueryRows query rows.
//   q [M, heads, kCacheWidth]; position [M]; end [R]
//   o [M, heads, kKvLora] where splits is 1; else sums [R, splits, kK * heads, kKvLora] and stats alike,
//   without columns: the largest score, of powers of two, and the sum of 2^(score - largest). An empty part leaves
//   (-inf, 0) and no sums.
// Grid (query tiles, splits, R), block kAttendThreads, dynamic shared memory sizeof(AttendShared<Model>).
template <class Model, bool kCausal>
__device__ inline void attend(const Batch& batch, const u16* q, const i64* position, const i64* end, Cache cache,
                              i64 window, int splits, u16* o, float* sums, PartStats* stats, void* memory) {
  static_assert(Model::kCacheWidth % 16 == 0 && Model::kKvLora % 16 == 0);
  constexpr int kRows = Model::kK * Model::kHeads;  // query rows of a request
  constexpr float kLogScale = kLog2E * Model::kScale;
  constexpr int kPairs = Model::kKvLora / 16;  // tiles of 16 output columns
  constexpr int kWarps = kAttendThreads / kWarp;
  constexpr int kRowShare = kAttendThreads / kQueryRows;  // threads that share a row of the softmax
  static_assert(kWarps == kScoreSlices * (kKeys / 16));
  constexpr int kPairsOfWarp = (kPairs + kWarps - 1) / kWarps;
  auto& s = *static_cast<AttendShared<Model>*>(memory);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first_row = blockIdx.x * kQueryRows;
  const int split = blockIdx.y;
  const i64 r = blockIdx.z;
  if (threadIdx.x == 0) {
    for (u64& barrier : s.arrived) barrier_init(smem_address(&barrier), kKeys);
    barrier_init_fence();
  }
  pdl_launch();
  pdl_wait();

  // ---- Load q
  constexpr int kPieces = Model::kCacheWidth / 8;
  const u16* q_rows = q + (r * kRows + first_row) * Model::kCacheWidth;
  for (int i = threadIdx.x; i < kQueryRows * kPieces; i += kAttendThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const bool is = first_row + row < kRows;
    copy_async(smem_address(&s.q[row][8 * piece]), is ? q_rows + 8 * i : q, is);
  }
  copy_async_commit();

  // ---- This CTA's keys
  const KeysOfPart<Model, kCausal> part(position, end, window, splits, split, r);
  // Thread `own_key` of the keys of a tile finds it and fetches it.
  constexpr int kKeysOfWarp = kKeys / kWarps;
  constexpr u32 kRowBytes = 2 * Model::kCacheWidth;
  const bool owner = lane < kKeysOfWarp;
  const int own_key = warp * kKeysOfWarp + lane;
  const auto find = [&](u32 tile) { return owner ? part.place_of(batch, cache, r, tile + u32(own_key)) : i64(-1); };
  const auto fetch = [&](i64 at, int stage) {
    if (!owner) return;
    const auto arrived = smem_address(&s.arrived[stage]);
    u16* row = s.keys[stage][own_key];
    s.state[stage][own_key] = at < 0 ? kUnseen : kSeen;
    if (at >= 0) {
      barrier_arrive_expect(arrived, kRowBytes);
      bulk_load(smem_address(row), cache.data + at, kRowBytes, arrived);
    } else {
      for (int piece = 0; piece < kPieces; ++piece) reinterpret_cast<uint4*>(row)[piece] = make_uint4(0, 0, 0, 0);
      fence_proxy_async();
      barrier_arrive(arrived);
    }
  };
  static_assert(kStages == 2);
  const i64 at0 = find(part.begin), at1 = find(part.begin + kKeys);
  __syncthreads();  // the barriers are there
  if (part.begin < part.stop) fetch(at0, 0);
  if (part.begin + kKeys < part.stop) fetch(at1, 1);
  const int softmax_row = threadIdx.x / kRowShare, softmax_share = threadIdx.x % kRowShare;
  const i64 own = part.position_of(first_row + softmax_row);
  float largest = -infinity(), total = 0;  // of the row, in all threads that share it
  copy_async_wait<0>();
  __syncthreads();                        // q is there
  float acc[kPairsOfWarp][2][2][4] = {};  // [pair][tile of 16 rows][8 columns]

  int stage = 0;
  u32 parity = 0;
  for (u32 tile = part.begin; tile < part.stop; tile += kKeys) {
    auto& keys = s.keys[stage];
    const u32 next = tile + kStages * kKeys;  // into this tile's room
    const i64 next_at = find(next);
    while (!barrier_try_wait(smem_address(&s.arrived[stage]), parity)) {
    }
    if (part.is_edge(tile)) {
      clear_spoilt<kWarps, kPieces>(part, tile, s.state[stage], [&](int key, int i) -> uint4& {
        return *reinterpret_cast<uint4*>(&keys[key][8 * i]);
      });
      __syncthreads();  // what was spoilt is told
    }

    // ---- Scores: a warp has all query rows, 16 keys, and every fourth step of 16 of the dot product
    {
      constexpr int kSteps = Model::kCacheWidth / 16;
      const int keys16 = warp % (kKeys / 16) * 16, slice = warp / (kKeys / 16);
      float score[2][2][4] = {};  // [tile of 16 rows][8 keys]
#pragma unroll
      for (int i = 0; i < (kSteps + kScoreSlices - 1) / kScoreSlices; ++i) {
        const int step = i * kScoreSlices + slice;
        if (step >= kSteps) break;
        const int c = 16 * step;
        u32 b[4];
        load_matrices(b, smem_address(&keys[keys16 + lane / 16 * 8 + lane % 8][c + lane / 8 % 2 * 8]));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          u32 a[4];
          load_matrices(a, smem_address(&s.q[16 * m + lane % 16][c + lane / 16 * 8]));
          mma_16x8x16(score[m][0], a, b[0], b[1]);
          mma_16x8x16(score[m][1], a, b[2], b[3]);
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; i += 2)
            *reinterpret_cast<float2*>(&s.scores[slice][16 * m + lane / 4 + i / 2 * 8][keys16 + 8 * n + lane % 4 * 2]) =
                make_float2(score[m][n][i], score[m][n][i + 1]);
    }
    __syncthreads();  // the scores are there

    // ---- Softmax
    {
      const int row = softmax_row, share = softmax_share;
      const auto seen = part.seen_by(own, tile);
      float score[kKeys / kRowShare], highest = -infinity();
#pragma unroll
      for (int i = 0; i < kKeys / kRowShare; ++i) {
        const int of_tile = share + kRowShare * i;
        const int state = s.state[stage][of_tile];
        const bool visible = state != kUnseen && of_tile >= seen.first && of_tile <= seen.last;
        float sum = 0;
#pragma unroll
        for (int slice = 0; slice < kScoreSlices; ++slice) sum += s.scores[slice][row][of_tile];
        score[i] = visible ? kLogScale * sum : -infinity();
        if (visible && state == kSpoilt) score[i] = not_a_number();
        highest = fmaxf(highest, score[i]);
      }
      for (int step = kRowShare / 2; step > 0; step /= 2)
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
      highest = fmaxf(highest, largest);
      const float base = highest == -infinity() ? 0.0f : highest;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kKeys / kRowShare; ++i) {
        const float p = exp2_approx(score[i] - base);
        s.p[row][share + kRowShare * i] = to_bf16(p);
        sum += p;
      }
      for (int step = kRowShare / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      const float shrink = exp2_approx(largest - base);
      if (share == 0) s.shrink[row] = shrink;
      total = total * shrink + sum;
      largest = highest;
    }
    __syncthreads();  // p and shrink are there

    // ---- Sums: a warp has every 16th pair of output columns
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float upper = s.shrink[16 * m + lane / 4], lower = s.shrink[16 * m + lane / 4 + 8];
#pragma unroll
      for (int n = 0; n < kPairsOfWarp; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          acc[n][m][half][0] *= upper;
          acc[n][m][half][1] *= upper;
          acc[n][m][half][2] *= lower;
          acc[n][m][half][3] *= lower;
        }
    }
#pragma unroll
    for (int key = 0; key < kKeys; key += 16) {
      u32 a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) load_matrices(a[m], smem_address(&s.p[16 * m + lane % 16][key + lane / 16 * 8]));
#pragma unroll
      for (int n = 0; n < kPairsOfWarp; ++n) {
        const int column = (n * kWarps + warp) * 16;
        if (column >= Model::kKvLora) continue;
        u32 b[4];
        load_matrices_transposed(b, smem_address(&keys[key + lane % 16][column + lane / 16 * 8]));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_16x8x16(acc[n][m][0], a[m], b[0], b[1]);
          mma_16x8x16(acc[n][m][1], a[m], b[2], b[3]);
        }
      }
    }
    __syncthreads();  // the tile is no longer read
    if (next < part.stop) fetch(next_at, stage);
    stage ^= 1;
    parity ^= stage == 0;
  }

  // ---- Store
  if (softmax_share == 0) {
    s.maximum[softmax_row] = largest;
    s.total[softmax_row] = total;
  }
  __syncthreads();  // the statistics are there
  const i64 part_row = (r * splits + split) * kRows + first_row;
#pragma unroll
  for (int n = 0; n < kPairsOfWarp; ++n) {
    const int column = (n * kWarps + warp) * 16;
    if (column >= Model::kKvLora) continue;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const int row = 16 * m + lane / 4 + i / 2 * 8;
          if (first_row + row >= kRows) continue;
          const int at = column + 8 * half + lane % 4 * 2;
          const float* value = &acc[n][m][half][i];
          if (splits == 1) {
            const float scale = s.total[row] == 0 ? 0.0f : 1.0f / s.total[row];  // a row that sees nothing gives 0
            *reinterpret_cast<u32*>(o + (r * kRows + first_row + row) * Model::kKvLora + at) =
                pack_bf16(value[0] * scale, value[1] * scale);
          } else if (part.begin < part.stop) {
            *reinterpret_cast<float2*>(sums + (part_row + row) * Model::kKvLora + at) = make_float2(value[0], value[1]);
          }
        }
  }
  if (splits > 1 && threadIdx.x < kQueryRows && first_row + int(threadIdx.x) < kRows) {
    stats[part_row + threadIdx.x].base = s.maximum[threadIdx.x];
    stats[part_row + threadIdx.x].total = s.total[threadIdx.x];
  }
}

// Eight values of a part's sums, as they lie in memory: all loads of a warp go out before the first is converted.
template <class Sum>
struct EightSums {
  uint4 raw[sizeof(Sum) / 2];
  __device__ void load(const Sum* from) {
#pragma unroll
    for (int i = 0; i < int(sizeof(Sum) / 2); ++i) raw[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  __device__ float operator[](int i) const {
    const int word = i % (16 / sizeof(Sum)) * sizeof(Sum) / 4;
    const uint4& piece = raw[i * sizeof(Sum) / 16];
    const u32 bits = word == 0 ? piece.x : word == 1 ? piece.y : word == 2 ? piece.z : piece.w;
    if constexpr (sizeof(Sum) == 4) return __uint_as_float(bits);
    else return f16_to_float(u16(i % 2 == 0 ? bits : bits >> 16));
  }
};

// o = the parts of the attention, weighted by 2^(base - largest base), over their sum. 2^warps_log2 warps of a CTA
// share kMergeColumns columns of a row: each has its share of the parts, their loads under way before the weights are
// known, and their sums meet in a fixed order. Sum: float, as attend() leaves them, or u16 for FP16 multiples of a
// slab's scale, as sm90_attend() does. Grid (requests * kK * kHeads * column blocks * 2^warps_log2 / 8 rounded up),
// block kMergeThreads.
template <class Model, class Sum>
__device__ inline void merge(const Sum* sums, const PartStats* stats, int splits, i64 requests, int warps_log2,
                             u16* o) {
  constexpr int kRows = Model::kK * Model::kHeads, kWarps = kMergeThreads / kWarp;
  constexpr int kColumnBlocks = (Model::kKvLora + kMergeColumns - 1) / kMergeColumns;
  constexpr bool kScaled = sizeof(Sum) == 2;
  constexpr int kAtOnce = kScaled ? 9 : 4;  // loads under way: 72 or 32 parts of 8 warps
  __shared__ float4 given[kWarps / 2][2][kWarp];
  __shared__ float given_total[kWarps / 2];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int warps = 1 << warps_log2, of_warp = warp & (warps - 1);
  const i64 unit = (i64(blockIdx.x) * kWarps + warp) >> warps_log2;
  const i64 row = unit / kColumnBlocks;  // of all requests
  const int column = int(unit % kColumnBlocks) * kMergeColumns + 8 * lane;
  const bool is = row < requests * kRows, inside = is && column < Model::kKvLora;
  const int slab = 2 * column / Model::kKvLora * 4 + column % 64 / 16;  // kKvLora is a multiple of 128 then
  const i64 first_part = row / kRows * splits * kRows + row % kRows;    // the next ones kRows on
  pdl_launch();
  pdl_wait();
  float highest = -infinity();
#pragma unroll
  for (int i = 0; i < kMaxSplits / kWarp; ++i)
    if (const int split = lane + i * kWarp; is && split < splits)
      highest = fmaxf(highest, stats[first_part + split * kRows].base);
  // This warp's parts, a round of loads for as many as it has at once.
  const PartStats* of = stats + first_part + of_warp * kRows;
  const Sum* from = sums + (first_part + of_warp * kRows) * Model::kKvLora + column;
  const i64 apart = i64(warps) * kRows;
  float2 of_part[kAtOnce];
  float scale[kAtOnce];
  EightSums<Sum> value[kAtOnce];
  const auto load_parts = [&](int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, of += apart, from += apart * Model::kKvLora) {
      const bool has = inside && first + i * warps < splits;
      of_part[i] = has ? *reinterpret_cast<const float2*>(of) : make_float2(-infinity(), 0);
      scale[i] = kScaled && has ? of->scale[slab] : 1.0f;
      if (has) value[i].load(from);
    }
  };
  load_parts(of_warp);
  for (int step = kWarp / 2; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));

  float sum[8] = {}, total = 0;
  for (int first = of_warp;;) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (of_part[i].y == 0) continue;  // empty: what lies there is of another step
      const float weight = exp2_approx(of_part[i].x - highest);
      total += weight * of_part[i].y;
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] += weight * scale[i] * value[i][c];
    }
    first += kAtOnce * warps;
    if (first >= splits) break;
    load_parts(first);
  }
  for (int half = warps / 2; half > 0; half /= 2) {
    const int slot = (warp - of_warp) / 2 + (of_warp & (half - 1));
    if (of_warp >= half && of_warp < 2 * half) {
      given[slot][0][lane] = {sum[0], sum[1], sum[2], sum[3]};
      given[slot][1][lane] = {sum[4], sum[5], sum[6], sum[7]};
      if (lane == 0) given_total[slot] = total;
    }
    __syncthreads();  // the sums of the second half are there
    if (of_warp < half) {
      const float4 a = given[slot][0][lane], b = given[slot][1][lane];
      sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
      sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
      total += given_total[slot];
    }
    __syncthreads();  // they may be written again
  }
  if (of_warp != 0 || !inside) return;
  const float of_total = total == 0 ? 0.0f : 1.0f / total;
  *reinterpret_cast<uint4*>(o + row * Model::kKvLora + column) = {
      pack_bf16(sum[0] * of_total, sum[1] * of_total), pack_bf16(sum[2] * of_total, sum[3] * of_total),
      pack_bf16(sum[4] * of_total, sum[5] * of_total), pack_bf16(sum[6] * of_total, sum[7] * of_total)};
}

}  // namespace twostep::draft
