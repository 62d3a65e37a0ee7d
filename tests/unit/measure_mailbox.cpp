// Calls of `check mailbox` and `bench mailbox`: what is drawn, what is judged, what a time is held against.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "core/bf16.h"
#include "measure/mailbox_case.h"

namespace twostep {
namespace {

constexpr std::uint64_t kSeed = 11;

// The memory of `rank` after the call, made from what all ranks have before it. The norm in FP64.
CallMemory call_on_host(const MailboxCase& c, int ranks, int rank) {
  std::vector<CallMemory> all;
  for (int r = 0; r < ranks; ++r) all.push_back(memory_before(c, ranks, r, kSeed));
  CallMemory after = all[static_cast<std::size_t>(rank)];
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  const bool words = c.op == MailboxOp::kAllGatherWords;
  if (c.op != MailboxOp::kAllReduceAddNorm) {
    const std::int64_t rows = words ? 1 : c.rows, cols = words ? 2 * c.cols : c.cols, pad = words ? 0 : c.pad;
    const std::int64_t in_stride = cols + pad, out_stride = ranks * cols + pad;
    for (int r = 0; r < ranks; ++r)
      for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t i = 0; i < cols; i += 2) {
          const std::uint16_t* from = c.in_place ? &all[at(r)].out[at(row * out_stride + r * cols + i)]
                                                 : &all[at(r)].in[at(row * in_stride + i)];
          std::uint16_t* to = &after.out[at(row * out_stride + r * cols + i)];
          const bool ones = from[0] == 0xffff && from[1] == 0xffff;
          to[0] = ones && !words ? 0x7fff : from[0];
          to[1] = ones ? 0x7fff : from[1];
        }
    return after;
  }
  const std::int64_t stride = c.cols + c.pad;
  const std::vector<std::uint16_t> residual = c.in_place ? after.out : after.residual;
  std::vector<std::uint16_t>& norm = c.in_place ? after.in : after.norm;
  for (std::int64_t row = 0; row < c.rows; ++row) {
    double squares = 0;
    for (std::int64_t i = 0; i < c.cols; ++i) {
      float sum = 0;
      for (int r = 0; r < ranks; ++r) sum += bf16_to_float(all[at(r)].in[at(row * stride + i)]);
      if (c.residual) sum = bf16_to_float(float_to_bf16(sum)) + bf16_to_float(residual[at(row * stride + i)]);
      std::uint16_t& out = after.out[at(row * stride + i)];
      out = float_to_bf16(sum);
      squares += static_cast<double>(bf16_to_float(out)) * bf16_to_float(out);
    }
    for (std::int64_t i = 0; c.gamma != MailboxCase::Gamma::kNone && i < c.cols; ++i) {
      float gamma = 0;
      if (c.gamma == MailboxCase::Gamma::kF32) std::memcpy(&gamma, &after.gamma[at(2 * i)], sizeof gamma);
      else gamma = bf16_to_float(after.gamma[at(i)]);
      norm[at(row * stride + i)] = double_to_bf16(bf16_to_float(after.out[at(row * stride + i)]) /
                                                  std::sqrt(squares / static_cast<double>(c.cols) + 1e-5) * gamma);
    }
  }
  return after;
}

TEST(MeasureMailbox, sequences_are_drawn_by_seed_and_within_limits) {
  const MailboxLimits limits{16, 64, 128, 40};
  const auto sequences = mailbox_sequences(5, 300, limits, std::nullopt);
  const auto again = mailbox_sequences(5, 300, limits, std::nullopt);
  std::set<MailboxOp> ops;
  std::set<std::size_t> lengths;
  std::int64_t most_rows = 0, least_rows = 99, most_cols = 0, most_words = 0;
  bool captured = false, eager = false, in_place = false;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    ASSERT_EQ(sequences[i].calls.size(), again[i].calls.size());
    lengths.insert(sequences[i].calls.size());
    (sequences[i].replays > 0 ? captured : eager) = true;
    for (std::size_t j = 0; j < sequences[i].calls.size(); ++j) {
      const MailboxCase& c = sequences[i].calls[j];
      EXPECT_EQ(to_string(c), to_string(again[i].calls[j]));
      ops.insert(c.op);
      in_place |= c.in_place;
      if (c.op == MailboxOp::kAllGatherWords) {
        EXPECT_TRUE(c.cols >= 1 && c.cols <= 40 && (!c.in_place || c.cols % 4 == 0)) << c.cols;
        most_words = std::max(most_words, c.cols);
      } else {
        EXPECT_TRUE(c.cols >= 8 && c.cols % 8 == 0 && c.pad % 8 == 0);
        EXPECT_LE(c.cols, c.op == MailboxOp::kAllGather ? 64 : 128);
        most_rows = std::max(most_rows, c.rows);
        least_rows = std::min(least_rows, c.rows);
        most_cols = std::max(most_cols, c.cols);
      }
    }
  }
  EXPECT_EQ(ops.size(), 3u);
  EXPECT_EQ(lengths, (std::set<std::size_t>{1, 2, 3, 4, 5}));
  EXPECT_TRUE(captured && eager && in_place);
  EXPECT_EQ(least_rows, 0);
  EXPECT_EQ(most_rows, 16);
  EXPECT_EQ(most_cols, 128);
  EXPECT_EQ(most_words, 40);
  for (const MailboxSequence& sequence : mailbox_sequences(5, 20, limits, MailboxOp::kAllGather))
    for (const MailboxCase& c : sequence.calls) EXPECT_EQ(c.op, MailboxOp::kAllGather);
}

