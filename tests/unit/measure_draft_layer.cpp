// The chains of a draft step: which linears, how they hand over, and the rows. What a measurement stands on.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "drafter/linears.h"
#include "io/cases.h"
#include "io/synth.h"
#include "measure/draft_chain.h"
#include "tests/unit/code_of.h"

namespace twostep {
namespace {

using test::code_of;

std::vector<ChainLinear> step_of(const std::string& model, int tp, int rows) {
  std::vector<ChainLinear> step;
  for (const StepLinear& linear : draft_linears(synth_preset(model), tp, 0))
    step.push_back({linear.label(), linear.layer, linear.n, linear.k,
                    static_cast<int>(rows_of(linear.rows, draft_requests(rows), kDraftTokens))});
  return step;
}

std::vector<std::string> names_of(const std::vector<ChainLinear>& step, const LinearRange& range) {
  std::vector<std::string> names;
  for (std::size_t i = range.first; i < range.first + range.count; ++i) names.push_back(step[i].name);
  return names;
}

TEST(MeasureDraftChain, a_step_is_its_context_then_five_layers_then_the_head) {
  const auto step = step_of("k3.1", 8, 7);
  const auto chains = draft_chains(step);
  ASSERT_EQ(chains.size(), 3u);
  EXPECT_EQ(chains[0].name, "layer");
  EXPECT_EQ(chains[1].name, "five_layers");
  EXPECT_EQ(chains[2].name, "step");
  ASSERT_EQ(chains[0].units.size(), 5u);
  EXPECT_EQ(names_of(step, chains[0].units[3]),
            (std::vector<std::string>{"layers.3.qkv_a", "layers.3.q_b", "layers.3.o_proj", "layers.3.gate_up",
                                      "layers.3.down"}));
  const auto layers = names_of(step, chains[1].units.front());
  EXPECT_EQ(layers.size(), 25u);
  EXPECT_EQ(layers.front(), "layers.0.qkv_a");
  EXPECT_EQ(layers.back(), "layers.4.down");
  const auto all = names_of(step, chains[2].units.front());
  EXPECT_EQ(all.size(), 28u);
  EXPECT_EQ(all[0], "context_proj");
  EXPECT_EQ(all[1], "context_kv_proj");
  EXPECT_EQ(all.back(), "lm_head");
}

TEST(MeasureDraftChain, rows_are_those_of_the_requests) {
  const auto step = step_of("k3.1", 8, 21);
  EXPECT_EQ(step[0].rows, 24);
  EXPECT_EQ(step[1].rows, 24);
  EXPECT_EQ(step[2].rows, 21);
  EXPECT_EQ(step.back().rows, 21);
}

TEST(MeasureDraftChain, shapes_and_counts_are_those_of_the_cases) {
  for (const char* model : {"k3", "k3.1"})
    for (const int tp : {1, 4, 8, 16}) {
      std::map<std::pair<std::int64_t, std::int64_t>, int> from_cases, from_step;
      for (const GemmCase& item : gemm_cases({model, tp, {}}))
        if (item.count > 0) from_cases[{item.n, item.k}] += item.count;
      for (const ChainLinear& linear : step_of(model, tp, 7)) ++from_step[{linear.n, linear.k}];
      EXPECT_EQ(from_step, from_cases) << model << " TP" << tp;
    }
}

// Table 13.4 of the specification, MB. Five layers are listed with the absorbed kv_b (512 x 256 for each head and
// layer), which is no linear of the chain.
TEST(MeasureDraftChain, bytes_are_those_of_the_table) {
  struct Line {
    const char* model;
    int tp, heads;
    double five_layers, step;
  };
  for (const Line& line :
       {Line{"k3", 1, 64, 4094.0, 6998}, Line{"k3", 8, 64, 644.2, 1043}, Line{"k3.1", 1, 96, 4524.0, 7428},
        Line{"k3.1", 8, 96, 698.0, 1097}, Line{"k3.1", 16, 96, 424.7, 645}}) {
    const auto step = step_of(line.model, line.tp, 7);
    const auto chains = draft_chains(step);
    const double kv_b = 5 * 2.0 * 512 * 256 * line.heads / line.tp * 1e-6;
    EXPECT_NEAR(bytes_of(step, chains[1].units.front()) * 1e-6 + kv_b, line.five_layers, 0.06) << line.model;
    EXPECT_NEAR(bytes_of(step, chains[2].units.front()) * 1e-6 + kv_b, line.step, 0.6) << line.model;
    for (const LinearRange& layer : chains[0].units)
      EXPECT_EQ(5 * bytes_of(step, layer), bytes_of(step, chains[1].units.front()));
  }
}

TEST(MeasureDraftChain, every_graph_reads_more_than_l2_holds) {
  for (const char* model : {"k3", "k3.1"})
    for (const int tp : {1, 4, 8, 16}) {
      const auto step = step_of(model, tp, 7);
      for (const DraftChain& chain : draft_chains(step)) {
        double bytes = 0;
        for (const LinearRange& unit : chain.units) bytes += bytes_of(step, unit);
        EXPECT_GT(bytes, 240e6) << model << " TP" << tp << " " << chain.name;
      }
    }
}

TEST(MeasureDraftChain, each_linear_reads_what_the_one_before_wrote_in_rows_that_the_warp_kernel_takes) {
  for (const char* model : {"k3", "k3.1"})
    for (const int tp : {1, 8, 16}) {
      const auto step = step_of(model, tp, 14);
      const auto buffers = chain_buffers(step);
      ASSERT_EQ(buffers.size(), step.size() + 1);
      for (std::size_t i = 0; i < step.size(); ++i) {
        EXPECT_GE(buffers[i].columns, step[i].k);
        EXPECT_GE(buffers[i].rows, step[i].rows);
        EXPECT_GE(buffers[i + 1].columns, step[i].n);
        EXPECT_GE(buffers[i + 1].rows, step[i].rows);
        EXPECT_EQ(buffers[i].columns % 8, 0);
        EXPECT_LE(step[i].rows, step[i == 0 ? 0 : i - 1].rows) << "a row that nothing wrote";
      }
      EXPECT_EQ(buffers.front().columns, step.front().k);
      EXPECT_EQ(buffers.back().columns, step.back().n);
    }
}

TEST(MeasureDraftChain, a_step_without_layers_or_with_unlike_layers_is_refused) {
  EXPECT_EQ(code_of([] { (void)draft_chains({}); }), StatusCode::kInvalidArgument);
  auto step = step_of("k3.1", 8, 7);
  step[10].n += 16;
  EXPECT_EQ(code_of([&] { (void)draft_chains(step); }), StatusCode::kInvalidArgument);
}

TEST(MeasureDraftChain, rows_that_are_no_whole_requests_are_refused) {
  EXPECT_EQ(draft_requests(7), 1);
  EXPECT_EQ(draft_requests(56), 8);
  for (const int rows : {-7, 0, 1, 8, 64, 3591})
    EXPECT_EQ(code_of([&] { (void)draft_requests(rows); }), StatusCode::kInvalidArgument) << rows;
}

DraftChainRow five_layers(double ours_us) {
  const auto step = step_of("k3.1", 8, 7);
  const DraftChain chain = draft_chains(step)[1];
  DraftChainRow row;
  row.model = "k3.1";
  row.tp = 8;
  row.rows = 7;
  row.name = chain.name;
  row.linears.assign(step.begin() + 2, step.begin() + 27);
  row.choices.resize(25);
  row.graph_bytes = row.bytes();
  row.chain = {"early", {ours_us, ours_us - 1, ours_us + 1, 15, 3}, {270, 268, 272, 15, 3}, {150, 149, 151, 15, 3}};
  row.ordinary = {2, 2, 2, 15, 3};
  row.ordinary_kernels = 1;
  row.baseline = "cuBLASLt";
  return row;
}

TEST(MeasureDraftChain, the_bar_is_for_five_layers_early_of_k3_1_at_tp8_with_7_rows_alone) {
  EXPECT_STREQ(five_layers(195).bar_verdict(), "holds");
  EXPECT_STREQ(five_layers(195.1).bar_verdict(), "misses");
  const auto none = [](auto&& change) {
    DraftChainRow row = five_layers(190);
    change(row);
    return !row.bar() && row.bar_verdict() == std::string("none");
  };
  EXPECT_TRUE(none([](auto& row) { row.model = "k3"; }));
  EXPECT_TRUE(none([](auto& row) { row.tp = 4; }));
  EXPECT_TRUE(none([](auto& row) { row.rows = 14; }));
  EXPECT_TRUE(none([](auto& row) { row.name = "layer"; }));
  EXPECT_TRUE(none([](auto& row) { row.chain.name = "isolated"; }));
}

TEST(MeasureDraftChain, a_difference_within_the_larger_spread_is_a_tie) {
  EXPECT_STREQ(five_layers(190).verdict(), "win");
  EXPECT_STREQ(five_layers(267).verdict(), "tie");
  EXPECT_STREQ(five_layers(280).verdict(), "loss");
  DraftChainRow row = five_layers(190);
  row.chain.baseline = {};
  EXPECT_STREQ(row.verdict(), "none");
}

TEST(MeasureDraftChain, a_row_is_one_json_line_with_all_that_was_compared) {
  DraftChainRow row = five_layers(180);
  const auto parse = [&] { return nlohmann::json::parse(json_line(row, this_machine("twostep bench draft-layer"))); };
  const auto json = parse();
  EXPECT_EQ(json.at("case").at("layer"), "five_layers");
  EXPECT_EQ(json.at("case").at("rank"), 0);
  ASSERT_EQ(json.at("choice").size(), 25u);
  EXPECT_EQ(json.at("choice").at(1).at("layer"), "layers.0.q_b");
  EXPECT_EQ(json.at("choice").at(1).at("n"), 2304);
  EXPECT_EQ(json.at("protocol").at("launches_per_graph"), 25);
  EXPECT_EQ(json.at("protocol").at("l2"), "cold");
  EXPECT_EQ(json.at("protocol").at("pdl"), true);
  EXPECT_EQ(json.at("protocol").at("ordinary_time").at("median_us"), 2.0);
  EXPECT_EQ(json.at("time").at("median_us"), 180.0);
  EXPECT_EQ(json.at("limit").at("median_us"), 150.0);
  EXPECT_EQ(json.at("baseline_time").at("median_us"), 270.0);
  EXPECT_EQ(json.at("bytes"), row.bytes());
  EXPECT_DOUBLE_EQ(json.at("percent_of_limit"), 100 / 1.2);
  EXPECT_EQ(json.at("bar_over_limit"), 1.3);
  EXPECT_EQ(json.at("bar_verdict"), "holds");
  EXPECT_EQ(json.at("verdict"), "win");
  for (LinearChoice& choice : row.choices) choice.kind = Kind::kCublas;
  row.graph_bytes = 100e6;
  EXPECT_EQ(parse().at("protocol").at("pdl"), false) << "cuBLAS is launched as always";
  EXPECT_EQ(parse().at("protocol").at("l2"), "warm");
  row.chain.name = "isolated";
  EXPECT_TRUE(parse().at("bar_over_limit").is_null());
}

}  // namespace
}  // namespace twostep
