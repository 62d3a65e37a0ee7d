// Decode MLA over the paged latent cache, split over the context (spec: drafter 5.6 B7, 5.7, 5.8).
//
//   score[j, head, key] = kScale * (q[j, head] . row[key])          row = [latent | rope] of the cache
//   o[j, head] = sum over visible keys of softmax(score) * row[key][0 .. kKvLora - 1]
//
// The k rows of a request and all heads share the keys: kK * kHeads query rows, kQueryRows of them per CTA. Visible:
// keys before `end` on good pages; with kCausal, up to the row's own position; with kWindow > 0, the last kWindow of
// them. A part of the context is read by one CTA per query tile; parts meet in `merge`, in their order, in FP32. Rows
// that are not visible arrive as zeros and with a score of -inf: whatever they hold does not matter. PDL: the cache's
// rows of this block come from the kernel before, so nothing is read before pdl_wait().
#pragma once

#include "draft/row.cuh"

namespace twostep::draft {

constexpr int kQueryRows = 32;  // two tiles of 16
constexpr int kKeys = 64;       // of one tile: four groups of 16
constexpr int kAttendThreads = 256;

template <class Model>
struct AttendShared {
  static constexpr int kStride = Model::kCacheWidth + 8;  // rows 16 bytes apart modulo 128: ldmatrix without conflicts
  static constexpr int kPStride = kKeys + 8;
  u16 q[kQueryRows][kStride];
  u16 keys[kKeys][kStride];
  u16 p[kQueryRows][kPStride];
  float scores[kQueryRows][kKeys + 4];
  float maximum[kQueryRows], total[kQueryRows], shrink[kQueryRows];
};

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
  i64 low = 0;
  if (window > 0 && keys_end > 0) {
    low = (top < Model::kMaxLen ? top : i64(Model::kMaxLen - 1)) - window + 1;
    low = low < 0 ? 0 : low / kKeys * kKeys;
  }
  const i64 tiles = (keys_end - low + kKeys - 1) / kKeys;
  const i64 tiles_of_split = (tiles + splits - 1) / splits;
  const i64 begin = low + split * tiles_of_split * kKeys;
  i64 stop = begin + tiles_of_split * kKeys;
  if (stop > keys_end) stop = keys_end;

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

