// Graphs: what run records, replay in any order, first use inside a capture, streams, threads and workspaces
// (draft-gemm 2.3, 2.4, 7.1, 8.4).
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "gemm_fixture.h"

namespace twostep::test {
namespace {

using GemmCapture = GpuTest;

TEST_F(GemmCapture, run_records_one_kernel_node_and_nothing_else) {
  const Linear linear(272, 1088);
  DraftGemm gemm(linear.weight);
  for (int m : {1, 8, 33, 64}) {
    const Matrix x(integers(m, 1088, 2)), out(m, 272);
    ASSERT_EQ(gemm.prepare(m, stream()), Kind::kWarp) << gemm.why(m);
    const Graph graph(stream(), [&] { gemm.run(x.view(), out.view(), stream()); });
    EXPECT_EQ(graph.num_nodes(), 1u);
  }
}

TEST_F(GemmCapture, graphs_replay_in_any_order_and_die_in_any_order_G23) {
  const std::int64_t n = 272, k = 1088;
  const Linear linear(n, k);
  DraftGemm gemm(linear.weight);
  struct Captured {
    HostMatrix expected;
    Matrix x, out;
    std::unique_ptr<Graph> graph;
  };
  std::vector<Captured> graphs;
  for (int m : {1, 2, 4, 8, 16, 32, 64}) {
    const HostMatrix values = integers(m, k, 10 + m);
    graphs.push_back({exact_product(values, linear.host), Matrix(values), Matrix(m, n), nullptr});
    Captured& last = graphs.back();
    ASSERT_EQ(gemm.prepare(m, stream()), Kind::kWarp);
    last.graph = std::make_unique<Graph>(stream(), [&] { gemm.run(last.x.view(), last.out.view(), stream()); });
  }
  std::mt19937_64 random(test_seed());
  for (int replay = 0; replay < 1000 && !HasFailure(); ++replay) {
    if (replay % 300 == 299) graphs.erase(graphs.begin() + static_cast<std::ptrdiff_t>(random() % graphs.size()));
    Captured& one = graphs[random() % graphs.size()];
    one.out.poison();
    one.graph->launch(stream());
    expect_exact(one.out.get(), one.expected);
  }
}

TEST_F(GemmCapture, one_plan_serves_several_streams_and_threads_G24) {
  TWOSTEP_NEEDS_CUBLAS();
  const std::int64_t n = 528, k = 7168;
  const int warp_m = 8, cublas_m = 16;
  const Matrix weight(normals(n, k, 1));
  DraftGemm gemm(weight.view());
  const OwnedStream a, b, unprepared;
  for (const OwnedStream* s : {&a, &b}) {
    prepare_on(gemm, warp_m, Kind::kWarp, s->view());
    prepare_on(gemm, cublas_m, Kind::kCublas, s->view());
  }
  ASSERT_NO_THROW(gemm.prepare(cublas_m, stream()));
  for (int m : {warp_m, cublas_m}) {
    SCOPED_TRACE(testing::Message() << "M = " << m);
    const Matrix x(normals(m, k, 2));
    const HostMatrix first = run(gemm, x, n, a.view());

    std::vector<Matrix> outs;
    for (int i = 0; i < 60; ++i) outs.emplace_back(m, n);
    std::vector<std::thread> threads;
    const Stream streams[] = {a.view(), b.view(), stream()};
    for (std::size_t t = 0; t < 3; ++t)
      threads.emplace_back([&, t] {
        const ContextGuard context(kDevice);
        for (std::size_t i = t; i < outs.size(); i += 3) gemm.run(x.view(), outs[i].view(), streams[t]);
      });
    for (std::thread& thread : threads) thread.join();
    for (const Matrix& out : outs) EXPECT_EQ(out.get(), first);

    const Matrix replayed(m, n);
    std::unique_ptr<Graph> graph;
    std::thread([&] {
      const ContextGuard context(kDevice);
      graph = std::make_unique<Graph>(b.view(), [&] { gemm.run(x.view(), replayed.view(), b.view()); });
    }).join();
    graph->launch(b.view());
    EXPECT_EQ(replayed.get(), first);
  }
  EXPECT_EQ(gemm.stats().workspace_misses, 0u);

  // A stream that was never prepared: the warp kernel as ever, cuBLAS by its safe algorithm.
  const HostMatrix weight_values = normals(n, k, 1);
  for (int m : {warp_m, cublas_m}) {
    const HostMatrix values = normals(m, k, 2);
    const Matrix x(values), out(m, n);
    const Graph graph(unprepared.view(), [&] { gemm.run(x.view(), out.view(), unprepared.view()); });
    graph.launch(unprepared.view());
    expect_close(out.get(), values, weight_values);
  }
  EXPECT_EQ(gemm.stats().workspace_misses, 1u);
}

TEST_F(GemmCapture, the_workspace_outlives_the_thread_and_other_graphs_G25) {
  TWOSTEP_NEEDS_CUBLAS();
  const std::int64_t n = 512, k = 4096;
  const int m = 65;
  const Linear linear(n, k);
  DraftGemm gemm(linear.weight);
  ASSERT_EQ(gemm.prepare(m, stream()), Kind::kCublas);
  const HostMatrix values = integers(m, k, 2);
  const HostMatrix expected = exact_product(values, linear.host);
  const Matrix x(values);
  Matrix out(m, n);
  std::unique_ptr<Graph> first, second;
  for (std::unique_ptr<Graph>* graph : {&first, &second})
    std::thread([&] {
      const ContextGuard context(kDevice);
      *graph = std::make_unique<Graph>(stream(), [&] { gemm.run(x.view(), out.view(), stream()); });
    }).join();
  std::size_t free_before = 0, free_after = 0, total = 0;
  for (int i = 0; i < 50; ++i) {
    Graph* turn = i % 2 == 0 ? first.get() : second.get();
    out.poison();
    turn->launch(stream());
    expect_exact(out.get(), expected);
    if (i == 1) TWOSTEP_CUDA_CHECK(cuMemGetInfo(&free_before, &total), "test");
  }
  TWOSTEP_CUDA_CHECK(cuMemGetInfo(&free_after, &total), "test");
  EXPECT_GE(free_after, free_before) << "replays took memory";
  first.reset();
  out.poison();
  second->launch(stream());
  expect_exact(out.get(), expected);
}

TEST_F(GemmCapture, graphs_without_workspace_may_replay_at_the_same_time_G25) {
  TWOSTEP_NEEDS_CUBLAS();
  const std::int64_t n = 512, k = 4096;
  const int m = 65;
  const Linear linear(n, k);
  Options options;
  options.workspace_limit = 0;
  DraftGemm gemm(linear.weight, options);
  ASSERT_EQ(gemm.prepare(m, stream()), Kind::kCublas);
  const HostMatrix values = integers(m, k, 2);
  const Matrix x(values), out_a(m, n), out_b(m, n);
  const Graph a(stream(), [&] { gemm.run(x.view(), out_a.view(), stream()); });
  const Graph b(stream(), [&] { gemm.run(x.view(), out_b.view(), stream()); });
  const OwnedStream beside;
  for (int i = 0; i < 200; ++i) {
    a.launch(stream());
    b.launch(beside.view());
  }
  const HostMatrix expected = exact_product(values, linear.host);
  expect_exact(out_a.get(), expected);
  expect_exact(out_b.get(), expected);
  EXPECT_EQ(gemm.stats().workspace_misses, 0u);
}

TEST_F(GemmCapture, first_use_inside_a_capture_runs_on_cublas_and_is_counted_G26) {
  TWOSTEP_NEEDS_CUBLAS();
  const std::int64_t n = 304, k = 1088;
  const Linear linear(n, k);
  DraftGemm gemm(linear.weight);
  ASSERT_EQ(gemm.prepare(8, stream()), Kind::kWarp);
  std::uint64_t misses = 0;
  for (int m : {16, 24, 70}) {  // new buckets, and above 64
    SCOPED_TRACE(testing::Message() << "M = " << m);
    const HostMatrix values = integers(m, k, 2);
    const Matrix x(values), out(m, n);
    StatusCode refused = StatusCode::kOk;
    const Graph graph(stream(), [&] {
      refused = code_of([&] { gemm.prepare(m, stream()); });
      gemm.run(x.view(), out.view(), stream());
    });
    EXPECT_EQ(refused, StatusCode::kCapturing);
    EXPECT_EQ(gemm.kind(m), Kind::kCublas);
    EXPECT_EQ(gemm.stats().capture_misses, ++misses);
    EXPECT_EQ(gemm.stats().cublas_runs, misses);
    graph.launch(stream());
    expect_exact(out.get(), exact_product(values, linear.host));
  }
  // The refusal was no failure: the next eager run prepares and is on warp.
  expect_exact_run(gemm, linear, 16, Kind::kWarp, stream());
}

TEST_F(GemmCapture, prepare_of_a_prepared_row_count_returns_at_once_on_a_capturing_stream) {
  TWOSTEP_NEEDS_CUBLAS();
  const Linear linear(272, 1088);
  DraftGemm gemm(linear.weight);
  gemm.prepare(8, stream());
  gemm.prepare(65, stream());
  const HostMatrix values = integers(8, 1088, 2);
  const Matrix x(values), out(8, 272);
  const Graph graph(stream(), [&] {
    EXPECT_EQ(gemm.prepare(8, stream()), Kind::kWarp);
    EXPECT_EQ(gemm.prepare(65, stream()), Kind::kCublas);
    gemm.run(x.view(), out.view(), stream());
  });
  graph.launch(stream());
  expect_exact(out.get(), exact_product(values, linear.host));
}

TEST_F(GemmCapture, a_miss_is_refused_and_records_nothing_when_asked_to) {
  const Linear linear(272, 1088);
  Options options;
  options.on_miss = OnMiss::kRefuse;
  DraftGemm gemm(linear.weight, options);
  const Matrix x(integers(40, 1088, 2)), out(40, 272);
  StatusCode refused = StatusCode::kOk;
  const Graph graph(stream(), [&] { refused = code_of([&] { gemm.run(x.view(), out.view(), stream()); }); });
  EXPECT_EQ(refused, StatusCode::kNotPrepared);
  EXPECT_EQ(graph.num_nodes(), 0u);
  EXPECT_EQ(gemm.stats().capture_misses, 1u);
}

TEST_F(GemmCapture, construction_and_prepare_of_another_thread_do_no_harm_to_a_capture) {
  const std::int64_t n = 320, k = 1088;
  const Linear linear(n, k);
  for (CaptureMode mode : {CaptureMode::kGlobal, CaptureMode::kThreadLocal, CaptureMode::kRelaxed}) {
    DraftGemm gemm(linear.weight);
    ASSERT_EQ(gemm.prepare(8, stream()), Kind::kWarp);
    const HostMatrix values = integers(8, k, 2);
    const Matrix x(values), out(8, n);
    const auto handle = static_cast<CUstream>(stream().handle);
    TWOSTEP_CUDA_CHECK(cuStreamBeginCapture(handle, mode), "test");
    Kind prepared = Kind::kCublas;
    StatusCode constructed = StatusCode::kInternal;
    const int other_m = 40 + 8 * static_cast<int>(mode);
    std::thread([&] {
      constructed = code_of([&] {
        prepared = gemm.prepare(other_m);
        DraftGemm another(linear.weight);
      });
    }).join();
    gemm.run(x.view(), out.view(), stream());
    CUgraph graph = nullptr;
    ASSERT_EQ(driver().cuStreamEndCapture(handle, &graph), kCudaSuccess);
    CUgraphExec exec = nullptr;
    TWOSTEP_CUDA_CHECK(cuGraphInstantiate(&exec, graph, 0), "test");
    TWOSTEP_CUDA_CHECK(cuGraphLaunch(exec, handle), "test");
    expect_exact(out.get(), exact_product(values, linear.host));
    TWOSTEP_CUDA_CHECK(cuGraphExecDestroy(exec), "test");
    TWOSTEP_CUDA_CHECK(cuGraphDestroy(graph), "test");
    EXPECT_EQ(constructed, StatusCode::kOk);
    EXPECT_EQ(prepared, Kind::kWarp);
    expect_exact_run(gemm, linear, other_m, Kind::kWarp, stream());
  }
}

}  // namespace
}  // namespace twostep::test
