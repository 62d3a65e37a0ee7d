#include "kda/contract.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/bf16.h"
#include "core/check.h"

namespace twostep {
namespace {

constexpr std::int64_t kMostElements = std::int64_t{1} << 60;  // of a view, gaps included: no memory holds more
constexpr std::int64_t kMostLine = std::int64_t{1} << 30;      // elements of a conv line: offsets inside it fit 32 bits
constexpr std::int64_t kMostSlots = INT32_MAX;                 // ids are int32
constexpr std::int64_t kMostCtas = INT32_MAX;                  // of a grid
constexpr int kMostSplit = 8;                                  // CTAs that share a head
constexpr std::size_t kAlign = 16;                             // bytes that kernels move at a time

std::uintptr_t address(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }
std::string hex(const void* data) { return fmt::format("{:#x}", address(data)); }
std::string shape_text(const TensorView& v) {
  const auto rank = static_cast<std::size_t>(std::clamp(v.rank, 0, TensorView::kMaxRank));
  return fmt::format("[{}]", fmt::join(v.shape.begin(), v.shape.begin() + rank, ", "));
}
std::string stride_text(const TensorView& v) {
  const auto rank = static_cast<std::size_t>(std::clamp(v.rank, 0, TensorView::kMaxRank));
  return fmt::format("({})", fmt::join(v.stride.begin(), v.stride.begin() + rank, ", "));
}

// Do `count` pieces of `piece` elements, `stride` >= 0 apart, end within kMostElements?
bool fits(std::int64_t count, std::int64_t stride, std::int64_t piece) {
  if (piece > kMostElements) return false;
  return count <= 1 || stride <= (kMostElements - piece) / (count - 1);
}

// ---- Rules that hold for every operand. Each formats only what it refuses.

// Who refuses, and which operand: "kda.run", "out".
struct Operand {
  const char* place;
  const char* name;
  Status refuse(StatusCode code, const char* field, std::string value, std::string accepted,
                std::string remedy = {}) const {
    return refusal(code, place, fmt::format("{}{}", name, field), std::move(value), std::move(accepted),
                   std::move(remedy));
  }
};

Status check_dtype(const Operand& o, const TensorView& v, DType wanted) {
  if (v.dtype == wanted) return {};
  return o.refuse(StatusCode::kInvalidArgument, ".dtype", dtype_name(v.dtype), dtype_name(wanted), "convert it");
}

Status check_float(const Operand& o, const TensorView& v) {
  if (v.dtype == DType::kF32 || v.dtype == DType::kBF16) return {};
  return o.refuse(StatusCode::kInvalidArgument, ".dtype", dtype_name(v.dtype), "F32, BF16", "convert it");
}

Status check_rank(const Operand& o, const TensorView& v, int wanted) {
  if (v.rank == wanted) return {};
  return o.refuse(StatusCode::kInvalidArgument, ".rank", std::to_string(v.rank), std::to_string(wanted));
}

Status check_device(const Operand& o, const TensorView& v, Device wanted) {
  if (v.device == wanted) return {};
  return o.refuse(StatusCode::kWrongDevice, ".device", to_string(v.device), to_string(wanted),
                  "keep all operands on one device");
}

Status check_base(const Operand& o, const TensorView& v, std::size_t align) {
  if (v.data == nullptr)
    return o.refuse(StatusCode::kInvalidArgument, ".data", "null", fmt::format("memory of {}", to_string(v)));
  if (address(v.data) % align == 0) return {};
  return o.refuse(StatusCode::kBadLayout, ".data", hex(v.data),
                  fmt::format("addresses that are multiples of {} bytes", align), "allocate it aligned");
}

bool same_shape(const TensorView& v, const TensorView& wanted) {
  return v.rank == wanted.rank && std::equal(v.shape.begin(), v.shape.begin() + v.rank, wanted.shape.begin());
}

// The first dimension from `first` whose stride counts and differs, else rank. Shapes are equal.
int stray_stride(const TensorView& v, const TensorView& wanted, int first = 0) {
  for (int d = first; d < v.rank; ++d) {
    const auto i = static_cast<std::size_t>(d);
    if (v.shape[i] > 1 && v.stride[i] != wanted.stride[i]) return d;
  }
  return v.rank;
}

TensorView dense(DType dtype, std::initializer_list<std::int64_t> shape) {
  return TensorView::dense(nullptr, dtype, shape);
}

// ---- Construction

// What a weight must be, apart from dtype, rank and width: its length, then where and how it lies.
Status check_weight(const Operand& o, const TensorView& v, const TensorView& wanted, Device device, std::size_t align) {
  if (!same_shape(v, wanted))
    return o.refuse(StatusCode::kInvalidArgument, ".shape", shape_text(v), shape_text(wanted),
                    "the sizes follow from the heads of this device");
  if (auto status = check_device(o, v, device); !status.ok()) return status;
  if (stray_stride(v, wanted) != v.rank)
    return o.refuse(StatusCode::kBadLayout, " strides", stride_text(v), stride_text(wanted), "make it contiguous");
  return check_base(o, v, align);
}

Status check_conv(const Operand& o, const TensorView& v, std::int64_t channels, Device device) {
  if (auto status = check_float(o, v); !status.ok()) return status;
  if (auto status = check_rank(o, v, 3); !status.ok()) return status;
  if (v.shape[2] != kKdaConvWidth)
    return o.refuse(StatusCode::kUnsupported, ".shape[2]", std::to_string(v.shape[2]), std::to_string(kKdaConvWidth),
                    "only convolutions of this width are served");
  return check_weight(o, v, dense(v.dtype, {3 * channels, 1, kKdaConvWidth}), device, dtype_size(v.dtype));
}

Status check_f_b(const Operand& o, const TensorView& v, std::int64_t channels) {
  if (auto status = check_dtype(o, v, DType::kBF16); !status.ok()) return status;
  if (auto status = check_rank(o, v, 2); !status.ok()) return status;
  if (v.shape[0] != channels)
    return o.refuse(StatusCode::kUnsupported, ".shape[0]", std::to_string(v.shape[0]),
                    fmt::format("{} (128 for each head)", channels), "only heads of 128 values are served");
  return check_weight(o, v, dense(DType::kBF16, {channels, kKdaHeadDim}), v.device, kAlign);
}

// FP32, or FP32 and BF16 where it is copied.
Status check_vector(const Operand& o, const TensorView& v, std::int64_t length, Device device, bool copied) {
  if (auto status = copied ? check_float(o, v) : check_dtype(o, v, DType::kF32); !status.ok()) return status;
  return check_weight(o, v, dense(v.dtype, {length}), device, dtype_size(v.dtype));
}

Status check_a_log(const Operand& o, const TensorView& v, std::int64_t heads, Device device) {
  if (auto status = check_dtype(o, v, DType::kF32); !status.ok()) return status;
  const bool four = v.rank == 4;
  return check_weight(o, v, four ? dense(DType::kF32, {1, 1, heads, 1}) : dense(DType::kF32, {heads}), device,
                      sizeof(float));
}

Status check_weights(const KdaWeights& w, std::int64_t heads, const char* place) {
  const std::int64_t channels = kKdaHeadDim * heads;
  const Device device = w.f_b.device;  // the largest weight decides
  if (auto status = check_f_b({place, "f_b"}, w.f_b, channels); !status.ok()) return status;
  if (auto status = check_conv({place, "conv_weight"}, w.conv_weight, channels, device); !status.ok()) return status;
  if (w.conv_bias)
    if (auto status = check_vector({place, "conv_bias"}, *w.conv_bias, 3 * channels, device, true); !status.ok())
      return status;
  if (auto status = check_a_log({place, "a_log"}, w.a_log, heads, device); !status.ok()) return status;
  if (auto status = check_vector({place, "dt_bias"}, w.dt_bias, channels, device, false); !status.ok()) return status;
  return check_vector({place, "norm_weight"}, w.norm_weight, kKdaHeadDim, device, true);
}

Status check_scalars(const KdaOptions& options, const char* place) {
  const auto invalid = [&](const char* name, std::string value, const char* accepted, const char* remedy = "") {
    return refusal(StatusCode::kInvalidArgument, place, name, std::move(value), accepted, remedy);
  };
  if (const auto bound = options.gate_lower_bound; bound && !(std::isfinite(*bound) && *bound < 0))
    return invalid("gate_lower_bound", fmt::format("{}", *bound), "finite values below 0",
                   "leave it out for the softplus form");
  if (!std::isfinite(options.scale)) return invalid("scale", fmt::format("{}", options.scale), "finite values");
  if (!(std::isfinite(options.norm_eps) && options.norm_eps > 0))
    return invalid("norm_eps", fmt::format("{}", options.norm_eps), "finite values above 0");
  if (options.first_live_slot < 0)
    return invalid("first_live_slot", std::to_string(options.first_live_slot), "0 and more",
                   "0 makes slot 0 live; negative ids are always dead");
  return {};
}

Status check_policy(const KdaPolicy& policy, std::int64_t heads, std::int64_t used_columns, const char* place) {
  const auto [requests, tokens] = policy.key;
  if (requests < 1)
    return refusal(StatusCode::kInvalidArgument, place, "requests of a key", to_string(policy.key), "1 and more");
  if (tokens < 1 || tokens > kKdaMaxTokens)
    return refusal(StatusCode::kUnsupported, place, "tokens of a key", fmt::format("({}, {})", requests, tokens),
                   fmt::format("1 to {}", kKdaMaxTokens), "verify fewer drafts in a step; prefill is not served");
  const std::int64_t most = kMostCtas / (heads * kMostSplit);
  if (requests > most)
    return refusal(StatusCode::kUnsupported, place, "requests of a key", to_string(policy.key),
                   fmt::format("1 to {} with {} heads", most, heads), "run the requests in parts");
  if (policy.gate != GateSchedule::kInline) {
    const bool known = policy.gate == GateSchedule::kShared || policy.gate == GateSchedule::kPrepass;
    return refusal(StatusCode::kUnsupported, place, fmt::format("gate schedule of key {}", to_string(policy.key)),
                   !known                                 ? std::to_string(static_cast<int>(policy.gate))
                   : policy.gate == GateSchedule::kShared ? "shared"
                                                          : "prepass",
                   "inline");
  }
  const std::int64_t least = (used_columns + 7) / 8 * 8;
  if (policy.row_stride < least || policy.row_stride % 8 != 0 ||
      !fits(requests * tokens, policy.row_stride, policy.row_stride))
    return refusal(StatusCode::kBadLayout, place, fmt::format("row_stride of key {}", to_string(policy.key)),
                   std::to_string(policy.row_stride), fmt::format("multiples of 8 from {}", least),
                   "pad the rows of the projection");
  return {};
}

// ---- Caches

// The conv and the state cache of a layout, as views without memory.
TensorView conv_view(const KdaModel& model, const KdaLayout& layout) {
  const std::int64_t length = layout.conv_len, columns = 3 * model.channels();
  TensorView v = model.options.conv_dim_first ? dense(DType::kBF16, {layout.num_slots, columns, length})
                                              : dense(DType::kBF16, {layout.num_slots, length, columns});
  v.stride[0] = layout.conv_stride;
  return v;
}
TensorView state_view(const KdaModel& model, const KdaLayout& layout) {
  TensorView v = dense(DType::kF32, {layout.num_slots, model.heads, kKdaHeadDim, kKdaHeadDim});
  v.stride[0] = layout.state_stride;
  return v;
}

TensorView records_view(const KdaLayout& layout) {
  TensorView v = dense(DType::kU8, {layout.num_slots, layout.record_bytes});
  v.stride[0] = layout.record_stride;
  return v;
}

std::int64_t conv_line(const KdaModel& model, std::int64_t length) { return 3 * model.channels() * length; }
std::int64_t state_size(const KdaModel& model) { return model.channels() * kKdaHeadDim; }

// Dense inside a slot; slots apart by a multiple of 16 bytes that memory can hold.
Status check_strides(const Operand& o, const TensorView& v, const TensorView& wanted, std::int64_t size) {
  if (stray_stride(v, wanted, 1) != v.rank)
    return o.refuse(StatusCode::kBadLayout, " strides", stride_text(v),
                    fmt::format("(slot stride, {})",
                                fmt::join(wanted.stride.begin() + 1, wanted.stride.begin() + wanted.rank, ", ")),
                    "a slot is dense, and a state has values before keys");
  if (v.shape[0] == 1) return {};
  const auto step = static_cast<std::int64_t>(kAlign / dtype_size(v.dtype));
  if (v.stride[0] < size || v.stride[0] % step != 0 || !fits(v.shape[0], v.stride[0], size))
    return o.refuse(StatusCode::kBadLayout, " slot stride", std::to_string(v.stride[0]),
                    fmt::format("multiples of {} elements (16 bytes) from {}", step, size), "pad the slots");
  return {};
}

// Rows 12 and 19.
Status missing_records(const KdaModel& model, std::int64_t entries, const char* place) {
  return refusal(StatusCode::kInvalidArgument, place, "records", "absent",
                 fmt::format("U8 [slots, {} and more], for state_mode records", kda_record_bytes(model.heads, entries)),
                 "give a record cache, or use state_mode slots");
}

// Row 19: a cache of a call against the prepared one, field by field.
Status check_cache(const Operand& o, const TensorView& v, const TensorView& wanted, Device device) {
  const char* remedy = "prepare for these caches";
  if (v.dtype != wanted.dtype)
    return o.refuse(StatusCode::kInvalidArgument, ".dtype", dtype_name(v.dtype), dtype_name(wanted.dtype), remedy);
  if (!same_shape(v, wanted))
    return o.refuse(StatusCode::kInvalidArgument, ".shape", shape_text(v), shape_text(wanted), remedy);
  if (const int d = stray_stride(v, wanted); d != v.rank)
    return o.refuse(StatusCode::kInvalidArgument, d == 0 ? " slot stride" : " strides", stride_text(v),
                    stride_text(wanted), remedy);
  if (auto status = check_device(o, v, device); !status.ok()) return status;
  return check_base(o, v, kAlign);
}

Status check_caches(const KdaModel& model, const KdaLayout& layout, const KdaCaches& caches, const char* place) {
  if (auto status = check_cache({place, "conv"}, caches.conv, conv_view(model, layout), model.device); !status.ok())
    return status;
  if (auto status = check_cache({place, "state"}, caches.state, state_view(model, layout), model.device); !status.ok())
    return status;
  if (!model.records()) return {};
  if (!caches.records) return missing_records(model, layout.entries(), place);
  return check_cache({place, "records"}, *caches.records, records_view(layout), model.device);
}

// ---- Run

std::int64_t columns_of(const TensorView& ids) { return ids.rank == 1 ? 1 : ids.shape[1]; }

constexpr const char* kRun = "kda.run";

// Rows 16 and 18. `row_stride` as in the policy; a single row has none.
Status check_projected(const TensorView& v, const KdaModel& model, std::int64_t row_stride) {
  const Operand o{kRun, "projected"};
  if (v.shape[1] < model.used_columns())
    return o.refuse(StatusCode::kInvalidArgument, ".shape[1]", std::to_string(v.shape[1]),
                    fmt::format("{} columns and more", model.used_columns()), "pass whole projection rows");
  if (auto status = check_device(o, v, model.device); !status.ok()) return status;
  if (v.stride[1] != 1)
    return o.refuse(StatusCode::kBadLayout, " column stride", std::to_string(v.stride[1]), "1",
                    "make the columns contiguous");
  if (v.shape[0] > 1 && v.stride[0] != row_stride)
    return o.refuse(StatusCode::kBadLayout, " row stride", std::to_string(v.stride[0]),
                    fmt::format("{}, of the policy", row_stride), "pass that buffer, or prepare for this one");
  return check_base(o, v, kAlign);
}

// Rows 17 and 18.
Status check_out(const TensorView& v, const KdaModel& model, std::int64_t rows) {
  const Operand o{kRun, "out"};
  if (auto status = check_dtype(o, v, DType::kBF16); !status.ok()) return status;
  if (v.rank != 2 || v.shape[0] != rows || v.shape[1] != model.channels())
    return o.refuse(StatusCode::kInvalidArgument, ".shape", shape_text(v),
                    fmt::format("[{}, {}]", rows, model.channels()));
  if (auto status = check_device(o, v, model.device); !status.ok()) return status;
  if (v.stride[1] != 1)
    return o.refuse(StatusCode::kBadLayout, " column stride", std::to_string(v.stride[1]), "1",
                    "make the columns contiguous");
  if (rows > 1 && (v.stride[0] < model.channels() || v.stride[0] % 8 != 0 || !fits(rows, v.stride[0], v.shape[1])))
    return o.refuse(StatusCode::kBadLayout, " row stride", std::to_string(v.stride[0]),
                    fmt::format("multiples of 8 from {}", model.channels()), "pad the rows of out");
  return check_base(o, v, kAlign);
}

// Row 20: ids of slots.
Status check_ids_rank(const Operand& o, const TensorView& v) {
  if (v.rank == 1 || v.rank == 2) return {};
  return o.refuse(StatusCode::kInvalidArgument, ".rank", std::to_string(v.rank), "1, 2",
                  "pass [requests] or [requests, columns]");
}
Status check_ids(const Operand& o, const TensorView& v, const KdaModel& model, std::int64_t requests,
                 std::int64_t least_columns, std::int64_t most_columns) {
  if (auto status = check_dtype(o, v, DType::kI32); !status.ok()) return status;
  const std::int64_t width = columns_of(v);
  if (v.shape[0] < requests)
    return o.refuse(StatusCode::kInvalidArgument, ".shape[0]", std::to_string(v.shape[0]),
                    fmt::format("{} rows and more, one for each request", requests));
  if (width < least_columns)
    return o.refuse(StatusCode::kInvalidArgument, " columns", std::to_string(width),
                    fmt::format("{} and more, one for each token", least_columns), "name a slot for each token");
  if (width > most_columns)
    return o.refuse(StatusCode::kInvalidArgument, " columns", std::to_string(width),
                    fmt::format("at most L - 2 = {}", most_columns),
                    "pass a narrower view, or prepare for a conv cache of more positions");
  if (auto status = check_device(o, v, model.device); !status.ok()) return status;
  if (v.rank == 2 && width > 1 && v.stride[1] != 1)
    return o.refuse(StatusCode::kBadLayout, " column stride", std::to_string(v.stride[1]), "1",
                    "make the columns of a row adjacent");
  if (v.shape[0] > 1 && (v.stride[0] < 1 || !fits(requests, v.stride[0], width)))
    return o.refuse(StatusCode::kBadLayout, " row stride", std::to_string(v.stride[0]), "1 and more");
  return check_base(o, v, sizeof(std::int32_t));
}

// Row 21: accepted or lengths.
Status check_counts(const Operand& o, const TensorView& v, const KdaModel& model, std::int64_t requests) {
  if (auto status = check_dtype(o, v, DType::kI32); !status.ok()) return status;
  if (auto status = check_rank(o, v, 1); !status.ok()) return status;
  if (v.shape[0] < requests)
    return o.refuse(StatusCode::kInvalidArgument, ".shape[0]", std::to_string(v.shape[0]),
                    fmt::format("{} and more, one for each request", requests));
  if (auto status = check_device(o, v, model.device); !status.ok()) return status;
  if (v.shape[0] > 1 && v.stride[0] != 1)
    return o.refuse(StatusCode::kBadLayout, " stride", std::to_string(v.stride[0]), "1", "make it contiguous");
  return check_base(o, v, sizeof(std::int32_t));
}

// Memory from the first byte of an operand to its last, gaps included.
struct Extent {
  const char* name = nullptr;
  std::uintptr_t begin = 0;
  std::uintptr_t bytes = 0;
};
Extent extent(const char* name, const void* data, std::int64_t count, std::int64_t stride, std::int64_t piece,
              std::size_t size) {
  const auto elements = static_cast<std::uintptr_t>((count - 1) * stride + piece);
  return {name, address(data), elements * size};
}
bool meet(const Extent& a, const Extent& b) {
  return a.begin <= b.begin ? b.begin - a.begin < a.bytes : a.begin - b.begin < b.bytes;
}

Status check_overlap(const KdaModel& model, const KdaLayout& layout, const KdaCall& call, const KdaStep& step) {
  const std::int64_t rows = step.requests * step.tokens, channels = model.channels(), b = step.requests;
  const Extent out = extent("out", step.out, rows, step.out_stride, channels, 2);
  const KdaWeights& weights = model.weights;
  const std::array others{
      extent("projected", step.projected, rows, step.row_stride, std::min(call.projected.shape[1], step.row_stride), 2),
      extent("conv", step.conv, layout.num_slots, layout.conv_stride, conv_line(model, layout.conv_len), 2),
      extent("state", step.state, layout.num_slots, layout.state_stride, state_size(model), 4),
      step.records ? extent("records", step.records, layout.num_slots, layout.record_stride, layout.record_bytes, 1)
                   : Extent{},
      extent("slots", step.slots, b, step.slots_stride, step.window, 4),
      step.accepted ? extent("accepted", step.accepted, b, 1, 1, 4) : Extent{},
      step.lengths ? extent("lengths", step.lengths, b, 1, 1, 4) : Extent{},
      extent("f_b", weights.f_b.data, channels, kKdaHeadDim, kKdaHeadDim, 2),
      extent("a_log", weights.a_log.data, model.heads, 1, 1, 4),
      extent("dt_bias", weights.dt_bias.data, channels, 1, 1, 4)};
  for (const Extent& other : others)
    if (other.name != nullptr && meet(out, other))
      return refusal(
          StatusCode::kOverlap, kRun, "out", fmt::format("{} bytes at {:#x}", out.bytes, out.begin),
          fmt::format("memory that does not meet the {} bytes of {} at {:#x}", other.bytes, other.name, other.begin),
          "give out its own memory");
  return {};
}

float value_at(const TensorView& v, std::int64_t index) {
  if (v.dtype == DType::kF32) return static_cast<const float*>(v.data)[index];
  return bf16_to_float(static_cast<const std::uint16_t*>(v.data)[index]);
}

}  // namespace

std::string to_string(KdaKey key) {
  return key.tokens == 1 ? std::to_string(key.requests) : fmt::format("({}, {})", key.requests, key.tokens);
}

std::int64_t kda_row_stride(int heads) {
  return (std::int64_t{4} * kKdaHeadDim * heads + kKdaHeadDim + heads + 15) / 16 * 16;
}

std::int64_t kda_record_bytes(int heads, std::int64_t entries) { return (heads * (1024 * entries + 4) + 15) / 16 * 16; }

KdaRecords kda_records(std::uint8_t* area, int heads, std::int64_t entries, std::int64_t head) {
  const std::int64_t size = 1024 * entries;
  std::uint8_t* block = area + head * size;
  return {reinterpret_cast<float*>(block), reinterpret_cast<std::uint16_t*>(block + 512 * entries),
          reinterpret_cast<std::uint16_t*>(block + 768 * entries),
          reinterpret_cast<std::int32_t*>(area + heads * size + 4 * head)};
}

KdaModel check_kda(const KdaWeights& weights, const KdaOptions& options) {
  const char* place = "kda.PreparedKda";
  if (options.heads < 1 || options.heads > kKdaMaxHeads)
    fail(StatusCode::kUnsupported, place, "heads", std::to_string(options.heads), fmt::format("1 to {}", kKdaMaxHeads),
         "H counts the heads of one device");
  if (options.state_mode != StateMode::kSlots && options.state_mode != StateMode::kRecords)
    fail(StatusCode::kUnsupported, place, "state_mode", std::to_string(static_cast<int>(options.state_mode)),
         "slots, records");
  if (options.state_dtype != DType::kF32)
    fail(StatusCode::kUnsupported, place, "state_dtype", dtype_name(options.state_dtype), dtype_name(DType::kF32),
         "keep the state in FP32");
  throw_if_error(check_weights(weights, options.heads, place));
  throw_if_error(check_scalars(options, place));

  KdaModel model{weights, options, weights.f_b.device, options.heads};
  auto& policies = model.options.policies;
  if (policies.empty())
    fail(StatusCode::kInvalidArgument, place, "policies", "empty", "one key and more",
         "name each batch, or (requests, tokens), that run shall serve");
  for (const KdaPolicy& policy : policies)
    throw_if_error(check_policy(policy, model.heads, model.used_columns(), place));
  std::sort(policies.begin(), policies.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
  const auto twice =
      std::adjacent_find(policies.begin(), policies.end(), [](const auto& a, const auto& b) { return a.key == b.key; });
  if (twice != policies.end())
    fail(StatusCode::kInvalidArgument, place, "policies", fmt::format("key {} twice", to_string(twice->key)),
         "each key once; (B, 1) is the key B");
  return model;
}

Status same_kda_weights(const KdaModel& model, const KdaWeights& now) {
  const KdaWeights& bound = model.weights;
  const auto changed = [](std::string name, std::string value, std::string accepted) {
    return refusal(StatusCode::kWeightChanged, "kda.reload", std::move(name), std::move(value), std::move(accepted),
                   "build a new PreparedKda for these weights");
  };
  const auto same = [&](const char* name, const TensorView& old_view, const TensorView& view, bool borrowed) -> Status {
    const bool alike = view.dtype == old_view.dtype && same_shape(view, old_view) && view.device == old_view.device &&
                       stray_stride(view, old_view) == view.rank;
    if (!alike) return changed(name, to_string(view), to_string(old_view));
    if (borrowed ? view.data != old_view.data
                 : view.data == nullptr || address(view.data) % dtype_size(view.dtype) != 0)
      return changed(fmt::format("{}.data", name), hex(view.data),
                     borrowed ? hex(old_view.data) : "aligned memory of the weight");
    return {};
  };
  if (now.conv_bias.has_value() != bound.conv_bias.has_value())
    return changed("conv_bias", now.conv_bias ? "given" : "absent", bound.conv_bias ? "given" : "absent");
  if (auto status = same("conv_weight", bound.conv_weight, now.conv_weight, false); !status.ok()) return status;
  if (now.conv_bias)
    if (auto status = same("conv_bias", *bound.conv_bias, *now.conv_bias, false); !status.ok()) return status;
  if (auto status = same("f_b", bound.f_b, now.f_b, true); !status.ok()) return status;
  if (auto status = same("a_log", bound.a_log, now.a_log, true); !status.ok()) return status;
  if (auto status = same("dt_bias", bound.dt_bias, now.dt_bias, true); !status.ok()) return status;
  return same("norm_weight", bound.norm_weight, now.norm_weight, false);
}

KdaLayout check_layouts(const KdaModel& model, const KdaCaches& layouts) {
  const char* place = "kda.prepare";
  const Operand conv{place, "conv"}, state{place, "state"};
  const auto invalid = [](const Operand& o, const char* field, std::string value, std::string accepted,
                          std::string remedy = {}) {
    fail(o.refuse(StatusCode::kInvalidArgument, field, std::move(value), std::move(accepted), std::move(remedy)));
  };
  throw_if_error(check_dtype(conv, layouts.conv, DType::kBF16));
  throw_if_error(check_rank(conv, layouts.conv, 3));
  const auto& shape = layouts.conv.shape;
  const bool dim_first = model.options.conv_dim_first;
  const std::int64_t columns = 3 * model.channels();
  if (shape[dim_first ? 1 : 2] != columns)
    invalid(conv, ".shape", shape_text(layouts.conv),
            dim_first ? fmt::format("[slots, {}, L]", columns) : fmt::format("[slots, L, {}]", columns),
            shape[dim_first ? 2 : 1] == columns ? "conv_dim_first names the other layout" : "");
  const std::int64_t length = shape[dim_first ? 2 : 1];
  // Policies rise by requests first: the most tokens may be anywhere.
  const KdaKey longest =
      std::max_element(model.options.policies.begin(), model.options.policies.end(), [](const auto& a, const auto& b) {
        return a.key.tokens < b.key.tokens;
      })->key;
  const std::int64_t least = longest.tokens + 2;
  if (length < least)
    invalid(conv, " positions L", std::to_string(length),
            fmt::format("{} and more (2 + tokens of key {})", least, to_string(longest)), "keep more positions");
  if (length > kMostLine / columns)
    fail(conv.refuse(StatusCode::kUnsupported, " positions L", std::to_string(length),
                     fmt::format("at most {}", kMostLine / columns)));
  if (shape[0] < 1 || shape[0] > kMostSlots)
    invalid(conv, ".shape[0]", std::to_string(shape[0]), fmt::format("1 to {} slots", kMostSlots));

  KdaLayout layout{shape[0], static_cast<int>(length), conv_line(model, length), state_size(model), 0, 0};
  const TensorView wanted_state = state_view(model, layout);
  throw_if_error(check_dtype(state, layouts.state, DType::kF32));
  throw_if_error(check_rank(state, layouts.state, 4));
  if (!std::equal(wanted_state.shape.begin() + 1, wanted_state.shape.end(), layouts.state.shape.begin() + 1))
    invalid(state, ".shape", shape_text(layouts.state), fmt::format("[slots, {}, 128, 128]", model.heads));
  if (layouts.state.shape[0] != layout.num_slots)
    invalid(state, ".shape[0]", std::to_string(layouts.state.shape[0]),
            fmt::format("{}, the slots of conv", layout.num_slots), "give both caches the same slots");
  throw_if_error(check_strides(conv, layouts.conv, conv_view(model, layout), layout.conv_stride));
  throw_if_error(check_strides(state, layouts.state, wanted_state, layout.state_stride));
  if (layout.num_slots > 1) {
    layout.conv_stride = layouts.conv.stride[0];
    layout.state_stride = layouts.state.stride[0];
  }
  if (!model.records()) return layout;

  const Operand records{place, "records"};
  if (!layouts.records) throw_if_error(missing_records(model, layout.entries(), place));
  const TensorView& given = *layouts.records;
  throw_if_error(check_dtype(records, given, DType::kU8));
  throw_if_error(check_rank(records, given, 2));
  const std::int64_t area = kda_record_bytes(model.heads, layout.entries());
  if (given.shape[1] < area)
    invalid(records, ".shape[1]", std::to_string(given.shape[1]),
            fmt::format("{} bytes and more, for {} tokens of {} heads", area, layout.entries(), model.heads),
            "kda_record_bytes(heads, L - 2) says it");
  if (given.shape[0] != layout.num_slots)
    invalid(records, ".shape[0]", std::to_string(given.shape[0]),
            fmt::format("{}, the slots of conv", layout.num_slots), "give all caches the same slots");
  layout.record_bytes = layout.record_stride = given.shape[1];
  throw_if_error(check_strides(records, given, records_view(layout), given.shape[1]));
  if (layout.num_slots > 1) layout.record_stride = given.stride[0];
  return layout;
}

Status find_key(const KdaModel& model, bool prepared, KdaKey key, const char* place, std::size_t* index) {
  const auto& policies = model.options.policies;
  const auto found = std::lower_bound(policies.begin(), policies.end(), key,
                                      [](const KdaPolicy& policy, KdaKey wanted) { return policy.key < wanted; });
  const bool known = found != policies.end() && found->key == key;
  if (prepared && known) {
    *index = static_cast<std::size_t>(found - policies.begin());
    return {};
  }
  std::string keys;
  if (prepared)
    for (const KdaPolicy& policy : policies) keys.append(keys.empty() ? "" : ", ").append(to_string(policy.key));
  return refusal(StatusCode::kNotPrepared, place, "key", to_string(key),
                 fmt::format("prepared keys {}", keys.empty() ? "(none)" : keys),
                 known ? "call prepare first" : "add it to policies and prepare again");
}

Status check_call(const KdaModel& model, const KdaLayout* layout, const KdaCall& call, KdaStep* step) {
  const TensorView& projected = call.projected;
  const Operand rows_of{kRun, "projected"}, slots_of{kRun, "slots"};
  if (auto status = check_dtype(rows_of, projected, DType::kBF16); !status.ok()) return status;
  if (auto status = check_rank(rows_of, projected, 2); !status.ok()) return status;
  if (auto status = check_ids_rank(slots_of, call.slots); !status.ok()) return status;
  const std::int64_t width = columns_of(call.slots);
  const std::int64_t tokens = call.tokens ? *call.tokens : call.accepted ? width : 1;
  if (tokens < 1 || tokens > INT32_MAX)
    return refusal(StatusCode::kInvalidArgument, kRun, "tokens", std::to_string(tokens),
                   fmt::format("1 to {}", kKdaMaxTokens), "absent, it is the columns of slots with accepted, else 1");
  const std::int64_t rows = projected.shape[0];
  if (rows < 1 || rows % tokens != 0)
    return rows_of.refuse(StatusCode::kInvalidArgument, ".shape[0]", std::to_string(rows),
                          fmt::format("positive multiples of tokens = {}", tokens), "give tokens, or pass every row");
  const KdaKey key{rows / tokens, static_cast<int>(tokens)};
  KdaStep s;
  if (auto status = find_key(model, layout != nullptr, key, kRun, &s.key); !status.ok()) return status;

  s.row_stride = model.options.policies[s.key].row_stride;
  if (auto status = check_projected(projected, model, s.row_stride); !status.ok()) return status;
  if (auto status = check_out(call.out, model, rows); !status.ok()) return status;
  if (auto status = check_caches(model, *layout, call.caches, kRun); !status.ok()) return status;
  // With records column 0 is all that is used, whatever the view's width.
  const std::int64_t least = model.records() ? 1 : key.tokens;
  const std::int64_t most = call.accepted && !model.records() ? layout->entries() : width;
  if (auto status = check_ids(slots_of, call.slots, model, key.requests, least, most); !status.ok()) return status;
  if (key.tokens > 1 && !call.accepted)
    return refusal(StatusCode::kInvalidArgument, kRun, "accepted", "absent",
                   fmt::format("int32 of {} requests, for a step of {} tokens", key.requests, key.tokens),
                   "pass the tokens kept of the last step, 1 after prefill");
  if (call.accepted)
    if (auto status = check_counts({kRun, "accepted"}, *call.accepted, model, key.requests); !status.ok())
      return status;
  if (call.lengths)
    if (auto status = check_counts({kRun, "lengths"}, *call.lengths, model, key.requests); !status.ok()) return status;

  s.requests = key.requests;
  s.tokens = key.tokens;
  s.projected = static_cast<const std::uint16_t*>(projected.data);
  s.out = static_cast<std::uint16_t*>(call.out.data);
  s.out_stride = rows > 1 ? call.out.stride[0] : model.channels();
  s.conv = static_cast<std::uint16_t*>(call.caches.conv.data);
  s.state = static_cast<float*>(call.caches.state.data);
  s.slots = static_cast<const std::int32_t*>(call.slots.data);
  if (model.records()) s.records = static_cast<std::uint8_t*>(call.caches.records->data);
  // Without accepted, and with records, a request reads and writes the slot of column 0 alone.
  s.window = call.accepted && !model.records() ? width : 1;
  s.slots_stride = call.slots.shape[0] > 1 ? call.slots.stride[0] : s.window;
  if (call.accepted) s.accepted = static_cast<const std::int32_t*>(call.accepted->data);
  if (call.lengths) s.lengths = static_cast<const std::int32_t*>(call.lengths->data);
  if (auto status = check_overlap(model, *layout, call, s); !status.ok()) return status;
  *step = s;
  return {};
}

Status check_fold(const KdaModel& model, const KdaLayout* layout, const KdaCaches& caches, const TensorView& slots,
                  const TensorView* accepted, const std::optional<TensorView>& dst_slots, KdaFold* fold) {
  const char* place = accepted ? "kda.fold_records" : "kda.reset_records";
  if (!model.records())
    return refusal(StatusCode::kInvalidArgument, place, "state_mode", "slots", "records",
                   "slots mode has nothing to fold: name the slot of the last accepted token");
  if (layout == nullptr)
    return refusal(StatusCode::kNotPrepared, place, "layouts", "(none)", "an object that is prepared",
                   "call prepare first");
  if (auto status = check_caches(model, *layout, caches, place); !status.ok()) return status;
  const Operand ids{place, "slots"}, dst{place, "dst_slots"};
  if (auto status = check_ids_rank(ids, slots); !status.ok()) return status;
  KdaFold f;
  f.requests = slots.shape[0];
  const std::int64_t most = kMostCtas / model.heads;
  if (f.requests < 1 || f.requests > most)
    return ids.refuse(StatusCode::kInvalidArgument, ".shape[0]", std::to_string(f.requests),
                      fmt::format("1 to {} with {} heads", most, model.heads));
  if (auto status = check_ids(ids, slots, model, f.requests, 1, columns_of(slots)); !status.ok()) return status;
  if (accepted)
    if (auto status = check_counts({place, "accepted"}, *accepted, model, f.requests); !status.ok()) return status;
  if (dst_slots) {
    if (auto status = check_ids_rank(dst, *dst_slots); !status.ok()) return status;
    if (auto status = check_ids(dst, *dst_slots, model, f.requests, 1, columns_of(*dst_slots)); !status.ok())
      return status;
  }
  const auto stride_of = [](const TensorView& v) { return v.shape[0] > 1 ? v.stride[0] : 1; };
  f.conv = static_cast<std::uint16_t*>(caches.conv.data);
  f.state = static_cast<float*>(caches.state.data);
  f.records = static_cast<std::uint8_t*>(caches.records->data);
  f.slots = static_cast<const std::int32_t*>(slots.data);
  f.slots_stride = stride_of(slots);
  if (accepted) f.accepted = static_cast<const std::int32_t*>(accepted->data);
  f.dst_slots = dst_slots ? static_cast<const std::int32_t*>(dst_slots->data) : f.slots;
  f.dst_stride = dst_slots ? stride_of(*dst_slots) : f.slots_stride;
  *fold = f;
  return {};
}

Status check_conv_weight(const TensorView& conv_weight, std::int64_t channels, const char* place) {
  return check_conv({place, "conv_weight"}, conv_weight, channels, conv_weight.device);
}

Status check_decode_conv(const TensorView& conv_weight, const TensorView& out) {
  const char* place = "kda.decode_conv_weight";
  const Operand o{place, "out"};
  if (auto status = check_dtype(o, out, DType::kF32); !status.ok()) return status;
  if (auto status = check_rank(o, out, 3); !status.ok()) return status;
  const std::int64_t channels = out.shape[2];
  if (channels < kKdaHeadDim || channels > kKdaMaxHeads * kKdaHeadDim || channels % kKdaHeadDim != 0)
    return o.refuse(StatusCode::kInvalidArgument, ".shape[2]", std::to_string(channels),
                    "multiples of 128 from 128 to 16384");
  if (auto status = check_conv_weight(conv_weight, channels, place); !status.ok()) return status;
  if (auto status =
          check_weight(o, out, dense(DType::kF32, {3, kKdaConvWidth, channels}), conv_weight.device, sizeof(float));
      !status.ok())
    return status;
  const std::int64_t elements = 3 * kKdaConvWidth * channels;
  if (meet(extent("out", out.data, elements, 1, 1, sizeof(float)),
           extent("conv_weight", conv_weight.data, elements, 1, 1, dtype_size(conv_weight.dtype))))
    return o.refuse(StatusCode::kOverlap, "", hex(out.data), "memory that does not meet conv_weight",
                    "give out its own memory");
  return {};
}

void transpose_conv_weight(const TensorView& conv_weight, std::int64_t channels, float* out) {
  for (std::int64_t s = 0; s < 3; ++s)
    for (std::int64_t i = 0; i < kKdaConvWidth; ++i)
      for (std::int64_t c = 0; c < channels; ++c)
        out[(s * kKdaConvWidth + i) * channels + c] = value_at(conv_weight, (s * channels + c) * kKdaConvWidth + i);
}

void fill_owned(const KdaWeights& weights, std::int64_t channels, float* owned) {
  transpose_conv_weight(weights.conv_weight, channels, owned);
  float* bias = owned + KdaOwned::bias_offset(channels);
  for (std::int64_t c = 0; c < 3 * channels; ++c) bias[c] = weights.conv_bias ? value_at(*weights.conv_bias, c) : 0.0f;
  float* norm = owned + KdaOwned::norm_offset(channels);
  for (std::int64_t v = 0; v < kKdaHeadDim; ++v) norm[v] = value_at(weights.norm_weight, v);
}

}  // namespace twostep
