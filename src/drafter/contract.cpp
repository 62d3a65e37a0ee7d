#include "drafter/contract.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

#include "core/check.h"
#include "core/log.h"
#include "drafter/linears.h"
#include "drafter/rope.h"
#include "io/problems.h"

namespace twostep {
namespace {

constexpr const char* kPrepare = "drafter.prepare";

// Sizes a view must have; -1: any.
using Sizes = std::initializer_list<std::int64_t>;

std::string sizes_text(Sizes sizes) {
  std::string text;
  for (const std::int64_t size : sizes) text += (text.empty() ? "[" : ", ") + (size < 0 ? "any" : std::to_string(size));
  return text + "]";
}

// Dtype, device, shape, alignment and a contiguous last dimension. `remedy` of a wrong shape.
Status check_view(const char* place, const char* name, const TensorView& view, DType dtype, Sizes sizes, Device device,
                  const char* remedy) {
  const auto refuse = [&](StatusCode code, const char* field, std::string value, std::string accepted,
                          std::string with) {
    return refusal(code, place, std::string(name) + field, std::move(value), std::move(accepted), std::move(with));
  };
  const auto rank = static_cast<int>(sizes.size());
  if (view.rank != rank)
    return refuse(StatusCode::kInvalidArgument, ".rank", std::to_string(view.rank), std::to_string(rank),
                  "give a view of shape " + sizes_text(sizes));
  if (view.dtype != dtype)
    return refuse(StatusCode::kUnsupported, ".dtype", dtype_name(view.dtype), dtype_name(dtype),
                  "keep the values in that type");
  if (view.device != device)
    return refuse(StatusCode::kWrongDevice, ".device", to_string(view.device), to_string(device),
                  "a drafter's memory is all on the device of its cache");
  bool empty = false;
  for (int i = 0; i < rank; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const std::int64_t wanted = sizes.begin()[i];
    if (view.shape[at] < 0 || (wanted >= 0 && view.shape[at] != wanted))
      return refuse(StatusCode::kInvalidArgument, ".shape", to_string(view), sizes_text(sizes), remedy);
    empty |= view.shape[at] == 0;
  }
  if (empty) return {};
  if (!view.data)
    return refuse(StatusCode::kInvalidArgument, ".data", "null", "memory of the view",
                  "give its address, or a size of 0");
  if (reinterpret_cast<std::uintptr_t>(view.data) % dtype_size(dtype) != 0)
    return refuse(StatusCode::kBadLayout, ".data", "a misaligned address",
                  fmt::format("multiples of {} bytes", dtype_size(dtype)), "begin at an element of an array");
  const auto last = static_cast<std::size_t>(rank - 1);
  if (view.shape[last] > 1 && view.stride[last] != 1)
    return refuse(StatusCode::kBadLayout, " last stride", std::to_string(view.stride[last]), "1",
                  "make the last dimension contiguous");
  return {};
}

std::int64_t stride_of(const TensorView& view, std::size_t dimension, std::int64_t dense) {
  return view.shape[dimension] > 1 ? view.stride[dimension] : dense;
}

// Bytes from the first element of a view to behind its last.
struct Span {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};
Span span_of(const TensorView& view) {
  std::int64_t last = 0;
  for (int i = 0; i < view.rank; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (view.shape[at] == 0) return {};
    if (view.shape[at] > 1) last += (view.shape[at] - 1) * view.stride[at];
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(view.data);
  return {begin, begin + static_cast<std::uintptr_t>(last + 1) * dtype_size(view.dtype)};
}

struct Named {
  const char* name;
  const TensorView* view;
};

// Each output against the inputs and the outputs before it.
Status check_apart(const char* place, std::span<const Named> outputs, std::span<const Named> inputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Span out = span_of(*outputs[i].view);
    const auto meets = [&](const Named& other) {
      const Span span = span_of(*other.view);
      return out.begin < span.end && span.begin < out.end;
    };
    for (const auto others : {inputs, outputs.first(i)})
      for (const Named& other : others)
        if (meets(other))
          return refusal(StatusCode::kOverlap, place, outputs[i].name, to_string(*outputs[i].view),
                         std::string("memory that does not meet ") + other.name, "give each output its own memory");
  }
  return {};
}

// Whether the pages of two layers meet. Layers may lie between each other's pages, as in one [pages, layers, rows,
// width].
bool pages_meet(const TensorView& a, const TensorView& b, const CacheShape& shape, std::int64_t width) {
  const auto from = reinterpret_cast<std::intptr_t>(a.data), to = reinterpret_cast<std::intptr_t>(b.data);
  const std::int64_t page = 2 * shape.page_rows * width, stride = 2 * shape.page_stride;
  const std::int64_t distance = std::abs(to - from), pages = distance / stride, rest = distance % stride;
  return (pages < shape.pages && rest < page) || (pages + 1 < shape.pages && stride - rest < page);
}

// `otherwise`: what else is accepted, before the range.
void check_range(std::vector<Status>& problems, const char* argument, std::int64_t value, std::int64_t low,
                 std::int64_t high, const char* remedy, const char* otherwise = "") {
  if (value < low || value > high)
    problems.push_back(refusal(StatusCode::kInvalidArgument, kPrepare, argument, std::to_string(value),
                               fmt::format("{}{} to {}", otherwise, low, high), remedy));
}

}  // namespace

StepModel step_model(const DrafterConfig& c, const DrafterLimits& limits, DrafterShard shard) {
  StepModel m;
  m.hidden = c.hidden_size;
  m.target_hidden = c.target_hidden_size;
  m.taps = c.num_taps();
  m.layers = c.num_hidden_layers;
  m.heads = c.num_attention_heads / shard.ranks;
  m.q_lora = c.q_lora_rank;
  m.kv_lora = c.kv_lora_rank;
  m.nope = c.qk_nope_head_dim;
  m.rope = c.qk_rope_head_dim;
  m.v = c.v_head_dim;
  m.inner = c.intermediate_size / shard.ranks;
  m.context_rows = context_shard_rows(c, shard.ranks);
  m.vocab = c.vocab_size;
  m.shard_vocab = c.vocab_size / shard.ranks;
  m.first_token = shard.rank * m.shard_vocab;
  m.markov_rank = c.markov_rank;
  m.mask_token = c.mask_token_id;
  m.max_len = limits.max_len;
  m.k = limits.num_draft_tokens;
  m.eps = static_cast<float>(c.rms_norm_eps);
  const Rope rope = make_rope(c);
  m.softmax_scale = rope.softmax_scale;
  m.rope_amplitude = rope.amplitude;
  m.logit_scale = static_cast<float>(c.logit_scale);
  m.neox = c.is_neox_style;
  m.situ = c.hidden_act == "situ";
  m.situ_beta = static_cast<float>(c.activation_situ_beta);
  m.situ_linear_beta = static_cast<float>(c.activation_situ_linear_beta.value_or(0));
  m.strict = limits.strict;
  m.probabilistic = limits.mode == DraftMode::kProbabilistic;
  m.draft_logits_bf16 = limits.draft_logits == DType::kBF16;
  m.confidence_with_markov = c.confidence_head_with_markov.value_or(false);
  return m;
}

DrafterLimits check_limits(const DrafterConfig& config, const DrafterLimits& limits) {
  std::vector<Status> problems;
  DrafterLimits out = limits;
  std::sort(out.request_counts.begin(), out.request_counts.end());
  out.request_counts.erase(std::unique(out.request_counts.begin(), out.request_counts.end()), out.request_counts.end());
  if (out.request_counts.empty())
    problems.push_back(refusal(StatusCode::kInvalidArgument, kPrepare, "limits.request_counts", "empty",
                               "one count or more", "name the padded batch sizes of the steps"));
  for (const int count : out.request_counts)
    check_range(problems, "limits.request_counts", count, 1, kMaxRequests, "serve more requests by several steps");

  check_range(problems, "limits.num_draft_tokens", limits.num_draft_tokens, 1, kMaxDraftTokens,
              "drafters are trained for 7 or so");
  if (config.block_size && limits.num_draft_tokens > *config.block_size)
    problems.push_back(refusal(
        StatusCode::kInvalidArgument, kPrepare, "limits.num_draft_tokens", std::to_string(limits.num_draft_tokens),
        fmt::format("up to block_size = {}", *config.block_size), "the drafter was trained for blocks of that size"));

  if (out.max_len == 0) out.max_len = config.max_position_embeddings;
  check_range(problems, "limits.max_len", out.max_len, std::int64_t{limits.num_draft_tokens} + 1,
              config.max_position_embeddings, "at most max_position_embeddings, and more than num_draft_tokens",
              "0, which is the largest, or ");
  if (problems.empty() && out.max_ingest_rows == 0)
    out.max_ingest_rows = std::int64_t{out.request_counts.back()} * (out.num_draft_tokens + 1);
  if (problems.empty() || limits.max_ingest_rows != 0)
    check_range(problems, "limits.max_ingest_rows", out.max_ingest_rows, 1, kMaxIngestRows,
                "ingest long prompts in parts", "0, the rows of the largest step, or ");

  if (limits.draft_logits != DType::kF32 && limits.draft_logits != DType::kBF16)
    problems.push_back(refusal(StatusCode::kUnsupported, kPrepare, "limits.draft_logits",
                               dtype_name(limits.draft_logits), "F32 or BF16", "BF16 takes half the memory"));
  const auto k = static_cast<std::size_t>(std::max(limits.num_draft_tokens, 0));
  const bool good = limits.calibration.empty() || limits.calibration.size() == k;
  if (!good || !std::all_of(limits.calibration.begin(), limits.calibration.end(),
                            [](float t) { return std::isfinite(t) && t > 0; }))
    problems.push_back(refusal(StatusCode::kInvalidArgument, kPrepare, "limits.calibration",
                               fmt::format("[{}]", fmt::join(limits.calibration, ", ")),
                               fmt::format("none, or {} finite values above 0", k),
                               "one temperature per draft; 1 changes nothing"));
  throw_if_any(problems);
  if (!config.block_size && limits.num_draft_tokens > 7)
    log_warn(fmt::format("{}: num_draft_tokens = {}; the config has no block_size, drafters are trained for up to 7",
                         kPrepare, limits.num_draft_tokens));
  if (out.calibration.empty()) out.calibration.assign(k, 1.0f);
  return out;
}

void check_target(const DrafterConfig& config, const DrafterTarget& target) {
  std::vector<Status> problems;
  const auto differs = [&](const char* argument, std::string value, std::string accepted) {
    problems.push_back(refusal(StatusCode::kInvalidArgument, kPrepare, argument, std::move(value), std::move(accepted),
                               "the drafter was trained on these; another choice only lowers acceptance, in silence"));
  };
  if (target.tap_layers != config.target_layer_ids)
    differs("target.tap_layers", fmt::format("[{}]", fmt::join(target.tap_layers, ", ")),
            fmt::format("target_layer_ids = [{}]", fmt::join(config.target_layer_ids, ", ")));
  if (target.stream != config.aux_hidden_stream)
    differs("target.stream", "\"" + target.stream + "\"",
            fmt::format("aux_hidden_stream = \"{}\"", config.aux_hidden_stream));
  if (target.hidden_size && *target.hidden_size != config.target_hidden_size)
    differs("target.hidden_size", std::to_string(*target.hidden_size),
            fmt::format("target_hidden_size = {}", config.target_hidden_size));
  if (target.num_hidden_layers && *target.num_hidden_layers != config.target_num_hidden_layers)
    differs("target.num_hidden_layers", std::to_string(*target.num_hidden_layers),
            fmt::format("target_num_hidden_layers = {}", config.target_num_hidden_layers));
  if (config.target_layer_ids.size() > kMaxTaps)
    problems.push_back(refusal(StatusCode::kUnsupported, kPrepare, "target_layer_ids",
                               fmt::format("{} taps", config.num_taps()), fmt::format("up to {}", kMaxTaps),
                               "use a drafter of fewer taps"));
  throw_if_any(problems);
}

CacheShape check_cache(const DrafterConfig& config, const std::vector<TensorView>& cache, Device device) {
  constexpr const char* kRemedy = "give each layer [pages, page rows, kv_lora_rank + qk_rope_head_dim]";
  const std::int64_t width = config.kv_lora_rank + config.qk_rope_head_dim;
  if (static_cast<std::int64_t>(cache.size()) != config.num_hidden_layers)
    fail(StatusCode::kInvalidArgument, kPrepare, "memory.cache", fmt::format("{} views", cache.size()),
         fmt::format("{}, one per layer", config.num_hidden_layers), kRemedy);
  CacheShape shape;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    const TensorView& view = cache[layer];
    const std::string name = fmt::format("memory.cache[{}]", layer);
    throw_if_error(check_view(kPrepare, name.c_str(), view, DType::kBF16, {-1, -1, width}, device, kRemedy));
    if (view.shape[0] < 2 || view.shape[1] < 1)
      fail(StatusCode::kInvalidArgument, kPrepare, name, to_string(view), "2 pages or more, of 1 row or more",
           "page 0 is never used");
    const CacheShape this_shape{view.shape[0], view.shape[1], stride_of(view, 0, view.shape[1] * width)};
    if (stride_of(view, 1, width) != width || this_shape.page_stride < view.shape[1] * width)
      fail(StatusCode::kBadLayout, kPrepare, name, to_string(view), "dense rows, pages that do not meet", kRemedy);
    // Kernels load 16 bytes at a time; the width of a row is a multiple of 8 by the config.
    if (device.is_cuda() && (reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0 || this_shape.page_stride % 8 != 0))
      fail(StatusCode::kBadLayout, kPrepare, name, to_string(view), "on a GPU, 16-byte aligned pages",
           "allocate the cache as one dense tensor");
    if (layer == 0) shape = this_shape;
    if (this_shape.pages != shape.pages || this_shape.page_rows != shape.page_rows ||
        this_shape.page_stride != shape.page_stride)
      fail(StatusCode::kBadLayout, kPrepare, name, to_string(view), "the shape and strides of memory.cache[0]",
           "one page table serves all layers");
    for (std::size_t other = 0; other < layer; ++other)
      if (pages_meet(view, cache[other], shape, width))
        fail(StatusCode::kOverlap, kPrepare, name, to_string(view),
             fmt::format("memory that does not meet memory.cache[{}]", other), "give each layer its own pages");
  }
  return shape;
}

