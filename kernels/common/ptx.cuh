// One wrapper per PTX instruction, no logic. Memory order is said in words where it matters.
#pragma once

#include "common/types.cuh"

namespace twostep {

using SmemAddress = u32;
__device__ inline SmemAddress smem_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// True in one lane of the converged warp. The compiler then keeps that lane's addresses in uniform registers, which the
// copy instructions want.
__device__ inline bool elect_one() {
  u32 elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected != 0;
}

// The value of the first lane, which all lanes have: the compiler then keeps it in uniform registers.
__device__ inline int warp_uniform(int v) { return __shfl_sync(0xffffffffu, v, 0); }

// ---- Programmatic dependent launch

// Returns when the kernels before this one on the stream are complete and their writes are visible.
__device__ inline void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next kernel's CTAs start once every CTA of this grid has said so. Orders no memory.
__device__ inline void pdl_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- mbarrier (shared memory of this CTA)

__device__ inline void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy unit.
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Release: what this thread did before is visible to whom the completed phase is.
__device__ inline void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Orders this thread's accesses of shared memory before the copies that it, or who waits for it, then starts.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// One arrival, and `bytes` more that copies must bring before the phase completes.
__device__ inline void barrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// True when the phase of this parity is complete (acquire). May wait for a time that the hardware chooses.
__device__ inline bool barrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// Barrier number `id` (1..15) among `threads` threads of the CTA; orders their shared memory accesses.
__device__ inline void named_barrier(u32 id, u32 threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Counts as present at the barrier without waiting for the others.
__device__ inline void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Thread block cluster

__device__ inline u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Every thread of the cluster arrives (release), then waits (acquire).
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// The same without release: for what needs no fence or has its own, as barrier_init_fence(). A release would first wait
// for all memory accesses of the thread.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Arrives at the same barrier of CTA `rank` of the cluster. Release, cluster scope.
__device__ inline void barrier_arrive_remote(u32 barrier, u32 rank) {
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Writes the same shared memory of CTA `rank` of the cluster. Completes its bytes on that CTA's `barrier`, whose
// waiters then see the value; orders nothing else.
__device__ inline void store_cluster_float(u32 address, float v, u32 barrier, u32 rank) {
  asm volatile(
      "{ .reg .b32 remote, bar; mapa.shared::cluster.u32 remote, %0, %3; mapa.shared::cluster.u32 bar, %2, %3; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [remote], %1, [bar]; }" ::"r"(address),
      "f"(v), "r"(barrier), "r"(rank)
      : "memory");
}

__device__ inline void store_cluster_float4(u32 address, float4 v, u32 barrier, u32 rank) {
  asm volatile(
      "{ .reg .b32 remote, bar; mapa.shared::cluster.u32 remote, %0, %6; mapa.shared::cluster.u32 bar, %5, %6; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [remote], {%1, %2, %3, %4}, [bar]; }" ::"r"(
          address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier), "r"(rank)
      : "memory");
}

// ---- Asynchronous copies, global to shared, completing on a barrier of this CTA

// `bytes` contiguous bytes; both addresses and the size are multiples of 16.
__device__ inline void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// `bytes` from shared to global memory, both aligned to 16; fence_proxy_async() comes after the stores to `from`.
__device__ inline void bulk_store(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all that this thread committed lies in global memory; until shared memory has been read for it.
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// The same bytes to the same place of every CTA in `mask`, completing on the same barrier of each.
__device__ inline void bulk_load_multicast(u32 to, const void* from, u32 bytes, u32 barrier, u16 mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(mask)
      : "memory");
}
// One box of a 2-D tensor map, its corner at (column, row). Elements outside the matrix arrive as zero.
__device__ inline void tensor_load(u32 to, const void* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
__device__ inline void tensor_prefetch(const void* map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
               : "memory");
}
__device__ inline void tensor_map_prefetch(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The line of an address to L2.
__device__ inline void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// ---- Asynchronous copies by threads, global to shared

// 16 bytes; both addresses are multiples of 16. Zeros where it is not `valid`: nothing is read then.
__device__ inline void copy_async(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16u : 0u) : "memory");
}
// What this thread copied since the last commit becomes a group.
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for this thread's groups but the last kPending.
template <int kPending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Matrix operands

// Four 8 x 8 BF16 matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// The same with each matrix transposed: of rows that are its columns.
__device__ inline void load_matrices_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// Two 8 x 8 matrices of BF16 to rows that are their columns; lane i % 16 gives the address of column i % 8 of matrix
// i / 8.
__device__ inline void store_matrices_transposed(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}
// d[16 x 8] += a[16 x 16] * b[16 x 8], BF16 in, FP32 sums.
__device__ inline void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Memory that peers, or CTAs of this grid, write at the same time. Relaxed: each word is whole, nothing else is
// ordered by it; vectors may arrive word by word.

__device__ inline uint4 load_relaxed_sys(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ inline void store_relaxed_sys(uint4* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ inline u32 load_relaxed_sys(const u32* from) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
// Release, system scope: what this thread wrote or saw before is visible to who then reads the value.
__device__ inline void store_release_sys(u32* to, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ inline void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ inline u32 load_relaxed_gpu(const u32* from) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ inline u64 load_relaxed_gpu(const u64* from) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
__device__ inline void store_relaxed_gpu(u64* to, u64 v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}
// Both return the value before.
__device__ inline u32 atomic_add_relaxed_gpu(u32* to, u32 v) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(v) : "memory");
  return before;
}
__device__ inline u32 atomic_cas_relaxed_gpu(u32* to, u32 expected, u32 v) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(to), "r"(expected), "r"(v)
               : "memory");
  return before;
}
// Nanoseconds of a clock that all SMs share; ticks are up to a microsecond apart.
__device__ inline u64 global_timer() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ inline void sleep_ns(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// ---- Vector access and conversion

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }

__device__ inline float4 load_shared_float4(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ inline void store_shared_float4(u32 address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
__device__ inline void store_shared_float(u32 address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ inline void store_global_u32x2(void* to, u32 a, u32 b) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(a), "r"(b) : "memory");
}
// First to leave L2: for what the next kernels do not read.
__device__ inline void store_streaming(float* to, float4 v) {
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
// Two FP32 to BF16, each rounded once to nearest even; `low` in the lower half.
__device__ inline u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// The same as FP16.
__device__ inline u32 pack_f16(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ inline float f16_to_float(u16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
}
// 1 / v to within one unit in the last place. 0 for infinities and for what is larger than 2^126.
__device__ inline float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
// 2^v to within 2^-22 of it; 0 for -infinity and below -126.
__device__ inline float exp2_approx(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
__device__ inline u16 to_bf16(float v) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
}
__device__ inline float round_bf16(float v) { return __uint_as_float(u32(to_bf16(v)) << 16); }

}  // namespace twostep