  for (i64 tile = begin; tile < stop; tile += kKeys) {
    // ---- Load a tile of keys
    __syncthreads();  // the tile before is no longer read; q and the statistics are there
    for (int i = threadIdx.x; i < kKeys * (Model::kCacheWidth / 8); i += kAttendThreads) {
      const int key = i / (Model::kCacheWidth / 8), piece = i % (Model::kCacheWidth / 8);
      uint4 value = make_uint4(0, 0, 0, 0);
      const i64 at = tile + key < stop ? row_offset<Model>(batch, cache, r, tile + key) : -1;
      if (at >= 0) value = reinterpret_cast<const uint4*>(cache.data + at)[piece];
      *reinterpret_cast<uint4*>(&s.keys[key][8 * piece]) = value;
    }
    __syncthreads();  // the tile is there

    // ---- Scores: a warp has 16 query rows and 16 keys
    {
      const int rows16 = warp % 2 * 16, keys16 = warp / 2 * 16;
      float score[2][4] = {};
      for (int c = 0; c < Model::kCacheWidth; c += 16) {
        u32 a[4], b[4];
        load_matrices(a, smem_address(&s.q[rows16 + lane % 16][c + lane / 16 * 8]));
        load_matrices(b, smem_address(&s.keys[keys16 + lane / 16 * 8 + lane % 8][c + lane / 8 % 2 * 8]));
        mma_16x8x16(score[0], a, b[0], b[1]);
        mma_16x8x16(score[1], a, b[2], b[3]);
      }
      for (int n = 0; n < 2; ++n)
        for (int i = 0; i < 4; ++i)
          s.scores[rows16 + lane / 4 + i / 2 * 8][keys16 + 8 * n + lane % 4 * 2 + i % 2] = score[n][i];
    }
    __syncthreads();  // the scores are there

    // ---- Softmax: eight threads share a row
    {
      const int row = threadIdx.x / 8, part = threadIdx.x % 8;
      const int index = first_row + row;  // of the request's query rows
      const i64 at = index < kRows ? position[r * Model::kK + index / Model::kHeads] : -1;
      const i64 seen = at < Model::kMaxLen ? at : i64(Model::kMaxLen - 1);
      float score[kKeys / 8], highest = -infinity();
      for (int i = 0; i < kKeys / 8; ++i) {
        const i64 key = tile + part + 8 * i;
        const bool visible = at >= 0 && key < stop && (!kCausal || key <= at) && (window == 0 || key > seen - window) &&
                             row_offset<Model>(batch, cache, r, key) >= 0;
        score[i] = visible ? Model::kScale * s.scores[row][part + 8 * i] : -infinity();
        highest = fmaxf(highest, score[i]);
      }
      for (int step = 4; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
      const float before = s.maximum[row];
      highest = fmaxf(highest, before);
      float sum = 0;
      for (int i = 0; i < kKeys / 8; ++i) {
        const float p = highest == -infinity() ? 0.0f : expf(score[i] - highest);
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
    for (int n = 0; n < kPairsOfWarp; ++n) {
      const int column = (n * kWarps + warp) * 16;
      if (column >= Model::kKvLora) break;
      for (int m = 0; m < 2; ++m) {
        const float upper = s.shrink[16 * m + lane / 4], lower = s.shrink[16 * m + lane / 4 + 8];
        for (int half = 0; half < 2; ++half) {
          acc[n][m][half][0] *= upper;
          acc[n][m][half][1] *= upper;
          acc[n][m][half][2] *= lower;
          acc[n][m][half][3] *= lower;
        }
      }
      for (int key = 0; key < kKeys; key += 16) {
        u32 b[4];
        load_matrices_transposed(b, smem_address(&s.keys[key + lane % 16][column + lane / 16 * 8]));
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
  for (int n = 0; n < kPairsOfWarp; ++n) {
    const int column = (n * kWarps + warp) * 16;
    if (column >= Model::kKvLora) break;
    for (int m = 0; m < 2; ++m)
      for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 4; i += 2) {
          const int row = 16 * m + lane / 4 + i / 2 * 8;
          if (first_row + row >= kRows) continue;
          const int at = column + 8 * half + lane % 4 * 2;
          const float* value = &acc[n][m][half][i];
          if (splits == 1) {
            const float scale = s.total[row] > 0 ? 1.0f / s.total[row] : 0.0f;  // a row that sees nothing gives 0
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

// o = the parts of `attend`, weighted by exp(largest - largest of all), over their sum.
// Grid (kK * heads, R), block 128.
template <class Model>
__device__ inline void merge(const float* sums, const float* stats, int splits, u16* o) {
  constexpr int kRows = Model::kK * Model::kHeads;
  const i64 row = blockIdx.x, r = blockIdx.y;
  pdl_wait();
  pdl_launch();
  float highest = -infinity();
  for (int split = 0; split < splits; ++split)
    highest = fmaxf(highest, stats[2 * ((r * splits + split) * kRows + row)]);
  for (int c = threadIdx.x * 2; c < Model::kKvLora; c += 2 * 128) {
    float total = 0, x = 0, y = 0;
    for (int split = 0; split < splits; ++split) {
      const i64 part = (r * splits + split) * kRows + row;
      if (stats[2 * part] == -infinity()) continue;
      const float weight = expf(stats[2 * part] - highest);
      const float2 two = *reinterpret_cast<const float2*>(sums + part * Model::kKvLora + c);
      total += weight * stats[2 * part + 1];
      x += weight * two.x;
      y += weight * two.y;
    }
    const float scale = total > 0 ? 1.0f / total : 0.0f;
    *reinterpret_cast<u32*>(o + (r * kRows + row) * Model::kKvLora + c) = pack_bf16(x * scale, y * scale);
  }
}

}  // namespace twostep::draft
