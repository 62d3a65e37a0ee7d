// One compile per key, over threads and processes (draft-gemm 6.4 to 6.6, G32 to G36). The compiler is a
// stand-in that counts in a file, so that children count too.
#include <fcntl.h>

#include <atomic>
#include <condition_variable>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/check.h"
#include "core/hash.h"
#include "jit/build_table.h"
#include "jit_fixture.h"
#include "tests/unit/code_of.h"

namespace twostep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::code_of;

CompileRequest request_of(int i) { return {"k" + std::to_string(i), "k", "text " + std::to_string(i), "sm_90a", "1"}; }

std::string bytes_of(const CompileRequest& request) { return std::string(40000, 'c') + hash128(request.text); }

class JitBuild : public JitFolder {
 protected:
  // Appends one byte per compile, then runs `before`, then gives bytes that depend on the text alone.
  Compiler compiler(std::function<void(const CompileRequest&)> before = {}, std::string version = "13.0") const {
    return {std::move(version),
            [counter = root_ / "count", before](const CompileRequest& request) {
              const int fd = open(counter.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
              if (write(fd, "x", 1) != 1) throw std::runtime_error("counter");
              close(fd);
              if (before) before(request);
              return Cubin{bytes_of(request), {32, 0, 0, 0, 0}};
            },
            {}};
  }
  Compiler no_compiler() const { return {{}, {}, refusal(StatusCode::kUnavailable, "test", "compiling", "off", "")}; }
  std::size_t compiles() const { return slurp(root_ / "count").size(); }
  DiskCache cache() const { return DiskCache(dir_); }
  std::string file_of(int i, const char* version = "13.0") const {
    return source_hash(request_of(i)) + "." + version + ".cubin";
  }
};

TEST_F(JitBuild, memory_then_disk_then_the_compiler) {
  BuildTable first;
  EXPECT_EQ(first.build(request_of(0), compiler(), cache()).from, BuiltFrom::kCompiled);
  EXPECT_EQ(first.build(request_of(0), compiler(), cache()).from, BuiltFrom::kMemory);
  BuildTable second;
  const Built built = second.build(request_of(0), compiler(), cache());
  EXPECT_EQ(built.from, BuiltFrom::kDisk);
  EXPECT_EQ(built.cubin->bytes, bytes_of(request_of(0)));
  EXPECT_EQ(built.cubin->resources.registers, 32);
  EXPECT_EQ(built.key, compile_key(request_of(0), "13.0"));
  EXPECT_EQ(compiles(), 1u);
}

TEST_F(JitBuild, eight_processes_over_an_empty_folder_compile_each_key_once) {
  constexpr int kKeys = 4;
  std::vector<pid_t> children;
  for (int child = 0; child < 8; ++child)
    children.push_back(start_child([&, child] {
      BuildTable table;
      for (int i = 0; i < kKeys; ++i) {
        const auto request = request_of((i + child) % kKeys);
        const auto slow = compiler([](const auto&) { std::this_thread::sleep_for(milliseconds(100)); });
        if (table.build(request, slow, cache()).cubin->bytes != bytes_of(request)) return 1;
      }
      return 0;
    }));
  for (const pid_t pid : children) EXPECT_EQ(wait_child(pid), 0);
  EXPECT_EQ(compiles(), static_cast<std::size_t>(kKeys));
  std::set<std::string> expected;
  for (int i = 0; i < kKeys; ++i) expected.insert(file_of(i));
  EXPECT_EQ(names(), expected);
}

TEST_F(JitBuild, a_process_killed_while_it_compiles_does_not_stop_the_others) {
  const auto victim_file = root_ / "victim";
  // Whoever compiles first says who it is and never comes back.
  const auto first_hangs = compiler([&](const auto&) {
    const int fd = open(victim_file.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0600);
    if (fd < 0) return;
    const std::string pid = std::to_string(getpid()) + "\n";
    if (write(fd, pid.data(), pid.size()) < 0) _exit(98);
    pause();
  });
  std::vector<pid_t> children;
  for (int child = 0; child < 8; ++child)
    children.push_back(start_child([&] {
      BuildTable table(seconds(60));
      return table.build(request_of(0), first_hangs, cache()).cubin->bytes == bytes_of(request_of(0)) ? 0 : 1;
    }));
  const auto start = std::chrono::steady_clock::now();
  while (!slurp(victim_file).ends_with("\n") && std::chrono::steady_clock::now() - start < seconds(20))
    std::this_thread::sleep_for(milliseconds(5));
  const pid_t victim = static_cast<pid_t>(std::stol(slurp(victim_file)));
  kill(victim, SIGKILL);
  for (const pid_t pid : children) EXPECT_EQ(wait_child(pid), pid == victim ? -SIGKILL : 0);
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(30)) << "nobody waits for the dead";
  EXPECT_EQ(compiles(), 2u);
  EXPECT_EQ(names(), std::set<std::string>{file_of(0)});
}

