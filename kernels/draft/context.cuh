// Ingest, beside its two linears: taps side by side (C0), the norm between the linears (C2), rows of the latent cache
// (C4, C5). Spec: drafter 5.4.
#pragma once

#include "draft/row.cuh"

namespace twostep::draft {

// Taps of the caller, rows `stride` elements apart.
template <int kTaps>
struct TapList {
  const u16* data[kTaps];
  i64 stride[kTaps];
};

// out[row, tap] = tap's row, or its RMSNorm.   out [T, kTaps * kTargetHidden]
// Grid (rows, kTaps), block kRowThreads. Rows of taps may have any alignment.
template <class Model>
__device__ inline void gather_taps(const TapList<Model::kTaps>& taps, const float* norm, u16* out) {
  using Held = Row<Model::kTargetHidden, kRowThreads>;
  __shared__ float parts[kRowThreads / kWarp];
  const i64 row = blockIdx.x;
  const int tap = blockIdx.y;
  const u16* from = nullptr;
#pragma unroll
  for (int i = 0; i < Model::kTaps; ++i)  // a parameter that is indexed would be copied to local memory
    if (i == tap) from = taps.data[i] + row * taps.stride[i];
  u16* to = out + (row * Model::kTaps + tap) * Model::kTargetHidden;
  Held x;
  pdl_launch();
  if constexpr (Model::kFcNorm) {
    const NormWeight<Model::kTargetHidden, kRowThreads> weight(norm + tap * Model::kTargetHidden);
    pdl_wait();
    x.load_any(from);
    store_normed(x, weight, Model::kEps, to, parts);
  } else {
    pdl_wait();
    x.load_any(from);
    x.store(to);
  }
}

// out[row] = RMSNorm(x[row]).   x rows x_stride elements apart, a multiple of 8.   Grid rows, block kRowThreads.
template <class Model>
__device__ inline void norm_context(const u16* x, i64 x_stride, const float* norm, u16* out) {
  __shared__ float parts[kRowThreads / kWarp];
  const i64 row = blockIdx.x;
  pdl_launch();
  const NormWeight<Model::kHidden, kRowThreads> weight(norm);
  pdl_wait();
  Row<Model::kHidden, kRowThreads> held;
  held.load(x + row * x_stride);
  store_normed(held, weight, Model::kEps, out + row * Model::kHidden, parts);
}

// Cache rows of all layers.   kv [T, kLayers * kCacheWidth]; caches[layer] the cache's start; norms [kLayers][kKvLora].
// Grid (T, kLayers), block kRowThreads. Rejected rows and rows of no request write nothing; a row whose page or
// position is bad sets its request's bit.
template <class Model>
__device__ inline void cache_context(const Batch& batch, const u16* kv, u16* const* caches, const float* const* norms,
                                     Cache cache, const float* frequency, i32* status) {
  __shared__ float parts[kRowThreads / kWarp];
  __shared__ int found;
  const i64 row = blockIdx.x;
  const int layer = blockIdx.y;
  pdl_launch();
  const NormWeight<Model::kKvLora, kRowThreads> weight(norms[layer]);
  if (threadIdx.x == 0) found = int(batch.requests);
  __syncthreads();  // nobody has found it
  pdl_wait();
  const u16* from = kv + (row * Model::kLayers + layer) * Model::kCacheWidth;
  Row<Model::kKvLora, kRowThreads> latent;
  latent.load(from);
  // All requests at once; no bisection, since row_start need not ascend where another request's numbers are bad.
  for (i64 r = threadIdx.x; r < batch.requests; r += kRowThreads) {
    const Rows rows = rows_of(batch, r);
    if (rows.good && rows.first <= row && row < rows.first + rows.valid) atomicMin(&found, int(r));
  }
  __syncthreads();  // it is found, or the row is nobody's
  const i64 r = found;
  if (r == batch.requests) return;
  const i64 position = batch.positions[row];
  const bool in_range = position >= 0 && position < Model::kMaxLen;
  const i64 at = in_range ? row_offset<Model>(batch, cache, r, position) : -1;
  if (at < 0) {
    if (threadIdx.x == 0 && layer == 0) atomicOr(status + r, in_range ? kBadPage : kBadInput);
    return;
  }
  store_latent<Model, kRowThreads>(latent, weight, from + Model::kKvLora, frequency, position, caches[layer] + at,
                                   parts);
}

// Before cache_context: each request's status starts anew.   Grid 1, block kRowThreads.
__device__ inline void begin_ingest(const Batch& batch, i32* status) {
  pdl_launch();
  pdl_wait();
  for (i64 r = threadIdx.x; r < batch.requests; r += kRowThreads)
    status[r] = batch.request[r] >= 0 && !rows_of(batch, r).good ? kBadInput : 0;
}

}  // namespace twostep::draft
