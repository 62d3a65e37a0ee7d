#include <gtest/gtest.h>

#include <set>
#include <string>

#include "io/cases.h"

namespace twostep {
namespace {

TEST(io_cases, names_are_unique_and_each_finds_its_case) {
  std::set<std::string> names;
  for (const auto& item : gemm_cases()) {
    EXPECT_TRUE(names.insert(item.name()).second) << item.name();
    const auto found = gemm_cases({"", 0, item.name()});
    ASSERT_EQ(found.size(), 1u) << item.name();
    EXPECT_EQ(found.front(), item);
  }
  EXPECT_FALSE(names.empty());
}

TEST(io_cases, filters_narrow_by_model_tp_and_layer) {
  EXPECT_EQ(gemm_cases({"k3.1", 8, "g_proj"}).size(), 1u);
  EXPECT_EQ(gemm_cases({"", 0, "qkv_a"}).size(), 8u);
  for (const auto& item : gemm_cases({"k3", 4, ""})) EXPECT_TRUE(item.model == "k3" && item.tp == 4);
  EXPECT_TRUE(gemm_cases({"k4", 0, ""}).empty());
}

// Rows of the tables in the chapter, typed from there.
TEST(io_cases, known_rows_of_the_tables_are_there) {
  const auto expect = [](const char* name, std::int64_t n, std::int64_t k, RowsKind rows, int count) {
    const auto found = gemm_cases({"", 0, name});
    ASSERT_EQ(found.size(), 1u) << name;
    EXPECT_EQ(found.front().n, n) << name;
    EXPECT_EQ(found.front().k, k) << name;
    EXPECT_EQ(found.front().rows, rows) << name;
    EXPECT_EQ(found.front().count, count) << name;
  };
  expect("k3/tp1/context_proj", 7168, 35840, RowsKind::kContext, 1);
  expect("k3/tp16/context_proj", 448, 35840, RowsKind::kContext, 1);
  expect("k3/tp16/context_proj_replicated", 7168, 35840, RowsKind::kContext, 0);
  expect("k3.1/tp8/context_kv_proj", 2880, 7168, RowsKind::kContext, 1);
  expect("k3/tp4/qkv_a", 2112, 7168, RowsKind::kBlock, 5);
  expect("k3/tp8/q_b", 1536, 1536, RowsKind::kBlock, 5);
  expect("k3.1/tp8/q_b", 2304, 1536, RowsKind::kBlock, 5);
  expect("k3.1/tp16/o_proj", 7168, 768, RowsKind::kBlock, 5);
  expect("k3/tp1/gate_up", 28672, 7168, RowsKind::kBlock, 5);
  expect("k3.1/tp8/down", 7168, 1792, RowsKind::kBlock, 5);
  expect("k3/tp1/lm_head", 163840, 7168, RowsKind::kBlock, 1);
  expect("k3.1/tp8/g_proj", 1536, 7168, RowsKind::kBlock, 0);
}

TEST(io_cases, rows_are_those_of_the_step) {
  EXPECT_EQ(rows_of(RowsKind::kBlock, 3, 7), 21);
  EXPECT_EQ(rows_of(RowsKind::kContext, 3, 7), 24);
}

}  // namespace
}  // namespace twostep
