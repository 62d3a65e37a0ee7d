// What each kind takes: strides, alignment, overlap, empty sizes, devices (draft-gemm 3.1 - 3.4, 1.3, 2.9).
#include <gtest/gtest.h>

#include "gemm_fixture.h"

namespace twostep::test {
namespace {

using GemmOperands = GpuTest;

// The same bytes of memory before and after a refused call.
template <class Work>
void expect_refused(StatusCode code, const Matrix& untouched, Work&& work) {
  const HostMatrix before = untouched.get();
  EXPECT_EQ(code_of(work), code);
  EXPECT_EQ(untouched.get(), before);
}

TEST_F(GemmOperands, row_strided_input_stays_on_warp_with_the_bits_of_the_packed_G1) {
  const Matrix weight(normals(1536, 128, 1));
  DraftGemm gemm(weight.view());
  for (int m : {4, 16}) {
    const HostMatrix values = normals(m, 128, 2);
    const Matrix packed(values);
    const Matrix columns(values, {6288, 6144 * 2});
    ASSERT_EQ(gemm.prepare(m, stream()), Kind::kWarp) << gemm.why(m);
    const Matrix out(m, 1536);
    EXPECT_EQ(gemm.kind(columns.view(), out.view()), Kind::kWarp);
    EXPECT_EQ(run(gemm, columns, 1536, stream()), run(gemm, packed, 1536, stream()));
  }
  EXPECT_EQ(gemm.stats().warp_runs, 4u);
}

TEST_F(GemmOperands, a_single_row_has_no_stride) {
  const Linear linear(256, 512);
  DraftGemm gemm(linear.weight);
  const HostMatrix values = integers(1, 512, 2);
  const Matrix x(values), out(1, 256);
  TensorView row = x.view(), result = out.view();
  for (std::int64_t stride : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{7}, std::int64_t{4099}}) {
    row.stride[0] = result.stride[0] = stride;
    ASSERT_EQ(gemm.prepare(1, stream()), Kind::kWarp);
    EXPECT_EQ(gemm.kind(row, result), Kind::kWarp) << gemm.why(row, result);
    gemm.run(row, result, stream());
    expect_exact(out.get(), exact_product(values, linear.host));
  }
  EXPECT_EQ(gemm.stats().warp_runs, 4u);
}

TEST_F(GemmOperands, strides_come_from_the_views_G2) {
  const Linear linear(256, 512);
  DraftGemm gemm(linear.weight);
  expect_exact_run(gemm, linear, 4, Kind::kWarp, stream(), {}, {256 + 32, 0});
  expect_exact_run(gemm, linear, 4, Kind::kWarp, stream(), {512 + 8, 0}, {256 + 32, 0});
}

TEST_F(GemmOperands, unexpected_layouts_of_x_and_out_are_refused_before_launch_G3) {
  const Linear linear(128, 128);
  DraftGemm gemm(linear.weight);
  ASSERT_EQ(gemm.prepare(4, stream()), Kind::kWarp);
  const Matrix x(integers(8, 256, 2)), out(4, 128);
  const TensorView good = TensorView::matrix(x.data(), 4, 128, Device::cuda(kDevice), 256);
  TensorView every_second = good, expanded = good, expanded_out = out.view();
  every_second.stride[1] = 2;
  expanded.stride[0] = 0;
  expanded_out.stride[0] = 0;
  const auto run_it = [&](const TensorView& a, const TensorView& b) { return [&] { gemm.run(a, b, stream()); }; };
  expect_refused(StatusCode::kBadLayout, out, run_it(every_second, out.view()));
  expect_refused(StatusCode::kBadLayout, out, run_it(expanded, out.view()));
  expect_refused(StatusCode::kBadLayout, out, run_it(good, expanded_out));
  EXPECT_EQ(gemm.accepts(every_second, out.view()).code, StatusCode::kBadLayout);
  EXPECT_EQ(gemm.stats().warp_runs + gemm.stats().cublas_runs, 0u);
  expect_exact_run(gemm, linear, 4, Kind::kWarp, stream());  // the stream is usable
}

TEST_F(GemmOperands, transposed_weight_is_right_on_cublas_G3) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(128, 192);
  HostMatrix turned(192, 128);
  for (std::int64_t i = 0; i < 192; ++i)
    for (std::int64_t j = 0; j < 128; ++j) turned.at(i, j) = linear.host.at(j, i);
  const Matrix stored(turned, {136, 0});
  TensorView weight = TensorView::matrix(stored.data(), 128, 192, Device::cuda(kDevice));
  weight.stride = {1, 136, 0, 0};
  DraftGemm gemm(weight);
  for (int m : {1, 5, 64}) {
    expect_exact_run(gemm, linear, m, Kind::kCublas, stream());
    EXPECT_EQ(gemm.why_code(m), WhyCode::kWeightLayout);
  }
  EXPECT_EQ(gemm.stats().fallbacks(WhyCode::kWeightLayout), 3u);
}

