// The copy ring and the dependency wait under provocation, and the proof that each rule is needed: a kernel built
// with the rule turned off must fail the same test (draft-gemm 4.6, 7.2, 15.4).
//
// TWOSTEP_TEST_FAULT names the rule to turn off; it is set by GemmFaults below, in a child, for a fault may hang.
#include <gtest/gtest.h>

#include "child.h"
#include "cuda/launch.h"
#include "gemm_fixture.h"

namespace twostep::test {
namespace {

using GemmPipeline = GpuTest;
using GemmFaults = GpuTest;

// Faulty kernels are debug builds: a wait that never ends traps and says where, so that the GPU is free again.
TestSwitches switches() {
  static const std::string fault = variable("TWOSTEP_TEST_FAULT");
  if (fault.empty()) return {};
  return {fault.c_str(), true};
}

// Many runs into outputs of their own, all checked at the end.
void expect_equal_runs(const RawKernel& kernel, const Matrix& x, std::int64_t n, int runs, const HostMatrix& expected,
                       Stream stream) {
  const std::int64_t m = x.rows();
  Matrix outs(m * runs, n);
  for (int i = 0; i < runs; ++i) {
    auto* first = static_cast<std::uint16_t*>(outs.data()) + i * m * n;
    kernel.launch(x.view(), TensorView::matrix(first, m, n, Device::cuda(kDevice)), stream);
  }
  const HostMatrix all = outs.get();
  HostMatrix one(m, n);
  for (int i = 0; i < runs && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(testing::Message() << "run " << i);
    std::copy_n(all.bits.begin() + i * m * n, m * n, one.bits.begin());
    expect_exact(one, expected);
  }
}

TEST_F(GemmPipeline, ten_thousand_runs_beside_host_traffic_are_one_result_G16) {
  TWOSTEP_REST_IN_CHILD(60);
  const std::int64_t n = 256, k = 7168, bytes = 1 << 20;
  const Linear linear(n, k);
  const HostMatrix values = integers(64, k, 2);
  const Matrix x(values);
  const HostMatrix expected = exact_product(values, linear.host);
  void* pinned = nullptr;
  TWOSTEP_CUDA_CHECK(cuMemAllocHost(&pinned, bytes), "test");
  const OwnedStream beside;
  for (int cluster_n : {1, 2}) {
    const RawKernel slow(linear.weight, 64, slow_reader(64, cluster_n), switches());
    for (int round = 0; round < 5 && !HasFailure(); ++round) {
      host_traffic(pinned, bytes, 20000, beside.view());
      expect_equal_runs(slow, x, n, 100, expected, stream());
    }
  }
  const RawKernel chosen(linear.weight, 64, warp_tactic(64, n, k, device_facts(kDevice)), switches());
  for (int round = 0; round < 9 && !HasFailure(); ++round) {
    host_traffic(pinned, bytes, 20000, beside.view());
    expect_equal_runs(chosen, x, n, 1000, expected, stream());
  }
  synchronize();
  TWOSTEP_CUDA_CHECK(cuMemFreeHost(pinned), "test");
}

TEST_F(GemmPipeline, debug_build_gives_the_same_result_beside_host_traffic_G16) {
  TWOSTEP_REST_IN_CHILD(30);
  const std::int64_t n = 256, k = 7168;
  const Linear linear(n, k);
  const HostMatrix values = integers(64, k, 2);
  const Matrix x(values);
  for (int cluster_n : {1, 2}) {
    const RawKernel kernel(linear.weight, 64, slow_reader(64, cluster_n), {"kNone", true});
    expect_equal_runs(kernel, x, n, 200, exact_product(values, linear.host), stream());
  }
}

// In debug builds each lane releases what it has read, which a race checker can follow.
TEST_F(GemmPipeline, debug_kernels_whose_ring_turns_are_exact) {
  const std::int64_t n = 96, k = 1088;
  const int m = 11;
  const Linear linear(n, k);
  const HostMatrix values = integers(m, k, 2);
  const Matrix x(values);
  const HostMatrix expected = exact_product(values, linear.host);
  for (WeightLoad load : {WeightLoad::kRows, WeightLoad::kTiles})
    for (int cluster_n : {1, 2})
      for (int k_slices : {1, 2}) {
        Tactic tactic;
        tactic.weight_load = load;
        tactic.cluster_n = cluster_n;
        tactic.k_slices = k_slices;
        tactic.tile_n = 64;
        tactic.tile_k = 128;
        tactic.stages = 2;
        const RawKernel kernel(linear.weight, m, complete(tactic, m, device_facts(kDevice)), {"kNone", true});
        expect_equal_runs(kernel, x, n, 2, expected, stream());
      }
}

TEST_F(GemmPipeline, a_stage_is_freed_only_after_all_have_read_it_G18) {
  TWOSTEP_REST_IN_CHILD(60);
  const std::int64_t n = 256, k = 15360;
  const Linear linear(n, k);
  const HostMatrix values = integers(64, k, 2);
  const Matrix x(values);
  const HostMatrix expected = exact_product(values, linear.host);
  for (int cluster_n : {1, 2}) {
    const RawKernel slow(linear.weight, 64, slow_reader(64, cluster_n), switches());
    expect_equal_runs(slow, x, n, 256, expected, stream());
  }
  const RawKernel chosen(linear.weight, 64, warp_tactic(64, n, k, device_facts(kDevice)), switches());
  expect_equal_runs(chosen, x, n, 1024, expected, stream());
}

TEST_F(GemmPipeline, every_element_uses_what_the_predecessor_wrote_late_G19) {
  TWOSTEP_REST_IN_CHILD(30);
  const std::int64_t n = 1040, k = 1536;
  const int m = 16;
  const Linear linear(n, k);
  const Matrix stale(integers(m, k, 3));
  const HostMatrix values = integers(m, k, 2);
  const Matrix fresh(values), x(m, k), out(m, n);
  const HostMatrix expected = exact_product(values, linear.host);
  for (const Tactic& tactic : {warp_tactic(m, n, k, device_facts(kDevice)), slow_reader(m), slow_reader(m, 4)}) {
    const RawKernel kernel(linear.weight, m, tactic, switches());
    write_late(x, stale, m * k, 0, stream());
    write_late(x, fresh, m * k, 100, stream());
    kernel.launch(x.view(), out.view(), stream(), true);
    expect_exact(out.get(), expected);
  }
}

// A writes x, the kernel reads it, C overwrites it; all start early.
void expect_exact_chain(std::int64_t n, std::int64_t k, int m, const Tactic& tactic, Stream stream) {
  constexpr int kRounds = 200;
  const Linear linear(n, k);
  const HostMatrix values = integers(m, k, 2);
  const Matrix fresh(values), other(integers(m, k, 3)), x(m, k);
  const RawKernel kernel(linear.weight, m, tactic, switches());
  Matrix outs(m * kRounds, n);
  for (int i = 0; i < kRounds; ++i) {
    auto* first = static_cast<std::uint16_t*>(outs.data()) + i * m * n;
    write_late(x, fresh, m * k, 2, stream, i > 0);
    kernel.launch(x.view(), TensorView::matrix(first, m, n, Device::cuda(kDevice)), stream, true);
    write_late(x, other, m * k, 0, stream, true);
  }
  const HostMatrix all = outs.get();
  const HostMatrix expected = exact_product(values, linear.host);
  HostMatrix one(m, n);
  for (int i = 0; i < kRounds && !testing::Test::HasFailure(); ++i) {
    std::copy_n(all.bits.begin() + i * m * n, m * n, one.bits.begin());
    expect_exact(one, expected);
  }
}

TEST_F(GemmPipeline, a_chain_neither_reads_too_early_nor_is_overwritten_too_early_G21) {
  TWOSTEP_REST_IN_CHILD(30);
  const std::int64_t n = 32, k = 1536;
  const int m = 8;
  expect_exact_chain(n, k, m, warp_tactic(m, n, k, device_facts(kDevice)), stream());
}

// ---- The same of wgmma, whose ring is read by the multiply itself and whose x arrives by TMA

#define TWOSTEP_NEEDS_WGMMA() \
  if (device_facts(kDevice).arch != 90) GTEST_SKIP() << device_facts(kDevice).name << " has no wgmma"

TEST_F(GemmPipeline, wgmma_runs_beside_host_traffic_are_one_result_G16) {
  TWOSTEP_NEEDS_WGMMA();
  TWOSTEP_REST_IN_CHILD(60);
  const std::int64_t n = 256, k = 7168, bytes = 1 << 20;
  const Linear linear(n, k);
  const HostMatrix values = integers(64, k, 2);
  const Matrix x(values);
  const HostMatrix expected = exact_product(values, linear.host);
  void* pinned = nullptr;
  TWOSTEP_CUDA_CHECK(cuMemAllocHost(&pinned, bytes), "test");
  const OwnedStream beside;
  for (int cluster_k : {1, 8})
    for (int stages : {2, 4}) {
      const RawKernel kernel(linear.weight, 64, wgmma_tactic(64, 64, cluster_k, stages), switches());
      for (int round = 0; round < 3 && !HasFailure(); ++round) {
        host_traffic(pinned, bytes, 20000, beside.view());
        expect_equal_runs(kernel, x, n, 1000, expected, stream());
      }
    }
  synchronize();
  TWOSTEP_CUDA_CHECK(cuMemFreeHost(pinned), "test");
}

TEST_F(GemmPipeline, debug_kernels_of_wgmma_whose_ring_turns_are_exact) {
  TWOSTEP_NEEDS_WGMMA();
  const std::int64_t n = 208, k = 1536;
  const int m = 11;
  const Linear linear(n, k);
  const HostMatrix values = integers(m, k, 2);
  const Matrix x(values);
  const HostMatrix expected = exact_product(values, linear.host);
  for (int tile_n : {64, 128})
    for (int cluster_k : {1, 2, 8}) {
      const RawKernel kernel(linear.weight, m, wgmma_tactic(m, tile_n, cluster_k, 2), {"kNone", true});
      expect_equal_runs(kernel, x, n, 2, expected, stream());
    }
}

TEST_F(GemmPipeline, a_stage_of_wgmma_is_freed_only_after_it_is_multiplied_G18) {
  TWOSTEP_NEEDS_WGMMA();
  TWOSTEP_REST_IN_CHILD(60);
  const std::int64_t n = 256, k = 15360;
  const Linear linear(n, k);
  const HostMatrix values = integers(64, k, 2);
  const Matrix x(values);
  const HostMatrix expected = exact_product(values, linear.host);
  for (int tile_n : {64, 128}) {
    const RawKernel kernel(linear.weight, 64, wgmma_tactic(64, tile_n, 2, 2), switches());
    expect_equal_runs(kernel, x, n, 512, expected, stream());
  }
}

TEST_F(GemmPipeline, every_element_of_wgmma_uses_what_the_predecessor_wrote_late_G19) {
  TWOSTEP_NEEDS_WGMMA();
  TWOSTEP_REST_IN_CHILD(30);
  const std::int64_t n = 1040, k = 1536;
  const int m = 16;
  const Linear linear(n, k);
  const Matrix stale(integers(m, k, 3));
  const HostMatrix values = integers(m, k, 2);
  const Matrix fresh(values), x(m, k), out(m, n);
  const HostMatrix expected = exact_product(values, linear.host);
  for (int cluster_k : {1, 4}) {
    const RawKernel kernel(linear.weight, m, wgmma_tactic(m, 64, cluster_k), switches());
    write_late(x, stale, m * k, 0, stream());
    write_late(x, fresh, m * k, 100, stream());
    kernel.launch(x.view(), out.view(), stream(), true);
    expect_exact(out.get(), expected);
  }
}

TEST_F(GemmPipeline, a_chain_of_wgmma_neither_reads_nor_is_overwritten_too_early_G21) {
  TWOSTEP_NEEDS_WGMMA();
  TWOSTEP_REST_IN_CHILD(30);
  const std::int64_t n = 128, k = 1536;
  const int m = 8;
  for (int cluster_k : {1, 8}) expect_exact_chain(n, k, m, wgmma_tactic(m, 64, cluster_k), stream());
}

// The test fails for the right reason: wrong values, a wait that never ends, or a hang.
void expect_fails(const std::string& test, const std::string& fault) {
  const ChildResult child = run_child("GemmPipeline." + test, {{"TWOSTEP_TEST_FAULT", fault}}, 20);
  EXPECT_FALSE(child.passed) << "the test does not see " << fault << "\n" << child.output;
  const bool wrong_values = child.output.find("differs from the exact product") != std::string::npos;
  const bool stuck = child.output.find(": CTA ") != std::string::npos;        // a bounded wait of a debug build
  const bool broken = child.output.find("CUDA_ERROR_") != std::string::npos;  // what a trap or a bad barrier gives
  EXPECT_TRUE(wrong_values || stuck || broken || child.timed_out) << child.output;
}

TEST_F(GemmFaults, a_kernel_without_dependency_wait_fails_G19) {
  expect_fails("every_element_uses_what_the_predecessor_wrote_late_G19", "kNoDependencyWait");
}
TEST_F(GemmFaults, a_kernel_without_dependency_wait_fails_G21) {
  expect_fails("a_chain_neither_reads_too_early_nor_is_overwritten_too_early_G21", "kNoDependencyWait");
}
TEST_F(GemmFaults, a_kernel_that_releases_early_fails_G18) {
  expect_fails("a_stage_is_freed_only_after_all_have_read_it_G18", "kEarlyRelease");
}
TEST_F(GemmFaults, a_kernel_that_polls_the_wrong_parity_fails_G16) {
  expect_fails("ten_thousand_runs_beside_host_traffic_are_one_result_G16", "kWrongParity");
}

TEST_F(GemmFaults, a_wgmma_kernel_without_dependency_wait_fails_G19) {
  TWOSTEP_NEEDS_WGMMA();
  expect_fails("every_element_of_wgmma_uses_what_the_predecessor_wrote_late_G19", "kNoDependencyWait");
}
TEST_F(GemmFaults, a_wgmma_kernel_without_dependency_wait_fails_G21) {
  TWOSTEP_NEEDS_WGMMA();
  expect_fails("a_chain_of_wgmma_neither_reads_nor_is_overwritten_too_early_G21", "kNoDependencyWait");
}
TEST_F(GemmFaults, a_wgmma_kernel_that_releases_early_fails_G18) {
  TWOSTEP_NEEDS_WGMMA();
  expect_fails("a_stage_of_wgmma_is_freed_only_after_it_is_multiplied_G18", "kEarlyRelease");
}
TEST_F(GemmFaults, a_wgmma_kernel_that_polls_the_wrong_parity_fails_G16) {
  TWOSTEP_NEEDS_WGMMA();
  expect_fails("wgmma_runs_beside_host_traffic_are_one_result_G16", "kWrongParity");
}

}  // namespace
}  // namespace twostep::test