void check_lent(const char* name, const TensorView& table, std::int64_t rows, const DrafterConfig& config,
                Device device) {
  throw_if_error(check_view(kPrepare, name, table, DType::kBF16, {rows, config.hidden_size}, device,
                            "without the padding of the vocabulary; a rank's head is its own rows"));
  if (stride_of(table, 0, config.hidden_size) < config.hidden_size)
    fail(StatusCode::kBadLayout, kPrepare, name, to_string(table), "rows that do not meet",
         "lend the table itself, not a broadcast view of it");
}

Status check_batch(const StepContract& contract, const DraftBatch& batch, const char* place, StepBatch* step) {
  constexpr const char* kRemedy = "R is the size of batch.request; row_start has one entry more";
  const Device device = contract.device;
  const std::int64_t requests = batch.request.rank == 1 ? batch.request.shape[0] : -1;
  const std::int64_t rows = batch.positions.rank == 1 ? batch.positions.shape[0] : -1;
  const auto vector = [&](const char* name, const TensorView& view, DType dtype, std::int64_t size) {
    return check_view(place, name, view, dtype, {size}, device, kRemedy);
  };
  if (auto s = vector("batch.request", batch.request, DType::kI32, -1); !s.ok()) return s;
  if (auto s = vector("batch.row_start", batch.row_start, DType::kI32, requests + 1); !s.ok()) return s;
  if (auto s = vector("batch.rejected", batch.rejected, DType::kI32, requests); !s.ok()) return s;
  if (auto s = vector("batch.anchor", batch.anchor, DType::kI32, requests); !s.ok()) return s;
  if (auto s = vector("batch.positions", batch.positions, DType::kI64, -1); !s.ok()) return s;
  if (auto s = check_view(place, "batch.page_table", batch.page_table, DType::kI32, {requests, -1}, device, kRemedy);
      !s.ok())
    return s;
  if (auto s = vector("batch.temperature", batch.temperature, DType::kF32, requests); !s.ok()) return s;
  if (auto s = vector("batch.seed", batch.seed, DType::kI64, requests); !s.ok()) return s;
  if (auto s = vector("batch.step", batch.step, DType::kI32, requests); !s.ok()) return s;
  const auto& counts = contract.limits.request_counts;
  if (!std::binary_search(counts.begin(), counts.end(), requests))
    return refusal(StatusCode::kNotPrepared, place, "batch.request.shape[0]", std::to_string(requests),
                   fmt::format("limits.request_counts = [{}]", fmt::join(counts, ", ")),
                   "pad the batch with requests of number -1");
  step->requests = requests;
  step->rows = rows;
  step->request = static_cast<const std::int32_t*>(batch.request.data);
  step->row_start = static_cast<const std::int32_t*>(batch.row_start.data);
  step->rejected = static_cast<const std::int32_t*>(batch.rejected.data);
  step->anchor = static_cast<const std::int32_t*>(batch.anchor.data);
  step->positions = static_cast<const std::int64_t*>(batch.positions.data);
  step->page_table = static_cast<const std::int32_t*>(batch.page_table.data);
  step->page_table_width = batch.page_table.shape[1];
  step->page_table_stride = stride_of(batch.page_table, 0, batch.page_table.shape[1]);
  step->temperature = static_cast<const float*>(batch.temperature.data);
  step->seed = static_cast<const std::int64_t*>(batch.seed.data);
  step->step = static_cast<std::int32_t*>(batch.step.data);
  return {};
}