TEST_F(GemmOperands, base_alignment_picks_the_kind_and_never_the_values_G4) {
  TWOSTEP_NEEDS_CUBLAS();
  const std::int64_t n = 256, k = 1536;
  const Linear linear(n, k);
  DraftGemm gemm(linear.weight);
  std::uint64_t off_warp = 0;
  for (std::int64_t offset : {2, 8, 16, 24}) {
    const Kind kind = offset % 16 == 0 ? Kind::kWarp : Kind::kCublas;
    for (int m : {1, 16}) {
      expect_exact_run(gemm, linear, m, kind, stream(), {0, offset}, {});
      expect_exact_run(gemm, linear, m, kind, stream(), {}, {0, offset});
      off_warp += kind == Kind::kCublas;
      EXPECT_EQ(gemm.stats().fallbacks(WhyCode::kXLayout), off_warp);
      EXPECT_EQ(gemm.stats().fallbacks(WhyCode::kOutLayout), off_warp);

      const Linear moved(n, k, {0, offset});
      DraftGemm on_moved(moved.weight);
      expect_exact_run(on_moved, moved, m, kind, stream());
      EXPECT_EQ(on_moved.why_code(m), kind == Kind::kWarp ? WhyCode::kNone : WhyCode::kWeightAlignment);
    }
  }
}

TEST_F(GemmOperands, base_and_pitch_of_out_are_tested_apart_G5) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(256, 512);
  DraftGemm gemm(linear.weight);
  expect_exact_run(gemm, linear, 3, Kind::kWarp, stream(), {}, {256 + 8, 0});
  expect_exact_run(gemm, linear, 3, Kind::kCublas, stream(), {}, {256 + 2, 0});
  expect_exact_run(gemm, linear, 3, Kind::kWarp, stream(), {}, {0, 16});
  expect_exact_run(gemm, linear, 3, Kind::kCublas, stream(), {}, {0, 4});
  EXPECT_EQ(gemm.stats().fallbacks(WhyCode::kOutLayout), 2u);
}

TEST_F(GemmOperands, pitch_of_x_picks_the_kind) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(256, 512);
  DraftGemm gemm(linear.weight);
  expect_exact_run(gemm, linear, 3, Kind::kWarp, stream(), {512 + 8, 0});
  expect_exact_run(gemm, linear, 3, Kind::kCublas, stream(), {512 + 1, 0});
  EXPECT_EQ(gemm.stats().fallbacks(WhyCode::kXLayout), 1u);
}

TEST_F(GemmOperands, weight_with_a_pitch_is_served_without_a_copy) {
  const Linear linear(256, 512, {512 + 40, 0});
  DraftGemm gemm(linear.weight);
  for (int m : {1, 9, 64}) expect_exact_run(gemm, linear, m, Kind::kWarp, stream());
}

