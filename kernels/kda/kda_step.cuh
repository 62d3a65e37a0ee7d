// One decode or verify step of the KDA core of one layer: q = kTokens tokens of each of B requests (spec: kda 4, 6-8).
//
//   projected [B q, kRowStride] BF16   Q | K | V | z | f | beta logits; only read, after the dependency
//   out       [B q, D] BF16            rows out_stride elements apart; only written
//   conv      BF16                     one line per slot: [L, 3D], or [3D, L] with kDimFirst; slots conv_stride apart
//   state     FP32                     [H, 128 v, 128 k] per slot; slots state_stride apart
//   slots     int32                    row n at n * slots_stride; column 0 names the line, column t takes state t
//   records   with kRecords            per slot, slots record_stride bytes apart: of each head u [E][128] FP32,
//                                      k [E][128] BF16, g [E][128] BF16, E = L - 2; then the heads' counts
//
//   weights, constant: owned, FP32: conv [3][4][D], bias [3][D], norm [128]; f_b [D, 128] BF16; a_log [H] and
//   dt_bias [D] FP32
//
// Grid: kSplit CTAs, one cluster, per (request, head); CTA `rank` owns the values v of rank * kValues ... The state of
// its values arrives by bulk copies while the warps compute, for all tokens at once,
//
//   y      = R16(silu(bias + W0 h0 + W1 h1 + W2 h2 + W3 x))                       one warp per token
//   q, k   = scale y_q / sqrt(|y_q|^2 + 1e-6),  y_k / sqrt(|y_k|^2 + 1e-6)
//   g      = R16(F_B f);  decay = exp(lb sigmoid(A (g + dt_bias))), or exp(-A softplus(g + dt_bias))
//
// and then walk through the tokens with the state in registers, eight lanes to a row v, `kPassRows` rows a thread:
//
//   S = S decay;  p = S k;  u = beta (v - p);  o = S q + u (k . q);  S = S + u k^T;  o = R16(o)
//   out = R16(o rsqrt(mean o^2 + eps) norm sigmoid(z))
//
// With kRecords all is of column 0, and the accepted tokens that the last verify step recorded come first: k and decay
// from their k and g as above, then S = S decay; S = S + u k^T with their u. That S is stored; the new tokens leave u,
// k and g as records, and no state. Decode stores the state after its token, and no record. The same operations in the
// same order: what is folded has the bits that a slot would have.
//
// R16 rounds to BF16, to nearest even; sums are FP32 in an order that depends on the tactic alone. No atomics on
// results. A warp loads every state element that it stores, and stores it after the load: a slot may be read and
// written.
//
// PDL: weights are read before pdl_wait(), all else after it; with kEarlyCaches the caller promises that slots,
// accepted and the caches are not being written, and they are read before it too.
//
// A dead request takes a branch: it writes zeros, touches no cache, and still meets its cluster's barrier.
#pragma once

#include "common/ptx.cuh"

namespace twostep::kda {

// For tests alone: each turns one synchronisation rule off. But for the last, which lets every lane arrive where one
// speaks for its warp: a checker of races may follow threads alone.
enum class Fault { kNone, kNoDependencyWait, kNoTokenBarrier, kEveryLaneArrives };

struct Params {
  const u16* projected;
  u16* out;
  u16* conv;
  float* state;
  const int* slots;
  const int* accepted;  // null: 1
  const int* lengths;   // null: kTokens
  u32* counters;        // null, or bad_accepted, bad_slot, bad_length, stale_records
  u16* rounded;         // null, or [B q, 4, D]: q, k, v, g as rounded
  const float* owned;
  const u16* f_b;
  const float* a_log;
  const float* dt_bias;
  i64 out_stride;
  i64 conv_stride;
  i64 state_stride;
  i64 slots_stride;
  i64 num_slots;
  i64 first_live_slot;
  int window;
  float scale;
  float norm_eps;
  float lower_bound;
  u8* records;  // null but with kRecords
  i64 record_stride;
  int requests;
};

constexpr int kDim = 128;  // keys and values of a head

// The numbers that follow from a configuration. The host computes kSmemBytes too; they must agree.
template <class C>
struct Layout {
  static constexpr int kChannels = C::kHeads * kDim;  // D
  static constexpr int kThreads = C::kWarps * 32;
  static constexpr int kValues = kDim / C::kSplit;  // of this CTA
  // Where there are fewer rows than the warps could hold, the first warps hold them, and the others rest meanwhile.
  static constexpr int kRowWarps = C::kWarps * 4 * C::kPassRows < kValues ? C::kWarps : kValues / (4 * C::kPassRows);
  static constexpr int kPassValues = kRowWarps * 4 * C::kPassRows;  // rows of one pass
  static constexpr int kPasses = kValues / kPassValues;
  static constexpr int kWarpTokens = (C::kTokens + C::kWarps - 1) / C::kWarps;  // tokens of one warp
  static constexpr int kGateWarps = C::kWarps < 8 ? C::kWarps : 8;
  static constexpr int kGateBlocks = 8 / kGateWarps;  // 16 rows of F_B each, of one warp
  static constexpr int kEntries = C::kConvLen - 2;    // tokens that a slot has records of
  // Of them, those that a step may fold: no step records more than 8.
  static constexpr int kFolded = !C::kRecords ? 0 : kEntries < 8 ? kEntries : 8;
  static constexpr bool kNotes = C::kRecords && C::kTokens > 1;  // records its tokens

  // Eight lanes share a row of the state. In verify, where vectors of many tokens are loaded, those of the same keys
  // lie side by side: four lanes that load the same 16 bytes take half the wavefronts that they take eight lanes apart.
  static constexpr bool kVerify = C::kTokens > 1;
  static constexpr int kLaneStride = kVerify ? 4 : 1;  // between the lanes of a row