Status check_taps(const StepContract& contract, std::span<const TensorView> taps, std::int64_t rows, Tap* out) {
  constexpr const char* kPlace = "drafter.ingest";
  const StepModel& model = contract.model;
  if (static_cast<std::int64_t>(taps.size()) != model.taps)
    return refusal(StatusCode::kInvalidArgument, kPlace, "taps", fmt::format("{} views", taps.size()),
                   fmt::format("{}, one per target layer", model.taps));
  if (rows > contract.limits.max_ingest_rows)
    return refusal(StatusCode::kInvalidArgument, kPlace, "batch.positions.shape[0]", std::to_string(rows),
                   fmt::format("up to limits.max_ingest_rows = {}", contract.limits.max_ingest_rows),
                   "ingest the rows in parts");
  const auto name = [](std::size_t i) { return fmt::format("taps[{}]", i); };
  for (std::size_t i = 0; i < taps.size(); ++i) {
    if (auto s = check_view(kPlace, "", taps[i], DType::kBF16, {rows, model.target_hidden}, contract.device,
                            "a row for each entry of batch.positions, of target_hidden_size columns");
        !s.ok()) {
      s.argument.insert(0, name(i));
      return s;
    }
    out[i] = {static_cast<const std::uint16_t*>(taps[i].data), stride_of(taps[i], 0, model.target_hidden)};
    if (out[i].stride < model.target_hidden)
      return refusal(StatusCode::kBadLayout, kPlace, name(i), to_string(taps[i]), "rows that do not meet",
                     "give each row its own memory");
  }
  return {};
}

