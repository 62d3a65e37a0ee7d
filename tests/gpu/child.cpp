#include "child.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

extern char** environ;

namespace twostep::test {
namespace {

std::vector<std::string> environment_with(std::map<std::string, std::string> variables) {
  variables["TWOSTEP_TEST_CHILD"] = "1";
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (text.starts_with("GTEST_")) continue;  // a shard or a filter is of the parent alone
    if (!variables.contains(text.substr(0, text.find('=')))) all.push_back(text);
  }
  for (const auto& [name, value] : variables)
    if (!value.empty()) all.push_back(name + "=" + value);
  return all;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& text : texts) all.push_back(text.data());
  all.push_back(nullptr);
  return all;
}

}  // namespace

ChildResult run_child(const std::string& filter, const std::map<std::string, std::string>& variables, int seconds) {
  char path[] = "/tmp/twostep-gpu-test-XXXXXX";
  const int log = mkstemp(path);
  if (log < 0) return {false, false, "no file in /tmp for the child's output"};
  std::vector<std::string> arguments = {"twostep_gpu_tests", "--gtest_filter=" + filter, "--gtest_color=no"};
  std::vector<std::string> settings = environment_with(variables);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, log, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, log, STDERR_FILENO);
  pid_t pid = 0;
  const int failed =
      posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, pointers(arguments).data(), pointers(settings).data());
  posix_spawn_file_actions_destroy(&actions);

  ChildResult result;
  if (failed == 0) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    int status = 0;
    while (waitpid(pid, &status, WNOHANG) == 0) {
      if (!result.timed_out && std::chrono::steady_clock::now() > deadline) {
        result.timed_out = true;
        kill(pid, SIGKILL);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    result.passed = !result.timed_out && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  result.output = text.str();
  close(log);
  unlink(path);
  return result;
}

ChildResult run_this_test(const std::map<std::string, std::string>& variables, int seconds) {
  const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
  return run_child(std::string(test->test_suite_name()) + "." + test->name(), variables, seconds);
}

bool in_child() { return !variable("TWOSTEP_TEST_CHILD").empty(); }

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

}  // namespace twostep::test
