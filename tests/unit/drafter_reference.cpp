#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "core/bf16.h"
#include "drafter/reference.h"
#include "io/synth.h"

namespace twostep {
namespace {

struct Product {
  std::int64_t m, n, k;
  std::vector<std::uint16_t> x, w, out;

  Product(std::int64_t rows, std::int64_t features, std::int64_t width, std::uint64_t seed = 1)
      : m(rows), n(features), k(width) {
    x.resize(static_cast<std::size_t>(m * k));
    w.resize(static_cast<std::size_t>(n * k));
    out.resize(static_cast<std::size_t>(m * n));
    fill("x", seed, 0, ValueKind::kFeature, 0, x);
    fill("w", seed, 0, ValueKind::kLinear, k, w);
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t j = 0; j < n; ++j) {
        long double sum = 0;
        for (std::int64_t c = 0; c < k; ++c)
          sum += static_cast<long double>(bf16_to_float(x[static_cast<std::size_t>(i * k + c)])) *
                 bf16_to_float(w[static_cast<std::size_t>(j * k + c)]);
        out[static_cast<std::size_t>(i * n + j)] = double_to_bf16(static_cast<double>(sum));
      }
  }
  LinearError compare() const {
    return compare_linear(m, n, k, x, out, [&](std::int64_t row, std::span<std::uint16_t> to) {
      std::copy_n(w.begin() + row * k, k, to.begin());
    });
  }
};

TEST(drafter_reference, a_correctly_rounded_product_is_within_the_bounds) {
  const LinearError error = Product(12, 200, 160).compare();
  EXPECT_TRUE(error.ok()) << error.relative_norm << " " << error.worst_of_bound;
  EXPECT_EQ(error.columns, 200);
  EXPECT_GT(error.relative_norm, 1e-3) << "rounding to BF16 alone gives 1.66e-3";
}

TEST(drafter_reference, the_norm_of_few_outputs_is_no_verdict) {
  double largest = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    const LinearError error = Product(1, 8, 64, seed).compare();
    EXPECT_TRUE(error.ok()) << "seed " << seed << ": " << error.relative_norm << " " << error.worst_of_bound;
    EXPECT_EQ(error.elements, 8);
    largest = std::max(largest, error.relative_norm);
  }
  EXPECT_GT(largest, 2.0e-3) << "no seed shows why";

  EXPECT_FALSE((LinearError{2.1e-3, 0.9, 1024, 2048}).ok());
  EXPECT_FALSE((LinearError{std::numeric_limits<double>::quiet_NaN(), 0.9, 1024, 2048}).ok());
  EXPECT_FALSE((LinearError{0, std::numeric_limits<double>::quiet_NaN(), 8, 8}).ok());
}

TEST(drafter_reference, one_wrong_value_is_found) {
  for (const float wrong :
       {0.5f, -3.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Product product(3, 200, 160);
    std::uint16_t& value = product.out[417];
    value = float_to_bf16(bf16_to_float(value) + wrong);
    EXPECT_FALSE(product.compare().ok()) << wrong;
  }
}

TEST(drafter_reference, a_sample_of_columns_has_the_first_and_the_last) {
  constexpr std::int64_t kN = 40000, kK = 16384;  // more products than are compared
  std::vector<std::uint16_t> x(kK), out(kN, float_to_bf16(0));
  fill("x", 1, 0, ValueKind::kFeature, 0, x);
  const auto zero_rows = [](std::int64_t, std::span<std::uint16_t> to) { std::fill(to.begin(), to.end(), 0); };
  LinearError error = compare_linear(1, kN, kK, x, out, zero_rows);
  EXPECT_TRUE(error.ok());
  EXPECT_LT(error.columns, kN);
  EXPECT_GT(error.columns, 1000);
  for (const std::int64_t edge : {std::int64_t{0}, kN - 1}) {
    out.assign(out.size(), float_to_bf16(0));
    out[static_cast<std::size_t>(edge)] = float_to_bf16(1);
    EXPECT_FALSE(compare_linear(1, kN, kK, x, out, zero_rows).ok()) << "column " << edge;
  }
}

}  // namespace
}  // namespace twostep
