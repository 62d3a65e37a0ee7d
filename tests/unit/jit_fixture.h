// Folders, children and files for the tests of src/jit.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <string>

namespace twostep {

inline std::string slurp(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void spill(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// A folder of the test's own, gone afterwards.
class JitFolder : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "/twostep_jit_XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    ::chmod(root_.c_str(), 0755);  // children that gave up root look inside
    dir_ = root_ / "cache";
  }
  void TearDown() override {
    std::filesystem::permissions(root_, std::filesystem::perms::owner_all);
    std::filesystem::remove_all(root_);
  }

  std::set<std::string> names() const {
    std::set<std::string> names;
    if (std::filesystem::exists(dir_))
      for (const auto& entry : std::filesystem::directory_iterator(dir_)) names.insert(entry.path().filename());
    return names;
  }

  std::filesystem::path root_;
  std::filesystem::path dir_;  // of the cache; not made yet
};

// Runs `work` in a child that ends with its value as exit status, 99 for an exception.
inline pid_t start_child(const std::function<int()>& work) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  int status = 99;
  try {
    status = work();
  } catch (...) {
  }
  _exit(status);
}

// Exit status; -signal if a signal ended it.
inline int wait_child(pid_t pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace twostep
