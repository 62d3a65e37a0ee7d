// sum[i, j] = sum over k of x[i, k] * w[j, k], magnitude[i, j] = sum over k of |x[i, k] * w[j, k]|, in FP64.
//   x    [m, k] BF16, w [n, k] BF16   rows x_stride and w_stride elements apart, no alignment beyond 2 bytes
//   sum, magnitude [m, n] FP64        packed
// The oracle of every GPU product: straight from global memory, nothing shared with the kernels that it judges.
// Grid (n / kWarps, m / kRows), rounded up; block 32 * kWarps. A warp takes one row of w and kRows rows of x.
#pragma once

namespace twostep::measure {

constexpr int kReferenceWarps = 8;
constexpr int kReferenceRows = 8;

__device__ inline double widen(unsigned short bits) { return double(__uint_as_float(unsigned(bits) << 16)); }

__device__ inline void reference(const unsigned short* x, long long x_stride, const unsigned short* w,
                                 long long w_stride, long long m, long long n, long long k, double* sum,
                                 double* magnitude) {
  const int lane = threadIdx.x % 32;
  const long long j = static_cast<long long>(blockIdx.x) * kReferenceWarps + threadIdx.x / 32;
  const long long i0 = static_cast<long long>(blockIdx.y) * kReferenceRows;
  if (j >= n) return;
  double s[kReferenceRows] = {};
  double a[kReferenceRows] = {};
  for (long long c = lane; c < k; c += 32) {
    const double wc = widen(w[j * w_stride + c]);
#pragma unroll
    for (int i = 0; i < kReferenceRows; ++i) {
      if (i0 + i >= m) break;
      const double p = wc * widen(x[(i0 + i) * x_stride + c]);  // exact: 16 significant bits
      s[i] += p;
      a[i] += fabs(p);
    }
  }
#pragma unroll
  for (int i = 0; i < kReferenceRows; ++i) {
    for (int step = 16; step > 0; step /= 2) {
      s[i] += __shfl_xor_sync(0xffffffffu, s[i], step);
      a[i] += __shfl_xor_sync(0xffffffffu, a[i], step);
    }
    if (lane == 0 && i0 + i < m) {
      sum[(i0 + i) * n + j] = s[i];
      magnitude[(i0 + i) * n + j] = a[i];
    }
  }
}

}  // namespace twostep::measure
