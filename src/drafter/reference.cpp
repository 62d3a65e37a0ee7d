#include "drafter/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/bf16.h"
#include "core/hash.h"

namespace twostep {
namespace {

constexpr std::int64_t kMostProducts = std::int64_t{1} << 27;  // about a tenth of a second on two cores

// Strip i of `strips`, at a place that moves, so that no lane or tile position is always missed.
std::int64_t column_of(std::int64_t i, std::int64_t strips, std::int64_t n) {
  if (strips == n || i == 0) return i;
  if (i == strips - 1) return n - 1;
  const std::int64_t first = i * n / strips;
  const std::int64_t width = (i + 1) * n / strips - first;
  return first + static_cast<std::int64_t>(mix64(static_cast<std::uint64_t>(i)) % static_cast<std::uint64_t>(width));
}

}  // namespace

LinearError compare_linear(std::int64_t m, std::int64_t n, std::int64_t k, std::span<const std::uint16_t> x,
                           std::span<const std::uint16_t> out,
                           const std::function<void(std::int64_t, std::span<std::uint16_t>)>& read_row) {
  const std::int64_t columns = std::min(n, std::max<std::int64_t>(2, kMostProducts / std::max<std::int64_t>(m * k, 1)));
  std::vector<float> wide_x(x.size());
  std::transform(x.begin(), x.end(), wide_x.begin(), bf16_to_float);
  double error_square = 0;
  double square = 0;
  double worst = 0;
#pragma omp parallel reduction(+ : error_square, square) reduction(max : worst)
  {
    std::vector<std::uint16_t> row(static_cast<std::size_t>(k));
    std::vector<float> w(row.size());
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < columns; ++i) {
      const std::int64_t j = column_of(i, columns, n);
      read_row(j, row);
      std::transform(row.begin(), row.end(), w.begin(), bf16_to_float);
      for (std::int64_t r = 0; r < m; ++r) {
        const float* xr = wide_x.data() + r * k;
        double sum = 0;
        double absolute = 0;
#pragma omp simd reduction(+ : sum, absolute)
        for (std::int64_t c = 0; c < k; ++c) {
          const double product = static_cast<double>(xr[c]) * static_cast<double>(w[static_cast<std::size_t>(c)]);
          sum += product;
          absolute += std::fabs(product);
        }
        const double got = bf16_to_float(out[static_cast<std::size_t>(r * n + j)]);
        const double error = std::fabs(got - sum);
        const double bound = 0x1p-8 * std::fabs(sum) + (static_cast<double>(k) / 8 + 64) * 0x1p-23 * absolute;
        error_square += error * error;
        square += sum * sum;
        // A comparison with NaN is false and would be lost in a maximum.
        const double share = error == 0 ? 0 : error / bound;
        worst = std::max(worst, std::isfinite(share) ? share : std::numeric_limits<double>::infinity());
      }
    }
  }
  const double relative = error_square == 0 ? 0 : std::sqrt(error_square / square);
  return {relative, worst, columns, m * columns};
}

}  // namespace twostep
