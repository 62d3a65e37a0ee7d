// The Markov head, one launch per draft (spec: drafter 6): l = base + kLogitScale * (W2 . e), e the W1 row of the token
// before; the pick is its argmax, with Gumbel noise in probabilistic mode. A CTA leaves its best token per request in
// `best`; the launch after reduces them, so that no grid has to wait for itself.
//
// W2 is read once per launch for kSampleRequests requests, from L2 after the first: a warp takes kTileRows rows at
// once, its lanes share r. The sums of a *sweep* of kTiles tiles end in one lane each, so that noise and comparison
// keep all lanes busy. FP32 sums in a fixed order. NaN counts as -inf, the lowest id wins ties; a row with nothing
// above -inf gives token 0 and kNonFinite. PDL: W2 is older than the kernel before, and its first tile is under way
// before pdl_wait(); base, tokens and best are read after it. Base and noise do not need the token before: they come
// while one warp looks for it.
#pragma once

#include "draft/random.cuh"
#include "draft/row.cuh"

namespace twostep::draft {

constexpr int kSampleThreads = 256;
constexpr int kSampleWarps = kSampleThreads / kWarp;
constexpr int kSampleRequests = 8;         // that share one read of W2
constexpr int kTileRows = 4;               // of W2, in registers
constexpr int kTiles = kWarp / kTileRows;  // of one sweep

struct Sampling {
  const u16* base;            // [R * kK, kShardVocab]
  const u16* w1;              // [kVocab, kMarkovRank]
  const u16* w2;              // [kShardVocab, kMarkovRank]
  const i32* ids;             // [R * kK]: the anchor of each block at its start
  const i64* first_position;  // [R]
  void* draft_logits;         // [R, kK, kShardVocab] FP32 or BF16
  Best* best;                 // [2, R, CTAs]: of the last launch and of this one
  i32* tokens;                // [R, kK]
  i32* status;                // [R]
};

// The best of all CTAs for a request, by one warp.
__device__ inline Best reduce_best(const Best* of_request, int ctas, int lane) {
  constexpr int kAtOnce = 10;  // loads under way: all of 132 SMs
  Best found = no_best();
  for (int first = lane; first < ctas; first += kAtOnce * kWarp) {
    Best some[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) some[i] = first + i * kWarp < ctas ? of_request[first + i * kWarp] : no_best();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) found = better(found, some[i]);
  }
  return warp_best(found);
}

// Token of draft i - 1 of request r from the bests of its launch, by one warp; the anchor for i = 0; -1 for padding.
// CTA `writes` keeps it.
template <class Model>
__device__ inline i32 token_before(const Sampling& s, i64 requests, i64 r, int i, int ctas, int lane, bool writes) {
  const i64 first_position = s.first_position[r];
  const i32 anchor = s.ids[r * Model::kK];
  const Best found = i == 0 ? no_best() : reduce_best(s.best + (((i - 1) % 2) * requests + r) * ctas, ctas, lane);
  const i32 drafted = found.token < 0 ? i32(Model::kFirstToken) : found.token;
  const i32 token = first_position < 0 ? -1 : i == 0 ? anchor : drafted;
  if (i == 0 || !writes || lane != 0) return token;
  s.tokens[r * Model::kK + i - 1] = token;
  if (first_position >= 0 && found.token < 0) atomicOr(s.status + r, kNonFinite);
  return token;
}

