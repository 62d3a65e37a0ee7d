// Decode MLA over the paged latent cache, split over the context (spec: drafter 5.6 B7, 5.7, 5.8).
//
//   score[j, head, key] = kScale * (q[j, head] . row[key])          row = [latent | rope] of the cache
//   o[j, head] = sum over visible keys of softmax(score) * row[key][0 .. kKvLora - 1]
//
// The k rows of a request and all heads share the keys: kK * kHeads query rows, kQueryRows of them per CTA. Visible:
// keys before `end` on good pages; with kCausal, up to the row's own position; with a window, the last `window` of
// them. A part of the context is read by one CTA per query tile; parts meet in `merge`, in their order, in FP32. A key
// has weight 0 where it is not visible, and 0 * NaN is NaN. So a key that no row sees arrives as zeros, and one that
// some rows see alone (behind their own position, or as the window moves on) as zeros where it is not finite: it then
// scores NaN for those who see it, and nothing for the others. PDL: the cache's rows of this block come from the kernel
// before, so nothing is read before pdl_wait().
#pragma once

#include "draft/row.cuh"

namespace twostep::draft {

constexpr int kQueryRows = 32;  // two tiles of 16
constexpr int kKeys = 64;       // of one tile: four groups of 16
constexpr int kAttendThreads = 256;
constexpr int kMergeThreads = 256;
constexpr int kMaxSplits = 256;

template <class Model>
struct AttendShared {
  static constexpr int kStride = Model::kCacheWidth + 8;  // rows 16 bytes apart modulo 128: ldmatrix without conflicts
  static constexpr int kPStride = kKeys + 8;
  u16 q[kQueryRows][kStride];
  u16 keys[kKeys][kStride];
  u16 p[kQueryRows][kPStride];
  float scores[kQueryRows][kKeys + 4];
  float maximum[kQueryRows], total[kQueryRows], shrink[kQueryRows];
  // Of this tile and of the next: where a key is in the cache (-1: no row sees it), and whether it arrived spoilt.
  i64 at[2][kKeys];
  int spoilt[2][kKeys];
};

__device__ inline bool are_finite(u32 two) { return (two & 0x7f80u) != 0x7f80u && (two & 0x7f800000u) != 0x7f800000u; }
__device__ inline bool are_finite(uint4 eight) {
  return are_finite(eight.x) && are_finite(eight.y) && are_finite(eight.z) && are_finite(eight.w);
}

// One request's part of the context for kQueryRows query rows.
//   q [M, heads, kCacheWidth]; position [M]; end [R]
//   o [M, heads, kKvLora] where splits is 1; else sums [R, splits, kK * heads, kKvLora] and stats [..][2]: the largest
//   score and the sum of exp(score - largest). An empty part leaves stats (-inf, 0) and no sums.
// Grid (query tiles, splits, R), block kAttendThreads, dynamic shared memory sizeof(AttendShared<Model>).
template <class Model, bool kCausal>
__device__ inline void attend(const Batch& batch, const u16* q, const i64* position, const i64* end, Cache cache,
                              i64 window, int splits, u16* o, float* sums, float* stats, void* memory) {
  static_assert(Model::kCacheWidth % 16 == 0 && Model::kKvLora % 16 == 0);
  constexpr int kRows = Model::kK * Model::kHeads;  // query rows of a request
  constexpr int kPairs = Model::kKvLora / 16;       // tiles of 16 output columns
  constexpr int kWarps = kAttendThreads / kWarp;
  constexpr int kPairsOfWarp = (kPairs + kWarps - 1) / kWarps;
  auto& s = *static_cast<AttendShared<Model>*>(memory);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first_row = blockIdx.x * kQueryRows;
  const int split = blockIdx.y;
  const i64 r = blockIdx.z;
  pdl_wait();
  pdl_launch();

  // ---- This CTA's keys
  const i64 keys_end = end[r];
  const i64 top = position[r * Model::kK];  // of the block's first row
  const auto window_of = [&](i64 at) {      // the first key that a row at this position sees
    const i64 first = (at < Model::kMaxLen ? at : i64(Model::kMaxLen - 1)) - window + 1;
    return window > 0 && first > 0 ? first : 0;
  };
  const i64 first_seen = window_of(top), last_window = window_of(top + Model::kK - 1);
  const i64 low = first_seen / kKeys * kKeys;
  const i64 tiles = (keys_end - low + kKeys - 1) / kKeys;
  const i64 tiles_of_split = (tiles + splits - 1) / splits;
  const i64 begin = low + split * tiles_of_split * kKeys;
  i64 stop = begin + tiles_of_split * kKeys;
  if (stop > keys_end) stop = keys_end;
  const auto place = [&](i64 tile, int turn) {
    if (threadIdx.x >= kKeys) return;
    const i64 key = tile + threadIdx.x;
    s.at[turn][threadIdx.x] = key >= first_seen && key < stop ? row_offset<Model>(batch, cache, r, key) : -1;
    s.spoilt[turn][threadIdx.x] = 0;
  };
  place(begin, 0);

  // ---- Load q
  for (int i = threadIdx.x; i < kQueryRows * (Model::kCacheWidth / 8); i += kAttendThreads) {
    const int row = i / (Model::kCacheWidth / 8), piece = i % (Model::kCacheWidth / 8);
    uint4 value = make_uint4(0, 0, 0, 0);
    if (first_row + row < kRows)
      value = reinterpret_cast<const uint4*>(q + (r * kRows + first_row + row) * Model::kCacheWidth)[piece];
    *reinterpret_cast<uint4*>(&s.q[row][8 * piece]) = value;
  }
  if (threadIdx.x < kQueryRows) {
    s.maximum[threadIdx.x] = -infinity();
    s.total[threadIdx.x] = 0;
  }
  float acc[kPairsOfWarp][2][2][4] = {};  // [pair][tile of 16 rows][8 columns]

  int turn = 0;
  for (i64 tile = begin; tile < stop; tile += kKeys, turn ^= 1) {
    // ---- Load a tile of keys
    __syncthreads();  // the tile before is no longer read; q, the statistics and the keys' places are there
    for (int i = threadIdx.x; i < kKeys * (Model::kCacheWidth / 8); i += kAttendThreads) {
      const int key = i / (Model::kCacheWidth / 8), piece = i % (Model::kCacheWidth / 8);
      uint4 value = make_uint4(0, 0, 0, 0);
      const i64 at = s.at[turn][key];
      if (at >= 0) value = reinterpret_cast<const uint4*>(cache.data + at)[piece];
      const bool of_some = (kCausal && tile + key > top) || tile + key < last_window;
      if (of_some && !are_finite(value)) {
        value = make_uint4(0, 0, 0, 0);
        s.spoilt[turn][key] = 1;
      }
      *reinterpret_cast<uint4*>(&s.keys[key][8 * piece]) = value;
    }
    place(tile + kKeys, turn ^ 1);
    __syncthreads();  // the tile is there, and the places of the next

    // ---- Scores: a warp has 16 query rows and 16 keys
    {
      const int rows16 = warp % 2 * 16, keys16 = warp / 2 * 16;
      float score[2][4] = {};
#pragma unroll 4
      for (int c = 0; c < Model::kCacheWidth; c += 16) {
        u32 a[4], b[4];
        load_matrices(a, smem_address(&s.q[rows16 + lane % 16][c + lane / 16 * 8]));
        load_matrices(b, smem_address(&s.keys[keys16 + lane / 16 * 8 + lane % 8][c + lane / 8 % 2 * 8]));
        mma_16x8x16(score[0], a, b[0], b[1]);
        mma_16x8x16(score[1], a, b[2], b[3]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s.scores[rows16 + lane / 4 + i / 2 * 8][keys16 + 8 * n + lane % 4 * 2 + i % 2] = score[n][i];
    }
    __syncthreads();  // the scores are there

    // ---- Softmax: eight threads share a row
    {
      const int row = threadIdx.x / 8, part = threadIdx.x % 8;
      const int index = first_row + row;  // of the request's query rows
      const i64 at = index < kRows ? position[r * Model::kK + index / Model::kHeads] : -1;
      const i64 oldest = window_of(at);
      float score[kKeys / 8], highest = -infinity();
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        const i64 key = tile + part + 8 * i;
        const bool visible = at >= 0 && s.at[turn][part + 8 * i] >= 0 && (!kCausal || key <= at) && key >= oldest;
        score[i] = visible ? Model::kScale * s.scores[row][part + 8 * i] : -infinity();
        if (visible && s.spoilt[turn][part + 8 * i]) score[i] = not_a_number();
        highest = fmaxf(highest, score[i]);
      }
      for (int step = 4; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
      const float before = s.maximum[row];
      highest = fmaxf(highest, before);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        const float p = score[i] == -infinity() ? 0.0f : expf(score[i] - highest);
        s.p[row][part + 8 * i] = to_bf16(p);
        sum += p;
      }
      for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (part == 0) {
        const float shrink = highest == -infinity() ? 1.0f : expf(before - highest);
        s.shrink[row] = shrink;
        s.total[row] = s.total[row] * shrink + sum;
        s.maximum[row] = highest;
      }
    }
    __syncthreads();  // p and shrink are there

    // ---- Sums: a warp has every eighth pair of output columns
#pragma unroll
    for (int n = 0; n < kPairsOfWarp; ++n) {
      const int column = (n * kWarps + warp) * 16;
      if (column >= Model::kKvLora) continue;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float upper = s.shrink[16 * m + lane / 4], lower = s.shrink[16 * m + lane / 4 + 8];
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
        u32 b[4];
        load_matrices_transposed(b, smem_address(&s.keys[key + lane % 16][column + lane / 16 * 8]));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          u32 a[4];
          load_matrices(a, smem_address(&s.p[16 * m + lane % 16][key + lane / 16 * 8]));
          mma_16x8x16(acc[n][m][0], a, b[0], b[1]);
          mma_16x8x16(acc[n][m][1], a, b[2], b[3]);
        }
      }
    }
  }

