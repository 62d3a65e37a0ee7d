// Faults of the disk: none is loaded, none is thrown (draft-gemm G32, G33).
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <chrono>
#include <optional>
#include <thread>

#include "jit/disk_cache.h"
#include "jit_fixture.h"

namespace twostep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const std::string kSource = "0123456789abcdef0123456789abcdef";
const std::string kFile = kSource + ".13.0.cubin";
const Cubin kCubin{std::string("\x7f"
                               "ELF\0payload",
                               12),
                   {40, 1, 2, 3, 4}};

class JitDisk : public JitFolder {
 protected:
  void put(const std::string& version, const Cubin& cubin = kCubin) {
    const DiskCache cache(dir_);
    auto lock = cache.lock(kSource, version, seconds(5));
    ASSERT_TRUE(lock.held());
    cache.write(kSource, {version, cubin}, lock);
  }
};

TEST_F(JitDisk, an_entry_comes_back_whole_and_private) {
  put("13.0");
  EXPECT_EQ(names(), std::set<std::string>{kFile});
  const auto entry = DiskCache(dir_).read(kSource, "13.0");
  ASSERT_TRUE(entry);
  EXPECT_EQ(entry->version, "13.0");
  EXPECT_EQ(entry->cubin.bytes, kCubin.bytes);
  EXPECT_EQ(entry->cubin.resources, kCubin.resources);
  struct stat info {};
  ASSERT_EQ(stat((dir_ / kFile).c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  ASSERT_EQ(stat(dir_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

TEST_F(JitDisk, an_entry_cut_anywhere_is_deleted_and_not_returned) {
  put("13.0");
  const std::string whole = slurp(dir_ / kFile);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    spill(dir_ / kFile, whole.substr(0, size));
    EXPECT_FALSE(DiskCache(dir_).read(kSource, "13.0")) << size;
    EXPECT_TRUE(names().empty()) << size;
  }
  spill(dir_ / kFile, whole + '\0');
  EXPECT_FALSE(DiskCache(dir_).read(kSource, "13.0"));
}

TEST_F(JitDisk, an_entry_with_any_byte_changed_is_deleted_and_not_returned) {
  put("13.0");
  const std::string whole = slurp(dir_ / kFile);
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0x10);
    spill(dir_ / kFile, changed);
    EXPECT_FALSE(DiskCache(dir_).read(kSource, "13.0")) << at;
    EXPECT_TRUE(names().empty()) << at;
  }
  spill(dir_ / kFile, whole);
  EXPECT_TRUE(DiskCache(dir_).read(kSource, "13.0"));
}

TEST_F(JitDisk, an_entry_under_the_name_of_another_key_is_not_returned) {
  put("13.0");
  std::filesystem::copy_file(dir_ / kFile, dir_ / (kSource + ".13.1.cubin"));
  EXPECT_FALSE(DiskCache(dir_).read(kSource, "13.1"));
  EXPECT_TRUE(DiskCache(dir_).read(kSource, "13.0"));
}

TEST_F(JitDisk, what_is_no_file_of_an_entrys_size_is_passed_over_at_once) {
  const DiskCache cache(dir_);
  std::filesystem::create_directory(dir_);
  const std::string path = dir_ / kFile;
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_FALSE(cache.read(kSource, "13.0"));
  EXPECT_FALSE(cache.read(kSource, ""));
  put("13.0");
  EXPECT_TRUE(cache.read(kSource, "13.0")) << "a new entry takes the place of the FIFO";
  std::filesystem::resize_file(path, std::uintmax_t{1} << 40);  // sparse
  EXPECT_FALSE(cache.read(kSource, "13.0"));
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  EXPECT_FALSE(cache.read(kSource, "13.0"));
}

TEST_F(JitDisk, without_a_version_the_highest_whole_entry_is_taken) {
  put("13.9", {"nine", {}});
  put("13.10", {"ten", {}});
  put("12.9", {"old", {}});
  EXPECT_EQ(DiskCache(dir_).read(kSource, "").value().cubin.bytes, "ten");
  spill(dir_ / (kSource + ".13.10.cubin"), "damage");
  EXPECT_EQ(DiskCache(dir_).read(kSource, "").value().version, "13.9");
  EXPECT_FALSE(DiskCache(dir_).read("f" + kSource.substr(1), ""));
}

TEST_F(JitDisk, without_a_folder_it_is_always_empty) {
  const DiskCache cache("");
  auto lock = cache.lock(kSource, "13.0", seconds(5));
  EXPECT_FALSE(lock.held());
  cache.write(kSource, {"13.0", kCubin}, lock);
  EXPECT_FALSE(cache.read(kSource, "13.0"));
}

TEST_F(JitDisk, a_folder_that_cannot_be_written_serves_reads_and_warns_once) {
  put("13.0");
  ASSERT_EQ(::chmod(dir_.c_str(), 0555), 0);
  ASSERT_EQ(::chmod((dir_ / kFile).c_str(), 0444), 0);
  testing::internal::CaptureStderr();
  const int status = wait_child(start_child([&] {
    if (geteuid() == 0 && setuid(65534) != 0) return 1;  // root would be let in
    const DiskCache cache(dir_);
    for (int repeat = 0; repeat < 3; ++repeat) {
      auto lock = cache.lock(kSource, "13.1", seconds(5));
      if (lock.held()) return 2;
      cache.write(kSource, {"13.1", kCubin}, lock);
      if (cache.read(kSource, "13.1")) return 3;
    }
    return cache.read(kSource, "13.0") ? 0 : 4;
  }));
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(status, 0) << log;
  EXPECT_NE(log.find("jit.cache"), std::string::npos);
  EXPECT_EQ(log.find("jit.cache"), log.rfind("jit.cache")) << log;
  EXPECT_EQ(names(), std::set<std::string>{kFile});
}

TEST_F(JitDisk, a_folder_that_cannot_be_made_is_no_error) {
  spill(root_ / "file", "");
  const DiskCache cache((root_ / "file" / "cache").string());
  auto lock = cache.lock(kSource, "13.0", seconds(5));
  EXPECT_FALSE(lock.held());
  cache.write(kSource, {"13.0", kCubin}, lock);
  EXPECT_FALSE(cache.read(kSource, "13.0"));
}

TEST_F(JitDisk, a_write_that_finds_no_space_leaves_nothing) {
  const int status = wait_child(start_child([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100, 100};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    const DiskCache cache(dir_);
    {
      auto lock = cache.lock(kSource, "13.0", seconds(5));
      if (!lock.held()) return 2;
      cache.write(kSource, {"13.0", {std::string(1000, 'x'), {}}}, lock);
    }
    DiskCache::Lock none;
    cache.write(kSource, {"13.0", {std::string(1000, 'x'), {}}}, none);
    return cache.read(kSource, "13.0") ? 3 : 0;
  }));
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(names().empty());
}

TEST_F(JitDisk, a_lock_dies_with_its_holder_and_its_half_file_is_reused) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t pid = start_child([&] {
    const DiskCache cache(dir_);
    auto lock = cache.lock(kSource, "13.0", seconds(5));
    const int half = open((dir_ / (kSource + ".13.0.tmp")).c_str(), O_WRONLY);
    if (write(half, std::string(5000, 'x').data(), 5000) != 5000) return 1;
    if (write(ready[1], lock.held() ? "y" : "n", 1) != 1) return 2;
    pause();
    return 3;
  });
  char held = 0;
  ASSERT_EQ(read(ready[0], &held, 1), 1);
  ASSERT_EQ(held, 'y');
  EXPECT_FALSE(DiskCache(dir_).lock(kSource, "13.0", milliseconds(20)).held());
  kill(pid, SIGKILL);
  EXPECT_EQ(wait_child(pid), -SIGKILL);
  const auto start = std::chrono::steady_clock::now();
  put("13.0");
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(2));
  EXPECT_EQ(names(), std::set<std::string>{kFile});
  EXPECT_EQ(DiskCache(dir_).read(kSource, "13.0").value().cubin.bytes, kCubin.bytes);
  close(ready[0]);
  close(ready[1]);
}

