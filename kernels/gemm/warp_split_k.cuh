// out[m, n] = bf16( sum over k of x[m, k] * w[n, k] ).  FP32 sums, one rounding, to nearest even.
//   x    [m, kK] BF16    rows x_pitch bytes apart; 16-byte aligned, pitch a multiple of 16; 1 <= m <= kBucket
//   w    [kN, kK] BF16   rows w_pitch bytes apart, or packed; each byte is read once
//   out  [m, kN] BF16    rows out_pitch bytes apart; 16-byte aligned, pitch a multiple of 16; only written
//
// Grid: one CTA per kTileN rows of w, rounded up to whole clusters. kWarps warps multiply, one more loads.
//
//             k ->   stage 0          stage 1          ...        a stage: kTileK columns of w and of x
//   kTileN rows   [ box | box | ..][ box | box | ..]              a box: 64 columns
//   of w            ^ slice 0   ^ slice 1 ...                     box b of the matrix belongs to slice b % kSlices
//
// Warp split-K is sliced-K: slice s sums its boxes in rising k; the slices meet in shared memory and are added
// in the order 0, 1, ..; so the bits of an output depend on kSlices alone: not on m, its row, the tile or the ring.
// No atomics, no workspace, nothing to reset. w is the A operand of mma.sync (16 rows), x the B operand (8 rows).
//
// The kClusterN CTAs of a cluster share x: each loads every kClusterN-th row and multicasts it to all.
//
// PDL: w is older than the previous kernel, so the ring is filled with w before pdl_wait(); x is read after it.
// Rows m..kBucket-1 of x are never loaded: what shared memory holds there reaches only columns of the product
// that are not stored. Columns past kK are neither loaded nor multiplied.
#pragma once

#include "common/ptx.cuh"

namespace twostep::gemm {

enum class Load {
  kRows,    // one bulk copy per row of w; rows lie kTileK * 2 + 16 bytes apart in a stage, free of bank conflicts
  kTiles,   // TMA boxes of kTileN rows x 64 columns, 128-byte swizzle
  kPacked,  // one bulk copy per stage: the same boxes, swizzled, written one after the other by pack.cuh
};

// For tests alone: each turns one synchronisation rule off.
enum class Fault { kNone, kNoDependencyWait, kEarlyRelease, kWrongParity };

struct Params {
  const u8* x;
  const u8* w;
  u8* out;
  i64 x_pitch;
  i64 w_pitch;
  i64 out_pitch;
  int m;
};

struct alignas(64) TensorMap {
  u64 opaque[16];
};

// The numbers that follow from a configuration. The host computes kSmemBytes too; they must agree.
template <class C>
struct Layout {
  static constexpr int kBoxColumns = 64;
  static constexpr int kBoxes = C::kTileK / kBoxColumns;  // per stage
  static constexpr int kTiles = (C::kK + C::kTileK - 1) / C::kTileK;
  static constexpr int kThreads = (C::kWarps + 1) * 32;
  static constexpr int kRowGroups = C::kWarps / C::kSlices;       // warps that share a slice divide the rows
  static constexpr int kRowBlocks = C::kTileN / kRowGroups / 16;  // 16-row operands of one warp
  static constexpr int kMBlocks = C::kBucket / 8;

  static constexpr int kPaddedPitch = C::kTileK * 2 + 16;
  static constexpr int kBoxBytes = C::kTileN * 128;
  static constexpr int kWBytes = C::kLoad == Load::kRows ? C::kTileN * kPaddedPitch : kBoxes * kBoxBytes;
  static constexpr int kXBytes = C::kBucket * kPaddedPitch;
  static constexpr int kStageBytes = (kWBytes + kXBytes + 1023) / 1024 * 1024;  // swizzle repeats every 1024 bytes

  static constexpr int kSumPitch = C::kTileN + 4;  // floats; 4 more keep the fragment stores free of bank conflicts
  static constexpr int kSumBytes = C::kSlices * C::kBucket * kSumPitch * 4;
  static constexpr int kRingBytes = C::kStages * kStageBytes;
  static constexpr bool kSumInRing = kSumBytes > 8192 && kSumBytes <= kRingBytes;
  static constexpr int kBarrierOffset = kRingBytes + (kSumInRing ? 0 : kSumBytes);
  static constexpr int kSmemBytes = kBarrierOffset + C::kStages * 16;

