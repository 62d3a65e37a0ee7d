// The GPU tests: `twostep_gpu_tests --gtest_filter=...`. TWOSTEP_TEST_SEED repeats the data of an earlier run.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda/driver.h"
#include "gemm_fixture.h"

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a child that is killed has said how far it came
  testing::InitGoogleTest(&argc, argv);
  // Children take the seed of their parent, so that one number repeats the whole run.
  const std::string seed = std::to_string(twostep::test::test_seed());
  setenv("TWOSTEP_TEST_SEED", seed.c_str(), 1);
  if (!testing::GTEST_FLAG(list_tests)) {
    std::printf("TWOSTEP_TEST_SEED=%s\n", seed.c_str());
    if (const twostep::Status status = twostep::driver_status(); !status.ok())
      std::printf("skipped: %s\n", status.message().c_str());
  }
  return RUN_ALL_TESTS();
}
