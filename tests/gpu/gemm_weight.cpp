// The life of a weight: changed in place, moved, replaced, packed (draft-gemm 3.6, 3.7).
#include <gtest/gtest.h>

#include "gemm_fixture.h"

namespace twostep::test {
namespace {

using GemmWeight = GpuTest;
using GemmPacked = GpuTest;

constexpr std::int64_t kN = 272, kK = 1088;
constexpr int kM = 8;

Address address_of(const Matrix& matrix) { return {reinterpret_cast<std::uintptr_t>(matrix.data())}; }

TEST_F(GemmWeight, values_changed_in_place_are_seen_by_runs_and_replays_G37) {
  Linear linear(kN, kK);
  DraftGemm gemm(linear.weight);
  ASSERT_EQ(gemm.prepare(kM, stream()), Kind::kWarp);
  const HostMatrix values = integers(kM, kK, 2);
  const Matrix x(values);
  Matrix out(kM, kN);
  const Graph graph(stream(), [&] { gemm.run(x.view(), out.view(), stream()); });
  const Stats before = gemm.stats();
  for (int version = 0; version < 3; ++version) {
    const HostMatrix weight = integers(kN, kK, 20 + version);
    linear.matrix.set(weight);
    const HostMatrix expected = exact_product(values, weight);
    expect_exact(run(gemm, x, kN, stream()), expected);
    out.poison();
    graph.launch(stream());
    expect_exact(out.get(), expected);
  }
  EXPECT_EQ(gemm.stats().compiles, before.compiles);
  EXPECT_EQ(gemm.stats().rebinds, 0u);
}

TEST_F(GemmWeight, a_moved_weight_is_rebound_in_the_same_call_G38) {
  const Linear linear(kN, kK);
  DraftGemm gemm(linear.weight);
  ASSERT_EQ(gemm.prepare(kM, stream()), Kind::kWarp);
  const HostMatrix values = integers(kM, kK, 2);
  const Matrix x(values), out(kM, kN);
  const Graph graph(stream(), [&] { gemm.run(linear.weight, x.view(), out.view(), stream()); });
  EXPECT_EQ(gemm.captured_addresses(), std::vector{address_of(linear.matrix)});

  const HostMatrix new_values = integers(kN, kK, 5);
  const Matrix moved(new_values);
  const Stats before = gemm.stats();
  gemm.run(moved.view(), x.view(), out.view(), stream());
  expect_exact(out.get(), exact_product(values, new_values));
  EXPECT_EQ(gemm.stats().rebinds, 1u);
  EXPECT_EQ(gemm.stats().warp_runs, before.warp_runs + 1);
  EXPECT_EQ(gemm.stats().compiles, before.compiles);
  EXPECT_EQ(gemm.captured_addresses(), std::vector{address_of(linear.matrix)});
  gemm.run(moved.view(), x.view(), out.view(), stream());
  EXPECT_EQ(gemm.stats().rebinds, 1u);
  graph.launch(stream());  // replays the address that it recorded
  expect_exact(out.get(), exact_product(values, linear.host));
}

TEST_F(GemmWeight, a_weight_moved_to_a_worse_place_goes_to_cublas_and_back) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(kN, kK), shifted(kN, kK, {0, 8}), odd_pitch(kN, kK, {kK + 2, 0}), wide(kN, kK, {kK + 8, 0});
  DraftGemm gemm(linear.weight);
  expect_exact_run(gemm, linear, kM, Kind::kWarp, stream());
  gemm.bind(shifted.weight);
  expect_exact_run(gemm, linear, kM, Kind::kCublas, stream());
  EXPECT_EQ(gemm.why_code(kM), WhyCode::kWeightAlignment);
  gemm.bind(odd_pitch.weight);
  expect_exact_run(gemm, linear, kM, Kind::kCublas, stream());
  EXPECT_EQ(gemm.why_code(kM), WhyCode::kWeightLayout);
  gemm.bind(wide.weight);
  expect_exact_run(gemm, linear, kM, Kind::kWarp, stream());
  EXPECT_EQ(gemm.stats().rebinds, 3u);
  EXPECT_EQ(gemm.stats().fallbacks(WhyCode::kWeightAlignment), 1u);
  EXPECT_EQ(gemm.stats().fallbacks(WhyCode::kWeightLayout), 1u);
}

TEST_F(GemmWeight, a_weight_moved_to_an_odd_address_or_turned_is_right) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(kN, kK), odd(kN, kK, {0, 2});
  HostMatrix turned(kK, kN);
  for (std::int64_t i = 0; i < kK; ++i)
    for (std::int64_t j = 0; j < kN; ++j) turned.at(i, j) = linear.host.at(j, i);
  const Matrix stored(turned);
  TensorView transposed = TensorView::matrix(stored.data(), kN, kK, Device::cuda(kDevice));
  transposed.stride = {1, kN, 0, 0};
  DraftGemm gemm(linear.weight);
  for (int m : {1, 5, 64, 65}) {
    gemm.bind(odd.weight);
    expect_exact_run(gemm, linear, m, Kind::kCublas, stream());
    gemm.bind(transposed);
    expect_exact_run(gemm, linear, m, Kind::kCublas, stream());
    gemm.bind(linear.weight);
    expect_exact_run(gemm, linear, m, m <= 64 ? Kind::kWarp : Kind::kCublas, stream());
  }
}

