// Status, hashes, views, timer, environment.
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "core/check.h"
#include "core/env.h"
#include "core/hash.h"
#include "core/log.h"
#include "core/timer.h"
#include "twostep/tensor.h"

namespace twostep {
namespace {

TEST(CoreStatus, message_is_place_argument_value_accepted_remedy) {
  const Status status = refusal(StatusCode::kUnsupported, "gemm.prepare", "K", "1500", "multiples of 64 from 64",
                                "pad x and weight with zero columns");
  EXPECT_EQ(status.message(),
            "gemm.prepare: K = 1500; accepted: multiples of 64 from 64; pad x and weight with zero columns");
}

TEST(CoreStatus, empty_fields_leave_no_trace_in_the_message) {
  EXPECT_EQ(Status{}.message(), "ok");
  EXPECT_EQ(refusal(StatusCode::kInternal, "a.b", "", "text", "").message(), "a.b: text");
  EXPECT_EQ(refusal(StatusCode::kInternal, "a.b", "arg", "", "").message(), "a.b: arg");
  EXPECT_EQ(refusal(StatusCode::kInternal, "a.b", "", "", "", "do this").message(), "a.b; do this");
}

TEST(CoreStatus, code_names_are_distinct_snake_case) {
  std::set<std::string_view> names;
  for (int code = 0; code <= static_cast<int>(StatusCode::kInternal); ++code) {
    const auto name = code_name(static_cast<StatusCode>(code));
    EXPECT_EQ(name.find_first_not_of("abcdefghijklmnopqrstuvwxyz_"), std::string_view::npos) << name;
    EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_EQ(code_name(StatusCode::kBadLayout), "bad_layout");
}

TEST(CoreStatus, error_carries_its_status) {
  try {
    fail(StatusCode::kOverlap, "gemm.run", "out", "BF16[1, 1]", "memory of its own");
    FAIL() << "fail returned";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kOverlap);
    EXPECT_EQ(error.what(), error.status().message());
  }
  EXPECT_NO_THROW(throw_if_error({}));
  EXPECT_THROW(throw_if_error(refusal(StatusCode::kInternal, "a", "b", "c", "d")), Error);
}

TEST(CoreHash, vectors_of_xxh3) {
  // From the published specification of XXH3: the empty input, seed 0.
  EXPECT_EQ(hash128(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(hash64(""), 0x2d06800538d394c2ull);
}

TEST(CoreHash, one_flipped_bit_changes_it) {
  std::string text(1000, 'a');
  const auto before = hash128(text);
  std::set<std::string> seen{before};
  for (std::size_t i = 0; i < text.size(); ++i) {
    text[i] ^= 1;
    EXPECT_TRUE(seen.insert(hash128(text)).second) << i;
    text[i] ^= 1;
  }
  EXPECT_EQ(hash128(text), before);
  EXPECT_EQ(before.size(), 32u);
  EXPECT_EQ(before.find_first_not_of("0123456789abcdef"), std::string::npos);
}

TEST(CoreTensor, matrix_is_packed_unless_told) {
  std::uint16_t value = 0;
  const auto packed = TensorView::matrix(&value, 3, 5);
  EXPECT_EQ(packed.stride[0], 5);
  EXPECT_EQ(packed.stride[1], 1);
  const auto wide = TensorView::matrix(&value, 3, 5, Device::cuda(1), 8);
  EXPECT_EQ(to_string(wide), "BF16[3, 5] strides (8, 1) on cuda:1");
}

TEST(CoreTensor, sizes_and_names_of_dtypes) {
  EXPECT_EQ(dtype_size(DType::kBF16), 2u);
  EXPECT_EQ(dtype_size(DType::kF64), 8u);
  EXPECT_STREQ(dtype_name(DType::kI32), "I32");
}

TEST(CoreTimer, summary_drops_the_warm_up_and_gives_percentiles) {
  std::vector<double> samples{1e9, 1e9};
  for (int i = 100; i >= 0; --i) samples.push_back(i);
  const Summary s = summarize(samples, 2);
  EXPECT_EQ(s.dropped, 2);
  EXPECT_EQ(s.kept, 101);
  EXPECT_EQ(s.median, 50);
  EXPECT_EQ(s.p10, 10);
  EXPECT_EQ(s.p90, 90);
  EXPECT_EQ(s.spread(), 80);
  EXPECT_EQ(summarize({}, 3).kept, 0);
}

// In a child process: the environment is read once per process.
TEST(CoreEnvDeathTest, variables_reach_their_fields) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto child = [] {
    setenv("TWOSTEP_CACHE_DIR", "/some/where", 1);
    setenv("TWOSTEP_CACHE", "0", 1);
    setenv("TWOSTEP_JIT", "0", 1);
    setenv("TWOSTEP_WARP", "0", 1);
    setenv("TWOSTEP_THREADS", "3", 1);
    const Environment& env = environment();
    const bool right = env.cache_dir == "/some/where" && !env.cache && !env.jit && !env.warp && env.threads == 3;
    setenv("TWOSTEP_THREADS", "5", 1);
    std::exit(right && environment().threads == 3 ? 0 : 1);
  };
  EXPECT_EXIT(child(), testing::ExitedWithCode(0), "");
}

TEST(CoreEnvDeathTest, set_variables_are_logged) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto child = [] {
    setenv("TWOSTEP_LOG", "info", 1);
    setenv("TWOSTEP_THREADS", "3", 1);
    environment();
    std::exit(0);
  };
  EXPECT_EXIT(child(), testing::ExitedWithCode(0), "TWOSTEP_THREADS=3");
}

TEST(CoreEnvDeathTest, the_log_knows_its_level_before_anyone_reads_the_environment) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto child = [](const char* level) {
    setenv("TWOSTEP_LOG", level, 1);
    log_info("a line of info");
    log_error("a line of error");
    std::exit(0);
  };
  EXPECT_EXIT(child("info"), testing::ExitedWithCode(0), "a line of info(.|\n)*a line of error");
  EXPECT_EXIT(child("error"), testing::ExitedWithCode(0), "^twostep error: a line of error\n$");
  EXPECT_EXIT(child("off"), testing::ExitedWithCode(0), "^$");
}

TEST(CoreEnvDeathTest, what_is_set_is_kept_with_its_value) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto child = [] {
    for (const char* name : {"TWOSTEP_CACHE_DIR", "TWOSTEP_CACHE", "TWOSTEP_JIT", "TWOSTEP_WARP", "TWOSTEP_NVRTC",
                             "TWOSTEP_CUBLASLT", "TWOSTEP_NCCL", "TWOSTEP_LOG"})
      unsetenv(name);
    setenv("TWOSTEP_THREADS", "3", 1);
    const std::vector<std::pair<std::string, std::string>> expected{{"TWOSTEP_THREADS", "3"}};
    std::exit(environment().set == expected ? 0 : 1);
  };
  EXPECT_EXIT(child(), testing::ExitedWithCode(0), "");
}

TEST(CoreEnvDeathTest, defaults_without_variables) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto child = [] {
    for (const char* name : {"TWOSTEP_CACHE_DIR", "TWOSTEP_CACHE", "TWOSTEP_JIT", "TWOSTEP_WARP", "TWOSTEP_THREADS"})
      unsetenv(name);
    setenv("XDG_CACHE_HOME", "/x", 1);
    const Environment& env = environment();
    std::exit(env.cache_dir == "/x/twostep" && env.cache && env.jit && env.warp && env.threads == 0 ? 0 : 1);
  };
  EXPECT_EXIT(child(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace twostep
