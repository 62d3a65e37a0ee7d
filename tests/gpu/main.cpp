// The GPU tests: `twostep_gpu_tests --gtest_filter=...`. TWOSTEP_TEST_SEED repeats the data of an earlier run.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>

#include "cuda/driver.h"
#include "gemm_fixture.h"

namespace {
thread_local std::uint64_t allocations_of_thread = 0;
}  // namespace

namespace twostep::test {
std::uint64_t allocations() { return allocations_of_thread; }
}  // namespace twostep::test

// Counted, so that a test can say that run allocates nothing.
void* operator new(std::size_t bytes) {
  ++allocations_of_thread;
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void* operator new[](std::size_t bytes) { return operator new(bytes); }
// std::stable_sort asks by these; all forms must be of one family.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations_of_thread;
  return std::malloc(bytes > 0 ? bytes : 1);
}
void* operator new[](std::size_t bytes, const std::nothrow_t& tag) noexcept { return operator new(bytes, tag); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

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