TEST_F(GemmOperands, out_that_meets_an_input_is_refused_G6) {
  const std::int64_t n = 128, k = 128;
  const int m = 8;
  const Linear linear(n, k);
  DraftGemm gemm(linear.weight);
  ASSERT_EQ(gemm.prepare(m, stream()), Kind::kWarp);
  const Matrix buffer(integers(16, k, 2));
  const TensorView x = buffer.view(m);
  auto* base = static_cast<std::uint16_t*>(buffer.data());
  const TensorView half_over = TensorView::matrix(base + 4 * k, m, n, Device::cuda(kDevice));
  const TensorView in_weight = TensorView::matrix(linear.matrix.data(), m, n, Device::cuda(kDevice));
  expect_refused(StatusCode::kOverlap, buffer, [&] { gemm.run(x, x, stream()); });
  expect_refused(StatusCode::kOverlap, buffer, [&] { gemm.run(x, half_over, stream()); });
  expect_refused(StatusCode::kOverlap, linear.matrix, [&] { gemm.run(x, in_weight, stream()); });

  // Two column windows of one buffer that do not meet.
  const HostMatrix values = integers(m, 2 * k, 3);
  const Matrix wide(values);
  auto* start = static_cast<std::uint16_t*>(wide.data());
  const TensorView left = TensorView::matrix(start, m, k, Device::cuda(kDevice), 2 * k);
  const TensorView right = TensorView::matrix(start + k, m, n, Device::cuda(kDevice), 2 * k);
  EXPECT_EQ(gemm.kind(left, right), Kind::kWarp);
  gemm.run(left, right, stream());
  HostMatrix left_values(m, k);
  for (int i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < k; ++j) left_values.at(i, j) = values.at(i, j);
  expect_exact(wide.columns(0, k), left_values);
  expect_exact(wide.columns(k, n), exact_product(left_values, linear.host));
}

TEST_F(GemmOperands, no_rows_and_no_features_launch_nothing_G7) {
  const Linear linear(128, 128);
  DraftGemm gemm(linear.weight);
  const Device gpu = Device::cuda(kDevice);
  const TensorView no_x = TensorView::matrix(nullptr, 0, 128, gpu), no_out = TensorView::matrix(nullptr, 0, 128, gpu);
  EXPECT_NO_THROW(gemm.prepare(0, stream()));
  EXPECT_NO_THROW(gemm.run(no_x, no_out, stream()));
  const Graph graph(stream(), [&] { gemm.run(no_x, no_out, stream()); });
  EXPECT_EQ(graph.num_nodes(), 0u);
  EXPECT_TRUE(gemm.keys().empty());
  EXPECT_EQ(gemm.stats().warp_runs + gemm.stats().cublas_runs + gemm.stats().compiles, 0u);
  EXPECT_EQ(code_of([&] { gemm.prepare(-1, stream()); }), StatusCode::kInvalidArgument);

  DraftGemm no_features(TensorView::matrix(nullptr, 0, 128, gpu));
  const Matrix x(integers(2, 128, 2));
  EXPECT_NO_THROW(no_features.run(x.view(), TensorView::matrix(nullptr, 2, 0, gpu), stream()));
  EXPECT_NO_THROW(synchronize());
}

TEST_F(GemmOperands, no_input_features_give_zeros_also_in_a_graph_G7) {
  const Device gpu = Device::cuda(kDevice);
  DraftGemm gemm(TensorView::matrix(nullptr, 48, 0, gpu));
  Matrix out(2, 48, {56, 0});
  const TensorView x = TensorView::matrix(nullptr, 2, 0, gpu);
  gemm.run(x, out.view(), stream());
  EXPECT_EQ(out.get(), HostMatrix(2, 48));  // +0, and the gaps are as they were
  const Graph graph(stream(), [&] { gemm.run(x, out.view(), stream()); });
  out.poison();
  graph.launch(stream());
  EXPECT_EQ(out.get(), HostMatrix(2, 48));
}

