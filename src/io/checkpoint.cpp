#include "io/checkpoint.h"

#include <fmt/format.h>

#include <utility>

#include "io/json.h"
#include "io/problems.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "drafter.load";
constexpr const char* kLent = "the target lends embed_tokens.weight and lm_head.weight in target.safetensors";
constexpr const char* kConfidence = "confidence_head.proj.weight";

bool ignored(const std::string& name, bool embedding_lent) {
  return (embedding_lent && name.starts_with("embed_tokens.")) || name.starts_with("lm_head.") ||
         name.find("t2d") != std::string::npos || name.find("rotary_emb.inv_freq") != std::string::npos;
}

std::string label(const StoredTensor& tensor) {
  return fmt::format("{} {} at offset {}", tensor.file, printable(tensor.name), tensor.offset);
}

std::string type_text(const ExpectedTensor& expected) {
  return fmt::format("{} {}", expected.may_be_f32 ? "BF16 or F32" : "BF16", shape_text(expected.shape));
}

void check_tensor(const ExpectedTensor& expected, const StoredTensor& found, std::vector<Status>& problems) {
  const bool type_fits = found.dtype == "BF16" || (expected.may_be_f32 && found.dtype == "F32");
  if (type_fits && found.shape == expected.shape) return;
  problems.push_back(refusal(found.shape == expected.shape ? StatusCode::kUnsupported : StatusCode::kDataError, kPlace,
                             label(found), fmt::format("{} {}", found.dtype, printable(shape_text(found.shape))),
                             fmt::format("{} by {}", type_text(expected), expected.fields)));
}

std::string remedy_for(const std::string& name) {
  if (name.starts_with("fc_norm.")) return "fc_norm is false in config.json";
  if (name.find("g_proj") != std::string::npos) return "mla_use_output_gate is false in config.json";
  if (name.starts_with("confidence_head.")) return "enable_confidence_head is false in config.json";
  return "the config is of another model, or the file is";
}

// Unset fields follow the tensors; set ones are then checked against them like every other shape.
void resolve_confidence(DrafterConfig& config, const TensorSet& tensors) {
  const auto head = tensors.tensors.find(kConfidence);
  const bool present = head != tensors.tensors.end();
  if (!config.enable_confidence_head) config.enable_confidence_head = present;
  if (!config.confidence_head_with_markov)
    config.confidence_head_with_markov =
        present && head->second.shape.size() == 2 && head->second.shape[1] == config.hidden_size + config.markov_rank;
}

}  // namespace

std::vector<ExpectedTensor> expected_tensors(const DrafterConfig& c, bool with_embedding) {
  std::vector<ExpectedTensor> list;
  const auto add = [&](std::string name, std::vector<std::int64_t> shape, std::string fields, bool may_be_f32 = false) {
    list.push_back({std::move(name), std::move(shape), std::move(fields), may_be_f32});
  };
  const auto norm = [&](std::string name, std::int64_t size, std::string fields) {
    add(std::move(name), {size}, std::move(fields), true);
  };
  add("context_proj.weight", {c.hidden_size, c.num_taps() * c.target_hidden_size},
      "hidden_size, target_layer_ids, target_hidden_size");
  norm("context_norm.weight", c.hidden_size, "hidden_size");
  norm("final_norm.weight", c.hidden_size, "hidden_size");
  for (std::int64_t j = 0; c.fc_norm && j < c.num_taps(); ++j)
    norm(fmt::format("fc_norm.{}.weight", j), c.target_hidden_size, "fc_norm, target_hidden_size");

  const std::int64_t heads = c.num_attention_heads;
  for (std::int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const std::string layer = fmt::format("layers.{}.", i);
    const std::string attention = layer + "self_attn.";
    norm(layer + "input_layernorm.weight", c.hidden_size, "hidden_size");
    norm(layer + "post_attention_layernorm.weight", c.hidden_size, "hidden_size");
    add(attention + "q_a_proj.weight", {c.q_lora_rank, c.hidden_size}, "q_lora_rank, hidden_size");
    add(attention + "kv_a_proj_with_mqa.weight", {c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size},
        "kv_lora_rank, qk_rope_head_dim, hidden_size");
    norm(attention + "q_a_layernorm.weight", c.q_lora_rank, "q_lora_rank");
    norm(attention + "kv_a_layernorm.weight", c.kv_lora_rank, "kv_lora_rank");
    add(attention + "q_b_proj.weight", {heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank},
        "num_attention_heads, qk_nope_head_dim, qk_rope_head_dim, q_lora_rank");
    add(attention + "kv_b_proj.weight", {heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank},
        "num_attention_heads, qk_nope_head_dim, v_head_dim, kv_lora_rank");
    add(attention + "o_proj.weight", {c.hidden_size, heads * c.v_head_dim},
        "hidden_size, num_attention_heads, v_head_dim");
    if (c.mla_use_output_gate)
      add(attention + "g_proj.weight", {heads * c.v_head_dim, c.hidden_size},
          "mla_use_output_gate, num_attention_heads, v_head_dim, hidden_size");
    add(layer + "mlp.gate_proj.weight", {c.intermediate_size, c.hidden_size}, "intermediate_size, hidden_size");
    add(layer + "mlp.up_proj.weight", {c.intermediate_size, c.hidden_size}, "intermediate_size, hidden_size");
    add(layer + "mlp.down_proj.weight", {c.hidden_size, c.intermediate_size}, "hidden_size, intermediate_size");
  }
  add("markov_head.markov_w1.weight", {c.vocab_size, c.markov_rank}, "vocab_size, markov_rank");
  add("markov_head.markov_w2.weight", {c.vocab_size, c.markov_rank}, "vocab_size, markov_rank");
  if (c.enable_confidence_head.value_or(false)) {
    const std::int64_t markov = c.confidence_head_with_markov.value_or(false) ? c.markov_rank : 0;
    add(kConfidence, {1, c.hidden_size + markov}, "hidden_size, confidence_head_with_markov, markov_rank", true);
    add("confidence_head.proj.bias", {1}, "enable_confidence_head", true);
  }
  if (with_embedding) list.push_back(target_tensors(c).front());
  return list;
}

