// Verification of a step's drafts (spec: drafter 8), in three launches: the statistics of every row, the residual
// masses of block verification, and the decision with its one draw. Nothing of one request touches another.
//
// p, q are softmax laws of target and draft rows; q of one-hot drafts is all on the draft. NaN counts as -inf; a row
// whose largest value is infinite is all on that token, the lowest of equals (token 0 where nothing is above -inf).
// PDL: rows come from the kernels before; nothing is read before pdl_wait().
#pragma once

#include "draft/random.cuh"
#include "draft/row.cuh"

namespace twostep::draft {

constexpr int kVerifyThreads = 512;
constexpr int kVerifyWarps = kVerifyThreads / kWarp;

// VerifyStep of src/drafter/step.h, and the drafter's own.
struct Verify {
  const i32* draft_ids;
  i64 draft_ids_stride;
  const void* logits;
  i64 logits_request_stride, logits_row_stride;
  const void* draft_logits;  // [R, kK, kVocab]
  i32* emitted;
  i64 emitted_stride;
  i32* accepted;
  const i64* first_position;
  i32* status;
  double* masses;          // [R, kK]
  struct RowStats* stats;  // [R, 2 kK + 1]: target rows, then draft rows
  int logits_bf16, one_hot, block;
};

struct RowStats {
  float largest;
  i32 token;       // of the largest; 0 where there is none above -inf
  double log_sum;  // of exp(value), the largest included
};

// Values of a row: what a law is made of.
struct Values {
  const void* data;
  bool bf16;
  float z;
  __device__ float at(i64 v) const {
    return (bf16 ? bf16_at(static_cast<const u16*>(data), v) : static_cast<const float*>(data)[v]) * z;
  }
};

// A law over tokens, as logarithms.
struct Law {
  Values values;
  RowStats stats;
  i32 only;  // >= 0: all is on this token
  __device__ double log(i64 v) const {
    if (only >= 0) return v == only ? 0.0 : -infinity();
    const float value = values.at(v);
    return isnan(value) ? -infinity() : double(value) - stats.log_sum;
  }
};

__device__ inline bool is_greedy(float temperature) { return !(temperature >= 1e-5f); }

template <class Model>
__device__ inline Values target_row(const Verify& v, i64 r, int row) {
  const i64 at = r * v.logits_request_stride + row * v.logits_row_stride;
  if (v.logits_bf16) return {static_cast<const u16*>(v.logits) + at, true, 1.0f};
  return {static_cast<const float*>(v.logits) + at, false, 1.0f};
}
template <class Model>
__device__ inline Values draft_row(const Verify& v, i64 r, int row, float z) {
  const i64 at = (r * Model::kK + row) * Model::kVocab;
  if (Model::kDraftLogitsBf16) return {static_cast<const u16*>(v.draft_logits) + at, true, z};
  return {static_cast<const float*>(v.draft_logits) + at, false, z};
}

template <class Model>
__device__ inline Law target_law(const Verify& v, i64 r, int row) {
  const RowStats stats = v.stats[r * (2 * Model::kK + 1) + row];
  return {target_row<Model>(v, r, row), stats, isinf(stats.largest) ? stats.token : -1};
}
template <class Model>
__device__ inline Law draft_law(const Verify& v, i64 r, int row, float z) {
  if (v.one_hot) return {{nullptr, false, 1.0f}, {0, 0, 0}, v.draft_ids[r * v.draft_ids_stride + row]};
  const RowStats stats = v.stats[r * (2 * Model::kK + 1) + Model::kK + 1 + row];
  return {draft_row<Model>(v, r, row, z), stats, isinf(stats.largest) ? stats.token : -1};
}

// Drafts before the first that is no token.
template <class Model>
__device__ inline int leading_valid(const Verify& v, i64 r) {
  int count = 0;
  while (count < Model::kK) {
    const i32 id = v.draft_ids[r * v.draft_ids_stride + count];
    if (id < 0 || id >= Model::kVocab) break;
    ++count;
  }
  return count;
}

// log P_i = log min(P_{i-1} * p / q, 1). A draft that the target cannot emit ends the block for good.
__device__ inline double log_prefix(double before, double p, double q) {
  if (before == -infinity() || p == -infinity()) return -infinity();
  const double next = before + p - q;
  return next < 0 ? next : 0.0;
}

// log P_i of the first `count` drafts.
template <class Model>
__device__ inline double prefix_of(const Verify& v, i64 r, int count, float z) {
  double prefix = 0;
  for (int i = 0; i < count; ++i) {
    const i32 id = v.draft_ids[r * v.draft_ids_stride + i];
    prefix = log_prefix(prefix, target_law<Model>(v, r, i).log(id), draft_law<Model>(v, r, i, z).log(id));
  }
  return prefix;
}

// The best over a CTA, in all threads.
__device__ inline Best cta_best(Best best, Best* parts) {
  best = warp_best(best);
  __syncthreads();  // parts may still be read
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = best;
  __syncthreads();  // parts are written
  Best found = parts[0];
  for (int warp = 1; warp < kVerifyWarps; ++warp) found = better(found, parts[warp]);
  return found;
}

template <class Model>
__device__ inline bool is_padding(const Batch& batch, const Verify& v, i64 r) {
  return batch.request[r] < 0 || v.first_position[r] < 0;
}

// stats of one row.   Grid (2 kK + 1, R), block kVerifyThreads.
template <class Model>
__device__ inline void row_statistics(const Batch& batch, const Verify& v) {
  __shared__ Best bests[kVerifyWarps];
  __shared__ double sums[kVerifyWarps];
  pdl_wait();
  pdl_launch();
  const int row = blockIdx.x;
  const i64 r = blockIdx.y;
  const bool of_target = row <= Model::kK;
  const float temperature = batch.temperature[r];
  if (is_padding<Model>(batch, v, r) || (!of_target && (v.one_hot || is_greedy(temperature)))) return;
  const Values values =
      of_target ? target_row<Model>(v, r, row) : draft_row<Model>(v, r, row - Model::kK - 1, 1.0f / temperature);
  Best best = no_best();
  for (i64 i = threadIdx.x; i < Model::kVocab; i += kVerifyThreads)
    if (const float value = values.at(i); value > best.score) best = {value, i32(i)};
  best = cta_best(best, bests);
  double sum = 0;
  if (best.token >= 0 && !isinf(best.score))
    for (i64 i = threadIdx.x; i < Model::kVocab; i += kVerifyThreads)
      if (const float value = values.at(i); !isnan(value)) sum += exp(double(value) - double(best.score));
  sum = cta_sum<kVerifyThreads>(sum, sums);
  if (threadIdx.x == 0)
    v.stats[r * (2 * Model::kK + 1) + row] = {best.score, best.token < 0 ? 0 : best.token,
                                              double(best.score) + log(sum)};
}

// masses[i] = S_i: the sum over tokens of max(P_i * p_{i+1} - q_{i+1}, 0), for i = 1 .. kK - 1 drafts before.
// Grid (kK - 1, R), block kVerifyThreads. Only of block verification of drafts that were drawn.
template <class Model>
__device__ inline void residual_mass(const Batch& batch, const Verify& v) {
  __shared__ double sums[kVerifyWarps];
  pdl_wait();
  pdl_launch();
  const int i = blockIdx.x + 1;
  const i64 r = blockIdx.y;
  const float temperature = batch.temperature[r];
  if (is_padding<Model>(batch, v, r) || is_greedy(temperature) || i >= leading_valid<Model>(v, r)) return;
  const float z = 1.0f / temperature;
  const double prefix = prefix_of<Model>(v, r, i, z);
  const Law p = target_law<Model>(v, r, i), q = draft_law<Model>(v, r, i, z);
  double sum = 0;
  for (i64 t = threadIdx.x; t < Model::kVocab; t += kVerifyThreads) {
    const double log_p = prefix + p.log(t), log_q = q.log(t);
    if (log_p > log_q) sum += exp(log_p) - exp(log_q);
  }
  sum = cta_sum<kVerifyThreads>(sum, sums);
  if (threadIdx.x == 0) v.masses[r * Model::kK + i] = sum;
}

__device__ inline double accept_uniform(const DrawKey& key, int row) {
  const DrawKey at = {key.seed, key.position + u32(row), key.step};
  return uniform(philox(at, 0, kAcceptStream).w[0]);
}

// How many drafts to keep, and log P of them (0 under the standard rule). One thread.
struct Walk {
  int accepted;
  double prefix;
};
template <class Model>
__device__ inline Walk standard_walk(const Verify& v, const DrawKey& key, i64 r, int drafts, float z) {
  int i = 0;
  for (; i < drafts; ++i) {
    const i32 id = v.draft_ids[r * v.draft_ids_stride + i];
    const double u = accept_uniform(key, i);
    if (!(target_law<Model>(v, r, i).log(id) > log(u) + draft_law<Model>(v, r, i, z).log(id))) break;
  }
  return {i, 0};
}
template <class Model>
__device__ inline Walk block_walk(const Verify& v, const DrawKey& key, i64 r, int drafts, float z) {
  Walk kept = {0, 0};
  double prefix = 0;
  for (int i = 1; i <= drafts; ++i) {  // to the end: a failure does not end the walk
    const i32 id = v.draft_ids[r * v.draft_ids_stride + i - 1];
    prefix = log_prefix(prefix, target_law<Model>(v, r, i - 1).log(id), draft_law<Model>(v, r, i - 1, z).log(id));
    double h = exp(prefix);
    if (i < drafts) {
      double mass = v.masses[r * Model::kK + i];
      if (v.one_hot) {
        const double next = target_law<Model>(v, r, i).log(v.draft_ids[r * v.draft_ids_stride + i]);
        mass = exp(prefix) * -expm1(next);
      }
      const double all = mass - expm1(prefix);
      h = all == 0 ? 1 : mass / all;
    }
    if (accept_uniform(key, i - 1) <= h) kept = {i, prefix};
  }
  return kept;
}

// Emits a request's tokens.   Grid R, block kVerifyThreads.
template <class Model>
__device__ inline void decide(const Batch& batch, const Verify& v) {
  __shared__ Best bests[kVerifyWarps];
  __shared__ Walk shared_walk;
  pdl_wait();
  pdl_launch();
  const i64 r = blockIdx.x;
  i32* emitted = v.emitted + r * v.emitted_stride;
  for (int i = threadIdx.x; i <= Model::kK; i += kVerifyThreads) emitted[i] = -1;
  if (is_padding<Model>(batch, v, r)) {
    if (threadIdx.x == 0) v.accepted[r] = 0;
    return;
  }
  __syncthreads();  // emitted is empty
  const float temperature = batch.temperature[r];
  const bool greedy = is_greedy(temperature);
  const float z = greedy ? 1.0f : 1.0f / temperature;
  const int drafts = leading_valid<Model>(v, r);
  const RowStats* rows = v.stats + r * (2 * Model::kK + 1);
  const DrawKey key = {u64(batch.seed[r]), u32(v.first_position[r]), u32(batch.step[r])};
  if (threadIdx.x == 0) {
    Walk walk = {0, 0};
    if (greedy)
      while (walk.accepted < drafts && v.draft_ids[r * v.draft_ids_stride + walk.accepted] == rows[walk.accepted].token)
        ++walk.accepted;
    else walk = v.block ? block_walk<Model>(v, key, r, drafts, z) : standard_walk<Model>(v, key, r, drafts, z);
    shared_walk = walk;
  }
  __syncthreads();  // the walk is there
  const Walk walk = shared_walk;
  const int tau = walk.accepted;
  i32 next = rows[tau].token;
  if (!greedy) {
    const Law p = target_law<Model>(v, r, tau);
    const DrawKey at = {key.seed, key.position + u32(tau), key.step};
    Best best = no_best();
    if (tau < drafts) {
      const Law q = draft_law<Model>(v, r, tau, z);
      for (i64 t = threadIdx.x; t < Model::kVocab; t += kVerifyThreads) {
        const double log_p = walk.prefix + p.log(t), log_q = q.log(t);
        if (!(log_p > log_q)) continue;
        const float score = float(log_p + log1p(-exp(log_q - log_p))) + gumbel_at(at, u32(t), kResampleStream);
        if (score > best.score) best = {score, i32(t)};
      }
      best = cta_best(best, bests);
    }
    if (best.token < 0) {  // the bonus token, or a residual that rounding has emptied
      for (i64 t = threadIdx.x; t < Model::kVocab; t += kVerifyThreads) {
        const float score = float(p.log(t)) + gumbel_at(at, u32(t), kResampleStream);
        if (score > best.score) best = {score, i32(t)};
      }
      best = cta_best(best, bests);
    }
    next = best.token < 0 ? 0 : best.token;
  }
  if (threadIdx.x != 0) return;
  bool nonfinite = false;
  for (int i = 0; i < tau; ++i) {
    emitted[i] = v.draft_ids[r * v.draft_ids_stride + i];
    nonfinite |= rows[i].largest == -infinity();
  }
  emitted[tau] = next;
  v.accepted[r] = tau + 1;
  if (nonfinite || rows[tau].largest == -infinity()) atomicOr(v.status + r, kNonFinite);
  batch.step[r] = i32(u32(batch.step[r]) + 1);
}

}  // namespace twostep::draft