  // Shared memory, bytes. The state first, each pass in kParts parts, of which a warp has kPartRows rows each: in
  // verify four, with 32 bytes behind each, so that lanes that load two pieces of 16 bytes of four rows meet no bank
  // twice.
  static constexpr int kParts = kVerify ? 4 : 1;
  static constexpr int kPartValues = kPassValues / kParts;
  static constexpr int kPartRows = kPartValues / kRowWarps;
  static constexpr int kPartPitch = kPartValues * kDim * 4 + (kVerify ? 32 : 0);
  static constexpr int kWeights = kPasses * kParts * kPartPitch;  // conv taps [4][128] of Q and of K, [4][kValues] of
                                                                  // V, norm weight [kValues]
  static constexpr int kWeightBytes = (4 * (2 * kDim + kValues) + kValues) * 4;
  static constexpr int kVectors = kWeights + kWeightBytes;  // k, q, decay of each token
  static constexpr int kV = kVectors + C::kTokens * 3 * kDim * 4;
  static constexpr int kO = kV + C::kTokens * kValues * 4;  // before o, u of each folded token
  static constexpr int kRecalled = kO + (kFolded > C::kTokens ? kFolded : C::kTokens) * kValues * 4;  // k and decay
  static constexpr int kScalars = kRecalled + kFolded * 2 * kDim * 4;  // beta and k . q of each token
  static constexpr int kSums = kScalars + C::kTokens * 8;              // of squares: [split][tokens]
  static constexpr int kBarriers = (kSums + C::kSplit * C::kTokens * 4 + 7) / 8 * 8;
  static constexpr int kCount = kBarriers + (kPasses + 2) * 8;  // of the head's records
  static constexpr int kSmemBytes = kCount + C::kRecords * 8;
  // k and g of each token as BF16, for its record: where the taps were.
  static constexpr int kNoted = kWeights;
  static_assert(!kNotes || C::kTokens * 2 * kDim * 2 <= 4 * (2 * kDim + kValues) * 4);

  static_assert(C::kTokens >= 1 && C::kTokens <= 8 && C::kHeads >= 1 && C::kHeads <= 128);
  static_assert(kRowWarps >= 4 && kRowWarps <= C::kWarps && kPasses * kPassValues == kValues);
  static_assert(C::kConvLen >= 3 && (C::kTokens == 1 || C::kConvLen >= 2 + C::kTokens));
};

// ---- The request: which slots, how many tokens, or dead

struct Request {
  int window_slots;  // slots[n][lane]
  int line;          // slots[n][0]
  int source;        // slots[n][accepted - 1]
  int accepted;
  int length;
  bool readable;  // line, source and accepted are good
  bool live;      // and so is length, which is not 0
};
enum Counter { kBadAccepted, kBadSlot, kBadLength, kStaleRecords };

__device__ inline bool is_live(const Params& p, int slot) { return slot >= p.first_live_slot && slot < p.num_slots; }

// Every lane of a warp is here. The loads come first, what depends on them later: other loads go between. So one lane
// loads what all are to know: a number that every lane loads goes to a uniform register, and the warp waits for it
// there.
__device__ inline void load_slots(Request& r, const Params& p, i64 n, int lane) {
  r.window_slots = lane < p.window ? p.slots[n * p.slots_stride + lane] : -1;
  r.accepted = p.accepted != nullptr && lane == 0 ? p.accepted[n] : 1;
}
template <class C>
__device__ inline void resolve_slots(Request& r, const Params& p, i64 n) {
  r.line = __shfl_sync(~0u, r.window_slots, 0);
  r.accepted = __shfl_sync(~0u, r.accepted, 0);
  if constexpr (C::kRecords) {
    r.source = r.line;
    r.readable = r.accepted >= 1 && r.accepted <= Layout<C>::kEntries && is_live(p, r.line);
    return;
  }
  const bool in_window = r.accepted >= 1 && r.accepted <= p.window;
  r.source = __shfl_sync(~0u, r.window_slots, in_window ? (r.accepted - 1) & 31 : 0);
  if (in_window && r.accepted > 32) r.source = p.slots[n * p.slots_stride + r.accepted - 1];
  r.readable = in_window && is_live(p, r.line) && is_live(p, r.source);
}

// The first check that fails decides (kda 9.3); `counts` in one thread of the request.
template <class C>
__device__ inline int load_length(const Params& p, i64 n) {
  return p.lengths != nullptr ? p.lengths[n] : C::kTokens;
}
template <class C>
__device__ inline void judge_length(Request& r, const Params& p, i64 n, int length, bool counts) {
  r.length = length;
  const bool good_length = r.length >= 0 && r.length <= C::kTokens;
  r.live = r.readable && good_length && r.length > 0;
  if (!counts || p.counters == nullptr) return;
  int bad = -1;
  if (r.line < p.first_live_slot) bad = -1;
  else if (r.line >= p.num_slots) bad = kBadSlot;
  else if (!good_length) bad = kBadLength;
  else if (r.length == 0) bad = -1;
  else if (r.accepted < 1 || r.accepted > (C::kRecords ? Layout<C>::kEntries : p.window)) bad = kBadAccepted;
  else if (r.source >= p.num_slots) bad = kBadSlot;
  else if (r.live && C::kTokens > 1 && !C::kRecords) {
    for (int t = 1; t < r.length; ++t)
      if (p.slots[n * p.slots_stride + t] >= p.num_slots) bad = kBadSlot;
  }
  if (bad >= 0) atomicAdd(p.counters + bad, 1u);
}

// ---- Convolution, SiLU, norm: one warp per token, four neighbouring channels of a third per lane

// Four BF16 as they lie in memory.
__device__ inline float4 widen(uint2 raw) {
  return {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
          __uint_as_float(raw.y & 0xffff0000u)};
}
__device__ inline uint2 narrow(float4 v) { return {pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)}; }
__device__ inline uint2 load_four(const u16* from) { return *reinterpret_cast<const uint2*>(from); }
__device__ inline void store_four(u16* to, uint2 raw) { *reinterpret_cast<uint2*>(to) = raw; }

// Position `position` of four channels in a line; of a position further on, the taps.
template <class C, class T>
__device__ inline T* tap_address(T* line, int channel, int position) {
  if constexpr (C::kDimFirst) return line + i64(channel) * C::kConvLen + position;
  return line + i64(position) * (3 * Layout<C>::kChannels) + channel;
}
template <class C>
__device__ inline uint2 load_tap(const u16* at, int further) {
  if constexpr (!C::kDimFirst) return load_four(at + further * (3 * Layout<C>::kChannels));
  at += further;
  return {at[0] | u32(at[C::kConvLen]) << 16, at[2 * C::kConvLen] | u32(at[3 * C::kConvLen]) << 16};
}
template <class C>
__device__ inline void store_tap(u16* at, int further, uint2 raw) {
  if constexpr (!C::kDimFirst) return store_four(at + further * (3 * Layout<C>::kChannels), raw);
  at += further;
  at[0] = u16(raw.x);
  at[C::kConvLen] = u16(raw.x >> 16);
  at[2 * C::kConvLen] = u16(raw.y);
  at[3 * C::kConvLen] = u16(raw.y >> 16);
}