  static_assert(C::kN % 16 == 0 && C::kK % 64 == 0 && C::kBucket % 8 == 0 && C::kBucket <= 64);
  static_assert(C::kWarps % C::kSlices == 0 && C::kTileN % (16 * kRowGroups) == 0 && kBoxes % C::kSlices == 0);
  static_assert(C::kLoad != Load::kPacked || C::kN % C::kTileN == 0);
  static_assert(kSmemBytes == C::kSmemBytes, "host and device disagree about shared memory");
};

// A template, so that only a debug build holds its text.
template <bool kDebug>
__device__ void report_stuck(int stage) {
  printf("warp_split_k: CTA %d thread %d: stage %d did not complete\n", blockIdx.x, threadIdx.x, stage);
  __trap();
}

// Waits for a phase. In debug builds the wait is bounded and says where it stuck.
template <class C>
__device__ inline void wait_phase(u32 barrier, u32 parity, int stage) {
  u64 tries = 0;
  while (!barrier_try_wait(barrier, parity))
    if constexpr (C::kDebug)
      if (++tries > (1ull << 22)) report_stuck<C::kDebug>(stage);
}

// ---- Load: one lane. Stage `t` of the ring takes columns t * kTileK.. of w and x.
//
// A copy takes its addresses from uniform registers. In a loop of one elected lane they are there: five instructions a
// copy. A copy from each of 32 lanes at once is slower, since the lanes take turns: 40 ns each on an H200.

template <class C>
struct Loader {
  using L = Layout<C>;
  const Params& p;
  const TensorMap* map;
  u32 ring;
  u32 full;
  int n0;

  __device__ static int columns(int t) { return C::kK - t * C::kTileK < C::kTileK ? C::kK - t * C::kTileK : C::kTileK; }
  // 0 for a CTA that only completes its cluster.
  __device__ int rows() const {
    const int left = C::kN - n0;
    return left < 0 ? 0 : left < C::kTileN ? left : C::kTileN;
  }

