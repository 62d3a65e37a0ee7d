// Reads each piece of `from` once, writes it `writes` times, those of the first `more` bytes once more, and computes
// nothing: what the memory allows a kernel with this mix of reads and writes.
//   from  16-byte aligned; bytes a multiple of 16, below 2^45; `more` a multiple of kMixPiece
//   to    `writes` regions of `bytes`, and `more`, one behind the other; either `from` is the first of them, as where a
//   state is
//         written back to its slot, or nothing that is read lies there
// Persistent CTAs take pieces of kMixPiece bytes in turn, by bulk copies into and out of a ring of kStages. Grid: CTAs
// that are co-resident; block 32, of which one thread works; dynamic shared memory kStages * kMixPiece bytes.
// PDL: `from` is older than the previous kernel, so the ring is filled before pdl_wait(); nothing is written before it.
#pragma once

#include "common/ptx.cuh"

namespace twostep::measure {

constexpr u32 kMixPiece = 16384;

// Shared to global, completing with the thread's bulk group.
__device__ inline void mix_store(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
__device__ inline void mix_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All groups but the last kPending have read their shared memory; their writes may be under way.
template <int kPending>
__device__ inline void mix_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ inline void mix_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

template <int kStages>
__device__ inline void mix_limit(const u8* from, i64 bytes, u8* to, int writes, i64 more) {
  extern __shared__ __align__(128) u8 ring[];
  __shared__ __align__(8) u64 full[kStages];
  constexpr int kPending = kStages / 2;  // pieces on their way out while the others come in
  pdl_launch();
  if (threadIdx.x != 0) return;
  for (int s = 0; s < kStages; ++s) barrier_init(smem_address(&full[s]), 1);
  barrier_init_fence();
  const auto offset = [&](i64 i) { return (blockIdx.x + i * gridDim.x) * i64(kMixPiece); };  // of this CTA's piece i
  const auto size = [&](i64 at) { return u32(bytes - at < kMixPiece ? bytes - at : kMixPiece); };
  const auto issue = [&](i64 i) {
    const i64 at = offset(i);
    if (at >= bytes) return;
    const int s = int(i % kStages);
    barrier_arrive_expect(smem_address(&full[s]), size(at));
    bulk_load(smem_address(ring + s * kMixPiece), from + at, size(at), smem_address(&full[s]));
  };
  for (int i = 0; i < kStages; ++i) issue(i);
  pdl_wait();
  for (i64 i = 0; offset(i) < bytes; ++i) {
    const int s = int(i % kStages);
    while (!barrier_try_wait(smem_address(&full[s]), u32(i / kStages) & 1)) {
    }
    const i64 at = offset(i);
    for (int w = 0; w < writes + (at < more); ++w)
      mix_store(to + w * bytes + at, smem_address(ring + s * kMixPiece), size(at));
    mix_commit();
    if (i < kPending) continue;
    mix_wait_read<kPending>();  // piece i - kPending has left its stage, which is filled again
    issue(i - kPending + kStages);
  }
  mix_wait_all();
}

// The same by vector loads and streaming stores, one CTA of kMixThreads per piece: many small CTAs keep more of both
// directions under way at once. Grid: pieces; no shared memory.
constexpr int kMixThreads = 256;

__device__ inline void mix_limit_vector(const u8* from, i64 bytes, u8* to, int writes, i64 more) {
  constexpr int kLoads = kMixPiece / 16 / kMixThreads;
  pdl_launch();
  float4 held[kLoads];
  const i64 first = i64(blockIdx.x) * kMixPiece + threadIdx.x * 16;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const i64 at = first + i * kMixThreads * 16;
    if (at < bytes) held[i] = *reinterpret_cast<const float4*>(from + at);
  }
  pdl_wait();
  for (int w = 0; w < writes + (first < more); ++w)
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const i64 at = first + i * kMixThreads * 16;
      if (at < bytes) store_streaming(reinterpret_cast<float*>(to + w * bytes + at), held[i]);
    }
}

}  // namespace twostep::measure