std::vector<ExpectedTensor> target_tensors(const DrafterConfig& c) {
  return {{"embed_tokens.weight", {c.vocab_size, c.hidden_size}, "vocab_size, hidden_size"},
          {"lm_head.weight", {c.vocab_size, c.hidden_size}, "vocab_size, hidden_size"}};
}

Checkpoint Checkpoint::open(const std::filesystem::path& folder, std::string_view overrides, bool embedding_lent) {
  const auto config_file = folder / "config.json";
  DrafterConfig config = DrafterConfig::from_json(read_text(config_file, kPlace), overrides);
  TensorSet drafter = open_safetensors_folder(folder);
  const auto target_file = folder / "target.safetensors";
  TensorSet target = std::filesystem::exists(target_file) ? open_safetensors(target_file) : TensorSet{};
  return Checkpoint(std::move(config), std::move(drafter), std::move(target), folder.string(), embedding_lent);
}

Checkpoint::Checkpoint(DrafterConfig config, TensorSet drafter, TensorSet target, std::string source,
                       bool embedding_lent)
    : config_(std::move(config)), source_(std::move(source)) {
  std::vector<Status> problems;
  const auto seed = drafter.metadata.find("seed");
  const auto target_seed = target.metadata.find("seed");
  if (seed != drafter.metadata.end() && target_seed != target.metadata.end() && seed->second != target_seed->second)
    problems.push_back(refusal(StatusCode::kDataError, kPlace, source_ + " target.safetensors",
                               "seed " + printable(target_seed->second), printable(seed->second) + ", the drafter's",
                               "write both with one twostep synth"));
  std::map<std::string, StoredTensor> named;
  for (auto& [stored_name, tensor] : drafter.tensors) {
    const std::string name = stored_name.starts_with("model.") ? stored_name.substr(6) : stored_name;
    if (!named.emplace(name, tensor).second)
      problems.push_back(refusal(StatusCode::kDataError, kPlace, label(tensor), "there with and without \"model.\"",
                                 "each name once"));
  }
  drafter.tensors = std::move(named);
  resolve_confidence(config_, drafter);

  embedding_lent |= target.tensors.contains("embed_tokens.weight");
  const auto expected = expected_tensors(config_, !embedding_lent);
  for (const auto& tensor : expected) {
    const auto found = drafter.tensors.find(tensor.name);
    if (found == drafter.tensors.end()) {
      problems.push_back(refusal(StatusCode::kDataError, kPlace, source_ + " " + tensor.name, "missing",
                                 fmt::format("{} by {}", type_text(tensor), tensor.fields),
                                 tensor.name.starts_with("embed_tokens.") ? kLent : ""));
      continue;
    }
    check_tensor(tensor, found->second, problems);
    tensors_.tensors.insert(drafter.tensors.extract(found));
  }
  for (const auto& [name, tensor] : drafter.tensors) {
    if (ignored(name, embedding_lent)) continue;
    const bool scales = name.find("scale") != std::string::npos;
    problems.push_back(refusal(scales ? StatusCode::kUnsupported : StatusCode::kDataError, kPlace, label(tensor),
                               "unexpected", scales ? "BF16 weights without scales" : "only tensors of the config",
                               remedy_for(name)));
  }
  for (const auto& tensor : target_tensors(config_)) {
    const auto found = target.tensors.find(tensor.name);
    if (found == target.tensors.end()) continue;
    check_tensor(tensor, found->second, problems);
    tensors_.tensors.insert(target.tensors.extract(found));
  }
  throw_if_any(problems);
  tensors_.files = std::move(drafter.files);
  tensors_.files.insert(tensors_.files.end(), target.files.begin(), target.files.end());
}

void Checkpoint::require_unchanged() const {
  for (const auto& file : tensors_.files) file->require_unchanged();
}

const StoredTensor& Checkpoint::tensor(const std::string& name) const {
  const auto found = tensors_.tensors.find(name);
  if (found == tensors_.tensors.end())
    fail(StatusCode::kDataError, kPlace, source_ + " " + name, "missing", "a tensor of the drafter or of its target",
         kLent);
  return found->second;
}

}  // namespace twostep