TEST(MeasureMailbox, a_right_call_passes_and_one_wrong_element_is_named) {
  for (const MailboxSequence& sequence : mailbox_sequences(kSeed, 60, {5, 64, 64, 24}, std::nullopt))
    for (const MailboxCase& c : sequence.calls) {
      constexpr int kRanks = 3, kRank = 1;
      const CallMemory good = call_on_host(c, kRanks, kRank);
      EXPECT_EQ(wrong_after(c, kRanks, kRank, kSeed, good), "");
      if (c.rows == 0) continue;
      for (std::size_t i = 0; i < good.out.size(); i += 1 + good.out.size() / 7) {  // padding among them
        CallMemory bad = good;
        bad.out[i] ^= 0x4000;
        EXPECT_NE(wrong_after(c, kRanks, kRank, kSeed, bad).find("out["), std::string::npos) << to_string(c);
      }
      if (c.op == MailboxOp::kAllReduceAddNorm && c.gamma != MailboxCase::Gamma::kNone) {
        CallMemory bad = good;
        (c.in_place ? bad.in : bad.norm).back() ^= 0x4000;
        EXPECT_NE(wrong_after(c, kRanks, kRank, kSeed, bad).find("norm_out["), std::string::npos) << to_string(c);
      } else if (!good.in.empty()) {
        CallMemory bad = good;
        bad.in.front() ^= 1;
        EXPECT_NE(wrong_after(c, kRanks, kRank, kSeed, bad).find("in was changed"), std::string::npos) << to_string(c);
      }
    }
}

TEST(MeasureMailbox, hard_bit_patterns_are_among_what_is_sent) {
  MailboxCase c;
  c.cols = 8192;
  const CallMemory memory = memory_before(c, 2, 0, kSeed);
  std::set<std::uint32_t> words;
  for (std::size_t i = 0; i < memory.in.size(); i += 2)
    words.insert(memory.in[i] | static_cast<std::uint32_t>(memory.in[i + 1]) << 16);
  for (const std::uint32_t hard : {0xffffffffu, 0xffff0000u, 0x0000ffffu, 0x7f80ff80u})
    EXPECT_TRUE(words.contains(hard));
}

TEST(MeasureMailbox, targets_are_those_of_the_table) {
  const auto target = [](int ranks, std::int64_t rows) {
    MailboxCase c;
    c.rows = rows;
    c.cols = 163'840 / ranks;
    return std::round(10 * *mailbox_target_us(c, ranks)) / 10;
  };
  const std::int64_t rows[] = {1, 4, 8, 16, 32, 64};
  const double of_two[] = {5.0, 6.4, 8.4, 12.2, 19.9, 35.3}, of_four[] = {5.2, 7.4, 10.3, 16.1, 27.6, 50.8},
               of_eight[] = {5.3, 7.9, 11.2, 18.0, 31.5, 58.5};
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_NEAR(target(2, rows[i]), of_two[i], 0.051);
    EXPECT_NEAR(target(4, rows[i]), of_four[i], 0.051);
    EXPECT_NEAR(target(8, rows[i]), of_eight[i], 0.051);
  }
  MailboxCase reduction;
  reduction.op = MailboxOp::kAllReduceAddNorm;
  reduction.rows = 8;
  reduction.cols = 7168;
  EXPECT_EQ(mailbox_target_us(reduction, 2), 5.5);
  EXPECT_EQ(mailbox_target_us(reduction, 4), std::nullopt);
}

TEST(MeasureMailbox, a_sample_is_its_slowest_rank) {
  std::vector<double> first, second;
  for (int i = 1; i <= 200; ++i) {
    first.push_back(i % 2 == 0 ? i : 0);
    second.push_back(i % 2 == 0 ? 0 : i);
  }
  const RankTimes times = over_ranks({first, second});
  EXPECT_EQ(times.p50, 100);
  EXPECT_EQ(times.p99, 198);
  EXPECT_EQ(times.max, 200);
  EXPECT_EQ(times.kept, 200);
  EXPECT_EQ(over_ranks({}).kept, 0);
}

TEST(MeasureMailbox, a_row_has_both_times_or_the_reason) {
  MailboxRow row;
  row.what = mailbox_bench_cases(2, {}, 0, MailboxOp::kAllGather).back();
  row.time = {34, 36, 40, 200};
  row.no_baseline = "ranks share a GPU";
  auto json = nlohmann::json::parse(json_line(row, {}));
  EXPECT_EQ(json["case"]["rows"], 64);
  EXPECT_EQ(json["case"]["cols"], 81920);
  EXPECT_EQ(json["bytes"], 64 * 81920 * 2);
  EXPECT_EQ(json["time"]["p99_us"], 36);
  EXPECT_NEAR(json["target_us"].get<double>(), 35.3, 0.1);
  EXPECT_TRUE(json["baseline_time"].is_null());
  EXPECT_EQ(json["baseline_why_not"], "ranks share a GPU");
  row.gpus = 1;
  row.baseline = "NCCL 2.28.9";
  row.baseline_time = {65, 66, 70, 200};
  json = nlohmann::json::parse(json_line(row, {}));
  EXPECT_TRUE(json["target_us"].is_null()) << "virtual ranks have no link";
  EXPECT_EQ(json["baseline_time"]["p50_us"], 65);
}

TEST(MeasureMailbox, what_is_timed_by_default) {
  EXPECT_EQ(mailbox_bench_cases(2, {}, 0, std::nullopt).size(), 18u);
  EXPECT_EQ(mailbox_bench_cases(4, {1, 8}, 0, MailboxOp::kAllGatherWords).back().cols, 16);
  EXPECT_EQ(mailbox_bench_cases(2, {1, 8}, 64, MailboxOp::kAllGatherWords).size(), 1u) << "one width is timed once";
}

}  // namespace
}  // namespace twostep
