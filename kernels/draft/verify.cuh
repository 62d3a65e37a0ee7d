// Verification of a step's drafts (spec: drafter 8), in four launches: statistics of every row, the residual masses of
// block verification, the walk with its one draw, and the token that was drawn. Nothing of one request touches another.
//
// A row is read by kParts CTAs, a part of the vocabulary each; who needs a row adds its parts up, in their order.
// Values and their exponentials are FP32, sums and logarithms of probabilities FP64: FP64 exponentials of a whole row
// would cost more than reading it. p, q are softmax laws of target and draft rows; q of one-hot drafts is all on the
// draft. NaN counts as -inf; a row whose largest value is infinite is all on that token, the lowest of equals (token 0
// where nothing is above -inf). PDL: rows come from the kernels before; nothing is read before pdl_wait().
#pragma once

#include "draft/random.cuh"
#include "draft/row.cuh"

namespace twostep::draft {

constexpr int kVerifyThreads = 256;
constexpr int kVerifyWarps = kVerifyThreads / kWarp;
constexpr int kParts = kWarp;  // of a row: a lane each for who adds them up

// Of a part of a row: token is -1 where nothing is above -inf; sum of exp(value - largest).
// Of a whole row: token is 0 there; sum is the logarithm of the sum of exp(value).
struct RowStats {
  float largest;
  i32 token;
  double sum;
};

// The best tokens of a part, by the residual and by the target's own law.
struct Drawn {
  Best residual, target;
};

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
  RowStats* stats;  // [R, 2 kK + 1, kParts]: target rows, then draft rows
  double* masses;   // [R, kK, kParts]
  Drawn* drawn;     // [R, kParts]
  int logits_bf16, one_hot, block;
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
  double log_sum;
  i32 only;  // >= 0: all is on this token
  __device__ double log(i64 v) const {
    if (only >= 0) return v == only ? 0.0 : -infinity();
    const float value = values.at(v);
    return isnan(value) ? -infinity() : double(value) - log_sum;
  }
};

__device__ inline bool is_greedy(float temperature) { return !(temperature >= 1e-5f); }

template <class Model>
__device__ inline bool is_padding(const Batch& batch, const Verify& v, i64 r) {
  return batch.request[r] < 0 || v.first_position[r] < 0;
}

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

// This CTA's part of the vocabulary.
template <class Model>
struct Part {
  static constexpr i64 kWidth = (i64(Model::kVocab) + kParts - 1) / kParts;
  const i64 begin = blockIdx.x * kWidth;
  const i64 end = begin + kWidth < Model::kVocab ? begin + kWidth : i64(Model::kVocab);
};

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

// ---- Statistics

// stats of one part of a row. A greedy request asks for its best token alone.
// Grid (kParts, 2 kK + 1, R), block kVerifyThreads.
template <class Model>
__device__ inline void row_statistics(const Batch& batch, const Verify& v) {
  __shared__ Best bests[kVerifyWarps];
  __shared__ double sums[kVerifyWarps];
  pdl_launch();
  pdl_wait();
  const int row = blockIdx.y;
  const i64 r = blockIdx.z;
  const bool of_target = row <= Model::kK;
  const float temperature = batch.temperature[r];
  const bool greedy = is_greedy(temperature);
  if (is_padding<Model>(batch, v, r) || (!of_target && (v.one_hot || greedy))) return;
  const Values values =
      of_target ? target_row<Model>(v, r, row) : draft_row<Model>(v, r, row - Model::kK - 1, 1.0f / temperature);
  const Part<Model> part;
  Best best = no_best();
#pragma unroll 4
  for (i64 i = part.begin + threadIdx.x; i < part.end; i += kVerifyThreads)
    if (const float value = values.at(i); value > best.score) best = {value, i32(i)};
  best = cta_best(best, bests);
  double sum = 0;
  if (!greedy && best.token >= 0 && !isinf(best.score)) {
#pragma unroll 4
    for (i64 i = part.begin + threadIdx.x; i < part.end; i += kVerifyThreads)
      if (const float value = values.at(i); !isnan(value)) sum += double(expf(value - best.score));
  }
  sum = cta_sum<kVerifyThreads>(sum, sums);
  if (threadIdx.x == 0) v.stats[(r * (2 * Model::kK + 1) + row) * kParts + blockIdx.x] = {best.score, best.token, sum};
}

// ---- What is known of a request once its rows are

template <class Model>
struct Known {
  RowStats rows[2 * Model::kK + 1];
  i32 ids[Model::kK];                 // -1: no token
  double p[Model::kK], q[Model::kK];  // log p_i(x_i), log q_i(x_i) of the drafts before the first that is no token
  double masses[Model::kK];           // of block verification
};

