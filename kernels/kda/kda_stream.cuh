// The verify step of kda_step.cuh in state mode records, where there are many requests: CTAs that stay, one to an SM.
// Eight warps prepare a (request, head), called a unit here, while eight walk through the tokens of the one before.
//
//   preparers   slots, count; inputs, history, records to an inbox -> gate, convolution, recall -> stage
//               state to the stage; line, records k and g; of a unit that has been walked, norm, out, record u
//   walkers     stage -> folded state, o, u -> stage
//
// The operands, formulas and roundings are those of kda_step() with split 1, and the sums those of its four rows to a
// thread: its bits.
//
// Grid: at most one CTA per SM; CTA c has units [c U / grid, (c + 1) U / grid) of the U = heads x requests. The
// requests of a head lie side by side: its F_B and taps stay on chip. A dead request never reaches the walkers.
//
// Two stages and two inboxes, which units take in turn. What a stage waits for are mbarriers, see Stage; what inboxes
// wait for is one barrier of the preparers per unit. No decision that CTAs must share, so a slot that two requests
// have, which it must not, hangs nothing.
//
// PDL: as kda_step() without kEarlyCaches; the preparers alone touch what other kernels write.
#pragma once

#include "kda/kda_step.cuh"

namespace twostep::kda {

constexpr int kPreparers = 8, kWalkers = 8;  // warps, in this order

template <class C>
struct StreamLayout {
  static constexpr int kChannels = C::kHeads * kDim;
  static constexpr int kFolded = Layout<C>::kFolded;
  static constexpr int kParts = 4, kPartValues = kDim / kParts, kPartRows = kPartValues / kWalkers;
  static constexpr int kPartPitch = kPartValues * kDim * 4 + 32;  // see Layout
  static_assert(C::kSplit == 1 && C::kWarps == kPreparers + kWalkers && C::kPassRows == kPartRows && Layout<C>::kNotes);
  static_assert(C::kTokens <= kPreparers && kFolded <= kPreparers);

  // Of a stage, bytes; the state first.
  static constexpr int kVectors = kParts * kPartPitch;             // k, q, decay of each token
  static constexpr int kV = kVectors + C::kTokens * 3 * kDim * 4;  // then u
  static constexpr int kO = kV + C::kTokens * kDim * 4;            // before o, u of each folded token
  static constexpr int kRecalled = kO + (kFolded > C::kTokens ? kFolded : C::kTokens) * kDim * 4;  // k and decay
  static constexpr int kScalars = kRecalled + kFolded * 2 * kDim * 4;  // beta and k . q of each token
  static constexpr int kUnit = kScalars + C::kTokens * 8;
  static constexpr int kStageBytes = (kUnit + 32 + 127) / 128 * 128;

  // Of an inbox, bytes; f of each token first, see f_piece().
  static constexpr int kRows = C::kTokens * kDim * 2;  // BF16 [3 + tokens][q, k, v, z][128]: history, then inputs
  static constexpr int kRecords = kRows + (3 + C::kTokens) * 4 * kDim * 2;  // BF16 [folded][k, g][128]
  static constexpr int kInboxBytes = kRecords + kFolded * 2 * kDim * 2;

  // Of the CTA.
  static constexpr int kInboxes = 2 * kStageBytes;
  static constexpr int kTaps = kInboxes + 2 * kInboxBytes;  // [3][4][128]
  static constexpr int kNorm = kTaps + 12 * kDim * 4;
  static constexpr int kDtBias = kNorm + kDim * 4;
  static constexpr int kBarriers = kDtBias + kDim * 4;  // three per stage
  static constexpr int kFates = kBarriers + 6 * 8;      // of two units
  static constexpr int kSmemBytes = kFates + 2 * 16;
  static_assert(kSmemBytes == C::kSmemBytes, "host and device disagree about shared memory");
};

struct Unit {
  int n, head, line;
  int length;   // 0: dead; in a stage: there are no more
  int pending;  // recorded tokens to fold; until the count is known, accepted
};
// What one warp tells the other preparers of a unit.
struct Fate {
  int line, accepted, length, count;
};

// The stage of the i-th unit that is live, with its barriers. In this order each completes once per unit.
template <class C>
struct Stage {
  using L = StreamLayout<C>;
  static constexpr int kArrivals = C::kFault == Fault::kEveryLaneArrives ? 32 : 1;  // of a warp
  u8* base;
  SmemAddress full;    // all is there: by the preparers and the copy unit
  SmemAddress folded;  // the folded state lies where the one before was: by the walkers
  SmemAddress walked;  // so do o and u: by the walkers
  u32 parity;

