// The disk cache under DraftGemm: damage, missing folders, dead lock holders, many processes (draft-gemm 6.5, 6.6).
// Each step is a fresh process over one folder; what it compiled stands in its output.
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>

#include "child.h"
#include "gemm/warp.h"
#include "gemm_fixture.h"
#include "jit/nvrtc.h"

namespace twostep::test {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kN = 272, kK = 1088;
constexpr int kM = 8;

class JitCache : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || in_child()) return;
    if (Nvrtc::get() == nullptr) GTEST_SKIP() << Nvrtc::status().message();
    std::string path = "/tmp/twostep-cache-XXXXXX";
    ASSERT_NE(mkdtemp(path.data()), nullptr);
    folder = path;
  }
  void TearDown() override {
    if (!folder.empty()) fs::remove_all(folder);
    GpuTest::TearDown();
  }

  // A process that prepares and runs, in phase `phase`.
  static ChildResult child(const std::string& cache, const std::string& phase = "prepare") {
    return run_this_test({{"TWOSTEP_CACHE_DIR", cache}, {"TWOSTEP_CACHE", "1"}, {"TWOSTEP_TEST_PHASE", phase}}, 60);
  }
  static void expect_compiles(const ChildResult& result, int compiles) {
    EXPECT_TRUE(result.passed) << result.output;
    EXPECT_NE(result.output.find("compiles=" + std::to_string(compiles) + "\n"), std::string::npos) << result.output;
  }
  // What such a process does: the kind, the values, and how often it compiled.
  void prepare_and_run() {
    const Linear linear(kN, kK);
    DraftGemm gemm(linear.weight);
    ASSERT_EQ(gemm.prepare(kM, stream()), Kind::kWarp) << gemm.why(kM);
    std::printf("compiles=%d\n", static_cast<int>(gemm.stats().compiles));
    expect_exact_run(gemm, linear, kM, Kind::kWarp, stream());
  }
  std::vector<fs::path> files(const std::string& extension) const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(folder))
      if (entry.path().extension() == extension) found.push_back(entry.path());
    return found;
  }
  // The entry of the weight's kernel: the largest, for the kernels of the tests are small.
  fs::path entry() const {
    fs::path largest;
    for (const fs::path& file : files(".cubin"))
      if (largest.empty() || fs::file_size(file) > fs::file_size(largest)) largest = file;
    return largest;
  }

  fs::path folder;
};

TEST_F(JitCache, damaged_entries_are_never_loaded_and_rebuilt_G32) {
  if (in_child()) return prepare_and_run();
  expect_compiles(child(folder), 1);
  expect_compiles(child(folder), 0);
  const fs::path file = entry();
  ASSERT_FALSE(file.empty());
  const auto whole = fs::file_size(file);
  const auto flip = [&](std::uintmax_t at) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(at));
    const int byte = stream.get();
    stream.seekp(static_cast<std::streamoff>(at));
    stream.put(static_cast<char>(byte ^ 0x10));
  };
  const std::vector<std::function<void()>> damages = {[&] { fs::resize_file(file, 0); },
                                                      [&] { fs::resize_file(file, whole / 2); }, [&] { flip(1); },
                                                      [&] { flip(whole / 2); }};
  for (const auto& damage : damages) {
    damage();
    expect_compiles(child(folder), 1);
    EXPECT_EQ(fs::file_size(file), whole);
    expect_compiles(child(folder), 0);
  }
}

