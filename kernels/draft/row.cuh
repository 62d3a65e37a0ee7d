// What the kernels of the draft step share: the batch, its rows and pages, rows of BF16, norms, rotary pairs.
#pragma once

#include "common/reduce.cuh"

namespace twostep::draft {

using i32 = int;

constexpr int kRowThreads = 256;  // of kernels that give a row to a CTA

// Bits of a request's status: DraftStatus of twostep/drafter.h.
constexpr i32 kBadPage = 1, kNonFinite = 2, kBadInput = 4;

// StepBatch of src/drafter/step.h.
struct Batch {
  i64 requests, rows;
  const i32* request;
  const i32* row_start;
  const i32* rejected;
  const i32* anchor;
  const i64* positions;
  const i32* page_table;
  i64 page_table_stride, page_table_width;
  const float* temperature;
  const i64* seed;
  i32* step;
};

// The paged cache of a layer: pages of page_rows rows [latent | rope], page_stride elements apart.
struct Cache {
  u16* data;
  i64 pages, page_rows, page_stride;
};

__device__ inline float bf16_at(const u16* x, i64 i) { return __uint_as_float(u32(x[i]) << 16); }
__device__ inline float not_a_number() { return __uint_as_float(0x7fffffffu); }
__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// ---- Batch

struct Rows {
  i64 first, valid;
  bool good;  // the numbers make sense, and the request is no padding
};

// The context rows of a request that were not rejected.
__device__ inline Rows rows_of(const Batch& batch, i64 r) {
  const Rows none = {0, 0, false};
  if (batch.request[r] < 0) return none;
  const i64 first = batch.row_start[r], rows = i64(batch.row_start[r + 1]) - first, rejected = batch.rejected[r];
  if (first < 0 || rows < 1 || first + rows > batch.rows || rejected < 0 || rejected >= rows) return none;
  return {first, rows - rejected, true};
}

// Where a cache keeps a position of request r, in elements; -1: nowhere. Page 0 is nobody's.
template <class Model>
__device__ inline i64 row_offset(const Batch& batch, const Cache& cache, i64 r, i64 position) {
  const i64 index = position / cache.page_rows;
  if (index >= batch.page_table_width) return -1;
  const i64 page = batch.page_table[r * batch.page_table_stride + index];
  if (page < 1 || page >= cache.pages) return -1;
  return page * cache.page_stride + position % cache.page_rows * Model::kCacheWidth;
}

// sum + a . b of eight BF16 each.
__device__ inline float dot(u32 a, u32 b, float sum) {
  return sum + low_bf16(a) * low_bf16(b) + high_bf16(a) * high_bf16(b);
}
__device__ inline float dot(uint4 a, uint4 b, float sum) {
  return dot(a.w, b.w, dot(a.z, b.z, dot(a.y, b.y, dot(a.x, b.x, sum))));
}

__device__ inline int warp_max(int v) {
  for (int lane = kWarp / 2; lane > 0; lane /= 2) {
    const int other = __shfl_xor_sync(0xffffffffu, v, lane);
    v = other > v ? other : v;
  }
  return v;
}

// ---- Rows

// A copy by all threads of a CTA. kWidth is a multiple of 8 and `to` 16-byte aligned; `from` need not be.
template <int kWidth, int kThreads>
__device__ inline void copy_row(const u16* from, u16* to) {
  if (reinterpret_cast<u64>(from) % 16 == 0) {
    for (int i = threadIdx.x; i < kWidth / 8; i += kThreads)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  } else {
    for (int i = threadIdx.x; i < kWidth; i += kThreads) to[i] = from[i];
  }
}

// out = bf16(x * rsqrt(mean(x^2) + eps) * weight) by all threads of a CTA. kWidth is a multiple of 8, rows are 16-byte
// aligned. x is read once and kept in registers; out may be x.
template <int kWidth, int kThreads>
__device__ inline void rms_norm(const u16* x, const float* weight, float eps, u16* out, float* parts) {
  constexpr int kPieces = (kWidth / 8 + kThreads - 1) / kThreads;
  uint4 kept[kPieces];
  float squares = 0;
  for (int i = 0; i < kPieces; ++i) {
    const int piece = i * kThreads + threadIdx.x;
    if (piece * 8 >= kWidth) break;
    kept[i] = reinterpret_cast<const uint4*>(x)[piece];
    const u32 words[4] = {kept[i].x, kept[i].y, kept[i].z, kept[i].w};
    for (const u32 word : words) squares += low_bf16(word) * low_bf16(word) + high_bf16(word) * high_bf16(word);
  }
  const float scale = 1.0f / sqrtf(cta_sum<kThreads>(squares, parts) / float(kWidth) + eps);
  for (int i = 0; i < kPieces; ++i) {
    const int piece = i * kThreads + threadIdx.x;
    if (piece * 8 >= kWidth) break;
    const u32 words[4] = {kept[i].x, kept[i].y, kept[i].z, kept[i].w};
    u32 made[4];
    for (int j = 0; j < 4; ++j) {
      const float* w = weight + piece * 8 + 2 * j;
      made[j] = pack_bf16(low_bf16(words[j]) * scale * w[0], high_bf16(words[j]) * scale * w[1]);
    }
    reinterpret_cast<uint4*>(out)[piece] = make_uint4(made[0], made[1], made[2], made[3]);
  }
}

// One rotary pair of a row. sincosf reduces the full range: 2 ulp, below the 2^-22 that is asked for.
template <class Model>
__device__ inline void rotate_pair(const u16* x, const float* frequency, i64 position, int pair, u16* out) {
  const int a = Model::kNeox ? pair : 2 * pair;
  const int b = Model::kNeox ? pair + Model::kRope / 2 : 2 * pair + 1;
  float sine, cosine;
  sincosf(float(position) * frequency[pair], &sine, &cosine);
  sine *= Model::kRopeAmplitude;
  cosine *= Model::kRopeAmplitude;
  const float x0 = bf16_at(x, a), x1 = bf16_at(x, b);
  out[a] = to_bf16(x0 * cosine - x1 * sine);
  out[b] = to_bf16(x0 * sine + x1 * cosine);
}

// [latent | rope] of one row into the cache: the norm of one, the rotation of the other. All threads of a CTA.
template <class Model, int kThreads>
__device__ inline void write_latent(const u16* kv, const float* norm, const float* frequency, i64 position, u16* row,
                                    float* parts) {
  rms_norm<Model::kKvLora, kThreads>(kv, norm, Model::kEps, row, parts);
  for (int pair = threadIdx.x; pair < Model::kRope / 2; pair += kThreads)
    rotate_pair<Model>(kv + Model::kKvLora, frequency, position, pair, row + Model::kKvLora);
}

}  // namespace twostep::draft
