#include "core/bf16.h"
#include "tests/unit/gemm_oracle.h"

namespace twostep {
namespace {

bool same_value(std::uint16_t got, double want) {
  const double value = oracle::decode(got);
  return std::isnan(want) ? std::isnan(value) : value == want && std::signbit(value) == std::signbit(want);
}

TEST(CoreBf16, every_pattern_survives_the_way_to_float_and_back) {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const float value = bf16_to_float(pattern);
    ASSERT_TRUE(same_value(pattern, value)) << bits;
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(bf16_to_float(float_to_bf16(value)))) << bits;
    } else {
      ASSERT_EQ(float_to_bf16(value), pattern);
    }
  }
}

TEST(CoreBf16, borders_between_neighbours_round_to_even) {
  for (std::uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const double low = oracle::decode(static_cast<std::uint16_t>(bits));
    // Above the largest value the next would be 2^128.
    const double high = bits == 0x7f7f ? std::ldexp(1.0, 128) : oracle::decode(static_cast<std::uint16_t>(bits + 1));
    const double middle = (low + high) / 2;
    for (double value : {middle, std::nextafter(middle, 0.0), std::nextafter(middle, HUGE_VAL)}) {
      ASSERT_TRUE(same_value(double_to_bf16(value), oracle::nearest_bf16(value))) << value;
      ASSERT_TRUE(same_value(double_to_bf16(-value), oracle::nearest_bf16(-value))) << -value;
      const auto single = static_cast<float>(value);
      ASSERT_TRUE(same_value(float_to_bf16(single), oracle::nearest_bf16(single))) << single;
    }
  }
}

TEST(CoreBf16, one_rounding_from_double) {
  SCOPED_TRACE(oracle::replay());
  std::mt19937_64 random(oracle::seed());
  for (int i = 0; i < 2'000'000; ++i) {
    const std::uint64_t fraction = random() >> 12;
    // Few bits set make ties and near-ties of FP32 and BF16 likely.
    const std::uint64_t sparse = fraction & random() & random() & random() & random() & 0xfffffffffffffull;
    const double value = std::ldexp(1.0 + static_cast<double>(i % 2 ? sparse : fraction) / 0x1p52,
                                    std::uniform_int_distribution<int>(-160, 129)(random));
    ASSERT_TRUE(same_value(double_to_bf16(value), oracle::nearest_bf16(value))) << std::hexfloat << value;
    ASSERT_TRUE(same_value(double_to_bf16(-value), oracle::nearest_bf16(-value))) << std::hexfloat << value;
  }
}

TEST(CoreBf16, special_values_stay_special) {
  const double inf = HUGE_VAL;
  for (double value : {0.0, -0.0, inf, -inf, std::nan(""), 1e300, -1e300, 1e-300}) {
    EXPECT_TRUE(same_value(double_to_bf16(value), oracle::nearest_bf16(value))) << value;
  }
}

}  // namespace
}  // namespace twostep
