#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "io/synth.h"
#include "twostep/drafter_config.h"
#include "twostep/status.h"

namespace twostep {
namespace {

using nlohmann::json;

// The least that a config must say.
json least() {
  return {{"model_type", "k3_dspark"},
          {"rope_parameters", {{"rope_type", "default"}}},
          {"target_layer_ids", {1, 23, 46, 68, 90}},
          {"mask_token_id", 163839}};
}

DrafterConfig read(const json& config, const json& overrides = json::object()) {
  return DrafterConfig::from_json(config.dump(), overrides.dump());
}

Status refusal_of(const json& config) {
  try {
    (void)read(config);
  } catch (const Error& error) {
    EXPECT_EQ(error.status().place, "drafter.config");
    return error.status();
  }
  ADD_FAILURE() << "accepted: " << config;
  return {};
}

void expect_refused(const char* field, const json& value, StatusCode code, const std::string& argument = {}) {
  json config = least();
  config[field] = value;
  const Status status = refusal_of(config);
  EXPECT_EQ(code_name(status.code), code_name(code)) << status.message();
  EXPECT_EQ(status.argument, argument.empty() ? field : argument) << status.message();
  EXPECT_FALSE(status.accepted.empty()) << status.message();
}

TEST(io_drafter_config, defaults_are_those_of_the_table) {
  const DrafterConfig c = read(least());
  EXPECT_EQ(c.hidden_size, 7168);
  EXPECT_EQ(c.intermediate_size, 14336);
  EXPECT_EQ(c.num_hidden_layers, 5);
  EXPECT_EQ(c.num_attention_heads, 64);
  EXPECT_EQ(c.q_lora_rank, 1536);
  EXPECT_EQ(c.kv_lora_rank, 512);
  EXPECT_EQ(c.qk_nope_head_dim, 128);
  EXPECT_EQ(c.qk_rope_head_dim, 64);
  EXPECT_EQ(c.v_head_dim, 128);
  EXPECT_EQ(c.vocab_size, 163840);
  EXPECT_EQ(c.markov_rank, 256);
  EXPECT_EQ(c.max_position_embeddings, 1048576);
  EXPECT_EQ(c.target_hidden_size, 7168);
  EXPECT_EQ(c.target_num_hidden_layers, 93);
  EXPECT_EQ(c.hidden_act, "silu");
  EXPECT_EQ(c.aux_hidden_stream, "prefix");
  EXPECT_EQ(c.rms_norm_eps, 1e-5);
  EXPECT_EQ(c.rope.rope_theta, 50000);
  EXPECT_EQ(c.causal, std::vector<bool>(5, false));
  EXPECT_FALSE(c.block_size || c.enable_confidence_head || c.mla_use_output_gate || c.fc_norm || c.is_neox_style);
}

TEST(io_drafter_config, nested_wins_over_top_level_and_overrides_win_over_both) {
  json config = least();
  config["markov_rank"] = 8;
  config["dflash_config"] = {{"markov_rank", 16}};
  EXPECT_EQ(read(config).markov_rank, 16);
  EXPECT_EQ(read(config, {{"markov_rank", 24}}).markov_rank, 24);
}

TEST(io_drafter_config, an_override_of_no_field_is_refused) {
  json config = least();
  config["some_key_of_others"] = 1;
  EXPECT_NO_THROW((void)read(config));
  try {
    (void)read(config, {{"markov_rnak", 16}});
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(error.status().argument, "markov_rnak");
  }
  const json whole = json::parse(synth_preset("k3").to_json());
  for (const auto& [key, value] : whole.items()) {
    json same = json::object();
    same[key] = value;
    EXPECT_NO_THROW((void)read(whole, same)) << key;
  }
}

TEST(io_drafter_config, each_rule_is_refused_on_its_field) {
  constexpr auto kInvalid = StatusCode::kInvalidArgument;
  for (const char* field : {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                            "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                            "markov_rank", "vocab_size", "block_size", "max_position_embeddings"})
    for (const json& value : {json(0), json(-8), json("64"), json(64.5), json(std::uint64_t{1} << 63)}) {
      json config = least();
      config[field] = value;
      EXPECT_EQ(refusal_of(config).argument, field) << config;
    }
  for (const char* field : {"hidden_size", "intermediate_size"}) expect_refused(field, 72, kInvalid);
  for (const char* field : {"q_lora_rank", "v_head_dim", "markov_rank"}) expect_refused(field, 12, kInvalid);
  expect_refused("mask_token_id", 163840, kInvalid);
  expect_refused("mask_token_id", nullptr, kInvalid);
  expect_refused("hidden_act", "relu", kInvalid);
  expect_refused("aux_hidden_stream", "suffix", kInvalid);
  expect_refused("rms_norm_eps", 0, kInvalid);
  expect_refused("logit_scale", -1, kInvalid);
  expect_refused("rope_theta", 1, kInvalid);
  expect_refused("fc_norm", 1, kInvalid);
  expect_refused("rope_parameters", nullptr, kInvalid);
  expect_refused("rope_parameters", {{"rope_type", "longrope"}}, kInvalid, "rope_parameters.rope_type");
  expect_refused("rope_parameters", json::object(), kInvalid, "rope_parameters.rope_type");
  expect_refused("rope_parameters", {{"rope_theta", 10000}}, kInvalid, "rope_parameters.rope_type");
  expect_refused("rope_parameters", {{"rope_type", "default"}, {"factor", 0.5}}, kInvalid, "rope_parameters.factor");
  expect_refused("rope_parameters", {{"rope_type", "yarn"}}, kInvalid,
                 "rope_parameters.original_max_position_embeddings");
  expect_refused("rope_parameters", {{"rope_type", "default"}, {"beta_fast", 1}}, kInvalid,
                 "rope_parameters.beta_fast");
  for (const json& ids : {json::array(), json({3, 3}), json({3, 2}), json({-1}), json({93}), json({"1"}), json(7)})
    expect_refused("target_layer_ids", ids, kInvalid);
  expect_refused("num_target_layers", 4, kInvalid);
  expect_refused("layer_types", {"full_attention"}, kInvalid);
  expect_refused("use_swa", true, kInvalid, "sliding_window");
}

TEST(io_drafter_config, what_is_valid_but_not_served_is_unsupported) {
  constexpr auto kUnsupported = StatusCode::kUnsupported;
  expect_refused("model_type", "qwen3", kUnsupported);
  expect_refused("q_lora_rank", nullptr, kUnsupported);
  expect_refused("mla_use_nope", true, kUnsupported);
  expect_refused("markov_head_type", "gated", kUnsupported);
  expect_refused("draft_vocab_size", 32000, kUnsupported);
  expect_refused("sample_from_anchor", false, kUnsupported);
  expect_refused("quantization_config", {{"bits", 4}}, kUnsupported);
  expect_refused("final_logit_softcapping", 30, kUnsupported);
}

TEST(io_drafter_config, a_drafter_without_rope_is_taken_on_the_callers_word_alone) {
  json config = least();
  config["mla_use_nope"] = true;
  config["allow_nope"] = true;  // not the caller's
  EXPECT_EQ(refusal_of(config).argument, "mla_use_nope");
  config.erase("rope_parameters");
  const json allow = {{"allow_nope", true}};
  EXPECT_TRUE(read(config, allow).mla_use_nope);
  EXPECT_FALSE(read(least(), allow).mla_use_nope);
  const std::string text = read(config, allow).to_json();
  EXPECT_EQ(DrafterConfig::from_json(text, allow.dump()).to_json(), text);
  EXPECT_THROW((void)read(config, {{"allow_nope", false}}), Error);
  EXPECT_THROW((void)read(config, {{"allow_nope", 1}}), Error);
}

TEST(io_drafter_config, older_files_spell_the_type_of_the_rope_as_type) {
  json config = least();
  config.erase("rope_parameters");
  config["rope_scaling"] = {{"type", "yarn"}, {"factor", 8}, {"original_max_position_embeddings", 4096}};
  EXPECT_EQ(read(config).rope.rope_type, "yarn");
}

TEST(io_drafter_config, one_run_lists_every_broken_rule) {
  json config = least();
  config["hidden_size"] = 100;
  config["markov_rank"] = 7;
  config["q_lora_rank"] = nullptr;
  config.erase("rope_parameters");
  config.erase("mask_token_id");
  const Status status = refusal_of(config);
  for (const char* field : {"hidden_size = 100", "markov_rank = 7", "q_lora_rank = null", "rope_parameters = absent",
                            "mask_token_id = absent"})
    EXPECT_NE(status.message().find(field), std::string::npos) << status.message();
  EXPECT_EQ(status.code, StatusCode::kInvalidArgument);
}

TEST(io_drafter_config, causality_comes_from_is_causal_then_causal_then_layer_types) {
  json config = least();
  config["num_hidden_layers"] = 2;
  config["sliding_window"] = 64;
  config["layer_types"] = {"sliding_attention", "full_attention"};
  EXPECT_EQ(read(config).causal, (std::vector<bool>{true, false}));
  EXPECT_EQ(read(config).sliding_window[0], 64);
  EXPECT_FALSE(read(config).sliding_window[1]);
  config["dflash_config"] = {{"causal", true}};
  EXPECT_EQ(read(config).causal, (std::vector<bool>{true, true}));
  config["is_causal"] = false;
  EXPECT_EQ(read(config).causal, (std::vector<bool>{false, false}));
}

TEST(io_drafter_config, a_list_of_architectures_names_the_family_too) {
  json config = least();
  config.erase("model_type");
  config["architectures"] = {"K3DSparkModel"};
  EXPECT_NO_THROW((void)read(config));
  config["architectures"] = {"Qwen3"};
  EXPECT_EQ(refusal_of(config).code, StatusCode::kUnsupported);
}

TEST(io_drafter_config, text_that_is_no_json_object_is_a_data_error) {
  for (const char* text : {"", "{", "[]", "7", "{\"a\":1,\"a\":2}"}) {
    try {
      (void)DrafterConfig::from_json(text);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kDataError) << text;
    }
  }
}

TEST(io_drafter_config, to_json_is_read_back_as_the_same_config) {
  for (const auto& preset : synth_presets()) {
    const std::string text = synth_preset(preset).to_json();
    EXPECT_EQ(DrafterConfig::from_json(text).to_json(), text) << preset;
  }
  json config = least();
  config["num_hidden_layers"] = 2;
  config["sliding_window"] = 64;
  config["block_size"] = 7;
  config["hidden_act"] = "situ";
  config["activation_situ_linear_beta"] = 2.0;
  config["layer_types"] = {"sliding_attention", "full_attention"};
  const DrafterConfig c = read(config);
  const DrafterConfig back = DrafterConfig::from_json(c.to_json());
  EXPECT_EQ(back.causal, c.causal);
  EXPECT_EQ(back.sliding_window, c.sliding_window);
  EXPECT_EQ(back.block_size, 7);
  EXPECT_EQ(back.activation_situ_linear_beta, 2.0);
}

TEST(io_drafter_config, a_config_that_no_json_can_say_is_refused) {
  const auto refused = [](std::vector<bool> causal, std::vector<std::optional<std::int64_t>> windows) {
    json two = least();
    two["num_hidden_layers"] = 2;
    DrafterConfig config = read(two);
    config.causal = std::move(causal);
    config.sliding_window = std::move(windows);
    try {
      const DrafterConfig back = DrafterConfig::from_json(config.to_json());
      EXPECT_EQ(back.causal, config.causal);
      EXPECT_EQ(back.sliding_window, config.sliding_window);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kUnsupported);
      return error.status().argument;
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refused({true, false}, {64, {}}), "accepted");
  EXPECT_EQ(refused({true, true}, {64, {}}), "accepted");
  EXPECT_EQ(refused({false, false}, {64, 64}), "accepted");
  EXPECT_EQ(refused({true, false}, {{}, {}}), "causal[0]");
  EXPECT_EQ(refused({false, true}, {64, {}}), "causal[0]");
  EXPECT_EQ(refused({true, false}, {64, 64}), "causal[1]");
  EXPECT_EQ(refused({true, true}, {64, 65}), "sliding_window[1]");
}

}  // namespace
}  // namespace twostep
