// The config of a DSpark drafter of the MLA family (spec: drafter 2).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace twostep {

struct RopeParameters {
  std::string rope_type = "default";  // default | yarn | deepseek_yarn
  double rope_theta = 50000;
  double factor = 1;
  std::int64_t original_max_position_embeddings = 1;
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 1;
  double mscale_all_dim = 0;
};

// Fields are spelled as in config.json. Sizes are in elements; 64-bit, so that products need no care.
struct DrafterConfig {
  std::int64_t hidden_size = 7168;
  std::int64_t intermediate_size = 14336;
  std::int64_t num_hidden_layers = 5;
  std::int64_t num_attention_heads = 64;
  std::int64_t q_lora_rank = 1536;
  std::int64_t kv_lora_rank = 512;
  std::int64_t qk_nope_head_dim = 128;
  std::int64_t qk_rope_head_dim = 64;
  std::int64_t v_head_dim = 128;
  bool mla_use_nope = false;         // true: no rope; the rope block is not read
  bool mla_use_output_gate = false;  // true: g_proj
  std::string hidden_act = "silu";   // silu | situ
  double activation_situ_beta = 4.0;
  std::optional<double> activation_situ_linear_beta;  // none: linear up branch
  double rms_norm_eps = 1e-5;
  std::int64_t vocab_size = 163840;
  RopeParameters rope;
  bool is_neox_style = false;  // false: pairs (0,1), (2,3), ..; true: pairs (i, i+d/2)
  std::int64_t max_position_embeddings = 1048576;
  std::vector<std::int64_t> target_layer_ids;  // the taps, ascending
  std::int64_t target_hidden_size = 7168;
  std::int64_t target_num_hidden_layers = 93;
  std::string aux_hidden_stream = "prefix";  // prefix | attn_res
  bool fc_norm = false;
  std::int64_t mask_token_id = 0;
  std::int64_t markov_rank = 256;
  std::optional<bool> enable_confidence_head;       // none: as the tensor says
  std::optional<bool> confidence_head_with_markov;  // none: as the tensor's width says
  std::optional<std::int64_t> block_size;
  std::vector<bool> causal;                                 // per layer, by 2.2
  std::vector<std::optional<std::int64_t>> sliding_window;  // per layer; none: the whole context
  double logit_scale = 1.0;

  std::int64_t num_taps() const { return static_cast<std::int64_t>(target_layer_ids.size()); }

  // Reads config.json. A key in `dflash_config` wins over the same key at top level; a key in `overrides` (a
  // JSON object) wins over both. Unknown keys of the config are ignored; an override of no field is a broken rule.
  // mla_use_nope is refused unless the overrides have "allow_nope": true, which means nothing in a config.json.
  // Throws one Error that lists every broken rule, place "drafter.config": kInvalidArgument, or kUnsupported where
  // all of them are only not served. Text that is no JSON is kDataError. Rules that need the caller's t and k are
  // checked where those are known.
  static DrafterConfig from_json(std::string_view text, std::string_view overrides = "{}");

  // A config.json that from_json reads back as this config. Throws kUnsupported where none can: layers of several
  // windows, or of both masks where the sliding ones are not just the causal ones.
  std::string to_json() const;
};

}  // namespace twostep
