// PreparedKda on the CPU: dead requests and the conv line, the plain reference, the vector step, the plan.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <optional>

#include "core/bf16.h"
#include "core/check.h"
#include "core/env.h"
#include "kda/contract.h"

#if defined(__x86_64__)
// g++ 12 warns of the undefined registers that its own intrinsics start from (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace twostep {
namespace {

constexpr int kHead = kKdaHeadDim;
constexpr float kNormBias = 1e-6f;  // added to the sum of squares of q and of k (4.3 step 4)

struct Work {
  const KdaModel& model;
  const float* owned;  // KdaOwned
  const KdaLayout& layout;
  const KdaStep& step;     // of no tokens where records are folded alone
  std::uint16_t* rounded;  // KdaTestSwitches
};

// ---- Requests: which are dead, and where the caches of the others are (5.7, 7.1, 8.3, 9).

struct Request {
  std::int64_t index = 0;
  int tokens = 0;  // q'; 0: dead
  std::int64_t accepted = 1;
  std::uint16_t* line = nullptr;
  const float* source = nullptr;       // state of head 0 before the step
  float* targets[kKdaMaxTokens] = {};  // where that after token t goes; null: nowhere
  int pending = 0;                     // recorded tokens that are folded first
  float* folded = nullptr;             // where the state after them goes; null: nowhere
  KdaRecords records = {};             // of one head; null in slots mode
  std::uint32_t KdaCounters::*bad = nullptr;
};

KdaRecords records_of(const KdaModel& model, const KdaLayout& layout, std::uint8_t* records, std::int64_t slot,
                      std::int64_t head) {
  return kda_records(records + slot * layout.record_stride, model.heads, layout.entries(), head);
}

// The record rule of 8.3. No step records more than kKdaMaxTokens.
bool fits_records(std::int64_t accepted, std::int32_t count) {
  return count == 0 ? accepted == 1 : accepted <= std::min<std::int64_t>(count, kKdaMaxTokens);
}

// Line, state and records of one slot, and what of these a head folds. A verify step writes its tokens' records.
void resolve_records(const Work& work, std::int64_t slot, std::int64_t head, int tokens, Request* request) {
  const KdaStep& step = work.step;
  if (request->accepted < 1 || request->accepted > work.layout.entries()) {
    request->bad = &KdaCounters::bad_accepted;
    return;
  }
  request->records = records_of(work.model, work.layout, step.records, slot, head);
  const std::int32_t count = *request->records.count;
  if (!fits_records(request->accepted, count)) {
    request->bad = &KdaCounters::stale_records;
    return;
  }
  request->tokens = tokens;
  request->line = step.conv + slot * work.layout.conv_stride;
  float* state = step.state + slot * work.layout.state_stride;
  request->source = state;
  request->pending = count > 0 ? static_cast<int>(request->accepted) : 0;
  if (step.tokens == 1) request->targets[0] = state;
  else if (request->pending > 0) request->folded = state;
}

Request resolve(const Work& work, std::int64_t n, std::int64_t head) {
  const KdaStep& step = work.step;
  Request request;
  request.index = n;
  const std::int32_t* slots = step.slots + n * step.slots_stride;
  const auto dead = [&](std::int64_t slot) { return slot < work.model.options.first_live_slot; };
  const auto beyond = [&](std::int64_t slot) { return slot >= work.layout.num_slots; };
  const auto refuse = [&](std::uint32_t KdaCounters::*bad) {
    request.bad = bad;
    return request;
  };

  if (dead(slots[0])) return request;
  if (beyond(slots[0])) return refuse(&KdaCounters::bad_slot);
  const int tokens = step.lengths ? step.lengths[n] : step.tokens;
  if (tokens < 0 || tokens > step.tokens) return refuse(&KdaCounters::bad_length);
  if (tokens == 0) return request;
  if (step.accepted) request.accepted = step.accepted[n];
  if (step.records) {
    resolve_records(work, slots[0], head, tokens, &request);
    return request;
  }
  if (request.accepted < 1 || request.accepted > step.window) return refuse(&KdaCounters::bad_accepted);
  const std::int64_t read = slots[request.accepted - 1];
  if (dead(read)) return request;
  if (beyond(read)) return refuse(&KdaCounters::bad_slot);

  request.tokens = tokens;
  request.line = step.conv + slots[0] * work.layout.conv_stride;
  request.source = step.state + read * work.layout.state_stride;
  for (int t = 0; t < tokens; ++t) {
    if (beyond(slots[t])) request.bad = &KdaCounters::bad_slot;
    else if (!dead(slots[t])) request.targets[t] = step.state + slots[t] * work.layout.state_stride;
  }
  return request;
}

const std::uint16_t* projected_row(const Work& work, const Request& request, int t) {
  return work.step.projected + (request.index * work.step.tokens + t) * work.step.row_stride;
}

std::uint16_t* out_row(const Work& work, const Request& request, std::int64_t head, int t) {
  return work.step.out + (request.index * work.step.tokens + t) * work.step.out_stride + head * kHead;
}

float beta_logit(const Work& work, const Request& request, std::int64_t head, int t) {
  return bf16_to_float(projected_row(work, request, t)[4 * work.model.channels() + kHead + head]);
}

// `which`: q, k, v, g.
std::uint16_t* rounded_row(const Work& work, const Request& request, std::int64_t head, int t, int which) {
  if (work.rounded == nullptr) return nullptr;
  const std::int64_t row = request.index * work.step.tokens + t;
  return work.rounded + (row * 4 + which) * work.model.channels() + head * kHead;
}

// ---- The conv line (6.2, 7.3). Both layouts meet here, so that one code computes on both.

// Inputs of a third's channels of one head in the order of time: the history, then the tokens.
struct Taps {
  std::uint16_t at[kKdaConvWidth - 1 + kKdaMaxTokens][kHead];
};

void load_taps(const Work& work, const Request& request, std::int64_t head, int third, Taps* taps) {
  const std::int64_t channels = work.model.channels();
  const std::int64_t first = third * channels + head * kHead;
  const std::int64_t oldest = request.accepted - 1;
  for (int p = 0; p < kKdaConvWidth - 1; ++p) {
    if (work.model.options.conv_dim_first) {
      const std::uint16_t* from = request.line + first * work.layout.conv_len + oldest + p;
      for (int c = 0; c < kHead; ++c) taps->at[p][c] = from[c * work.layout.conv_len];
    } else {
      std::memcpy(taps->at[p], request.line + (oldest + p) * 3 * channels + first, sizeof taps->at[p]);
    }
  }
  for (int t = 0; t < request.tokens; ++t) {
    std::uint16_t* to = taps->at[kKdaConvWidth - 1 + t];
    std::memcpy(to, projected_row(work, request, t) + first, sizeof taps->at[0]);
  }
}

// Positions from 0 on.
void store_taps(const Work& work, std::uint16_t* line, std::int64_t head, int third, const std::uint16_t (*taps)[kHead],
                int positions) {
  const std::int64_t channels = work.model.channels();
  const std::int64_t first = third * channels + head * kHead;
  if (work.model.options.conv_dim_first) {
    for (int c = 0; c < kHead; ++c)
      for (int p = 0; p < positions; ++p) line[(first + c) * work.layout.conv_len + p] = taps[p][c];
  } else {
    for (int p = 0; p < positions; ++p) std::memcpy(line + p * 3 * channels + first, taps[p], sizeof taps[p]);
  }
}

// The line becomes the taps without the oldest.
void store_line(const Work& work, const Request& request, std::int64_t head, int third, const Taps& taps) {
  store_taps(work, request.line, head, third, taps.at + 1, kKdaConvWidth - 2 + request.tokens);
}

// ---- Records (8): read before any is written, written when the tokens are done.

// Where the step notes k after SiLU and g of a token; null: nowhere. Decode notes nothing.
std::uint16_t* recorded_row(const Work& work, const Request& request, int t, int which) {
  if (request.records.count == nullptr || work.step.tokens == 1) return nullptr;
  return (which == 1 ? request.records.k : request.records.g) + t * kHead;
}

// The corrections of the tokens, and how many are recorded now.
template <class Token>
void store_u(const Work& work, const Request& request, const Token* tokens) {
  if (request.records.count == nullptr) return;
  const int recorded = work.step.tokens == 1 ? 0 : request.tokens;
  for (int t = 0; t < recorded; ++t)
    for (int v = 0; v < kHead; ++v) request.records.u[t * kHead + v] = static_cast<float>(tokens[t].u[v]);
  *request.records.count = recorded;
}

// ---- The plain reference: one loop per step of 4.3.

namespace plain {

std::uint16_t to_bf16(float value) { return float_to_bf16(value); }
std::uint16_t to_bf16(double value) { return double_to_bf16(value); }

template <class Real>
Real sigmoid(Real x) {
  return 1 / (1 + std::exp(-x));
}

template <class Real>
Real softplus(Real x) {
  return x > 20 ? x : std::log1p(std::exp(x));
}

template <class Real>
struct Token {
  Real qkv[3][kHead];
  Real decay[kHead];
  Real u[kHead];
  Real o[kHead];
  Real beta;
};

// Step 4.
template <class Real>
void normalize(Real* row, Real scale) {
  Real squares = 0;
  for (int j = 0; j < kHead; ++j) squares += row[j] * row[j];
  const Real root = std::sqrt(squares + static_cast<Real>(1e-6));
  for (int j = 0; j < kHead; ++j) row[j] = row[j] / root * scale;
}

// Step 6 of one channel.
template <class Real>
Real decay_of(const KdaModel& model, std::int64_t head, int j, std::uint16_t g) {
  const Real a = std::exp(static_cast<Real>(static_cast<const float*>(model.weights.a_log.data)[head]));
  const Real s =
      static_cast<Real>(bf16_to_float(g)) + static_cast<const float*>(model.weights.dt_bias.data)[head * kHead + j];
  const auto bound = model.options.gate_lower_bound;
  return std::exp(bound ? *bound * sigmoid(a * s) : -a * softplus(s));
}

// k, decay and u of the recorded tokens.
template <class Real>
void recall(const Work& work, const Request& request, std::int64_t head, Token<Real>* pending) {
  for (int t = 0; t < request.pending; ++t) {
    for (int j = 0; j < kHead; ++j) {
      const std::int64_t at = t * kHead + j;
      pending[t].qkv[1][j] = bf16_to_float(request.records.k[at]);
      pending[t].decay[j] = decay_of<Real>(work.model, head, j, request.records.g[at]);
      pending[t].u[j] = request.records.u[at];
    }
    normalize(pending[t].qkv[1], Real{1});
  }
}

// Step 8 of the recorded tokens, on one row of the state.
template <class Real>
void fold_row(const Request& request, const Token<Real>* pending, int v, std::int64_t offset, Real* s) {
  for (int t = 0; t < request.pending; ++t) {
    for (int k = 0; k < kHead; ++k) s[k] *= pending[t].decay[k];
    for (int k = 0; k < kHead; ++k) s[k] += pending[t].u[v] * pending[t].qkv[1][k];
  }
  if (request.folded == nullptr) return;
  for (int k = 0; k < kHead; ++k) request.folded[offset + k] = static_cast<float>(s[k]);
}

template <class Real>
void fold_head(const Work& work, const Request& request, std::int64_t head) {
  Token<Real> pending[kKdaMaxTokens];
  recall(work, request, head, pending);
  for (int v = 0; v < kHead; ++v) {
    const std::int64_t offset = (head * kHead + v) * kHead;
    Real s[kHead];
    for (int k = 0; k < kHead; ++k) s[k] = request.source[offset + k];
    fold_row(request, pending, v, offset, s);
  }
}

template <class Real>
void step_head(const Work& work, const Request& request, std::int64_t head) {
  const std::int64_t channels = work.model.channels();
  const KdaOptions& options = work.model.options;
  const std::int64_t first = head * kHead;  // channel
  Token<Real> tokens[kKdaMaxTokens], pending[kKdaMaxTokens];
  recall(work, request, head, pending);

  // 1-3: convolution, cache, SiLU.
  for (int third = 0; third < 3; ++third) {
    Taps taps;
    load_taps(work, request, head, third, &taps);
    store_line(work, request, head, third, taps);
    const float* weight = work.owned + third * 4 * channels + first;
    const float* bias = work.owned + KdaOwned::bias_offset(channels) + third * channels + first;
    for (int t = 0; t < request.tokens; ++t) {
      std::uint16_t* rounded = rounded_row(work, request, head, t, third);
      std::uint16_t* recorded = third == 1 ? recorded_row(work, request, t, third) : nullptr;
      for (int c = 0; c < kHead; ++c) {
        Real acc = bias[c];
        for (int tap = 0; tap < kKdaConvWidth; ++tap)
          acc += static_cast<Real>(weight[tap * channels + c]) * bf16_to_float(taps.at[t + tap][c]);
        const std::uint16_t y = to_bf16(acc / (1 + std::exp(-acc)));
        tokens[t].qkv[third][c] = bf16_to_float(y);
        if (rounded) rounded[c] = y;
        if (recorded) recorded[c] = y;
      }
    }
  }

  const auto* f_b = static_cast<const std::uint16_t*>(work.model.weights.f_b.data) + first * kHead;
  for (int t = 0; t < request.tokens; ++t) {
    Token<Real>& token = tokens[t];
    normalize(token.qkv[0], static_cast<Real>(options.scale));
    normalize(token.qkv[1], Real{1});

    // 5-7: gate and beta.
    const std::uint16_t* f = projected_row(work, request, t) + 4 * channels;
    std::uint16_t* rounded = rounded_row(work, request, head, t, 3);
    std::uint16_t* recorded = recorded_row(work, request, t, 3);
    for (int j = 0; j < kHead; ++j) {
      Real sum = 0;
      for (int i = 0; i < kHead; ++i) sum += static_cast<Real>(bf16_to_float(f[i])) * bf16_to_float(f_b[j * kHead + i]);
      const std::uint16_t g = to_bf16(sum);
      if (rounded) rounded[j] = g;
      if (recorded) recorded[j] = g;
      token.decay[j] = decay_of<Real>(work.model, head, j, g);
    }
    token.beta = sigmoid(static_cast<Real>(beta_logit(work, request, head, t)));
  }

  // 8: delta rule. Rows of the state do not meet, so each goes through all tokens on its own.
  for (int v = 0; v < kHead; ++v) {
    const std::int64_t offset = first * kHead + v * kHead;
    Real s[kHead];
    for (int k = 0; k < kHead; ++k) s[k] = request.source[offset + k];
    fold_row(request, pending, v, offset, s);
    for (int t = 0; t < request.tokens; ++t) {
      Token<Real>& token = tokens[t];
      Real p = 0;
      for (int k = 0; k < kHead; ++k) s[k] *= token.decay[k];
      for (int k = 0; k < kHead; ++k) p += s[k] * token.qkv[1][k];
      token.u[v] = token.beta * (token.qkv[2][v] - p);
      for (int k = 0; k < kHead; ++k) s[k] += token.u[v] * token.qkv[1][k];
      token.o[v] = 0;
      for (int k = 0; k < kHead; ++k) token.o[v] += s[k] * token.qkv[0][k];
      if (request.targets[t] == nullptr) continue;
      for (int k = 0; k < kHead; ++k) request.targets[t][offset + k] = static_cast<float>(s[k]);
    }
  }

  // 9, 10: gated RMSNorm.
  const float* norm_weight = work.owned + KdaOwned::norm_offset(channels);
  for (int t = 0; t < request.tokens; ++t) {
    const std::uint16_t* z = projected_row(work, request, t) + 3 * channels + first;
    std::uint16_t* out = out_row(work, request, head, t);
    Real* o = tokens[t].o;
    Real squares = 0;
    for (int v = 0; v < kHead; ++v) o[v] = bf16_to_float(to_bf16(o[v]));
    for (int v = 0; v < kHead; ++v) squares += o[v] * o[v];
    const Real root = std::sqrt(squares / kHead + static_cast<Real>(options.norm_eps));
    for (int v = 0; v < kHead; ++v)
      out[v] = to_bf16(o[v] / root * norm_weight[v] * sigmoid(static_cast<Real>(bf16_to_float(z[v]))));
  }
  store_u(work, request, tokens);
}

}  // namespace plain

// ---- Vectors.

#if defined(__x86_64__)

struct alignas(64) Token {
  float qkv[3][kHead];
  float decay[kHead];
  float u[kHead];
  float o[kHead];
  float beta;
  float k_dot_q;
};

#pragma GCC push_options
#pragma GCC target("avx512f")
namespace avx512 {

using Vec = __m512;
using Raw = __m512i;
constexpr int kLanes = 16;
constexpr int kRows = 2;  // 16 of the 32 registers

inline Vec fill(float value) { return _mm512_set1_ps(value); }
inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vec value) { _mm512_storeu_ps(to, value); }
inline void stream(float* to, Vec value) { _mm512_stream_ps(to, value); }
inline void fence() { _mm_sfence(); }
inline Raw load_raw(const std::uint16_t* from) { return _mm512_loadu_si512(from); }
inline Vec even(Raw raw) { return _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16)); }
inline Vec odd(Raw raw) {
  return _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
inline Vec widen(const std::uint16_t* from) {
  return even(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
inline void narrow(std::uint16_t* to, Vec value) {
  const __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(value), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(upper));
}
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec at_most(Vec limit, Vec x) { return _mm512_min_ps(limit, x); }
inline Vec at_least(Vec limit, Vec x) { return _mm512_max_ps(limit, x); }
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale_2n(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline float total(Vec sum) { return _mm512_reduce_add_ps(sum); }
inline Vec round_bf16(Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd_bit = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd_bit, _mm512_set1_epi32(0x7fff)));
  const Vec upper = odd(rounded);
  return _mm512_mask_mov_ps(upper, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}
bool available() { return __builtin_cpu_supports("avx512f"); }

#include "kda/cpu_kernels.h"

}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {

using Vec = __m256;
using Raw = __m256i;
constexpr int kLanes = 8;
constexpr int kRows = 1;  // a row is all 16 registers, and spills to L1

inline Vec fill(float value) { return _mm256_set1_ps(value); }
inline Vec load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vec value) { _mm256_storeu_ps(to, value); }
inline void stream(float* to, Vec value) { _mm256_stream_ps(to, value); }
inline void fence() { _mm_sfence(); }
inline Raw load_raw(const std::uint16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Vec even(Raw raw) { return _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16)); }
inline Vec odd(Raw raw) {
  return _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
inline Vec widen(const std::uint16_t* from) {
  return even(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline void narrow(std::uint16_t* to, Vec value) {
  const __m256i upper = _mm256_srli_epi32(_mm256_castps_si256(value), 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec at_most(Vec limit, Vec x) { return _mm256_min_ps(limit, x); }
inline Vec at_least(Vec limit, Vec x) { return _mm256_max_ps(limit, x); }
inline Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec power_of_2(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// In two factors, each a normal number: n may be below -126 and above 127.
inline Vec scale_2n(Vec x, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  return x * power_of_2(half) * power_of_2(_mm256_sub_epi32(whole, half));
}
inline float total(Vec sum) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline Vec round_bf16(Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd_bit = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd_bit, _mm256_set1_epi32(0x7fff)));
  return _mm256_blendv_ps(odd(rounded), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
bool available() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#include "kda/cpu_kernels.h"

}  // namespace avx2
#pragma GCC pop_options
#endif

// ---- Paths and the plan.

struct Path {
  const char* name;
  bool (*available)();
  void (*step_head)(const Work& work, const Request& request, std::int64_t head);
  void (*fold_head)(const Work& work, const Request& request, std::int64_t head);
};

bool always() { return true; }

// Fastest first.
constexpr Path kAllPaths[] = {
#if defined(__x86_64__)
    {"AVX-512", avx512::available, avx512::step_head, avx512::fold_head},
    {"AVX2", avx2::available, avx2::step_head, avx2::fold_head},
#endif
    {"reference", always, plain::step_head<float>, plain::fold_head<float>},
    {"reference64", always, plain::step_head<double>, plain::fold_head<double>},
};

const Path& path_named(const std::string& name) {
  for (const Path& path : kAllPaths)
    if (path.available() && (name == "auto" || name == path.name)) return path;
  std::string accepted = "auto";
  for (const std::string& known : kda_cpu_paths()) accepted += ", " + known;
  fail(StatusCode::kUnsupported, "kda.PreparedKda", "cpu_path", name, accepted);
}

class CpuKda final : public KdaPlan {
 public:
  CpuKda(const KdaModel& model, const KdaTestSwitches& test)
      : model_(model), path_(path_named(test.cpu_path)), rounded_(test.rounded) {
    const int configured = test.threads > 0 ? test.threads : environment().threads;
    threads_ = configured > 0 ? configured : omp_get_num_procs();
    const std::int64_t floats = KdaOwned::floats(model_.channels());
    try {
      owned_.resize(static_cast<std::size_t>(floats));
    } catch (const std::bad_alloc&) {
      fail(StatusCode::kOutOfMemory, "kda.PreparedKda", "owned weights", std::to_string(floats * 4) + " bytes",
           "memory for them");
    }
    fill_owned(model_.weights, model_.channels(), owned_.data());
  }

  // Makes the calling thread's OpenMP team, so that run starts no thread.
  void prepare(const KdaLayout& layout) override {
    layout_ = layout;
#pragma omp parallel num_threads(threads_)
    { asm volatile("" ::: "memory"); }  // the compiler would drop an empty region, and the team with it
  }

  void run(const KdaStep& step, KdaCounters* counters, Stream) override {
    const Work work{model_, owned_.data(), layout_, step, rounded_};
    const std::int64_t units = step.requests * model_.heads;
    // Requests of one head follow each other: its rows of F_B stay in the caches.
#pragma omp parallel for schedule(dynamic) num_threads(threads_) if (units > 1)
    for (std::int64_t unit = 0; unit < units; ++unit) {
      const std::int64_t head = unit / step.requests;
      const Request request = resolve(work, unit % step.requests, head);
      if (request.bad && counters && head == 0)
        std::atomic_ref(counters->*request.bad).fetch_add(1, std::memory_order_relaxed);
      if (request.tokens > 0) path_.step_head(work, request, head);
      for (int t = request.tokens; t < step.tokens; ++t)
        std::fill_n(out_row(work, request, head, t), kHead, std::uint16_t{0});
    }
  }

  void fold(const KdaFold& fold, KdaCounters* counters, Stream) override {
    const KdaStep no_step;
    const Work work{model_, owned_.data(), layout_, no_step, nullptr};
    const std::int64_t units = fold.requests * model_.heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads_) if (units > 1)
    for (std::int64_t unit = 0; unit < units; ++unit) {
      const auto bad = fold_unit(work, fold, unit / model_.heads, unit % model_.heads);
      if (bad && counters && unit % model_.heads == 0)
        std::atomic_ref(counters->*bad).fetch_add(1, std::memory_order_relaxed);
    }
  }

  void reload(const KdaWeights& weights, Stream) override { fill_owned(weights, model_.channels(), owned_.data()); }

  KdaTactic tactic(std::size_t) const override { return {}; }
  std::string kernel(std::size_t) const override { return std::string("cpu ") + path_.name; }
  KdaStats stats() const override { return {}; }

 private:
  // fold_records or reset_records for one (request, head): the counter of what is bad, else null.
  std::uint32_t KdaCounters::*fold_unit(const Work& work, const KdaFold& fold, std::int64_t n,
                                        std::int64_t head) const {
    const std::int64_t from = fold.slots[n * fold.slots_stride], to = fold.dst_slots[n * fold.dst_stride];
    const std::int64_t accepted = fold.accepted ? fold.accepted[n] : 1;
    const auto dead = [&](std::int64_t slot) { return slot < model_.options.first_live_slot; };
    if (dead(from)) return nullptr;
    if (from >= layout_.num_slots) return &KdaCounters::bad_slot;
    if (accepted < 1 || accepted > layout_.entries()) return &KdaCounters::bad_accepted;
    if (dead(to)) return nullptr;
    if (to >= layout_.num_slots) return &KdaCounters::bad_slot;
    const KdaRecords target = records_of(model_, layout_, fold.records, to, head);
    if (fold.accepted) {
      Request request;
      request.records = records_of(model_, layout_, fold.records, from, head);
      if (!fits_records(accepted, *request.records.count)) return &KdaCounters::stale_records;
      request.accepted = accepted;
      request.pending = *request.records.count > 0 ? static_cast<int>(accepted) : 0;
      request.line = fold.conv + from * layout_.conv_stride;
      request.source = fold.state + from * layout_.state_stride;
      request.folded = fold.state + to * layout_.state_stride;
      for (int third = 0; third < 3; ++third) {
        Taps taps;
        load_taps(work, request, head, third, &taps);
        store_taps(work, fold.conv + to * layout_.conv_stride, head, third, taps.at, kKdaConvWidth - 1);
      }
      path_.fold_head(work, request, head);
    }
    *target.count = 0;
    return nullptr;
  }

  KdaModel model_;
  const Path& path_;
  std::uint16_t* rounded_;
  int threads_ = 1;
  std::vector<float> owned_;
  KdaLayout layout_;
};

}  // namespace

std::vector<std::string> kda_cpu_paths() {
  std::vector<std::string> names;
  for (const Path& path : kAllPaths)
    if (path.available()) names.emplace_back(path.name);
  return names;
}

std::unique_ptr<KdaPlan> make_cpu_kda(const KdaModel& model, const KdaTestSwitches& test) {
  return std::make_unique<CpuKda>(model, test);
}

}  // namespace twostep
