// DrafterWeights: files, or memory of the caller, behind one Checkpoint.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/bf16.h"
#include "core/check.h"
#include "io/checkpoint.h"
#include "io/problems.h"
#include "twostep/drafter.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "drafter.weights";

StoredTensor stored(const std::string& name, const TensorView& view) {
  const auto refuse = [&](StatusCode code, std::string value, const char* accepted) {
    fail(code, kPlace, name, std::move(value), accepted);
  };
  if (view.device.is_cuda()) refuse(StatusCode::kWrongDevice, to_string(view.device), "cpu");
  if (view.rank < 1 || view.rank > 2)
    refuse(StatusCode::kInvalidArgument, "rank " + std::to_string(view.rank), "1 or 2 dimensions");
  StoredTensor out;
  out.name = name;
  out.dtype = dtype_name(view.dtype);
  out.file = "memory";
  out.data = static_cast<const std::byte*>(view.data);
  std::int64_t count = 1;
  for (int i = view.rank; i-- > 0;) {
    const auto at = static_cast<std::size_t>(i);
    if (view.shape[at] > 1 && view.stride[at] != count)
      refuse(StatusCode::kBadLayout, to_string(view), "dense tensors");
    if (view.shape[at] < 1) refuse(StatusCode::kInvalidArgument, to_string(view), "sizes of 1 or more");
    if (__builtin_mul_overflow(count, view.shape[at], &count))
      refuse(StatusCode::kInvalidArgument, to_string(view), "fewer than 2^63 elements");
    out.shape.insert(out.shape.begin(), view.shape[at]);
  }
  if (!view.data) refuse(StatusCode::kInvalidArgument, "null", "memory of the tensor");
  out.bytes = static_cast<std::uint64_t>(count) * dtype_size(view.dtype);
  return out;
}

bool finite(const StoredTensor& tensor) {
  const bool f32 = tensor.dtype == "F32";
  const std::size_t size = f32 ? 4 : 2;
  for (std::uint64_t i = 0; i < tensor.bytes / size; ++i) {
    float value = 0;
    std::uint16_t bits = 0;
    if (f32) std::memcpy(&value, tensor.data + 4 * i, 4);
    else std::memcpy(&bits, tensor.data + 2 * i, 2);
    if (!std::isfinite(f32 ? value : bf16_to_float(bits))) return false;
  }
  return true;
}

std::shared_ptr<const Checkpoint> checked(Checkpoint checkpoint, const DrafterWeights::Options& options) {
  std::vector<Status> problems;
  if (options.check_finite)
    for (const auto& [name, tensor] : checkpoint.tensors().tensors)
      if (!finite(tensor))
        problems.push_back(refusal(StatusCode::kDataError, kPlace, tensor.file + " " + name, "NaN or infinity",
                                   "finite weights", "the checkpoint is damaged, or its training diverged"));
  throw_if_any(problems);
  return std::make_shared<const Checkpoint>(std::move(checkpoint));
}

}  // namespace

DrafterWeights DrafterWeights::load(const std::filesystem::path& folder, const Options& options) {
  return DrafterWeights(checked(Checkpoint::open(folder, options.overrides, options.embedding_lent), options));
}

DrafterWeights DrafterWeights::from_memory(const DrafterConfig& config,
                                           const std::map<std::string, TensorView>& tensors, const Options& options) {
  const auto layers = static_cast<std::size_t>(std::max<std::int64_t>(config.num_hidden_layers, 0));
  if (config.causal.size() != layers || config.sliding_window.size() != layers)
    fail(StatusCode::kInvalidArgument, kPlace, "config.causal, config.sliding_window",
         fmt::format("{}, {} entries", config.causal.size(), config.sliding_window.size()),
         fmt::format("{}, one per layer", layers), "start from DrafterConfig::from_json");
  DrafterConfig checked_config = DrafterConfig::from_json(config.to_json(), options.overrides);  // applies every rule
  TensorSet drafter, target;
  for (const auto& [name, view] : tensors) {
    TensorSet& set = name == "lm_head.weight" || name == "embed_tokens.weight" ? target : drafter;
    set.tensors.emplace(name, stored(name, view));
  }
  DrafterConfig resolved = options.overrides == "{}" ? config : std::move(checked_config);
  return DrafterWeights(
      checked(Checkpoint(std::move(resolved), std::move(drafter), std::move(target), "memory", options.embedding_lent),
              options));
}

const DrafterConfig& DrafterWeights::config() const { return checkpoint_->config(); }

}  // namespace twostep
