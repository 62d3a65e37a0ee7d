// Tactics: validity rule by rule, shared memory and grid by a second computation, the text that is compiled.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "gemm/contract.h"
#include "gemm/tactics.h"
#include "measure/tune_gemm.h"

namespace twostep {
namespace {

const DeviceFacts kH200 = known_gpu("h200");
constexpr std::int64_t kN = 2112, kK = 7168;  // 112 boxes of 64 columns

Tactic wgmma(int tile_n, int tile_k, int stages, int cluster_k, int m = 8) {
  Tactic t;
  t.mma = Mma::kWgmma;
  t.weight_load = WeightLoad::kTiles;
  t.tile_n = tile_n;
  t.tile_k = tile_k;
  t.stages = stages;
  t.k_slices = 1;
  t.cluster_k = cluster_k;
  t.warps = tile_n / 16;
  return complete(t, m, kH200);
}

std::string broken_rule(const Tactic& t, std::int64_t k = kK, const DeviceFacts& facts = kH200, int m = 8) {
  const Status status = tactic_valid(t, m, kN, k, facts);
  EXPECT_TRUE(status.ok() || status.code == StatusCode::kUnsupported);
  return status.argument;
}

// The first tactic of the search that is valid and of this family.
Tactic first_of(Mma mma, int m) {
  for (const Tactic& t : valid_tactics(m, kN, kK, kH200))
    if (t.mma == mma) return t;
  ADD_FAILURE() << "none is valid";
  return {};
}

TEST(GemmTactics, each_rule_of_wgmma_is_named_when_it_is_broken) {
  const Tactic good = wgmma(128, 64, 6, 8);
  ASSERT_EQ(broken_rule(good), "");
  const auto broken = [&](const std::function<void(Tactic&)>& change, int m = 8) {
    Tactic t = good;
    change(t);
    return broken_rule(complete(t, m, kH200), kK, kH200, m);
  };
  EXPECT_EQ(broken([](Tactic& t) { t.weight_order = WeightOrder::kPacked; }), "weight_order");
  EXPECT_EQ(broken([](Tactic& t) { t.weight_load = WeightLoad::kRows; }), "weight_load");
  EXPECT_EQ(broken([](Tactic& t) { t.x_mode = XMode::kResident; }), "x_mode");
  EXPECT_EQ(broken([](Tactic& t) { t.k_slices = 2; }), "k_slices");
  EXPECT_EQ(broken([](Tactic& t) { t.cluster_n = 2; }), "cluster_n");
  EXPECT_EQ(broken([](Tactic& t) { t.tile_n = 32, t.warps = 2; }), "tile_n");
  EXPECT_EQ(broken([](Tactic& t) { t.tile_n = 320, t.warps = 20; }), "tile_n");
  EXPECT_EQ(broken([](Tactic& t) { t.tile_n = 192, t.warps = 12, t.cluster_k = 8; }), "cluster_k");
  EXPECT_EQ(broken([](Tactic& t) { t.tile_k = 512; }), "tile_k");
  EXPECT_EQ(broken([](Tactic& t) { t.warps = 4; }), "warps");
  EXPECT_EQ(broken([](Tactic& t) { t.stages = 1; }), "stages");
  EXPECT_EQ(broken([](Tactic& t) { t.stages = 13; }), "stages");
  EXPECT_EQ(broken([](Tactic& t) { t.cluster_k = 3; }), "cluster_k");
  EXPECT_EQ(broken([](Tactic& t) { t.cluster_k = 16; }), "cluster_k");
  EXPECT_EQ(broken([](Tactic& t) { t.stages = 12; }, 64), "smem_bytes");  // 12 * 24 KiB
  Tactic stale = good;
  stale.smem_bytes += 16;
  EXPECT_EQ(broken_rule(stale), "smem_bytes");
}

TEST(GemmTactics, a_cluster_has_a_box_of_k_for_each_of_its_ctas) {
  for (const int cluster : {2, 4, 8}) {
    EXPECT_EQ(broken_rule(wgmma(64, 64, 2, cluster), 64 * (cluster - 1)), "cluster_k");
    EXPECT_EQ(broken_rule(wgmma(64, 64, 2, cluster), 64 * cluster), "");
    EXPECT_EQ(broken_rule(wgmma(64, 64, 2, cluster), 64 * (cluster + 1)), "");  // one CTA has one more
  }
}

TEST(GemmTactics, wider_stages_need_equal_shares_of_k) {
  EXPECT_EQ(broken_rule(wgmma(64, 128, 4, 1), 448), "tile_k");  // 7 boxes
  EXPECT_EQ(broken_rule(wgmma(64, 64, 4, 1), 448), "");
  EXPECT_EQ(broken_rule(wgmma(64, 128, 4, 8), 1536), "tile_k");  // 3 boxes each
  EXPECT_EQ(broken_rule(wgmma(64, 128, 4, 4), 1536), "");
  EXPECT_EQ(broken_rule(wgmma(64, 256, 4, 8), 7168), "tile_k");  // 14 boxes each
  EXPECT_EQ(broken_rule(wgmma(64, 256, 4, 4), 7168), "");
}

TEST(GemmTactics, other_architectures_have_no_wgmma_tactic) {
  for (const DeviceFacts& facts :
       {DeviceFacts{100, 148, 232448, 233472, "a"}, DeviceFacts{103, 148, 232448, 233472, "b"},
        DeviceFacts{120, 188, 101376, 102400, "c"}}) {
    EXPECT_EQ(broken_rule(wgmma(64, 64, 4, 1), kK, facts), "mma");
    for (const Tactic& t : valid_tactics(64, kN, kK, facts)) EXPECT_EQ(t.mma, Mma::kMmaSync) << to_string(t);
    EXPECT_EQ(warp_tactic(64, kN, kK, facts).mma, Mma::kMmaSync);
  }
}

TEST(GemmTactics, mma_sync_does_not_share_k_in_a_cluster) {
  Tactic t = first_of(Mma::kMmaSync, 8);
  t.cluster_k = 2;
  EXPECT_EQ(broken_rule(complete(t, 8, kH200)), "cluster_k");
}

TEST(GemmTactics, the_search_has_both_instructions_and_no_tactic_twice) {
  for (const int m : {8, 24, 64}) {
    std::set<std::string> seen;
    std::set<std::tuple<int, int, int>> kinds;
    for (const Tactic& t : candidate_tactics(m, kK, kH200)) {
      EXPECT_TRUE(seen.insert(to_string(t)).second) << to_string(t) << " twice";
      if (t.mma == Mma::kWgmma && tactic_valid(t, m, kN, kK, kH200).ok())
        kinds.insert({t.tile_n, t.tile_k, t.cluster_k});
    }
    // tile_k = 256 does not divide the share of one in eight; two stages of 256 x 256 are too large, and of 192 x 256
    // with 64 rows or beside the parts of a cluster; twelve warps are no eight shares.
    const unsigned of_192 = m == 64 ? 3 + 3 : 3 + 3 + 1;
    EXPECT_EQ(kinds.size(), 2u * (4 + 4 + 3) + (m > 16 ? of_192 + 4u + 4u : 0u)) << "M = " << m;
  }
}

TEST(GemmTactics, a_stage_that_is_never_filled_is_not_searched) {
  for (const Tactic& t : candidate_tactics(8, 512, kH200))
    EXPECT_TRUE(t.stages == 2 || (t.stages - 1) * t.tile_k < 512 / t.cluster_k) << to_string(t);
}

// By hand, from the contract of kernels/gemm/sm90_wgmma.cuh: a ring of boxes of 128 bytes a row; then, in a cluster,
// FP32 sums that each CTA receives from all; then barriers: two a stage and one.
TEST(GemmTactics, shared_memory_of_wgmma_is_ring_parts_and_barriers) {
  const auto bytes = [](const Tactic& t, int m) { return tactic_smem_bytes(t, m); };
  EXPECT_EQ(bytes(wgmma(64, 64, 4, 1), 8), 4 * (64 + 8) * 128 + 4 * 16 + 8);
  EXPECT_EQ(bytes(wgmma(64, 128, 4, 1), 8), 4 * 2 * (64 + 8) * 128 + 4 * 16 + 8);
  EXPECT_EQ(bytes(wgmma(128, 64, 6, 1), 64), 6 * (128 + 64) * 128 + 6 * 16 + 8);
  // Two CTAs own 32 of 64 rows of weight each, and receive two parts of 32 x 16 floats.
  EXPECT_EQ(bytes(wgmma(64, 64, 4, 2), 9), 4 * (64 + 16) * 128 + 2 * 32 * 16 * 4 + 4 * 16 + 8);
  // Of eight CTAs four own 16 rows each, and receive eight parts.
  EXPECT_EQ(bytes(wgmma(64, 64, 4, 8), 64), 4 * (64 + 64) * 128 + 8 * 16 * 64 * 4 + 4 * 16 + 8);
  // Two own 96 of 192 rows, of 64 floats.
  EXPECT_EQ(bytes(wgmma(192, 64, 5, 2), 64), 5 * (192 + 64) * 128 + 2 * 96 * 64 * 4 + 5 * 16 + 8);
  EXPECT_EQ(warp_threads(wgmma(192, 64, 5, 2)), 12 * 32 + 32);
  // All eight own 16 of 128 rows.
  EXPECT_EQ(bytes(wgmma(128, 64, 4, 8), 17), 4 * (128 + 32) * 128 + 8 * 16 * 32 * 4 + 4 * 16 + 8);
}

TEST(GemmTactics, rows_of_x_are_rounded_up_to_8_16_32_or_64) {
  const int expected[] = {8, 16, 32, 32, 64, 64, 64, 64};
  for (int m = 1; m <= kMaxWarpRows; ++m) EXPECT_EQ(wgmma_rows(m), expected[bucket_index(m)]) << "M = " << m;
}

TEST(GemmTactics, the_grid_is_a_cluster_for_each_tile_of_n) {
  EXPECT_EQ(warp_grid(wgmma(64, 64, 4, 1), 2112), 33);
  EXPECT_EQ(warp_grid(wgmma(128, 64, 4, 8), 2112), 17 * 8);  // the last tile is cut
  EXPECT_EQ(warp_grid(wgmma(128, 64, 4, 4), 896), 7 * 4);
  EXPECT_EQ(warp_grid(wgmma(64, 64, 4, 2), 16), 2);
  EXPECT_EQ(warp_threads(wgmma(64, 64, 4, 1)), 128 + 32);
  EXPECT_EQ(warp_threads(wgmma(128, 64, 4, 1)), 256 + 32);
}

TEST(GemmTactics, the_text_instantiates_the_kernel_with_every_number) {
  const Tactic t = wgmma(128, 128, 3, 4, 20);
  const KernelText kernel = warp_kernel_text(20, kN, kK, t);
  EXPECT_EQ(kernel.name, "gemm-n2112-k7168-m24");
  EXPECT_EQ(kernel.entry, "sm90_wgmma");
  EXPECT_EQ(kernel.rules, kTacticRules);
  for (const std::string& part :
       {std::string("#include \"gemm/sm90_wgmma.cuh\""), std::string("kN = 2112, kK = 7168, kRows = 32;"),
        std::string("kTileN = 128, kTileK = 128, kStages = 3, kClusterK = 4;"),
        "kSmemBytes = " + std::to_string(t.smem_bytes) + ";", std::string("kFault = twostep::gemm::Fault::kNone;"),
        std::string("kDebug = false;"), std::string("__launch_bounds__(288, 1) sm90_wgmma(")})
    EXPECT_NE(kernel.text.find(part), std::string::npos) << part << " is not in\n" << kernel.text;
  EXPECT_NE(warp_kernel_text(20, kN, kK, t, {"kEarlyRelease", true}).text, kernel.text);
  EXPECT_EQ(warp_kernel_text(20, kN, kK, first_of(Mma::kMmaSync, 20)).entry, "warp_split_k");
}

// One line of text that tells any two tactics apart: it is what rows and tables print.
TEST(GemmTactics, text_names_instruction_and_both_clusters) {
  EXPECT_EQ(to_string(wgmma(128, 64, 6, 8))
                .rfind("wgmma tiles tile 128x64 stages 6 slices 1 warps 8 cluster_n 1 cluster_k 8 ", 0),
            0u)
      << to_string(wgmma(128, 64, 6, 8));
}

TEST(GemmTactics, strict_keeps_to_one_family) {
  DeviceFacts b200 = kH200;
  b200.arch = 100;
  for (const DeviceFacts& facts : {kH200, b200})
    for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{2304, 1536}, {kN, kK}, {48, 4096}, {16, 64}}) {
      const Family family = strict_family(n, k, facts);
      EXPECT_EQ(family.mma, facts.arch == 90 ? Mma::kWgmma : Mma::kMmaSync);
      for (int m = 1; m <= kMaxWarpRows; ++m) {
        const Tactic t = warp_tactic(m, n, k, facts, true);
        EXPECT_EQ(family_of(t), family) << to_string(t);
        EXPECT_TRUE(tactic_valid(t, m, n, k, facts).ok()) << to_string(t);
      }
    }
}

