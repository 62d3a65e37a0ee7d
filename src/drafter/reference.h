// The FP64 reference of one linear, and the bounds that its BF16 result must keep (spec: draft-gemm 1.4).
#pragma once

#include <cstdint>
#include <functional>
#include <span>

namespace twostep {

struct LinearError {
  double relative_norm = 0;   // ||out - r|| / ||r|| over the columns compared; at most 2.0e-3 from kNormElements on
  double worst_of_bound = 0;  // largest |out - r| over its bound 2^-8 |r| + (K/8 + 64) 2^-23 S; at most 1
  std::int64_t columns = 0;   // columns compared, each for all rows of x
  std::int64_t elements = 0;  // rows * columns

  // The norm of fewer outputs is luck: correct rounding alone exceeds the limit now and then.
  static constexpr std::int64_t kNormElements = 2048;
  // A NaN is not ok: in out it makes worst_of_bound infinite.
  bool ok() const { return worst_of_bound <= 1.0 && (elements < kNormElements || relative_norm <= 2.0e-3); }
};

// Compares out [m, n] with x [m, k] * weight^T in FP64, both packed BF16. All columns where m * n * k allows it,
// else a fixed sample: one from each of equal strips, first and last column included. `read_row(j, row)` copies
// row j of the weight; it is called from several threads.
LinearError compare_linear(std::int64_t m, std::int64_t n, std::int64_t k, std::span<const std::uint16_t> x,
                           std::span<const std::uint16_t> out,
                           const std::function<void(std::int64_t, std::span<std::uint16_t>)>& read_row);

}  // namespace twostep
