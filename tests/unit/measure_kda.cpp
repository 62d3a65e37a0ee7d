// The bytes and bars of PreparedKda, the judge of its values, and the rows: what its measurements stand on.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "core/bf16.h"
#include "measure/bench_kda_host.h"
#include "measure/check_kda.h"
#include "measure/kda_bytes.h"
#include "measure/kda_row.h"
#include "measure/kernels.h"
#include "measure/torch_chain.h"

namespace twostep {
namespace {

KdaShape shape(int heads, std::int64_t requests, int tokens, int conv_len = 0, bool dim_first = false) {
  return {heads, requests, tokens, conv_len > 0 ? conv_len : least_conv_len(tokens), dim_first, false};
}
KdaShape with_records(KdaShape of) {
  of.records = true;
  return of;
}

// Table 15.2 of the specification.
TEST(MeasureKdaBytes, requests_and_weights_are_those_of_the_table) {
  struct Line {
    int heads;
    std::int64_t weights, decode, q4, q8, records4, records8;
  };
  for (const Line& line : {Line{12, 473'648, 1'643'804, 4'077'684, 7'322'852, 1'792'200, 1'965'352},
                           Line{24, 946'784, 3'287'348, 8'154'324, 14'643'620, 3'583'368, 3'928'648},
                           Line{48, 1'893'056, 6'574'436, 16'307'604, 29'285'156, 7'165'704, 7'855'240},
                           Line{96, 3'785'600, 13'148'612, 32'614'164, 58'568'228, 14'330'376, 15'708'424}}) {
    EXPECT_EQ(kda_weight_bytes(line.heads), line.weights);
    EXPECT_EQ(kda_request_bytes(shape(line.heads, 1, 1)), line.decode);
    EXPECT_EQ(kda_request_bytes(shape(line.heads, 1, 4)), line.q4);
    EXPECT_EQ(kda_request_bytes(shape(line.heads, 1, 8)), line.q8);
    EXPECT_EQ(kda_request_bytes(with_records(shape(line.heads, 1, 1))), line.decode) << "nothing is pending";
    EXPECT_EQ(kda_request_bytes(with_records(shape(line.heads, 1, 4))), line.records4);
    EXPECT_EQ(kda_request_bytes(with_records(shape(line.heads, 1, 8))), line.records8);
  }
}

TEST(MeasureKdaBytes, floors_at_4300_bytes_per_nanosecond_are_those_of_the_table) {
  const auto floor = [](int heads, std::int64_t requests, int tokens) {
    return static_cast<double>(kda_step_bytes(shape(heads, requests, tokens))) / 4.3e6;
  };
  EXPECT_NEAR(floor(12, 1, 1), 0.49, 0.005);
  EXPECT_NEAR(floor(12, 128, 1), 49.04, 0.005);
  EXPECT_NEAR(floor(24, 8, 8), 27.46, 0.005);
  EXPECT_NEAR(floor(96, 32, 1), 98.73, 0.005);
  EXPECT_NEAR(floor(96, 128, 8), 1744, 0.5);
}

TEST(MeasureKdaBytes, a_long_ds_line_is_read_whole_and_an_sd_line_is_not) {
  EXPECT_EQ(kda_request_bytes(shape(12, 1, 1, 3, true)), kda_request_bytes(shape(12, 1, 1)));
  EXPECT_EQ(kda_request_bytes(shape(12, 1, 1, 10, true)) - kda_request_bytes(shape(12, 1, 1)), 12 * (7680 - 2304));
  EXPECT_EQ(kda_request_bytes(shape(12, 1, 8, 10, true)) - kda_request_bytes(shape(12, 1, 8)), 12 * (7680 - 2304));
  EXPECT_EQ(kda_request_bytes(shape(12, 1, 8, 12)), kda_request_bytes(shape(12, 1, 8)));
}

TEST(MeasureKdaBytes, bars_exist_where_the_goal_names_one) {
  EXPECT_DOUBLE_EQ(kda_bar_us(shape(12, 1, 1), 12.5, false).value(), 18.0);
  EXPECT_DOUBLE_EQ(kda_bar_us(shape(12, 1, 1), 12.5, true).value(), 17.0);
  EXPECT_DOUBLE_EQ(kda_bar_us(with_records(shape(12, 1, 1)), 12.5, false).value(), 18.0);
  for (const int tokens : {4, 8}) {
    EXPECT_DOUBLE_EQ(kda_bar_us(shape(12, 1, tokens), 12.5, false).value(), 19.0);
    EXPECT_DOUBLE_EQ(kda_bar_us(with_records(shape(12, 1, tokens)), 12.5, false).value(), 20.0);
  }
  EXPECT_FALSE(kda_bar_us(shape(12, 1, 3), 12.5, false).has_value());
  // 12 heads, 8 requests: 12.6 MB of states at 60 % of 10 GB/s.
  EXPECT_NEAR(kda_cpu_bar_us(shape(12, 8, 1), 1e4).value(), 12'582'912 / 6e3, 1e-6);
}

TEST(MeasureKdaBytes, the_mix_of_reads_and_writes_is_that_of_the_mode) {
  EXPECT_EQ(kda_writes_per_read(shape(12, 1, 1)), 1);
  EXPECT_EQ(kda_writes_per_read(shape(12, 1, 8)), 8);
  EXPECT_EQ(kda_writes_per_read(with_records(shape(12, 1, 1))), 1);
  // 83,460 bytes written and 80,148 read of a head.
  EXPECT_NEAR(kda_writes_per_read(with_records(shape(12, 1, 8))), 1.0413, 1e-4);
  for (int tokens = 2; tokens <= 8; ++tokens) {
    const double writes = kda_writes_per_read(with_records(shape(12, 1, tokens)));
    EXPECT_GE(writes, 1) << tokens;
    EXPECT_LT(writes, 1.05) << tokens;
  }
}

TEST(MeasureKdaBytes, rings_pass_the_cache_and_replays_rotate) {
  for (const std::int64_t cache : {std::int64_t{0}, std::int64_t{60'000'000}, std::int64_t{126'000'000}})
    for (const int heads : {1, 12, 96})
      for (const std::int64_t requests : {1, 8, 128})
        for (const int tokens : {1, 8}) {
          const KdaRing ring = plan_kda_ring(shape(heads, requests, tokens), cache);
          const std::int64_t states = std::int64_t{65536} * heads * requests * tokens * ring.sets;
          EXPECT_GE(states, std::max<std::int64_t>(256'000'000, 4 * cache));
          EXPECT_GE(ring.layers, 3);
          EXPECT_LE(ring.layers, 69);
          EXPECT_EQ(ring.sets % ring.layers, 0);
          EXPECT_EQ(ring.launches % ring.sets, 0);
          EXPECT_GE(ring.launches, 64);
          const KdaRing one_slot = plan_kda_ring(with_records(shape(heads, requests, tokens)), cache);
          EXPECT_GE(std::int64_t{65536} * heads * requests * one_slot.sets,
                    std::max<std::int64_t>(256'000'000, 4 * cache));
        }
}

TEST(MeasureKdaBytes, a_shorter_graph_still_turns_over_all_sets) {
  constexpr std::int64_t kBytes = 2'000'000'000;
  for (const int heads : {1, 12, 96})
    for (const std::int64_t requests : {1, 8, 256})
      for (const int tokens : {1, 8}) {
        const KdaShape of = shape(heads, requests, tokens);
        const KdaRing ring = plan_kda_ring(of, 60'000'000);
        const int launches = kda_launches(of, ring, kBytes);
        EXPECT_GE(launches, ring.sets);
        EXPECT_LE(launches, ring.launches);
        EXPECT_EQ(launches % ring.sets, 0);
        EXPECT_TRUE(launches == ring.launches || launches * kda_step_bytes(of) >= kBytes);
        EXPECT_TRUE(launches == ring.sets || (launches - ring.sets) * kda_step_bytes(of) < kBytes);
        EXPECT_EQ(kda_launches(of, ring, std::numeric_limits<std::int64_t>::max()), ring.launches);
      }
}

// ---- The judge

KdaProblem small_problem() {
  KdaProblem p;
  p.heads = 2;
  p.requests = 5;
  p.tokens = 3;
  p.window = 4;
  p.conv_len = 7;
  p.padded = p.lengths = p.dead = p.bias = true;
  p.seed = 5;
  return p;
}

TEST(MeasureKdaCase, draws_repeat_and_differ_and_weights_stay) {
  const KdaProblem p = small_problem();
  const KdaArrays a = make_kda_arrays(p, 3), again = make_kda_arrays(p, 3), other = make_kda_arrays(p, 4);
  EXPECT_EQ(a, again);
  EXPECT_EQ(a[kFB], other[kFB]);
  EXPECT_NE(a[kProjected], other[kProjected]);
  EXPECT_NE(a[kState], other[kState]);
  EXPECT_NE(a[kSlots], other[kSlots]);
}

TEST(MeasureKdaCase, dead_and_ragged_requests_occur_and_live_slots_are_not_shared) {
  const KdaProblem p = small_problem();
  int dead = 0, live = 0, ragged = 0, skipped = 0;
  for (std::uint64_t draw = 0; draw < 50; ++draw) {
    std::set<int> named;
    for (const KdaFate& fate : kda_fates(p, make_kda_arrays(p, draw))) {
      (fate.live ? live : dead) += 1;
      ragged += fate.live && fate.length < p.tokens;
      for (const int slot : fate.stores) {
        skipped += slot < 0;
        EXPECT_TRUE(slot < 0 || named.insert(slot).second);
      }
    }
  }
  EXPECT_GT(dead, 30);
  EXPECT_GT(live, 100);
  EXPECT_GT(ragged, 50);
  EXPECT_GT(skipped, 0);
}

// The reference against itself is right; then one damage at a time.
class MeasureKdaJudge : public testing::Test {
 protected:
  void SetUp() override {
    // A draw with a live and a dead request.
    for (std::uint64_t draw = 0;; ++draw) {
      before_ = make_kda_arrays(problem_, draw);
      fates_ = kda_fates(problem_, before_);
      bool dead = false;
      for (std::size_t n = 0; n < fates_.size(); ++n)
        if (fates_[n].live && fates_[n].stores[0] >= 0) live_ = n;
        else if (!fates_[n].live) dead = true, dead_ = n;
      if (dead && fates_[live_].live) break;
    }
    const auto memory = make_host_memory();
    KdaSide side(*memory, problem_, before_, "reference64");
    reference_ = side.run(before_);
  }
  template <class T>
  static T* as(KdaArrays& arrays, KdaArray array) {
    return reinterpret_cast<T*>(arrays[array].data());
  }
  template <class Damage>
  std::string rule_after(Damage damage) {
    KdaArrays result = reference_;
    damage(result);
    return broken_rule(judge_kda(problem_, before_, result, reference_));
  }

  KdaProblem problem_ = small_problem();
  KdaArrays before_, reference_;
  std::vector<KdaFate> fates_;
  std::size_t live_ = 0, dead_ = 0;
  const std::int64_t channels_ = 256, out_stride_ = 264, state_stride_ = 2 * 128 * 128 + 4;
};

TEST_F(MeasureKdaJudge, the_reference_passes_and_has_work_to_judge) {
  const KdaErrors errors = judge_kda(problem_, before_, reference_, reference_);
  EXPECT_EQ(broken_rule(errors), "");
  EXPECT_GT(errors.outputs, 0u);
  EXPECT_EQ(errors.outputs, errors.equal);
  EXPECT_GT(errors.heads, 0u);
  EXPECT_GT(errors.norm, 0.0);
}

TEST_F(MeasureKdaJudge, each_damage_breaks_a_rule) {
  const auto live_row = static_cast<std::int64_t>(live_) * problem_.tokens;
  const auto dead_row = static_cast<std::int64_t>(dead_) * problem_.tokens;
  const std::int64_t page = fates_[live_].stores[0] * state_stride_;
  EXPECT_NE(rule_after([&](KdaArrays& r) { as<std::uint16_t>(r, kOut)[live_row * out_stride_] = 0x7fc0; }), "");
  EXPECT_NE(rule_after([&](KdaArrays& r) {
              for (int c = 0; c < channels_; ++c) as<std::uint16_t>(r, kOut)[live_row * out_stride_ + c] ^= 1;
            }),
            "");
  EXPECT_NE(rule_after([&](KdaArrays& r) { as<std::uint16_t>(r, kOut)[dead_row * out_stride_ + 7] = 0x8000; }), "");
  EXPECT_NE(rule_after([&](KdaArrays& r) { as<std::uint16_t>(r, kOut)[channels_] = 0; }), "") << "a gap between rows";
  EXPECT_NE(rule_after([&](KdaArrays& r) { as<float>(r, kState)[page + 129] += 0.02f; }), "");
  EXPECT_NE(rule_after([&](KdaArrays& r) { as<float>(r, kState)[page] = std::nanf(""); }), "");
  EXPECT_NE(rule_after([&](KdaArrays& r) { as<float>(r, kState)[page + state_stride_ - 1] = 0; }), "") << "padding";
  EXPECT_NE(rule_after([&](KdaArrays& r) { as<float>(r, kState)[0] = 0; }), "") << "the null slot";
  EXPECT_NE(rule_after([&](KdaArrays& r) {
              as<std::uint16_t>(r, kConv)[fates_[live_].line * (6 * channels_ / 2 * 7 + 8) + 3] ^= 1;
            }),
            "");
  EXPECT_NE(rule_after([&](KdaArrays& r) { as<std::uint16_t>(r, kConv)[0] = 0; }), "") << "the null slot's line";
  EXPECT_NE(rule_after([&](KdaArrays& r) { as<std::uint32_t>(r, kCounters)[0] += 1; }), "");
}

TEST_F(MeasureKdaJudge, a_difference_of_one_flip_is_allowed_and_many_are_not) {
  KdaErrors errors;
  errors.outputs = errors.equal = 10'000;
  errors.norm = 1e4;
  errors.heads = errors.close = 256;
  EXPECT_EQ(broken_rule(errors), "");
  errors.close = 251;
  EXPECT_EQ(broken_rule(errors), "");
  errors.close = 250;
  EXPECT_NE(broken_rule(errors), "");
  errors.heads = 255;
  EXPECT_EQ(broken_rule(errors), "") << "fewer than 256 heads are no statement about shares";
  errors.equal = 9'899;
  EXPECT_NE(broken_rule(errors), "");
  errors.equal = 10'000;
  errors.unrepeated = 1;
  EXPECT_NE(broken_rule(errors), "");
}

TEST(MeasureKdaCheck, the_cpu_backend_is_right_on_a_ragged_padded_problem) {
  const auto memory = make_host_memory();
  for (const bool dim_first : {false, true}) {
    KdaProblem p = small_problem();
    p.dim_first = dim_first;
    p.softplus = dim_first;
    const KdaReport report = check_problem(*memory, p);
    EXPECT_EQ(report.failure, "") << to_options(p);
    EXPECT_GE(report.errors.heads, 200u);
    EXPECT_GT(report.draws, 10);
  }
}

TEST(MeasureKdaCheck, the_cpu_backend_is_right_with_records) {
  const auto memory = make_host_memory();
  for (const int tokens : {1, 3}) {
    KdaProblem p = small_problem();
    p.tokens = tokens;
    p.records = true;
    const KdaReport report = check_problem(*memory, p);
    EXPECT_EQ(report.failure, "") << to_options(p);
    EXPECT_GE(report.errors.heads, 100u);
  }
}

// A step with a request whose records are folded; then one damage at a time.
TEST(MeasureKdaCheck, damage_to_records_and_to_what_they_give_breaks_a_rule) {
  KdaProblem p = small_problem();
  p.records = true;
  KdaArrays before;
  const KdaFate* live = nullptr;
  std::vector<KdaFate> fates;
  for (std::uint64_t draw = 0; live == nullptr; ++draw) {
    before = make_kda_arrays(p, draw);
    fates = kda_fates(p, before);
    for (const KdaFate& fate : fates)
      if (fate.pending > 0 && fate.length > 1) live = &fate;
  }
  const auto memory = make_host_memory();
  const KdaArrays reference = KdaSide(*memory, p, before, "reference64").run(before);
  EXPECT_EQ(broken_rule(judge_kda(p, before, reference, reference)), "");
  const std::int64_t area = kda_record_bytes(p.heads, p.conv_len - 2) + 16;
  const auto records = [&](KdaArrays& arrays) {
    return kda_records(reinterpret_cast<std::uint8_t*>(arrays[kRecords].data()) + live->line * area, p.heads,
                       p.conv_len - 2, 1);
  };
  const auto rule_after = [&](auto damage) {
    KdaArrays result = reference;
    damage(result);
    return broken_rule(judge_kda(p, before, result, reference));
  };
  EXPECT_NE(rule_after([&](KdaArrays& r) { *records(r).count += 1; }), "");
  EXPECT_NE(rule_after([&](KdaArrays& r) { records(r).u[128 * live->length] = 0; }), "") << "an entry not of the step";
  EXPECT_NE(rule_after([&](KdaArrays& r) { r[kRecords][0] = std::byte{0}; }), "") << "the null slot";
  EXPECT_NE(rule_after([&](KdaArrays& r) { r[kRecords][static_cast<std::size_t>(area - 1)] = std::byte{0}; }), "");
  const std::int64_t page = live->line * (2 * 128 * 128 + 4);
  for (const KdaArray states : {kState, kFolded})
    EXPECT_NE(rule_after([&](KdaArrays& r) { reinterpret_cast<float*>(r[states].data())[page + 7] += 0.02f; }), "");
}

TEST(MeasureKdaCheck, problems_cover_every_key_with_both_layouts_and_gates) {
  std::set<std::pair<int, int>> keys;
  std::set<std::array<bool, 4>> kinds;
  bool windows = false, ragged = false, dead = false, records = false;
  for (const KdaProblem& p : kda_problems(1, false)) {
    check_problem_shape(p);
    keys.insert({p.heads, p.tokens});
    kinds.insert({p.dim_first, p.softplus, p.bias, p.padded});
    windows |= p.window > p.tokens;
    ragged |= p.lengths;
    dead |= p.dead;
    records |= p.records;
  }
  EXPECT_EQ(keys.size(), 7u * 8u);
  EXPECT_EQ(kinds.size(), 16u);
  EXPECT_TRUE(windows && ragged && dead && records);
}

TEST(MeasureKdaCheck, a_replay_line_names_what_differs_from_the_default) {
  KdaProblem p = small_problem();
  p.dim_first = p.softplus = true;
  p.tactic = KdaTactic{2, 8, 1};
  EXPECT_EQ(to_options(p),
            "--heads 2 --requests 5 --tokens 3 --conv-len 7 --window 4 --layout ds --gate softplus --bias --padded "
            "--lengths --dead --tactic 2,8,1 --seed 5");
  p.records = true;
  p.tactic.reset();
  EXPECT_NE(to_options(p).find(" --mode records "), std::string::npos) << to_options(p);
}

TEST(MeasureKdaCheck, a_window_past_the_line_is_refused) {
  KdaProblem p = small_problem();
  p.window = 6;
  EXPECT_THROW(check_problem_shape(p), Error);
  p.window = 2;
  EXPECT_THROW(check_problem_shape(p), Error) << "fewer columns than tokens";
}

// ---- Rows

TEST(MeasureKdaRow, the_json_line_has_floor_bar_and_verdict) {
  KdaRow row;
  row.shape = shape(12, 32, 1);
  row.tactic = {2, 8, 1};
  row.source = "rule";
  row.time = {17.5, 17.3, 17.9, 15, 3};
  row.rate = 4.3e6;
  const auto parse = [&] { return nlohmann::json::parse(json_line(row, this_machine("twostep bench kda"))); };
  auto json = parse();
  EXPECT_EQ(json.at("case").at("heads"), 12);
  EXPECT_EQ(json.at("choice").at("tactic"), "split 2 warps 8 pass_rows 1");
  EXPECT_NEAR(json.at("limit").at("floor_us"), 12.34, 0.01);
  EXPECT_NEAR(json.at("bar_us"), 1.12 * 12.34 + 4, 0.01);
  EXPECT_EQ(json.at("verdict"), "holds");
  EXPECT_NEAR(json.at("percent_of_limit"), 70.5, 0.1);
  row.time.p90 = 30;
  EXPECT_EQ(parse().at("verdict"), "noisy") << "a busy machine proves nothing";
  row.time = {12.0, 11.9, 12.1, 15, 3};
  EXPECT_EQ(parse().at("verdict"), "noisy") << "nothing is faster than a limit that was measured right";
  row.time = {17.5, 17.3, 17.9, 15, 3};
  row.time.median = 25;
  EXPECT_EQ(parse().at("verdict"), "misses");
  row.shape = shape(12, 32, 3);
  row.time = {45.0, 44.8, 45.4, 15, 3};
  json = parse();
  EXPECT_TRUE(json.at("bar_us").is_null());
  EXPECT_EQ(json.at("verdict"), "none");
  EXPECT_EQ(json.at("limit").at("mix"), "1:3");
}

// ---- The chain of public kernels. Fakes in shell.

TorchChain fake_chain(const std::string& body) {
  return {kKdaChain, std::vector<std::string>{"/bin/sh", "-c", "while read -r line; do " + body + "; done"}};
}

TEST(MeasureKdaChain, its_time_becomes_the_baseline_of_a_row) {
  TorchChain chain = fake_chain(
      R"(case $line in '{}') echo '{"what":"FLA 0.6"}';; *'"heads":12,"launches":64,"layers":3,"requests":32,"sets":6,"tokens":8'*) )"
      R"(echo '{"median_us":70.5,"p10_us":70,"p90_us":71,"kept":15,"dropped":3}';; esac)");
  KdaRow row;
  row.shape = shape(12, 32, 8);
  row.time = {43, 42, 44, 15, 3};
  row.rate = 4.3e6;
  row.ring = {3, 6, 64};
  auto json = nlohmann::json::parse(json_line(row, this_machine("twostep bench kda")));
  EXPECT_EQ(json.at("baseline"), "");
  EXPECT_TRUE(json.at("baseline_time").is_null());
  row.baseline_time = chain.time(chain_request(row.shape, row.ring));
  row.baseline = chain.what();
  json = nlohmann::json::parse(json_line(row, this_machine("twostep bench kda")));
  EXPECT_EQ(json.at("baseline"), "FLA 0.6");
  EXPECT_EQ(json.at("baseline_time").at("median_us"), 70.5);
  EXPECT_EQ(json.at("baseline_time").at("kept"), 15);
}

TEST(MeasureKdaChain, a_python_that_does_not_run_it_is_refused_with_its_reason) {
  const auto told = [](const std::string& body) -> std::string {
    try {
      TorchChain chain = fake_chain(body);
      (void)chain.time(chain_request(shape(12, 1, 1), {3, 3, 3}));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kUnavailable);
      return error.what();
    }
    return "";
  };
  EXPECT_NE(told(R"(echo '{"failure":"No module named fla"}')").find("No module named fla"), std::string::npos);
  EXPECT_NE(told("exit 1").find("status 1"), std::string::npos);
  EXPECT_NE(told("echo hello"), "");
  EXPECT_NE(told(R"(echo '{"what":"an answer without a time"}')"), "");
}

TEST(MeasureKdaHost, a_row_with_records_folds_half_of_its_tokens) {
  KdaBenchOptions options;
  options.heads = 1;
  options.tokens = 4;
  options.conv_len = 6;
  options.records = true;
  const KdaRow row = bench_kda_host(options, 64, {1e4, 2e4});
  EXPECT_EQ(row.shape.pending(), 2);
  EXPECT_EQ(broken_rule(row.values), "");
  EXPECT_GT(row.time.median, 0.0);
  const auto json = nlohmann::json::parse(json_line(row, this_machine("twostep bench kda")));
  EXPECT_EQ(json.at("case").at("state_mode"), "records");
  EXPECT_EQ(json.at("case").at("pending"), 2);
}

TEST(MeasureKdaHost, the_row_has_its_values_its_time_and_its_bar) {
  KdaBenchOptions options;
  options.heads = 1;
  const KdaRow row = bench_kda_host(options, 64, {1e4, 2e4});
  EXPECT_TRUE(row.cpu);
  EXPECT_FALSE(row.kernel.empty());
  EXPECT_GT(row.values.outputs, 0u);
  EXPECT_EQ(broken_rule(row.values), "");
  EXPECT_GT(row.time.median, 0.0);
  EXPECT_DOUBLE_EQ(row.floor_us(), row.bytes() / 2e4) << "the faster of the two is the limit";
  EXPECT_DOUBLE_EQ(row.bar_us().value(), kda_cpu_bar_us(row.shape, 1e4).value());
}

TEST(MeasureKdaKernels, every_ring_of_the_mix_kernel_is_compiled_ahead) {
  for (const Reader& mixer : kMixers) {
    const std::string text = mix_limit_request("sm_90a", mixer.stages).text;
    int found = 0;
    for (const CompileRequest& request : measure_requests("sm_90a")) found += request.text == text;
    EXPECT_EQ(found, 1) << mixer.stages;
  }
}

}  // namespace
}  // namespace twostep
