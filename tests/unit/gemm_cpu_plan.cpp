// DraftGemm on a CPU weight: its answers, refusals and counters.
#include <thread>

#include "gemm/contract.h"
#include "tests/unit/code_of.h"
#include "tests/unit/gemm_oracle.h"
#include "twostep/gemm.h"

namespace twostep {
namespace {

using oracle::Buffer;
using test::code_of;

class GemmCpuPlan : public testing::Test {
 protected:
  std::mt19937_64 random{oracle::seed()};
  testing::ScopedTrace trace{__FILE__, __LINE__, oracle::replay()};

  Buffer integers(std::int64_t rows, std::int64_t cols, std::int64_t stride = 0, std::int64_t offset = 0) {
    Buffer buffer(rows, cols, stride, offset);
    buffer.fill(oracle::small_integers(random));
    return buffer;
  }
};

TEST_F(GemmCpuPlan, kind_is_cpu_and_why_names_the_instruction_set) {
  Buffer w = integers(16, 64);
  DraftGemm gemm(w.view());
  for (int m : {0, 1, 64, 65, 1000}) {
    EXPECT_EQ(gemm.prepare(m), Kind::kCpu);
    EXPECT_EQ(gemm.kind(m), Kind::kCpu);
    EXPECT_EQ(gemm.why_code(m), WhyCode::kNone);
    EXPECT_TRUE(gemm.why(m).find("AVX") != std::string::npos || gemm.why(m).find("plain C++") != std::string::npos);
  }
  EXPECT_EQ(code_of([&] { gemm.prepare(-1); }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { gemm.tactic(1); }), StatusCode::kNotPrepared);
  EXPECT_TRUE(gemm.keys().empty());
  EXPECT_TRUE(gemm.captured_addresses().empty());
  EXPECT_EQ(gemm.n(), 16);
  EXPECT_EQ(gemm.k(), 64);
}

// G15, and G12, G9 by the shapes.
TEST_F(GemmCpuPlan, every_row_count_from_0_to_72_is_exact) {
  for (auto [n, k] : {std::pair<int, int>{48, 192}, {17, 129}, {130, 64}}) {
    Buffer w = integers(n, k, k + 8);
    DraftGemm gemm(w.view());
    std::uint64_t runs = 0;
    for (int m = 0; m <= 72; ++m) {
      Buffer x = integers(m, k, k + 8);
      Buffer out(m, n, n + 8);
      gemm.run(x.view(), out.view());
      runs += m > 0;
      expect_exact(x, w, out);
      ASSERT_EQ(gemm.stats().cpu_runs, runs);
    }
  }
}

TEST_F(GemmCpuPlan, g1_a_column_window_gives_the_bits_of_the_packed_x) {
  Buffer w(1536, 128);
  w.fill(oracle::normals(random));
  DraftGemm gemm(w.view());
  for (int m : {4, 16}) {
    Buffer wide(m, 6288);
    wide.fill(oracle::normals(random));
    Buffer packed(m, 128), a(m, 1536), b(m, 1536);
    for (int i = 0; i < m; ++i)
      for (int p = 0; p < 128; ++p) packed.at(i, p) = wide.at(i, 6144 + p);
    gemm.run(TensorView::matrix(&wide.at(0, 6144), m, 128, Device::cpu(), 6288), a.view());
    gemm.run(packed.view(), b.view());
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < 1536; ++j) ASSERT_EQ(a.at(i, j), b.at(i, j));
    expect_close(packed, w, a, true);
  }
}

TEST_F(GemmCpuPlan, g2_columns_after_out_are_not_touched) {
  Buffer w = integers(48, 128), x = integers(4, 128), out(4, 48, 48 + 32);
  DraftGemm(w.view()).run(x.view(), out.view());
  expect_exact(x, w, out);
}

TEST_F(GemmCpuPlan, g3_unexpected_layouts_are_refused_and_leave_out_untouched) {
  Buffer w = integers(16, 64), x = integers(4, 160), out(4, 16);
  DraftGemm gemm(w.view());
  auto inner = TensorView::matrix(x.data(), 4, 64, Device::cpu(), 160);
  inner.stride[1] = 2;
  EXPECT_EQ(code_of([&] { gemm.run(inner, out.view()); }), StatusCode::kBadLayout);
  auto expanded = TensorView::matrix(x.data(), 4, 64);
  expanded.stride[0] = 0;
  EXPECT_EQ(code_of([&] { gemm.run(expanded, out.view()); }), StatusCode::kBadLayout);
  auto expanded_out = out.view();
  expanded_out.stride[0] = 0;
  const auto good = TensorView::matrix(x.data(), 4, 64, Device::cpu(), 160);
  EXPECT_EQ(code_of([&] { gemm.run(good, expanded_out); }), StatusCode::kBadLayout);
  EXPECT_EQ(gemm.accepts(good, expanded_out).code, StatusCode::kBadLayout);
  EXPECT_TRUE(gemm.accepts(good, out.view()).ok());
  EXPECT_TRUE(out.all_poison());
  EXPECT_EQ(gemm.stats().cpu_runs, 0u);
}

TEST_F(GemmCpuPlan, g3_a_transposed_weight_is_served_and_named) {
  Buffer turned = integers(128, 48, 50), x = integers(9, 128), out(9, 48), w(48, 128);
  for (int j = 0; j < 48; ++j)
    for (int p = 0; p < 128; ++p) w.at(j, p) = turned.at(p, j);
  auto view = TensorView::matrix(turned.data(), 48, 128);
  view.stride = {1, 50, 0, 0};
  DraftGemm gemm(view);
  gemm.run(x.view(), out.view());
  expect_exact(x, w, out);
  EXPECT_EQ(gemm.kind(9), Kind::kCpu);
  EXPECT_NE(gemm.why(9).find("transposed"), std::string::npos);
}

TEST_F(GemmCpuPlan, g4_g5_every_two_byte_alignment_is_exact) {
  for (int m : {1, 16})
    for (std::int64_t offset : {1, 4, 8, 12})
      for (int which = 0; which < 3; ++which) {
        Buffer w = integers(32, 1536, 0, which == 0 ? offset : 0);
        Buffer x = integers(m, 1536, 0, which == 1 ? offset : 0);
        Buffer out(m, 32, which == 2 ? 34 : 40, which == 2 ? offset : 0);
        DraftGemm(w.view()).run(x.view(), out.view());
        expect_exact(x, w, out);
      }
}

TEST_F(GemmCpuPlan, g6_overlap_is_refused_and_windows_that_do_not_meet_are_served) {
  Buffer w = integers(128, 128), both = integers(8, 256);
  DraftGemm gemm(w.view());
  const auto x = TensorView::matrix(both.data(), 8, 128, Device::cpu(), 256);
  const auto before = both.bits, w_before = w.bits;
  EXPECT_EQ(code_of([&] { gemm.run(x, x); }), StatusCode::kOverlap);
  EXPECT_EQ(code_of([&] { gemm.run(x, TensorView::matrix(&both.at(4, 0), 8, 128, Device::cpu(), 256)); }),
            StatusCode::kOverlap);
  EXPECT_EQ(code_of([&] { gemm.run(x, TensorView::matrix(&w.at(3, 0), 8, 128)); }), StatusCode::kOverlap);
  EXPECT_EQ(both.bits, before);
  EXPECT_EQ(w.bits, w_before);
  gemm.run(x, TensorView::matrix(&both.at(0, 128), 8, 128, Device::cpu(), 256));
  Buffer packed(8, 128), out(8, 128);
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 128; ++j) {
      packed.at(i, j) = both.at(i, j);
      out.at(i, j) = both.at(i, 128 + j);
    }
  expect_exact(packed, w, out);
}

