// Loaded kernels: one per context and key, failures with the compiler's log, no harm to a capture (draft-gemm 6).
#include <gtest/gtest.h>

#include <thread>

#include "gemm_fixture.h"

namespace twostep::test {
namespace {

using JitLoad = GpuTest;

CompileRequest request(const std::string& body) {
  return {"test-load", "entry", "extern \"C\" __global__ void entry(int* to) { " + body + " }",
          arch_name(device_facts(kDevice).arch), "1"};
}

TEST_F(JitLoad, one_kernel_per_key_also_for_threads) {
  const CompileRequest same = request("to[0] = 11;");
  std::vector<std::shared_ptr<const CompiledKernel>> kernels(16);
  std::vector<std::thread> threads;
  for (auto& kernel : kernels)
    threads.emplace_back([&kernel, &same] {
      const ContextGuard context(kDevice);
      kernel = load_kernel(same, 0);
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& kernel : kernels) {
    EXPECT_EQ(kernel->function, kernels[0]->function);
    EXPECT_EQ(kernel->key, kernels[0]->key);
  }
  EXPECT_NE(load_kernel(request("to[0] = 12;"), 0)->function, kernels[0]->function);
  EXPECT_GT(kernels[0]->registers, 0);
}

TEST_F(JitLoad, a_failed_compile_brings_the_log_and_a_later_load_succeeds) {
  try {
    load_kernel(request("to[0] = no_such_name;"), 0);
    FAIL() << "compiled";
  } catch (const Error& error) {
    if (error.code() == StatusCode::kUnavailable) GTEST_SKIP() << error.what();
    EXPECT_EQ(error.code(), StatusCode::kCompileFailed);
    EXPECT_NE(std::string(error.what()).find("no_such_name"), std::string::npos) << error.what();
  }
  EXPECT_NO_THROW(load_kernel(request("to[0] = 13;"), 0));
}

TEST_F(JitLoad, loading_while_another_thread_captures_leaves_the_capture_valid) {
  const auto handle = static_cast<CUstream>(stream().handle);
  TWOSTEP_CUDA_CHECK(cuStreamBeginCapture(handle, CaptureMode::kGlobal), "test");
  StatusCode loaded = StatusCode::kInternal;
  std::thread([&] {
    loaded = code_of([] {
      const ContextGuard context(kDevice);
      load_kernel(request("to[0] = 14;"), 0);
    });
  }).join();
  CUgraph graph = nullptr;
  EXPECT_EQ(driver().cuStreamEndCapture(handle, &graph), kCudaSuccess);
  EXPECT_EQ(loaded, StatusCode::kOk);
  if (graph != nullptr) TWOSTEP_CUDA_CHECK(cuGraphDestroy(graph), "test");
}

}  // namespace
}  // namespace twostep::test
