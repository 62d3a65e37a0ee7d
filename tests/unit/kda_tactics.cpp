// Which tactic serves a key, which are refused, and what text a build becomes. No GPU needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/embedded.h"
#include "kda/tactics.h"

namespace twostep {
namespace {

// An H200 without its table, so that the rule speaks.
DeviceFacts hopper(std::string name = "a GPU without a table") { return {90, 132, 232448, 233472, std::move(name)}; }
DeviceFacts consumer() { return {120, 170, 101376, 102400, "another GPU without a table"}; }

void expect_refusal(const KdaTactic& tactic, int tokens, const DeviceFacts& facts, const std::string& part) {
  const Status status = kda_tactic_valid(tactic, tokens, facts);
  EXPECT_EQ(code_name(status.code), "unsupported") << to_string(tactic);
  EXPECT_NE(status.message().find(part), std::string::npos) << '"' << part << "\" in: " << status.message();
}

TEST(KdaTactics, numbers_outside_their_lists_are_refused_by_name) {
  for (int split : {-1, 0, 3, 5, 16}) expect_refusal({split, 4, 1}, 1, hopper(), "split = " + std::to_string(split));
  for (int warps : {-4, 0, 1, 2, 12, 32})
    expect_refusal({1, warps, 1}, 1, hopper(), "warps = " + std::to_string(warps));
  for (int rows : {-1, 0, 3, 5, 8}) expect_refusal({1, 4, rows}, 1, hopper(), "pass_rows = " + std::to_string(rows));
}

TEST(KdaTactics, four_warps_or_more_hold_the_values_of_a_cta) {
  // A pass is 4 rows for each warp and pass row; a CTA owns 128 / split.
  EXPECT_TRUE(kda_tactic_valid({8, 4, 1}, 1, hopper()).ok());
  EXPECT_TRUE(kda_tactic_valid({8, 16, 1}, 1, hopper()).ok());
  expect_refusal({8, 4, 2}, 1, hopper(), "the 16 values of a CTA");
  expect_refusal({8, 16, 2}, 1, hopper(), "the 16 values of a CTA");
  EXPECT_TRUE(kda_tactic_valid({4, 8, 2}, 1, hopper()).ok());
  expect_refusal({4, 8, 4}, 1, hopper(), "the 32 values of a CTA");
  EXPECT_TRUE(kda_tactic_valid({2, 16, 4}, 1, hopper()).ok());
  EXPECT_TRUE(kda_tactic_valid({1, 16, 4}, 1, hopper()).ok());
}

TEST(KdaTactics, ctas_stay_in_verify_with_records_and_in_one_shape) {
  const KdaTactic stays{1, 16, 4, true};
  EXPECT_EQ(to_string(stays), "split 1 warps 16 pass_rows 4 stream");
  for (int tokens = 3; tokens <= kKdaMaxTokens; ++tokens)
    for (const int folded : {3, 4, 8}) {
      EXPECT_TRUE(kda_tactic_valid(stays, tokens, hopper(), folded).ok()) << tokens << ", " << folded;
      EXPECT_FALSE(kda_tactic_valid(stays, tokens, consumer(), folded).ok());  // no room
      int listed = 0;
      for (const KdaTactic& tactic : valid_kda_tactics(tokens, hopper(), folded)) listed += tactic.stream;
      EXPECT_EQ(listed, 1);
    }
  expect_refusal(stays, 8, hopper(),
                 "tactic.stream = 1; accepted: verify of three tokens or more in state mode records");
  const auto refused = [](const KdaTactic& tactic, int tokens) {
    return kda_tactic_valid(tactic, tokens, hopper(), 8).message();
  };
  for (const int tokens : {1, 2}) EXPECT_NE(refused(stays, tokens).find("tactic.stream"), std::string::npos);
  for (const KdaTactic& other : {KdaTactic{1, 8, 4, true}, {1, 16, 2, true}, {2, 16, 4, true}})
    EXPECT_NE(refused(other, 8).find("accepted: split 1, warps 16, pass_rows 4"), std::string::npos);
  // A CTA on each SM at most, and as many elsewhere as there are heads of all requests and pieces of them.
  EXPECT_EQ(kda_grid(12, 8, stays, hopper()), 96u);
  EXPECT_EQ(kda_grid(12, 128, stays, hopper()), 132u);
  EXPECT_EQ(kda_grid(12, 128, {2, 8, 1}, hopper()), 3072u);
}

TEST(KdaTactics, clusters_are_refused_where_there_are_none) {
  expect_refusal({2, 8, 1}, 1, consumer(), "split = 2; accepted: 1 on this architecture");
  EXPECT_TRUE(kda_tactic_valid({1, 8, 1}, 1, consumer()).ok());
}

TEST(KdaTactics, shared_memory_must_fit_the_gpu) {
  DeviceFacts facts = hopper();
  facts.smem_per_block = kda_smem_bytes(4, {1, 8, 1});
  EXPECT_TRUE(kda_tactic_valid({1, 8, 1}, 4, facts).ok());
  facts.smem_per_block -= 1;
  expect_refusal({1, 8, 1}, 4, facts, "shared memory = " + std::to_string(facts.smem_per_block + 1));
  EXPECT_TRUE(kda_tactic_valid({1, 8, 1}, 3, facts).ok());
  EXPECT_TRUE(kda_tactic_valid({2, 8, 1}, 4, facts).ok());
}

TEST(KdaTactics, the_list_of_valid_tactics_is_what_the_rules_leave) {
  for (const DeviceFacts& facts : {hopper(), consumer()})
    for (int tokens = 1; tokens <= kKdaMaxTokens; ++tokens) {
      std::set<std::string> listed, left;
      for (const KdaTactic& tactic : valid_kda_tactics(tokens, facts)) {
        EXPECT_TRUE(listed.insert(to_string(tactic)).second) << to_string(tactic) << " twice";
        EXPECT_LE(kda_smem_bytes(tokens, tactic), facts.smem_per_block);
        EXPECT_LE(kda_threads(tactic), 1024);
      }
      for (int split = 0; split <= 16; ++split)
        for (int warps = 0; warps <= 32; ++warps)
          for (int rows = 0; rows <= 8; ++rows)
            if (warps * rows > 0 && split > 0 && kda_tactic_valid({split, warps, rows}, tokens, facts).ok())
              left.insert(to_string(KdaTactic{split, warps, rows}));
      EXPECT_EQ(listed, left) << tokens << " tokens on " << facts.arch;
      EXPECT_GE(listed.size(), 3u);
    }
}

TEST(KdaTactics, shared_memory_holds_the_state_of_a_cta_and_grows_with_the_tokens) {
  for (const KdaTactic& tactic : valid_kda_tactics(1, hopper())) {
    const int state = 128 / tactic.split * 128 * 4;
    EXPECT_GE(kda_smem_bytes(1, tactic), state);
    EXPECT_LE(kda_smem_bytes(kKdaMaxTokens, tactic), state + 32768);
    const int token = kda_smem_bytes(3, tactic) - kda_smem_bytes(2, tactic);
    EXPECT_GE(token, 3 * 128 * 4);  // q, k and decay
    // In verify 32 bytes behind each of the four parts of a pass.
    const int values = 128 / tactic.split;
    const int passes = values / std::min(values, tactic.warps * 4 * tactic.pass_rows);
    EXPECT_NEAR(kda_smem_bytes(2, tactic) - kda_smem_bytes(1, tactic), token + passes * 4 * 32, 8);
    for (int tokens = 3; tokens <= kKdaMaxTokens; ++tokens) {
      const int step = kda_smem_bytes(tokens, tactic) - kda_smem_bytes(tokens - 1, tactic);
      EXPECT_NEAR(step, token, 8);  // but for rounding
    }
    EXPECT_EQ(kda_smem_bytes(3, tactic) % 8, 0);  // the barriers lie behind
  }
}

TEST(KdaTactics, records_ask_for_room_and_every_split_has_it) {
  EXPECT_EQ(kda_folded(StateMode::kSlots, 10), 0);
  EXPECT_EQ(kda_folded(StateMode::kRecords, 3), 1);
  EXPECT_EQ(kda_folded(StateMode::kRecords, 6), 4);
  EXPECT_EQ(kda_folded(StateMode::kRecords, 40), 8);
  for (const DeviceFacts& facts : {hopper(), consumer()})
    for (int tokens = 1; tokens <= kKdaMaxTokens; ++tokens) {
      std::set<int> splits, splits_with_room;
      for (const KdaTactic& tactic : valid_kda_tactics(tokens, facts)) {
        // k and decay of each folded token; u lies where o will be.
        const int room = kda_smem_bytes(tokens, tactic, 8) - kda_smem_bytes(tokens, tactic);
        EXPECT_EQ(room, 8 * 1024 + (8 - tokens) * (128 / tactic.split) * 4 + 8) << to_string(tactic);
        splits.insert(tactic.split);
        if (kda_tactic_valid(tactic, tokens, facts, 8).ok()) splits_with_room.insert(tactic.split);
      }
      EXPECT_EQ(splits_with_room, splits) << tokens << " tokens on " << facts.arch;
    }
}

// ---- The rule

constexpr std::int64_t kRequests[] = {1, 2, 3, 5, 8, 11, 17, 33, 64, 128, 683, 100000};

TEST(KdaTactics, the_rule_gives_a_valid_tactic_for_every_key) {
  for (const DeviceFacts& facts : {hopper(), consumer()})
    for (int heads = 1; heads <= kKdaMaxHeads; ++heads)
      for (int tokens = 1; tokens <= kKdaMaxTokens; ++tokens)
        for (std::int64_t requests : kRequests)
          for (int folded : {0, 1, 8}) {
            const KdaTactic tactic = kda_tactic(heads, {requests, tokens}, facts, folded);
            ASSERT_TRUE(kda_tactic_valid(tactic, tokens, facts, folded).ok())
                << to_string(tactic) << " for " << heads << " heads, key " << to_string(KdaKey{requests, tokens});
          }
}

TEST(KdaTactics, few_heads_and_requests_split_a_head_and_many_do_not) {
  DeviceFacts by_rule = hopper();
  by_rule.name = "a GPU without a table";
  for (int tokens = 1; tokens <= kKdaMaxTokens; ++tokens) {
    EXPECT_GE(kda_tactic(12, {1, tokens}, by_rule).split, 4) << tokens;  // 12 CTAs cannot load 132 SMs
    EXPECT_GE(kda_tactic(48, {1, tokens}, by_rule).split, 2) << tokens;
    EXPECT_LE(kda_tactic(96, {128, tokens}, by_rule).split, 2) << tokens;
    EXPECT_EQ(kda_tactic(12, {1, tokens}, consumer()).split, 1) << tokens;
  }
  EXPECT_EQ(kda_tactic(12, {128, 1}, by_rule).split, 1);
  for (int heads = 1; heads <= kKdaMaxHeads; ++heads) {
    int last = 8;
    for (std::int64_t requests : kRequests) {
      const int split = kda_tactic(heads, {requests, 1}, by_rule).split;
      EXPECT_LE(split, last) << heads << " heads, " << requests << " requests";  // more work, never more pieces
      // A second wave costs more than a split gains.
      EXPECT_TRUE(split == 1 || heads * requests * split <= 2 * hopper().sm_count) << heads << ", " << requests;
      last = split;
    }
  }
}

// ---- The table

// Against the file itself: the entry of the fewest requests that are at least those of the key, else of the most.
TEST(KdaTactics, the_table_answers_with_the_entry_that_its_file_names) {
  using Entries = std::map<std::int64_t, KdaTactic>;  // by requests
  std::map<std::string, std::map<std::pair<int, int>, Entries>> files;
  for (const EmbeddedText& file : embedded_tactics()) {
    const auto json = nlohmann::json::parse(file.text);
    auto& table = files[json.at("gpu")];
    if (!json.contains("kda")) continue;
    for (const auto& row : json.at("kda")) {
      if (row.value("state_mode", "slots") == "records") continue;  // another mode, another choice
      const auto& t = row.at("tactic");
      const KdaTactic tactic{t.at("split"), t.at("warps"), t.at("pass_rows")};
      EXPECT_TRUE(kda_tactic_valid(tactic, row.at("tokens"), hopper()).ok()) << row;
      Entries& entries = table[{row.at("heads"), row.at("tokens")}];
      EXPECT_TRUE(entries.emplace(row.at("requests"), tactic).second) << row << " twice";
    }
  }
  ASSERT_TRUE(files.contains("NVIDIA H200"));
  for (const auto& [gpu, table] : files)
    for (int heads : {1, 12, 24, 48, 96, 128})
      for (int tokens = 1; tokens <= kKdaMaxTokens; ++tokens)
        for (std::int64_t requests : {1, 2, 3, 7, 8, 9, 31, 32, 100, 128, 129, 1000}) {
          const KdaKey key{requests, tokens};
          const auto got = kda_table_entry(heads, key, hopper(gpu));
          const auto found = table.find({heads, tokens});
          ASSERT_EQ(got.has_value(), found != table.end()) << heads << ", " << to_string(key);
          if (!got) {
            ASSERT_EQ(kda_tactic(heads, key, hopper(gpu)), kda_tactic(heads, key, hopper()));
            continue;
          }
          const Entries& entries = found->second;
          const auto above = entries.lower_bound(requests);
          const auto& [of, tactic] = above != entries.end() ? *above : *entries.rbegin();
          ASSERT_EQ(got->requests, of) << heads << ", " << to_string(key);
          ASSERT_EQ(got->tactic, tactic);
          ASSERT_EQ(kda_tactic(heads, key, hopper(gpu)), tactic);
        }
  EXPECT_FALSE(kda_table_entry(12, {1, 1}, hopper()).has_value());
}

TEST(KdaTactics, each_mode_has_entries_of_its_own) {
  for (int heads : {12, 24, 48, 96})
    for (int tokens : {1, 8})
      for (const StateMode mode : {StateMode::kSlots, StateMode::kRecords}) {
        const auto entry = kda_table_entry(heads, {8, tokens}, hopper("NVIDIA H200"), mode);
        if (mode == StateMode::kSlots) {
          ASSERT_TRUE(entry);
        }
        if (!entry) continue;
        EXPECT_EQ(entry->mode, mode);
        EXPECT_EQ(kda_tactic(heads, {8, tokens}, hopper("NVIDIA H200"), kda_folded(mode, 10)), entry->tactic);
      }
}

// ---- Text

KdaBuild a_build() {
  KdaBuild build;
  build.heads = 12;
  build.tokens = 4;
  build.conv_len = 10;
  build.row_stride = 6296;
  build.tactic = {2, 16, 1};
  return build;
}

TEST(KdaTactics, a_build_is_what_model_layout_and_policy_say) {
  KdaModel model;
  model.heads = 12;
  model.options.gate_lower_bound = -5.0f;
  model.options.early_caches = true;
  KdaPolicy policy;
  policy.key = {1, 4};
  policy.row_stride = 6296;
  KdaLayout layout;
  layout.conv_len = 10;
  layout.num_slots = 77;
  KdaBuild wanted = a_build();
  wanted.lower_bound = true;
  wanted.early_caches = true;
  wanted.tactic = kda_tactic(12, {1, 4}, hopper());
  EXPECT_EQ(kda_build(model, layout, policy, hopper()), wanted);
  model.weights.conv_bias = TensorView{};
  model.options.gate_lower_bound.reset();
  model.options.early_caches = false;
  model.options.conv_dim_first = true;
  policy.tactic = KdaTactic{2, 16, 1};
  wanted = a_build();
  wanted.bias = true;
  wanted.conv_dim_first = true;
  EXPECT_EQ(kda_build(model, layout, policy, hopper()), wanted);
  // Slots and strides are run-time values: one kernel serves every pool.
  layout.num_slots = 3;
  layout.conv_stride = 1 << 20;
  layout.state_stride = 1 << 22;
  EXPECT_EQ(kda_build(model, layout, policy, hopper()), wanted);
  model.options.state_mode = StateMode::kRecords;
  layout.record_stride = 1 << 22;
  wanted.records = true;
  EXPECT_EQ(kda_build(model, layout, policy, hopper()), wanted);
}

TEST(KdaTactics, the_text_states_its_numbers) {
  const KdaKernelText kernel = kda_kernel_text(a_build());
  EXPECT_EQ(kernel.name, "kda-h12-q4-sd-l10-s2w16p1");
  EXPECT_EQ(kernel.rules, kKdaRules);
  EXPECT_NE(kernel.text.find("void __launch_bounds__(512"), std::string::npos) << kernel.text;
  EXPECT_NE(kernel.text.find(" " + kernel.entry + "("), std::string::npos) << kernel.text;
  for (const char* part : {"#include \"kda/kda_step.cuh\"", "kHeads = 12", "kTokens = 4", "kConvLen = 10",
                           "kRowStride = 6296", "kSplit = 2", "kWarps = 16", "kPassRows = 1", "Fault::kNone"})
    EXPECT_NE(kernel.text.find(part), std::string::npos) << part << " in\n" << kernel.text;
  EXPECT_NE(kernel.text.find("kSmemBytes = " + std::to_string(kda_smem_bytes(4, {2, 16, 1})) + ";"), std::string::npos);
}

TEST(KdaTactics, equal_builds_give_equal_text_and_each_number_gives_another) {
  const std::vector<std::function<void(KdaBuild&)>> changes{
      [](KdaBuild& b) { b.heads = 24; },         [](KdaBuild& b) { b.tokens = 5; },
      [](KdaBuild& b) { b.conv_len = 11; },      [](KdaBuild& b) { b.conv_dim_first = true; },
      [](KdaBuild& b) { b.lower_bound = true; }, [](KdaBuild& b) { b.bias = true; },
      [](KdaBuild& b) { b.row_stride += 8; },    [](KdaBuild& b) { b.early_caches = true; },
      [](KdaBuild& b) { b.records = true; },     [](KdaBuild& b) { b.tactic.split = 1; },
      [](KdaBuild& b) { b.tactic.warps = 8; },   [](KdaBuild& b) { b.tactic.pass_rows = 2; }};
  std::set<std::string> texts{kda_kernel_text(a_build()).text};
  EXPECT_EQ(texts.count(kda_kernel_text(a_build()).text), 1u);
  for (const auto& change : changes) {
    KdaBuild build = a_build();
    change(build);
    EXPECT_NE(build, a_build());
    EXPECT_TRUE(texts.insert(kda_kernel_text(build).text).second) << kda_kernel_text(build).text;
    EXPECT_EQ(texts.count(kda_kernel_text(build).text), 1u);
  }
  KdaBuild records = a_build();
  records.records = true;
  EXPECT_NE(kda_kernel_text(records).name, kda_kernel_text(a_build()).name);
  KdaBuild streams = records;
  streams.tactic = {1, 16, 4, true};
  EXPECT_EQ(kda_kernel_text(streams).name, "kda-h12-q4-sd-l10-records-s1w16p4-stream");
  EXPECT_NE(kda_kernel_text(streams).text.find("#include \"kda/kda_stream.cuh\""), std::string::npos);
  EXPECT_TRUE(texts.insert(kda_kernel_text(streams).text).second);
  KdaTestSwitches fault;
  fault.fault = "kOther";
  EXPECT_TRUE(texts.insert(kda_kernel_text(a_build(), fault).text).second);
}

}  // namespace
}  // namespace twostep
