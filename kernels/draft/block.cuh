// The block pass, beside its linears and its attention: input preparation (5.1), embedding (B0, B1), norms of the
// latents and their cache rows (B3, B6), the halves of kv_b (B5, B8), residual and norm (B9, B11), activation (B10).
// Spec: drafter 5.6. M = R * kK rows; heads of this rank.
#pragma once

#include "draft/row.cuh"

namespace twostep::draft {

// What a request's block starts from; not good where the numbers of the request make no sense.
struct Start {
  i64 position;  // of its first row
  i32 anchor;
  bool good;
};
template <class Model>
__device__ inline Start start_of(const Batch& batch, i64 r) {
  const Rows rows = rows_of(batch, r);
  const i64 last = rows.good ? batch.positions[rows.first + rows.valid - 1] : -1;
  const i32 anchor = batch.anchor[r];
  return {last + 1, anchor, last >= 0 && last < Model::kMaxLen && anchor >= 0 && anchor < Model::kVocab};
}

// ids, position [M] of the block's rows (-1: padding), end [R] of the keys that they read, first [R] position.
// By a CTA of kRowThreads.
template <class Model>
__device__ inline void tell_queries(const Batch& batch, i64 r, Cache cache, i32* ids, i64* position, i64* end,
                                    i64* first, i32* status) {
  const Start start = start_of<Model>(batch, r);
  const i64 behind = !start.good                                   ? 0
                     : start.position + Model::kK < Model::kMaxLen ? start.position + Model::kK
                                                                   : i64(Model::kMaxLen);
  if (threadIdx.x == 0) {
    if (batch.request[r] >= 0 && !start.good) atomicOr(status + r, kBadInput);
    first[r] = start.good ? start.position : -1;
    end[r] = behind;
  }
  for (int j = threadIdx.x; j < Model::kK; j += kRowThreads) {
    ids[r * Model::kK + j] = !start.good ? 0 : j == 0 ? start.anchor : Model::kMaskToken;
    position[r * Model::kK + j] = start.good ? start.position + j : -1;
  }
  // Keys on bad pages are not visible; one look per page tells the host.
  bool bad = false;
  for (i64 key = threadIdx.x * cache.page_rows; key < behind; key += kRowThreads * cache.page_rows)
    bad |= row_offset<Model>(batch, cache, r, key) < 0;
  if (bad) atomicOr(status + r, kBadPage);
}

// residual = embed[ids], x = RMSNorm(residual).   table [rows, kHidden] from token first_token on; others are another
// rank's and count as zero.   Grid R + M, block kRowThreads: the first R CTAs tell what the others find for themselves.
template <class Model>
__device__ inline void embed(const Batch& batch, Cache cache, i32* ids, i64* position, i64* end, i64* first,
                             i32* status, const u16* table, i64 table_stride, i64 first_token, i64 rows,
                             const float* norm, u16* residual, u16* x) {
  __shared__ float parts[kRowThreads / kWarp];
  const i64 row = i64(blockIdx.x) - batch.requests;
  pdl_launch();
  const NormWeight<Model::kHidden, kRowThreads> weight(norm);
  pdl_wait();
  if (row < 0) return tell_queries<Model>(batch, blockIdx.x, cache, ids, position, end, first, status);
  const Start start = start_of<Model>(batch, row / Model::kK);
  const i64 id = !start.good ? 0 : row % Model::kK == 0 ? start.anchor : Model::kMaskToken;
  const i64 token = id - first_token;
  Row<Model::kHidden, kRowThreads> held;
  if (token >= 0 && token < rows) held.load_any(table + token * table_stride);
  else held.clear();
  held.store(residual + row * Model::kHidden);
  store_normed(held, weight, Model::kEps, x + row * Model::kHidden, parts);
}

// residual += o, one rounding; out = RMSNorm(residual).   Grid M, block kRowThreads.
template <class Model>
__device__ inline void add_norm(const u16* o, const float* norm, u16* residual, u16* out) {
  __shared__ float parts[kRowThreads / kWarp];
  const i64 at = i64(blockIdx.x) * Model::kHidden;
  pdl_launch();
  const NormWeight<Model::kHidden, kRowThreads> weight(norm);
  pdl_wait();
  Row<Model::kHidden, kRowThreads> sum, other;
  sum.load(residual + at);
  other.load(o + at);
  sum.add(other);
  sum.store(residual + at);
  store_normed(sum, weight, Model::kEps, out + at, parts);
}

// q = RMSNorm of the query's latent; the key's latent, normed and rotated, goes to the cache.
//   qkv [M, kQLora + kCacheWidth]   Grid (M, 2), block kRowThreads: y = 0 the query, 1 the key.
template <class Model>
__device__ inline void latents(const Batch& batch, const u16* qkv, const i64* position, const float* q_norm,
                               const float* kv_norm, const float* frequency, Cache cache, u16* q) {
  __shared__ float parts[kRowThreads / kWarp];
  const i64 row = blockIdx.x;
  const u16* from = qkv + row * (Model::kQLora + Model::kCacheWidth);
  pdl_launch();
  if (blockIdx.y == 0) {
    const NormWeight<Model::kQLora, kRowThreads> weight(q_norm);
    pdl_wait();
    Row<Model::kQLora, kRowThreads> held;
    held.load(from);
    store_normed(held, weight, Model::kEps, q + row * Model::kQLora, parts);
    return;
  }
  const NormWeight<Model::kKvLora, kRowThreads> weight(kv_norm);
  pdl_wait();
  Row<Model::kKvLora, kRowThreads> latent;
  latent.load(from + Model::kQLora);
  const i64 s = position[row];
  if (s < 0 || s >= Model::kMaxLen) return;
  const i64 at = row_offset<Model>(batch, cache, row / Model::kK, s);
  if (at < 0) return;
  store_latent<Model, kRowThreads>(latent, weight, from + Model::kQLora + Model::kKvLora, frequency, s, cache.data + at,
                                   parts);
}

// ---- The halves of kv_b: per head kNope rows W_UK, then kV rows W_UV, each kKvLora wide. Tensor cores, FP32 sums; the
// weights are on their way to shared memory before pdl_wait().

constexpr int kBlockRows = 16;  // rows of q or o that a CTA takes: the rows of a matrix operand
constexpr int kHalfThreads = 256;
constexpr int kValueColumns = 16;  // of one CTA; the warps share the latent
constexpr int kPad = 8;            // elements between rows of shared memory: ldmatrix without conflicts

// `rows` rows of kWidth elements (rounded up to kPadded) into shared memory; zeros outside `rows` and kWidth.
//   from: row 0, rows `stride` elements apart, all 16-byte aligned; kWidth a multiple of 8
template <int kRows, int kPadded, class Valid>
__device__ inline void copy_rows_async(u16 (*to)[kPadded + kPad], const u16* from, i64 stride, const Valid& valid) {
  static_assert(kPadded % 8 == 0);
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * (kPadded / 8); i += kHalfThreads) {
    const int row = i / (kPadded / 8), column = i % (kPadded / 8) * 8;
    const bool is = valid(row, column);
    copy_async(smem_address(&to[row][column]), is ? from + row * stride + column : from, is);
  }
}