TEST_F(GemmCpuPlan, g7_empty_products_succeed_and_no_k_gives_positive_zeros) {
  Buffer w = integers(16, 64);
  DraftGemm gemm(w.view());
  gemm.run(TensorView::matrix(nullptr, 0, 64), TensorView::matrix(nullptr, 0, 16));
  DraftGemm no_columns(TensorView::matrix(nullptr, 0, 64));
  Buffer x = integers(2, 64);
  no_columns.run(x.view(), TensorView::matrix(nullptr, 2, 0));
  EXPECT_EQ(gemm.stats().cpu_runs + no_columns.stats().cpu_runs, 0u);

  DraftGemm no_depth(TensorView::matrix(nullptr, 16, 0));
  Buffer out(2, 16, 20);
  no_depth.prepare(2);
  no_depth.run(TensorView::matrix(nullptr, 2, 0), out.view());
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 16; ++j) EXPECT_EQ(out.at(i, j), 0);
  EXPECT_TRUE(out.guards_whole());
}

TEST_F(GemmCpuPlan, g37_values_changed_in_place_are_seen) {
  Buffer w = integers(16, 64), x = integers(3, 64), out(3, 16);
  DraftGemm gemm(w.view());
  gemm.run(x.view(), out.view());
  expect_exact(x, w, out);
  w.fill(oracle::small_integers(random));
  gemm.weights_updated();
  gemm.run(x.view(), out.view());
  expect_exact(x, w, out);
  EXPECT_EQ(gemm.stats().rebinds, 0u);
}

