// Programmatic dependent launch as plans use it: which edges are programmatic, and what a writer of x or of the
// weight may do (draft-gemm 7.3, 7.4).
#include <gtest/gtest.h>

#include "cuda/launch.h"
#include "gemm_fixture.h"

namespace twostep::test {
namespace {

// A linear whose runs are warp runs, with integers for x.
class GemmPdl : public GpuTest {
 protected:
  static constexpr std::int64_t kN = 272, kK = 1088;
  static constexpr int kM = 8;

  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    linear.emplace(kN, kK);
    values = integers(kM, kK, 2);
    x.emplace(values);
    out.emplace(kM, kN);
    expected = exact_product(values, linear->host);
    write_late(*x, *x, 0, 0, stream());  // its kernel is loaded before any capture
    synchronize();
  }
  DraftGemm plan(Pdl pdl = Pdl::kAuto) {
    Options options;
    options.pdl = pdl;
    DraftGemm gemm(linear->weight, options);
    EXPECT_EQ(gemm.prepare(kM, stream()), Kind::kWarp) << gemm.why(kM);
    return gemm;
  }
  void run_once(DraftGemm& gemm, const Matrix& to, Stream on) { gemm.run(x->view(), to.view(), on); }
  void expect_replays(const Graph& graph, std::initializer_list<Matrix*> outs, int replays = 100) {
    for (int i = 0; i < 3; ++i) {
      for (Matrix* to : outs) to->poison();
      for (int j = 0; j < (i == 2 ? replays : 1); ++j) graph.launch(stream());
      for (Matrix* to : outs) expect_exact(to->get(), expected);
    }
  }