Status check_verify(const StepContract& contract, const DraftBatch& batch, const VerifyBatch& verify,
                    const DraftOutput& own, std::int64_t requests, VerifyStep* step) {
  constexpr const char* kPlace = "drafter.verify";
  const StepModel& model = contract.model;
  const Device device = contract.device;
  const std::int64_t k = model.k;
  const DType logits = verify.logits.dtype;
  if (logits != DType::kF32 && logits != DType::kBF16)
    return refusal(StatusCode::kUnsupported, kPlace, "logits.dtype", dtype_name(logits), "F32, BF16",
                   "keep the target's logits in one of these");
  const auto check = [&](const char* name, const TensorView& view, DType dtype, Sizes sizes) {
    return check_view(kPlace, name, view, dtype, sizes, device,
                      "R is the size of batch.request, k that of the limits, V the vocab_size");
  };
  if (auto s = check("draft_ids", verify.draft_ids, DType::kI32, {requests, k}); !s.ok()) return s;
  if (auto s = check("logits", verify.logits, logits, {requests, k + 1, model.vocab}); !s.ok()) return s;
  if (auto s = check("emitted", verify.emitted, DType::kI32, {requests, k + 1}); !s.ok()) return s;
  if (auto s = check("accepted", verify.accepted, DType::kI32, {requests}); !s.ok()) return s;
  if (!verify.one_hot && !model.probabilistic)
    return refusal(StatusCode::kInvalidArgument, kPlace, "one_hot", "false", "true in greedy draft mode",
                   "greedy drafts are chosen, not drawn");
  if (!verify.one_hot && model.shard_vocab != model.vocab)
    return refusal(StatusCode::kUnsupported, kPlace, "shard", "one of several ranks", "one rank",
                   "draft logits of one rank are no law over the vocabulary");
  step->draft_ids = static_cast<const std::int32_t*>(verify.draft_ids.data);
  step->draft_ids_stride = stride_of(verify.draft_ids, 0, k);
  step->logits = verify.logits.data;
  step->logits_bf16 = logits == DType::kBF16;
  step->logits_row_stride = verify.logits.stride[1];
  step->logits_request_stride = stride_of(verify.logits, 0, (k + 1) * model.vocab);
  step->emitted = static_cast<std::int32_t*>(verify.emitted.data);
  step->emitted_stride = stride_of(verify.emitted, 0, k + 1);
  step->accepted = static_cast<std::int32_t*>(verify.accepted.data);
  const auto meets = [&](const char* name, const TensorView& view) {
    return refusal(StatusCode::kBadLayout, kPlace, name, to_string(view), "rows that do not meet",
                   "give each row its own memory");
  };
  if (step->draft_ids_stride < k) return meets("draft_ids", verify.draft_ids);
  if (step->emitted_stride < k + 1) return meets("emitted", verify.emitted);
  if (step->logits_row_stride < model.vocab || step->logits_request_stride < model.vocab)
    return meets("logits", verify.logits);
  const std::array<Named, 3> outputs = {
      {{"emitted", &verify.emitted}, {"accepted", &verify.accepted}, {"batch.step", &batch.step}}};
  const std::array<Named, 8> inputs = {{{"draft_ids", &verify.draft_ids},
                                        {"logits", &verify.logits},
                                        {"batch.request", &batch.request},
                                        {"batch.temperature", &batch.temperature},
                                        {"batch.seed", &batch.seed},
                                        {"output().first_position", &own.first_position},
                                        {"output().draft_logits", &own.draft_logits},
                                        {"output().status", &own.status}}};
  if (auto s = check_apart(kPlace, outputs, inputs); !s.ok()) return s;
  step->one_hot = verify.one_hot;
  step->method = verify.method;
  return {};
}

bool taps_are_one_buffer(std::span<const Tap> taps, std::int64_t rows, std::int64_t width) {
  for (std::size_t i = 1; i < taps.size(); ++i)
    if (taps[i].data != taps[i - 1].data + width || taps[i].stride != taps[0].stride) return false;
  return rows <= 1 || taps[0].stride >= width * static_cast<std::int64_t>(taps.size());
}

}  // namespace twostep
