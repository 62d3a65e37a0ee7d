// A drafter checkpoint: its config, and views of its mapped tensors (spec: drafter 3).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"
#include "twostep/drafter_config.h"

namespace twostep {

struct ExpectedTensor {
  std::string name;  // without a leading "model."
  std::vector<std::int64_t> shape;
  std::string fields;       // the config fields that give the shape
  bool may_be_f32 = false;  // norms and the confidence head; all else is BF16
};

// The table of 3.1 for a config. The confidence head is in it where the config says that there is one.
std::vector<ExpectedTensor> expected_tensors(const DrafterConfig& config, bool with_embedding);

// Tensors that the target lends: embed_tokens.weight and lm_head.weight, each [vocab_size, hidden_size].
std::vector<ExpectedTensor> target_tensors(const DrafterConfig& config);

class Checkpoint {
 public:
  // Opens config.json, the drafter's safetensors and, where present, target.safetensors of `folder`. Nothing is
  // copied; pages are read when they are used. `overrides` as DrafterConfig::from_json.
  static Checkpoint open(const std::filesystem::path& folder, std::string_view overrides = "{}",
                         bool embedding_lent = false);

  // The same from sets that are already open. A leading "model." is removed from the drafter's names. Throws one
  // Error that lists every missing, unexpected and wrongly shaped tensor, with file, offset, found and expected:
  // kDataError, or kUnsupported where dtypes or scale tensors are the only fault. An unset confidence field of
  // the config is set as the tensors say. The embedding may be missing where `embedding_lent` or `target` has it.
  Checkpoint(DrafterConfig config, TensorSet drafter, TensorSet target, std::string source,
             bool embedding_lent = false);

  const DrafterConfig& config() const { return config_; }
  const TensorSet& tensors() const { return tensors_; }  // of the drafter, and what the target lends

  // A tensor by its name of 3.1. Throws kDataError where the checkpoint has none.
  const StoredTensor& tensor(const std::string& name) const;

  // Before weights are read. Throws kDataError where a file was cut or written since it was opened.
  void require_unchanged() const;

 private:
  DrafterConfig config_;
  TensorSet tensors_;
  std::string source_;
};

}  // namespace twostep