  // ---- Store
  __syncthreads();  // the statistics of the last tile are there
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
          } else if (begin < stop) {
            *reinterpret_cast<float2*>(sums + (part_row + row) * Model::kKvLora + at) = make_float2(value[0], value[1]);
          }
        }
  }
  if (splits > 1 && threadIdx.x < kQueryRows && first_row + int(threadIdx.x) < kRows) {
    float* of_row = stats + 2 * (part_row + threadIdx.x);
    of_row[0] = s.maximum[threadIdx.x];
    of_row[1] = s.total[threadIdx.x];
  }
}

// o = the parts of `attend`, weighted by exp(largest - largest of all), over their sum. Weights first, so that the
// loads of many parts are under way at once.   Grid (kK * heads, R), block kMergeThreads.
template <class Model>
__device__ inline void merge(const float* sums, const float* stats, int splits, u16* o) {
  constexpr int kRows = Model::kK * Model::kHeads;
  __shared__ float largest[kMaxSplits], share[kMaxSplits], weight[kMaxSplits];
  const i64 row = blockIdx.x, r = blockIdx.y;
  const auto part = [&](int split) { return (r * splits + split) * kRows + row; };
  pdl_wait();
  pdl_launch();
  for (int split = threadIdx.x; split < splits; split += kMergeThreads) {
    const float2 two = reinterpret_cast<const float2*>(stats)[part(split)];
    largest[split] = two.x;
    share[split] = two.y;
  }
  __syncthreads();  // the statistics are there
  float highest = -infinity(), total = 0;
  for (int split = 0; split < splits; ++split) highest = fmaxf(highest, largest[split]);
  for (int split = threadIdx.x; split < splits; split += kMergeThreads)
    weight[split] = share[split] == 0 ? 0.0f : expf(largest[split] - highest);
  __syncthreads();  // the weights are there
  for (int split = 0; split < splits; ++split) total += weight[split] * share[split];
  const float scale = total == 0 ? 0.0f : 1.0f / total;
  for (int c = threadIdx.x * 2; c < Model::kKvLora; c += 2 * kMergeThreads) {
    float x = 0, y = 0;
#pragma unroll 8
    for (int split = 0; split < splits; ++split) {
      if (weight[split] == 0) continue;  // an empty part has no sums
      const float2 two = *reinterpret_cast<const float2*>(sums + part(split) * Model::kKvLora + c);
      x += weight[split] * two.x;
      y += weight[split] * two.y;
    }
    *reinterpret_cast<u32*>(o + (r * kRows + row) * Model::kKvLora + c) = pack_bf16(x * scale, y * scale);
  }
}

}  // namespace twostep::draft
