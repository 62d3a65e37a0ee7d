#include "io/synth.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "core/bf16.h"
#include "core/check.h"
#include "core/hash.h"
#include "io/checkpoint.h"
#include "io/safetensors.h"

namespace twostep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPlace = "synth";
constexpr const char* kGenerator = "twostep synth 1";  // 1: the formula of this file

float scale_of(ValueKind kind, std::int64_t k) {
  switch (kind) {
    case ValueKind::kLinear: return static_cast<float>(std::sqrt(3.0 / static_cast<double>(k)));
    case ValueKind::kMarkovW1: return static_cast<float>(std::sqrt(3.0));
    case ValueKind::kFeature: return 1.7f;
    default: return 1.0f;
  }
}

struct SynthFile {
  fs::path path;
  std::vector<TensorHeader> tensors;
};

SynthFile file_of(const fs::path& path, const std::vector<ExpectedTensor>& tensors) {
  SynthFile file{path, {}};
  for (const auto& tensor : tensors) file.tensors.push_back({tensor.name, "BF16", tensor.shape});
  return file;
}

std::map<std::string, std::string> metadata_of(std::uint64_t seed) {
  return {{"generator", kGenerator}, {"seed", std::to_string(seed)}};
}

// Whole, and of this seed and these shapes. The values need no look: a file gets its name when it is complete.
bool holds(const SynthFile& file, std::uint64_t seed) {
  try {
    const TensorSet set = open_safetensors(file.path);
    return set.metadata == metadata_of(seed) && set.tensors.size() == file.tensors.size() &&
           std::all_of(file.tensors.begin(), file.tensors.end(), [&](const TensorHeader& wanted) {
             const auto found = set.tensors.find(wanted.name);
             return found != set.tensors.end() && found->second.dtype == wanted.dtype &&
                    found->second.shape == wanted.shape;
           });
  } catch (const Error&) {
    return false;
  }
}

[[noreturn]] void refuse_size(const TensorHeader& tensor) {
  fail(StatusCode::kInvalidArgument, kPlace, tensor.name, shape_text(tensor.shape), "a file of less than 2^63 bytes",
       "choose smaller sizes in the config");
}

// Both fail with the tensor at which the bytes of a file leave 63 bits.
std::uint64_t count_of(const TensorHeader& tensor) {
  std::int64_t bytes = 2;
  for (const std::int64_t size : tensor.shape)
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) refuse_size(tensor);
  return static_cast<std::uint64_t>(bytes / 2);
}

std::uint64_t bytes_of(const SynthFile& file) {
  std::int64_t bytes = 0;
  for (const auto& tensor : file.tensors)
    if (__builtin_add_overflow(bytes, static_cast<std::int64_t>(2 * count_of(tensor)), &bytes)) refuse_size(tensor);
  return static_cast<std::uint64_t>(bytes);
}

void write(const SynthFile& file, std::uint64_t seed, const std::function<void(std::uint64_t)>& progress) {
  constexpr std::uint64_t kChunk = 8 << 20;  // values: 16 MiB, so that memory use does not grow with the model
  SafetensorsWriter writer(file.path, file.tensors, metadata_of(seed));
  std::vector<std::uint16_t> chunk;
  for (const auto& tensor : file.tensors) {
    const ValueKind kind = value_kind(tensor.name, tensor.shape);
    const std::uint64_t count = count_of(tensor);
    for (std::uint64_t first = 0; first < count; first += kChunk) {
      chunk.resize(std::min(kChunk, count - first));
      fill(tensor.name, seed, first, kind, tensor.shape.back(), chunk);
      writer.append(std::as_bytes(std::span(chunk)));
      progress(2 * chunk.size());
    }
  }
  writer.finish();
}

DrafterConfig tiny(bool causal) {
  DrafterConfig c;
  c.hidden_size = c.target_hidden_size = 256;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 4;
  c.q_lora_rank = 128;
  c.kv_lora_rank = 64;
  c.qk_nope_head_dim = 32;
  c.qk_rope_head_dim = 16;
  c.v_head_dim = 32;
  c.intermediate_size = 512;
  c.vocab_size = 512;
  c.markov_rank = 32;
  c.target_layer_ids = {1, 3};
  c.target_num_hidden_layers = 4;
  c.mask_token_id = 511;
  c.rope = {"yarn", 50000, 8, 256, 32, 1, 1, 1};
  c.max_position_embeddings = 2048;
  c.causal.assign(2, causal);
  return c;
}

// 64 heads, rank 256, non-causal; or 96, 512, causal. Layer ids and mask token are placeholders within range.
DrafterConfig k3(std::int64_t heads, std::int64_t markov_rank, bool causal) {
  DrafterConfig c;
  c.num_attention_heads = heads;
  c.markov_rank = markov_rank;
  c.target_layer_ids = {1, 23, 46, 68, 90};
  c.mask_token_id = c.vocab_size - 1;
  c.rope = {"yarn", 50000, 32, 32768, 32, 1, 1, 1};
  c.causal.assign(static_cast<std::size_t>(c.num_hidden_layers), causal);
  return c;
}