  // Announces all bytes of the tile, then starts its part of w.
  __device__ void load_w(int t, int stage) const {
    const u32 barrier = full + stage * 8;
    const u32 to = ring + stage * L::kStageBytes;
    const int cols = columns(t);
    const int w_rows = C::kLoad == Load::kTiles ? C::kTileN : rows();  // TMA fills and counts rows past kN
    barrier_arrive_expect(barrier, (w_rows + p.m) * cols * 2);
    if constexpr (C::kLoad == Load::kRows) {
      const u8* from = p.w + n0 * p.w_pitch + i64(t) * C::kTileK * 2;
      for (int r = 0; r < rows(); ++r, from += p.w_pitch) bulk_load(to + r * L::kPaddedPitch, from, cols * 2, barrier);
    } else if constexpr (C::kLoad == Load::kTiles) {
      for (int b = 0; b < cols / L::kBoxColumns; ++b)
        tensor_load(to + b * L::kBoxBytes, map, t * C::kTileK + b * L::kBoxColumns, n0, barrier);
    } else {
      if (rows() > 0)
        bulk_load(to, p.w + (i64(n0) * C::kK + i64(t) * C::kTileK * C::kTileN) * 2, C::kTileN * cols * 2, barrier);
    }
  }
  __device__ void load_x(int t, int stage) const {
    const u32 barrier = full + stage * 8;
    const u32 to = ring + stage * L::kStageBytes + L::kWBytes;
    const int bytes = columns(t) * 2;
    const u8* from = p.x + i64(t) * C::kTileK * 2;
    if constexpr (C::kClusterN == 1) {
      for (int r = 0; r < p.m; ++r, from += p.x_pitch) bulk_load(to + r * L::kPaddedPitch, from, bytes, barrier);
    } else {
      constexpr u16 kAll = (1 << C::kClusterN) - 1;
      for (int r = int(cluster_rank()); r < p.m; r += C::kClusterN)
        bulk_load_multicast(to + r * L::kPaddedPitch, from + r * p.x_pitch, bytes, barrier, kAll);
    }
  }
};

// All lanes of the loading warp are here; one of them, `elected`, loads.
template <class C>
__device__ inline void load(const Loader<C>& loader, u32 empty, bool elected) {
  using L = Layout<C>;
  constexpr int kAhead = C::kStages < L::kTiles ? C::kStages : L::kTiles;
  if (elected)
    for (int t = 0; t < kAhead; ++t) loader.load_w(t, t);
  __syncwarp();
  // The barriers of every CTA that x is sent to are initialised.
  if constexpr (C::kClusterN > 1) cluster_wait();
  if constexpr (C::kFault != Fault::kNoDependencyWait) pdl_wait();
  if (!elected) return;
  for (int t = 0; t < kAhead; ++t) loader.load_x(t, t);
  int stage = 0;
  u32 parity = 0;
  for (int t = kAhead; t < L::kTiles; ++t) {
    // Protects the tile that is still in this stage: every warp, of every CTA that x is sent to, has read it.
    wait_phase<C>(empty + stage * 8, C::kFault == Fault::kWrongParity ? parity ^ 1 : parity, stage);
    loader.load_w(t, stage);
    loader.load_x(t, stage);
    if (++stage == C::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// ---- Compute: one box of 64 columns of this warp's rows, all rows of x.

template <class C>
__device__ inline void multiply_box(float (&sum)[Layout<C>::kRowBlocks][Layout<C>::kMBlocks][4], u32 w, u32 x, int box,
                                    int first_row, int lane) {
  using L = Layout<C>;
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // 32 columns: one ldmatrix.x4 of x, two k steps
    u32 b[L::kMBlocks][4];
#pragma unroll
    for (int i = 0; i < L::kMBlocks; ++i)
      load_matrices(b[i], x + (i * 8 + lane % 8) * L::kPaddedPitch + box * 128 + half * 64 + lane / 8 * 16);
#pragma unroll
    for (int r = 0; r < L::kRowBlocks; ++r) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int row = first_row + r * 16 + lane % 16;
        const int chunk = half * 4 + step * 2 + lane / 16;  // of 16 bytes, in the row's 128
        u32 a[4];
        if constexpr (C::kLoad == Load::kRows) load_matrices(a, w + row * L::kPaddedPitch + box * 128 + chunk * 16);
        else load_matrices(a, w + box * L::kBoxBytes + row * 128 + ((chunk ^ (row & 7)) * 16));
#pragma unroll
        for (int i = 0; i < L::kMBlocks; ++i) mma_16x8x16(sum[r][i], a, b[i][step * 2], b[i][step * 2 + 1]);
      }
    }
  }
}

// Lets the stage be loaded again, if a tile is left for it: a CTA is then still there to hear it. One lane speaks for
// its warp. In debug builds each lane speaks for its own reads: racecheck follows those, and not what the lanes of a
// converged warp owe to each other.
template <class C>
__device__ inline void release_stage(u32 empty, int t, int lane) {
  if (t + C::kStages >= Layout<C>::kTiles) return;
  if constexpr (C::kClusterN == 1) {
    if (C::kDebug || lane == 0) barrier_arrive(empty);
  } else if constexpr (C::kDebug) {
    for (int rank = 0; rank < C::kClusterN; ++rank) barrier_arrive_remote(empty, rank);
  } else {
    if (lane < C::kClusterN) barrier_arrive_remote(empty, lane);
  }
}

template <class C>
__device__ inline void multiply(float (&sum)[Layout<C>::kRowBlocks][Layout<C>::kMBlocks][4], u32 ring, u32 full,
                                u32 empty, int slice, int first_row, int lane) {
  using L = Layout<C>;
  int stage = 0;
  u32 parity = 0;
  for (int t = 0; t < L::kTiles; ++t) {
    const u32 w = ring + stage * L::kStageBytes;
    wait_phase<C>(full + stage * 8, parity, stage);  // its bytes have arrived
    if constexpr (C::kFault == Fault::kEarlyRelease) release_stage<C>(empty + stage * 8, t, lane);
    const int boxes = (C::kK - t * C::kTileK) / L::kBoxColumns;  // left in the matrix
#pragma unroll
    for (int b = 0; b < L::kBoxes; b += C::kSlices)
      if (C::kK % C::kTileK == 0 || b + slice < boxes)
        multiply_box<C>(sum, w, w + L::kWBytes, b + slice, first_row, lane);
    __syncwarp();  // all lanes have read the stage before it is released
    if constexpr (C::kFault != Fault::kEarlyRelease) release_stage<C>(empty + stage * 8, t, lane);
    if (++stage == C::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// ---- Reduce and store

template <class C>
__device__ inline void epilogue_store(const float (&sum)[Layout<C>::kRowBlocks][Layout<C>::kMBlocks][4],
                                      const Params& p, u32 sums, int slice, int first_row, int n0, int lane) {
  using L = Layout<C>;
  constexpr u32 kComputeThreads = C::kWarps * 32;
  // The ring becomes the room for the sums: no warp may still read its last stage.
  if constexpr (L::kSumInRing) named_barrier(1, kComputeThreads);
#pragma unroll
  for (int r = 0; r < L::kRowBlocks; ++r)
#pragma unroll
    for (int i = 0; i < L::kMBlocks; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int n = first_row + r * 16 + lane / 4 + e / 2 * 8;
        const int m = i * 8 + lane % 4 * 2 + e % 2;
        store_shared_float(sums + ((slice * C::kBucket + m) * L::kSumPitch + n) * 4, sum[r][i][e]);
      }
  named_barrier(1, kComputeThreads);  // every slice's sums are there
  constexpr int kQuads = C::kTileN / 4;
  for (int i = threadIdx.x; i < p.m * kQuads; i += kComputeThreads) {
    const int m = i / kQuads;
    const int n = i % kQuads * 4;
    if (n0 + n >= C::kN) continue;
    float4 total = load_shared_float4(sums + (m * L::kSumPitch + n) * 4);
#pragma unroll
    for (int s = 1; s < C::kSlices; ++s) {
      const float4 part = load_shared_float4(sums + ((s * C::kBucket + m) * L::kSumPitch + n) * 4);
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    store_global_u32x2(p.out + m * p.out_pitch + i64(n0 + n) * 2, pack_bf16(total.x, total.y),
                       pack_bf16(total.z, total.w));
  }
}

template <class C>
__device__ inline void warp_split_k(const Params& p, const TensorMap* map) {
  using L = Layout<C>;
  extern __shared__ __align__(1024) u8 smem[];
  const u32 ring = smem_address(smem);
  const u32 sums = L::kSumInRing ? ring : ring + L::kRingBytes;
  const u32 full = ring + L::kBarrierOffset;
  const u32 empty = full + C::kStages * 8;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int n0 = blockIdx.x * C::kTileN;

  pdl_launch();
  if (warp == C::kWarps) {
    const bool elected = elect_one();
    if (elected) {
      if constexpr (C::kLoad == Load::kTiles) tensor_map_prefetch(map);
      for (int s = 0; s < C::kStages; ++s) {
        barrier_init(full + s * 8, 1);
        barrier_init(empty + s * 8, C::kWarps * C::kClusterN * (C::kDebug ? 32 : 1));
      }
      barrier_init_fence();
    }
    __syncwarp();
    // The loader made the barriers itself and need not wait for the others: it starts its copies first.
    if constexpr (C::kClusterN > 1) cluster_arrive();
    else named_barrier_arrive(2, L::kThreads);
    load<C>({p, map, ring, full, n0}, empty, elected);
    return;
  }
  // The barriers are initialised.
  if constexpr (C::kClusterN > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    named_barrier(2, L::kThreads);
  }
  // Every thread that writes out waits: the previous kernel may still read what out overwrites.
  if constexpr (C::kFault != Fault::kNoDependencyWait) pdl_wait();
  const int slice = warp % C::kSlices;
  const int first_row = warp / C::kSlices * (C::kTileN / L::kRowGroups);
  float sum[L::kRowBlocks][L::kMBlocks][4] = {};
  multiply<C>(sum, ring, full, empty, slice, first_row, lane);
  epilogue_store<C>(sum, p, sums, slice, first_row, n0, lane);
}

}  // namespace twostep::gemm