TEST_F(GemmCpuPlan, g38_a_moved_weight_is_bound_again_and_counted) {
  Buffer first = integers(16, 64), second = integers(16, 64, 70), x = integers(3, 64), out(3, 16);
  DraftGemm gemm(first.view());
  gemm.run(first.view(), x.view(), out.view());
  EXPECT_EQ(gemm.stats().rebinds, 0u);
  gemm.run(second.view(), x.view(), out.view());
  EXPECT_EQ(gemm.stats().rebinds, 1u);
  expect_exact(x, second, out);
  gemm.run(x.view(), out.view());  // still the second
  expect_exact(x, second, out);
  gemm.bind(first.view());
  EXPECT_EQ(gemm.stats().rebinds, 2u);
  gemm.run(x.view(), out.view());
  expect_exact(x, first, out);
}

TEST_F(GemmCpuPlan, g39_another_shape_or_dtype_is_refused) {
  Buffer w = integers(16, 64), x = integers(3, 64), out(3, 16);
  DraftGemm gemm(w.view());
  auto other = w.view();
  other.shape = {15, 64, 0, 0};
  EXPECT_EQ(code_of([&] { gemm.run(other, x.view(), out.view()); }), StatusCode::kWeightChanged);
  other = w.view();
  other.dtype = DType::kF16;
  EXPECT_EQ(code_of([&] { gemm.run(other, x.view(), out.view()); }), StatusCode::kWeightChanged);
  other = w.view();
  other.device = Device::cuda(0);
  EXPECT_EQ(code_of([&] { gemm.bind(other); }), StatusCode::kWeightChanged);
  EXPECT_TRUE(out.all_poison());
  EXPECT_EQ(gemm.stats().rebinds, 0u);
  gemm.run(x.view(), out.view());  // the plan is still whole
  expect_exact(x, w, out);
}

TEST_F(GemmCpuPlan, an_operand_elsewhere_is_a_wrong_device) {
  Buffer w = integers(16, 64), x = integers(3, 64), out(3, 16);
  DraftGemm gemm(w.view());
  auto elsewhere = x.view();
  elsewhere.device = Device::cuda(0);
  EXPECT_EQ(code_of([&] { gemm.run(elsewhere, out.view()); }), StatusCode::kWrongDevice);
  EXPECT_TRUE(out.all_poison());
}

TEST_F(GemmCpuPlan, only_the_cpu_can_be_pinned_and_seal_changes_nothing) {
  Buffer w = integers(16, 64), x = integers(3, 64), out(3, 16);
  DraftGemm gemm(w.view(), {.strict = true});
  EXPECT_EQ(code_of([&] { gemm.pin(3, Kind::kWarp); }), StatusCode::kUnsupported);
  EXPECT_EQ(code_of([&] { gemm.pin(3, Kind::kCublas); }), StatusCode::kUnsupported);
  EXPECT_EQ(code_of([&] { gemm.pin(0, Kind::kCpu); }), StatusCode::kInvalidArgument);
  gemm.pin(3, Kind::kCpu);
  gemm.seal();
  gemm.run(x.view(), out.view());
  expect_exact(x, w, out);
}

// G51 through the public class: M up to 64, the row at each end and in the middle.
TEST_F(GemmCpuPlan, g51_a_row_has_the_same_bits_in_any_batch) {
  Buffer w(40, 700), x(64, 700);
  w.fill(oracle::normals(random));
  x.fill(oracle::normals(random));
  DraftGemm gemm(w.view());
  Buffer all(64, 40);
  gemm.run(x.view(), all.view());
  for (int m = 1; m <= 64; ++m)
    for (int first : {0, (64 - m) / 2, 64 - m}) {
      Buffer out(m, 40);
      gemm.run(TensorView::matrix(&x.at(first, 0), m, 700), out.view());
      for (int i = 0; i < m; ++i)
        for (int j = 0; j < 40; ++j) ASSERT_EQ(out.at(i, j), all.at(first + i, j)) << "M = " << m;
    }
}

TEST_F(GemmCpuPlan, one_plan_serves_several_threads_while_its_weight_moves) {
  Buffer first = integers(64, 300), second = first, x = integers(5, 300);
  DraftGemm gemm(first.view());
  std::vector<Buffer> outs(3, Buffer(5, 64));
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < outs.size(); ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) gemm.run(i % 2 ? first.view() : second.view(), x.view(), outs[t].view());
    });
  for (auto& thread : threads) thread.join();
  for (auto& out : outs) expect_exact(x, first, out);
  EXPECT_EQ(gemm.stats().cpu_runs, 150u);
}

}  // namespace
}  // namespace twostep
