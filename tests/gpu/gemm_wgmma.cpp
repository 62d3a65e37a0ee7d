// The wgmma kernel past the plan: every tile and cluster, every row count, views, order of summation, chains
// (draft-gemm 1, 3, 4.4, 5, 7).
#include <gtest/gtest.h>

#include <map>
#include <tuple>

#include "cuda/launch.h"
#include "gemm_fixture.h"

namespace twostep::test {
namespace {

class GemmWgmma : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    facts = device_facts(kDevice);
    if (facts.arch != 90) GTEST_SKIP() << facts.name << " has no wgmma";
  }
  DeviceFacts facts;
};

HostMatrix first_rows(const HostMatrix& all, std::int64_t m) {
  HostMatrix rows(m, all.cols);
  std::copy_n(all.bits.begin(), rows.bits.size(), rows.bits.begin());
  return rows;
}

// A tactic for every bucket of rows.
std::map<int, Tactic> all_buckets(const Tactic& tactic) {
  std::map<int, Tactic> tactics;
  for (int m = kRowBucket; m <= kMaxWarpRows; m += kRowBucket) tactics[m] = tactic;
  return tactics;
}

// Compiled side by side.
struct Trial {
  TensorView weight;
  std::map<int, Tactic> tactics;
  std::optional<PreparedWarpSplitK> prepared = {};
  std::string error = {};
  const Tactic& tactic() const { return tactics.begin()->second; }
};
void prepare_all(std::vector<Trial>& trials) {
#pragma omp parallel for schedule(dynamic)
  for (std::size_t i = 0; i < trials.size(); ++i) {
    try {
      trials[i].prepared.emplace(trials[i].weight, trials[i].tactics);
    } catch (const Error& error) {
      trials[i].error = error.what();
    }
  }
  for (const Trial& trial : trials) ASSERT_EQ(trial.error, "") << to_string(trial.tactic());
}

// Rows 0..m-1 of out, and a failure if a row past them was written.
HostMatrix rows_of(const Matrix& out, int m) {
  const HostMatrix all = out.get();
  for (std::size_t i = static_cast<std::size_t>(m * all.cols); i < all.bits.size(); ++i)
    if (all.bits[i] != kNanBits) {
      ADD_FAILURE() << "row " << static_cast<std::int64_t>(i) / all.cols << " past m = " << m << " was written";
      break;
    }
  return first_rows(all, m);
}

