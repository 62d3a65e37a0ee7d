#include "twostep/drafter_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "core/log.h"
#include "io/json.h"
#include "io/problems.h"

namespace twostep {
namespace {

using nlohmann::json;

constexpr const char* kPlace = "drafter.config";
constexpr std::int64_t kLargestSize = std::int64_t{1} << 24;  // products of two sizes then fit with room to spare

// Looks keys up in the order of precedence, converts them, and collects every broken rule.
class Fields {
 public:
  explicit Fields(std::vector<const json*> scopes) : scopes_(std::move(scopes)) {}

  // The value, null included; nullptr where no scope has the key.
  const json* raw(const char* key) const {
    looked_up_.insert(key);
    for (const json* scope : scopes_)
      if (const auto found = scope->find(key); found != scope->end()) return &*found;
    return nullptr;
  }
  // The same with null as absent.
  const json* find(const char* key) const {
    const json* value = raw(key);
    return value && !value->is_null() ? value : nullptr;
  }

  void refuse(StatusCode code, const char* key, const std::string& value, std::string accepted,
              std::string remedy = {}) {
    problems.push_back(refusal(code, kPlace, key, value, std::move(accepted), std::move(remedy)));
  }
  void invalid(const char* key, const json* value, std::string accepted, std::string remedy = {}) {
    refuse(StatusCode::kInvalidArgument, key, text_of(value), std::move(accepted), std::move(remedy));
  }
  void unsupported(const char* key, const json* value, std::string accepted, std::string remedy = {}) {
    refuse(StatusCode::kUnsupported, key, text_of(value), std::move(accepted), std::move(remedy));
  }

  void integer(const char* key, std::int64_t& field, std::int64_t min, std::int64_t max, std::int64_t multiple = 1) {
    const json* value = find(key);
    if (!value) return;
    const bool fits = value->is_number_integer() &&
                      !(value->is_number_unsigned() && value->get<std::uint64_t>() > static_cast<std::uint64_t>(max));
    if (fits && value->get<std::int64_t>() >= min && value->get<std::int64_t>() % multiple == 0)
      field = value->get<std::int64_t>();
    else
      invalid(key, value,
              multiple == 1 ? fmt::format("integers from {} to {}", min, max)
                            : fmt::format("multiples of {} from {} to {}", multiple, min, max));
  }
  void size(const char* key, std::int64_t& field, std::int64_t multiple) {
    integer(key, field, multiple, kLargestSize, multiple);
  }
  void number(const char* key, double& field, double min, bool min_included) {
    const json* value = find(key);
    if (!value) return;
    const double v = value->is_number() ? value->get<double>() : std::numeric_limits<double>::quiet_NaN();
    if (std::isfinite(v) && (min_included ? v >= min : v > min)) field = v;
    else invalid(key, value, fmt::format("finite numbers {} {}", min_included ? "from" : "above", min));
  }
  template <class Flag>
  void flag(const char* key, Flag& field) {
    const json* value = find(key);
    if (value && value->is_boolean()) field = value->get<bool>();
    if (value && !value->is_boolean()) invalid(key, value, "true or false");
  }
  void word(const char* key, std::string& field, std::initializer_list<const char*> accepted) {
    const json* value = find(key);
    if (!value) return;
    for (const char* candidate : accepted)
      if (value->is_string() && value->get<std::string>() == candidate) {
        field = candidate;
        return;
      }
    invalid(key, value, fmt::format("{}", fmt::join(accepted, ", ")));
  }

  // Whoever overrides a field means one that is read.
  void refuse_unread(const json& overrides) {
    for (const auto& [key, value] : overrides.items())
      if (!looked_up_.contains(key))
        invalid(printable(key).c_str(), &value, "overrides of fields that the config has", "check the spelling");
  }

  static std::string text_of(const json* value) { return value ? printable(value->dump(-1, ' ', true)) : "absent"; }

  std::vector<Status> problems;

