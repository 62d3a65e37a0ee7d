// The driver layer: facts, contexts, memory, errors, graphs.
#include <gtest/gtest.h>

#include "core/check.h"
#include "cuda/launch.h"
#include "gemm_fixture.h"

namespace twostep::test {
namespace {

using CudaDriver = GpuTest;

TEST_F(CudaDriver, facts_are_those_that_the_tables_are_made_for) {
  const DeviceFacts facts = device_facts(kDevice);
  EXPECT_GT(facts.sm_count, 0);
  EXPECT_GE(facts.smem_per_sm, facts.smem_per_block);
  if (facts.name == known_gpu("h200").name) {
    EXPECT_EQ(facts, known_gpu("h200"));
  }
  EXPECT_EQ(code_of([] { device_facts(device_count()); }), StatusCode::kWrongDevice);
}

TEST_F(CudaDriver, a_context_guard_puts_back_what_was_current) {
  CUcontext own = nullptr, now = nullptr;
  TWOSTEP_CUDA_CHECK(cuCtxGetCurrent(&own), "test");
  EXPECT_EQ(own, primary_context(kDevice));
  TWOSTEP_CUDA_CHECK(cuCtxSetCurrent(nullptr), "test");
  {
    const ContextGuard guard(kDevice);
    TWOSTEP_CUDA_CHECK(cuCtxGetCurrent(&now), "test");
    EXPECT_EQ(now, own);
  }
  TWOSTEP_CUDA_CHECK(cuCtxGetCurrent(&now), "test");
  EXPECT_EQ(now, nullptr);
  TWOSTEP_CUDA_CHECK(cuCtxSetCurrent(own), "test");
}

TEST_F(CudaDriver, an_error_names_call_place_and_code) {
  try {
    TWOSTEP_CUDA_CHECK(cuMemFree(1), "test.place");
    FAIL() << "freed what was never allocated";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kDeviceError);
    EXPECT_EQ(error.status().place, "test.place");
    EXPECT_EQ(error.status().argument, "cuMemFree");
    EXPECT_NE(error.status().value.find("CUDA_ERROR_INVALID_VALUE"), std::string::npos) << error.what();
  }
  EXPECT_EQ(code_of([] { DeviceBuffer(std::size_t{1} << 60); }), StatusCode::kOutOfMemory);
  EXPECT_NO_THROW(synchronize());
}

TEST_F(CudaDriver, memory_moves_and_is_freed) {
  std::size_t before = 0, after = 0, total = 0;
  TWOSTEP_CUDA_CHECK(cuMemGetInfo(&before, &total), "test");
  {
    DeviceBuffer first(256 << 20);
    const CUdeviceptr address = first.address();
    DeviceBuffer second(std::move(first));
    EXPECT_EQ(second.address(), address);
    std::size_t during = 0;
    TWOSTEP_CUDA_CHECK(cuMemGetInfo(&during, &total), "test");
    EXPECT_LE(during + (256 << 20), before);
  }
  TWOSTEP_CUDA_CHECK(cuMemGetInfo(&after, &total), "test");
  EXPECT_EQ(after, before);
}

TEST_F(CudaDriver, a_graph_that_could_not_be_recorded_leaves_the_stream_usable) {
  EXPECT_EQ(
      code_of([&] { Graph(stream(), [] { fail(StatusCode::kInternal, "test", "enqueue", "refused", "nothing"); }); }),
      StatusCode::kInternal);
  EXPECT_FALSE(is_capturing(stream()));
  const Matrix to(1, 8), from(integers(1, 8, 1));
  write_late(to, from, 8, 0, stream());
  expect_exact(to.get(), integers(1, 8, 1));
}

TEST_F(CudaDriver, only_the_kernel_recorded_last_on_the_same_stream_is_followed) {
  const Matrix to(1, 8), from(integers(1, 8, 1));
  const OwnedStream other;
  PdlChain::forget();
  EXPECT_FALSE(PdlChain::follows_own_kernel(primary_context(kDevice), stream(), false, true));
  write_late(to, from, 8, 0, stream());
  PdlChain::record(primary_context(kDevice), stream(), false);
  EXPECT_TRUE(PdlChain::follows_own_kernel(primary_context(kDevice), stream(), false, true));
  EXPECT_FALSE(PdlChain::follows_own_kernel(primary_context(kDevice), stream(), false, false));
  EXPECT_FALSE(PdlChain::follows_own_kernel(primary_context(kDevice), other.view(), false, true));
  bool first = true, second = false, after_other = true;
  const Graph graph(stream(), [&] {
    first = PdlChain::follows_own_kernel(primary_context(kDevice), stream(), true, true);
    write_late(to, from, 8, 0, stream());
    PdlChain::record(primary_context(kDevice), stream(), true);
    second = PdlChain::follows_own_kernel(primary_context(kDevice), stream(), true, false);
    write_late(to, from, 8, 0, stream());
    after_other = PdlChain::follows_own_kernel(primary_context(kDevice), stream(), true, true);
  });
  EXPECT_FALSE(first);
  EXPECT_TRUE(second);
  EXPECT_FALSE(after_other);
}

// As the picks of a draft step are launched: a grid that waits for itself, early.
TEST_F(CudaDriver, a_cooperative_launch_may_be_programmatic) {
  const HostMatrix values = integers(1, 8, 1);
  Matrix to(1, 8), through(1, 8);
  const Matrix from(values);
  const auto enqueue = [&] {
    write_late(through, from, 8, 100, stream());
    write_late(to, through, 8, 0, stream(), true, true);
  };
  enqueue();
  expect_exact(to.get(), values);
  const Graph graph(stream(), enqueue);
  EXPECT_EQ(graph.num_nodes(), 2u);
  EXPECT_EQ(graph.num_programmatic_edges(), 1u);
  for (int i = 0; i < 20; ++i) {
    through.poison();
    to.poison();
    graph.launch(stream());
    expect_exact(to.get(), values);
  }
}

// The oracle of these tests writes its large weights on the GPU: both sides must make the same numbers.
TEST_F(CudaDriver, integers_of_the_gpu_are_those_of_the_host) {
  const Matrix matrix = Matrix::of_integers(70, 130, 9);
  EXPECT_EQ(matrix.get(), integers(70, 130, 9));
}

}  // namespace
}  // namespace twostep::test
