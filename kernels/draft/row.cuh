// What the kernels of the draft step share: the batch, its rows and pages, rows of BF16, norms, rotary pairs.
//
// PDL: each kernel lets the next one start at its own start, before pdl_wait(). So the weights of a linear are under
// way while the small kernels before it still wait for each other. pdl_wait() returns when the kernel before is
// complete, and that one has waited for all before it; nothing but weights is read, and nothing written, before it.
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
  const i32 request = batch.request[r];  // no load waits for another
  const i64 first = batch.row_start[r], rows = i64(batch.row_start[r + 1]) - first, rejected = batch.rejected[r];
  if (request < 0 || first < 0 || rows < 1 || first + rows > batch.rows || rejected < 0 || rejected >= rows)
    return {0, 0, false};
  return {first, rows - rejected, true};
}

// Where a cache keeps a position of request r, from 0 to 2^31 - 1, in elements; -1: nowhere. Page 0 is nobody's.
template <class Model>
__device__ inline i64 row_offset(const Batch& batch, const Cache& cache, i64 r, i64 position) {
  // Divided by 32 bits, a quarter of the instructions: in a page of 2^31 rows all positions are on the first.
  const u32 page_rows = cache.page_rows < (i64(1) << 31) ? u32(cache.page_rows) : u32(1) << 31;
  const u32 index = u32(position) / page_rows;
  if (index >= batch.page_table_width) return -1;
  const i64 page = batch.page_table[r * batch.page_table_stride + index];
  if (page < 1 || page >= cache.pages) return -1;
  return page * cache.page_stride + i64(u32(position) % page_rows) * Model::kCacheWidth;
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

// A row of kWidth BF16 in the registers of a CTA, eight to a piece. kWidth is a multiple of 8.
template <int kWidth, int kThreads>
struct Row {
  static constexpr int kPieces = (kWidth / 8 + kThreads - 1) / kThreads;
  uint4 piece[kPieces];

  __device__ static int at(int i) { return i * kThreads + int(threadIdx.x); }
  __device__ static bool has(int i) { return at(i) < kWidth / 8; }

  // All loads are under way at once. `from` is 16-byte aligned.
  __device__ void load(const u16* from) {
    clear();
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (has(i)) piece[i] = reinterpret_cast<const uint4*>(from)[at(i)];
  }
  // `from` may have any alignment.
  __device__ void load_any(const u16* from) {
    if (reinterpret_cast<u64>(from) % 16 == 0) return load(from);
    clear();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (!has(i)) continue;
      const u16* x = from + 8 * at(i);
      piece[i] =
          make_uint4(x[0] | u32(x[1]) << 16, x[2] | u32(x[3]) << 16, x[4] | u32(x[5]) << 16, x[6] | u32(x[7]) << 16);
    }
  }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) piece[i] = make_uint4(0, 0, 0, 0);
  }
  // The sum has one rounding.
  __device__ void add(const Row& other) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 a = piece[i], b = other.piece[i];
      piece[i] = make_uint4(add_bf16(a.x, b.x), add_bf16(a.y, b.y), add_bf16(a.z, b.z), add_bf16(a.w, b.w));
    }
  }
  // `to` is 16-byte aligned.
  __device__ void store(u16* to) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (has(i)) reinterpret_cast<uint4*>(to)[at(i)] = piece[i];
  }
};

// The weight of a norm, held like a row: it is there before the row is.
template <int kWidth, int kThreads>
struct NormWeight {
  using Held = Row<kWidth, kThreads>;
  float4 of[Held::kPieces][2];

  __device__ explicit NormWeight(const float* weight) {
#pragma unroll
    for (int i = 0; i < Held::kPieces; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        of[i][half] = Held::has(i) ? reinterpret_cast<const float4*>(weight)[2 * Held::at(i) + half] : float4{};
  }
};

// out = bf16(x * rsqrt(mean(x^2) + eps) * weight) by all threads of a CTA; out is 16-byte aligned.
template <int kWidth, int kThreads>
__device__ inline void store_normed(const Row<kWidth, kThreads>& x, const NormWeight<kWidth, kThreads>& weight,
                                    float eps, u16* out, float* parts) {
  Row<kWidth, kThreads> made;
  float squares = 0;
#pragma unroll
  for (int i = 0; i < x.kPieces; ++i) {  // zero behind the end
    const uint4 p = x.piece[i];
    squares = dot(p, p, squares);
  }
  const float scale = 1.0f / sqrtf(cta_sum<kThreads>(squares, parts) / float(kWidth) + eps);
  const auto normed = [scale](u32 two, float w0, float w1) {
    return pack_bf16(low_bf16(two) * scale * w0, high_bf16(two) * scale * w1);
  };
#pragma unroll
  for (int i = 0; i < x.kPieces; ++i) {
    const uint4 p = x.piece[i];
    const float4 a = weight.of[i][0], b = weight.of[i][1];
    made.piece[i] =
        make_uint4(normed(p.x, a.x, a.y), normed(p.y, a.z, a.w), normed(p.z, b.x, b.y), normed(p.w, b.z, b.w));
  }
  made.store(out);
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
__device__ inline void store_latent(const Row<Model::kKvLora, kThreads>& latent,
                                    const NormWeight<Model::kKvLora, kThreads>& weight, const u16* rope,
                                    const float* frequency, i64 position, u16* row, float* parts) {
  for (int pair = threadIdx.x; pair < Model::kRope / 2; pair += kThreads)
    rotate_pair<Model>(rope, frequency, position, pair, row + Model::kKvLora);
  store_normed(latent, weight, Model::kEps, row, parts);
}

}  // namespace twostep::draft