TEST_F(GemmWeight, a_plan_of_a_misaligned_weight_takes_the_warp_kernel_once_the_weight_is_aligned) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(kN, kK), shifted(kN, kK, {0, 8});
  DraftGemm gemm(shifted.weight);
  EXPECT_EQ(gemm.prepare(kM, stream()), Kind::kCublas);
  gemm.bind(linear.weight);
  const HostMatrix values = integers(kM, kK, 2);
  const Matrix x(values), out(kM, kN);
  gemm.run(x.view(), out.view(), stream());  // eager: the first run on this weight prepares it
  expect_exact(out.get(), exact_product(values, linear.host));
  EXPECT_EQ(gemm.stats().warp_runs, 1u);
}

TEST_F(GemmWeight, another_tensor_at_the_same_address_is_refused_G39) {
  const Linear linear(kN, kK);
  DraftGemm gemm(linear.weight);
  ASSERT_EQ(gemm.prepare(kM, stream()), Kind::kWarp);
  const Matrix x(integers(kM, kK, 2)), out(kM, kN);
  TensorView fewer = linear.weight, other_dtype = linear.weight, other_device = linear.weight,
             no_memory = linear.weight;
  fewer.shape[0] = kN - 16;
  other_dtype.dtype = DType::kF16;
  other_device.device = Device::cpu();
  no_memory.data = nullptr;
  for (const TensorView& changed : {fewer, other_dtype, other_device, no_memory}) {
    const HostMatrix before = out.get();
    EXPECT_EQ(code_of([&] { gemm.run(changed, x.view(), out.view(), stream()); }), StatusCode::kWeightChanged);
    EXPECT_EQ(code_of([&] { gemm.bind(changed); }), StatusCode::kWeightChanged);
    EXPECT_EQ(out.get(), before);
  }
  expect_exact_run(gemm, linear, kM, Kind::kWarp, stream());  // the bound weight still serves
}

TEST_F(GemmWeight, prepared_warp_split_k_launches_or_refuses) {
  const Linear linear(kN, kK);
  const Tactic tactic = warp_tactic(kM, kN, kK, device_facts(kDevice));
  PreparedWarpSplitK prepared(linear.weight, {{kM, tactic}});
  EXPECT_EQ(prepared.keys().size(), 1u);
  const HostMatrix values = integers(9, kK, 2);
  const Matrix x(values), out(9, kN);
  EXPECT_EQ(code_of([&] { prepared.run(x.view(), out.view(), stream()); }), StatusCode::kNotPrepared);
  prepared.run(x.view(5), out.view(5), stream());
  HostMatrix five(5, kK), result(5, kN);
  std::copy_n(values.bits.begin(), five.bits.size(), five.bits.begin());
  HostMatrix all = out.get();
  std::copy_n(all.bits.begin(), result.bits.size(), result.bits.begin());
  expect_exact(result, exact_product(five, linear.host));

  const HostMatrix moved_values = integers(kN, kK, 5);
  const Matrix moved(moved_values);
  prepared.rebind(moved.view());
  prepared.run(x.view(5), out.view(5), stream());
  all = out.get();
  std::copy_n(all.bits.begin(), result.bits.size(), result.bits.begin());
  expect_exact(result, exact_product(five, moved_values));

  TensorView smaller = moved.view();
  smaller.shape[0] = kN - 16;
  EXPECT_EQ(code_of([&] { prepared.rebind(smaller); }), StatusCode::kWeightChanged);
  TensorView odd = x.view(5);
  odd.data = static_cast<std::uint16_t*>(odd.data) + 1;
  EXPECT_EQ(code_of([&] { prepared.run(odd, out.view(5), stream()); }), StatusCode::kBadLayout);
  Tactic impossible = tactic;
  impossible.tile_n = 24;
  EXPECT_EQ(code_of([&] { PreparedWarpSplitK(linear.weight, {{kM, impossible}}); }), StatusCode::kUnsupported);
}

// Tiles that divide n.
Tactic packed_tactic(std::int64_t n, int m) {
  Tactic tactic;
  tactic.weight_order = WeightOrder::kPacked;
  tactic.tile_n = n % 32 == 0 ? 32 : 16;
  tactic.tile_k = 256;
  tactic.stages = 4;
  tactic.k_slices = 4;
  tactic.warps = 4;
  return complete(tactic, m, device_facts(kDevice));
}