template <class Model>
__device__ inline Law target_law(const Verify& v, const Known<Model>& known, i64 r, int row) {
  const RowStats& stats = known.rows[row];
  return {target_row<Model>(v, r, row), stats.sum, isinf(stats.largest) ? stats.token : -1};
}
template <class Model>
__device__ inline Law draft_law(const Verify& v, const Known<Model>& known, i64 r, int row, float z) {
  if (v.one_hot) return {{nullptr, false, 1.0f}, 0, known.ids[row]};
  const RowStats& stats = known.rows[Model::kK + 1 + row];
  return {draft_row<Model>(v, r, row, z), stats.sum, isinf(stats.largest) ? stats.token : -1};
}

// Fills `known` by all threads of a CTA; returns the number of drafts before the first that is no token. Each load that
// depends on no other is under way at once: one thread that walked the drafts would wait for memory at every one.
template <class Model>
__device__ inline int learn(const Verify& v, i64 r, bool greedy, float z, bool with_masses, Known<Model>& known) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int rows = greedy || v.one_hot ? Model::kK + 1 : 2 * Model::kK + 1;
  for (int row = warp; row < rows; row += kVerifyWarps) {
    const RowStats part = v.stats[(r * (2 * Model::kK + 1) + row) * kParts + lane];
    const Best best = warp_best({part.largest, part.token});
    const bool counts = !greedy && part.token >= 0 && !isinf(best.score);
    const double sum = warp_sum(counts ? part.sum * exp(double(part.largest) - double(best.score)) : 0.0);
    if (lane == 0) known.rows[row] = {best.score, best.token < 0 ? 0 : best.token, double(best.score) + log(sum)};
  }
  for (int i = 1 + warp; with_masses && i < Model::kK; i += kVerifyWarps) {
    const double mass = warp_sum(v.masses[(r * Model::kK + i) * kParts + lane]);
    if (lane == 0) known.masses[i] = mass;
  }
  if (threadIdx.x < Model::kK) {
    const i32 id = v.draft_ids[r * v.draft_ids_stride + threadIdx.x];
    known.ids[threadIdx.x] = id < 0 || id >= Model::kVocab ? -1 : id;
  }
  __syncthreads();  // rows and ids are there
  int drafts = 0;
  while (drafts < Model::kK && known.ids[drafts] >= 0) ++drafts;
  if (!greedy && int(threadIdx.x) < drafts) {
    const int i = threadIdx.x;
    known.p[i] = target_law<Model>(v, known, r, i).log(known.ids[i]);
    known.q[i] = draft_law<Model>(v, known, r, i, z).log(known.ids[i]);
  }
  __syncthreads();  // p and q are there
  return drafts;
}

// log P_i = log min(P_{i-1} * p / q, 1) of the first `count` drafts. A draft that the target cannot emit ends the block
// for good.
template <class Model>
__device__ inline double log_prefix(const Known<Model>& known, int count) {
  double prefix = 0;
  for (int i = 0; i < count; ++i) {
    if (prefix == -infinity() || known.p[i] == -infinity()) return -infinity();
    prefix += known.p[i] - known.q[i];
    if (!(prefix < 0)) prefix = 0;
  }
  return prefix;
}

// ---- Block verification

// masses[i] = S_i: the sum over tokens of max(P_i * p_{i+1} - q_{i+1}, 0), for i = 1 .. kK - 1 drafts before.
// Grid (kParts, kK - 1, R), block kVerifyThreads. Only of block verification of drafts that were drawn.
template <class Model>
__device__ inline void residual_mass(const Batch& batch, const Verify& v) {
  __shared__ double sums[kVerifyWarps];
  __shared__ Known<Model> known;
  pdl_launch();
  pdl_wait();
  const int i = blockIdx.y + 1;
  const i64 r = blockIdx.z;
  const float temperature = batch.temperature[r];
  if (is_padding<Model>(batch, v, r) || is_greedy(temperature)) return;
  const float z = 1.0f / temperature;
  if (i >= learn<Model>(v, r, false, z, false, known)) return;
  const double prefix = log_prefix<Model>(known, i);
  const Law p = target_law<Model>(v, known, r, i), q = draft_law<Model>(v, known, r, i, z);
  const Part<Model> part;
  double sum = 0;
#pragma unroll 4
  for (i64 t = part.begin + threadIdx.x; t < part.end; t += kVerifyThreads) {
    const double log_p = prefix + p.log(t), log_q = q.log(t);
    if (log_p > log_q) sum += double(expf(float(log_p))) - double(expf(float(log_q)));
  }
  sum = cta_sum<kVerifyThreads>(sum, sums);
  if (threadIdx.x == 0) v.masses[(r * Model::kK + i) * kParts + blockIdx.x] = sum;
}

// ---- The walk

__device__ inline double accept_uniform(const DrawKey& key, int row) {
  const DrawKey at = {key.seed, key.position + u32(row), key.step};
  return uniform(philox(at, 0, kAcceptStream).w[0]);
}

// h_i of block verification, i drafts of `drafts`.
template <class Model>
__device__ inline double block_bound(const Verify& v, const Known<Model>& known, int i, int drafts) {
  const double prefix = log_prefix<Model>(known, i);
  if (i == drafts) return exp(prefix);
  const double mass = v.one_hot ? exp(prefix) * -expm1(known.p[i]) : known.masses[i];
  const double all = mass - expm1(prefix);
  return all == 0 ? 1 : mass / all;
}