// out[row, head, c] = bf16( sum over d of q[row, head, d] * W_UK[head, d, c] ); behind it the query's rotary part,
// turned.
//   q [M, heads, kNope + kRope], out [M, heads, kCacheWidth]
// Grid (kKvLora / Model::kAbsorbColumns rounded up, and one more for the rotary parts; heads; row groups of
// kBlockRows), block kHalfThreads. Each weight is read once per row group.
template <class Model>
__device__ inline void absorb(const u16* q, const u16* kv_b, const i64* position, const float* frequency, i64 rows,
                              u16* out) {
  constexpr int kDepth = (Model::kNope + 31) / 32 * 32;  // two steps of 16 at once
  constexpr int kAbsorbColumns = Model::kAbsorbColumns;
  constexpr int kWarps = kHalfThreads / kWarp, kPieces = kAbsorbColumns / (8 * kWarps);  // of 8 columns, of a warp
  static_assert(kPieces * 8 * kWarps == kAbsorbColumns);
  alignas(16) __shared__ u16 shared_w[kDepth][kAbsorbColumns + kPad];
  const int head = blockIdx.y, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int column = blockIdx.x * kAbsorbColumns;
  const i64 first = i64(blockIdx.z) * kBlockRows;
  const int count = rows - first < kBlockRows ? int(rows - first) : kBlockRows;
  const u16* q_rows = q + (first * Model::kHeads + head) * Model::kHeadWidth;
  u16* out_rows = out + (first * Model::kHeads + head) * Model::kCacheWidth;
  constexpr i64 kQStride = i64(Model::kHeads) * Model::kHeadWidth, kOutStride = i64(Model::kHeads) * Model::kCacheWidth;
  pdl_launch();

  if (column >= Model::kKvLora) {  // ---- The rotary parts
    pdl_wait();
    for (int i = threadIdx.x; i < count * (Model::kRope / 2); i += kHalfThreads) {
      const int row = i / (Model::kRope / 2);
      i64 s = position[first + row];
      s = s < 0 ? 0 : s < Model::kMaxLen ? s : Model::kMaxLen - 1;
      rotate_pair<Model>(q_rows + row * kQStride + Model::kNope, frequency, s, i % (Model::kRope / 2),
                         out_rows + row * kOutStride + Model::kKvLora);
    }
    return;
  }

  // ---- Load
  copy_rows_async<kDepth, kAbsorbColumns>(
      shared_w, kv_b + i64(head) * (Model::kNope + Model::kV) * Model::kKvLora + column, Model::kKvLora,
      [column](int d, int c) { return d < Model::kNope && column + c < Model::kKvLora; });
  copy_async_commit();
  pdl_wait();
  // q straight into operands: with W alone in shared memory, CTAs of an attention of 48 queries start beside these.
  u32 a[kDepth / 16][4];
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i % 2 * 8, d = 16 * step + i / 2 * 8 + lane % 4 * 2;
      a[step][i] = row < count && d < Model::kNope ? *reinterpret_cast<const u32*>(q_rows + row * kQStride + d) : 0u;
    }
  copy_async_wait<0>();
  __syncthreads();  // W is there

  // ---- Multiply, and store: a warp has 16 rows and 8 columns at a time
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int first_column = 8 * (warp + piece * kWarps);
    float sums[4] = {};
