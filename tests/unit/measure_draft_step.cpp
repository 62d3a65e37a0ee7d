// What `bench draft` divides by, and the row of its times.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <regex>
#include <set>

#include "core/embedded.h"
#include "io/synth.h"
#include "measure/draft_step.h"
#include "measure/torch_chain.h"

namespace twostep {
namespace {

double megabytes(const std::string& model, int tp, bool ingest, int markov_reads = 1) {
  const DrafterConfig config = synth_preset(model);
  DrafterLimits limits;
  limits.max_len = config.max_position_embeddings;
  const auto pieces = draft_pieces(step_model(config, limits, {tp, 0}), false, ingest, 1, 0, markov_reads);
  return 1e-6 * static_cast<double>(std::accumulate(pieces.begin(), pieces.end(), std::int64_t{0}));
}

// The table of docs/drafter.md, without a cache.
TEST(MeasureDraftStep, a_step_must_read_the_bytes_of_the_specification) {
  EXPECT_NEAR(megabytes("k3.1", 8, false), 698.0 + 293.6 + 21.0, 0.1);
  EXPECT_NEAR(megabytes("k3.1", 8, true), 64.2 + 41.3, 0.1);
  EXPECT_NEAR(megabytes("k3", 1, false), 4094.0 + 2348.8 + 83.9, 0.1);
  EXPECT_NEAR(megabytes("k3", 1, true), 513.8 + 41.3, 0.1);
  EXPECT_NEAR(megabytes("k3", 1, false, 7) + megabytes("k3", 1, true), 7585, 1);  // W2 does not stay on chip
  EXPECT_NEAR(megabytes("k3.1", 1, false, 7) + megabytes("k3.1", 1, true), 8602, 1);
}

TEST(MeasureDraftStep, a_layered_stage_is_read_once_per_layer) {
  const DrafterConfig config = synth_preset("tiny");
  DrafterLimits limits;
  limits.max_len = config.max_position_embeddings;
  const StepModel model = step_model(config, limits, {});
  // qkv_a, q_b, absorb, attention, values, o_proj, gate_up, down of two layers; the head and W2.
  EXPECT_EQ(draft_pieces(model, false, false, 1, 100, 1).size(), 2u * 8 + 2);
  EXPECT_EQ(draft_pieces(model, false, false, 1, 100, 3).size(), 2u * 8 + 4);
  EXPECT_EQ(draft_pieces(model, false, true, 1, 100, 1).size(), 2u);
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
  row.options.shard = {1, 0};
  row.graphs.draft.median = 280;
  EXPECT_STREQ(row.bar_verdict(), "holds");
  row.graphs.draft.median = 300;
  EXPECT_STREQ(row.bar_verdict(), "misses");
  row.options.requests = 2;
  EXPECT_STREQ(row.bar_verdict(), "none");
}

// ---- The same on PyTorch. Fakes in shell; the script itself: tests/python/test_draft_chain.py.

nlohmann::json request_of(const std::string& preset) {
  const DrafterConfig config = synth_preset(preset);
  DrafterLimits limits;
  limits.max_len = config.max_position_embeddings;
  DraftLoopOptions options;
  options.requests = 2;
  options.draft_tokens = 7;
  options.context = 4096;
  return chain_request(step_model(config, limits, {8, 0}), config, options);
}

TEST(MeasureDraftTorch, a_request_holds_what_the_script_asks_for_and_nothing_else) {
  std::set<std::string> fields, keys;
  for (const EmbeddedText& chain : embedded_chains()) {
    if (chain.name != kDraftChain.file) continue;
    std::string sizes(chain.text.substr(chain.text.find("class Sizes:")));
    sizes.resize(sizes.find("\n\n"));
    const std::regex field("\\n    (\\w+): ");
    for (std::sregex_iterator i(sizes.begin(), sizes.end(), field), end; i != end; ++i) fields.insert((*i)[1]);
  }
  const nlohmann::json request = request_of("k3.1");
  for (const auto& [key, value] : request.items()) keys.insert(key);
  EXPECT_EQ(fields, keys);
  EXPECT_EQ(request.at("heads"), 12);
  EXPECT_EQ(request.at("vocab"), 20480);
  EXPECT_EQ(request.at("confidence"), 7168 + 512);
  EXPECT_EQ(request.at("causal"), std::vector<bool>(5, true));
  EXPECT_EQ(request_of("k3").at("causal"), std::vector<bool>(5, false));
}

TorchChain fake_chain(const std::string& body) {
  return {kDraftChain, std::vector<std::string>{"/bin/sh", "-c", "while read -r line; do " + body + "; done"}};
}

TEST(MeasureDraftTorch, its_time_becomes_the_baseline_of_a_row) {
  TorchChain chain = fake_chain(
      R"(case $line in '{}') echo '{"what":"torch 2"}';; *'"context":4096,'*'"requests":2,'*) )"
      R"(echo '{"what":"torch 2, matmul","median_us":900.5,"p10_us":899,"p90_us":902,"kept":15,"dropped":3}';; esac)");
  EXPECT_EQ(chain.what(), "torch 2");
  DraftStepRow row;
  auto json = nlohmann::json::parse(json_line(row, {}));
  EXPECT_EQ(json.at("baseline"), "");
  EXPECT_TRUE(json.at("baseline_time").is_null());
  row.baseline_time = chain.time(request_of("k3.1"));
  row.baseline = chain.what();
  json = nlohmann::json::parse(json_line(row, {}));
  EXPECT_EQ(json.at("baseline"), "torch 2, matmul");
  EXPECT_EQ(json.at("baseline_time").at("median_us"), 900.5);
  EXPECT_EQ(json.at("baseline_time").at("kept"), 15);
}

// The texts as a Python gets them, up to the torch that they import.
TEST(MeasureDraftTorch, the_embedded_scripts_run_without_their_folder) {
  std::string folder = testing::TempDir() + "/twostep_torch_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  std::ofstream(folder + "/torch.py") << "raise ImportError('a torch of the test')\n";
  ASSERT_EQ(setenv("PYTHONPATH", folder.c_str(), 1), 0);
  for (const ChainScript& script : {kDraftChain, kKdaChain}) {
    SCOPED_TRACE(script.file);
    try {
      TorchChain chain(script, "python3", 0);
      ADD_FAILURE() << "no torch is there";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("ImportError: a torch of the test"), std::string::npos) << error.what();
    }
  }
  unsetenv("PYTHONPATH");
  std::filesystem::remove_all(folder);
}

TEST(MeasureDraftTorch, a_python_that_does_not_run_it_is_refused_with_its_reason_and_what_it_needs) {
  const auto told = [](const std::string& body) -> std::string {
    try {
      TorchChain chain = fake_chain(body);
      (void)chain.time(request_of("k3"));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kUnavailable);
      return error.what();
    }
    return "";
  };
  const std::string missing = told(R"(echo '{"failure":"No module named torch"}')");
  EXPECT_NE(missing.find("No module named torch"), std::string::npos);
  EXPECT_NE(missing.find("pip install torch,"), std::string::npos);
  EXPECT_NE(told("exit 1").find("status 1"), std::string::npos);
  EXPECT_NE(told("echo hello"), "");
  EXPECT_NE(told(R"(echo '{"what":"an answer without a time"}')"), "");
  EXPECT_NE(told(R"(echo '{"what":5}')"), "");
}

}  // namespace
}  // namespace twostep
