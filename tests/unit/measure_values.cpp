// The judge of values, the ring of operands, and the table of tactics: what a measurement stands on.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/bf16.h"
#include "measure/bench_host.h"
#include "measure/check_gemm.h"
#include "measure/row.h"
#include "measure/tune_gemm.h"
#include "measure/values.h"

namespace twostep {
namespace {

TEST(MeasureValues, normal_data_has_the_mean_and_variance_of_its_name) {
  std::vector<std::uint16_t> values(1 << 18);
  fill_host(values.data(), 1, 1 << 18, 1 << 18, operand_base("x", 3), Data::kNormal, 1.0f);
  double sum = 0, squares = 0;
  for (const std::uint16_t bits : values) {
    sum += bf16_to_float(bits);
    squares += double{bf16_to_float(bits)} * bf16_to_float(bits);
  }
  const auto count = static_cast<double>(values.size());
  EXPECT_NEAR(sum / count, 0.0, 0.01);
  EXPECT_NEAR(squares / count, 1.0, 0.01);
}

TEST(MeasureValues, integers_take_every_value_from_minus_4_to_4_and_no_other) {
  std::vector<std::uint16_t> values(4096);
  fill_host(values.data(), 1, 4096, 4096, operand_base("x", 3), Data::kIntegers, 0.25f);
  std::set<float> seen;
  for (const std::uint16_t bits : values) seen.insert(bf16_to_float(bits));
  EXPECT_EQ(seen, (std::set<float>{-4, -3, -2, -1, 0, 1, 2, 3, 4}));
}

TEST(MeasureValues, data_does_not_depend_on_stride) {
  std::vector<std::uint16_t> packed(6 * 10), wide(6 * 16, kPoison);
  fill_host(packed.data(), 6, 10, 10, operand_base("weight", 1), Data::kNormal, 0.5f);
  fill_host(wide.data(), 6, 10, 16, operand_base("weight", 1), Data::kNormal, 0.5f);
  for (int r = 0; r < 6; ++r)
    for (int c = 0; c < 16; ++c)
      EXPECT_EQ(wide[static_cast<std::size_t>(r * 16 + c)],
                c < 10 ? packed[static_cast<std::size_t>(r * 10 + c)] : kPoison);
}

TEST(MeasureValues, each_kind_of_damage_breaks_a_rule) {
  ValueErrors good;
  good.elements = 4096;
  good.norm = 1.66e-3;
  good.worst = 0.9;
  good.wrong_bits = 3;
  EXPECT_EQ(broken_rule(good, Data::kNormal), "");
  const auto damaged = [&](auto change) {
    ValueErrors errors = good;
    change(errors);
    return broken_rule(errors, Data::kNormal);
  };
  EXPECT_NE(damaged([](ValueErrors& e) { e.nans = 1; }), "");
  EXPECT_NE(damaged([](ValueErrors& e) { e.outside = 1; }), "");
  EXPECT_NE(damaged([](ValueErrors& e) { e.worst = 1.01; }), "");
  EXPECT_NE(damaged([](ValueErrors& e) { e.norm = 2.01e-3; }), "");
  EXPECT_NE(damaged([](ValueErrors& e) { e.worst = std::nan(""); }), "");
  EXPECT_NE(broken_rule(good, Data::kIntegers), "");
}

// The seed of a check is in the replay line: the same arguments must give the same layout.
TEST(MeasureCheck, placements_repeat_and_cover_packed_wide_and_unaligned_rows) {
  int packed = 0, wide = 0, unaligned = 0;
  for (int m = 1; m <= 65; ++m) {
    const Placement at = placement_of(2304, 1536, m, 11);
    const Placement again = placement_of(2304, 1536, m, 11);
    EXPECT_EQ(at.x_stride, again.x_stride);
    EXPECT_EQ(at.out_offset, again.out_offset);
    EXPECT_GE(at.x_stride, 1536);
    EXPECT_GE(at.out_stride, 2304);
    const bool odd = at.x_stride % 8 != 0 || at.out_stride % 8 != 0 || at.x_offset % 8 != 0 || at.out_offset % 8 != 0;
    unaligned += odd;
    packed += at.x_stride == 1536 && at.out_stride == 2304;
    wide += !odd && at.out_stride > 2304;
  }
  EXPECT_GT(packed, 5);
  EXPECT_GT(wide, 5);
  EXPECT_GT(unaligned, 2);
}

TEST(MeasureCheck, the_cpu_backend_passes_and_a_seed_is_no_constant) {
  const auto values = make_host_case(48, 192, 9);
  const CheckReport report = check_shape(*values, {1, 7, 8, 9}, 5);
  EXPECT_EQ(report.runs, 8);
  EXPECT_TRUE(report.failures.empty()) << report.failures.front().sentence;
  EXPECT_GT(report.worst, 0.0);
  EXPECT_NE(operand_base("x", 5), operand_base("x", 6));
}

TEST(MeasureRing, copies_pass_l2_and_replays_rotate) {
  for (const std::int64_t bytes : {2'359'296LL, 7'077'888LL, 22'020'096LL, 293'601'280LL, 2'348'810'240LL}) {
    const Ring ring = plan_ring(bytes);
    EXPECT_GE(ring.weights, 2);
    EXPECT_GE(ring.launches, 4);
    EXPECT_EQ(ring.launches % ring.weights, 0);
    EXPECT_GE(ring.weights * bytes, 240'000'000) << bytes;
  }
}

TEST(MeasureRow, a_difference_within_the_larger_spread_is_a_tie) {
  Chain chain;
  chain.ours = {10.0, 9.9, 10.1, 15, 3};
  chain.baseline = {10.3, 10.1, 10.5, 15, 3};
  EXPECT_EQ(verdict_of(chain), Verdict::kTie);
  chain.baseline.median = 10.5;
  EXPECT_EQ(verdict_of(chain), Verdict::kWin);
  chain.baseline.median = 9.5;
  EXPECT_EQ(verdict_of(chain), Verdict::kLoss);
  chain.baseline.kept = 0;
  EXPECT_EQ(verdict_of(chain), Verdict::kNone);
}

TEST(MeasureRow, each_chain_is_one_json_line_with_its_limit_and_baseline) {
  BenchRow row;
  row.n = 2304;
  row.k = 1536;
  row.rows = 8;
  row.kind = Kind::kWarp;
  row.chains = {{"early", {2.9, 2.8, 3.0, 15, 3}, {5.5, 5.4, 5.6, 15, 3}, {1.7, 1.7, 1.7, 15, 3}},
                {"isolated", {4.0, 3.9, 4.1, 15, 3}, {}, {3.3, 3.3, 3.3, 15, 3}}};
  const std::string lines = json_lines(row, this_machine("twostep bench gemm"));
  const auto end = lines.find('\n');
  const auto early = nlohmann::json::parse(lines.substr(0, end));
  const auto isolated = nlohmann::json::parse(lines.substr(end + 1));
  EXPECT_EQ(early.at("protocol").at("chain"), "early");
  EXPECT_EQ(early.at("baseline_time").at("median_us"), 5.5);
  EXPECT_EQ(early.at("verdict"), "win");
  EXPECT_TRUE(isolated.at("baseline_time").is_null());
  EXPECT_EQ(isolated.at("verdict"), "none");
}

TEST(MeasureRow, cache_state_and_early_launch_are_those_of_the_row) {
  BenchRow row;
  row.n = 16;
  row.k = 64;
  row.rows = 8;
  row.kind = Kind::kWarp;
  row.ring = plan_ring(2 * row.n * row.k);
  row.chains = {{"early", {2.9, 2.8, 3.0, 15, 3}, {}, {1.7, 1.7, 1.7, 15, 3}}};
  const auto protocol = [&] { return nlohmann::json::parse(json_lines(row, this_machine("test"))).at("protocol"); };
  EXPECT_EQ(protocol().at("l2"), "warm") << "128 copies of 2 KiB stay in any L2";
  EXPECT_EQ(protocol().at("pdl"), true);
  row.n = 2304;
  row.k = 1536;
  row.ring = plan_ring(2 * row.n * row.k);
  EXPECT_EQ(protocol().at("l2"), "cold");
  row.kind = Kind::kCublas;
  EXPECT_EQ(protocol().at("pdl"), false) << "cuBLAS is launched as always";
  row.kind = Kind::kWarp;
  row.chains.front().name = "isolated";
  EXPECT_EQ(protocol().at("pdl"), false);
  row.kind = Kind::kCpu;
  row.chains.front().name = "host";
  row.ring.weights = 1 + static_cast<int>(4 * last_cache_bytes() / static_cast<std::int64_t>(row.bytes()));
  EXPECT_EQ(protocol().at("l2"), last_cache_bytes() > 0 ? "cold" : "warm");
  row.ring.weights = 1;
  EXPECT_EQ(protocol().at("l2"), "warm");
}

TEST(MeasureHost, the_row_has_its_values_its_time_and_its_limit) {
  const BenchRow row = bench_host(48, 192, 3, 1000.0);
  EXPECT_EQ(row.kind, Kind::kCpu);
  EXPECT_GT(row.values.elements, 0u);
  EXPECT_EQ(broken_rule(row.values, Data::kNormal), "");
  ASSERT_EQ(row.chains.size(), 1u);
  EXPECT_GT(row.chains.front().ours.median, 0.0);
  EXPECT_DOUBLE_EQ(row.chains.front().limit.median, row.bytes() / 1000.0);
}

TEST(MeasureTable, sweep_tries_each_load_and_tile_and_repeats_nothing) {
  const DeviceFacts facts = known_gpu("h200");
  const auto candidates = sweep_candidates(8, 2304, 1536, facts, 40);
  std::set<std::pair<WeightLoad, int>> kinds;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    kinds.insert({candidates[i].weight_load, candidates[i].tile_n});
    EXPECT_TRUE(tactic_valid(candidates[i], 8, 2304, 1536, facts).ok());
    for (std::size_t j = 0; j < i; ++j) EXPECT_FALSE(candidates[i] == candidates[j]);
  }
  EXPECT_EQ(kinds.size(), 8u);
  EXPECT_LE(candidates.size(), 40u);
}

TEST(MeasureTable, a_sweep_gives_each_mma_half_and_never_more_than_was_asked_for) {
  const DeviceFacts h200 = known_gpu("h200");
  for (const auto& [n, k] : {std::pair{2304, 1536}, {7168, 1536}, {3584, 7168}})
    for (const int m : {8, 64}) {
      std::map<Mma, int> of_mma;
      for (const Tactic& t : sweep_candidates(m, n, k, h200, 40)) ++of_mma[t.mma];
      EXPECT_EQ(of_mma[Mma::kMmaSync] + of_mma[Mma::kWgmma], 40);
      EXPECT_GE(of_mma[Mma::kWgmma], 12) << n << ", " << k << " M = " << m;
      EXPECT_GE(of_mma[Mma::kMmaSync], 12) << n << ", " << k << " M = " << m;
    }
  for (const int count : {1, 2, 5, 13, 40})
    EXPECT_EQ(static_cast<int>(sweep_candidates(8, 2304, 1536, h200, count).size()), count);
}

TEST(MeasureTable, a_sweep_of_one_mma_alone_takes_all) {
  const DeviceFacts no_wgmma{100, 148, 232448, 233472, "NVIDIA B200"};
  EXPECT_EQ(sweep_candidates(8, 2304, 1536, no_wgmma, 40).size(), 40u);
}

TEST(MeasureTable, merging_keeps_other_entries_and_refuses_another_gpu) {
  std::string folder = testing::TempDir() + "/twostep_measure_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/table.json";
  Machine machine = this_machine("test");
  machine.device = "NVIDIA H200";
  MeasuredEntry a, b;
  a.entry = {2304, 1536, 8, warp_tactic(8, 2304, 1536, known_gpu("h200")), 2.9, 5.5};
  b.entry = {2304, 1536, 16, warp_tactic(16, 2304, 1536, known_gpu("h200")), 3.7, 5.5};
  merge_table(path, machine, kGemmList, {entry_json(a), entry_json(b)});
  a.entry.warp_us = 2.5;
  merge_table(path, machine, kGemmList, {entry_json(a)});
  const auto json = nlohmann::json::parse(std::ifstream(path));
  ASSERT_EQ(json.at("entries").size(), 2u);
  EXPECT_EQ(json.at("entries")[0].at("warp_us"), 2.5);
  EXPECT_EQ(json.at("entries")[1].at("rows"), 16);
  machine.device = "NVIDIA H100 80GB HBM3";
  EXPECT_THROW(merge_table(path, machine, kGemmList, {entry_json(a)}), Error);
  EXPECT_EQ(table_keys(path, "NVIDIA H200", kGemmList),
            (std::set<std::string>{R"({"n":2304,"k":1536,"rows":8})", R"({"n":2304,"k":1536,"rows":16})"}));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1) << "no temporary file is left";
  std::filesystem::remove_all(folder);
}

TEST(MeasureTable, a_link_stays_a_link_and_what_cannot_be_read_is_not_taken_for_empty) {
  std::string folder = testing::TempDir() + "/twostep_measure_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  Machine machine = this_machine("test");
  machine.device = "NVIDIA H200";
  MeasuredEntry entry;
  entry.entry = {2304, 1536, 8, warp_tactic(8, 2304, 1536, known_gpu("h200")), 2.9, 5.5};
  std::filesystem::create_directory(folder + "/real");
  merge_table(folder + "/real/table.json", machine, kGemmList, {});
  std::filesystem::create_symlink("real/table.json", folder + "/link.json");
  merge_table(folder + "/link.json", machine, kGemmList, {entry_json(entry)});
  EXPECT_TRUE(std::filesystem::is_symlink(folder + "/link.json"));
  EXPECT_EQ(table_keys(folder + "/real/table.json", machine.device, kGemmList).size(), 1u);

  EXPECT_TRUE(table_keys(folder + "/none.json", machine.device, kGemmList).empty());
  std::filesystem::create_symlink("loop.json", folder + "/loop.json");
  for (const std::string& path : {folder + "/real", folder + "/loop.json"}) {
    try {
      merge_table(path, machine, kGemmList, {entry_json(entry)});
      ADD_FAILURE() << path;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kUnavailable) << error.what();
    }
  }
  std::ofstream(folder + "/cut.json") << "{\"gpu\": \"NVIDIA H200\", ";
  EXPECT_THROW(table_keys(folder + "/cut.json", machine.device, kGemmList), Error);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace twostep
