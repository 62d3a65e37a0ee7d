// What a product must be, in FP64, independent of src/: own rounding, own decoding, own checks.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "twostep/tensor.h"

namespace twostep::oracle {

// Nearest BF16, ties to even: 8 significant bits, exponents from -126, multiples of 2^-133 below.
inline double nearest_bf16(double value) {
  if (!std::isfinite(value) || value == 0) return value;
  const int exponent = std::max(std::ilogb(value), -126);
  const double unit = std::ldexp(1.0, exponent - 7);
  const double rounded = std::nearbyint(value / unit) * unit;
  return std::abs(rounded) >= std::ldexp(1.0, 128) ? std::copysign(HUGE_VAL, rounded) : rounded;
}

inline double decode(std::uint16_t bits) {
  static const std::vector<double> values = [] {
    std::vector<double> table;
    for (int b = 0; b <= 0xffff; ++b) {
      const int exponent = (b >> 7) & 0xff;
      const int fraction = b & 0x7f;
      const double sign = (b & 0x8000) ? -1 : 1;
      if (exponent == 0xff) table.push_back(fraction ? std::nan("") : sign * HUGE_VAL);
      else if (exponent == 0) table.push_back(sign * std::ldexp(fraction, -133));
      else table.push_back(sign * std::ldexp(128 + fraction, exponent - 134));
    }
    return table;
  }();
  return values[bits];
}

// Of a value that is a BF16.
inline std::uint16_t encode(double value) {
  const auto single = static_cast<float>(value);
  std::uint32_t bits;
  std::memcpy(&bits, &single, 4);
  return static_cast<std::uint16_t>(bits >> 16);
}

// TWOSTEP_TEST_SEED replays a failure.
inline std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const char* given = std::getenv("TWOSTEP_TEST_SEED");
    return given ? std::strtoull(given, nullptr, 10) : std::uint64_t{std::random_device{}()};
  }();
  return value;
}
inline std::string replay() { return "replay with TWOSTEP_TEST_SEED=" + std::to_string(seed()); }

inline constexpr std::uint16_t kPoison = 0x7fa5;  // a NaN that no product returns

// So that a copy of a buffer is aligned as the buffer.
template <class T>
struct OnCacheLine {
  using value_type = T;
  OnCacheLine() = default;
  template <class U>
  OnCacheLine(const OnCacheLine<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, std::size_t) { ::operator delete (p, std::align_val_t{64}); }
  friend bool operator==(const OnCacheLine&, const OnCacheLine&) { return true; }
};

// A matrix in a buffer of poison: guards before and after, gaps between the rows.
struct Buffer {
  std::int64_t rows, cols, stride, offset;
  std::vector<std::uint16_t, OnCacheLine<std::uint16_t>> bits;

  // `offset` elements past a 64-byte border.
  Buffer(std::int64_t rows_, std::int64_t cols_, std::int64_t stride_ = 0, std::int64_t offset_ = 0)
      : rows(rows_), cols(cols_), stride(stride_ ? stride_ : cols_), offset(offset_) {
    bits.assign(static_cast<std::size_t>(kGuard * 2 + offset + rows * stride + cols), kPoison);
  }
  std::uint16_t* data() { return bits.data() + kGuard + offset; }
  std::uint16_t& at(std::int64_t i, std::int64_t j) { return data()[i * stride + j]; }
  TensorView view() { return TensorView::matrix(data(), rows, cols, Device::cpu(), stride); }

  template <class Draw>
  Buffer& fill(Draw&& draw) {
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < cols; ++j) at(i, j) = encode(nearest_bf16(draw()));
    return *this;
  }
  // All but the matrix is still poison.
  bool guards_whole() {
    std::vector<bool> inside(bits.size(), false);
    const std::int64_t first = data() - bits.data();
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < cols; ++j) inside[static_cast<std::size_t>(first + i * stride + j)] = true;
    for (std::size_t index = 0; index < bits.size(); ++index)
      if (!inside[index] && bits[index] != kPoison) return false;
    return true;
  }
  bool all_poison() {
    for (auto b : bits)
      if (b != kPoison) return false;
    return true;
  }
  static constexpr std::int64_t kGuard = 64;
};

struct Product {
  double sum = 0;        // exact for integers, FP64 else
  double magnitude = 0;  // sum of |x w|
};

inline Product product(Buffer& x, std::int64_t i, Buffer& w, std::int64_t j) {
  Product p;
  for (std::int64_t k = 0; k < x.cols; ++k) {
    const double term = decode(x.at(i, k)) * decode(w.at(j, k));
    p.sum += term;
    p.magnitude += std::abs(term);
  }
  return p;
}

// Bit for bit; for data whose sums are exact in FP32. w is [N, K], out [M, N].
inline void expect_exact(Buffer& x, Buffer& w, Buffer& out) {
  for (std::int64_t i = 0; i < x.rows; ++i) {
    for (std::int64_t j = 0; j < w.rows; ++j) {
      const double want = nearest_bf16(product(x, i, w, j).sum);
      ASSERT_EQ(decode(out.at(i, j)), want)
          << "row " << i << " column " << j << " of " << x.rows << " x " << w.rows << ", K = " << x.cols;
    }
  }
  ASSERT_TRUE(out.guards_whole());
}

// The bounds of 1.4 (a) and, where the data are normal, (b).
inline void expect_close(Buffer& x, Buffer& w, Buffer& out, bool normal_data) {
  double error = 0, total = 0;
  for (std::int64_t i = 0; i < x.rows; ++i) {
    for (std::int64_t j = 0; j < w.rows; ++j) {
      const Product want = product(x, i, w, j);
      const double got = decode(out.at(i, j));
      const double bound =
          std::ldexp(std::abs(want.sum), -8) + (static_cast<double>(x.cols) / 8 + 64) * std::ldexp(want.magnitude, -23);
      ASSERT_LE(std::abs(got - want.sum), bound) << "row " << i << " column " << j;
      error += (got - want.sum) * (got - want.sum);
      total += want.sum * want.sum;
    }
  }
  if (normal_data) {
    ASSERT_LE(std::sqrt(error / total), 2.0e-3);
  }
  ASSERT_TRUE(out.guards_whole());
}

inline auto small_integers(std::mt19937_64& random) {
  return [&random] { return static_cast<double>(std::uniform_int_distribution<int>(-4, 4)(random)); };
}
inline auto normals(std::mt19937_64& random) {
  return [&random] { return std::normal_distribution<double>()(random); };
}

}  // namespace twostep::oracle
