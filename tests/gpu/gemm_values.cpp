// Right values for every shape: tails, odd sizes, every M, special values, huge weights (draft-gemm 1, 3.5, 4.4).
#include <gtest/gtest.h>

#include <future>
#include <map>
#include <set>
#include <tuple>

#include "child.h"
#include "gemm_fixture.h"

namespace twostep::test {
namespace {

using GemmValues = GpuTest;

constexpr std::uint16_t kInf = 0x7f80, kNegativeInf = 0xff80, kLargest = 0x7f7f, kSmallestSubnormal = 0x0001;

TEST_F(GemmValues, every_tail_of_k_is_exact_G9) {
  TWOSTEP_NEEDS_CUBLAS();
  for (std::int64_t k : {64, 127, 128, 129, 192, 8192, 8320, 8448, 16640}) {
    // What lies past each row is NaN.
    const Linear linear(16, k, {k + 8, 0});
    DraftGemm gemm(linear.weight);
    const bool warp = k % 64 == 0;
    expect_exact_run(gemm, linear, 3, warp ? Kind::kWarp : Kind::kCublas, stream(), {k + 8, 0});
    EXPECT_EQ(gemm.why_code(3), warp ? WhyCode::kNone : WhyCode::kKNotMultipleOf64);
  }
}

// Weights that are too large for the host: written by the GPU, checked in sampled columns, the last among them.
void expect_exact_columns(std::int64_t n, std::int64_t k, const std::vector<int>& rows, Kind kind, Stream stream) {
  const Matrix weight = Matrix::of_integers(n, k, 1);
  std::set<std::int64_t> sample;
  for (std::int64_t i = 0; i < 32; ++i) sample.insert({i, n - 1 - i, i * 7919 % n, i * 104729 % n});
  const std::vector<std::int64_t> columns(sample.begin(), sample.end());
  const HostMatrix weight_rows = integer_rows(columns, k, 1);
  DraftGemm gemm(weight.view());
  for (int m : rows) {
    SCOPED_TRACE(testing::Message() << "N = " << n << ", K = " << k << ", M = " << m);
    const HostMatrix values = integers(m, k, 2);
    const Matrix x(values);
    const Matrix out(m, n);
    prepare_on(gemm, m, kind, stream);
    ASSERT_EQ(gemm.kind(x.view(), out.view()), kind);
    gemm.run(x.view(), out.view(), stream);
    const HostMatrix all = out.get();
    HostMatrix some(m, static_cast<std::int64_t>(columns.size()));
    for (std::int64_t i = 0; i < m; ++i)
      for (std::size_t j = 0; j < columns.size(); ++j) some.at(i, static_cast<std::int64_t>(j)) = all.at(i, columns[j]);
    expect_exact(some, exact_product(values, weight_rows));
  }
}

TEST_F(GemmValues, many_k_tiles_are_served_by_warp_G10) {
  if (!has_free_memory(1 << 30)) GTEST_SKIP() << "needs 1 GB of free GPU memory";
  expect_exact_columns(7168, 35840, {7, 64}, Kind::kWarp, stream());
}

TEST_F(GemmValues, large_shapes_finish_in_every_bucket_G17) {
  if (!has_free_memory(2ull << 30)) GTEST_SKIP() << "needs 2 GB of free GPU memory";
  TWOSTEP_REST_IN_CHILD(150);
  const std::vector<int> one_per_bucket = {7, 16, 21, 32, 40, 48, 56, 64};
  for (const auto& [n, k] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{20480, 7168}, {40960, 7168}, {7168, 14336}, {16384, 16384}})
    expect_exact_columns(n, k, one_per_bucket, Kind::kWarp, stream());
}

TEST_F(GemmValues, last_columns_of_a_weight_above_two_gigabytes_are_right) {
  TWOSTEP_NEEDS_CUBLAS();
  if (!has_free_memory(4ull << 30)) GTEST_SKIP() << "needs 4 GB of free GPU memory";
  expect_exact_columns(163840, 7168, {8, 64}, Kind::kWarp, stream());
  expect_exact_columns(163840, 7168, {8}, Kind::kCublas, stream());
}

// Fewer K tiles than stages, fewer boxes of 64 columns than slices. Combinations that are refused are refused by
// tactic_valid, with a reason, and by the object too.
TEST_F(GemmValues, fewer_k_tiles_than_stages_or_slices_G11) {
  const DeviceFacts facts = device_facts(kDevice);
  struct Trial {
    std::int64_t k;
    int bucket;
    Tactic tactic;
    std::optional<PreparedWarpSplitK> prepared = {};
    std::string error = {};
  };
  std::vector<Trial> trials;
  const auto add = [&](std::int64_t k, int bucket, WeightLoad load, int stages, int slices, int cluster_n = 1) {
    Tactic tactic;
    tactic.weight_load = load;
    tactic.tile_n = 32;
    tactic.tile_k = 64 * slices;
    tactic.stages = stages;
    tactic.k_slices = slices;
    tactic.cluster_n = cluster_n;
    tactic.warps = slices == 8 ? 8 : 4;
    if (slices < 4) tactic.tile_n = 64;
    trials.push_back({k, bucket, complete(tactic, bucket, facts)});
  };
  for (std::int64_t k : {64, 128, 192}) {
    for (int slices : {1, 2, 4, 8}) {
      for (int stages = 1; stages <= 12; ++stages)
        add(k, 8, stages % 2 ? WeightLoad::kRows : WeightLoad::kTiles, stages, slices);
      for (int bucket : {16, 24, 32, 40, 64})
        for (int stages : {1, 2, 5}) add(k, bucket, WeightLoad::kTiles, stages, slices, bucket == 40 ? 4 : 1);
    }
    // Exactly two tiles is the case of 4.4.
    for (int stages : {1, 2, 3, 4}) {
      Tactic two = complete({.tile_n = 16, .tile_k = 256, .stages = stages}, 8, facts);
      trials.push_back({512, 8, two});
    }
  }
  std::map<std::int64_t, std::unique_ptr<Linear>> linears;
  for (const Trial& trial : trials)
    if (auto& linear = linears[trial.k]; !linear) linear = std::make_unique<Linear>(80, trial.k);  // cuts every tile
#pragma omp parallel for schedule(dynamic)
  for (std::size_t i = 0; i < trials.size(); ++i) {
    Trial& trial = trials[i];
    try {
      trial.prepared.emplace(linears.at(trial.k)->weight, std::map<int, Tactic>{{trial.bucket, trial.tactic}});
    } catch (const Error& error) {
      trial.error = error.what();
    }
  }
  int served = 0;
  for (Trial& trial : trials) {
    SCOPED_TRACE(testing::Message() << "K = " << trial.k << ", bucket " << trial.bucket << ", "
                                    << to_string(trial.tactic));
    const Status valid = tactic_valid(trial.tactic, trial.bucket, 80, trial.k, facts);
    EXPECT_EQ(valid.ok(), trial.prepared.has_value()) << valid.message() << "; " << trial.error;
    if (!trial.prepared) continue;
    ++served;
    for (int m : {1, 8, 9, 16, 17, 32, 33, 64}) {
      if ((m + 7) / 8 * 8 != trial.bucket) continue;
      const HostMatrix values = integers(m, trial.k, 2);
      const Matrix x(values), out(m, 80);
      trial.prepared->run(x.view(), out.view(), stream());
      expect_exact(out.get(), exact_product(values, linears.at(trial.k)->host));
    }
  }
  EXPECT_GT(served, 100);
}

TEST_F(GemmValues, n_that_is_no_multiple_of_16_is_exact_on_cublas_G12) {
  TWOSTEP_NEEDS_CUBLAS();
  for (std::int64_t n : {8, 15, 17, 24, 6152}) {
    const Linear linear(n, 128);
    DraftGemm gemm(linear.weight);
    for (int m : {1, 5}) {
      expect_exact_run(gemm, linear, m, Kind::kCublas, stream(), {}, {n + 8, 0});
      EXPECT_EQ(gemm.why_code(m), WhyCode::kNNotMultipleOf16);
      EXPECT_NE(gemm.why(m).find(std::to_string(n)), std::string::npos) << gemm.why(m);
    }
    EXPECT_EQ(gemm.stats().fallbacks(WhyCode::kNNotMultipleOf16), 2u);
  }
}

TEST_F(GemmValues, rubbish_in_padding_and_shared_memory_reaches_nothing_G14) {
  const std::int64_t n = 144, k = 704;  // the last tiles of N and of K are cut
  const Linear linear(n, k);
  DraftGemm gemm(linear.weight);
  for (int m : {1, 7, 9, 17, 31, 33, 63}) {
    SCOPED_TRACE(testing::Message() << "M = " << m);
    const HostMatrix values = integers(m, k, 2);
    Matrix x(72, k), out(72, n);  // rows past m - 1 are NaN
    x.set(values);
    ASSERT_EQ(gemm.prepare(m, stream()), Kind::kWarp) << gemm.why(m);
    const auto run_poisoned = [&] {
      out.poison();
      poison_shared_memory(stream());
      gemm.run(x.view(m), out.view(m), stream());
      HostMatrix rows(m, n);
      const HostMatrix all = out.get();
      std::copy_n(all.bits.begin(), rows.bits.size(), rows.bits.begin());
      for (std::size_t i = rows.bits.size(); i < all.bits.size(); ++i) EXPECT_EQ(all.bits[i], kNanBits) << "row past m";
      return rows;
    };
    HostMatrix expected = exact_product(values, linear.host);
    expect_exact(run_poisoned(), expected);

    HostMatrix one_nan = values;
    one_nan.at(m / 2, k - 3) = kNanBits;
    x.set(one_nan);
    HostMatrix only_row = expected;
    for (std::int64_t j = 0; j < n; ++j) only_row.at(m / 2, j) = kNanBits;
    expect_exact(run_poisoned(), only_row);

    x.set(values);
    HostMatrix weight_nan = linear.host;
    weight_nan.at(n - 5, 1) = kNanBits;
    Matrix weight(weight_nan);
    DraftGemm on_nan(weight.view());
    ASSERT_EQ(on_nan.prepare(m, stream()), Kind::kWarp);
    out.poison();
    on_nan.run(x.view(m), out.view(m), stream());
    HostMatrix only_column = expected;
    for (std::int64_t i = 0; i < m; ++i) only_column.at(i, n - 5) = kNanBits;
    HostMatrix rows(m, n);
    const HostMatrix all = out.get();
    std::copy_n(all.bits.begin(), rows.bits.size(), rows.bits.begin());
    expect_exact(rows, only_column);
  }
}

// 1.2 on both kinds: Inf and overflow stay in their row and column, subnormals are not flushed.
TEST_F(GemmValues, infinities_overflow_and_subnormals_follow_the_contract) {
  TWOSTEP_NEEDS_CUBLAS();
  const std::int64_t n = 32, k = 128;
  const int m = 5;
  HostMatrix x_values(m, k), w_values(n, k);
  for (int i = 0; i < m; ++i) x_values.at(i, i) = 0x3f80;  // row i selects column i of weight
  for (std::int64_t j = 0; j < n; ++j) w_values.at(j, 0) = w_values.at(j, 2) = 0x3f80;  // 1.0
  w_values.at(3, 0) = kInf;
  w_values.at(4, 1) = kSmallestSubnormal;
  x_values.at(2, 3) = kLargest;
  w_values.at(6, 3) = 0x4000;  // 2 * largest
  x_values.at(4, 5) = kNegativeInf;
  w_values.at(7, 5) = 0x3f80;
  const Matrix x(x_values), weight(w_values);
  for (Kind kind : {Kind::kWarp, Kind::kCublas}) {
    DraftGemm gemm(weight.view());
    prepare_on(gemm, m, kind, stream());
    const HostMatrix out = run(gemm, x, n, stream());
    EXPECT_EQ(out.at(0, 3), kInf) << kind_name(kind);
    EXPECT_EQ(out.at(1, 4), kSmallestSubnormal) << kind_name(kind);
    EXPECT_EQ(out.at(2, 6), kInf) << kind_name(kind);
    EXPECT_EQ(out.at(4, 7), kNegativeInf) << kind_name(kind);
    EXPECT_EQ(out.at(0, 0), 0x3f80) << kind_name(kind);  // no Inf of another row or column reached it
    EXPECT_EQ(out.at(2, 0), 0x3f80) << kind_name(kind);
  }
}

TEST_F(GemmValues, every_row_count_is_right_G15) {
  TWOSTEP_NEEDS_CUBLAS();
  for (const auto& [n, k] : std::vector<std::pair<std::int64_t, std::int64_t>>{{272, 1088}, {1040, 640}, {144, 4160}}) {
    const Linear linear(n, k);
    DraftGemm gemm(linear.weight);
    for (int m = 1; m <= 72; ++m)
      expect_exact_run(gemm, linear, m, m <= kMaxWarpRows ? Kind::kWarp : Kind::kCublas, stream());
    EXPECT_EQ(gemm.why_code(65), WhyCode::kRowsAbove64);
    EXPECT_EQ(gemm.stats().fallbacks(WhyCode::kRowsAbove64), 8u);
    EXPECT_NO_THROW(gemm.run(Matrix(1, k).view(0), Matrix(1, n).view(0), stream()));
  }
}

TEST_F(GemmValues, every_bucket_edge_is_right_in_a_fresh_process_G15) {
  TWOSTEP_NEEDS_CUBLAS();
  if (in_child()) {
    const int m = std::stoi(variable("TWOSTEP_TEST_M"));
    const Linear linear(272, 1088);
    DraftGemm gemm(linear.weight);
    expect_exact_run(gemm, linear, m, m <= kMaxWarpRows ? Kind::kWarp : Kind::kCublas, stream());
    return;
  }
  const std::string self = "GemmValues.every_bucket_edge_is_right_in_a_fresh_process_G15";
  std::map<int, std::future<ChildResult>> children;
  for (int m : {1, 8, 9, 16, 17, 24, 25, 32, 33, 40, 41, 48, 49, 56, 57, 64, 65})
    children[m] = std::async(std::launch::async, [m, self] {
      return run_child(self, {{"TWOSTEP_TEST_M", std::to_string(m)}}, 60);
    });
  for (auto& [m, child] : children) {
    const ChildResult result = child.get();
    EXPECT_TRUE(result.passed) << "M = " << m << "\n" << result.output;
  }
}

TEST_F(GemmValues, random_data_stay_in_the_bounds_on_every_kind) {
  TWOSTEP_NEEDS_CUBLAS();
  for (const auto& [n, k] : std::vector<std::pair<std::int64_t, std::int64_t>>{{2304, 1536}, {528, 7168}}) {
    const HostMatrix weight_values = normals(n, k, 1);
    const Matrix weight(weight_values);
    for (int m : {1, 8, 24, 64, 65}) {
      const HostMatrix x_values = normals(m, k, 2);
      const Matrix x(x_values);
      for (Kind kind : {Kind::kWarp, Kind::kCublas}) {
        if (kind == Kind::kWarp && m > kMaxWarpRows) continue;
        SCOPED_TRACE(testing::Message() << kind_name(kind) << ", N = " << n << ", K = " << k << ", M = " << m);
        DraftGemm gemm(weight.view());
        prepare_on(gemm, m, kind, stream());
        expect_close(run(gemm, x, n, stream()), x_values, weight_values);
      }
    }
  }
}

// 4.4: each way to load the weight, each tile height, with and without a cut last tile.
TEST_F(GemmValues, every_way_to_load_tile_and_slice_is_exact) {
  const std::int64_t n = 208, k = 1344;
  const Linear linear(n, k);
  const DeviceFacts facts = device_facts(kDevice);
  struct Trial {
    int m;
    Tactic tactic;
    std::optional<PreparedWarpSplitK> prepared = {};
  };
  std::vector<Trial> trials;
  // One of each way to load, tile and slice; the stage counts and clusters go round.
  for (int m : {5, 64}) {
    std::map<std::tuple<Mma, WeightLoad, int, int, int, int, int>, std::vector<Tactic>> groups;
    for (const Tactic& t : valid_tactics(m, n, k, facts))
      groups[{t.mma, t.weight_load, t.tile_n, t.tile_k, t.k_slices, t.warps, t.cluster_k}].push_back(t);
    std::size_t turn = 0;
    for (const auto& [key, tactics] : groups) trials.push_back({m, tactics[turn++ % tactics.size()]});
  }
  ASSERT_GT(trials.size(), 40u);
#pragma omp parallel for schedule(dynamic)
  for (std::size_t i = 0; i < trials.size(); ++i) {
    try {
      trials[i].prepared.emplace(linear.weight, std::map<int, Tactic>{{trials[i].m, trials[i].tactic}});
    } catch (const Error&) {
    }
  }
  for (Trial& trial : trials) {
    SCOPED_TRACE(testing::Message() << "M = " << trial.m << ", " << to_string(trial.tactic));
    ASSERT_TRUE(trial.prepared.has_value());
    const HostMatrix values = integers(trial.m, k, 2);
    const Matrix x(values), out(trial.m, n);
    poison_shared_memory(stream());
    trial.prepared->run(x.view(), out.view(), stream());
    expect_exact(out.get(), exact_product(values, linear.host));
  }
}

}  // namespace
}  // namespace twostep::test
