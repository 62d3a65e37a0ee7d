// Warpgroup matrix instructions of sm_90a: one wrapper per instruction, no logic.
#pragma once

#include "common/ptx.cuh"

namespace twostep {

// Registers of sums that were written since the last multiply may be used by the next one.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Keeps the compiler from moving writes and reads of sums across, into the multiplies: it would wait for each of them.
template <int kSums>
__device__ inline void wgmma_fence(float (&d)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// The multiplies of this warpgroup since the last commit form a group.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All groups but the last kPending are complete: their sums may be read, their operands overwritten.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A K-major operand in shared memory: rows of 128 bytes with the 128-byte swizzle, groups of 8 rows 1024 bytes apart.
// The address is a multiple of 1024, plus 32 bytes for each step of 16 columns.
__device__ inline u64 wgmma_operand(u32 address) {
  constexpr u64 kSwizzle128 = u64(1) << 62, kGroupPitch = u64(1024 / 16) << 32, kUnused = u64(1) << 16;
  return kSwizzle128 | kGroupPitch | kUnused | ((address & 0x3ffff) >> 4);
}

// The operand some bytes further on: the low word alone changes, so that the other one stays a constant.
__device__ inline u64 wgmma_further(u64 operand, int bytes) {
  return (operand & 0xffffffff00000000) | u32(u32(operand) + u32(bytes >> 4));
}

// d[64 x N] += a[64 x 16] * b[N x 16]^T, N = twice the floats of d; BF16 in, FP32 sums. Asynchronous.
__device__ inline void wgmma(float (&d)[4], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "l"(a), "l"(b));
}
__device__ inline void wgmma(float (&d)[8], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b));
}
__device__ inline void wgmma(float (&d)[16], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b));
}
template <int kColumnsOfA = 0>
__device__ inline void wgmma(float (&d)[24], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, %24, %25, 1, 1, 1, %26, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
      : "l"(a), "l"(b), "n"(kColumnsOfA));
}
template <int kColumnsOfA = 0>
__device__ inline void wgmma(float (&d)[32], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
      "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "
      "%31}, %32, %33, 1, 1, 1, %34, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "n"(kColumnsOfA));
}

// The same with `a` in columns: [16 x 64], each row 128 bytes with the 128-byte swizzle. Its operand is that of rows;
// the address is a multiple of 1024: 2048 bytes for each step of 16.
template <int kSums>
__device__ inline void wgmma_columns(float (&d)[kSums], u64 a, u64 b) {
  wgmma<1>(d, a, b);
}

}  // namespace twostep
