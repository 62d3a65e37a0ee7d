// The FP64 reference of one linear, and the bounds that its BF16 result must keep (spec: draft-gemm 1.4).
#pragma once

#include <cstdint>
#include <functional>
#include <span>

namespace twostep {

struct LinearError {
  double relative_norm = 0;   // ||out - r|| / ||r|| over the columns compared; at most 2.0e-3
  double worst_of_bound = 0;  // largest |out - r| over its bound 2^-8 |r| + (K/8 + 64) 2^-23 S; at most 1
  std::int64_t columns = 0;   // columns compared, each for all rows of x
  bool ok() const { return relative_norm <= 2.0e-3 && worst_of_bound <= 1.0; }  // a NaN is not ok
};

// Compares out [m, n] with x [m, k] * weight^T in FP64, both packed BF16. All columns where m * n * k allows it,
// else a fixed sample: one from each of equal strips, first and last column included. `read_row(j, row)` copies
// row j of the weight; it is called from several threads.
LinearError compare_linear(std::int64_t m, std::int64_t n, std::int64_t k, std::span<const std::uint16_t> x,
                           std::span<const std::uint16_t> out,
                           const std::function<void(std::int64_t, std::span<std::uint16_t>)>& read_row);

}  // namespace twostep
