// The block pass, beside its linears and its attention: input preparation (5.1), embedding (B0, B1), norms of the
// latents and their cache rows (B3, B6), the halves of kv_b (B5, B8), residual and norm (B9, B11), activation (B10).
// Spec: drafter 5.6. M = R * kK rows; heads of this rank.
// PDL: weights are older than the kernel before; all else is read after pdl_wait().
#pragma once

#include "draft/row.cuh"

namespace twostep::draft {

// ids, position [M] of the block's rows (-1: padding), end [R] of the keys that they read, first [R] position.
// Grid R, block kRowThreads.
template <class Model>
__device__ inline void queries(const Batch& batch, Cache cache, i32* ids, i64* position, i64* end, i64* first,
                               i32* status) {
  pdl_wait();
  pdl_launch();
  const i64 r = blockIdx.x;
  const Rows rows = rows_of(batch, r);
  const i64 p = rows.good ? batch.positions[rows.first + rows.valid - 1] : -1;
  const i32 anchor = batch.anchor[r];
  const bool good = p >= 0 && p < Model::kMaxLen && anchor >= 0 && anchor < Model::kVocab;
  const i64 behind = !good ? 0 : p + 1 + Model::kK < Model::kMaxLen ? p + 1 + Model::kK : i64(Model::kMaxLen);
  if (threadIdx.x == 0) {
    if (batch.request[r] >= 0 && !good) atomicOr(status + r, kBadInput);
    first[r] = good ? p + 1 : -1;
    end[r] = behind;
  }
  for (int j = threadIdx.x; j < Model::kK; j += kRowThreads) {
    ids[r * Model::kK + j] = !good ? 0 : j == 0 ? anchor : Model::kMaskToken;
    position[r * Model::kK + j] = good ? p + 1 + j : -1;
  }
  // Keys on bad pages are not visible; one look per page tells the host.
  bool bad = false;
  for (i64 key = threadIdx.x * cache.page_rows; key < behind; key += kRowThreads * cache.page_rows)
    bad |= row_offset<Model>(batch, cache, r, key) < 0;
  if (bad) atomicOr(status + r, kBadPage);
}

// residual = embed[ids], x = RMSNorm(residual).   table [rows, kHidden] from token first on; others are another rank's
// and count as zero.   Grid M, block kRowThreads.
template <class Model>
__device__ inline void embed(const i32* ids, const u16* table, i64 table_stride, i64 first, i64 rows, const float* norm,
                             u16* residual, u16* x) {
  __shared__ float parts[kRowThreads / kWarp];
  pdl_wait();
  pdl_launch();
  const i64 row = blockIdx.x;
  const i64 token = ids[row] - first;
  u16* to = residual + row * Model::kHidden;
  if (token >= 0 && token < rows) copy_row<Model::kHidden, kRowThreads>(table + token * table_stride, to);
  else
    for (int i = threadIdx.x; i < Model::kHidden; i += kRowThreads) to[i] = 0;
  __syncthreads();  // the copy is complete: the norm reads it with wider loads
  rms_norm<Model::kHidden, kRowThreads>(to, norm, Model::kEps, x + row * Model::kHidden, parts);
}

// residual += o, one rounding; out = RMSNorm(residual).   Grid M, block kRowThreads.
template <class Model>
__device__ inline void add_norm(const u16* o, const float* norm, u16* residual, u16* out) {
  __shared__ float parts[kRowThreads / kWarp];
  pdl_wait();
  pdl_launch();
  const i64 at = i64(blockIdx.x) * Model::kHidden;
  for (int piece = threadIdx.x; piece < Model::kHidden / 8; piece += kRowThreads) {
    const uint4 a = reinterpret_cast<const uint4*>(residual + at)[piece];
    const uint4 b = reinterpret_cast<const uint4*>(o + at)[piece];
    const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
    u32 sum[4];
    for (int j = 0; j < 4; ++j)
      sum[j] = pack_bf16(low_bf16(left[j]) + low_bf16(right[j]), high_bf16(left[j]) + high_bf16(right[j]));
    reinterpret_cast<uint4*>(residual + at)[piece] = make_uint4(sum[0], sum[1], sum[2], sum[3]);
  }
  // rms_norm reads each piece by the thread that wrote it.
  rms_norm<Model::kHidden, kRowThreads>(residual + at, norm, Model::kEps, out + at, parts);
}

// q = RMSNorm of the query's latent; the key's latent, normed and rotated, goes to the cache.
//   qkv [M, kQLora + kCacheWidth]   Grid (M, 2), block kRowThreads: y = 0 the query, 1 the key.
template <class Model>
__device__ inline void latents(const Batch& batch, const u16* qkv, const i64* position, const float* q_norm,
                               const float* kv_norm, const float* frequency, Cache cache, u16* q) {
  __shared__ float parts[kRowThreads / kWarp];
  pdl_wait();
  pdl_launch();
  const i64 row = blockIdx.x;
  const u16* from = qkv + row * (Model::kQLora + Model::kCacheWidth);
  if (blockIdx.y == 0) {
    rms_norm<Model::kQLora, kRowThreads>(from, q_norm, Model::kEps, q + row * Model::kQLora, parts);
    return;
  }
  const i64 s = position[row];
  if (s < 0 || s >= Model::kMaxLen) return;
  const i64 at = row_offset<Model>(batch, cache, row / Model::kK, s);
  if (at < 0) return;
  write_latent<Model, kRowThreads>(from + Model::kQLora, kv_norm, frequency, s, cache.data + at, parts);
}

// ---- The halves of kv_b: per head kNope rows W_UK, then kV rows W_UV, each kKvLora wide

constexpr int kAbsorbColumns = 64;  // of one CTA
constexpr int kBlockRows = 16;      // rows of q or o that a CTA takes at once

// out[row, head, c] = bf16( sum over d of q[row, head, d] * W_UK[head, d, c] ); behind it the query's rotary part,
// turned.
//   q [M, heads, kNope + kRope], out [M, heads, kCacheWidth]
// Grid (kKvLora / kAbsorbColumns rounded up, heads, row groups of kBlockRows), block 256: a thread owns one column of
// four rows. Each weight is read once per row group.
template <class Model>
__device__ inline void absorb(const u16* q, const u16* kv_b, const i64* position, const float* frequency, i64 rows,
                              u16* out) {
  constexpr int kRowsOfThread = kBlockRows / 4;
  __shared__ float shared_q[kBlockRows][Model::kNope];
  const int head = blockIdx.y;
  const i64 first = i64(blockIdx.z) * kBlockRows;
  const int count = rows - first < kBlockRows ? int(rows - first) : kBlockRows;
  const u16* w = kv_b + i64(head) * (Model::kNope + Model::kV) * Model::kKvLora;
  pdl_wait();
  pdl_launch();
  for (int i = threadIdx.x; i < kBlockRows * Model::kNope; i += 256) {
    const int row = i / Model::kNope, d = i % Model::kNope;
    shared_q[row][d] = row < count ? bf16_at(q, ((first + row) * Model::kHeads + head) * Model::kHeadWidth + d) : 0.0f;
  }
  __syncthreads();  // q is there
  const int column = blockIdx.x * kAbsorbColumns + threadIdx.x % kAbsorbColumns;
  const int group = threadIdx.x / kAbsorbColumns;
  if (column < Model::kKvLora) {
    float sums[kRowsOfThread] = {};
#pragma unroll 16
    for (int d = 0; d < Model::kNope; ++d) {
      const float weight = bf16_at(w, i64(d) * Model::kKvLora + column);
      for (int i = 0; i < kRowsOfThread; ++i) sums[i] += shared_q[group + 4 * i][d] * weight;
    }
    for (int i = 0; i < kRowsOfThread; ++i)
      if (group + 4 * i < count)
        out[((first + group + 4 * i) * Model::kHeads + head) * Model::kCacheWidth + column] = to_bf16(sums[i]);
  }
  if (blockIdx.x != 0) return;
  for (int i = threadIdx.x; i < count * (Model::kRope / 2); i += 256) {
    const i64 row = first + i / (Model::kRope / 2);
    i64 s = position[row];
    s = s < 0 ? 0 : s < Model::kMaxLen ? s : Model::kMaxLen - 1;
    rotate_pair<Model>(q + (row * Model::kHeads + head) * Model::kHeadWidth + Model::kNope, frequency, s,
                       i % (Model::kRope / 2),
                       out + (row * Model::kHeads + head) * Model::kCacheWidth + Model::kKvLora);
  }
}

constexpr int kValueColumns = 32;  // outputs of one CTA, four per warp

// out[row, head, d] = bf16( sum over c of o[row, head, c] * W_UV[head, d, c] ), then times sigmoid(gate) where it is
// on.
//   o [M, heads, kKvLora], out and gate [M, heads * kV]
// Grid (kV / kValueColumns rounded up, heads, row groups of kBlockRows), block 256: a warp owns one output at a time,
// its lanes share the latent.
template <class Model>
__device__ inline void values(const u16* o, const u16* kv_b, const u16* gate, i64 rows, u16* out) {
  constexpr int kPieces = (Model::kKvLora / 2 + kWarp - 1) / kWarp;  // pairs of BF16 per lane
  __shared__ u32 shared_o[kBlockRows][Model::kKvLora / 2];
  const int head = blockIdx.y, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i64 first = i64(blockIdx.z) * kBlockRows;
  const int count = rows - first < kBlockRows ? int(rows - first) : kBlockRows;
  pdl_wait();
  pdl_launch();
  for (int i = threadIdx.x; i < count * (Model::kKvLora / 2); i += 256) {
    const int row = i / (Model::kKvLora / 2), pair = i % (Model::kKvLora / 2);
    shared_o[row][pair] =
        reinterpret_cast<const u32*>(o + ((first + row) * Model::kHeads + head) * Model::kKvLora)[pair];
  }
  __syncthreads();  // o is there
  for (int i = warp; i < kValueColumns; i += 256 / kWarp) {
    const int d = blockIdx.x * kValueColumns + i;
    if (d >= Model::kV) break;
    const u16* w = kv_b + (i64(head) * (Model::kNope + Model::kV) + Model::kNope + d) * Model::kKvLora;
    u32 weight[kPieces];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int pair = piece * kWarp + lane;
      weight[piece] = pair < Model::kKvLora / 2 ? reinterpret_cast<const u32*>(w)[pair] : 0u;
    }
    for (int row = 0; row < count; ++row) {
      float sum = 0;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int pair = piece * kWarp + lane;
        if (pair < Model::kKvLora / 2) sum = dot(shared_o[row][pair], weight[piece], sum);
      }
      sum = warp_sum(sum);
      if (lane != 0) continue;
      const i64 at = ((first + row) * Model::kHeads + head) * Model::kV + d;
      out[at] = Model::kGate ? to_bf16(round_bf16(sum) * sigmoid(bf16_at(gate, at))) : to_bf16(sum);
    }
  }
}

// out = bf16(silu(gate) * up), or the SiTU form.   gate_up [M, 2 * kInner], out [M, kInner]
// Grid (kInner / 256 rounded up, M), block 256.
template <class Model>
__device__ inline void activate(const u16* gate_up, u16* out) {
  pdl_wait();
  pdl_launch();
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