 private:
  std::vector<const json*> scopes_;
  mutable std::set<std::string> looked_up_;
};

void read_family(Fields& fields) {
  const json* type = fields.find("model_type");
  const json* names = fields.find("architectures");
  const bool by_type = type && *type == "k3_dspark";
  const bool by_name = names && names->is_array() &&
                       std::any_of(names->begin(), names->end(), [](const json& n) { return n == "K3DSparkModel"; });
  if (!by_type && !by_name)
    fields.unsupported("model_type", type ? type : names, "k3_dspark, or K3DSparkModel in architectures",
                       "use a DSpark drafter of the MLA family");
}

// What the chapter names and this version does not serve (1.4).
void refuse_unserved(Fields& fields) {
  const auto only = [&](const char* key, const json& served, const char* accepted) {
    const json* value = fields.find(key);
    if (value && *value != served) fields.unsupported(key, value, accepted);
  };
  only("markov_head_type", "vanilla", "vanilla");
  only("sample_from_anchor", true, "true");
  only("attention_bias", false, "false: projections without bias");
  only("mlp_bias", false, "false: projections without bias");
  if (fields.find("quantization_config"))
    fields.unsupported("quantization_config", fields.find("quantization_config"), "absent: BF16 weights");
  if (fields.find("final_logit_softcapping"))
    fields.unsupported("final_logit_softcapping", fields.find("final_logit_softcapping"), "absent");
  if (const json* rank = fields.raw("q_lora_rank"); rank && rank->is_null())
    fields.unsupported("q_lora_rank", rank, "a number: queries pass a low-rank projection");
}

void read_sizes(Fields& fields, DrafterConfig& c) {
  fields.size("hidden_size", c.hidden_size, 64);
  fields.size("intermediate_size", c.intermediate_size, 64);
  fields.integer("num_hidden_layers", c.num_hidden_layers, 1, 1024);
  fields.size("num_attention_heads", c.num_attention_heads, 1);
  fields.size("q_lora_rank", c.q_lora_rank, 8);
  fields.size("kv_lora_rank", c.kv_lora_rank, 8);
  fields.size("qk_nope_head_dim", c.qk_nope_head_dim, 8);
  fields.size("qk_rope_head_dim", c.qk_rope_head_dim, 8);
  fields.size("v_head_dim", c.v_head_dim, 8);
  fields.size("vocab_size", c.vocab_size, 8);
  std::int64_t draft_vocab_size = c.vocab_size;
  fields.size("draft_vocab_size", draft_vocab_size, 8);
  if (draft_vocab_size != c.vocab_size)
    fields.unsupported("draft_vocab_size", fields.find("draft_vocab_size"),
                       fmt::format("vocab_size = {}", c.vocab_size));
  fields.size("markov_rank", c.markov_rank, 8);
  fields.integer("max_position_embeddings", c.max_position_embeddings, 1, std::int64_t{1} << 31);
  if (!fields.find("mask_token_id")) fields.invalid("mask_token_id", nullptr, "required");
  fields.integer("mask_token_id", c.mask_token_id, 0, c.vocab_size - 1);
  if (fields.find("block_size")) {
    c.block_size = 1;
    fields.integer("block_size", *c.block_size, 1, kLargestSize);
  }
}

// Who takes a drafter without rope says so; a file cannot.
void read_nope(Fields& fields, const json& overrides, DrafterConfig& c) {
  fields.flag("mla_use_nope", c.mla_use_nope);
  (void)fields.raw("allow_nope");  // a key that the overrides may have
  const auto allow = overrides.find("allow_nope");
  if (allow != overrides.end() && !allow->is_boolean()) fields.invalid("allow_nope", &*allow, "true or false");
  if (c.mla_use_nope && (allow == overrides.end() || *allow != true))
    fields.unsupported("mla_use_nope", fields.find("mla_use_nope"), "false: the draft attention is rotary",
                       "set allow_nope in the overrides if the drafter was trained without rope");
}

void read_switches(Fields& fields, DrafterConfig& c) {
  fields.flag("mla_use_output_gate", c.mla_use_output_gate);
  fields.flag("is_neox_style", c.is_neox_style);
  fields.flag("fc_norm", c.fc_norm);
  fields.flag("enable_confidence_head", c.enable_confidence_head);
  fields.flag("confidence_head_with_markov", c.confidence_head_with_markov);
  fields.word("hidden_act", c.hidden_act, {"silu", "situ"});
  fields.word("aux_hidden_stream", c.aux_hidden_stream, {"prefix", "attn_res"});
  fields.number("activation_situ_beta", c.activation_situ_beta, 0, false);
  if (fields.find("activation_situ_linear_beta")) {
    c.activation_situ_linear_beta = 1;
    fields.number("activation_situ_linear_beta", *c.activation_situ_linear_beta, 0, false);
  }
  fields.number("rms_norm_eps", c.rms_norm_eps, 0, false);
  fields.number("logit_scale", c.logit_scale, 0, false);
}

void read_rope(Fields& fields, DrafterConfig& c) {
  RopeParameters& rope = c.rope;
  fields.number("rope_theta", rope.rope_theta, 1, false);
  const char* key = fields.find("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const json* block = fields.find(key);
  if (c.mla_use_nope) return;
  if (!block || !block->is_object()) {
    fields.invalid("rope_parameters", block, "an object", "without it plain rope would be silently wrong");
    return;
  }
  Fields inner({block});
  inner.number("rope_theta", rope.rope_theta, 1, false);
  const char* type = inner.find("type") && !inner.find("rope_type") ? "type" : "rope_type";
  if (!inner.find(type))
    inner.invalid(type, nullptr, "default, yarn, deepseek_yarn", "without it plain rope would be silently wrong");
  inner.word(type, rope.rope_type, {"default", "yarn", "deepseek_yarn"});
  inner.number("factor", rope.factor, 1, true);
  inner.integer("original_max_position_embeddings", rope.original_max_position_embeddings, 1, std::int64_t{1} << 31);
  inner.number("beta_slow", rope.beta_slow, 0, false);
  inner.number("beta_fast", rope.beta_fast, 0, false);
  inner.number("mscale", rope.mscale, 0, true);
  inner.number("mscale_all_dim", rope.mscale_all_dim, 0, true);
  if (rope.beta_fast <= rope.beta_slow)
    inner.invalid("beta_fast", inner.find("beta_fast"), fmt::format("above beta_slow = {}", rope.beta_slow));
  if (rope.rope_type != "default" && !inner.find("original_max_position_embeddings"))
    inner.invalid("original_max_position_embeddings", nullptr, "required with " + rope.rope_type);
  for (Status& problem : inner.problems) {
    problem.argument = fmt::format("{}.{}", key, problem.argument);
    fields.problems.push_back(std::move(problem));
  }
}

void read_taps(Fields& fields, DrafterConfig& c) {
  c.target_hidden_size = c.hidden_size;
  fields.size("target_hidden_size", c.target_hidden_size, 8);
  fields.integer("target_num_hidden_layers", c.target_num_hidden_layers, 1, kLargestSize);
  const json* ids = fields.find("target_layer_ids");
  bool good = ids && ids->is_array() && !ids->empty();
  std::int64_t previous = -1;
  for (const json& id : good ? *ids : json::array()) {
    good = id.is_number_integer() && id > previous && id < c.target_num_hidden_layers;
    if (!good) break;
    previous = id.get<std::int64_t>();
    c.target_layer_ids.push_back(previous);
  }
  if (!good)
    fields.invalid("target_layer_ids", ids,
                   fmt::format("strictly ascending layers from 0 to {}", c.target_num_hidden_layers - 1));
  std::int64_t count = c.num_taps();
  fields.integer("num_target_layers", count, 1, kLargestSize);
  if (good && count != c.num_taps())
    fields.invalid("num_target_layers", fields.find("num_target_layers"),
                   fmt::format("{}, the length of target_layer_ids", c.num_taps()));
}

// 2.2 and the window of each layer.
void read_masks(Fields& fields, const json* dflash, DrafterConfig& c) {
  const auto layers = static_cast<std::size_t>(c.num_hidden_layers);
  std::vector<bool> sliding(layers, false);
  bool use_swa = false;
  fields.flag("use_swa", use_swa);
  if (const json* types = fields.find("layer_types")) {
    bool good = types->is_array() && types->size() == layers;
    for (std::size_t i = 0; good && i < layers; ++i) {
      good = (*types)[i] == "sliding_attention" || (*types)[i] == "full_attention";
      sliding[i] = (*types)[i] == "sliding_attention";
    }
    if (!good)
      fields.invalid("layer_types", types, fmt::format("{} times full_attention or sliding_attention", layers));
  } else {
    sliding.assign(layers, use_swa);
  }

  std::optional<bool> causal;
  fields.flag("is_causal", causal);
  if (!causal && dflash) {
    Fields inner({dflash});
    inner.flag("causal", causal);
    for (Status& problem : inner.problems) fields.problems.push_back(std::move(problem));
  }
  const char* window_key = fields.find("sliding_window") ? "sliding_window" : "swa_window_size";
  std::int64_t window = 0;
  fields.integer(window_key, window, 1, std::int64_t{1} << 31);
  if (!fields.find(window_key) && std::find(sliding.begin(), sliding.end(), true) != sliding.end())
    fields.invalid("sliding_window", nullptr, "the window of the sliding layers");

  const bool by_type = fields.find("layer_types") != nullptr;
  c.causal.resize(layers);
  c.sliding_window.resize(layers);
  for (std::size_t i = 0; i < layers; ++i) {
    c.causal[i] = causal.value_or(by_type && sliding[i]);
    if (sliding[i]) c.sliding_window[i] = window;
  }
}

}  // namespace

DrafterConfig DrafterConfig::from_json(std::string_view text, std::string_view overrides) {
  const json top = parse_json(text, kPlace, "config.json");
  const json over = parse_json(overrides, kPlace, "overrides");
  if (!top.is_object()) fail(StatusCode::kDataError, kPlace, "config.json", Fields::text_of(&top), "a JSON object");
  if (!over.is_object()) fail(StatusCode::kDataError, kPlace, "overrides", Fields::text_of(&over), "a JSON object");
  const auto nested = top.find("dflash_config");
  const json* dflash = nested != top.end() && nested->is_object() ? &*nested : nullptr;
  std::vector<const json*> scopes = {&over};
  if (dflash) scopes.push_back(dflash);
  scopes.push_back(&top);

  Fields fields(std::move(scopes));
  DrafterConfig config;
  read_family(fields);
  refuse_unserved(fields);
  read_sizes(fields, config);
  read_nope(fields, over, config);
  read_switches(fields, config);
  read_rope(fields, config);
  read_taps(fields, config);
  read_masks(fields, dflash, config);
  fields.refuse_unread(over);
  throw_if_any(fields.problems);

  const double trained = config.rope.factor * static_cast<double>(config.rope.original_max_position_embeddings);
  if (config.rope.rope_type != "default" && static_cast<double>(config.max_position_embeddings) > trained)
    log_warn(fmt::format("{}: max_position_embeddings = {} is above factor * original = {}", kPlace,
                         config.max_position_embeddings, trained));
  return config;
}

std::string DrafterConfig::to_json() const {
  nlohmann::ordered_json out = {
      {"architectures", {"K3DSparkModel"}},
      {"model_type", "k3_dspark"},
      {"hidden_size", hidden_size},
      {"intermediate_size", intermediate_size},
      {"num_hidden_layers", num_hidden_layers},
      {"num_attention_heads", num_attention_heads},
      {"q_lora_rank", q_lora_rank},
      {"kv_lora_rank", kv_lora_rank},
      {"qk_nope_head_dim", qk_nope_head_dim},
      {"qk_rope_head_dim", qk_rope_head_dim},
      {"v_head_dim", v_head_dim},
      {"mla_use_nope", mla_use_nope},
      {"mla_use_output_gate", mla_use_output_gate},
      {"hidden_act", hidden_act},
      {"activation_situ_beta", activation_situ_beta},
      {"rms_norm_eps", rms_norm_eps},
      {"vocab_size", vocab_size},
      {"rope_parameters",
       {{"rope_type", rope.rope_type},
        {"rope_theta", rope.rope_theta},
        {"factor", rope.factor},
        {"original_max_position_embeddings", rope.original_max_position_embeddings},
        {"beta_fast", rope.beta_fast},
        {"beta_slow", rope.beta_slow},
        {"mscale", rope.mscale},
        {"mscale_all_dim", rope.mscale_all_dim}}},
      {"is_neox_style", is_neox_style},
      {"max_position_embeddings", max_position_embeddings},
      {"target_layer_ids", target_layer_ids},
      {"num_target_layers", num_taps()},
      {"target_hidden_size", target_hidden_size},
      {"target_num_hidden_layers", target_num_hidden_layers},
      {"aux_hidden_stream", aux_hidden_stream},
      {"fc_norm", fc_norm},
      {"mask_token_id", mask_token_id},
      {"markov_rank", markov_rank},
      {"markov_head_type", "vanilla"},
      {"logit_scale", logit_scale},
  };
  if (activation_situ_linear_beta) out["activation_situ_linear_beta"] = *activation_situ_linear_beta;
  if (enable_confidence_head) out["enable_confidence_head"] = *enable_confidence_head;
  if (confidence_head_with_markov) out["confidence_head_with_markov"] = *confidence_head_with_markov;
  if (block_size) out["block_size"] = *block_size;

  // One switch where all layers agree; else only layer types can say it: the sliding layers are then the causal ones.
  const bool all = std::find(causal.begin(), causal.end(), false) == causal.end();
  const bool none = std::find(causal.begin(), causal.end(), true) == causal.end();
  if (all || none) out["is_causal"] = all;
  std::vector<std::string> types;
  for (std::size_t i = 0; i < sliding_window.size(); ++i) {
    const auto& window = sliding_window[i];
    if (!all && !none && causal[i] != window.has_value())
      fail(StatusCode::kUnsupported, kPlace, fmt::format("causal[{}]", i), causal[i] ? "true" : "false",
           "one value for all layers, or true in just the sliding ones", "a config.json cannot say another mix");
    if (window && out.contains("sliding_window") && out["sliding_window"] != *window)
      fail(StatusCode::kUnsupported, kPlace, fmt::format("sliding_window[{}]", i), std::to_string(*window),
           fmt::format("{}, as in the layer before", out["sliding_window"].dump()),
           "a config.json has one window for all sliding layers");
    if (window) out["sliding_window"] = *window;
    types.push_back(window ? "sliding_attention" : "full_attention");
  }
  if (out.contains("sliding_window")) out["layer_types"] = types;
  return out.dump(2) + "\n";
}

}  // namespace twostep
