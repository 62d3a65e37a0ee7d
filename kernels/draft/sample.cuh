// The Markov head, one launch per draft (spec: drafter 6): l = base + kLogitScale * (W2 . e), e the W1 row of the token
// before; the pick is its argmax, with Gumbel noise in probabilistic mode. A CTA leaves its best token per request in
// `best`; the launch after reduces them, so that no grid has to wait for itself.
//
// W2 is read once per launch, from L2 after the first: a warp has a row, its lanes share r. FP32 sums in a fixed order.
// NaN counts as -inf, the lowest id wins ties; a row with nothing above -inf gives token 0 and kNonFinite.
// PDL: W2 is older than the kernel before; base, tokens and best are read after pdl_wait().
#pragma once

#include "draft/random.cuh"
#include "draft/row.cuh"

namespace twostep::draft {

constexpr int kSampleThreads = 256;
constexpr int kSampleWarps = kSampleThreads / kWarp;
constexpr int kSampleRequests = 16;  // that share one read of W2

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

// The token of `draft` for request r, by one warp.
__device__ inline Best reduce_best(const Best* of_request, int ctas, int lane) {
  Best found = no_best();
  for (int i = lane; i < ctas; i += kWarp) found = better(found, of_request[i]);
  return warp_best(found);
}

// Token of draft i - 1 of request r from the bests of its launch, by one warp; the anchor for i = 0. CTA `writes` keeps
// it.
template <class Model>
__device__ inline i32 token_before(const Sampling& s, i64 requests, i64 r, int i, int ctas, int lane, bool writes) {
  if (s.first_position[r] < 0) {
    if (i > 0 && writes && lane == 0) s.tokens[r * Model::kK + i - 1] = -1;
    return -1;
  }
  if (i == 0) return s.ids[r * Model::kK];
  const Best found = reduce_best(s.best + (((i - 1) % 2) * requests + r) * ctas, ctas, lane);
  const i32 token = found.token < 0 ? i32(Model::kFirstToken) : found.token;
  if (writes && lane == 0) {
    s.tokens[r * Model::kK + i - 1] = token;
    if (found.token < 0) atomicOr(s.status + r, kNonFinite);
  }
  return token;
}

// Draft i.   Grid any number of CTAs, the same for all drafts; block kSampleThreads.
template <class Model>
__device__ inline void pick(const Batch& batch, const Sampling& s, int i) {
  constexpr int kPairs = Model::kMarkovRank / 2;
  constexpr int kPieces = (kPairs + kWarp - 1) / kWarp;  // pairs of BF16 per lane
  __shared__ i32 before[kSampleRequests];
  __shared__ u32 e[kSampleRequests][kPairs];
  __shared__ Best of_warp[kSampleWarps][kSampleRequests];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  pdl_wait();
  pdl_launch();
  for (i64 group = 0; group < batch.requests; group += kSampleRequests) {
    const int count = batch.requests - group < kSampleRequests ? int(batch.requests - group) : kSampleRequests;
    __syncthreads();  // e and of_warp of the group before are no longer read
    for (int q = warp; q < count; q += kSampleWarps) {
      const i32 token = token_before<Model>(s, batch.requests, group + q, i, gridDim.x, lane, blockIdx.x == 0);
      if (lane == 0) before[q] = token;
      for (int pair = lane; pair < kPairs; pair += kWarp)
        e[q][pair] = token < 0 ? 0u : reinterpret_cast<const u32*>(s.w1 + i64(token) * Model::kMarkovRank)[pair];
    }
    __syncthreads();  // e is there

    // Lane q keeps request q's books.
    const i64 r = group + (lane < count ? lane : 0);
    const bool mine = lane < count && before[lane < count ? lane : 0] >= 0;
    const float temperature = Model::kProbabilistic ? batch.temperature[r] : 0.0f;
    const bool greedy = !(temperature >= 1e-5f);
    const float z = greedy ? 1.0f : 1.0f / temperature;
    const DrawKey key = {u64(batch.seed[r]), u32(s.first_position[r] + i), u32(batch.step[r])};
    Best best = no_best();
    for (i64 v = i64(blockIdx.x) * kSampleWarps + warp; v < Model::kShardVocab; v += i64(gridDim.x) * kSampleWarps) {
      u32 w[kPieces];
      for (int piece = 0; piece < kPieces; ++piece) {
        const int pair = piece * kWarp + lane;
        w[piece] = pair < kPairs ? reinterpret_cast<const u32*>(s.w2 + v * Model::kMarkovRank)[pair] : 0u;
      }
      float bias = 0;
      for (int q = 0; q < count; ++q) {
        float sum = 0;
        for (int piece = 0; piece < kPieces; ++piece) {
          const int pair = piece * kWarp + lane;
          if (pair >= kPairs) break;
          const u32 two = e[q][pair];
          sum += low_bf16(two) * low_bf16(w[piece]) + high_bf16(two) * high_bf16(w[piece]);
        }
        sum = warp_sum(sum);
        if (lane == q) bias = sum;
      }
      if (!mine) continue;
      const i64 row = r * Model::kK + i;
      float l = bf16_at(s.base, row * Model::kShardVocab + v) + Model::kLogitScale * bias;
      if (Model::kProbabilistic) {
        if (Model::kDraftLogitsBf16) {
          l = round_bf16(l);
          static_cast<u16*>(s.draft_logits)[row * Model::kShardVocab + v] = to_bf16(l);
        } else {
          static_cast<float*>(s.draft_logits)[row * Model::kShardVocab + v] = l;
        }
      }
      const i32 token = i32(Model::kFirstToken + v);
      const float score = greedy ? l : l * z + gumbel_at(key, u32(token), kDraftStream);
      if (score > best.score) best = {score, token};  // rising ids: the first of equals stays
    }
    if (lane < kSampleRequests) of_warp[warp][lane] = best;
    __syncthreads();  // of_warp is there
    if (warp == 0 && lane < count) {
      for (int other = 1; other < kSampleWarps; ++other) best = better(best, of_warp[other][lane]);
      s.best[((i % 2) * batch.requests + group + lane) * gridDim.x + blockIdx.x] = best;
    }
  }
}

// After the last draft: its token, and the confidence of all of them.
//   weight [kHidden (+ kMarkovRank)], then the bias; null: no head.   confidence, survival [R, kK]
// Grid R, block kSampleThreads.
template <class Model>
__device__ inline void finish(const Batch& batch, const Sampling& s, int ctas, const u16* hidden, const float* weight,
                              const float* calibration, float* confidence, float* survival) {
  __shared__ float parts[kSampleWarps];
  const i64 r = blockIdx.x;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  pdl_wait();
  pdl_launch();
  if (warp == 0) token_before<Model>(s, batch.requests, r, Model::kK, ctas, lane, true);
  if (weight == nullptr) return;
  __syncthreads();  // the last token is there
  float survived = 1;
  for (int i = 0; i < Model::kK; ++i) {
    const i64 row = r * Model::kK + i;
    float sum = 0;
    for (int c = threadIdx.x; c < Model::kHidden; c += kSampleThreads)
      sum += weight[c] * bf16_at(hidden, row * Model::kHidden + c);
    const i32 before = i == 0 ? s.ids[row] : s.tokens[row - 1];
    if (Model::kConfidenceWithMarkov && before >= 0)
      for (int c = threadIdx.x; c < Model::kMarkovRank; c += kSampleThreads)
        sum += weight[Model::kHidden + c] * bf16_at(s.w1, i64(before) * Model::kMarkovRank + c);
    sum = cta_sum<kSampleThreads>(sum, parts);
    if (threadIdx.x != 0) continue;
    const float bias = weight[Model::kHidden + (Model::kConfidenceWithMarkov ? Model::kMarkovRank : 0)];
    const float c = s.first_position[r] < 0 ? 0.0f : sigmoid((sum + bias) / calibration[i]);
    survived *= c;
    confidence[row] = c;
    survival[row] = survived;
  }
}

}  // namespace twostep::draft
