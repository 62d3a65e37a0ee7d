// NVRTC through its loader, with no GPU: the real one where it is installed, and one that fails on demand.
#if TWOSTEP_CUDA

#include <cstdlib>

#include "jit/build.h"
#include "jit/kernel_cache.h"
#include "jit/nvrtc.h"
#include "jit_fixture.h"

namespace twostep {
namespace {

CompileRequest request_of(const std::string& body, const std::string& arch = "sm_90a") {
  return {"test", "kernel", "extern \"C\" __global__ void __launch_bounds__(32) kernel(float* x) {" + body + "}", arch,
          "1"};
}

Status status_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.status();
  }
  return {};
}

#define TWOSTEP_NEEDS_NVRTC() \
  if (Nvrtc::get() == nullptr) GTEST_SKIP() << Nvrtc::status().message()

TEST(JitNvrtc, a_kernel_compiles_for_every_architecture_and_tells_its_registers) {
  TWOSTEP_NEEDS_NVRTC();
  for (const char* arch : {"sm_90a", "sm_100a", "sm_103a", "sm_120a"}) {
    const Cubin cubin = Nvrtc::get()->compile(request_of("x[threadIdx.x] = 1;", arch));
    EXPECT_TRUE(
        cubin.bytes.starts_with("\x7f"
                                "ELF"))
        << arch;
    EXPECT_GT(cubin.resources.registers, 0) << arch;
    EXPECT_FALSE(cubin.resources.spills()) << arch;
    EXPECT_EQ(cubin.resources.static_smem_bytes, 0) << arch;
  }
}

TEST(JitNvrtc, spills_and_shared_memory_are_seen) {
  TWOSTEP_NEEDS_NVRTC();
  CompileRequest request = request_of(
      "__shared__ float s[32]; s[threadIdx.x] = x[0]; __syncthreads(); float v[96];"
      "\n#pragma unroll\nfor (int i = 0; i < 96; ++i) v[i] = x[i] * s[i % 32]; __syncthreads();"
      "\n#pragma unroll\nfor (int i = 0; i < 96; ++i) x[i] = v[95 - i] * v[i];");
  request.text.replace(request.text.find("__launch_bounds__(32)"), 21, "__maxnreg__(24)");
  const Cubin cubin = Nvrtc::get()->compile(request);
  EXPECT_TRUE(cubin.resources.spills());
  EXPECT_LE(cubin.resources.registers, 24);
  EXPECT_EQ(cubin.resources.static_smem_bytes, 128);
}

TEST(JitNvrtc, equal_requests_give_equal_bits) {
  TWOSTEP_NEEDS_NVRTC();
  const auto request = request_of("x[threadIdx.x] *= 3;");
  EXPECT_EQ(Nvrtc::get()->compile(request).bytes, Nvrtc::get()->compile(request).bytes);
}

TEST(JitNvrtc, the_log_of_a_failed_compile_reaches_the_user) {
  TWOSTEP_NEEDS_NVRTC();
  const Status status = status_of([] { Nvrtc::get()->compile(request_of("no_such_name(x);")); });
  EXPECT_EQ(status.code, StatusCode::kCompileFailed);
  EXPECT_NE(status.value.find("no_such_name"), std::string::npos) << status.value;
}

TEST(JitNvrtc, only_embedded_files_can_be_included) {
  TWOSTEP_NEEDS_NVRTC();
  auto request = request_of("x[0] = 1;");
  const std::string text = request.text;
  request.text = "#include \"common/ptx.cuh\"\n" + text;
  EXPECT_FALSE(Nvrtc::get()->compile(request).bytes.empty());
  request.text = "#include <cuda_bf16.h>\n" + text;
  EXPECT_EQ(status_of([&] { Nvrtc::get()->compile(request); }).code, StatusCode::kCompileFailed);
}

TEST(JitNvrtc, an_architecture_that_nvrtc_does_not_know_is_unsupported_and_both_are_named) {
  TWOSTEP_NEEDS_NVRTC();
  const Status status = status_of([] { Nvrtc::get()->compile(request_of("", "sm_999a")); });
  EXPECT_EQ(status.code, StatusCode::kUnsupported);
  EXPECT_EQ(status.value, "sm_999a");
  EXPECT_NE(status.accepted.find(Nvrtc::get()->version()), std::string::npos) << status.accepted;
}