TEST_F(JitCache, no_folder_costs_a_compile_and_one_warning_G33) {
  if (in_child()) {
    if (variable("TWOSTEP_TEST_PHASE") == "full") {
      // A disk that takes no more: writes fail, and the signal that would come with that is ignored.
      signal(SIGXFSZ, SIG_IGN);
      rlimit all{}, none{};
      getrlimit(RLIMIT_FSIZE, &all);
      none = {512, all.rlim_max};
      setrlimit(RLIMIT_FSIZE, &none);
      const Linear linear(kN, kK);
      DraftGemm gemm(linear.weight);
      const Kind kind = gemm.prepare(kM, stream());
      setrlimit(RLIMIT_FSIZE, &all);
      ASSERT_EQ(kind, Kind::kWarp);
      std::printf("compiles=%d\n", static_cast<int>(gemm.stats().compiles));
      return expect_exact_run(gemm, linear, kM, Kind::kWarp, stream());
    }
    return prepare_and_run();
  }
  std::ofstream(folder / "file") << "not a folder";
  for (const std::string& bad : {(folder / "file" / "below").string(), std::string("/proc/twostep")}) {
    const ChildResult result = child(bad);
    expect_compiles(result, 1);
    const auto first = result.output.find("jit.cache");
    EXPECT_NE(first, std::string::npos) << "no warning\n" << result.output;
    EXPECT_EQ(result.output.find("jit.cache", first + 1), std::string::npos) << "two warnings\n" << result.output;
  }
  const std::string full = (folder / "full").string();
  expect_compiles(child(full, "full"), 1);
  expect_compiles(child(full), 1);  // nothing half-written was published
  const ChildResult homeless = run_this_test({{"TWOSTEP_CACHE_DIR", ""}, {"XDG_CACHE_HOME", ""}, {"HOME", ""}}, 60);
  expect_compiles(homeless, 1);
}

TEST_F(JitCache, nobody_waits_for_a_dead_holder_of_the_lock_G33) {
  if (in_child()) {
    if (variable("TWOSTEP_TEST_PHASE") == "die") {
      const DeviceFacts facts = device_facts(kDevice);
      const auto text = warp_kernel_text(kM, kN, kK, warp_tactic(kM, kN, kK, facts));
      const auto lock =
          DiskCache(variable("TWOSTEP_CACHE_DIR"))
              .lock(source_hash(compile_request(text, facts.arch)), Nvrtc::get()->version(), std::chrono::seconds(1));
      std::printf("held=%d\n", static_cast<int>(lock.held()));
      std::fflush(stdout);
      raise(SIGKILL);
    }
    return prepare_and_run();
  }
  const ChildResult dead = child(folder, "die");
  EXPECT_FALSE(dead.passed);
  ASSERT_NE(dead.output.find("held=1"), std::string::npos) << dead.output;
  const auto start = std::chrono::steady_clock::now();
  expect_compiles(child(folder), 1);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  expect_compiles(child(folder), 0);
}

TEST_F(JitCache, eight_processes_over_one_empty_folder_compile_once) {
  if (in_child()) return prepare_and_run();
  const std::string self = "JitCache.eight_processes_over_one_empty_folder_compile_once";
  std::vector<std::future<ChildResult>> children;
  for (int i = 0; i < 8; ++i)
    children.push_back(std::async(std::launch::async, [&] {
      return run_child(self, {{"TWOSTEP_CACHE_DIR", folder.string()}, {"TWOSTEP_CACHE", "1"}}, 100);
    }));
  int compiled = 0;
  for (auto& each : children) {
    const ChildResult result = each.get();
    EXPECT_TRUE(result.passed) << result.output;
    compiled += result.output.find("compiles=1\n") != std::string::npos;
  }
  EXPECT_EQ(compiled, 1);
  EXPECT_TRUE(files(".tmp").empty());
  EXPECT_FALSE(files(".cubin").empty());
}

TEST_F(JitCache, changed_device_text_is_built_anew_and_the_old_entry_is_not_loaded_G35) {
  BuildOptions options;
  options.cache_dir = folder;
  const Matrix out(1, 8);
  for (const char* constant : {"0x3f80", "0x4000"}) {  // 1.0, 2.0
    const CompileRequest request{"test-constant", "constant",
                                 std::string("extern \"C\" __global__ void constant(unsigned short* to) { "
                                             "to[threadIdx.x] = ") +
                                     constant + "; }",
                                 arch_name(device_facts(kDevice).arch), "1"};
    LoadReport report;
    const auto kernel = load_kernel(request, 0, options, &report);
    EXPECT_EQ(report.from, BuiltFrom::kCompiled);
    void* data = out.data();
    void* arguments[] = {&data};
    Launch what;
    what.function = kernel->function;
    what.block = 8;
    launch(what, stream(), arguments);
    HostMatrix expected(1, 8);
    std::fill(expected.bits.begin(), expected.bits.end(), static_cast<std::uint16_t>(std::stoi(constant, nullptr, 16)));
    expect_exact(out.get(), expected);
  }
  EXPECT_EQ(files(".cubin").size(), 2u);
}

}  // namespace
}  // namespace twostep::test
