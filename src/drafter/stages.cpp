#include "drafter/stages.h"

namespace twostep {

const char* stage_name(Stage stage) {
  constexpr std::array<const char*, kNumStages> kNames = {
      "taps",    "context_proj", "context_norm", "context_kv_proj", "context_cache", "queries",    "embed",  "qkv_a",
      "latents", "q_b",          "absorb",       "attention",       "g_proj",        "values",     "o_proj", "norms",
      "gate_up", "activation",   "down",         "lm_head",         "sampling",      "confidence", "verify",
  };
  return kNames[static_cast<std::size_t>(stage)];
}

std::int64_t stage_bytes(Stage stage, const StepModel& m, bool gate, std::int64_t requests, std::int64_t keys,
                         int markov_reads) {
  const auto elements = [&]() -> std::int64_t {
    switch (stage) {
      case Stage::kContextProj: return m.context_rows * m.taps * m.target_hidden;
      case Stage::kContextKv: return m.layers * m.cache_width() * m.hidden;
      case Stage::kQkvA: return m.layers * (m.q_lora + m.cache_width()) * m.hidden;
      case Stage::kQB: return m.layers * m.heads * m.head_width() * m.q_lora;
      case Stage::kAbsorb: return m.layers * m.heads * m.nope * m.kv_lora;
      case Stage::kAttention: return m.layers * requests * keys * m.cache_width();
      case Stage::kGate: return gate ? m.layers * m.heads * m.v * m.hidden : 0;
      case Stage::kValues: return m.layers * m.heads * m.v * m.kv_lora;
      case Stage::kOProj: return m.layers * m.hidden * m.heads * m.v;
      case Stage::kGateUp: return m.layers * 2 * m.inner * m.hidden;
      case Stage::kDown: return m.layers * m.hidden * m.inner;
      case Stage::kLmHead: return m.shard_vocab * m.hidden;
      case Stage::kSampling: return markov_reads * m.shard_vocab * m.markov_rank;
      default: return 0;
    }
  };
  return 2 * elements();
}

}  // namespace twostep
