// out[m, n] = bf16( sum over k of x[m, k] * w[n, k] ).  FP32 sums, one rounding, to nearest even. sm_90a.
//   x    [m, kK] BF16   through a tensor map of m rows, boxes of kRows x 64 columns; rows past m arrive as zero
//   w    [kN, kK] BF16  through a tensor map, boxes of kTileN x 64 columns; each byte is read once
//   out  [m, kN] BF16   rows out_pitch bytes apart; 16-byte aligned, pitch a multiple of 16; only written
//
// Grid: a cluster of kClusterK CTAs per kTileN rows of w; CTA `rank` sums the boxes rank, rank + kClusterK, .. of 64
// columns, so that the CTAs of a cluster read neighbouring addresses. One warp loads a ring of stages; kTileN / 64
// warpgroups multiply, 64 rows of w as the A operand, all of x as the B operand: so x is read from L2 once per kTileN
// rows of w, and the time hardly depends on m.
//
// The parts of a cluster are added in the order of their ranks by the CTAs that own them: fragments travel as they lie
// in registers, by st.async, which brings its own completion. A cluster barrier's release would wait for more. So the
// bits of an output depend on kClusterK alone: not on m, its row, the tile or the ring. No atomics, no workspace,
// nothing to reset.
//
// PDL: w is older than the previous kernel, so the ring is filled with w before pdl_wait(); x is read after it, and
// kFurtherStages of w go to L2 then.
#pragma once

#include "common/sm90_wgmma.cuh"

namespace twostep::gemm {

// For tests alone: each turns one synchronisation rule off.
enum class Fault { kNone, kNoDependencyWait, kEarlyRelease, kWrongParity };

struct Params {
  u8* out;
  i64 out_pitch;
  int m;
};

struct alignas(64) TensorMap {
  u64 opaque[16];
};

// The numbers that follow from a configuration. The host computes kSmemBytes too; they must agree.
template <class C>
struct Layout {
  static constexpr int kGroups = C::kTileN / 64;  // warpgroups
  static constexpr int kComputeThreads = kGroups * 128;
  static constexpr int kThreads = kComputeThreads + 32;
  static constexpr int kStageBoxes = C::kTileK / 64;
  static constexpr int kSums = C::kRows / 2;  // of a thread
  static constexpr int kFragments = kSums / 4;
  // CTAs that add: each takes whole warps, so that a warp's fragments stay together.
  static constexpr int kOwners = C::kClusterK < kGroups * 4 ? C::kClusterK : kGroups * 4;
  static constexpr int kOwnThreads = kComputeThreads / kOwners;

  static constexpr int kWBox = C::kTileN * 128;
  static constexpr int kXBox = C::kRows * 128;
  static constexpr int kStageBytes = kStageBoxes * (kWBox + kXBox);
  static constexpr int kRingBytes = C::kStages * kStageBytes;
  static constexpr int kPartBytes = kFragments * kOwnThreads * 16;  // of one CTA, for one owner
  static constexpr int kPartsBytes = C::kClusterK > 1 ? kPartBytes* C::kClusterK : 0;
  static constexpr int kBarrierOffset = kRingBytes + kPartsBytes;
  static constexpr int kSmemBytes = kBarrierOffset + C::kStages * 16 + 8;
  // Stages behind the ring that go to L2 as soon as x may be read: rings are full then, and memory would have nothing
  // to do until their first stages are multiplied. Two, where they are no more than memory gives in that microsecond;
  // else none: docs/notes/wgmma.md.
  static constexpr i64 kCtas = (C::kN + C::kTileN - 1) / C::kTileN * C::kClusterK;
  static constexpr int kFurtherStages = kCtas * 2 * kStageBoxes * kWBox <= 4'600'000 ? 2 : 0;
  static constexpr int kOutColumns = kOwnThreads / 2;     // 16 rows of w per warp
  static constexpr int kOutPitch = kOutColumns * 2 + 16;  // bytes; 16 more keep the transposed stores free of conflicts

  static_assert(C::kN % 16 == 0 && C::kK % 64 == 0 &&
                (C::kTileN == 64 || C::kTileN == 128 || C::kTileN == 192 || C::kTileN == 256));
  static_assert(C::kRows == 8 || C::kRows == 16 || C::kRows == 32 || C::kRows == 64);
  static_assert(C::kStages >= 2);  // a stage is released while the next one is multiplied
  static_assert(C::kK / 64 >= C::kClusterK && kGroups * 4 % kOwners == 0);
  // Ranks may have unequal numbers of boxes, but not of a part of a stage.
  static_assert(kStageBoxes == 1 || C::kK / 64 % (C::kClusterK * kStageBoxes) == 0);
  static_assert(C::kRows * kOutPitch <= kRingBytes);
  static_assert(kSmemBytes == C::kSmemBytes, "host and device disagree about shared memory");
};

// A template, so that only a debug build holds its text.
template <bool kDebug>
__device__ void report_stuck(const char* what, int stage) {
  printf("sm90_wgmma: CTA %d thread %d: %s %d did not complete\n", blockIdx.x, threadIdx.x, what, stage);
  __trap();
}

// Waits for a phase. In debug builds the wait is bounded and says where it stuck.
template <class C>
__device__ inline void wait_phase(u32 barrier, u32 parity, const char* what, int stage) {
  u64 tries = 0;
  while (!barrier_try_wait(barrier, parity))
    if constexpr (C::kDebug)
      if (++tries > (1ull << 22)) report_stuck<C::kDebug>(what, stage);
}

template <class C>
struct Tile {
  using L = Layout<C>;
  int rank, n0, tiles;
  u32 ring, parts, full, empty, parts_barrier;