// K of 7, 24 and 112 boxes; the last tile of N is cut to 64, 16 or nothing.
TEST_F(GemmWgmma, every_row_count_is_exact_on_every_tile_and_cluster) {
  struct Shape {
    std::int64_t n, k;
  };
  for (const auto& [n, k] : {Shape{2112, 448}, {896, 1536}, {208, 7168}}) {
    const Linear linear(n, k);
    const HostMatrix values = integers(kMaxWarpRows, k, 2);
    const HostMatrix expected = exact_product(values, linear.host);
    std::vector<Trial> trials;
    for (int tile_n : {64, 128, 192})
      for (int cluster_k : {1, 2, 4, 8})
        if (k / 64 >= cluster_k && (tile_n != 192 || cluster_k < 8))
          trials.push_back({linear.weight, all_buckets(wgmma_tactic(64, tile_n, cluster_k))});
    ASSERT_EQ(trials.size(), k == 448 ? 9u : 11u);
    ASSERT_NO_FATAL_FAILURE(prepare_all(trials));
    Matrix x(kMaxWarpRows, k), out(kMaxWarpRows, n);
    for (int m = 1; m <= kMaxWarpRows; ++m) {
      x.set(first_rows(values, m));  // what follows is NaN
      for (Trial& trial : trials) {
        SCOPED_TRACE(testing::Message() << "N = " << n << ", K = " << k << ", M = " << m << ", "
                                        << to_string(trial.tactic()));
        out.poison();
        trial.prepared->run(x.view(m), out.view(m), stream());
        expect_exact(rows_of(out, m), first_rows(expected, m));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(GemmWgmma, every_tactic_of_the_search_is_exact) {
  const std::int64_t n = 208, k = 1536;
  const Linear linear(n, k);
  for (int m : {5, 64}) {
    const HostMatrix values = integers(m, k, 2);
    const HostMatrix expected = exact_product(values, linear.host);
    const Matrix x(values);
    std::vector<Trial> trials;
    for (const Tactic& t : valid_tactics(m, n, k, facts))
      if (t.mma == Mma::kWgmma) trials.push_back({linear.weight, {{m, t}}});
    ASSERT_GT(trials.size(), 30u);
    ASSERT_NO_FATAL_FAILURE(prepare_all(trials));
    for (Trial& trial : trials) {
      SCOPED_TRACE(testing::Message() << "M = " << m << ", " << to_string(trial.tactic()));
      const Matrix out(m, n);
      poison_shared_memory(stream());
      trial.prepared->run(x.view(), out.view(), stream());
      expect_exact(out.get(), expected);
    }
  }
}

// x, weight and out as slices of wider buffers: what lies between the rows is NaN, and stays so.
TEST_F(GemmWgmma, views_with_any_pitch_are_exact_and_their_gaps_untouched) {
  const std::int64_t n = 80, k = 448;
  const Linear linear(n, k, {k + 72, 16});
  for (int tile_n : {64, 128, 192})
    for (int cluster_k : {1, 4}) {
      PreparedWarpSplitK prepared(linear.weight, all_buckets(wgmma_tactic(64, tile_n, cluster_k)));
      for (int m : {1, 5, 16, 33, 64}) {
        SCOPED_TRACE(testing::Message() << "M = " << m << ", tile_n " << tile_n << ", cluster_k " << cluster_k);
        const HostMatrix values = integers(m, k, 2);
        // The pitch of a single row is no pitch: it need not be a multiple of 16 bytes.
        const std::int64_t odd = m == 1 ? 3 : 0;
        const Matrix x(values, {k + 8 + odd, 16}), out(m, n, {n + 24 + odd, 48});
        prepared.run(x.view(), out.view(), stream());
        expect_exact(out.get(), exact_product(values, linear.host));
      }
    }
}

TEST_F(GemmWgmma, rubbish_stays_in_its_row_and_column) {
  const std::int64_t n = 80, k = 448;
  const int m = 9;
  const Linear linear(n, k);
  HostMatrix values = integers(m, k, 2), weight_values = linear.host;
  HostMatrix expected = exact_product(values, linear.host);
  values.at(4, k - 3) = kNanBits;
  weight_values.at(n - 5, 1) = kNanBits;
  for (std::int64_t j = 0; j < n; ++j) expected.at(4, j) = kNanBits;
  for (std::int64_t i = 0; i < m; ++i) expected.at(i, n - 5) = kNanBits;
  const Matrix weight(weight_values);
  Matrix x(16, k);
  x.set(values);
  for (int cluster_k : {1, 4}) {
    PreparedWarpSplitK prepared(weight.view(), {{m, wgmma_tactic(m, 64, cluster_k)}});
    const Matrix out(16, n);
    poison_shared_memory(stream());
    prepared.run(x.view(m), out.view(m), stream());
    expect_exact(rows_of(out, m), expected);
  }
}

// ---- Order of summation

class GemmWgmmaOrder : public GemmWgmma {
 protected:
  static constexpr std::int64_t kN = 336, kK = 1536;
  void SetUp() override {
    GemmWgmma::SetUp();
    if (IsSkipped()) return;
    values = normals(kMaxWarpRows, kK, 2);
    x.emplace(values);
    weight.emplace(normals(kN, kK, 1));
  }
  HostMatrix result(PreparedWarpSplitK& prepared, int m) {
    const Matrix out(m, kN);
    prepared.run(x->view(m), out.view(), stream());
    return out.get();
  }
  HostMatrix values;
  std::optional<Matrix> x, weight;
};

TEST_F(GemmWgmmaOrder, twenty_runs_eager_and_replayed_have_equal_bits) {
  for (int cluster_k : {1, 2, 4, 8})
    for (int m : {8, 64}) {
      PreparedWarpSplitK prepared(weight->view(), {{m, wgmma_tactic(m, 64, cluster_k)}});
      const HostMatrix first = result(prepared, m);
      expect_close(first, first_rows(values, m), weight->get());
      Matrix out(m, kN);
      const Graph graph(stream(), [&] { prepared.run(x->view(m), out.view(), stream()); });
      for (int i = 0; i < 20; ++i) {
        out.poison();
        if (i % 2 == 0) graph.launch(stream());
        else prepared.run(x->view(m), out.view(), stream());
        ASSERT_EQ(out.get(), first) << "run " << i << ", M = " << m << ", cluster_k " << cluster_k;
      }
    }
}

// Narrower instructions serve fewer rows: they must add in the same order.
TEST_F(GemmWgmmaOrder, bits_of_a_row_do_not_depend_on_m) {
  for (int tile_n : {64, 128, 192})
    for (int cluster_k : {1, 2, 4, 8}) {
      if (tile_n == 192 && cluster_k == 8) continue;
      PreparedWarpSplitK prepared(weight->view(), all_buckets(wgmma_tactic(64, tile_n, cluster_k)));
      const HostMatrix all = result(prepared, kMaxWarpRows);
      for (int m = 1; m <= kMaxWarpRows; ++m)
        EXPECT_EQ(result(prepared, m), first_rows(all, m))
            << "M = " << m << ", tile_n " << tile_n << ", cluster_k " << cluster_k;
    }
}

TEST_F(GemmWgmmaOrder, bits_of_a_row_do_not_depend_on_its_place) {
  HostMatrix reversed(kMaxWarpRows, kK);
  for (int i = 0; i < kMaxWarpRows; ++i)
    std::copy_n(values.bits.begin() + (kMaxWarpRows - 1 - i) * kK, kK, reversed.bits.begin() + i * kK);
  const Matrix other(reversed);
  for (int cluster_k : {1, 4}) {
    PreparedWarpSplitK prepared(weight->view(), {{kMaxWarpRows, wgmma_tactic(64, 64, cluster_k)}});
    const HostMatrix all = result(prepared, kMaxWarpRows);
    const Matrix out(kMaxWarpRows, kN);
    prepared.run(other.view(), out.view(), stream());
    const HostMatrix turned = out.get();
    for (int i = 0; i < kMaxWarpRows; ++i) EXPECT_EQ(turned.row(kMaxWarpRows - 1 - i), all.row(i)) << "row " << i;
  }
}

TEST_F(GemmWgmmaOrder, bits_depend_on_cluster_k_and_not_on_tile_or_ring) {
  const int m = 24;
  std::vector<Trial> trials;
  for (const Tactic& t : valid_tactics(m, kN, kK, facts))
    if (t.mma == Mma::kWgmma) trials.push_back({weight->view(), {{m, t}}});
  ASSERT_NO_FATAL_FAILURE(prepare_all(trials));
  std::map<int, HostMatrix> of_family;
  for (Trial& trial : trials) {
    const HostMatrix got = result(*trial.prepared, m);
    const auto [first, is_first] = of_family.try_emplace(trial.tactic().cluster_k, got);
    if (!is_first) {
      EXPECT_EQ(got, first->second) << to_string(trial.tactic());
    }
  }
  EXPECT_EQ(of_family.size(), 4u);
}

// ---- Chains

// Both kernels in one captured chain with real dependencies: each starts early, none reads or writes too early.
TEST_F(GemmWgmma, a_captured_chain_with_mma_sync_has_the_bits_of_ordinary_launches) {
  const std::int64_t n = 1536;  // square: the output of one is the x of the next
  const Matrix first_weight(normals(n, n, 1)), second_weight(normals(n, n, 3));
  for (int m : {7, 64}) {
    PreparedWarpSplitK wgmma(first_weight.view(), {{m, wgmma_tactic(m, 64, 4)}});
    PreparedWarpSplitK mma_sync(second_weight.view(), {{m, warp_tactic(m, n, n, facts, true)}});
    const Matrix fresh(normals(m, n, 2)), stale(normals(m, n, 4));
    Matrix x(m, n), a(m, n), b(m, n), c(m, n);
    const auto chain = [&] {
      wgmma.run(x.view(), a.view(), stream());
      mma_sync.run(a.view(), b.view(), stream());
      wgmma.run(b.view(), c.view(), stream());
      mma_sync.run(c.view(), a.view(), stream());  // overwrites what the second has read
    };
    write_late(x, fresh, m * n, 0, stream());
    synchronize();
    chain();
    const HostMatrix expected[] = {a.get(), b.get(), c.get()};
    const Graph graph(stream(), [&] {
      write_late(x, fresh, m * n, 20, stream());
      PdlChain::record(primary_context(kDevice), stream(), true);
      chain();
      write_late(x, stale, m * n, 0, stream(), true);  // overwrites what the first has read
    });
    EXPECT_EQ(graph.num_programmatic_edges(), 5u);
    for (int i = 0; i < 50; ++i) {
      for (Matrix* to : {&a, &b, &c}) to->poison();
      graph.launch(stream());
      graph.launch(stream());
      ASSERT_EQ(a.get(), expected[0]) << "replay " << i;
      ASSERT_EQ(b.get(), expected[1]) << "replay " << i;
      ASSERT_EQ(c.get(), expected[2]) << "replay " << i;
    }
  }
}

TEST_F(GemmWgmma, a_plan_of_a_shape_that_the_model_gives_to_wgmma_runs_on_it) {
  const std::int64_t n = 1520, k = 7168;
  const int m = 64;
  ASSERT_EQ(warp_tactic(m, n, k, facts).mma, Mma::kWgmma);
  const Linear linear(n, k);
  DraftGemm gemm(linear.weight);
  expect_exact_run(gemm, linear, m, Kind::kWarp, stream());
  EXPECT_EQ(gemm.tactic(m).mma, Mma::kWgmma);
  // A weight that moved is described anew.
  const HostMatrix moved_values = integers(n, k, 5), values = integers(m, k, 2);
  const Matrix moved(moved_values), x(values), out(m, n);
  gemm.run(moved.view(), x.view(), out.view(), stream());
  expect_exact(out.get(), exact_product(values, moved_values));
  EXPECT_EQ(gemm.stats().rebinds, 1u);
}

TEST_F(GemmWgmma, a_packed_weight_is_refused) {
  const Linear linear(128, 1024);
  EXPECT_EQ(code_of([&] { pack_weight(linear.weight, wgmma_tactic(8, 64, 1), stream()); }), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace twostep::test