// exp to within 2^-22 + 1.25 |x| 2^-24 of it, and 1 / (1 + exp(-x)) and x / (1 + exp(-x)) by it (kda 4.4): a fifth of
// the instructions of expf and a division. Both are 0 from x = -87.34 down, where 1 + exp(-x) is past 2^126.
__device__ inline float exp_approx(float x) { return exp2_approx(x * 1.44269504f); }
__device__ inline float sigmoid(float x) { return reciprocal(1.0f + exp_approx(-x)); }
__device__ inline float silu(float x) { return x * sigmoid(x); }

__device__ inline float4 multiply_add(float4 a, float4 b, float4 c) {
  return {a.x * b.x + c.x, a.y * b.y + c.y, a.z * b.z + c.z, a.w * b.w + c.w};
}
// These two leave the compiler no choice of what to fuse, wherever they stand: a fold must give the bits of the step
// that was recorded.
__device__ inline float4 multiplied(float4 a, float4 b) {
  return {__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w)};
}
__device__ inline float squares(float4 a) {
  return __fmaf_rn(a.w, a.w, __fmaf_rn(a.z, a.z, __fmaf_rn(a.x, a.x, __fmul_rn(a.y, a.y))));
}
// sum + a . b, each product fused.
__device__ inline float dot_onto(float sum, float4 a, float4 b) {
  return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmaf_rn(a.x, b.x, sum))));
}
__device__ inline float4 scaled(float4 a, float s) { return {a.x * s, a.y * s, a.z * s, a.w * s}; }
__device__ inline float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ inline float warp_sum(float v) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  return v;
}

// What token t of four channels sees: positions t .. t + 3 of the sequence (h0, h1, h2, x_0, x_1, ..).
template <class C>
struct Window {
  uint2 raw[4];

  __device__ void load_inputs(const u16* rows, int t, int channel) {
    const u16* at = rows + i64(t) * C::kRowStride + channel;  // one address, and offsets that the compiler knows
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (t + i >= 3) raw[i] = load_four(at + (i - 3) * C::kRowStride);
  }
  __device__ void load_history(const u16* line, int accepted, int t, int channel) {
    const u16* at = tap_address<C>(line, channel, accepted - 1 + t);
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (t + i < 3) raw[i] = load_tap<C>(at, i);
  }
  // y, rounded. `taps`: this lane's, `pitch` floats apart.
  __device__ float4 convolve(const Params& p, int channel, const float* taps, int pitch) const {
    float4 sum = {0, 0, 0, 0};
    if constexpr (C::kBias) sum = *reinterpret_cast<const float4*>(p.owned + 12 * Layout<C>::kChannels + channel);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sum = multiply_add(*reinterpret_cast<const float4*>(taps + i * pitch), widen(raw[i]), sum);
    const float4 y = {silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w)};
    return widen(narrow(y));
  }
};

// The line moves on by the accepted tokens: c'[0] = c[a], c'[1] = c[a+1], c'[2+t] = x_t. A lane loads all that its four
// channels need before it stores any of it.
template <class C>
struct Shift {
  uint2 kept[2];
  uint2 inputs[C::kTokens];

  __device__ void load(const u16* line, const u16* rows, const Request& r, int channel) {
    const u16* taps = tap_address<C>(line, channel, r.accepted);
#pragma unroll
    for (int i = 0; i < 2; ++i) kept[i] = load_tap<C>(taps, i);
#pragma unroll
    for (int t = 0; t < C::kTokens; ++t)
      if (t < r.length) inputs[t] = load_four(rows + channel + i64(t) * C::kRowStride);
  }
  __device__ void store(u16* line, const Request& r, int channel) const {
    u16* to = tap_address<C>(line, channel, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) store_tap<C>(to, i, kept[i]);
#pragma unroll
    for (int t = 0; t < C::kTokens; ++t)
      if (t < r.length) store_tap<C>(to, 2 + t, inputs[t]);
  }
};

// ---- Gate: g = F_B f on the tensor cores, 16 rows of F_B by all tokens per warp and block
//
// A lane holds 16-byte pieces of its rows where mma.sync names pairs: both operands follow the same order of K, so the
// sum is the same, and F_B goes from memory to registers once.

template <class C>
__device__ inline float decay_of(const Params& p, float a, float s) {
  if constexpr (C::kLowerBound) return exp_approx(p.lower_bound * sigmoid(a * s));
  return exp_approx(-a * (s > 20.0f ? s : log1pf(exp_approx(s))));
}

template <class C>
struct Gate {
  using L = Layout<C>;
  uint4 rows[L::kGateBlocks][2][4];  // of rows lane / 4 and lane / 4 + 8 of a block
  float dt_bias[L::kGateBlocks][2];
  uint4 f[4];                    // of token lane / 4
  u32 noted[L::kGateBlocks][2];  // g of two tokens, for their records

