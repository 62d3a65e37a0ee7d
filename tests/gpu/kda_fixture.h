// Shared by the KDA tests that name a GPU feature; those of tests/kda run here, too.
#pragma once

#include <optional>

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

}  // namespace twostep::kda_test