  __device__ explicit Tile(u32 smem) {
    constexpr int kBoxes = C::kK / 64;
    rank = blockIdx.x % C::kClusterK;
    n0 = blockIdx.x / C::kClusterK * C::kTileN;
    tiles = (kBoxes - rank + C::kClusterK - 1) / C::kClusterK / L::kStageBoxes;
    ring = smem;
    parts = ring + L::kRingBytes;
    full = ring + L::kBarrierOffset;
    empty = full + C::kStages * 8;
    parts_barrier = empty + C::kStages * 8;
  }
  // First column of box b of stage t.
  __device__ int column(int t, int b) const { return ((t * L::kStageBoxes + b) * C::kClusterK + rank) * 64; }
};

// ---- Load: one elected lane

template <class C>
__device__ inline void load(const Tile<C>& tile, const TensorMap* w_map, const TensorMap* x_map, bool elected) {
  using L = Layout<C>;
  const auto load_w = [&](int t, int stage) {
    const u32 barrier = tile.full + stage * 8;
    barrier_arrive_expect(barrier, L::kStageBytes);
    for (int b = 0; b < L::kStageBoxes; ++b)
      tensor_load(tile.ring + stage * L::kStageBytes + b * L::kWBox, w_map, tile.column(t, b), tile.n0, barrier);
  };
  const auto load_x = [&](int t, int stage) {
    for (int b = 0; b < L::kStageBoxes; ++b)
      tensor_load(tile.ring + stage * L::kStageBytes + L::kStageBoxes * L::kWBox + b * L::kXBox, x_map,
                  tile.column(t, b), 0, tile.full + stage * 8);
  };
  const int ahead = C::kStages < tile.tiles ? C::kStages : tile.tiles;
  if (elected)
    for (int t = 0; t < ahead; ++t) load_w(t, t);
  __syncwarp();
  if constexpr (C::kFault != Fault::kNoDependencyWait) pdl_wait();
  if (elected) {
    for (int t = 0; t < ahead; ++t) load_x(t, t);
    for (int t = ahead; t < ahead + L::kFurtherStages && t < tile.tiles; ++t)
      for (int b = 0; b < L::kStageBoxes; ++b) tensor_prefetch(w_map, tile.column(t, b), tile.n0);
    int stage = 0;
    u32 parity = C::kFault == Fault::kWrongParity;
    for (int t = ahead; t < tile.tiles; ++t) {
      // Protects the tile that is still in this stage: every warp has multiplied it.
      wait_phase<C>(tile.empty + stage * 8, parity, "release of stage", stage);
      load_w(t, stage);
      load_x(t, stage);
      if (++stage == C::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
  __syncwarp();
}

// ---- Compute: all rows of x by 64 rows of w per warpgroup

// Lets the stage be loaded again. One lane speaks for its warp: the multiply itself, and no thread, has read the stage.
__device__ inline void release_stage(u32 empty, int lane) {
  if (lane == 0) barrier_arrive(empty);
}

template <class C>
__device__ inline void multiply(float (&sum)[Layout<C>::kSums], const Tile<C>& tile, int group, int lane) {
  using L = Layout<C>;
  int stage = 0, last = 0;
  u32 parity = 0;
  wgmma_fence(sum);
  for (int t = 0; t < tile.tiles; ++t) {
    wait_phase<C>(tile.full + stage * 8, parity, "stage", stage);  // its bytes have arrived
    if constexpr (C::kFault == Fault::kEarlyRelease) {
      release_stage(tile.empty + stage * 8, lane);
      __nanosleep(4000);  // the multiply would often be over before the next bytes arrive
    }
    const u32 w = tile.ring + stage * L::kStageBytes;
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < L::kStageBoxes; ++b) {
      const u64 a = wgmma_operand(w + b * L::kWBox + group * 8192);
      const u64 x = wgmma_operand(w + L::kStageBoxes * L::kWBox + b * L::kXBox);
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma(sum, a + k * 2, x + k * 2);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the stage before this one is read
    if constexpr (C::kFault != Fault::kEarlyRelease)
      if (t > 0) release_stage(tile.empty + last * 8, lane);
    last = stage;
    if (++stage == C::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  wgmma_wait<0>();
  wgmma_fence(sum);
}

// ---- Reduce and store

// A thread's fragment j: rows lane / 4 and + 8 of its warp's 16, rows 8 j + lane % 4 * 2 and + 1 of x.
template <class C>
__device__ inline float4 fragment(const float (&sum)[Layout<C>::kSums], int j) {
  return {sum[j * 4], sum[j * 4 + 1], sum[j * 4 + 2], sum[j * 4 + 3]};
}

template <class C>
__device__ inline void epilogue(const float (&sum)[Layout<C>::kSums], const Params& p, const Tile<C>& tile, int lane) {
  using L = Layout<C>;
  // Rounded outputs meet in the ring, as rows of x, so that they leave in full vectors. 4-byte stores cost 1.9 us more
  // at (7168, 1536), m = 64.
  const auto stage_out = [&](float4 d, int j, int warp) {
    const u32 at = tile.ring + (j * 8 + lane % 8) * L::kOutPitch + (warp * 16 + lane / 8 % 2 * 8) * 2;
    store_matrices_transposed(at, pack_bf16(d.x, d.y), pack_bf16(d.z, d.w));
  };
  // No warp may still multiply from the ring.
  named_barrier(1, L::kComputeThreads);
  if constexpr (C::kClusterK == 1) {
#pragma unroll
    for (int j = 0; j < L::kFragments; ++j) stage_out(fragment<C>(sum, j), j, threadIdx.x / 32);
  } else {
    const int owner = threadIdx.x / L::kOwnThreads, slot = threadIdx.x % L::kOwnThreads;
    cluster_wait();  // the peers run, with their barriers
#pragma unroll
    for (int j = 0; j < L::kFragments; ++j)
      store_cluster_float4(tile.parts + tile.rank * L::kPartBytes + (j * L::kOwnThreads + slot) * 16,
                           fragment<C>(sum, j), tile.parts_barrier, owner);
    if (tile.rank >= L::kOwners) return;
    wait_phase<C>(tile.parts_barrier, 0, "parts of cluster rank", tile.rank);  // every rank's have arrived
    for (int i = threadIdx.x; i < L::kFragments * L::kOwnThreads; i += L::kComputeThreads) {
      float4 total = load_shared_float4(tile.parts + i * 16);
#pragma unroll
      for (int r = 1; r < C::kClusterK; ++r) {
        const float4 part = load_shared_float4(tile.parts + r * L::kPartBytes + i * 16);
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
      }
      stage_out(total, i / L::kOwnThreads, i % L::kOwnThreads / 32);
    }
  }
  named_barrier(1, L::kComputeThreads);  // the outputs are there
  constexpr int kVectors = L::kOutColumns / 8;
  const int first = tile.n0 + (C::kClusterK == 1 ? 0 : tile.rank * L::kOutColumns);
  for (int i = threadIdx.x; i < p.m * kVectors; i += L::kComputeThreads) {
    const int m = i / kVectors, n = i % kVectors * 8;
    if (first + n >= C::kN) continue;
    const float4 v = load_shared_float4(tile.ring + m * L::kOutPitch + n * 2);
    *reinterpret_cast<float4*>(p.out + m * p.out_pitch + i64(first + n) * 2) = v;
  }
}

template <class C>
__device__ inline void sm90_wgmma(const Params& p, const TensorMap* w_map, const TensorMap* x_map) {
  using L = Layout<C>;
  extern __shared__ __align__(1024) u8 smem[];
  const Tile<C> tile(smem_address(smem));
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  pdl_launch();
  if (warp == L::kGroups * 4) {
    const bool elected = elect_one();
    if (elected) {
      tensor_map_prefetch(w_map);
      tensor_map_prefetch(x_map);
      for (int s = 0; s < C::kStages; ++s) {
        barrier_init(tile.full + s * 8, 1);
        barrier_init(tile.empty + s * 8, L::kGroups * 4);
      }
      barrier_init(tile.parts_barrier, 1);
      barrier_init_fence();
      if constexpr (C::kClusterK > 1) barrier_arrive_expect(tile.parts_barrier, C::kClusterK * L::kPartBytes);
    }
    __syncwarp();
    // The loader made the barriers itself and need not wait for the others: it starts its copies first.
    if constexpr (C::kClusterK > 1) cluster_arrive_relaxed();
    named_barrier_arrive(2, L::kThreads);
    load<C>(tile, w_map, x_map, elected);
    if constexpr (C::kClusterK > 1) cluster_wait();
    return;
  }
  if constexpr (C::kClusterK > 1) cluster_arrive_relaxed();
  named_barrier(2, L::kThreads);  // the barriers are initialised
  // Every thread that writes out waits: the previous kernel may still read what out overwrites.
  if constexpr (C::kFault != Fault::kNoDependencyWait) pdl_wait();
  float sum[L::kSums] = {};
  multiply<C>(sum, tile, warp / 4, lane);
  epilogue<C>(sum, p, tile, lane);
}

}  // namespace twostep::gemm