// Whether there is a file to keep or to compare; without `force` one that cannot be read is refused for what it is.
bool there(const fs::path& path, bool force) {
  std::error_code error;
  const fs::file_type type = fs::status(path, error).type();
  if (type == fs::file_type::not_found) return false;
  if (!error && (force || ::access(path.c_str(), R_OK) == 0)) return true;
  fail(StatusCode::kInvalidArgument, kPlace, "out",
       path.string() + ": " + (error ? error.message() : std::strerror(errno)), "a folder whose files can be read");
}

}  // namespace

std::uint64_t synth_base(std::string_view name, std::uint64_t seed) {
  return fnv1a64(name) + seed * 0xd1342543de82ef95u;
}

float synth_unit(std::uint64_t base, std::uint64_t index) {
  const std::uint64_t bits = mix64(base + (index + 1) * 0x9e3779b97f4a7c15u);
  return static_cast<float>(bits >> 40) * 0x1p-23f - 1.0f;  // 24 bits: exact
}

void fill(std::string_view name, std::uint64_t seed, std::uint64_t first_index, ValueKind kind, std::int64_t k,
          std::span<std::uint16_t> out) {
  const std::uint64_t base = synth_base(name, seed);
  const float scale = scale_of(kind, k);
  const auto count = static_cast<std::int64_t>(out.size());
  std::uint16_t* const data = out.data();
#pragma omp parallel for schedule(static) if (count > (1 << 16))
  for (std::int64_t i = 0; i < count; ++i) {
    const float unit = synth_unit(base, first_index + static_cast<std::uint64_t>(i));
    if (kind == ValueKind::kZero) data[i] = 0;
    else if (kind == ValueKind::kNorm)
      data[i] = double_to_bf16(1.0 + static_cast<double>(unit) / 4.0);  // the sum does not fit FP32
    else data[i] = float_to_bf16(unit * scale);
  }
}

ValueKind value_kind(std::string_view name, std::span<const std::int64_t> shape) {
  if (name == "confidence_head.proj.bias") return ValueKind::kZero;
  if (name == "embed_tokens.weight") return ValueKind::kEmbedding;
  if (name == "markov_head.markov_w1.weight") return ValueKind::kMarkovW1;
  return shape.size() == 1 ? ValueKind::kNorm : ValueKind::kLinear;
}

std::vector<std::string> synth_presets() { return {"tiny", "tiny-causal", "k3", "k3.1"}; }

DrafterConfig synth_preset(const std::string& preset) {
  DrafterConfig config;
  if (preset == "tiny") config = tiny(false);
  else if (preset == "tiny-causal") config = tiny(true);
  else if (preset == "k3") config = k3(64, 256, false);
  else if (preset == "k3.1") config = k3(96, 512, true);
  else
    fail(StatusCode::kInvalidArgument, kPlace, "preset", preset, fmt::format("{}", fmt::join(synth_presets(), ", ")));
  config.sliding_window.resize(config.causal.size());
  config.enable_confidence_head = true;
  config.confidence_head_with_markov = true;
  return config;
}

SynthReport write_synthetic(const DrafterConfig& config, std::uint64_t seed, const fs::path& folder, bool force,
                            const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    fail(StatusCode::kInvalidArgument, kPlace, "out", folder.string() + ": " + error.message(), "a folder to write to");

  const fs::path config_file = folder / "config.json";
  const std::string config_text = config.to_json();
  const bool config_there = there(config_file, force);
  const bool config_same = config_there && read_text(config_file, kPlace) == config_text;
  std::vector<fs::path> others;
  if (config_there && !config_same) others.push_back(config_file);

  SynthReport report;
  std::vector<SynthFile> to_write;
  for (const SynthFile& file : {file_of(folder / "model.safetensors", expected_tensors(config, false)),
                                file_of(folder / "target.safetensors", target_tensors(config))}) {
    if (!there(file.path, force)) {
      to_write.push_back(file);
    } else if ((config_same || !config_there) && holds(file, seed)) {  // config.json comes last: none, interrupted
      report.present.push_back(file.path.string());
    } else {
      others.push_back(file.path);
      to_write.push_back(file);
    }
  }
  if (!others.empty() && !force)
    fail(StatusCode::kInvalidArgument, kPlace, "out", others.front().string() + " exists with another content",
         "an empty folder, or one of this config and seed", "choose another folder, or overwrite with --force");

  // Each below 2^63, so that the sum of two fits.
  for (const auto& file : to_write) report.bytes += bytes_of(file);
  std::uint64_t done = 0;
  for (const auto& file : to_write) {
    write(file, seed, [&](std::uint64_t bytes) { progress(done += bytes, report.bytes); });
    report.written.push_back(file.path.string());
  }
  if (config_same) {
    report.present.push_back(config_file.string());
  } else {
    write_text(config_file, config_text);
    report.written.push_back(config_file.string());
  }
  return report;
}

}  // namespace twostep