  __device__ static int row(int warp, int block, int half, int lane) {
    return (warp + block * L::kGateWarps) * 16 + half * 8 + lane / 4;
  }
  __device__ void load_weights(const Params& p, int head, int warp, int lane) {
#pragma unroll
    for (int b = 0; b < L::kGateBlocks; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = head * kDim + row(warp, b, half, lane);
        dt_bias[b][half] = p.dt_bias[j];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          rows[b][half][i] = *reinterpret_cast<const uint4*>(p.f_b + i64(j) * kDim + i * 32 + lane % 4 * 8);
      }
  }
  __device__ void load_inputs(const u16* token_rows, int lane) {
    const u16* from = token_rows + i64(lane / 4) * C::kRowStride + 4 * L::kChannels + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[i] = {0, 0, 0, 0};
      if (lane / 4 < C::kTokens) f[i] = *reinterpret_cast<const uint4*>(from + i * 32);
    }
  }
  // decay of every token to shared memory: vectors[t][2][j].
  __device__ void compute(const Params& p, i64 first_row, int head, float a, bool writes_rounded, float* vectors,
                          int warp, int lane) {
#pragma unroll
    for (int b = 0; b < L::kGateBlocks; ++b) {
      float g[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 low = rows[b][0][i], high = rows[b][1][i];
        mma_16x8x16(g, {low.x, high.x, low.y, high.y}, f[i].x, f[i].y);
        mma_16x8x16(g, {low.z, high.z, low.w, high.w}, f[i].z, f[i].w);
      }
      noted[b][0] = pack_bf16(g[0], g[1]), noted[b][1] = pack_bf16(g[2], g[3]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int t = lane % 4 * 2 + e % 2;
        if (t >= C::kTokens) continue;
        const int j = row(warp, b, e / 2, lane);
        const float rounded = round_bf16(g[e]);
        vectors[(t * 3 + 2) * kDim + j] = decay_of<C>(p, a, rounded + dt_bias[b][e / 2]);
        if (writes_rounded) p.rounded[((first_row + t) * 4 + 3) * L::kChannels + head * kDim + j] = to_bf16(g[e]);
      }
    }
  }
  // g of every token as BF16, [token][k, g][128].
  __device__ void note(u16* to, int warp, int lane) const {
#pragma unroll
    for (int b = 0; b < L::kGateBlocks; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int t = lane % 4 * 2 + e % 2;
        if (t < C::kTokens) to[(t * 2 + 1) * kDim + row(warp, b, e / 2, lane)] = u16(noted[b][e / 2] >> e % 2 * 16);
      }
  }
};

// ---- Recurrence: eight lanes to a row v; a lane holds keys 32 i + 4 row_lane .. + 3 of kPassRows rows side by side

// k, q and decay of one token, this lane's keys.
struct Vectors {
  float4 k[4], q[4], decay[4];
  __device__ void load(const float* vectors, int t, int row_lane) {
    const float4* from = reinterpret_cast<const float4*>(vectors + t * 3 * kDim) + row_lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      k[i] = from[i * 8];
      q[i] = from[kDim / 4 + i * 8];
      decay[i] = from[kDim / 2 + i * 8];
    }
  }
};

// Sums over the eight lanes of a row, kStride apart, of every row of a thread. With kSpread = kRows value g is of row
// g ^ own_row, each exchange sends the half that the other lane keeps, and v[0] becomes the sum of own_row; with
// kSpread = 1 every lane gets all sums.
template <int kSpread, int kStride, int kRows>
__device__ inline void sum_rows(float (&v)[kRows]) {
#pragma unroll
  for (int lanes = 4, kept = kRows; lanes > 0; lanes /= 2) {
    const bool halves = kept > kRows / kSpread;
    if (halves) kept /= 2;
#pragma unroll
    for (int g = 0; g < kept; ++g) v[g] += __shfl_xor_sync(~0u, v[halves ? g + kept : g], lanes * kStride);
  }
}

// One token on a thread's rows. `v`, u and S q, which lacks u (k . q), are those of the rows whose sums the lane has,
// as sum_rows() leaves them.
template <int kSpread, int kStride, int kRows>
__device__ inline void advance(float4 (&s)[kRows][4], const Vectors& token, float beta,
                               const float (&v)[kRows / kSpread], float (&u)[kRows / kSpread], float (&sq)[kRows]) {
  constexpr int kOwn = kRows / kSpread;
  float sk[kRows] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int g = 0; g < kRows; ++g) {
      s[g][i] = multiplied(s[g][i], token.decay[i]);
      sk[g] = dot_onto(sk[g], s[g][i], token.k[i]);
      sq[g] = dot_onto(sq[g], s[g][i], token.q[i]);
    }
  sum_rows<kSpread, kStride>(sk);
#pragma unroll
  for (int g = 0; g < kOwn; ++g) u[g] = beta * (v[g] - sk[g]);
  sum_rows<kSpread, kStride>(sq);
#pragma unroll
  for (int g = 0; g < kRows; ++g) {
    float of_row = u[g % kOwn];
    if (g >= kOwn) of_row = __shfl_xor_sync(~0u, of_row, g * (8 / kSpread) * kStride);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[g][i] = multiply_add({of_row, of_row, of_row, of_row}, token.k[i], s[g][i]);
  }
}

// ---- Records (kda 5.5, 8)

// One head's part of a slot's area.
template <class C>
struct Records {
  static constexpr i64 kBlock = i64(1024) * Layout<C>::kEntries;
  u8* block;
  int* count;

  __device__ Records(const Params& p, int slot, int head) {
    u8* area = p.records + slot * p.record_stride;
    block = area + head * kBlock;
    count = reinterpret_cast<int*>(area + C::kHeads * kBlock) + head;
  }
  __device__ float* u(int t) const { return reinterpret_cast<float*>(block) + t * kDim; }
  __device__ u16* k(int t) const { return reinterpret_cast<u16*>(block + 512 * Layout<C>::kEntries) + t * kDim; }
  __device__ u16* g(int t) const { return reinterpret_cast<u16*>(block + 768 * Layout<C>::kEntries) + t * kDim; }
};

// Where nothing is recorded nothing is accepted but the token that a fresh request begins with.
template <class C>
__device__ inline bool is_stale(int accepted, int count) {
  return count == 0 ? accepted != 1 : accepted > count || accepted > Layout<C>::kFolded;
}

// A recorded token: one warp, four neighbouring channels per lane.
__device__ inline float4 load_dt_bias(const Params& p, int head, int lane) {
  const float* from = p.dt_bias + head * kDim + lane * 4;  // aligned to 4 bytes
  return {from[0], from[1], from[2], from[3]};
}
template <class C>
struct Recall {
  uint2 k, g;
  float4 u;  // of the CTA's values

