// For tests of a law: how likely counts are that lie as far from it as these.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace twostep::test {

// The p of Pearson's chi-square, by the cube root of Wilson and Hilferty. Cells expected less than 5 times are one
// cell. 0 where something was seen that the law excludes.
inline double chi_square_p(const std::vector<std::int64_t>& counts, const std::vector<double>& law) {
  double total = 0;
  for (const std::int64_t count : counts) total += static_cast<double>(count);
  double statistic = 0, rest = 0, rest_expected = 0;
  int cells = 0;
  const auto add = [&](double seen, double expected) {
    statistic += (seen - expected) * (seen - expected) / expected;
    ++cells;
  };
  for (std::size_t i = 0; i < law.size(); ++i) {
    const double seen = static_cast<double>(counts[i]), expected = total * law[i];
    if (expected == 0 && seen > 0) return 0;
    if (expected >= 5) {
      add(seen, expected);
    } else {
      rest += seen;
      rest_expected += expected;
    }
  }
  if (rest_expected >= 5) add(rest, rest_expected);
  if (cells < 2) return 1;
  const double freedom = cells - 1, spread = 2 / (9 * freedom);
  return std::erfc((std::cbrt(statistic / freedom) - 1 + spread) / std::sqrt(2 * spread)) / 2;
}

}  // namespace twostep::test
