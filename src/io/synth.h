// Synthetic drafter checkpoints: exact values from a formula, for machines that cannot download one
// (spec: drafter 11).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "twostep/drafter_config.h"

namespace twostep {

// How a random unit in [-1, 1) becomes a value.
enum class ValueKind : std::uint8_t {
  kLinear,     // bf16(fl32(unit * fl32(sqrt(3 / K))))
  kNorm,       // bf16(1 + unit / 4)
  kEmbedding,  // bf16(unit)
  kMarkovW1,   // bf16(fl32(unit * fl32(sqrt(3))))
  kFeature,    // bf16(fl32(unit * fl32(1.7))): hidden states of the target
  kZero,       // 0: the confidence bias
};

// The generator of all that is synthetic: its start for a name and seed, and number `index` of it, in [-1, 1), exact.
std::uint64_t synth_base(std::string_view name, std::uint64_t seed);
float synth_unit(std::uint64_t base, std::uint64_t index);

// out[i] = value first_index + i of the tensor `name`, BF16. Indices are row-major in the unsharded tensor, so
// that a shard is filled alone. `k` is the width of a kLinear weight, ignored for other kinds. Same bits for
// every thread count.
void fill(std::string_view name, std::uint64_t seed, std::uint64_t first_index, ValueKind kind, std::int64_t k,
          std::span<std::uint16_t> out);

ValueKind value_kind(std::string_view name, std::span<const std::int64_t> shape);

std::vector<std::string> synth_presets();               // tiny, tiny-causal, k3, k3.1
DrafterConfig synth_preset(const std::string& preset);  // throws kInvalidArgument for another name

struct SynthReport {
  std::vector<std::string> written;  // files
  std::vector<std::string> present;  // files that were already there, whole and of this config and seed
  std::uint64_t bytes = 0;           // of tensors written
};

// Writes config.json, model.safetensors and target.safetensors (embed_tokens.weight, lm_head.weight) to `folder`,
// which is created. A file that is already there with this config and seed is kept, also where an interrupted run
// left no config.json yet; another one is refused with kInvalidArgument before anything is written, unless `force`.
// So are sizes whose bytes overflow, in any case. `progress` gets bytes done and in all.
SynthReport write_synthetic(const DrafterConfig& config, std::uint64_t seed, const std::filesystem::path& folder,
                            bool force, const std::function<void(std::uint64_t, std::uint64_t)>& progress);

}  // namespace twostep
