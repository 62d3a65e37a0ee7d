// The plan itself: prepare, pin, seal, options, counters, and what run costs on the host (draft-gemm 2).
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "child.h"
#include "gemm_fixture.h"

namespace twostep::test {
namespace {

using GemmPlan = GpuTest;

template <class Work>
double milliseconds(Work&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

TEST_F(GemmPlan, preparing_one_row_count_prepares_its_bucket) {
  const Linear linear(240, 1088);
  DraftGemm gemm(linear.weight);
  EXPECT_EQ(gemm.kind(13), Kind::kCublas);
  EXPECT_EQ(gemm.why_code(13), WhyCode::kNotPrepared);
  EXPECT_FALSE(gemm.why(13).empty());
  EXPECT_EQ(code_of([&] { gemm.tactic(13); }), StatusCode::kNotPrepared);
  ASSERT_EQ(gemm.prepare(13, stream()), Kind::kWarp);
  for (int m = 9; m <= 16; ++m) {
    EXPECT_EQ(gemm.kind(m), Kind::kWarp);
    EXPECT_EQ(gemm.why(m), "");
  }
  EXPECT_EQ(gemm.kind(8), Kind::kCublas);
  EXPECT_EQ(gemm.kind(17), Kind::kCublas);
  const Stats once = gemm.stats();
  EXPECT_EQ(once.compiles + once.cache_hits, 1u);
  gemm.prepare(13, stream());
  gemm.prepare(10, stream());
  EXPECT_EQ(gemm.stats().compiles + gemm.stats().cache_hits, 1u);
  ASSERT_EQ(gemm.keys().size(), 1u);
  EXPECT_EQ(gemm.keys()[0].hash.size(), 32u);
  EXPECT_NE(gemm.keys()[0].name.find("gemm-n240-k1088-m16-sm_"), std::string::npos) << gemm.keys()[0].name;
}

// The driver waits for running kernels when it loads code for the first time, whichever call loads it
// (docs/notes/warp-split-k.md, 3). What is loaded already is prepared without a wait, and nothing is enqueued.
TEST_F(GemmPlan, prepare_of_a_loaded_kernel_enqueues_nothing_and_waits_for_no_stream) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(256, 1088);
  DraftGemm first(linear.weight);
  first.prepare(8, stream());
  first.prepare(65, stream());
  DraftGemm gemm(linear.weight);
  sleep(0, stream());
  synchronize();
  sleep(2000000, stream());
  const double warp_ms = milliseconds([&] { gemm.prepare(8, stream()); });
  const double cublas_ms = milliseconds([&] { gemm.prepare(65, stream()); });
  std::printf("prepare beside a busy stream: warp %.1f ms, cublas %.1f ms\n", warp_ms, cublas_ms);
  EXPECT_LT(warp_ms + cublas_ms, 1000.0) << "prepare waited for the caller's stream";
  synchronize();
}

TEST_F(GemmPlan, the_first_eager_run_prepares_and_counts_a_late_compile_at_most) {
  const Linear linear(224, 1088);
  DraftGemm gemm(linear.weight);
  const HostMatrix values = integers(5, 1088, 2);
  const Matrix x(values);
  expect_exact(run(gemm, x, 224, stream()), exact_product(values, linear.host));
  EXPECT_EQ(gemm.kind(5), Kind::kWarp);
  EXPECT_EQ(gemm.stats().warp_runs, 1u);
  EXPECT_EQ(gemm.stats().late_compiles, gemm.stats().compiles);
}

TEST_F(GemmPlan, a_pin_forces_one_row_count_alone) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(272, 1088);
  DraftGemm gemm(linear.weight);
  prepare_on(gemm, 7, Kind::kCublas, stream());
  expect_exact_run(gemm, linear, 7, Kind::kCublas, stream());
  expect_exact_run(gemm, linear, 8, Kind::kWarp, stream());
  EXPECT_EQ(gemm.why_code(7), WhyCode::kPinned);
  EXPECT_EQ(gemm.stats().fallbacks(WhyCode::kPinned), 1u);
  gemm.pin(7, Kind::kWarp);
  expect_exact_run(gemm, linear, 7, Kind::kWarp, stream());
  EXPECT_EQ(code_of([&] { gemm.pin(65, Kind::kWarp); }), StatusCode::kUnsupported);
  EXPECT_EQ(code_of([&] { gemm.pin(7, Kind::kCpu); }), StatusCode::kUnsupported);
  const Linear ragged(24, 128);
  DraftGemm never(ragged.weight);
  EXPECT_EQ(code_of([&] { never.pin(7, Kind::kWarp); }), StatusCode::kUnsupported);
}

TEST_F(GemmPlan, an_eager_run_prepares_what_a_pin_sends_to_warp) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(272, 1088);
  DraftGemm gemm(linear.weight);
  gemm.pin(7, Kind::kCublas);
  gemm.prepare(7, stream());
  gemm.pin(7, Kind::kWarp);
  const HostMatrix values = integers(7, 1088, 2);
  const Matrix x(values), out(7, 272);
  gemm.run(x.view(), out.view(), stream());
  expect_exact(out.get(), exact_product(values, linear.host));
  EXPECT_EQ(gemm.stats().warp_runs, 1u);
}