TEST_F(GemmPacked, bits_are_those_of_the_row_major_weight) {
  for (const auto& [n, k] : std::vector<std::pair<std::int64_t, std::int64_t>>{{352, 1536}, {272, 1088}}) {
    const Matrix weight(normals(n, k, 1), {k + 8, 0});
    const PackedWeight packed = pack_weight(weight.view(), packed_tactic(n, kM), stream());
    EXPECT_EQ(packed.bytes(), n * k * 2);
    EXPECT_EQ(packed.tactic().weight_order, WeightOrder::kPacked);
    DraftGemm gemm(packed);
    std::map<int, Tactic> row_major;
    for (int m : {1, 8, 24, 64}) {
      Tactic tactic = packed_tactic(n, m);
      tactic.weight_order = WeightOrder::kRowMajor;
      row_major[m] = complete(tactic, m, device_facts(kDevice));
    }
    PreparedWarpSplitK reference(weight.view(), row_major);
    for (int m : {1, 8, 24, 64}) {
      SCOPED_TRACE(testing::Message() << "N = " << n << ", K = " << k << ", M = " << m);
      prepare_on(gemm, m, Kind::kWarp, stream());
      EXPECT_EQ(gemm.tactic(m).weight_order, WeightOrder::kPacked);
      const Matrix x(normals(m, k, 2)), expected(m, n);
      reference.run(x.view(), expected.view(), stream());
      EXPECT_EQ(run(gemm, x, n, stream()), expected.get());
    }
  }
}

TEST_F(GemmPacked, cublas_serves_from_the_source) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(kN, kK);
  const PackedWeight packed = pack_weight(linear.weight, packed_tactic(kN, kM), stream());
  DraftGemm gemm(packed);
  expect_exact_run(gemm, linear, kM, Kind::kWarp, stream());
  expect_exact_run(gemm, linear, 65, Kind::kCublas, stream());
  expect_exact_run(gemm, linear, kM, Kind::kCublas, stream(), {0, 2});
}

TEST_F(GemmPacked, weights_updated_packs_again_in_stream_order) {
  const Linear linear(kN, kK);
  const PackedWeight packed = pack_weight(linear.weight, packed_tactic(kN, kM), stream());
  DraftGemm gemm(packed);
  prepare_on(gemm, kM, Kind::kWarp, stream());
  const HostMatrix values = integers(kM, kK, 2), new_values = integers(kN, kK, 5);
  const Matrix x(values), source(new_values);
  expect_exact(run(gemm, x, kN, stream()), exact_product(values, linear.host));
  write_late(linear.matrix, source, kN * kK, 100, stream());
  gemm.weights_updated(stream());
  expect_exact(run(gemm, x, kN, stream()), exact_product(values, new_values));
}

TEST_F(GemmPacked, a_moved_source_is_refused) {
  const Linear linear(kN, kK);
  const Matrix moved(linear.host);
  const PackedWeight packed = pack_weight(linear.weight, packed_tactic(kN, kM), stream());
  DraftGemm gemm(packed);
  prepare_on(gemm, kM, Kind::kWarp, stream());
  const Matrix x(integers(kM, kK, 2)), out(kM, kN);
  EXPECT_NO_THROW(gemm.run(linear.weight, x.view(), out.view(), stream()));
  EXPECT_EQ(code_of([&] { gemm.run(moved.view(), x.view(), out.view(), stream()); }), StatusCode::kWeightChanged);
}

TEST_F(GemmPacked, another_pitch_of_the_source_is_refused) {
  const Linear linear(kN, kK, {kK + 8, 0});
  const PackedWeight packed = pack_weight(linear.weight, packed_tactic(kN, kM), stream());
  DraftGemm gemm(packed);
  prepare_on(gemm, kM, Kind::kWarp, stream());
  const Matrix x(integers(kM, kK, 2)), out(kM, kN);
  TensorView narrower = linear.weight;
  narrower.stride[0] = kK;
  EXPECT_EQ(code_of([&] { gemm.run(narrower, x.view(), out.view(), stream()); }), StatusCode::kWeightChanged);
}

TEST_F(GemmPacked, what_cannot_be_packed_is_refused) {
  HostMatrix host(16, 64);
  const TensorView on_cpu = TensorView::matrix(host.bits.data(), 16, 64);
  const Matrix odd(24, 64), cut(272, 64);
  EXPECT_EQ(code_of([&] { pack_weight(on_cpu, packed_tactic(16, 8)); }), StatusCode::kUnsupported);
  EXPECT_EQ(code_of([&] { pack_weight(odd.view(), packed_tactic(16, 8)); }), StatusCode::kUnsupported);
  EXPECT_EQ(code_of([&] { pack_weight(cut.view(), packed_tactic(32, 8)); }), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace twostep::test
