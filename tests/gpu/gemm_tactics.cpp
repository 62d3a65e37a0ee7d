// Choosing for GPUs that are not here: pure, so these tests run everywhere (draft-gemm 2.9, 4.3). And every choice of
// the table of the GPU that is here.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "gemm/warp.h"
#include "gemm_fixture.h"

namespace twostep::test {
namespace {

const DeviceFacts kH200{90, 132, 232448, 233472, "NVIDIA H200"};
const DeviceFacts kSmall{120, 170, 101376, 102400, "NVIDIA GeForce RTX 5090"};

// (N, K) of draft-gemm 13.2 and 13.3.
const std::vector<std::pair<std::int64_t, std::int64_t>> kShapes = {
    {7168, 35840}, {1792, 35840},  {896, 35840},  {448, 35840},  {2880, 7168},  {2112, 7168},  {12288, 1536},
    {3072, 1536},  {1536, 1536},   {768, 1536},   {7168, 8192},  {7168, 2048},  {7168, 1024},  {7168, 512},
    {28672, 7168}, {7168, 7168},   {3584, 7168},  {1792, 7168},  {7168, 14336}, {7168, 3584},  {7168, 1792},
    {7168, 896},   {163840, 7168}, {40960, 7168}, {20480, 7168}, {10240, 7168}, {18432, 1536}, {4608, 1536},
    {2304, 1536},  {7168, 12288},  {7168, 3072},  {7168, 1536},  {7168, 768}};

TEST(GemmTactics, unlike_gpus_get_a_tactic_and_a_key_each_G30) {
  const auto key = [](const DeviceFacts& facts) {
    const Tactic tactic = warp_tactic(8, 7168, 7168, facts);
    EXPECT_TRUE(tactic_valid(tactic, 8, 7168, 7168, facts).ok());
    return compile_key(compile_request(warp_kernel_text(8, 7168, 7168, tactic), facts.arch), "13.0");
  };
  EXPECT_NE(key(kH200).hash, key(kSmall).hash);
  EXPECT_EQ(key(kH200).hash, key(kH200).hash);
}

TEST(GemmTactics, shared_memory_stays_within_the_limit_for_every_shape_and_bucket_G31) {
  for (const DeviceFacts& facts : {kH200, kSmall})
    for (const auto& [n, k] : kShapes)
      for (int m = 8; m <= 64; m += 8)
        for (bool strict : {false, true}) {
          const Tactic tactic = warp_tactic(m, n, k, facts, strict);
          EXPECT_LE(tactic.smem_bytes, facts.smem_per_block) << facts.name << ", M = " << m;
          EXPECT_TRUE(tactic_valid(tactic, m, n, k, facts).ok());
        }
  Tactic too_large;
  too_large.stages = 12;
  too_large.tile_n = 128;
  too_large.k_slices = 1;
  too_large = complete(too_large, 8, kSmall);
  EXPECT_EQ(tactic_valid(too_large, 8, 7168, 7168, kSmall).argument, "smem_bytes");
}

using GemmTable = GpuTest;

// On its K and bucket; a few rows of weight are enough, for no tactic depends on N.
TEST_F(GemmTable, every_tactic_of_the_table_is_exact) {
  constexpr std::int64_t kN = 272;  // cuts the last tile
  const DeviceFacts facts = device_facts(kDevice);
  struct Trial {
    std::int64_t k;
    int m;
    Tactic tactic;
    std::optional<PreparedWarpSplitK> prepared = {};
    std::string error = {};
  };
  std::vector<Trial> trials;
  std::set<std::tuple<std::int64_t, int, std::string>> seen;
  std::map<std::int64_t, std::unique_ptr<Linear>> linears;
  for (const auto& [n, k] : kShapes)
    for (int m = kRowBucket; m <= kMaxWarpRows; m += kRowBucket)
      if (const auto entry = table_entry(m, n, k, facts))
        if (seen.insert({k, m, to_string(entry->tactic)}).second) {
          trials.push_back({k, m, entry->tactic});
          if (auto& linear = linears[k]; !linear) linear = std::make_unique<Linear>(kN, k);
        }
  if (trials.empty()) GTEST_SKIP() << "no table for " << facts.name;
#pragma omp parallel for schedule(dynamic)
  for (std::size_t i = 0; i < trials.size(); ++i) {
    Trial& trial = trials[i];
    try {
      trial.prepared.emplace(linears.at(trial.k)->weight, std::map<int, Tactic>{{trial.m, trial.tactic}});
    } catch (const Error& error) {
      trial.error = error.what();
    }
  }
  std::map<std::int64_t, HostMatrix> values, expected;
  for (const auto& [k, linear] : linears) {
    values[k] = integers(kMaxWarpRows, k, 2);
    expected[k] = exact_product(values[k], linear->host);
  }
  for (Trial& trial : trials) {
    SCOPED_TRACE(testing::Message() << "K = " << trial.k << ", M = " << trial.m << ", " << to_string(trial.tactic));
    ASSERT_EQ(trial.error, "");
    HostMatrix x_rows(trial.m, trial.k), out_rows(trial.m, kN);
    std::copy_n(values[trial.k].bits.begin(), x_rows.bits.size(), x_rows.bits.begin());
    std::copy_n(expected[trial.k].bits.begin(), out_rows.bits.size(), out_rows.bits.begin());
    const Matrix x(x_rows), out(trial.m, kN);
    trial.prepared->run(x.view(), out.view(), stream());
    expect_exact(out.get(), out_rows);
  }
}

}  // namespace
}  // namespace twostep::test
