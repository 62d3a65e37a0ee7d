// Each instruction set of the CPU backend against the FP64 oracle.
#include "gemm/cpu_kernels.h"
#include "tests/unit/gemm_oracle.h"

namespace twostep {
namespace {

using oracle::Buffer;

CpuGemm gemm_of(Buffer& x, Buffer& w, Buffer& out) {
  return {x.data(), x.stride, w.data(), w.stride, false, out.data(), out.stride, x.rows, w.rows, w.cols};
}

Buffer run(const CpuPath& path, Buffer& x, Buffer& w, int threads = 2) {
  Buffer out(x.rows, w.rows);
  cpu_gemm(path, gemm_of(x, w, out), threads);
  return out;
}

class GemmPath : public testing::TestWithParam<const CpuPath*> {
 protected:
  const CpuPath& path = *GetParam();
  std::mt19937_64 random{oracle::seed()};
  testing::ScopedTrace trace{__FILE__, __LINE__, oracle::replay()};
};

std::vector<const CpuPath*> all_paths() {
  std::vector<const CpuPath*> paths;
  for (const CpuPath& path : cpu_paths()) paths.push_back(&path);
  return paths;
}
std::string test_name(const testing::TestParamInfo<const CpuPath*>& path) {
  std::string name;
  for (const char* c = path.param->name; *c; ++c) name += *c == '+' ? 'p' : std::isalnum(*c) ? *c : '_';
  return name;
}
INSTANTIATE_TEST_SUITE_P(, GemmPath, testing::ValuesIn(all_paths()), test_name);

TEST(GemmPaths, plain_is_the_last_and_always_there) {
  ASSERT_FALSE(cpu_paths().empty());
  EXPECT_STREQ(cpu_paths().back().name, "plain C++");
  EXPECT_TRUE(cpu_paths().back().serves_transposed);
}

TEST_P(GemmPath, small_integers_are_exact_for_every_row_count) {
  Buffer w(37, 200);
  w.fill(oracle::small_integers(random));
  for (int m = 1; m <= 72; ++m) {
    Buffer x(m, 200);
    x.fill(oracle::small_integers(random));
    Buffer out = run(path, x, w);
    expect_exact(x, w, out);
  }
}

TEST_P(GemmPath, every_length_of_k_is_exact) {
  for (std::int64_t k = 1; k <= 200; ++k) {
    Buffer x(5, k), w(7, k);
    x.fill(oracle::small_integers(random));
    w.fill(oracle::small_integers(random));
    Buffer out = run(path, x, w);
    expect_exact(x, w, out);
  }
  for (std::int64_t k : {4095, 4096, 4097, 8191, 8192, 8193, 16640, 35840}) {
    Buffer x(5, k), w(7, k);
    x.fill(oracle::small_integers(random));
    w.fill(oracle::small_integers(random));
    Buffer out = run(path, x, w);
    expect_exact(x, w, out);
  }
}

TEST_P(GemmPath, random_shapes_strides_and_offsets_are_exact_and_touch_nothing_else) {
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int round = 0; round < 300; ++round) {
    const int m = draw(1, 80), n = draw(1, 130), k = draw(1, 300);
    Buffer x(m, k, k + draw(0, 9), draw(0, 31));
    Buffer w(n, k, k + draw(0, 9), draw(0, 31));
    Buffer out(m, n, n + draw(0, 9), draw(0, 31));
    x.fill(oracle::small_integers(random));
    w.fill(oracle::small_integers(random));
    const auto x_before = x.bits, w_before = w.bits;
    cpu_gemm(path, gemm_of(x, w, out), draw(1, 3));
    expect_exact(x, w, out);
    ASSERT_EQ(x.bits, x_before);
    ASSERT_EQ(w.bits, w_before);
  }
}

TEST_P(GemmPath, normal_data_are_within_the_stated_error) {
  for (std::int64_t k : {65, 1536, 7168}) {
    Buffer x(9, k), w(100, k);
    x.fill(oracle::normals(random));
    w.fill(oracle::normals(random));
    Buffer out = run(path, x, w);
    expect_close(x, w, out, true);
  }
}

TEST_P(GemmPath, sums_that_cancel_are_within_the_stated_error) {
  const std::int64_t k = 7168;
  Buffer x(3, k), w(20, k);
  // Magnitudes over many binades, positive first: the worst order for a running sum.
  std::uniform_int_distribution<int> exponent(-12, 12);
  const auto wide = [&] { return std::ldexp(1 + std::uniform_real_distribution<double>()(random), exponent(random)); };
  x.fill(wide);
  w.fill(wide);
  for (std::int64_t j = 0; j < w.rows; ++j)
    for (std::int64_t p = k / 2; p < k; ++p) w.at(j, p) = static_cast<std::uint16_t>(w.at(j, p - k / 2) | 0x8000);
  for (std::int64_t i = 0; i < x.rows; ++i)
    for (std::int64_t p = k / 2; p < k; ++p) x.at(i, p) = x.at(i, p - k / 2);
  Buffer out = run(path, x, w);
  expect_close(x, w, out, false);
}

TEST_P(GemmPath, all_ones_lose_no_count) {
  // 2^20 products of 16: the largest sum of 1.4 (c), 2^24.
  const std::int64_t k = 1 << 20;
  Buffer x(1, k), w(2, k);
  x.fill([] { return 4.0; });
  w.fill([] { return 4.0; });
  Buffer out = run(path, x, w);
  expect_exact(x, w, out);
}

TEST_P(GemmPath, rounding_is_to_nearest_even_and_overflow_is_inf) {
  Buffer x(1, 2), w(5, 2);
  x.fill([] { return 1.0; });
  const double cases[5][2] = {{256, 1}, {258, 1}, {258, -1}, {0x1.fep127, 0x1p120}, {-0x1.fep127, -0x1.fep127}};
  for (int j = 0; j < 5; ++j)
    for (int p = 0; p < 2; ++p) w.at(j, p) = oracle::encode(oracle::nearest_bf16(cases[j][p]));
  Buffer out = run(path, x, w);
  EXPECT_EQ(oracle::decode(out.at(0, 0)), 256);  // 257 is a tie, 256 is even
  EXPECT_EQ(oracle::decode(out.at(0, 1)), 260);  // 259: 260 is even
  EXPECT_EQ(oracle::decode(out.at(0, 2)), 256);
  EXPECT_EQ(oracle::decode(out.at(0, 3)), HUGE_VAL);
  EXPECT_EQ(oracle::decode(out.at(0, 4)), -HUGE_VAL);
}

TEST_P(GemmPath, nan_and_inf_stay_in_their_row_and_column) {
  const std::uint16_t nan = 0x7fc1, inf = 0x7f80;
  for (int m : {1, 7, 9, 17, 31, 33, 63, 70}) {
    Buffer x(m, 130, 133), w(50, 130, 131);
    x.fill(oracle::normals(random));
    w.fill(oracle::normals(random));
    Buffer clean = run(path, x, w);
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t j = 0; j < 50; ++j) ASSERT_TRUE(std::isfinite(oracle::decode(clean.at(i, j))));
    for (std::uint16_t special : {nan, inf}) {
      for (std::int64_t column : {0, 64, 129}) {
        const std::int64_t row = m / 2, other = 29;
        Buffer x2 = x, w2 = w;
        x2.at(row, column) = special;
        w2.at(other, column) = special;
        Buffer out = run(path, x2, w2);
        for (std::int64_t i = 0; i < m; ++i)
          for (std::int64_t j = 0; j < 50; ++j) {
            if (i == row || j == other) {
              ASSERT_FALSE(std::isfinite(oracle::decode(out.at(i, j))));
            } else {
              ASSERT_EQ(out.at(i, j), clean.at(i, j)) << i << ", " << j;
            }
          }
      }
    }
  }
}