TEST_F(JitDisk, a_waiter_that_gets_the_lock_of_a_failed_build_keeps_others_out) {
  const DiskCache cache(dir_);
  std::optional<DiskCache::Lock> first = cache.lock(kSource, "13.0", seconds(5));
  std::optional<DiskCache::Lock> second;
  std::thread waiter([&] { second.emplace(cache.lock(kSource, "13.0", seconds(20))); });
  std::this_thread::sleep_for(milliseconds(100));  // it has the file open and waits
  first.reset();                                   // nothing was built: the file goes away
  waiter.join();
  ASSERT_TRUE(second->held());
  EXPECT_FALSE(cache.lock(kSource, "13.0", milliseconds(20)).held());
  cache.write(kSource, {"13.0", kCubin}, *second);
  EXPECT_EQ(cache.read(kSource, "13.0").value().cubin.bytes, kCubin.bytes);
}

TEST_F(JitDisk, the_wait_for_a_lock_is_bounded_and_a_build_without_it_is_still_published) {
  const DiskCache cache(dir_);
  {
    const auto holder = cache.lock(kSource, "13.0", seconds(5));
    ASSERT_TRUE(holder.held());
    EXPECT_TRUE(cache.lock(kSource, "13.1", seconds(5)).held()) << "another key waits for nobody";
    const auto start = std::chrono::steady_clock::now();
    auto late = cache.lock(kSource, "13.0", milliseconds(50));
    EXPECT_FALSE(late.held());
    EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(5));
    cache.write(kSource, {"13.0", kCubin}, late);
    EXPECT_TRUE(cache.read(kSource, "13.0"));
  }
  EXPECT_EQ(names(), std::set<std::string>{kFile});
}

}  // namespace
}  // namespace twostep