TEST(JitNvrtc, a_newer_name_in_any_folder_goes_before_an_older_one) {
  const std::string folder = "/usr/local/cuda/lib64/";
  const std::vector<std::string> expected{"libnvrtc.so.13", folder + "libnvrtc.so.13",
                                          "libnvrtc.so.12", folder + "libnvrtc.so.12",
                                          "libnvrtc.so",    folder + "libnvrtc.so"};
  EXPECT_EQ(nvrtc_paths(""), expected);
  EXPECT_EQ(nvrtc_paths("/a/libnvrtc.so"), std::vector<std::string>{"/a/libnvrtc.so"});
}

TEST(JitNvrtc, versions_below_12_8_are_refused_by_name) {
  EXPECT_EQ(nvrtc_refusal("libnvrtc.so.12", 12, 8), "");
  EXPECT_EQ(nvrtc_refusal("libnvrtc.so.13", 13, 0), "");
  EXPECT_EQ(nvrtc_refusal("libnvrtc.so.12", 12, 7), "libnvrtc.so.12: version 12.7 is older than 12.8");
  EXPECT_NE(nvrtc_refusal("libnvrtc.so", 11, 8), "");
}

// A cached build is given up for what is wrong with it, not for what is wrong with the device.
TEST(JitLoad, only_results_about_the_image_refuse_it) {
  for (const CUresult result : {200, 209, 218, 222, 500}) EXPECT_TRUE(refuses_image(result)) << result;
  // Success, invalid value, out of memory, not initialised, invalid context, illegal address, launch failure, unknown.
  for (const CUresult result : {0, 1, 2, 3, 201, 700, 719, 999}) EXPECT_FALSE(refuses_image(result)) << result;
}

// A new process, because the environment and NVRTC are looked at once: this program again, with one test.
class JitProcess : public JitFolder {
 protected:
  int run_again(const char* test, const std::string& nvrtc) {
    const std::string filter = std::string("--gtest_filter=") + test;
    return wait_child(start_child([&] {
      setenv("TWOSTEP_NVRTC", nvrtc.c_str(), 1);
      setenv("TWOSTEP_CACHE_DIR", dir_.c_str(), 1);
      setenv("FAKE_NVRTC_COUNT", (root_ / "count").c_str(), 1);
      setenv("FAKE_NVRTC_FAIL", "1", 1);
      execl("/proc/self/exe", "twostep_unit", filter.c_str(), "--gtest_brief=1", nullptr);
      return 98;
    }));
  }
  static bool in_child() { return std::getenv("FAKE_NVRTC_COUNT") != nullptr; }
};

TEST_F(JitProcess, one_failed_compile_is_tried_again_and_leaves_other_keys_alone) {
  if (!in_child()) {
    EXPECT_EQ(run_again("JitProcess.one_failed_compile_is_tried_again_and_leaves_other_keys_alone", TWOSTEP_FAKE_NVRTC),
              0);
    EXPECT_EQ(slurp(root_ / "count").size(), 3u);
    EXPECT_EQ(names().size(), 2u);
    return;
  }
  const Status failed = status_of([] { build_cubin(request_of("1;")); });
  EXPECT_EQ(failed.code, StatusCode::kCompileFailed);
  EXPECT_NE(failed.value.find("told to fail"), std::string::npos);
  EXPECT_EQ(build_cubin(request_of("2;")).from, BuiltFrom::kCompiled);
  EXPECT_EQ(build_cubin(request_of("1;")).from, BuiltFrom::kCompiled);
  EXPECT_EQ(build_cubin(request_of("1;")).from, BuiltFrom::kMemory);
}

TEST_F(JitProcess, a_missing_nvrtc_is_named_and_the_cache_serves_without_it) {
  const auto request = request_of("3;");
  if (!in_child()) {
    const DiskCache cache(dir_);
    DiskCache::Lock none;
    cache.write(source_hash(request), {"13.0", {"cubin", {}}}, none);
    EXPECT_EQ(run_again("JitProcess.a_missing_nvrtc_is_named_and_the_cache_serves_without_it", "/no/such/libnvrtc.so"),
              0);
    return;
  }
  EXPECT_EQ(build_cubin(request).from, BuiltFrom::kDisk);
  const Status status = status_of([] { build_cubin(request_of("4;")); });
  EXPECT_EQ(status.code, StatusCode::kUnavailable);
  EXPECT_NE(status.value.find("/no/such/libnvrtc.so"), std::string::npos) << status.value;
  EXPECT_NE(status.remedy.find("TWOSTEP_NVRTC"), std::string::npos);
}

}  // namespace
}  // namespace twostep

#endif  // TWOSTEP_CUDA
