// Compile keys and what is read from the log of ptxas.
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "jit/compile.h"

namespace twostep {
namespace {

const CompileRequest kRequest{"name", "entry", "text", "sm_90a", "rules 1"};
const std::vector<EmbeddedText> kFiles{{"a.cuh", "line 1\nline 2\n"}, {"b.cuh", "line 3\n"}};

TEST(JitKey, every_input_of_the_compiler_changes_the_key) {
  std::set<std::string> hashes{key_hash(source_hash(kRequest, kFiles), "13.0")};
  const auto differs = [&](const std::string& hash, const char* what) {
    EXPECT_TRUE(hashes.insert(hash).second) << what;
  };
  CompileRequest request = kRequest;
  request.entry = "entry2";
  differs(key_hash(source_hash(request, kFiles), "13.0"), "entry");
  request = kRequest;
  request.text += " ";
  differs(key_hash(source_hash(request, kFiles), "13.0"), "text");
  request = kRequest;
  request.arch = "sm_100a";
  differs(key_hash(source_hash(request, kFiles), "13.0"), "architecture");
  request = kRequest;
  request.rules = "rules 2";
  differs(key_hash(source_hash(request, kFiles), "13.0"), "rules");
  differs(key_hash(source_hash(kRequest, kFiles), "12.9"), "NVRTC version");
  auto files = kFiles;
  files[1].text = "line 4\n";
  differs(key_hash(source_hash(kRequest, files), "13.0"), "one line of an embedded file");
  files = kFiles;
  files[1].name = "c.cuh";
  differs(key_hash(source_hash(kRequest, files), "13.0"), "name of an embedded file");
}

TEST(JitKey, text_that_moves_between_fields_changes_the_key) {
  CompileRequest left = kRequest;
  CompileRequest right = kRequest;
  left.entry = "ab";
  left.rules = "c";
  right.entry = "a";
  right.rules = "bc";
  EXPECT_NE(source_hash(left), source_hash(right));
  const std::vector<EmbeddedText> one{{"a", "bc"}};
  const std::vector<EmbeddedText> other{{"ab", "c"}};
  EXPECT_NE(source_hash(kRequest, one), source_hash(kRequest, other));
}

TEST(JitKey, the_name_is_for_people_and_not_part_of_the_hash) {
  CompileRequest renamed = kRequest;
  renamed.name = "another";
  EXPECT_EQ(compile_key(kRequest, "13.0").hash, compile_key(renamed, "13.0").hash);
  EXPECT_EQ(compile_key(renamed, "13.0").name, "another");
  EXPECT_EQ(compile_key(kRequest, "13.0").hash.size(), 32u);
}

TEST(JitKey, kernels_are_embedded_with_their_paths) {
  std::set<std::string_view> names;
  for (const auto& file : embedded_kernels()) {
    EXPECT_FALSE(file.text.empty()) << file.name;
    names.insert(file.name);
  }
  EXPECT_TRUE(names.contains("common/ptx.cuh"));
}

TEST(JitLog, numbers_of_ptxas_are_read) {
  const auto r = parse_ptxas_log(
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
      "ptxas info    : Function properties for k\n"
      "ptxas         .     400 bytes stack frame, 24 bytes spill stores, 28 bytes spill loads\n"
      "ptxas info    : Used 128 registers, used 1 barriers, 400 bytes cumulative stack size, 256 bytes smem\n"
      "ptxas info    : Compile time = 50.165 ms\n");
  EXPECT_EQ(r, (KernelResources{128, 24, 28, 400, 256}));
  EXPECT_TRUE(r.spills());
}

TEST(JitLog, spills_of_functions_that_were_not_inlined_count) {
  const auto r = parse_ptxas_log(
      "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n"
      "ptxas info    : Used 40 registers, used 0 barriers");
  EXPECT_EQ(r, (KernelResources{40, 8, 8, 8, 0}));
}

TEST(JitLog, a_log_without_numbers_gives_zero_registers) {
  EXPECT_EQ(parse_ptxas_log("warning: nothing about registers"), KernelResources{});
  EXPECT_EQ(parse_ptxas_log(""), KernelResources{});
}

}  // namespace
}  // namespace twostep