#pragma unroll
    for (int d = 0; d < kDepth; d += 32) {
      u32 b[4];
      load_matrices_transposed(b, smem_address(&shared_w[d + lane][first_column]));
      mma_16x8x16(sums, a[d / 16], b[0], b[1]);
      mma_16x8x16(sums, a[d / 16 + 1], b[2], b[3]);
    }
    const int c = column + first_column + lane % 4 * 2;
    if (c >= Model::kKvLora) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      if (row < count)
        *reinterpret_cast<u32*>(out_rows + row * kOutStride + c) = pack_bf16(sums[2 * half], sums[2 * half + 1]);
    }
  }
}

// out[row, head, d] = bf16( sum over c of o[row, head, c] * W_UV[head, d, c] ), then times sigmoid(gate) where it is
// on.
//   o [M, heads, kKvLora], out and gate [M, heads * kV]
// Grid (kV / kValueColumns rounded up, heads, row groups of kBlockRows), block kHalfThreads.
template <class Model>
__device__ inline void values(const u16* o, const u16* kv_b, const u16* gate, i64 rows, u16* out) {
  constexpr int kWarps = kHalfThreads / kWarp, kSteps = Model::kKvLora / 16;
  alignas(16) __shared__ u16 shared_o[kBlockRows][Model::kKvLora + kPad],
      shared_w[kValueColumns][Model::kKvLora + kPad];
  __shared__ float parts[kWarps][kBlockRows][kValueColumns];
  const int head = blockIdx.y, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int column = blockIdx.x * kValueColumns;
  const i64 first = i64(blockIdx.z) * kBlockRows;
  const int count = rows - first < kBlockRows ? int(rows - first) : kBlockRows;
  pdl_launch();

  // ---- Load
  copy_rows_async<kValueColumns, Model::kKvLora>(
      shared_w, kv_b + (i64(head) * (Model::kNope + Model::kV) + Model::kNope + column) * Model::kKvLora,
      Model::kKvLora, [column](int d, int) { return column + d < Model::kV; });
  pdl_wait();
  copy_rows_async<kBlockRows, Model::kKvLora>(shared_o, o + (first * Model::kHeads + head) * Model::kKvLora,
                                              i64(Model::kHeads) * Model::kKvLora,
                                              [count](int row, int) { return row < count; });
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();  // o and W are there

  // ---- Multiply: a warp has every eighth step of 16 of the latent
  float sums[2][4] = {};
#pragma unroll
  for (int step = warp; step < kSteps; step += kWarps) {
    const int c = 16 * step;
    u32 a[4], b[4];
    load_matrices(a, smem_address(&shared_o[lane % 16][c + lane / 16 * 8]));
    load_matrices(b, smem_address(&shared_w[lane / 16 * 8 + lane % 8][c + lane / 8 % 2 * 8]));
    mma_16x8x16(sums[0], a, b[0], b[1]);
    mma_16x8x16(sums[1], a, b[2], b[3]);
  }

  // ---- Reduce over the warps, and store
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[warp][lane / 4 + i / 2 * 8][8 * n + lane % 4 * 2 + i % 2] = sums[n][i];
  __syncthreads();  // parts are there
  static_assert(kBlockRows * kValueColumns == kHalfThreads);
  const int row = threadIdx.x / kValueColumns, d = column + int(threadIdx.x) % kValueColumns;
  if (row >= count || d >= Model::kV) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += parts[i][row][threadIdx.x % kValueColumns];
  const i64 at = ((first + row) * Model::kHeads + head) * Model::kV + d;
  out[at] = Model::kGate ? to_bf16(round_bf16(sum) * sigmoid(bf16_at(gate, at))) : to_bf16(sum);
}

// out = bf16(silu(gate) * up), or the SiTU form.   gate_up [M, 2 * kInner], out [M, kInner]
// Grid (kInner / 256 rounded up, M), block 256.
template <class Model>
__device__ inline void activate(const u16* gate_up, u16* out) {
  pdl_launch();
  pdl_wait();
  const int column = blockIdx.x * 256 + threadIdx.x;
  if (column >= Model::kInner) return;
  const u16* row = gate_up + i64(blockIdx.y) * 2 * Model::kInner;
  const float g = bf16_at(row, column);
  float u = bf16_at(row, Model::kInner + column);
  float left = g;
  if (Model::kSitu) {
    left = Model::kSituBeta * tanhf(g / Model::kSituBeta);
    if (Model::kSituLinearBeta > 0) u = Model::kSituLinearBeta * tanhf(u / Model::kSituLinearBeta);
  }
  out[i64(blockIdx.y) * Model::kInner + column] = to_bf16(left * sigmoid(g) * u);
}

}  // namespace twostep::draft
