// A test of this program in a process of its own: for what may hang, must start fresh, or needs other settings.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace twostep::test {

struct ChildResult {
  bool passed = false;
  bool timed_out = false;  // then it was killed
  std::string output;      // standard output and error
};

// Runs the tests that `filter` names with these variables set ("" takes one away), for at most `seconds`.
ChildResult run_child(const std::string& filter, const std::map<std::string, std::string>& variables, int seconds);

// The running test, again: its body finds in_child() true.
ChildResult run_this_test(const std::map<std::string, std::string>& variables, int seconds);

bool in_child();
std::string variable(const char* name);  // "" if not set

// The rest of the test runs in a child; a hang becomes a failure.
#define TWOSTEP_REST_IN_CHILD(seconds)                                                                  \
  if (!::twostep::test::in_child()) {                                                                   \
    const ::twostep::test::ChildResult child = ::twostep::test::run_this_test({}, seconds);             \
    ASSERT_TRUE(child.passed) << (child.timed_out ? "killed at the time limit\n" : "") << child.output; \
    return;                                                                                             \
  }

}  // namespace twostep::test
