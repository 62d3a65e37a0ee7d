// The check of the tactics of a table: which entries, at which rows, how a failure is told.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "core/check.h"
#include "core/embedded.h"
#include "gemm/contract.h"
#include "measure/check_gemm.h"

namespace twostep {
namespace {

std::size_t count_of(std::string_view text, std::string_view word) {
  std::size_t count = 0;
  for (std::size_t at = text.find(word); at != std::string_view::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

TEST(MeasureCheck, every_entry_of_the_table_is_there_once_with_a_valid_tactic) {
  const DeviceFacts facts = known_gpu("h200");
  std::size_t written = 0;
  for (const EmbeddedText& file : embedded_tactics())
    if (file.name == "h200.json") written = count_of(file.text, "\"cublas_us\"");  // one in each entry
  const std::vector<TableEntry> entries = table_entries(facts);
  EXPECT_GT(written, 0u);
  EXPECT_EQ(entries.size(), written);
  std::set<std::tuple<std::int64_t, std::int64_t, int>> keys;
  for (const TableEntry& entry : entries) {
    EXPECT_TRUE(keys.insert({entry.n, entry.k, entry.rows}).second) << entry.n << " " << entry.k << " " << entry.rows;
    for (const int m : rows_of_entry(entry)) {
      const Status valid = tactic_valid(complete(entry.tactic, m, facts), m, entry.n, entry.k, facts);
      EXPECT_TRUE(valid.ok()) << entry.n << " " << entry.k << " rows " << m << ": " << valid.message();
    }
  }
}

TEST(MeasureCheck, a_gpu_without_a_table_has_no_entries) {
  DeviceFacts other = known_gpu("h200");
  other.name = "another GPU";
  EXPECT_TRUE(table_entries(other).empty());
}

TEST(MeasureCheck, an_entry_is_checked_at_both_ends_of_its_bucket_and_at_one_row) {
  TableEntry entry;
  entry.rows = 32;
  EXPECT_EQ(rows_of_entry(entry), (std::vector<int>{1, 25, 32}));
  entry.rows = 8;
  EXPECT_EQ(rows_of_entry(entry), (std::vector<int>{1, 8}));
  entry.rows = 3;
  EXPECT_EQ(rows_of_entry(entry), (std::vector<int>{1, 3}));
}

TEST(MeasureCheck, operands_of_a_tactic_are_such_as_the_warp_kernel_takes) {
  const auto values = make_host_case(32, 192, 64);
  std::set<std::int64_t> strides;
  alignas(16) static std::uint16_t memory[64];  // never read
  for (std::uint64_t seed = 1; seed <= 40; ++seed)
    check_tactic(*values, {1, 25, 32}, seed, [&](int m, const Placement& at) {
      const auto x = TensorView::matrix(memory + at.x_offset, m, 192, Device::cpu(), at.x_stride);
      const auto out = TensorView::matrix(memory + at.out_offset, m, 32, Device::cpu(), at.out_stride);
      EXPECT_EQ(warp_takes_operands(x, out), WhyCode::kNone) << "seed " << seed << " m " << m;
      strides.insert(at.x_stride);
      return ValueErrors{};
    });
  EXPECT_GT(strides.size(), 2u) << "packed and wide rows";
}

TEST(MeasureCheck, a_tactic_fails_at_the_rows_whose_values_are_wrong_and_at_those_that_throw) {
  const auto values = make_host_case(16, 64, 64);
  const CheckReport report = check_tactic(*values, {1, 25, 32}, 1, [](int m, const Placement&) {
    if (m == 25) fail(StatusCode::kCompileFailed, "place", "argument", "no kernel", "a kernel");
    ValueErrors errors;
    if (m == 32) errors.worst = 1.5;
    return errors;
  });
  ASSERT_EQ(report.failures.size(), 2u);
  EXPECT_EQ(report.failures[0].m, 25);
  EXPECT_NE(report.failures[0].sentence.find("no kernel"), std::string::npos);
  EXPECT_EQ(report.failures[1].m, 32);
  EXPECT_NE(report.failures[1].sentence.find("1.4 (a)"), std::string::npos);
  EXPECT_EQ(report.runs, 2);
  EXPECT_EQ(report.worst, 1.5);
}

TEST(MeasureCheck, integers_of_a_tactic_must_be_exact) {
  const auto values = make_host_case(16, 64, 64);
  ValueErrors one_off;
  one_off.elements = 16;
  one_off.wrong_bits = 1;
  const CheckReport report = check_tactic(*values, {1}, 1, [&](int, const Placement&) { return one_off; });
  ASSERT_EQ(report.failures.size(), 1u) << "normal data may differ in bits";
  EXPECT_EQ(report.failures[0].data, Data::kIntegers);
}

}  // namespace
}  // namespace twostep