  __device__ Stage(u8* smem, int i)
      : base(smem + i % 2 * L::kStageBytes),
        full(smem_address(smem) + L::kBarriers + i % 2 * 24),
        folded(full + 8),
        walked(full + 16),
        parity(i / 2 % 2) {}
  __device__ void init() const {
    barrier_init(full, kPreparers * kArrivals + 1);
    barrier_init(folded, kWalkers * kArrivals);
    barrier_init(walked, kWalkers * kArrivals);
  }
  // All lanes of a warp, for what all of them did before.
  static __device__ void arrive(SmemAddress barrier, int lane) {
    __syncwarp();
    if (kArrivals == 32 || lane == 0) barrier_arrive(barrier);
  }
  __device__ float* vectors() const { return reinterpret_cast<float*>(base + L::kVectors); }    // [t][k, q, decay][128]
  __device__ float* v() const { return reinterpret_cast<float*>(base + L::kV); }                // [t][128]
  __device__ float* o() const { return reinterpret_cast<float*>(base + L::kO); }                // [t][128]
  __device__ float* recalled() const { return reinterpret_cast<float*>(base + L::kRecalled); }  // [t][k, decay][128]
  __device__ float2* scalars() const { return reinterpret_cast<float2*>(base + L::kScalars); }
  __device__ Unit& unit() const { return *reinterpret_cast<Unit*>(base + L::kUnit); }
};

// f of a token in shared memory: 16 pieces of 16 bytes, those of odd tokens with their halves exchanged, so that eight
// lanes that read four pieces of two tokens meet no bank twice.
__device__ inline u8* f_piece(u8* f, int token, int piece) {
  return f + (token * 16 + (piece ^ (token & 1) << 2)) * 16;
}

// ---- Preparers: a token of each unit, a recorded one, and 16 rows of F_B per warp

template <class C>
struct Preparer {
  using L = StreamLayout<C>;
  static constexpr int kThreads = kPreparers * 32;

  const Params& p;
  u8* smem;
  const int warp, lane;

  // With few tokens the last warps have least to do. One of them asks for slots and counts, another moves states.
  __device__ bool leads() const { return warp == kPreparers - 2; }
  __device__ bool is_courier() const { return warp == kPreparers - 1; }
  __device__ int recorded_token() const { return (warp + kPreparers - C::kTokens) % kPreparers; }

  // The constants of a head, on their way.
  __device__ void load_head(int head, uint4 (&f_b)[2][4]) const {
    const int thread = warp * 32 + lane;
    const SmemAddress taps = smem_address(smem + L::kTaps);
    for (int i = thread; i < 12 * kDim / 4; i += kThreads)
      copy_async(taps + i * 16, p.owned + i / 32 * L::kChannels + head * kDim + i % 32 * 4, true);
    copy_async_commit();
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const i64 row = head * kDim + Gate<C>::row(warp, 0, half, lane);
        f_b[half][i] = *reinterpret_cast<const uint4*>(p.f_b + row * kDim + i * 32 + lane % 4 * 8);
      }
    if (thread < kDim) reinterpret_cast<float*>(smem + L::kDtBias)[thread] = p.dt_bias[head * kDim + thread];
  }