  __device__ void load(const Records<C>& records, int t, int rank, int lane, bool has_values) {
    k = load_four(records.k(t) + lane * 4);
    g = load_four(records.g(t) + lane * 4);
    if (has_values) u = *reinterpret_cast<const float4*>(records.u(t) + rank * Layout<C>::kValues + lane * 4);
  }
  // k to row[0], decay to row[1].
  __device__ void compute(const Params& p, float a, float4 dt_bias, float* row, int lane) const {
    const float4 y = widen(k), s = widen(g);
    const float k_scale = rsqrtf(warp_sum(squares(y)) + 1e-6f);
    float4* to = reinterpret_cast<float4*>(row) + lane;
    to[0] = scaled(y, k_scale);
    to[kDim / 4] = {decay_of<C>(p, a, s.x + dt_bias.x), decay_of<C>(p, a, s.y + dt_bias.y),
                    decay_of<C>(p, a, s.z + dt_bias.z), decay_of<C>(p, a, s.w + dt_bias.w)};
  }
};

// One recorded token into rows of the state; u is that of each value of the pass, from the thread's first on.
template <int kRows>
__device__ inline void fold_token(float4 (&s)[kRows][4], const float* row, const float (&u)[kRows], int row_lane) {
  const float4* from = reinterpret_cast<const float4*>(row) + row_lane;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 k = from[i * 8], decay = from[kDim / 4 + i * 8];
#pragma unroll
    for (int g = 0; g < kRows; ++g) s[g][i] = multiply_add({u[g], u[g], u[g], u[g]}, k, multiplied(s[g][i], decay));
  }
}

// ---- Prologue: what the copy unit brings. One elected lane.

// Conv and norm weights of this CTA's channels: before the dependency.
template <class C>
__device__ inline void load_weights(const Params& p, SmemAddress to, int head, int first_value, SmemAddress barrier) {
  using L = Layout<C>;
  barrier_arrive_expect(barrier, L::kWeightBytes);
  for (int third = 0; third < 3; ++third) {
    const int first = third < 2 ? head * kDim : first_value;
    const int bytes = (third < 2 ? kDim : L::kValues) * 4;
    for (int i = 0; i < 4; ++i, to += bytes)
      bulk_load(to, p.owned + (third * 4 + i) * L::kChannels + first, bytes, barrier);
  }
  bulk_load(to, p.owned + 15 * L::kChannels + first_value % kDim, L::kValues * 4, barrier);
}
// The state of this CTA's values, a pass at a time.
template <class C>
__device__ inline void load_state(const Params& p, SmemAddress to, int source, int first_value, SmemAddress barriers) {
  using L = Layout<C>;
  constexpr int kBytes = L::kPartValues * kDim * 4;
  constexpr int kUnrolled = L::kPasses > 2 ? 1 : L::kPasses;  // more addresses than registers hold
  const float* from = p.state + source * p.state_stride + i64(first_value) * kDim;
#pragma unroll kUnrolled
  for (int pass = 0; pass < L::kPasses; ++pass) {
    barrier_arrive_expect(barriers + pass * 8, L::kParts * kBytes);
#pragma unroll
    for (int part = pass * L::kParts; part < (pass + 1) * L::kParts; ++part)
      bulk_load(to + part * L::kPartPitch, from + part * L::kPartValues * kDim, kBytes, barriers + pass * 8);
  }
}
__device__ inline void wait_phase(SmemAddress barrier, u32 parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}
__device__ inline void wait_arrival(SmemAddress barrier) { wait_phase(barrier, 0); }