// A NaN right after each row of x and w is poison that the K tail must not read into the sum.
TEST_P(GemmPath, padding_after_the_rows_is_not_read_into_the_sum) {
  for (std::int64_t k : {1, 15, 17, 31, 33, 63, 64, 127, 128, 129, 192, 8320}) {
    Buffer x(3, k, k + 8), w(16, k, k + 8);
    x.fill(oracle::small_integers(random));
    w.fill(oracle::small_integers(random));
    Buffer out = run(path, x, w);
    expect_exact(x, w, out);
  }
}

TEST_P(GemmPath, bits_repeat_and_do_not_depend_on_threads) {
  Buffer x(13, 1000), w(301, 1000);
  x.fill(oracle::normals(random));
  w.fill(oracle::normals(random));
  Buffer first = run(path, x, w, 1);
  for (int threads : {1, 2, 3, 8})
    for (int repeat = 0; repeat < 5; ++repeat) {
      Buffer again = run(path, x, w, threads);
      for (std::int64_t i = 0; i < 13; ++i)
        for (std::int64_t j = 0; j < 301; ++j) ASSERT_EQ(again.at(i, j), first.at(i, j)) << "threads " << threads;
    }
}

TEST_P(GemmPath, a_row_does_not_depend_on_its_batch_nor_its_layout) {
  const std::int64_t k = 5000, n = 23;
  Buffer w(n, k), row(1, k);
  w.fill(oracle::normals(random));
  row.fill(oracle::normals(random));
  Buffer alone = run(path, row, w);
  for (int m = 2; m <= 68; ++m) {
    for (std::int64_t place : {std::int64_t{0}, std::int64_t{m / 2}, std::int64_t{m - 1}}) {
      Buffer x(m, k, k + m % 5, m % 7);
      for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t p = 0; p < k; ++p) x.at(i, p) = row.at(0, (p * 7 + i) % k);
      for (std::int64_t p = 0; p < k; ++p) x.at(place, p) = row.at(0, p);
      Buffer out = run(path, x, w);
      for (std::int64_t j = 0; j < n; ++j) ASSERT_EQ(out.at(place, j), alone.at(0, j)) << "M = " << m;
    }
  }
}

TEST(GemmPaths, transposed_weights_are_exact) {
  SCOPED_TRACE(oracle::replay());
  std::mt19937_64 random(oracle::seed());
  const CpuPath& path = cpu_paths().back();
  for (int n : {1, 2, 31, 32, 33, 97, 200}) {
    for (int k : {1, 2, 63, 64, 65, 300}) {
      Buffer x(70, k), turned(k, n, n + 3, 1), w(n, k), out(70, n, n + 1);
      x.fill(oracle::small_integers(random));
      turned.fill(oracle::small_integers(random));
      for (int j = 0; j < n; ++j)
        for (int p = 0; p < k; ++p) w.at(j, p) = turned.at(p, j);
      CpuGemm gemm = gemm_of(x, w, out);
      gemm.w = turned.data();
      gemm.w_stride = turned.stride;
      gemm.transposed = true;
      cpu_gemm(path, gemm, 2);
      expect_exact(x, w, out);
    }
  }
}

}  // namespace
}  // namespace twostep