// How many drafts to keep, by one warp: a lane per draft. Greedy and standard end at the first that fails; a block is
// as long as its last draft that passes.
template <class Model>
__device__ inline int walk(const Verify& v, const Known<Model>& known, const DrawKey& key, int drafts, bool greedy) {
  const int lane = threadIdx.x % kWarp;
  bool passes = false;
  if (lane < drafts) {
    if (greedy) passes = known.ids[lane] == known.rows[lane].token;
    else if (v.block) passes = accept_uniform(key, lane) <= block_bound<Model>(v, known, lane + 1, drafts);
    else passes = known.p[lane] > log(accept_uniform(key, lane)) + known.q[lane];
  }
  if (!greedy && v.block) return warp_max(passes ? lane + 1 : 0);
  return -warp_max(lane < drafts && !passes ? -lane : -drafts);
}

// ---- The draw

// A request's accepted drafts, by the CTA of the first part, and the best of each part for the token after them.
// Grid (kParts, R), block kVerifyThreads.
template <class Model>
__device__ inline void draw(const Batch& batch, const Verify& v) {
  __shared__ Best bests[kVerifyWarps];
  __shared__ Known<Model> known;
  __shared__ int kept;
  pdl_launch();
  pdl_wait();
  const i64 r = blockIdx.y;
  i32* emitted = v.emitted + r * v.emitted_stride;
  const bool first_part = blockIdx.x == 0;
  if (is_padding<Model>(batch, v, r)) {
    if (first_part && threadIdx.x <= Model::kK) emitted[threadIdx.x] = -1;
    if (first_part && threadIdx.x == 0) v.accepted[r] = 0;
    return;
  }
  const float temperature = batch.temperature[r];
  const bool greedy = is_greedy(temperature);
  const float z = greedy ? 1.0f : 1.0f / temperature;
  const DrawKey key = {u64(batch.seed[r]), u32(v.first_position[r]), u32(batch.step[r])};
  const int drafts = learn<Model>(v, r, greedy, z, v.block && !v.one_hot && !greedy, known);
  if (threadIdx.x < kWarp) {
    const int tau = walk<Model>(v, known, key, drafts, greedy);
    if (threadIdx.x == 0) kept = tau;
  }
  __syncthreads();  // the walk is there
  const int tau = kept;
  if (first_part) {
    if (threadIdx.x <= Model::kK) emitted[threadIdx.x] = int(threadIdx.x) < tau ? known.ids[threadIdx.x] : -1;
    if (int(threadIdx.x) <= tau && known.rows[threadIdx.x].largest == -infinity()) atomicOr(v.status + r, kNonFinite);
    if (threadIdx.x == 0) v.accepted[r] = tau + 1;
  }

  Best residual = no_best(), target = no_best();
  if (greedy) {
    if (first_part) target = {0.0f, known.rows[tau].token};
  } else {
    const Law p = target_law<Model>(v, known, r, tau);
    const bool rejected = tau < drafts;
    const Law q = draft_law<Model>(v, known, r, rejected ? tau : 0, z);
    const double prefix = v.block && rejected ? log_prefix<Model>(known, tau) : 0.0;
    const DrawKey at = {key.seed, key.position + u32(tau), key.step};
    const Part<Model> part;
    for (i64 t = part.begin + threadIdx.x; t < part.end; t += kVerifyThreads) {
      const double log_p = p.log(t);
      const float noise = gumbel_at(at, u32(t), kResampleStream);
      if (const float score = float(log_p) + noise; score > target.score) target = {score, i32(t)};
      if (!rejected) continue;
      const double less = q.log(t) - (prefix + log_p);  // log q - log p'
      if (!(less < 0)) continue;
      const float score = float(prefix + log_p) + logf(-expm1f(float(less))) + noise;
      if (score > residual.score) residual = {score, i32(t)};
    }
    residual = cta_best(residual, bests);
    target = cta_best(target, bests);
  }
  if (threadIdx.x == 0) v.drawn[r * kParts + blockIdx.x] = {residual, target};
}

// The token after the accepted drafts: by the residual of the first rejected, or, where none was or rounding has
// emptied it, by the target's law. Then the request's next step begins.   Grid R, block kWarp.
template <class Model>
__device__ inline void emit(const Batch& batch, const Verify& v) {
  pdl_launch();
  pdl_wait();
  const i64 r = blockIdx.x;
  if (is_padding<Model>(batch, v, r)) return;
  const Drawn part = v.drawn[r * kParts + threadIdx.x];
  const Best residual = warp_best(part.residual), target = warp_best(part.target);
  if (threadIdx.x != 0) return;
  const i32 token = residual.token >= 0 ? residual.token : target.token;
  v.emitted[r * v.emitted_stride + v.accepted[r] - 1] = token < 0 ? 0 : token;
  batch.step[r] = i32(u32(batch.step[r]) + 1);
}

}  // namespace twostep::draft