TEST_F(GemmOperands, operands_of_another_device_type_shape_or_rank_are_refused) {
  const Linear linear(128, 128);
  DraftGemm gemm(linear.weight);
  const Matrix x(integers(4, 128, 2)), out(4, 128);
  HostMatrix on_cpu(4, 128);
  const TensorView cpu = TensorView::matrix(on_cpu.bits.data(), 4, 128);
  TensorView narrow = x.view(), flat = x.view(), half = x.view();
  narrow.shape[1] = 64;
  flat.rank = 1;
  half.dtype = DType::kF16;
  const auto refused = [&](StatusCode code, const TensorView& a, const TensorView& b) {
    expect_refused(code, out, [&] { gemm.run(a, b, stream()); });
    EXPECT_EQ(gemm.accepts(a, b).code, code);
  };
  refused(StatusCode::kWrongDevice, cpu, out.view());
  refused(StatusCode::kWrongDevice, x.view(), cpu);
  refused(StatusCode::kInvalidArgument, narrow, out.view());
  refused(StatusCode::kInvalidArgument, x.view(3), out.view());
  refused(StatusCode::kInvalidArgument, flat, out.view());
  refused(StatusCode::kUnsupported, half, out.view());
}

TEST_F(GemmOperands, weights_that_break_the_contract_are_refused) {
  const Matrix matrix(128, 128);
  TensorView null = matrix.view(), rank = matrix.view(), dtype = matrix.view(), layout = matrix.view();
  null.data = nullptr;
  rank.rank = 3;
  dtype.dtype = DType::kF32;
  layout.stride = {256, 2, 0, 0};
  EXPECT_EQ(code_of([&] { DraftGemm{null}; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { DraftGemm{rank}; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { DraftGemm{dtype}; }), StatusCode::kUnsupported);
  EXPECT_EQ(code_of([&] { DraftGemm{layout}; }), StatusCode::kBadLayout);
}

// 2.9: with no current context at all, which is what a thread of the caller starts with.
TEST_F(GemmOperands, the_callers_current_device_is_the_same_after_every_call) {
  const Linear linear(128, 128);
  const Matrix x(integers(4, 128, 2)), out(4, 128);
  CUcontext own = nullptr;
  TWOSTEP_CUDA_CHECK(cuCtxGetCurrent(&own), "test");
  TWOSTEP_CUDA_CHECK(cuCtxSetCurrent(nullptr), "test");
  const auto keeps_it = [](const char* what, auto&& work, StatusCode code = StatusCode::kOk) {
    EXPECT_EQ(code_of(work), code) << what;
    CUcontext now = nullptr;
    TWOSTEP_CUDA_CHECK(cuCtxGetCurrent(&now), "test");
    EXPECT_EQ(now, nullptr) << "after " << what;
  };
  std::optional<DraftGemm> gemm;
  keeps_it("construction", [&] { gemm.emplace(linear.weight); });
  ASSERT_TRUE(gemm.has_value());
  keeps_it("prepare", [&] { gemm->prepare(4, stream()); });
  keeps_it("run", [&] { gemm->run(x.view(), out.view(), stream()); });
  keeps_it(
      "a refused run", [&] { gemm->run(x.view(), x.view(), stream()); }, StatusCode::kOverlap);
  keeps_it(
      "a refused prepare", [&] { gemm->prepare(-1, stream()); }, StatusCode::kInvalidArgument);
  keeps_it("rebind", [&] { gemm->bind(linear.weight); });
  keeps_it("weights_updated", [&] { gemm->weights_updated(stream()); });
  keeps_it("destruction", [&] { gemm.reset(); });
  TWOSTEP_CUDA_CHECK(cuCtxSetCurrent(own), "test");
  expect_exact(out.get(), exact_product(integers(4, 128, 2), linear.host));
}

}  // namespace
}  // namespace twostep::test