TEST_F(GemmPlan, prepare_and_questions_need_no_current_context) {
  const Linear linear(272, 1088);
  DraftGemm gemm(linear.weight);
  gemm.prepare(8);
  std::thread([&] {
    EXPECT_EQ(gemm.prepare(8), Kind::kWarp);
    EXPECT_EQ(gemm.prepare(16), Kind::kWarp);
    EXPECT_NO_THROW(gemm.bind(linear.weight));
    EXPECT_EQ(gemm.why(8), "");
  }).join();
}

// 4.3: both times stand in the sentence; a pin overrules the table.
TEST_F(GemmPlan, the_table_sends_rows_to_the_faster_kind_and_says_so) {
  TWOSTEP_NEEDS_CUBLAS();
  int rows = 0;
  std::int64_t n = 0;
  for (std::int64_t shard : {10240, 20480, 40960})
    for (int m : {64, 32}) {
      const auto entry = table_entry(m, shard, 7168, device_facts(kDevice));
      if (rows == 0 && entry && !entry->warp_wins()) rows = m, n = shard;
    }
  if (rows == 0) GTEST_SKIP() << "no head's entry in the table of this GPU is lost to cuBLAS";
  if (!has_free_memory(1ull << 30)) GTEST_SKIP() << "needs 1 GB of free GPU memory";
  const Matrix weight = Matrix::of_integers(n, 7168, 1);
  DraftGemm gemm(weight.view());
  EXPECT_EQ(gemm.prepare(rows, stream()), Kind::kCublas);
  EXPECT_EQ(gemm.why_code(rows), WhyCode::kCublasFaster);
  EXPECT_NE(gemm.why(rows).find(" us"), std::string::npos) << gemm.why(rows);
  prepare_on(gemm, rows, Kind::kWarp, stream());
}

TEST_F(GemmPlan, after_seal_nothing_is_compiled_G28) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(288, 1088);
  DraftGemm gemm(linear.weight);
  ASSERT_EQ(gemm.prepare(40, stream()), Kind::kWarp);
  gemm.seal();
  const Stats before = gemm.stats();
  double longest = 0;
  for (int m : {5, 13, 27}) {
    const HostMatrix values = integers(m, 1088, 2);
    const Matrix x(values), out(m, 288);
    for (int i = 0; i < 10; ++i)
      longest = std::max(longest, milliseconds([&] { gemm.run(x.view(), out.view(), stream()); }));
    expect_exact(out.get(), exact_product(values, linear.host));
    EXPECT_EQ(gemm.kind(m), Kind::kCublas);
    EXPECT_EQ(gemm.why_code(m), WhyCode::kSealed);
  }
  EXPECT_EQ(gemm.stats().compiles, before.compiles);
  EXPECT_EQ(gemm.stats().late_compiles, 0u);
  EXPECT_EQ(gemm.stats().fallbacks(WhyCode::kSealed), 30u);
  EXPECT_EQ(gemm.stats().cublas_runs, 30u);
  std::printf("longest run after seal: %.3f ms\n", longest);
  EXPECT_LT(longest, 100.0);
  expect_exact_run(gemm, linear, 40, Kind::kWarp, stream());
}

TEST_F(GemmPlan, options_turn_the_warp_kernel_off) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(272, 1088);
  Options options;
  options.warp = false;
  DraftGemm gemm(linear.weight, options);
  expect_exact_run(gemm, linear, 8, Kind::kCublas, stream());
  EXPECT_EQ(gemm.why_code(8), WhyCode::kDisabled);
  EXPECT_EQ(gemm.stats().fallbacks(WhyCode::kDisabled), 1u);
}