// What the H200 measured: with 64 rows, wgmma by far; the tactics that were best there are near the best of the model.
TEST(GemmTactics, the_model_puts_wgmma_first_where_it_measured_faster) {
  struct Best {
    std::int64_t n, k;
    int m;
    Tactic tactic;
    double us;
  };
  for (const Best& best : {Best{1536, 7168, 8, wgmma(64, 64, 8, 8, 8), 6.4},
                           {1536, 7168, 64, wgmma(64, 64, 4, 8, 64), 8.3},
                           {3584, 7168, 8, wgmma(128, 64, 6, 8, 8), 13.6},
                           {3584, 7168, 64, wgmma(64, 64, 4, 4, 64), 16.1},
                           {2304, 1536, 64, wgmma(64, 64, 6, 4, 64), 4.2}}) {
    const double by_model = model_us(best.tactic, best.m, best.n, best.k, kH200);
    EXPECT_NEAR(by_model, best.us, 0.15 * best.us) << to_string(best.tactic);
    double least = by_model;
    for (const Tactic& t : valid_tactics(best.m, best.n, best.k, kH200))
      if (t.mma == Mma::kWgmma) least = std::min(least, model_us(t, best.m, best.n, best.k, kH200));
    EXPECT_GE(least, 0.9 * by_model) << to_string(best.tactic);
  }
  EXPECT_EQ(warp_tactic(64, 1520, 7168, kH200).mma, Mma::kWgmma);  // no entry of the table
}

TEST(GemmTactics, a_sweep_tries_every_tile_of_wgmma_alone_and_in_clusters) {
  for (const int m : {8, 64}) {
    std::set<std::pair<int, bool>> kinds;
    for (const Tactic& t : sweep_candidates(m, kN, kK, kH200, 24))
      if (t.mma == Mma::kWgmma) kinds.insert({t.tile_n, t.cluster_k > 1});
    EXPECT_EQ(kinds.size(), m > 16 ? 8u : 4u) << "M = " << m;
  }
}

}  // namespace
}  // namespace twostep
