// Shared by the KDA tests that name a GPU feature; those of tests/kda run here, too.
#pragma once

#include <optional>
#include <string>

#include "child.h"
#include "gemm_fixture.h"
#include "tests/kda/fixture.h"

namespace twostep::kda_test {

// The GPU's context is current; runs are on the backend's stream, which is not the default one.
class KdaGpuTest : public KdaTest {
 protected:
  void SetUp() override {
    KdaTest::SetUp();
    if (!IsSkipped()) context_.emplace(test::kDevice);
  }
  static Stream stream() { return backend().stream(); }

 private:
  std::optional<ContextGuard> context_;
};

// TWOSTEP_TEST_FAULT names a synchronisation rule to turn off; expect_fails sets it, in a child.
inline KdaTestSwitches switches() {
  static const std::string fault = test::variable("TWOSTEP_TEST_FAULT");
  KdaTestSwitches switches;
  if (!fault.empty()) switches.fault = fault.c_str();
  return switches;
}

// The test does not pass with this rule turned off, and for the right reason: wrong values.
inline void expect_fails(const std::string& test, const std::string& fault) {
  const test::ChildResult child = test::run_child(test, {{"TWOSTEP_TEST_FAULT", fault}}, 60);
  EXPECT_FALSE(child.passed) << test << " does not see " << fault << "\n" << child.output;
  EXPECT_NE(child.output.find("differ"), std::string::npos) << child.output;
}

}  // namespace twostep::kda_test
