// Judges a result where it lies, so that nothing large is copied to the host.
//   buffer     `total` BF16 elements, all poisoned (kPoison) before the run; the result [m, n] begins at element
//              `offset`, rows `stride` apart
//   sum, magnitude [m, n] FP64   the reference; n columns apart
// Adds to *found, zeroed by the host. Grid: any, block 256.
#pragma once

namespace twostep::measure {

constexpr unsigned short kPoison = 0xffff;  // a NaN that no kernel of ours stores

// As ValueErrors of src/measure/values.h is made from.
struct Found {
  unsigned long long worst;  // bits of a non-negative FP64: largest |out - r| over its bound
  double difference;         // sum of (out - r)^2
  double norm;               // sum of r^2
  unsigned long long wrong;  // elements that are not the reference rounded once
  unsigned long long nans;
  unsigned long long outside;  // elements beside the result that were written
};

// To nearest even, once: through FP32 rounded to odd, so that no double rounding occurs.
__device__ inline unsigned short round_once(double v) {
  const float toward_zero = __double2float_rz(v);
  unsigned bits = __float_as_uint(toward_zero);
  if (double(toward_zero) != v) bits |= 1;
  return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
__device__ inline T warp_sum(T v) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

__device__ inline void compare(const unsigned short* buffer, long long total, long long offset, long long stride,
                               long long m, long long n, long long k, const double* sum, const double* magnitude,
                               Found* found) {
  double worst = 0, difference = 0, norm = 0;
  unsigned wrong = 0, nans = 0, outside = 0;
  const double slack = (double(k) / 8 + 64) * 0x1p-23;
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long e = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; e < total; e += threads) {
    const unsigned short bits = buffer[e];
    const long long row = e < offset ? -1 : (e - offset) / stride;
    const long long col = e < offset ? 0 : (e - offset) % stride;
    if (row < 0 || row >= m || col >= n) {
      outside += bits != kPoison;
      continue;
    }
    const double r = sum[row * n + col];
    const double out = double(__uint_as_float(unsigned(bits) << 16));
    wrong += bits != round_once(r) && !(out == 0 && r == 0);  // the sign of a zero is not promised
    norm += r * r;
    if (out != out) {
      ++nans;
      continue;
    }
    const double gap = fabs(out - r);
    const double bound = 0x1p-8 * fabs(r) + slack * magnitude[row * n + col];
    difference += gap * gap;
    if (gap > 0) worst = fmax(worst, gap / bound);
  }
  difference = warp_sum(difference);
  norm = warp_sum(norm);
  wrong = warp_sum(wrong);
  nans = warp_sum(nans);
  outside = warp_sum(outside);
  for (int step = 16; step > 0; step /= 2) worst = fmax(worst, __shfl_xor_sync(0xffffffffu, worst, step));
  if (threadIdx.x % 32 != 0) return;
  // Non-negative doubles are ordered as their bits are.
  atomicMax(&found->worst, static_cast<unsigned long long>(__double_as_longlong(worst)));
  atomicAdd(&found->difference, difference);
  atomicAdd(&found->norm, norm);
  atomicAdd(&found->wrong, static_cast<unsigned long long>(wrong));
  atomicAdd(&found->nans, static_cast<unsigned long long>(nans));
  atomicAdd(&found->outside, static_cast<unsigned long long>(outside));
}

}  // namespace twostep::measure
