// The models that the draft step is tested on. The emulated kernels are compiled for them.
#pragma once

#include "drafter/device_phases.h"
#include "io/synth.h"

namespace twostep::step_test {

struct Case {
  const char* name;
  DrafterConfig config;
  DrafterLimits limits;
  DrafterShard shard;
  // The GPU that the emulator plays: several parts of a context, several CTAs of a pick.
  int sms = 8;
  std::int64_t smem_per_block = 227 << 10;
  bool wgmma = false;
};

inline Case tiny_case() {  // non-causal, one sliding layer; FP32 draft logits
  Case c{"Tiny", synth_preset("tiny"), {}, {}};
  c.config.sliding_window[0] = 70;
  c.limits.num_draft_tokens = 3;
  c.limits.request_counts = {1, 4};
  c.limits.mode = DraftMode::kProbabilistic;
  c.limits.max_len = 256;
  c.limits.max_ingest_rows = 256;
  return c;
}

inline Case switched_case() {  // causal, every switch, the second rank of two; greedy drafts of more rows than one tile
  Case c{"Switched", synth_preset("tiny-causal"), {}, {2, 1}};
  c.config.mla_use_output_gate = true;
  c.config.hidden_act = "situ";
  c.config.activation_situ_linear_beta = 3;
  c.config.fc_norm = true;
  c.config.is_neox_style = true;
  c.config.logit_scale = 0.25;
  c.limits.num_draft_tokens = 5;
  c.limits.request_counts = {2, 18};
  c.limits.max_len = 256;
  c.limits.max_ingest_rows = 256;
  return c;
}

// Eleven tokens of four heads: two query tiles; BF16 draft logits. On one SM, a context in one part, and a vocabulary
// of several chunks of a pick, the last one ragged, of a rank that its slices share unevenly.
inline Case long_case() {
  Case c{"Long", synth_preset("tiny"), {}, {}};
  c.config.vocab_size = 1112;  // half of a tile of the last pick; no row count of such a head is strict on a GPU
  c.config.markov_rank = 168;
  c.limits.strict = false;
  c.sms = 1;
  c.limits.num_draft_tokens = 11;
  c.limits.request_counts = {1, 2};
  c.limits.mode = DraftMode::kProbabilistic;
  c.limits.draft_logits = DType::kBF16;
  c.limits.max_len = 256;
  c.limits.max_ingest_rows = 256;
  return c;
}

// Latents as wide as the attention of sm_90a likes them, 52 query rows: two of its tiles; one sliding layer.
inline Case wide_case() {
  Case c{"Wide", synth_preset("tiny"), {}, {}};
  c.config.kv_lora_rank = 256;
  c.config.qk_rope_head_dim = 64;
  c.config.sliding_window[0] = 70;
  c.sms = 4;
  c.wgmma = true;
  c.limits.num_draft_tokens = 13;
  c.limits.request_counts = {1, 3};
  c.limits.mode = DraftMode::kProbabilistic;
  c.limits.max_len = 256;
  c.limits.max_ingest_rows = 256;
  return c;
}

inline Case wide_causal_case() {  // a context in one part
  Case c{"WideCausal", synth_preset("tiny-causal"), {}, {}};
  c.config.kv_lora_rank = 128;
  c.config.qk_rope_head_dim = 128;
  c.sms = 1;
  c.wgmma = true;
  c.limits.num_draft_tokens = 5;
  c.limits.request_counts = {2, 18};
  c.limits.max_len = 256;
  c.limits.max_ingest_rows = 256;
  return c;
}

// So many heads that the attention of sm_90a has wide tiles of queries: 264 query rows are four of them and a bit. One
// layer causal; with two requests a context is in one part.
inline Case many_heads_case() {
  Case c{"ManyHeads", synth_preset("tiny"), {}, {}};
  c.config.causal = {true, false};
  c.config.num_attention_heads = 24;
  c.config.kv_lora_rank = 256;
  c.config.qk_rope_head_dim = 64;
  c.config.sliding_window[0] = 70;
  c.sms = 16;
  c.wgmma = true;
  c.limits.strict = false;
  c.limits.num_draft_tokens = 11;
  c.limits.request_counts = {1, 2};
  c.limits.max_len = 256;
  c.limits.max_ingest_rows = 256;
  return c;
}

inline StepGpu gpu_of(const Case& c) { return {c.sms, c.smem_per_block, c.wgmma}; }

inline StepKernelModel kernel_model(const Case& c) {
  return {step_model(c.config, c.limits, c.shard), c.config.mla_use_output_gate, c.config.fc_norm};
}

}  // namespace twostep::step_test