// `smem`: C::kSmemBytes of the CTA, aligned to 128.
template <class C>
__device__ inline void kda_step(const Params& p, u8* smem) {
  using L = Layout<C>;
  static_assert(L::kSmemBytes == C::kSmemBytes, "host and device disagree about shared memory");
  const SmemAddress state_smem = smem_address(smem);
  const float* taps = reinterpret_cast<const float*>(smem + L::kWeights);
  const float* norm_weight = taps + 4 * (2 * kDim + L::kValues);
  float* vectors = reinterpret_cast<float*>(smem + L::kVectors);    // [tokens][k, q, decay][128]
  float* v_smem = reinterpret_cast<float*>(smem + L::kV);           // [tokens][values]
  float* o_smem = reinterpret_cast<float*>(smem + L::kO);           // [tokens][values]
  float2* scalars = reinterpret_cast<float2*>(smem + L::kScalars);  // beta, k . q
  float* sums = reinterpret_cast<float*>(smem + L::kSums);          // [split][tokens]
  const SmemAddress state_barriers = state_smem + L::kBarriers;     // one per pass
  const SmemAddress weights_barrier = state_barriers + L::kPasses * 8;
  const SmemAddress sums_barrier = weights_barrier + 8;
  int* count_smem = reinterpret_cast<int*>(smem + L::kCount);

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int rank = blockIdx.x % C::kSplit;
  const int unit = blockIdx.x / C::kSplit;
  const int head = unit % C::kHeads;
  const i64 n = unit / C::kHeads;
  const int first_value = head * kDim + rank * L::kValues;  // of the D
  const u16* rows = p.projected + n * C::kTokens * C::kRowStride;
  const bool has_values = lane * 4 < L::kValues;  // four per lane
  constexpr int kLoaderWarp = L::kGateWarps / 2;
  const int v_warp = C::kWarps - 1 - warp;  // tokens are given to warps in rising order for q and k, falling for v

  if (warp == kLoaderWarp && elect_one()) {
    for (int i = 0; i < L::kPasses + 2; ++i) barrier_init(state_barriers + i * 8, 1);
    barrier_init_fence();
  }
  __syncthreads();  // the barriers are initialised
  if (warp == kLoaderWarp && elect_one())
    load_weights<C>(p, state_smem + L::kWeights, head, first_value, weights_barrier);
  __syncwarp();
  if constexpr (C::kSplit > 1) cluster_arrive();  // this CTA runs, and its barriers are initialised
  const bool gates = warp < L::kGateWarps;
  float a = p.a_log[head];  // A_log until there is time for exp
  Gate<C> gate;
  if (gates) gate.load_weights(p, head, warp, lane);
  constexpr int kRecallTokens = C::kRecords ? (L::kFolded + C::kWarps - 1) / C::kWarps : 1;  // of one warp
  Recall<C> recall[kRecallTokens];
  float4 dt_bias;  // of the recalled tokens
  if constexpr (C::kRecords)
    if (v_warp < L::kFolded) dt_bias = load_dt_bias(p, head, lane);

  // ---- Slots; the state on its way to shared memory; the history of the warp's first tokens

  // A warp has tokens of q and k, of v, or of both.
  constexpr bool kBoth = 2 * C::kTokens > C::kWarps;
  // The state would hold up what the convolution reads; behind that it comes while the warps compute. With few tokens,
  // or a state per token to store, this gains nothing, and early caches are there to come early.
  constexpr bool kLateState = L::kNotes && C::kTokens > 6 && !C::kEarlyCaches;
  const bool has_qk = warp < C::kTokens;
  const bool has_v = v_warp < C::kTokens && has_values;
  const int q_channel = head * kDim + lane * 4;
  const int k_channel = q_channel + L::kChannels;
  const int v_channel = 2 * L::kChannels + first_value + lane * 4;
  Window<C> q_window, k_window, own_v_window;
  Window<C>& v_window = kBoth ? own_v_window : q_window;
  Request r = {};
  u16* line = nullptr;
  int count = 0;   // of one thread: tokens that are recorded
  int tokens = 0;  // that may be folded
  const auto read_caches = [&] {
    resolve_slots<C>(r, p, n);
    if (!r.readable) return;
    line = p.conv + r.line * p.conv_stride;
    if constexpr (C::kRecords) {
      // Not after the count, which would be a trip to memory more: what is not folded is not used.
      const Records<C> records(p, r.line, head);
      if (threadIdx.x == 0) count = *records.count;
      tokens = r.accepted <= L::kFolded ? r.accepted : 0;
#pragma unroll
      for (int i = 0; i < kRecallTokens; ++i)
        if (const int t = v_warp + i * C::kWarps; t < tokens) recall[i].load(records, t, rank, lane, has_values);
    }
    if (!kLateState && warp == kLoaderWarp && elect_one())
      load_state<C>(p, state_smem, r.source, first_value, state_barriers);
    __syncwarp();
    if (has_qk) {
      q_window.load_history(line, r.accepted, warp, q_channel);
      k_window.load_history(line, r.accepted, warp, k_channel);
    }
    if (has_v) v_window.load_history(line, r.accepted, v_warp, v_channel);
  };
  if constexpr (C::kEarlyCaches) {
    load_slots(r, p, n, lane);
    read_caches();
  }
  if constexpr (C::kFault != Fault::kNoDependencyWait) pdl_wait();
  if constexpr (!C::kEarlyCaches) load_slots(r, p, n, lane);
  // The kernel before is done, and one after this may wait beside it. Let in at the beginning, those behind it would
  // come too, and crowd the SMs.
  pdl_launch();
  // The projection, whatever the request turns out to be.
  if (gates) gate.load_inputs(rows, lane);
  const u16* betas = rows + 4 * L::kChannels + kDim + head;
  u16 beta = 0;
  if (has_qk) {
    beta = betas[i64(warp) * C::kRowStride];
    q_window.load_inputs(rows, warp, q_channel);
    k_window.load_inputs(rows, warp, k_channel);
  }
  if (has_v) v_window.load_inputs(rows, v_warp, v_channel);
  // Not where they are loaded: the warp would wait before it asks for anything else.
  a = expf(a);
  if constexpr (!C::kEarlyCaches) read_caches();
  judge_length<C>(r, p, n, load_length<C>(p, n), head == 0 && rank == 0 && threadIdx.x == 0);

  // ---- Zeros for tokens that are not there, and for dead requests

  const auto write_zeros = [&](int live_tokens) {
    for (int i = threadIdx.x; i < (C::kTokens - live_tokens) * (L::kValues / 4); i += L::kThreads) {
      const int t = live_tokens + i / (L::kValues / 4);
      store_four(p.out + (n * C::kTokens + t) * p.out_stride + first_value + i % (L::kValues / 4) * 4, {0, 0});
    }
  };
  const auto leave = [&] {
    // Copies under way must land before the CTA ends.
    wait_arrival(weights_barrier);
    if (r.readable) {
      if (!kLateState || r.live)
        for (int i = 0; i < L::kPasses; ++i) wait_arrival(state_barriers + i * 8);
    }
    __syncwarp();
    if constexpr (C::kSplit > 1) cluster_wait();
  };
  write_zeros(r.live ? r.length : 0);
  if (!r.live) return leave();

  // ---- Gate and convolution of all tokens

  const bool writes_rounded = p.rounded != nullptr;
  uint2 z[L::kWarpTokens];
#pragma unroll
  for (int i = 0; i < L::kWarpTokens; ++i) {
    const int t = warp + i * C::kWarps;
    if (t < r.length && has_values)
      z[i] = load_four(rows + i64(t) * C::kRowStride + 3 * L::kChannels + first_value + lane * 4);
  }
  if (gates) gate.compute(p, n * C::kTokens, head, a, writes_rounded && rank == 0, vectors, warp, lane);
  if (kLateState && warp == kLoaderWarp && elect_one())
    load_state<C>(p, state_smem, r.source, first_value, state_barriers);
  wait_arrival(weights_barrier);
  uint2 noted_k[2];  // of at most two tokens, for their records
#pragma unroll 1
  for (int i = 0; i < L::kWarpTokens; ++i) {
    const int t = warp + i * C::kWarps;
    if (t >= r.length) break;
    if (i > 0) {
      beta = betas[i64(t) * C::kRowStride];
      q_window.load_inputs(rows, t, q_channel), q_window.load_history(line, r.accepted, t, q_channel);
      k_window.load_inputs(rows, t, k_channel), k_window.load_history(line, r.accepted, t, k_channel);
    }
    const float4 q = q_window.convolve(p, q_channel, taps + lane * 4, kDim);
    const float4 k = k_window.convolve(p, k_channel, taps + 4 * kDim + lane * 4, kDim);
    const float qq = warp_sum(dot(q, q)), kk = warp_sum(squares(k)), qk = warp_sum(dot(q, k));
    const float q_scale = p.scale * rsqrtf(qq + 1e-6f), k_scale = rsqrtf(kk + 1e-6f);
    float4* to = reinterpret_cast<float4*>(vectors + t * 3 * kDim) + lane;
    to[0] = scaled(k, k_scale);
    to[kDim / 4] = scaled(q, q_scale);
    if constexpr (L::kNotes) {
      if (i == 0) noted_k[0] = narrow(k);
      else noted_k[1] = narrow(k);
    }
    if (lane == 0) scalars[t] = {sigmoid(__uint_as_float(u32(beta) << 16)), qk * k_scale * q_scale};
    if (writes_rounded && rank == 0) {
      u16* to_rounded = p.rounded + (n * C::kTokens + t) * 4 * L::kChannels + head * kDim + lane * 4;
      store_four(to_rounded, narrow(q));
      store_four(to_rounded + L::kChannels, narrow(k));
    }
  }
  if (has_v) {
#pragma unroll 1
    for (int i = 0; i < L::kWarpTokens; ++i) {
      const int t = v_warp + i * C::kWarps;
      if (t >= r.length) break;
      if (i > 0) v_window.load_inputs(rows, t, v_channel), v_window.load_history(line, r.accepted, t, v_channel);
      const float4 v = v_window.convolve(p, v_channel, taps + 8 * kDim + lane * 4, L::kValues);
      *reinterpret_cast<float4*>(v_smem + t * L::kValues + lane * 4) = v;
      if (writes_rounded)
        store_four(p.rounded + ((n * C::kTokens + t) * 4 + 2) * L::kChannels + first_value + lane * 4, narrow(v));
    }
  }
  float* recalled = reinterpret_cast<float*>(smem + L::kRecalled);  // [folded][k, decay][128]
  if constexpr (C::kRecords) {
#pragma unroll
    for (int i = 0; i < kRecallTokens; ++i) {
      const int t = v_warp + i * C::kWarps;
      if (t >= tokens) break;
      recall[i].compute(p, a, dt_bias, recalled + t * 2 * kDim, lane);
      if (has_values) *reinterpret_cast<float4*>(o_smem + t * L::kValues + lane * 4) = recall[i].u;
    }
  }
  if constexpr (C::kRecords)
    if (threadIdx.x == 0) *count_smem = count;
  // Every token's vectors are there, and every warp of this CTA has read the line, and the taps.
  if constexpr (C::kFault != Fault::kNoTokenBarrier) __syncthreads();
  int pending = 0;  // recorded tokens to fold
  if constexpr (C::kRecords) {
    count = *count_smem;
    if (is_stale<C>(r.accepted, count)) {
      if (p.counters != nullptr && head == 0 && rank == 0 && threadIdx.x == 0)
        atomicAdd(p.counters + kStaleRecords, 1u);
      write_zeros(0);
      if constexpr (C::kSplit > 1) {
        if (threadIdx.x == 0) barrier_arrive_expect(sums_barrier, C::kSplit * r.length * 4);
        __syncwarp();
      }
      leave();
      if constexpr (C::kSplit > 1) {
        // Where another request of this launch has the slot too, which it must not, a peer may have found another
        // count: it must not wait for ever.
        for (int t = warp; t < r.length; t += C::kWarps)
          if (lane < C::kSplit)
            store_cluster_float(smem_address(sums + rank * C::kTokens + t), 0.0f, sums_barrier, lane);
        wait_arrival(sums_barrier);
      }
      return;
    }
    pending = count > 0 ? r.accepted : 0;
  }
  u16* noted = reinterpret_cast<u16*>(smem + L::kNoted);  // [tokens][k, g][128]
  if constexpr (L::kNotes) {
    if (gates) gate.note(noted, warp, lane);
#pragma unroll
    for (int i = 0; i < L::kWarpTokens; ++i)
      if (const int t = warp + i * C::kWarps; t < r.length) store_four(noted + t * 2 * kDim + lane * 4, noted_k[i]);
  }

  // ---- Delta rule

  const int row_lane = L::kVerify ? lane / 4 : lane % 8;
  const int lane_row = L::kVerify ? lane % 4 : lane / 8;
  // Register g of a thread has row g ^ own_row of its rows: see sum_rows. Not in decode, where the lanes of a row store
  // it together.
  constexpr int kSpread = L::kVerify ? C::kPassRows : 1;
  constexpr int kOwn = C::kPassRows / kSpread;  // rows whose sums a lane has
  const int own_row = row_lane * kSpread / 8;
  const bool owns = row_lane % (8 / kSpread) == 0;  // of the lanes that have the same sums
  Vectors token;
  constexpr bool kLoadedOnce = !L::kVerify && L::kPasses > 1;
  if constexpr (kLoadedOnce) token.load(vectors, 0, row_lane);
#pragma unroll
  for (int pass = 0; pass < L::kPasses; ++pass) {
    if (L::kRowWarps < C::kWarps && warp >= L::kRowWarps) break;
    wait_arrival(state_barriers + pass * 8);
    const int first_part = pass * L::kParts, row_of_part = warp * L::kPartRows;  // of this warp
    const int part = L::kVerify ? first_part + lane_row : first_part;
    const int row = row_of_part + (L::kVerify ? 0 : lane_row * C::kPassRows);
    const int first = part * L::kPartValues + row;
    const SmemAddress rows_smem = state_smem + part * L::kPartPitch + (row * kDim + row_lane * 4) * 4;
    const auto offset = [&](int g, int i) { return (g ^ own_row) * kDim + i * 32; };  // of registers, in floats
    float4 s[C::kPassRows][4];
#pragma unroll
    for (int g = 0; g < C::kPassRows; ++g)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[g][i] = load_shared_float4(rows_smem + offset(g, i) * 4);
    const auto store_state = [&](int slot, bool again) {
      if constexpr (!L::kVerify) {
        float* to = p.state + slot * p.state_stride + i64(first_value + first) * kDim + row_lane * 4;
#pragma unroll
        for (int g = 0; g < C::kPassRows; ++g)
#pragma unroll
          for (int i = 0; i < 4; ++i) store_streaming(to + offset(g, i), s[g][i]);
        return;
      }
      // By way of shared memory: the copy unit stores while the warp goes on.
      if (elect_one()) {  // until the state before has left these rows, or lies where this one goes
        if (again) bulk_wait();
        else bulk_wait_read();
      }
      __syncwarp();
#pragma unroll
      for (int g = 0; g < C::kPassRows; ++g)
#pragma unroll
        for (int i = 0; i < 4; ++i) store_shared_float4(rows_smem + offset(g, i) * 4, s[g][i]);
      fence_proxy_async();
      __syncwarp();
      if (elect_one()) {
        float* to = p.state + slot * p.state_stride + i64(first_value + row_of_part) * kDim;
#pragma unroll
        for (int i = first_part; i < first_part + L::kParts; ++i)
          bulk_store(to + i * L::kPartValues * kDim, state_smem + i * L::kPartPitch + row_of_part * kDim * 4,
                     L::kPartRows * kDim * 4);
        bulk_commit();
      }
      __syncwarp();
    };
    if constexpr (C::kRecords) {
#pragma unroll 1
      for (int t = 0; t < pending; ++t) {
        float u[C::kPassRows];
#pragma unroll
        for (int g = 0; g < C::kPassRows; ++g) u[g] = o_smem[t * L::kValues + first + (g ^ own_row)];
        fold_token(s, recalled + t * 2 * kDim, u, row_lane);
      }
      if (L::kVerify && pending > 0) store_state(r.line, false);
      __syncwarp();  // the rows' u are read: o takes their place
    }
#pragma unroll 1
    for (int t = 0; t < r.length; ++t) {
      if constexpr (!kLoadedOnce) token.load(vectors, t, row_lane);
      const float2 scalar = scalars[t];
      float* own_v = v_smem + t * L::kValues + first + own_row;
      float v[kOwn];
#pragma unroll
      for (int g = 0; g < kOwn; ++g) v[g] = own_v[g];
      float own_u[kOwn], sq[C::kPassRows] = {};
      advance<kSpread, L::kLaneStride>(s, token, scalar.x, v, own_u, sq);
#pragma unroll
      for (int g = 0; g < kOwn; ++g)
        if (owns) o_smem[t * L::kValues + first + own_row + g] = round_bf16(__fmaf_rn(own_u[g], scalar.y, sq[g]));
      if constexpr (L::kNotes) {
        __syncwarp();  // the rows' lanes have read v
        if (owns) *own_v = own_u[0];
      } else {
        const int slot = __shfl_sync(~0u, r.window_slots, t);
        // The copy unit stores in no order: the second of two states for one slot waits for the first.
        const bool again = L::kVerify && __any_sync(~0u, lane < t && r.window_slots == slot);
        if (!L::kVerify || is_live(p, slot)) store_state(slot, again);
      }
    }
  }

  // ---- Conv line. V's channels are this CTA's alone; those of Q and K are read by all CTAs of the cluster, and the
  // first one moves them on when all have read.

  const int third = warp - (C::kWarps - 3);
  const bool shifts = third == 2 ? has_values : third >= 0 && rank == 0;
  const int shift_channel = third * L::kChannels + (third == 2 ? first_value : head * kDim) + lane * 4;
  Shift<C> shift;
  if (shifts) shift.load(line, rows, r, shift_channel);
  __syncthreads();  // o of every value of this CTA is there

  // ---- Gated norm

  float4 o[L::kWarpTokens];
  if constexpr (C::kSplit > 1) {
    if (threadIdx.x == 0) barrier_arrive_expect(sums_barrier, C::kSplit * r.length * 4);
    __syncwarp();
    cluster_wait();  // the peers run, with their barriers
  }
#pragma unroll
  for (int i = 0; i < L::kWarpTokens; ++i) {
    const int t = warp + i * C::kWarps;
    if (t >= r.length) break;
    o[i] = {0, 0, 0, 0};
    if (has_values) o[i] = *reinterpret_cast<const float4*>(o_smem + t * L::kValues + lane * 4);
    const float sum = warp_sum(dot(o[i], o[i]));
    if constexpr (C::kSplit == 1) {
      if (lane == 0) sums[t] = sum;
    } else {
      if (lane < C::kSplit) store_cluster_float(smem_address(sums + rank * C::kTokens + t), sum, sums_barrier, lane);
    }
  }
  if constexpr (C::kSplit == 1) {
    __syncwarp();
  } else {
    // Sums came from every CTA of the cluster: so each has read the line. A barrier of the cluster would say the same,
    // but its release would wait for the stores before it.
    wait_arrival(sums_barrier);
  }
  if (shifts) shift.store(line, r, shift_channel);
  if constexpr (C::kRecords) {
    const Records<C> records(p, r.line, head);
    if (rank == 0 && threadIdx.x == 0 && (L::kNotes || pending > 0)) *records.count = L::kNotes ? r.length : 0;
    if constexpr (L::kNotes) {
#pragma unroll
      for (int i = 0; i < L::kWarpTokens; ++i) {
        const int t = warp + i * C::kWarps;
        if (t >= r.length) break;
        if (has_values)
          store_streaming(records.u(t) + rank * L::kValues + lane * 4,
                          *reinterpret_cast<const float4*>(v_smem + t * L::kValues + lane * 4));
        if (t % C::kSplit != rank) continue;
        store_four(records.k(t) + lane * 4, load_four(noted + t * 2 * kDim + lane * 4));
        store_four(records.g(t) + lane * 4, load_four(noted + (t * 2 + 1) * kDim + lane * 4));
      }
    }
  }
  if (L::kVerify && elect_one()) bulk_wait_read();  // shared memory stays until the states have left it
  if (!has_values) return;
#pragma unroll
  for (int i = 0; i < L::kWarpTokens; ++i) {
    const int t = warp + i * C::kWarps;
    if (t >= r.length) break;
    const float4 norm = *reinterpret_cast<const float4*>(norm_weight + lane * 4);
    float total = 0;
#pragma unroll
    for (int c = 0; c < C::kSplit; ++c) total += sums[c * C::kTokens + t];
    const float scale = rsqrtf(total * (1.0f / kDim) + p.norm_eps);
    const float4 gate_z = widen(z[i]);
    store_four(p.out + (n * C::kTokens + t) * p.out_stride + first_value + lane * 4,
               narrow({o[i].x * scale * norm.x * sigmoid(gate_z.x), o[i].y * scale * norm.y * sigmoid(gate_z.y),
                       o[i].z * scale * norm.z * sigmoid(gate_z.z), o[i].w * scale * norm.w * sigmoid(gate_z.w)}));
  }
}

}  // namespace twostep::kda
