// Folds the accepted tokens that a verify step recorded into the state, between steps (spec: kda 8.6).
//
//   slots, dst  int32, entries slots_stride and dst_stride apart: where a request is, and where it goes; may be the
//   same accepted    int32 [B]; null: nothing is folded, the records are forgotten
//
// The caches, the records and what a fold does to a head are those of kda_step.cuh. To dst go the state after
// `accepted` tokens, positions 0..2 of the line from accepted - 1 on, and a count of 0.
//
// Grid: a CTA of kFoldThreads per (request, head); no dynamic shared memory. A thread loads what it stores, and only
// after the load. Launched without PDL.
#pragma once

#include "kda/kda_step.cuh"

namespace twostep::kda {

struct FoldParams {
  Params step;
  const int* dst_slots;
  i64 dst_stride;
};

constexpr int kFoldThreads = 256;

template <class C>
__device__ inline void kda_fold(const FoldParams& params) {
  using L = Layout<C>;
  constexpr int kGroups = kFoldThreads / 8, kRows = kDim / kGroups;  // rows that a thread holds
  __shared__ __align__(16) float recalled[L::kFolded * 2 * kDim];
  const Params& p = params.step;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.x % C::kHeads;
  const i64 n = blockIdx.x / C::kHeads;
  const int slot = p.slots[n * p.slots_stride], dst = params.dst_slots[n * params.dst_stride];
  const int accepted = p.accepted != nullptr ? p.accepted[n] : 1;

  // ---- The first check that fails decides (kda 9.3)

  int bad = -1, count = 0;
  bool live = false;
  if (slot >= p.num_slots) bad = kBadSlot;
  else if (slot >= p.first_live_slot && (accepted < 1 || accepted > L::kEntries)) bad = kBadAccepted;
  else if (slot >= p.first_live_slot && dst >= p.num_slots) bad = kBadSlot;
  else if (slot >= p.first_live_slot && dst >= p.first_live_slot) {
    if (p.accepted != nullptr) count = *Records<C>(p, slot, head).count;
    live = !is_stale<C>(accepted, count);
    if (!live) bad = kStaleRecords;
  }
  if (bad >= 0 && p.counters != nullptr && head == 0 && threadIdx.x == 0) atomicAdd(p.counters + bad, 1u);
  if (!live) return;

  // ---- k and decay of the recorded tokens; the taps

  const int pending = count > 0 ? accepted : 0;
  const bool moves = p.accepted != nullptr && (pending > 0 || dst != slot);
  const Records<C> records(p, slot, head);
  const int channel = warp * L::kChannels + head * kDim + lane * 4;  // warps 0..2: Q, K, V
  uint2 taps[3];
  if (moves) {
    const float4 dt_bias = load_dt_bias(p, head, lane);
    const float a = expf(p.a_log[head]);
    for (int t = warp; t < pending; t += kFoldThreads / 32) {
      Recall<C> recall;
      recall.load(records, t, 0, lane, false);
      recall.compute(p, a, dt_bias, recalled + t * 2 * kDim, lane);
    }
    const u16* at = tap_address<C>(p.conv + slot * p.conv_stride, channel, accepted - 1);
    if (warp < 3)
#pragma unroll
      for (int i = 0; i < 3; ++i) taps[i] = load_tap<C>(at, i);
  }
  __syncthreads();  // k and decay are there, and every thread has read the count
  if (threadIdx.x == 0) *Records<C>(p, dst, head).count = 0;
  if (!moves) return;
  if (warp < 3)
#pragma unroll
    for (int i = 0; i < 3; ++i) store_tap<C>(tap_address<C>(p.conv + dst * p.conv_stride, channel, 0), i, taps[i]);

  // ---- The state

  const int row_lane = lane % 8, first = threadIdx.x / 8;
  const i64 at = i64(head * kDim + first) * kDim + row_lane * 4;
  const float* from = p.state + slot * p.state_stride + at;
  float* to = p.state + dst * p.state_stride + at;
  float4 s[kRows][4];
#pragma unroll
  for (int g = 0; g < kRows; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[g][i] = *reinterpret_cast<const float4*>(from + g * kGroups * kDim + i * 32);
#pragma unroll 1
  for (int t = 0; t < pending; ++t) {
    float u[kRows];
#pragma unroll
    for (int g = 0; g < kRows; ++g) u[g] = records.u(t)[first + g * kGroups];
    fold_token(s, recalled + t * 2 * kDim, u, row_lane);
  }
#pragma unroll
  for (int g = 0; g < kRows; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i) store_streaming(to + g * kGroups * kDim + i * 32, s[g][i]);
}

}  // namespace twostep::kda
