// What `bench draft` divides by, and the row of its times.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "io/synth.h"
#include "measure/draft_step.h"

namespace twostep {
namespace {

double megabytes(const std::string& model, int tp, bool ingest) {
  const DrafterConfig config = synth_preset(model);
  DrafterLimits limits;
  limits.max_len = config.max_position_embeddings;
  const auto pieces = draft_pieces(step_model(config, limits, {tp, 0}), false, ingest, 1, 0);
  return 1e-6 * static_cast<double>(std::accumulate(pieces.begin(), pieces.end(), std::int64_t{0}));
}

// The table of docs/drafter.md, without a cache.
TEST(MeasureDraftStep, a_step_must_read_the_bytes_of_the_specification) {
  EXPECT_NEAR(megabytes("k3.1", 8, false), 698.0 + 293.6 + 21.0, 0.1);
  EXPECT_NEAR(megabytes("k3.1", 8, true), 64.2 + 41.3, 0.1);
  EXPECT_NEAR(megabytes("k3", 1, false), 4094.0 + 2348.8 + 83.9, 0.1);
  EXPECT_NEAR(megabytes("k3", 1, true), 513.8 + 41.3, 0.1);
}

TEST(MeasureDraftStep, a_layered_stage_is_read_once_per_layer) {
  const DrafterConfig config = synth_preset("tiny");
  DrafterLimits limits;
  limits.max_len = config.max_position_embeddings;
  const StepModel model = step_model(config, limits, {});
  // qkv_a, q_b, absorb, attention, values, o_proj, gate_up, down of two layers; the head and W2.
  EXPECT_EQ(draft_pieces(model, false, false, 1, 100).size(), 2u * 8 + 2);
  EXPECT_EQ(draft_pieces(model, false, true, 1, 100).size(), 2u);
}

TEST(MeasureDraftStep, the_row_holds_the_bar_of_one_case_alone) {
  DraftStepRow row;
  row.model = "k3.1";
  row.options.shard = {8, 0};
  row.options.context = 4096;
  row.graphs.draft.median = 400;
  row.graphs.draft_limit.median = 240;
  EXPECT_STREQ(row.bar_verdict(), "holds");
  row.graphs.draft.median = 440;
  EXPECT_STREQ(row.bar_verdict(), "misses");
  row.stages.push_back({Stage::kQkvA, {}, 5});
  const auto json = nlohmann::json::parse(json_line(row, {}));
  EXPECT_EQ(json["case"]["tp"], 8);
  EXPECT_EQ(json["bar_verdict"], "misses");
  EXPECT_EQ(json["stages"][0]["name"], "qkv_a");
  row.options.requests = 2;
  EXPECT_STREQ(row.bar_verdict(), "none");
}

}  // namespace
}  // namespace twostep