// Four sums over a warp; lane i gets that of sums[i / 8].
__device__ inline float warp_sums(const float (&sums)[kTileRows], int lane) {
  static_assert(kTileRows == 4);
  const bool upper = lane & 16, odd = lane & 8;
  float two[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    two[i] = (upper ? sums[2 + i] : sums[i]) + __shfl_xor_sync(0xffffffffu, upper ? sums[i] : sums[2 + i], 16);
  float sum = (odd ? two[1] : two[0]) + __shfl_xor_sync(0xffffffffu, odd ? two[0] : two[1], 8);
#pragma unroll
  for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

// Draft i.   Grid any number of CTAs, the same for all drafts; block kSampleThreads.
template <class Model>
__device__ inline void pick(const Batch& batch, const Sampling& s, int i) {
  constexpr int kPieces = Model::kMarkovRank / 8;  // of 16 bytes, of a row
  constexpr int kOfLane = (kPieces + kWarp - 1) / kWarp;
  __shared__ uint4 e[kSampleRequests][kPieces];
  __shared__ i32 before[kSampleRequests];
  __shared__ float logits[kSampleWarps][kSampleRequests][kWarp], noise[kSampleWarps][kSampleRequests][kWarp];
  __shared__ Best found[kSampleWarps][kSampleRequests];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i64 warps = i64(gridDim.x) * kSampleWarps;
  const i64 first = i64(blockIdx.x) * kSampleWarps + warp;  // this warp's tiles: first, first + warps, ..
  constexpr i64 kAllTiles = (i64(Model::kShardVocab) + kTileRows - 1) / kTileRows;

  uint4 w[kTileRows][kOfLane];
  const auto load = [&](i64 tile) {
#pragma unroll
    for (int row = 0; row < kTileRows; ++row)
#pragma unroll
      for (int n = 0; n < kOfLane; ++n) {
        const int piece = n * kWarp + lane;
        const i64 v = tile * kTileRows + row;
        w[row][n] = make_uint4(0, 0, 0, 0);
        if (v < Model::kShardVocab && piece < kPieces)
          w[row][n] = reinterpret_cast<const uint4*>(s.w2 + v * Model::kMarkovRank)[piece];
      }
  };
  load(first);
  pdl_wait();
  pdl_launch();

  for (i64 group = 0; group < batch.requests; group += kSampleRequests) {
    const int count = batch.requests - group < kSampleRequests ? int(batch.requests - group) : kSampleRequests;
    // In a sweep this lane keeps the books of one row of one tile.
    const auto row_of = [&](i64 sweep) { return (sweep + lane % kTiles * warps) * kTileRows + lane / kTiles; };
    const auto temperature_of = [&](i64 r) { return Model::kProbabilistic ? batch.temperature[r] : 0.0f; };
    const auto begin = [&](i64 sweep) {
      const i64 v = row_of(sweep);
      for (int q = 0; q < count; ++q) {
        const i64 r = group + q, row = r * Model::kK + i;
        if (s.first_position[r] < 0 || v >= Model::kShardVocab) continue;
        logits[warp][q][lane] = bf16_at(s.base, row * Model::kShardVocab + v);
        if (!(temperature_of(r) >= 1e-5f)) continue;
        const DrawKey key = {u64(batch.seed[r]), u32(s.first_position[r] + i), u32(batch.step[r])};
        noise[warp][q][lane] = gumbel_at(key, u32(Model::kFirstToken + v), kDraftStream);
      }
    };
    __syncthreads();  // e and found of the group before are no longer read
    for (int q = warp; q < count; q += kSampleWarps) {
      const i32 token = token_before<Model>(s, batch.requests, group + q, i, gridDim.x, lane, blockIdx.x == 0);
      if (lane == 0) before[q] = token;
      for (int piece = lane; piece < kPieces; piece += kWarp)
        e[q][piece] = token < 0 ? make_uint4(0, 0, 0, 0)
                                : reinterpret_cast<const uint4*>(s.w1 + i64(token) * Model::kMarkovRank)[piece];
    }
    if (lane < kSampleRequests) found[warp][lane] = no_best();
    begin(first);
    __syncthreads();  // e is there

    for (i64 sweep = first; sweep < kAllTiles; sweep += kTiles * warps) {
      if (sweep != first) begin(sweep);
      for (int t = 0; t < kTiles && sweep + t * warps < kAllTiles; ++t) {
        for (int q = 0; q < count; ++q) {
          float sums[kTileRows] = {};
#pragma unroll
          for (int n = 0; n < kOfLane; ++n) {
            const int piece = n * kWarp + lane;
            if (piece >= kPieces) continue;
            const uint4 of_request = e[q][piece];
#pragma unroll
            for (int row = 0; row < kTileRows; ++row) sums[row] = dot(of_request, w[row][n], sums[row]);
          }
          const float bias = warp_sums(sums, lane);
          if (lane % kTiles == t) logits[warp][q][lane] += Model::kLogitScale * bias;
        }
        const i64 next = sweep + (t + 1) * warps;
        load(next < kAllTiles ? next : first);  // of this sweep, of the next one, of the next group
      }

      const i64 v = row_of(sweep);
      for (int q = 0; q < count; ++q) {
        if (before[q] < 0) continue;  // padding
        const i64 r = group + q, row = r * Model::kK + i;
        Best best = no_best();
        if (v < Model::kShardVocab) {
          float l = logits[warp][q][lane];
          if (Model::kProbabilistic && Model::kDraftLogitsBf16) {
            l = round_bf16(l);
            static_cast<u16*>(s.draft_logits)[row * Model::kShardVocab + v] = to_bf16(l);
          } else if (Model::kProbabilistic) {
            static_cast<float*>(s.draft_logits)[row * Model::kShardVocab + v] = l;
          }
          const float temperature = temperature_of(r);
          const float score = temperature >= 1e-5f ? l * (1.0f / temperature) + noise[warp][q][lane] : l;
          if (score > best.score) best = {score, i32(Model::kFirstToken + v)};
        }
        best = warp_best(best);
        if (lane == 0) found[warp][q] = better(found[warp][q], best);
      }
    }
    __syncthreads();  // found is there
    if (warp == 0 && lane < count) {
      Best best = found[0][lane];
      for (int other = 1; other < kSampleWarps; ++other) best = better(best, found[other][lane]);
      s.best[((i % 2) * batch.requests + group + lane) * gridDim.x + blockIdx.x] = best;
    }
  }
}

// After the last draft: its token, and the confidence of all of them. One pass over the weights.
//   weight [kHidden (+ kMarkovRank)], then the bias; null: no head.   confidence, survival [R, kK]
// Grid R, block kSampleThreads.
template <class Model>
__device__ inline void finish(const Batch& batch, const Sampling& s, int ctas, const u16* hidden, const float* weight,
                              const float* calibration, float* confidence, float* survival) {
  __shared__ float parts[Model::kK][kSampleWarps], of_draft[Model::kK];
  const i64 r = blockIdx.x;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  pdl_wait();
  pdl_launch();
  if (warp == 0) token_before<Model>(s, batch.requests, r, Model::kK, ctas, lane, true);
  if (weight == nullptr) return;

  float sums[Model::kK] = {};
#pragma unroll 2
  for (int c = 4 * threadIdx.x; c < Model::kHidden; c += 4 * kSampleThreads) {
    const float4 w = *reinterpret_cast<const float4*>(weight + c);
#pragma unroll
    for (int i = 0; i < Model::kK; ++i) {
      const uint2 four = *reinterpret_cast<const uint2*>(hidden + (r * Model::kK + i) * Model::kHidden + c);
      sums[i] += w.x * low_bf16(four.x) + w.y * high_bf16(four.x) + w.z * low_bf16(four.y) + w.w * high_bf16(four.y);
    }
  }
  if (Model::kConfidenceWithMarkov) {
    i32 before[Model::kK];  // older than the last token, which this launch finds
#pragma unroll
    for (int i = 0; i < Model::kK; ++i) before[i] = i == 0 ? s.ids[r * Model::kK] : s.tokens[r * Model::kK + i - 1];
    for (int c = threadIdx.x; c < Model::kMarkovRank; c += kSampleThreads)
#pragma unroll
      for (int i = 0; i < Model::kK; ++i)
        if (before[i] >= 0)
          sums[i] += weight[Model::kHidden + c] * bf16_at(s.w1, i64(before[i]) * Model::kMarkovRank + c);
  }
#pragma unroll
  for (int i = 0; i < Model::kK; ++i) {
    const float sum = warp_sum(sums[i]);
    if (lane == 0) parts[i][warp] = sum;
  }
  __syncthreads();  // parts are there
  const int i = threadIdx.x;
  if (i < Model::kK) {
    float sum = weight[Model::kHidden + (Model::kConfidenceWithMarkov ? Model::kMarkovRank : 0)];
    for (int other = 0; other < kSampleWarps; ++other) sum += parts[i][other];
    of_draft[i] = s.first_position[r] < 0 ? 0.0f : sigmoid(sum / calibration[i]);
  }
  __syncthreads();  // every confidence is there
  if (i >= Model::kK) return;
  float survived = 1;
  for (int j = 0; j <= i; ++j) survived *= of_draft[j];
  confidence[r * Model::kK + i] = of_draft[i];
  survival[r * Model::kK + i] = survived;
}

}  // namespace twostep::draft