// The failure is of one bucket, and transient: here a kernel that no cache has yet, in a plan that may not compile.
TEST_F(GemmPlan, a_failed_bucket_disables_no_other_and_is_tried_again_G36) {
  TWOSTEP_NEEDS_CUBLAS();
  if (!in_child()) {
    const ChildResult child = run_this_test({{"TWOSTEP_CACHE", "0"}}, 60);
    ASSERT_TRUE(child.passed) << child.output;
    return;
  }
  const std::int64_t n = 272, k = 1088;
  const Linear linear(n, k);
  DraftGemm compiles(linear.weight);
  ASSERT_EQ(compiles.prepare(9, stream()), Kind::kWarp);
  Options options;
  options.jit = false;
  DraftGemm gemm(linear.weight, options);
  EXPECT_EQ(gemm.prepare(3, stream()), Kind::kCublas);
  EXPECT_EQ(gemm.why_code(3), WhyCode::kCompilingOff);
  EXPECT_FALSE(gemm.why(3).empty());
  expect_exact_run(gemm, linear, 9, Kind::kWarp, stream());
  const HostMatrix values = integers(3, k, 2);
  expect_exact(run(gemm, Matrix(values), n, stream()), exact_product(values, linear.host));
  EXPECT_EQ(gemm.stats().fallbacks(WhyCode::kCompilingOff), 1u);
  ASSERT_EQ(compiles.prepare(3, stream()), Kind::kWarp);
  EXPECT_EQ(gemm.kind(3), Kind::kCublas) << "run and other plans do not try again by themselves";
  EXPECT_EQ(gemm.prepare(3, stream()), Kind::kWarp) << gemm.why(3);
  expect_exact_run(gemm, linear, 3, Kind::kWarp, stream());
}

TEST_F(GemmPlan, threads_that_prepare_one_key_share_one_build_G34) {
  const Linear linear(336, 1088);
  std::vector<DraftGemm> plans;
  for (int i = 0; i < 16; ++i) plans.emplace_back(linear.weight);
  std::vector<std::thread> threads;
  for (DraftGemm& plan : plans)
    threads.emplace_back([&plan] { EXPECT_EQ(plan.prepare(8), Kind::kWarp) << plan.why(8); });
  for (std::thread& thread : threads) thread.join();
  std::uint64_t compiles = 0;
  for (const DraftGemm& plan : plans) compiles += plan.stats().compiles;
  EXPECT_LE(compiles, 1u);
  for (DraftGemm& plan : plans) expect_exact_run(plan, linear, 8, Kind::kWarp, stream());
}

TEST_F(GemmPlan, threads_that_prepare_one_plan_get_every_bucket_G34) {
  const Linear linear(368, 1088);
  DraftGemm gemm(linear.weight);
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i)
    threads.emplace_back([&gemm, i] { EXPECT_EQ(gemm.prepare(4 * (i + 1)), Kind::kWarp) << gemm.why(4 * (i + 1)); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(gemm.keys().size(), 8u);
  for (int m : {1, 17, 40, 64}) expect_exact_run(gemm, linear, m, Kind::kWarp, stream());
}

TEST_F(GemmPlan, a_prepared_run_allocates_nothing_on_the_host) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(272, 1088);
  DraftGemm gemm(linear.weight);
  for (int m : {8, 65}) {
    const Matrix x(integers(m, 1088, 2)), out(m, 272);
    const TensorView x_view = x.view(), out_view = out.view();
    gemm.prepare(m, stream());
    gemm.run(x_view, out_view, stream());
    const std::uint64_t before = allocations();
    for (int i = 0; i < 100; ++i) gemm.run(linear.weight, x_view, out_view, stream());
    EXPECT_EQ(allocations() - before, 0u) << "M = " << m;
    synchronize();
  }
  const std::uint64_t counted = allocations();
  ::operator delete(::operator new(16));  // called by name: a new expression may be optimised away
  EXPECT_GT(allocations(), counted) << "the counter counts";
}