  // What a live unit needs of memory but for state and u, on its way; the count to one thread, beta to one lane.
  __device__ void load(const Unit& unit, u8* inbox, int& count, u16& beta) const {
    if (unit.length == 0) return;
    // A warp copies two vectors of 256 bytes at a time, and four, q to z, in two steps.
    const int half = lane / 16, piece = lane % 16;
    const int channel = half * L::kChannels + unit.head * kDim + piece * 8;
    const SmemAddress to_row = smem_address(inbox + L::kRows) + warp * 1024 + lane * 16;
    const Records<C> records(p, unit.line, unit.head);
    if (leads() && lane == 0) count = *records.count;
    if (const int t = recorded_token(); t < unit.pending && t < L::kFolded)
      copy_async(smem_address(inbox + L::kRecords) + t * 512 + lane * 16,
                 (half == 0 ? records.k(t) : records.g(t)) + piece * 8, true);
    const u16* row = p.projected + (i64(unit.n) * C::kTokens + warp) * C::kRowStride;
    if (warp < C::kTokens && half == 0)
      copy_async(smem_address(f_piece(inbox, warp, piece)), row + 4 * L::kChannels + piece * 8, true);
    if (warp < unit.length) {
      if (lane == 0) beta = row[4 * L::kChannels + kDim + unit.head];
#pragma unroll
      for (int i = 0; i < 2; ++i) copy_async(to_row + 3 * 1024 + i * 512, row + channel + 2 * i * L::kChannels, true);
    }
    if (warp >= 3) return;
    const u16* line = p.conv + unit.line * p.conv_stride;
    if constexpr (C::kDimFirst) {
#pragma unroll
      for (int i = 0; i < 3; ++i)
        store_four(
            reinterpret_cast<u16*>(inbox + L::kRows) + (i * 4 + warp) * kDim + lane * 4,
            load_tap<C>(tap_address<C>(line, warp * L::kChannels + unit.head * kDim + lane * 4, unit.pending - 1), i));
    } else {
      const u16* from = tap_address<C>(line, channel, unit.pending - 1 + warp);
      copy_async(to_row, from, true);
      if (half == 0) copy_async(to_row + 512, from + 2 * L::kChannels, true);
    }
  }

  // The state, and u of the recorded tokens, to a stage that is free. One thread.
  __device__ void load_state(const Unit& unit, const Stage<C>& stage) const {
    constexpr int kBytes = L::kPartValues * kDim * 4;
    const float* from = p.state + unit.line * p.state_stride + i64(unit.head) * kDim * kDim;
    bulk_wait_read();  // of what was there before
    barrier_arrive_expect(stage.full, L::kParts * kBytes + unit.pending * kDim * 4);
#pragma unroll
    for (int i = 0; i < L::kParts; ++i)
      bulk_load(smem_address(stage.base) + i * L::kPartPitch, from + i * L::kPartValues * kDim, kBytes, stage.full);
    if (unit.pending > 0)
      bulk_load(smem_address(stage.o()), Records<C>(p, unit.line, unit.head).u(0), unit.pending * kDim * 4, stage.full);
  }
  // The folded state to memory. The same thread.
  __device__ void store_state(const Stage<C>& stage) const {
    wait_phase(stage.folded, stage.parity);
    const Unit unit = stage.unit();
    if (unit.pending == 0) return;
    float* to = p.state + unit.line * p.state_stride + i64(unit.head) * kDim * kDim;
#pragma unroll
    for (int i = 0; i < L::kParts; ++i)
      bulk_store(to + i * L::kPartValues * kDim, smem_address(stage.base) + i * L::kPartPitch,
                 L::kPartValues * kDim * 4);
    bulk_commit();
  }

