// What device text of kernels/draft, kernels/gather and kernels/kda uses of kernels/common/ptx.cuh and of the compiler,
// for the emulator.
#pragma once

#include <math.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <vector>

#include "common/types.cuh"
#include "core/bf16.h"
#include "tests/emulate/emulator.h"

#define __device__
#define __shared__ static
#define threadIdx twostep::emulate::thread
#define blockIdx twostep::emulate::block
#define gridDim twostep::emulate::grid

using std::isinf;
using std::isnan;

struct float2 {
  float x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline void __syncwarp() { twostep::emulate::warp_barrier(); }
inline void __syncthreads() { twostep::emulate::cta_barrier(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return twostep::emulate::exchange(value, threadIdx.x % 32 ^ static_cast<unsigned>(mask));
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return twostep::emulate::exchange(value, static_cast<unsigned>(lane) % 32);
}
inline bool __any_sync(unsigned, bool value) {
  twostep::emulate::publish(&value, sizeof value);
  twostep::emulate::warp_barrier();
  bool any = false;
  for (unsigned lane = 0; lane < 32; ++lane) any |= *static_cast<const bool*>(twostep::emulate::published(lane));
  twostep::emulate::warp_barrier();
  return any;
}
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
inline unsigned atomicAdd(unsigned* to, unsigned v) {
  const unsigned before = *to;
  *to += v;
  return before;
}
inline int atomicOr(int* to, int bits) {
  const int before = *to;
  *to |= bits;
  return before;
}

inline int atomicMin(int* to, int value) {
  const int before = *to;
  *to = std::min(before, value);
  return before;
}

namespace twostep {

using SmemAddress = std::uintptr_t;
inline SmemAddress smem_address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }
inline void pdl_wait() {
  if (!emulate::pdl_wait_is_skipped) emulate::wait_for_predecessors();
}
inline void pdl_launch() { emulate::let_successor_start(); }
inline int warp_uniform(int v) { return v; }
inline float exp2_approx(float v) { return std::exp2(v); }
inline float reciprocal(float v) { return 1 / v; }
inline float infinity() { return __uint_as_float(0x7f800000u); }
inline u16 to_bf16(float v) { return float_to_bf16(v); }
inline float round_bf16(float v) { return bf16_to_float(float_to_bf16(v)); }
inline u32 pack_bf16(float low, float high) { return u32{to_bf16(low)} | u32{to_bf16(high)} << 16; }

// FP16, rounded to nearest even.
inline u16 to_f16(float v) {
  const u16 sign = std::signbit(v) ? 0x8000 : 0;
  const float a = std::abs(v);
  if (std::isnan(v)) return 0x7fff;
  if (a >= 65520) return sign | 0x7c00;
  const int exponent = a < 0x1p-14f ? -15 : std::ilogb(a);
  // A significand that rounds up to the next power of two carries into the exponent.
  const auto bits = exponent < -14 ? int(std::nearbyint(std::ldexp(a, 24)))
                                   : ((exponent + 15) << 10) + int(std::nearbyint(std::ldexp(a, 10 - exponent))) - 1024;
  return sign | static_cast<u16>(bits);
}
inline u32 pack_f16(float low, float high) { return u32{to_f16(low)} | u32{to_f16(high)} << 16; }
inline float f16_to_float(u16 v) {
  const int exponent = v >> 10 & 31, significand = v & 1023;
  const float a = exponent == 31  ? (significand != 0 ? std::nanf("") : infinity())
                  : exponent == 0 ? std::ldexp(float(significand), -24)
                                  : std::ldexp(float(1024 + significand), exponent - 25);
  return v >> 15 != 0 ? -a : a;
}

// Among `threads` threads of the CTA.
inline void named_barrier(u32 id, u32 threads) {
  struct Barrier {
    u32 there = 0, phase = 0;
  };
  static std::map<std::pair<void*, u32>, Barrier> of_ctas;
  Barrier& barrier = of_ctas[{emulate::cta_memory(), id}];
  const u32 phase = barrier.phase;
  if (++barrier.there == threads) {
    barrier.there = 0;
    ++barrier.phase;
  }
  while (barrier.phase == phase) emulate::give_way();
}

// Memory that others write: vectors come and go word by word, and anybody may run in between.
inline void meanwhile() {
  if (emulate::drawn(4) == 0) emulate::give_way();
  if (emulate::drawn(256) == 0)  // a stall, in which others may get far ahead
    for (int i = 0; i < 100; ++i) emulate::give_way();
}
inline u32 load_relaxed_sys(const u32* from) {
  meanwhile();
  return *from;
}
inline uint4 load_relaxed_sys(const uint4* from) {
  emulate::give_way();
  uint4 v;
  v.x = from->x;
  v.y = from->y;
  meanwhile();
  v.z = from->z;
  v.w = from->w;
  return v;
}
inline void store_relaxed_sys(uint4* to, uint4 v) {
  meanwhile();
  to->w = v.w;
  meanwhile();
  to->x = v.x;
  to->y = v.y;
  to->z = v.z;
}
inline void store_release_sys(u32* to, u32 v) { *to = v; }
inline void fence_sys() {}
inline u32 load_relaxed_gpu(const u32* from) { return *from; }
inline u64 load_relaxed_gpu(const u64* from) {
  meanwhile();
  return *from;
}
inline void store_relaxed_gpu(u64* to, u64 v) {
  meanwhile();
  *to = v;
}
inline u32 atomic_add_relaxed_gpu(u32* to, u32 v) {
  meanwhile();
  const u32 before = *to;
  *to += v;
  return before;
}
inline u32 atomic_cas_relaxed_gpu(u32* to, u32 expected, u32 v) {
  const u32 before = *to;
  if (before == expected) *to = v;
  return before;
}
inline u64 global_timer() { return emulate::clock_ns(); }
inline void sleep_ns(u32) { emulate::give_way(); }
inline void prefetch_l2(const void*) {}

// A barrier in shared memory. Its copies arrive at the last moment: in the wait.
struct Barrier {
  struct Copy {
    std::uintptr_t to;
    const void* from;
    u32 bytes;
  };
  u32 arrivals = 0, arrived = 0, phase = 0;
  i64 expected = 0;
  std::vector<Copy> under_way;
};
inline std::map<std::uintptr_t, Barrier> barriers;
inline void barrier_init(std::uintptr_t barrier, u32 arrivals) { barriers[barrier] = {arrivals, 0, 0, 0, {}}; }
inline void barrier_init_fence() {}
inline void fence_proxy_async() {}
inline void barrier_arrive(std::uintptr_t barrier) { ++barriers.at(barrier).arrived; }
inline void barrier_arrive_expect(std::uintptr_t barrier, u32 bytes) {
  barriers.at(barrier).expected += bytes;
  barrier_arrive(barrier);
}
inline void bulk_load(std::uintptr_t to, const void* from, u32 bytes, std::uintptr_t barrier) {
  barriers.at(barrier).under_way.push_back({to, from, bytes});
}
inline bool barrier_try_wait(std::uintptr_t barrier, u32 parity) {
  emulate::give_way();
  Barrier& b = barriers.at(barrier);
  if (b.phase % 2 != parity) return true;
  if (b.arrived != b.arrivals) return false;
  for (const auto& copy : b.under_way) {
    std::memcpy(reinterpret_cast<void*>(copy.to), copy.from, copy.bytes);
    b.expected -= copy.bytes;
  }
  b.under_way.clear();
  if (b.expected != 0) return false;
  b.arrived = 0;
  ++b.phase;
  return true;
}

// Of a kernel; false if a CTA ended before what it awaits had come.
inline bool all_copies_landed() {
  const bool landed = std::all_of(barriers.begin(), barriers.end(), [](const auto& one) {
    return one.second.under_way.empty() && one.second.expected == 0;
  });
  barriers.clear();
  return landed;
}

inline bool elect_one() { return threadIdx.x % 32 == 0; }
inline float4 load_shared_float4(std::uintptr_t from) { return *reinterpret_cast<const float4*>(from); }
inline void store_shared_float4(std::uintptr_t to, float4 v) { *reinterpret_cast<float4*>(to) = v; }
inline void store_streaming(float* to, float4 v) { *reinterpret_cast<float4*>(to) = v; }

// Copies to global memory: read when their thread waits for that, written when it waits for all, else when end_copies()
// is called, the last one first.
struct CopyOut {
  void* to;
  std::uintptr_t from;
  u32 bytes;
  std::vector<std::byte> read = {};
};
inline std::map<std::pair<void*, unsigned>, std::vector<CopyOut>> copies_out;  // by CTA and thread
inline std::vector<CopyOut>& own_copies_out() { return copies_out[{emulate::cta_memory(), threadIdx.x}]; }
inline void write_copies(std::vector<CopyOut>& copies) {
  for (auto copy = copies.rbegin(); copy != copies.rend(); ++copy)
    std::memcpy(copy->to, copy->read.data(), copy->bytes);
  copies.clear();
}
inline void bulk_store(void* to, std::uintptr_t from, u32 bytes) { own_copies_out().push_back({to, from, bytes}); }
inline void bulk_commit() {}
inline void bulk_wait_read() {
  for (CopyOut& copy : own_copies_out())
    if (copy.read.empty())
      copy.read.assign(reinterpret_cast<const std::byte*>(copy.from),
                       reinterpret_cast<const std::byte*>(copy.from) + copy.bytes);
}
inline void bulk_wait() {
  bulk_wait_read();
  write_copies(own_copies_out());
}
// Of a kernel; false if a thread ended before its copies were read.
inline bool end_copies() {
  bool all_read = true;
  for (auto& [thread, copies] : copies_out) {
    for (const CopyOut& copy : copies) all_read &= !copy.read.empty();
    if (all_read) write_copies(copies);
  }
  copies_out.clear();
  return all_read;
}

// A cluster: `cluster_size` neighbouring CTAs, all under way at once.
inline unsigned cluster_size = 1;
struct Cluster {
  unsigned arrived = 0;
  std::map<unsigned, std::uintptr_t> memory;  // of each rank
};
inline std::map<unsigned, Cluster> clusters;
inline Cluster& own_cluster() { return clusters[blockIdx.x / cluster_size]; }
inline void cluster_arrive() {
  ++own_cluster().arrived;
  own_cluster().memory[blockIdx.x % cluster_size] = reinterpret_cast<std::uintptr_t>(emulate::cta_memory());
}
// Once in a kernel, by `threads` of each CTA.
inline unsigned cluster_threads = 0;
inline void cluster_wait() {
  while (own_cluster().arrived < cluster_size * cluster_threads) emulate::give_way();
}
inline void store_cluster_float(std::uintptr_t address, float v, std::uintptr_t barrier, u32 rank) {
  const auto mine = reinterpret_cast<std::uintptr_t>(emulate::cta_memory()), of_rank = own_cluster().memory.at(rank);
  *reinterpret_cast<float*>(address - mine + of_rank) = v;
  barriers.at(barrier - mine + of_rank).expected -= 4;
}

// Copies by threads are there at once.
inline void copy_async(std::uintptr_t to, const void* from, bool valid) {
  if (valid) std::memcpy(reinterpret_cast<void*>(to), from, 16);
  else std::memset(reinterpret_cast<void*>(to), 0, 16);
}
inline void copy_async_commit() {}
template <int kPending>
void copy_async_wait() {}

// Fragments as the PTX manual lays them out: lane 4 * g + t holds elements 2t, 2t + 1 of row g of each 8 x 8 matrix.
inline void load_matrices(u32 (&r)[4], std::uintptr_t address) {
  const unsigned lane = threadIdx.x % 32;
  emulate::publish(&address, sizeof address);
  emulate::warp_barrier();
  for (unsigned m = 0; m < 4; ++m) {
    const auto row = *static_cast<const std::uintptr_t*>(emulate::published(8 * m + lane / 4));
    std::memcpy(&r[m], reinterpret_cast<const std::byte*>(row) + 4 * (lane % 4), 4);
  }
  emulate::warp_barrier();
}
inline void load_matrices_transposed(u32 (&r)[4], std::uintptr_t address) {
  const unsigned lane = threadIdx.x % 32;
  emulate::publish(&address, sizeof address);
  emulate::warp_barrier();
  for (unsigned m = 0; m < 4; ++m) {
    u16 pair[2];
    for (unsigned i = 0; i < 2; ++i) {
      const auto row = *static_cast<const std::uintptr_t*>(emulate::published(8 * m + 2 * (lane % 4) + i));
      std::memcpy(&pair[i], reinterpret_cast<const std::byte*>(row) + 2 * (lane / 4), 2);
    }
    r[m] = u32{pair[0]} | u32{pair[1]} << 16;
  }
  emulate::warp_barrier();
}
inline void store_matrices_transposed(std::uintptr_t address, u32 a, u32 b) {
  const unsigned lane = threadIdx.x % 32;
  emulate::publish(&address, sizeof address);
  emulate::warp_barrier();
  const u32 mine[2] = {a, b};
  for (unsigned m = 0; m < 2; ++m)
    for (unsigned i = 0; i < 2; ++i) {
      const auto column = *static_cast<const std::uintptr_t*>(emulate::published(8 * m + 2 * (lane % 4) + i));
      const auto bits = static_cast<u16>(mine[m] >> 16 * i);
      std::memcpy(reinterpret_cast<std::byte*>(column) + 2 * (lane / 4), &bits, 2);
    }
  emulate::warp_barrier();
}
inline void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Operands {
    u32 a[4], b[2];
  };
  const Operands mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const unsigned lane = threadIdx.x % 32;
  emulate::publish(&mine, sizeof mine);
  emulate::warp_barrier();
  const auto half = [](u32 two, unsigned odd) { return bf16_to_float(static_cast<u16>(odd ? two >> 16 : two)); };
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const auto* of_row = static_cast<const Operands*>(emulate::published(row % 8 * 4 + k % 8 / 2));
      const auto* of_column = static_cast<const Operands*>(emulate::published(column * 4 + k % 8 / 2));
      d[i] += half(of_row->a[row / 8 + k / 8 * 2], k % 2) * half(of_column->b[k / 8], k % 2);
    }
  }
  emulate::warp_barrier();
}

}  // namespace twostep
