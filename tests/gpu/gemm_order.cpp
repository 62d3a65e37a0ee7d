// Order of summation: equal bits run after run, within a family, and with `strict` for every M (draft-gemm 5).
#include <gtest/gtest.h>

#include <map>
#include <tuple>

#include "gemm_fixture.h"

namespace twostep::test {
namespace {

using GemmOrder = GpuTest;

constexpr std::int64_t kN = 528, kK = 2112;

// One row at place `at` among m rows; the others are new each time.
HostMatrix among(const HostMatrix& row, int m, int at, int stream) {
  HostMatrix rows = normals(m, row.cols, stream);
  std::copy(row.bits.begin(), row.bits.end(), rows.bits.begin() + at * row.cols);
  return rows;
}

TEST_F(GemmOrder, equal_inputs_give_equal_bits_eager_and_replayed_on_any_stream) {
  TWOSTEP_NEEDS_CUBLAS();
  const Matrix weight(normals(kN, kK, 1));
  const OwnedStream other;
  for (Kind kind : {Kind::kWarp, Kind::kCublas})
    for (int m : {1, 8, 40, 64}) {
      SCOPED_TRACE(testing::Message() << kind_name(kind) << ", M = " << m);
      DraftGemm gemm(weight.view());
      prepare_on(gemm, m, kind, stream());
      gemm.prepare(m, other.view());
      const Matrix x(normals(m, kK, 2));
      const HostMatrix first = run(gemm, x, kN, stream());
      Matrix out(m, kN);
      const Graph graph(stream(), [&] { gemm.run(x.view(), out.view(), stream()); });
      for (int i = 0; i < 20; ++i) {
        out.poison();
        if (i % 3 == 0) graph.launch(stream());
        else gemm.run(x.view(), out.view(), i % 3 == 1 ? stream() : other.view());
        ASSERT_EQ(out.get(), first) << "run " << i;
      }
      // A second plan makes the same choices.
      DraftGemm again(weight.view());
      prepare_on(again, m, kind, stream());
      EXPECT_EQ(run(again, x, kN, stream()), first);
    }
}

TEST_F(GemmOrder, a_thousand_repeats_are_one_result_G51) {
  const Matrix weight(normals(kN, kK, 1));
  DraftGemm gemm(weight.view());
  const int m = 13;
  ASSERT_EQ(gemm.prepare(m, stream()), Kind::kWarp);
  const Matrix x(normals(m, kK, 2));
  const HostMatrix first = run(gemm, x, kN, stream());
  Matrix outs(m * 1000, kN);
  for (int i = 0; i < 1000; ++i) {
    auto* to = static_cast<std::uint16_t*>(outs.data()) + i * m * kN;
    gemm.run(x.view(), TensorView::matrix(to, m, kN, Device::cuda(kDevice)), stream());
  }
  const HostMatrix all = outs.get();
  for (int i = 0; i < 1000; ++i)
    ASSERT_TRUE(std::equal(first.bits.begin(), first.bits.end(), all.bits.begin() + i * m * kN)) << "run " << i;
}

// The bits of a row alone, by family; `strict` has one.
void expect_rows_are_independent(DraftGemm& gemm, bool strict, Stream stream) {
  const HostMatrix row = normals(1, kK, 2);
  std::vector<std::pair<Family, HostMatrix>> alone;
  for (int m = 1; m <= kMaxWarpRows; ++m) {
    ASSERT_EQ(gemm.prepare(m, stream), Kind::kWarp) << gemm.why(m);
    const Family family = family_of(gemm.tactic(m));
    if (strict && m > 1) {
      ASSERT_EQ(family, alone.front().first) << m;
    }
    for (int at : {0, m / 2, m - 1}) {
      const Matrix x(among(row, m, at, 100 + 3 * m));
      const HostMatrix result = run(gemm, x, kN, stream).row(at);
      const auto first = std::find_if(alone.begin(), alone.end(), [&](const auto& f) { return f.first == family; });
      if (first == alone.end()) {
        alone.emplace_back(family, result);
      } else {
        ASSERT_EQ(result, first->second) << "row " << at << " of " << m;
      }
    }
  }
  EXPECT_EQ(gemm.stats().cublas_runs, 0u);
}

TEST_F(GemmOrder, a_row_does_not_depend_on_its_batch_mates_within_a_family_G51) {
  const Matrix weight(normals(kN, kK, 1));
  DraftGemm gemm(weight.view());
  expect_rows_are_independent(gemm, false, stream());
}

TEST_F(GemmOrder, with_strict_a_row_has_the_same_bits_for_every_row_count_G51) {
  const Matrix weight(normals(kN, kK, 1));
  Options options;
  options.strict = true;
  DraftGemm gemm(weight.view(), options);
  expect_rows_are_independent(gemm, true, stream());
}

TEST_F(GemmOrder, with_strict_pitch_and_place_of_x_and_out_do_not_change_bits) {
  const Matrix weight(normals(kN, kK, 1));
  Options options;
  options.strict = true;
  DraftGemm gemm(weight.view(), options);
  for (int m : {1, 17}) {
    ASSERT_EQ(gemm.prepare(m, stream()), Kind::kWarp);
    const HostMatrix values = normals(m, kK, 2);
    const HostMatrix packed = run(gemm, Matrix(values), kN, stream());
    for (std::int64_t extra : {8, 136})
      for (std::int64_t offset : {16, 48}) {
        const Matrix x(values, {kK + extra, offset}), out(m, kN, {kN + extra, offset});
        gemm.run(x.view(), out.view(), stream());
        EXPECT_EQ(out.get(), packed);
      }
  }
}

TEST_F(GemmOrder, strict_refuses_what_would_leave_the_family) {
  Options options;
  options.strict = true;
  const Linear ragged(24, 128);
  EXPECT_EQ(code_of([&] { DraftGemm(ragged.weight, options).prepare(4); }), StatusCode::kUnsupported);

  const Linear linear(128, 128);
  DraftGemm gemm(linear.weight, options);
  ASSERT_EQ(gemm.prepare(4, stream()), Kind::kWarp);
  const Matrix odd(integers(4, 128, 2), {0, 2}), x(integers(4, 128, 2)), out(4, 128);
  const HostMatrix before = out.get();
  EXPECT_EQ(code_of([&] { gemm.run(odd.view(), out.view(), stream()); }), StatusCode::kUnsupported);
  EXPECT_EQ(gemm.accepts(odd.view(), out.view()).code, StatusCode::kUnsupported);
  EXPECT_EQ(out.get(), before);
  EXPECT_EQ(code_of([&] { gemm.pin(4, Kind::kCublas); }), StatusCode::kUnsupported);

  const Matrix more(integers(32, 128, 2)), more_out(32, 128);
  StatusCode refused = StatusCode::kOk;
  const Graph graph(stream(), [&] { refused = code_of([&] { gemm.run(more.view(), more_out.view(), stream()); }); });
  EXPECT_EQ(refused, StatusCode::kNotPrepared);
  EXPECT_EQ(graph.num_nodes(), 0u);
}

}  // namespace
}  // namespace twostep::test
