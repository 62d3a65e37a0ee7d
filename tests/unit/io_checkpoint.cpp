#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "io/synth.h"

namespace twostep {
namespace {

// The tensors of a config, all over the same bytes: only names, dtypes and shapes matter here.
TensorSet set_of(const std::vector<ExpectedTensor>& tensors) {
  static const std::vector<std::byte> bytes(1 << 20);
  TensorSet set;
  for (const auto& expected : tensors) {
    StoredTensor tensor{expected.name, "BF16", expected.shape, bytes.data(), 2, 8, "model.safetensors"};
    for (const std::int64_t size : expected.shape) tensor.bytes *= static_cast<std::uint64_t>(size);
    set.tensors.emplace(expected.name, tensor);
  }
  return set;
}

struct Fixture {
  DrafterConfig config = synth_preset("tiny");
  TensorSet drafter = set_of(expected_tensors(config, false));
  TensorSet target = set_of(target_tensors(config));

  Checkpoint load() const { return Checkpoint(config, drafter, target, "DIR"); }
  Status refusal() const {
    try {
      (void)load();
    } catch (const Error& error) {
      return error.status();
    }
    ADD_FAILURE() << "accepted";
    return {};
  }
  StoredTensor& at(const std::string& name) { return drafter.tensors.at(name); }
  void add(const std::string& name) {
    StoredTensor tensor = drafter.tensors.begin()->second;
    tensor.name = name;
    drafter.tensors.emplace(name, tensor);
  }
};

bool contains(const Status& status, const std::string& part) {
  return status.message().find(part) != std::string::npos;
}

TEST(io_checkpoint, a_complete_checkpoint_loads_with_and_without_the_prefix) {
  Fixture f;
  EXPECT_NO_THROW((void)f.load());
  TensorSet prefixed;
  for (const auto& [name, tensor] : f.drafter.tensors) prefixed.tensors.emplace("model." + name, tensor);
  f.drafter = prefixed;
  EXPECT_EQ(f.load().tensor("final_norm.weight").shape, (std::vector<std::int64_t>{256}));
}

TEST(io_checkpoint, drafter_and_target_of_two_seeds_are_refused) {
  Fixture f;
  f.drafter.metadata["seed"] = "1";
  EXPECT_NO_THROW((void)f.load());
  f.target.metadata["seed"] = "1";
  EXPECT_NO_THROW((void)f.load());
  f.target.metadata["seed"] = "2";
  EXPECT_TRUE(contains(f.refusal(), "target.safetensors = seed 2"));
}

TEST(io_checkpoint, missing_unexpected_and_wrong_tensors_are_listed_at_once) {
  Fixture f;
  f.drafter.tensors.erase("final_norm.weight");
  f.add("layers.9.mlp.up_proj.weight");
  f.at("layers.1.self_attn.q_b_proj.weight").shape = {192, 64};
  const Status status = f.refusal();
  EXPECT_EQ(status.code, StatusCode::kDataError);
  EXPECT_TRUE(contains(status, "DIR final_norm.weight = missing; accepted: BF16 or F32 [256]")) << status.message();
  EXPECT_TRUE(contains(status, "layers.9.mlp.up_proj.weight at offset 8 = unexpected")) << status.message();
  EXPECT_TRUE(contains(status,
                       "model.safetensors layers.1.self_attn.q_b_proj.weight at offset 8 = BF16 [192, 64]; "
                       "accepted: BF16 [192, 128] by num_attention_heads"))
      << status.message();
  EXPECT_FALSE(contains(status, "\n"));
}

TEST(io_checkpoint, only_norms_and_the_confidence_head_may_be_f32) {
  Fixture f;
  f.at("final_norm.weight").dtype = "F32";
  f.at("confidence_head.proj.weight").dtype = "F32";
  EXPECT_NO_THROW((void)f.load());
  f.at("context_proj.weight").dtype = "F32";
  EXPECT_EQ(f.refusal().code, StatusCode::kUnsupported);
  f.at("context_proj.weight").dtype = "F8_E4M3";
  EXPECT_TRUE(contains(f.refusal(), "F8_E4M3")) << f.refusal().message();
}

TEST(io_checkpoint, companion_scale_tensors_are_unsupported) {
  Fixture f;
  f.add("layers.0.mlp.up_proj.weight_scale");
  EXPECT_EQ(f.refusal().code, StatusCode::kUnsupported);
}

TEST(io_checkpoint, a_switch_that_disagrees_with_the_tensors_is_an_error) {
  Fixture gate;
  gate.add("layers.0.self_attn.g_proj.weight");
  EXPECT_TRUE(contains(gate.refusal(), "mla_use_output_gate is false"));
  Fixture no_gate;
  no_gate.config.mla_use_output_gate = true;
  EXPECT_TRUE(contains(no_gate.refusal(), "g_proj.weight = missing"));
  Fixture norm;
  norm.add("fc_norm.0.weight");
  EXPECT_TRUE(contains(norm.refusal(), "fc_norm is false"));
  Fixture no_norm;
  no_norm.config.fc_norm = true;
  EXPECT_TRUE(contains(no_norm.refusal(), "fc_norm.1.weight = missing"));
}

TEST(io_checkpoint, an_unset_confidence_field_follows_the_tensor_and_a_set_one_is_checked) {
  Fixture f;
  f.config.enable_confidence_head.reset();
  f.config.confidence_head_with_markov.reset();
  EXPECT_TRUE(*f.load().config().enable_confidence_head);
  EXPECT_TRUE(*f.load().config().confidence_head_with_markov);
  f.config.confidence_head_with_markov = false;
  EXPECT_TRUE(contains(f.refusal(), "[1, 288]"));
  f.config.confidence_head_with_markov.reset();
  f.at("confidence_head.proj.weight").shape = {1, 256};
  EXPECT_FALSE(*f.load().config().confidence_head_with_markov);
  f.config.enable_confidence_head = false;
  EXPECT_TRUE(contains(f.refusal(), "enable_confidence_head is false"));
}

TEST(io_checkpoint, the_embedding_is_needed_unless_the_target_lends_it) {
  Fixture f;
  f.target = {};
  EXPECT_TRUE(contains(f.refusal(), "embed_tokens.weight = missing"));
  f.drafter = set_of(expected_tensors(f.config, true));
  const Checkpoint checkpoint = f.load();
  EXPECT_NO_THROW((void)checkpoint.tensor("embed_tokens.weight"));
  EXPECT_THROW((void)checkpoint.tensor("lm_head.weight"), Error);
}

TEST(io_checkpoint, tensors_that_the_chapter_ignores_are_ignored) {
  Fixture f;
  for (const char* name : {"embed_tokens.weight", "lm_head.weight", "t2d", "layers.0.self_attn.rotary_emb.inv_freq"})
    f.add(name);
  EXPECT_NO_THROW((void)f.load());
}

TEST(io_checkpoint, the_targets_head_must_have_the_shape_of_the_config) {
  Fixture f;
  f.target.tensors.at("lm_head.weight").shape = {256, 512};
  EXPECT_TRUE(contains(f.refusal(), "[512, 256] by vocab_size, hidden_size"));
}

}  // namespace
}  // namespace twostep
