// Streams `bytes` of p once and does nothing else: what the memory allows a kernel that reads a weight.
//   p     16-byte aligned; bytes a multiple of 16, below 2^45
//   sink  never written in practice; keeps the reads alive
// Persistent CTAs take pieces of kPiece bytes in turn, by bulk copies into a ring of kStages. Grid: CTAs that are
// co-resident; block kReadThreads; dynamic shared memory kStages * kPiece bytes.
// kEarly: p is older than the previous kernel, so the ring is filled before pdl_wait(), and the next launch may do
// the same under this one. Else the wait comes first: an ordinary launch.
#pragma once

#include "common/ptx.cuh"

namespace twostep::measure {

constexpr int kReadThreads = 128;
constexpr u32 kPiece = 16384;

template <int kStages, bool kEarly>
__device__ inline void read_limit(const u8* p, i64 bytes, u32* sink) {
  extern __shared__ __align__(128) u8 ring[];
  __shared__ __align__(8) u64 full[kStages];
  const i64 pieces = (bytes + kPiece - 1) / kPiece;
  if constexpr (kEarly) pdl_launch();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) barrier_init(smem_address(&full[s]), 1);
    barrier_init_fence();
  }
  __syncthreads();  // the barriers are initialised
  if constexpr (!kEarly) pdl_wait();
  const auto size = [&](i64 piece) { return u32(bytes - piece * kPiece < kPiece ? bytes - piece * kPiece : kPiece); };
  const auto issue = [&](i64 piece, int s) {
    const u32 barrier = smem_address(&full[s]);
    barrier_arrive_expect(barrier, size(piece));
    bulk_load(smem_address(ring + s * kPiece), p + piece * kPiece, size(piece), barrier);
  };
  if (threadIdx.x == 0)
    for (int s = 0; s < kStages; ++s)
      if (blockIdx.x + i64(s) * gridDim.x < pieces) issue(blockIdx.x + i64(s) * gridDim.x, s);
  u32 mixed = 0;
  int stage = 0;
  u32 parity = 0;
  for (i64 piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    while (!barrier_try_wait(smem_address(&full[stage]), parity)) {
    }
    const uint4* words = reinterpret_cast<const uint4*>(ring + stage * kPiece);
    const int count = int(size(piece) / 16);
#pragma unroll
    for (int i = 0; i < int(kPiece / 16 / kReadThreads); ++i) {
      const int at = i * kReadThreads + threadIdx.x;
      if (at < count) mixed ^= words[at].x ^ words[at].y ^ words[at].z ^ words[at].w;
    }
    __syncthreads();  // all have read the stage before it is filled again
    const i64 next = piece + i64(kStages) * gridDim.x;
    if (threadIdx.x == 0 && next < pieces) issue(next, stage);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  if constexpr (kEarly) pdl_wait();  // completion stays transitive along the chain
  if (mixed == 0x12345679u) *sink = mixed;
}

}  // namespace twostep::measure