  // g of all tokens: decay to the stage, g to the records.
  __device__ void gate(const Unit& unit, const uint4 (&f_b)[2][4], float a, u8* inbox, const Stage<C>& stage) const {
    float g[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 low = f_b[0][i], high = f_b[1][i];
      // Of tokens that are not there, anything: their g is not used.
      const uint4 f = *reinterpret_cast<const uint4*>(f_piece(inbox, lane / 4, i * 4 + lane % 4));
      mma_16x8x16(g, {low.x, high.x, low.y, high.y}, f.x, f.y);
      mma_16x8x16(g, {low.z, high.z, low.w, high.w}, f.z, f.w);
    }
    const int first_t = lane % 4 * 2;
    u16* to = Records<C>(p, unit.line, unit.head).g(first_t) + Gate<C>::row(warp, 0, 0, lane);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int t = first_t + e % 2, j = Gate<C>::row(warp, 0, e / 2, lane);
      const float dt_bias = reinterpret_cast<const float*>(smem + L::kDtBias)[j];
      if (t < C::kTokens) stage.vectors()[(t * 3 + 2) * kDim + j] = decay_of<C>(p, a, round_bf16(g[e]) + dt_bias);
      if (t < unit.length) to[e % 2 * kDim + e / 2 * 8] = to_bf16(g[e]);
    }
    if (p.rounded == nullptr) return;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (const int t = first_t + e % 2; t < C::kTokens)
        p.rounded[((i64(unit.n) * C::kTokens + t) * 4 + 3) * L::kChannels + unit.head * kDim +
                  Gate<C>::row(warp, 0, e / 2, lane)] = to_bf16(g[e]);
  }

  // q, k, v, beta and k . q of the warp's token; its part of the line; its k to the records. Returns its z.
  __device__ uint2 convolve(const Unit& unit, u16 beta, const u8* inbox, const Stage<C>& stage) const {
    const int t = warp, channel = unit.head * kDim + lane * 4;
    const float* taps = reinterpret_cast<const float*>(smem + L::kTaps) + lane * 4;
    const u16* from = reinterpret_cast<const u16*>(inbox + L::kRows) + t * 4 * kDim + lane * 4;
    u16* line = p.conv + unit.line * p.conv_stride;
    float4 y[3];
#pragma unroll
    for (int third = 0; third < 3; ++third) {
      Window<C> window;
#pragma unroll
      for (int i = 0; i < 4; ++i) window.raw[i] = load_four(from + (i * 4 + third) * kDim);
      y[third] = window.convolve(p, third * L::kChannels + channel, taps + third * 4 * kDim, kDim);
      u16* to = tap_address<C>(line, third * L::kChannels + channel, 0);
      if (t == 0) store_tap<C>(to, 0, window.raw[1]), store_tap<C>(to, 1, window.raw[2]);
      store_tap<C>(to, 2 + t, window.raw[3]);
    }
    const float4 q = y[0], k = y[1];
    store_four(Records<C>(p, unit.line, unit.head).k(t) + lane * 4, narrow(k));
    const float qq = warp_sum(dot(q, q)), kk = warp_sum(squares(k)), qk = warp_sum(dot(q, k));
    const float q_scale = p.scale * rsqrtf(qq + 1e-6f), k_scale = rsqrtf(kk + 1e-6f);
    float4* vectors = reinterpret_cast<float4*>(stage.vectors() + t * 3 * kDim) + lane;
    vectors[0] = scaled(k, k_scale);
    vectors[kDim / 4] = scaled(q, q_scale);
    reinterpret_cast<float4*>(stage.v())[t * 32 + lane] = y[2];
    if (lane == 0) stage.scalars()[t] = {sigmoid(__uint_as_float(u32(beta) << 16)), qk * k_scale * q_scale};
    if (p.rounded != nullptr)
#pragma unroll
      for (int third = 0; third < 3; ++third)
        store_four(p.rounded + ((i64(unit.n) * C::kTokens + t) * 4 + third) * L::kChannels + channel, narrow(y[third]));
    return load_four(from + (3 * 4 + 3) * kDim);
  }

  __device__ void recall(int t, float a, const u8* inbox, const Stage<C>& stage) const {
    const u16* from = reinterpret_cast<const u16*>(inbox + L::kRecords) + t * 2 * kDim + lane * 4;
    Recall<C> token;
    token.k = load_four(from), token.g = load_four(from + kDim);
    token.compute(p, a, reinterpret_cast<const float4*>(smem + L::kDtBias)[lane], stage.recalled() + t * 2 * kDim,
                  lane);
  }

  // Norm and out of the warp's token when it has been walked, and its u to the records.
  __device__ void finish(const Stage<C>& stage, uint2 z) const {
    wait_phase(stage.walked, stage.parity);
    const Unit unit = stage.unit();
    const int t = warp;
    if (t >= unit.length) return;
    const float4 o = reinterpret_cast<const float4*>(stage.o())[t * 32 + lane];
    const float4 norm = reinterpret_cast<const float4*>(smem + L::kNorm)[lane], gate_z = widen(z);
    const float scale = rsqrtf(warp_sum(dot(o, o)) * (1.0f / kDim) + p.norm_eps);
    store_four(p.out + (i64(unit.n) * C::kTokens + t) * p.out_stride + unit.head * kDim + lane * 4,
               narrow({o.x * scale * norm.x * sigmoid(gate_z.x), o.y * scale * norm.y * sigmoid(gate_z.y),
                       o.z * scale * norm.z * sigmoid(gate_z.z), o.w * scale * norm.w * sigmoid(gate_z.w)}));
    store_streaming(Records<C>(p, unit.line, unit.head).u(t) + lane * 4,
                    reinterpret_cast<const float4*>(stage.v())[t * 32 + lane]);
  }

  // Units first .. first + count - 1.
  __device__ void run(int first, int units) const {
    Fate* fates = reinterpret_cast<Fate*>(smem + L::kFates);
    int head = first / p.requests, n = first % p.requests;  // of a unit
    const auto after = [&](int request) { return request + 1 == p.requests ? 0 : request + 1; };
    const auto head_after = [&] { return head + (n + 1 == p.requests); };

    // ---- Weights before the dependency; then the first unit

    uint4 f_b[2][4];
    load_head(head, f_b);
    if (warp == 0)
      reinterpret_cast<float4*>(smem + L::kNorm)[lane] =
          *reinterpret_cast<const float4*>(p.owned + 15 * L::kChannels + lane * 4);
    float a = p.a_log[head];
    if constexpr (C::kFault != Fault::kNoDependencyWait) pdl_wait();
    pdl_launch();

    // The slots of a unit are asked for one unit ahead of all else.
    Request asked = {};
    const auto ask = [&](int request) {
      load_slots(asked, p, request, lane);
      asked.length = load_length<C>(p, request);
    };
    const auto tell = [&](Fate& fate, int request, int of_head) {
      resolve_slots<C>(asked, p, request);
      judge_length<C>(asked, p, request, asked.length, of_head == 0 && lane == 0);
      if (lane == 0) {  // not the count, which may still be read
        fate.line = asked.line;
        fate.accepted = asked.accepted;
        fate.length = asked.live ? asked.length : 0;
      }
      ask(after(request));
    };
    if (leads()) {
      ask(n);
      tell(fates[0], n, head);
    }
    named_barrier(1, kThreads);
    int count = 0;
    u16 beta = 0;
    load({n, head, fates[0].line, fates[0].length, fates[0].accepted}, smem + L::kInboxes, count, beta);
    copy_async_commit();
    a = expf(a);

    int filled = 0, finished = 0;              // stages
    uint2 older_z = {0, 0}, newer_z = {0, 0};  // of the units in them
    for (int i = 0; i < units; ++i, head = head_after(), n = after(n)) {
      Fate& fate = fates[i % 2];
      Fate& next_fate = fates[(i + 1) % 2];
      Unit unit = {n, head, fate.line, fate.length, fate.accepted};
      u8* inbox = smem + L::kInboxes + i % 2 * L::kInboxBytes;
      const u16 own_beta = beta;
      if (n == 0 && i > 0) {
        named_barrier(1, kThreads);  // all are done with the head before
        load_head(head, f_b);
        a = expf(p.a_log[head]);
      }

      // ---- A free stage, a full inbox, and what one warp knows; then the next unit is loaded

      if (unit.length > 0 && filled - finished == 2) {
        finish({smem, finished++}, older_z);
        older_z = newer_z;
      }
      if (leads()) {
        if (lane == 0) fate.count = count;
        if (i + 1 < units) tell(next_fate, after(n), head_after());
      }
      copy_async_wait<0>();
      named_barrier(1, kThreads);  // every warp has read line, records, the other inbox and the stage
      const int recorded = fate.count;
      if (i + 1 < units)
        load({after(n), head_after(), next_fate.line, next_fate.length, next_fate.accepted},
             smem + L::kInboxes + (i + 1) % 2 * L::kInboxBytes, count, beta);
      copy_async_commit();

      // ---- Dead, or not

      if (unit.length > 0 && is_stale<C>(unit.pending, recorded)) {
        unit.length = 0;
        if (leads() && lane == 0 && unit.head == 0 && p.counters != nullptr) atomicAdd(p.counters + kStaleRecords, 1u);
      }
      if (const int t = unit.length + warp; t < C::kTokens)
        store_four(p.out + (i64(unit.n) * C::kTokens + t) * p.out_stride + unit.head * kDim + lane * 4, {0, 0});
      if (unit.length == 0) continue;
      if (recorded == 0) unit.pending = 0;

      // ---- The stage

      const Stage<C> stage(smem, filled++);
      if (is_courier() && elect_one()) load_state(unit, stage);
      __syncwarp();
      gate(unit, f_b, a, inbox, stage);
      if (warp < unit.length) {
        const uint2 z = convolve(unit, own_beta, inbox, stage);
        if (filled - finished == 1) older_z = z;
        else newer_z = z;
      }
      if (const int t = recorded_token(); t < unit.pending) recall(t, a, inbox, stage);
      if (leads() && lane == 0) {
        stage.unit() = unit;
        *Records<C>(p, unit.line, unit.head).count = unit.length;
      }
      stage.arrive(stage.full, lane);
      if (is_courier() && filled > 1 && elect_one()) store_state({smem, filled - 2});
      __syncwarp();
    }

    // ---- The last ones; then a stage without a unit

    if (is_courier() && filled > 0 && elect_one()) store_state({smem, filled - 1});
    __syncwarp();
    for (; finished < filled; older_z = newer_z) finish({smem, finished++}, older_z);
    if (is_courier() && elect_one()) bulk_wait_read();
    named_barrier(1, kThreads);
    const Stage<C> stage(smem, filled);
    if (leads() && lane == 0) {
      stage.unit().length = 0;
      barrier_arrive(stage.full);
    }
    stage.arrive(stage.full, lane);
  }
};