TEST_F(JitBuild, sixteen_threads_that_ask_for_one_key_share_one_compile) {
  BuildTable table;
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t)
    threads.emplace_back([&] {
      const auto slow = compiler([](const auto&) { std::this_thread::sleep_for(milliseconds(100)); });
      right += table.build(request_of(0), slow, cache()).cubin->bytes == bytes_of(request_of(0));
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(right, 16);
  EXPECT_EQ(compiles(), 1u);
}

TEST_F(JitBuild, different_keys_compile_at_the_same_time) {
  BuildTable table;
  std::mutex mutex;
  std::condition_variable all_inside;
  int inside = 0;
  std::atomic<int> met{0};
  const auto meeting = compiler([&](const auto&) {
    std::unique_lock lock(mutex);
    ++inside;
    all_inside.notify_all();
    met += all_inside.wait_for(lock, seconds(20), [&] { return inside == 16; });
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t) threads.emplace_back([&, t] { table.build(request_of(t), meeting, cache()); });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(met, 16);
}

// A thread that enters after the failure is over tries again, so a busy machine may see a second compile.
TEST_F(JitBuild, a_failure_reaches_every_waiter_and_a_later_call_succeeds) {
  BuildTable table;
  std::atomic<int> started{0};
  std::atomic<bool> broken{true};
  const auto fails_once = compiler([&](const auto&) {
    if (!broken.exchange(false)) return;
    while (started < 16) std::this_thread::yield();
    std::this_thread::sleep_for(milliseconds(200));  // from `started` to the wait is a few instructions
    fail(StatusCode::kCompileFailed, "test", "k", "the log", "");
  });
  std::atomic<int> failures{0};
  std::atomic<int> succeeded{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t)
    threads.emplace_back([&] {
      ++started;
      const StatusCode code = code_of([&] { table.build(request_of(0), fails_once, cache()); });
      failures += code == StatusCode::kCompileFailed;
      succeeded += code == StatusCode::kOk;
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(failures + succeeded, 16);
  EXPECT_GE(failures, 2);
  EXPECT_EQ(compiles(), succeeded == 0 ? 1u : 2u);
  EXPECT_EQ(names().empty(), succeeded == 0) << "a failed build leaves no file";
  EXPECT_EQ(table.build(request_of(0), fails_once, cache()).from,
            succeeded == 0 ? BuiltFrom::kCompiled : BuiltFrom::kMemory);
}

TEST_F(JitBuild, one_key_that_fails_leaves_the_others_alone) {
  BuildTable table;
  const auto fails_for_3 = compiler([&](const CompileRequest& request) {
    if (request.name == "k3") fail(StatusCode::kCompileFailed, "test", request.name, "the log", "");
  });
  EXPECT_EQ(code_of([&] { table.build(request_of(3), fails_for_3, cache()); }), StatusCode::kCompileFailed);
  EXPECT_EQ(table.build(request_of(9), fails_for_3, cache()).from, BuiltFrom::kCompiled);
  EXPECT_EQ(table.build(request_of(3), compiler(), cache()).from, BuiltFrom::kCompiled);
}

TEST_F(JitBuild, a_damaged_entry_is_built_anew) {
  BuildTable().build(request_of(0), compiler(), cache());
  const std::string whole = slurp(dir_ / file_of(0));
  std::string flipped = whole;
  flipped[whole.size() / 2] ^= 1;
  std::size_t expected = 1;
  for (const std::string& bad : {std::string(), whole.substr(0, whole.size() / 2), flipped}) {
    spill(dir_ / file_of(0), bad);
    const Built built = BuildTable().build(request_of(0), compiler(), cache());
    EXPECT_EQ(built.from, BuiltFrom::kCompiled);
    EXPECT_EQ(built.cubin->bytes, bytes_of(request_of(0)));
    EXPECT_EQ(compiles(), ++expected);
    EXPECT_EQ(slurp(dir_ / file_of(0)), whole);
  }
}

TEST_F(JitBuild, changed_device_text_does_not_load_the_old_entry) {
  CompileRequest request = request_of(0);
  BuildTable().build(request, compiler(), cache());
  request.text += "// one line more\n";
  const Built built = BuildTable().build(request, compiler(), cache());
  EXPECT_EQ(built.from, BuiltFrom::kCompiled);
  EXPECT_EQ(built.cubin->bytes, bytes_of(request));
}

TEST_F(JitBuild, unlike_architectures_share_a_folder_and_no_entry) {
  CompileRequest request = request_of(0);
  const auto first = BuildTable().build(request, compiler(), cache());
  request.arch = "sm_120a";
  const auto second = BuildTable().build(request, compiler(), cache());
  EXPECT_EQ(second.from, BuiltFrom::kCompiled);
  EXPECT_NE(first.key.hash, second.key.hash);
  EXPECT_EQ(names().size(), 2u);
}

TEST_F(JitBuild, without_a_compiler_entries_of_any_version_serve) {
  BuildTable().build(request_of(0), compiler({}, "12.9"), cache());
  BuildTable().build(request_of(0), compiler({}, "13.0"), cache());
  BuildTable table;
  const Built built = table.build(request_of(0), no_compiler(), cache());
  EXPECT_EQ(built.from, BuiltFrom::kDisk);
  EXPECT_EQ(built.nvrtc_version, "13.0");
  EXPECT_EQ(built.key, compile_key(request_of(0), "13.0"));
  EXPECT_EQ(code_of([&] { table.build(request_of(1), no_compiler(), cache()); }), StatusCode::kUnavailable);
  EXPECT_EQ(table.build(request_of(1), compiler(), cache()).from, BuiltFrom::kCompiled) << "tried again";
}

TEST_F(JitBuild, another_nvrtc_version_compiles_for_itself) {
  BuildTable().build(request_of(0), compiler({}, "12.9"), cache());
  EXPECT_EQ(BuildTable().build(request_of(0), compiler({}, "13.0"), cache()).from, BuiltFrom::kCompiled);
  EXPECT_EQ(names(), (std::set<std::string>{file_of(0, "12.9"), file_of(0, "13.0")}));
}

TEST_F(JitBuild, without_a_folder_memory_serves) {
  BuildTable table;
  EXPECT_EQ(table.build(request_of(0), compiler(), DiskCache("")).from, BuiltFrom::kCompiled);
  EXPECT_EQ(table.build(request_of(0), compiler(), DiskCache("")).from, BuiltFrom::kMemory);
  spill(root_ / "file", "");
  const DiskCache impossible((root_ / "file" / "cache").string());
  EXPECT_EQ(table.build(request_of(1), compiler(), impossible).from, BuiltFrom::kCompiled);
  EXPECT_EQ(table.build(request_of(1), compiler(), impossible).from, BuiltFrom::kMemory);
}

TEST_F(JitBuild, a_build_that_the_driver_refused_is_never_loaded_again) {
  BuildTable().build(request_of(0), compiler(), cache());
  const std::string entry = slurp(dir_ / file_of(0));
  BuildTable table;
  const Built refused = table.build(request_of(0), compiler(), cache());
  ASSERT_EQ(refused.from, BuiltFrom::kDisk);
  table.discard(request_of(0), refused, cache());
  EXPECT_TRUE(names().empty());
  spill(dir_ / file_of(0), entry);  // as if the folder could not be written
  const Built fresh = table.build(request_of(0), compiler(), cache());
  EXPECT_EQ(fresh.from, BuiltFrom::kCompiled);
  table.discard(request_of(0), refused, cache());  // a second thread that met the same refusal, too late
  EXPECT_EQ(table.build(request_of(0), compiler(), cache()).from, BuiltFrom::kMemory);
  EXPECT_EQ(compiles(), 2u);
}

}  // namespace
}  // namespace twostep