TEST_F(GemmPlan, runs_allocate_nothing_on_the_device) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(272, 1088);
  DraftGemm gemm(linear.weight);
  for (int m : {8, 65}) {
    const Matrix x(integers(m, 1088, 2)), out(m, 272);
    gemm.prepare(m, stream());
    gemm.run(x.view(), out.view(), stream());
    synchronize();
    std::size_t before = 0, after = 0, total = 0;
    TWOSTEP_CUDA_CHECK(cuMemGetInfo(&before, &total), "test");
    for (int i = 0; i < 100; ++i) gemm.run(x.view(), out.view(), stream());
    synchronize();
    TWOSTEP_CUDA_CHECK(cuMemGetInfo(&after, &total), "test");
    EXPECT_EQ(after, before) << "M = " << m;
  }
}

TEST_F(GemmPlan, run_costs_at_most_one_microsecond_more_than_a_bare_launch) {
  const std::int64_t n = 272, k = 1088;
  const int m = 8;
  const Linear linear(n, k);
  DraftGemm gemm(linear.weight);
  ASSERT_EQ(gemm.prepare(m, stream()), Kind::kWarp);
  const RawKernel bare(linear.weight, m, gemm.tactic(m));
  const Matrix x(integers(m, k, 2)), out(m, n);
  const TensorView x_view = x.view(), out_view = out.view();
  const auto median_us = [&](auto&& call) {
    std::vector<double> samples;
    for (int i = 0; i < 2000; ++i) {
      if (i % 100 == 0) synchronize();  // the launch queue never fills
      samples.push_back(1000 * milliseconds(call));
    }
    std::nth_element(samples.begin(), samples.begin() + 1000, samples.end());
    return samples[1000];
  };
  const auto run_it = [&] { gemm.run(x_view, out_view, stream()); };
  const auto launch_it = [&] { bare.launch(x_view, out_view, stream()); };
  median_us(run_it);
  median_us(launch_it);
  std::vector<double> differences;
  for (int round = 0; round < 5; ++round) {
    const double launch_us = median_us(launch_it), run_us = median_us(run_it);
    std::printf("host: run %.2f us, bare launch %.2f us\n", run_us, launch_us);
    differences.push_back(run_us - launch_us);
  }
  std::sort(differences.begin(), differences.end());
  EXPECT_LE(differences[2], 1.0);
}

// In fresh processes over one fresh folder: the first compiles, the second finds the build on disk.
TEST_F(GemmPlan, prepare_takes_half_a_second_cold_and_ten_milliseconds_from_disk) {
  if (!in_child()) {
    std::string folder = "/tmp/twostep-cold-XXXXXX";
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    for (const char* phase : {"compile", "disk"}) {
      const ChildResult child =
          run_this_test({{"TWOSTEP_CACHE_DIR", folder}, {"TWOSTEP_CACHE", "1"}, {"TWOSTEP_TEST_PHASE", phase}}, 60);
      EXPECT_TRUE(child.passed) << child.output;
      if (const auto line = child.output.find("prepare, "); line != std::string::npos)
        std::printf("%s\n", child.output.substr(line, child.output.find('\n', line) - line).c_str());
    }
    std::filesystem::remove_all(folder);
    return;
  }
  const bool from_disk = variable("TWOSTEP_TEST_PHASE") == "disk";
  const Linear first(272, 1088), linear(2304, 1536);
  DraftGemm warm_up(first.weight);  // opens NVRTC, if it is to compile
  const double first_ms = milliseconds([&] { prepare_on(warm_up, 8, Kind::kWarp, stream()); });
  DraftGemm gemm(linear.weight);
  gemm.pin(8, Kind::kWarp);
  const double ms = milliseconds([&] { EXPECT_EQ(gemm.prepare(8, stream()), Kind::kWarp) << gemm.why(8); });
  std::printf("prepare, %s: %.1f ms, after a first one of %.1f ms\n", from_disk ? "from disk" : "cold", ms, first_ms);
  EXPECT_EQ(gemm.stats().compiles, from_disk ? 0u : 1u);
  EXPECT_EQ(gemm.stats().cache_hits, from_disk ? 1u : 0u);
  EXPECT_LT(ms, from_disk ? 10.0 : 500.0);
}

TEST_F(GemmPlan, a_moved_plan_serves_on) {
  const Linear linear(272, 1088);
  DraftGemm first(linear.weight);
  ASSERT_EQ(first.prepare(8, stream()), Kind::kWarp);
  DraftGemm second(std::move(first));
  expect_exact_run(second, linear, 8, Kind::kWarp, stream());
  EXPECT_EQ(second.n(), 272);
  EXPECT_EQ(second.k(), 1088);
}

}  // namespace
}  // namespace twostep::test