// ---- Walkers: four rows of the state to a thread, as in kda_step()

template <class C>
__device__ inline void walk(u8* smem, int warp, int lane) {
  using L = StreamLayout<C>;
  constexpr int kRows = C::kPassRows, kLaneStride = 4;
  const int row_lane = lane / 4, lane_row = lane % 4;
  const int own_row = row_lane * kRows / 8;  // whose sums a lane has
  const bool owns = row_lane % (8 / kRows) == 0;
  const int first = lane_row * L::kPartValues + warp * L::kPartRows;
  const auto offset = [&](int g, int i) { return (g ^ own_row) * kDim + i * 32; };  // of registers, in floats
  for (int unit = 0;; ++unit) {
    const Stage<C> stage(smem, unit);
    wait_phase(stage.full, stage.parity);
    const int length = warp_uniform(stage.unit().length), pending = warp_uniform(stage.unit().pending);
    if (length == 0) return;
    const SmemAddress rows =
        smem_address(stage.base) + lane_row * L::kPartPitch + (warp * L::kPartRows * kDim + row_lane * 4) * 4;
    float4 s[kRows][4];
#pragma unroll
    for (int g = 0; g < kRows; ++g)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[g][i] = load_shared_float4(rows + offset(g, i) * 4);
#pragma unroll 1
    for (int t = 0; t < pending; ++t) {
      float u[kRows];
#pragma unroll
      for (int g = 0; g < kRows; ++g) u[g] = stage.o()[t * kDim + first + (g ^ own_row)];
      fold_token(s, stage.recalled() + t * 2 * kDim, u, row_lane);
    }
    if (pending > 0) {
#pragma unroll
      for (int g = 0; g < kRows; ++g)
#pragma unroll
        for (int i = 0; i < 4; ++i) store_shared_float4(rows + offset(g, i) * 4, s[g][i]);
      fence_proxy_async();
    }
    stage.arrive(stage.folded, lane);  // and the rows' u are read: o takes their place
    Vectors token;
#pragma unroll 1
    for (int t = 0; t < length; ++t) {
      token.load(stage.vectors(), t, row_lane);
      const float2 scalar = stage.scalars()[t];
      float* own_v = stage.v() + t * kDim + first + own_row;
      const float v[1] = {*own_v};
      float u[1], sq[kRows] = {};
      advance<kRows, kLaneStride>(s, token, scalar.x, v, u, sq);
      if (owns) stage.o()[t * kDim + first + own_row] = round_bf16(__fmaf_rn(u[0], scalar.y, sq[0]));
      __syncwarp();  // the rows' lanes have read v
      if (owns) *own_v = u[0];
    }
    stage.arrive(stage.walked, lane);
  }
}

// `smem`: C::kSmemBytes of the CTA, aligned to 128.
template <class C>
__device__ inline void kda_stream(const Params& p, u8* smem) {
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    Stage<C>(smem, 0).init();
    Stage<C>(smem, 1).init();
    barrier_init_fence();
  }
  __syncthreads();
  const i64 units = i64(C::kHeads) * p.requests;
  const int first = static_cast<int>(units * blockIdx.x / gridDim.x);
  const int last = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);
  if (warp < kPreparers) Preparer<C>{p, smem, warp, lane}.run(first, last - first);
  else walk<C>(smem, warp - kPreparers, lane);
}

}  // namespace twostep::kda