  std::optional<Linear> linear;
  HostMatrix values, expected;
  std::optional<Matrix> x, out;
};

TEST_F(GemmPdl, the_first_node_is_ordinary_and_the_second_is_not) {
  DraftGemm gemm = plan();
  Matrix second(kM, kN), third(kM, kN);
  const Graph one(stream(), [&] { run_once(gemm, *out, stream()); });
  EXPECT_EQ(one.num_nodes(), 1u);
  EXPECT_EQ(one.num_programmatic_edges(), 0u);
  const Graph three(stream(), [&] {
    run_once(gemm, *out, stream());
    run_once(gemm, second, stream());
    run_once(gemm, third, stream());
  });
  EXPECT_EQ(three.num_nodes(), 3u);
  EXPECT_EQ(three.num_programmatic_edges(), 2u);
  expect_replays(three, {&*out, &second, &third}, 1000);
}

TEST_F(GemmPdl, off_records_no_programmatic_edge) {
  DraftGemm gemm = plan(Pdl::kOff);
  Matrix second(kM, kN);
  const Graph graph(stream(), [&] {
    run_once(gemm, *out, stream());
    run_once(gemm, second, stream());
  });
  EXPECT_EQ(graph.num_nodes(), 2u);
  EXPECT_EQ(graph.num_programmatic_edges(), 0u);
  expect_replays(graph, {&*out, &second});
}

TEST_F(GemmPdl, after_a_memset_the_launch_is_ordinary_G22) {
  DraftGemm gemm = plan();
  Matrix second(kM, kN);
  const DeviceBuffer other(256);
  const Graph graph(stream(), [&] {
    run_once(gemm, *out, stream());
    TWOSTEP_CUDA_CHECK(cuMemsetD8Async(other.address(), 0, 256, static_cast<CUstream>(stream().handle)), "test");
    run_once(gemm, second, stream());
  });
  EXPECT_EQ(graph.num_nodes(), 3u);
  EXPECT_EQ(graph.num_programmatic_edges(), 0u);
  expect_replays(graph, {&*out, &second});
}

TEST_F(GemmPdl, after_a_kernel_of_others_the_launch_is_ordinary_G22) {
  DraftGemm gemm = plan();
  Matrix second(kM, kN);
  const Graph graph(stream(), [&] {
    run_once(gemm, *out, stream());
    write_late(*x, *x, 0, 0, stream());
    run_once(gemm, second, stream());
  });
  EXPECT_EQ(graph.num_nodes(), 3u);
  EXPECT_EQ(graph.num_programmatic_edges(), 0u);
  expect_replays(graph, {&*out, &second});
}

TEST_F(GemmPdl, after_cublas_the_launch_is_ordinary_G22) {
  TWOSTEP_NEEDS_CUBLAS();
  DraftGemm gemm = plan();
  prepare_on(gemm, 7, Kind::kCublas, stream());
  const Matrix x7(integers(7, kK, 2)), out7(7, kN);
  Matrix second(kM, kN);
  const Graph graph(stream(), [&] {
    run_once(gemm, *out, stream());
    gemm.run(x7.view(), out7.view(), stream());
    run_once(gemm, second, stream());
  });
  EXPECT_EQ(graph.num_programmatic_edges(), 0u);
  expect_replays(graph, {&*out, &second});
}

// The first node of the side stream has one dependency, and it is a kernel; yet on another stream.
TEST_F(GemmPdl, a_forked_stream_and_a_join_are_ordinary_G22) {
  DraftGemm gemm = plan();
  const OwnedStream side;
  gemm.prepare(kM, side.view());
  Matrix second(kM, kN), third(kM, kN);
  CUevent fork = nullptr, join = nullptr;
  TWOSTEP_CUDA_CHECK(cuEventCreate(&fork, 2), "test");
  TWOSTEP_CUDA_CHECK(cuEventCreate(&join, 2), "test");
  const auto main_stream = static_cast<CUstream>(stream().handle);
  {
    const Graph graph(stream(), [&] {
      run_once(gemm, *out, stream());
      TWOSTEP_CUDA_CHECK(cuEventRecord(fork, main_stream), "test");
      TWOSTEP_CUDA_CHECK(cuStreamWaitEvent(side.get(), fork, 0), "test");
      run_once(gemm, second, side.view());
      TWOSTEP_CUDA_CHECK(cuEventRecord(join, side.get()), "test");
      TWOSTEP_CUDA_CHECK(cuStreamWaitEvent(main_stream, join, 0), "test");
      run_once(gemm, third, stream());
    });
    EXPECT_EQ(graph.num_nodes(), 3u);
    EXPECT_EQ(graph.num_programmatic_edges(), 0u);
    expect_replays(graph, {&*out, &second, &third}, 1000);
  }
  TWOSTEP_CUDA_CHECK(cuEventDestroy(fork), "test");
  TWOSTEP_CUDA_CHECK(cuEventDestroy(join), "test");
}

TEST_F(GemmPdl, a_launch_before_the_capture_is_no_predecessor) {
  DraftGemm gemm = plan(Pdl::kAlways);
  run_once(gemm, *out, stream());
  const Graph graph(stream(), [&] { run_once(gemm, *out, stream()); });
  EXPECT_EQ(graph.num_programmatic_edges(), 0u);
  expect_replays(graph, {&*out});
}

TEST_F(GemmPdl, a_captured_run_sees_the_x_that_its_predecessor_wrote_late_G19) {
  DraftGemm gemm = plan();
  const Matrix stale(integers(kM, kK, 3)), fresh(values);
  const Graph graph(stream(), [&] {
    write_late(*x, stale, kM * kK, 0, stream());
    write_late(*x, fresh, kM * kK, 100, stream());
    PdlChain::record(primary_context(kDevice), stream(),
                     true);  // this kernel keeps the rule of 7.2, so it may count as one of ours
    run_once(gemm, *out, stream());
  });
  EXPECT_EQ(graph.num_programmatic_edges(), 1u);
  expect_replays(graph, {&*out}, 10);
}

TEST_F(GemmPdl, an_eager_run_with_always_sees_the_x_written_late_G19) {
  DraftGemm gemm = plan(Pdl::kAlways);
  const Matrix stale(integers(kM, kK, 3)), fresh(values);
  write_late(*x, stale, kM * kK, 0, stream());
  write_late(*x, fresh, kM * kK, 100, stream());
  PdlChain::record(primary_context(kDevice), stream(), false);
  run_once(gemm, *out, stream());
  expect_exact(out->get(), expected);
}

TEST_F(GemmPdl, an_eager_run_sees_the_weight_that_the_kernel_before_it_wrote_G20) {
  const HostMatrix new_weight = integers(kN, kK, 5);
  const Matrix source(new_weight);
  DraftGemm gemm = plan();
  run_once(gemm, *out, stream());
  write_late(linear->matrix, source, kN * kK, 100, stream());
  PdlChain::record(primary_context(kDevice), stream(), false);  // even if it were one of ours
  run_once(gemm, *out, stream());
  expect_exact(out->get(), exact_product(values, new_weight));
}

TEST_F(GemmPdl, a_captured_writer_of_the_weight_is_seen_after_weights_updated_G20) {
  const HostMatrix new_weight = integers(kN, kK, 5);
  const Matrix source(new_weight);
  const Matrix old_source(linear->host);
  DraftGemm gemm = plan();
  Matrix second(kM, kN), third(kM, kN);
  const Graph graph(stream(), [&] {
    run_once(gemm, *out, stream());
    write_late(linear->matrix, source, kN * kK, 50, stream());
    PdlChain::record(primary_context(kDevice), stream(), true);
    gemm.weights_updated(stream());
    run_once(gemm, second, stream());
    run_once(gemm, third, stream());
  });
  EXPECT_EQ(graph.num_nodes(), 4u);
  EXPECT_EQ(graph.num_programmatic_edges(), 1u);  // third after second
  for (int i = 0; i < 20; ++i) {
    write_late(linear->matrix, old_source, kN * kK, 0, stream());
    second.poison();
    graph.launch(stream());
  }
  expect_exact(out->get(), expected);
  expect_exact(second.get(), exact_product(values, new_weight));
  expect_exact(third.get(), exact_product(values, new_weight));
}

TEST_F(GemmPdl, the_launch_after_a_rebind_is_ordinary) {
  DraftGemm gemm = plan();
  const Matrix moved(linear->host);
  Matrix second(kM, kN), third(kM, kN);
  const Graph graph(stream(), [&] {
    run_once(gemm, *out, stream());
    gemm.run(moved.view(), x->view(), second.view(), stream());
    gemm.run(moved.view(), x->view(), third.view(), stream());
  });
  EXPECT_EQ(graph.num_programmatic_edges(), 1u);
  expect_replays(graph, {&*out, &second, &third});
}

// A writes x, run, C overwrites x, in a tight captured loop on tiny grids: the bits of PDL off.
TEST_F(GemmPdl, a_captured_chain_has_the_bits_of_pdl_off_G21) {
  const Matrix other(integers(kM, kK, 3)), fresh(values);
  DraftGemm gemm = plan();
  Matrix second(kM, kN);
  const Graph graph(stream(), [&] {
    for (Matrix* to : {&*out, &second}) {
      write_late(*x, fresh, kM * kK, 2, stream(), to == &second);
      PdlChain::record(primary_context(kDevice), stream(), true);
      run_once(gemm, *to, stream());
      write_late(*x, other, kM * kK, 0, stream(), true);
      PdlChain::record(primary_context(kDevice), stream(), true);
    }
  });
  EXPECT_EQ(graph.num_programmatic_edges(), 5u);  // all but before the first
  expect_replays(graph, {&*out, &second}, 1000);
}

TEST_F(GemmPdl, bits_are_equal_with_pdl_on_and_off) {
  const HostMatrix random = normals(kM, kK, 6);
  const Matrix rx(random), weight(normals(kN, kK, 7));
  std::vector<HostMatrix> results;
  for (Pdl pdl : {Pdl::kAuto, Pdl::kOff, Pdl::kAlways}) {
    Options options;
    options.pdl = pdl;
    DraftGemm gemm(weight.view(), options);
    ASSERT_EQ(gemm.prepare(kM, stream()), Kind::kWarp);
    Matrix first(kM, kN), second(kM, kN);
    const Graph graph(stream(), [&] {
      gemm.run(rx.view(), first.view(), stream());
      gemm.run(rx.view(), second.view(), stream());
    });
    graph.launch(stream());
    results.push_back(first.get());
    results.push_back(second.get());
    for (Matrix* to : {&first, &second}) gemm.run(rx.view(), to->view(), stream());
    results.push_back(second.get());
  }
  for (const HostMatrix& result : results) EXPECT_EQ(result, results.front());
}

}  // namespace
}  // namespace twostep::test
