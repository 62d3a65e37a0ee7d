#include "measure/kda_layers.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "core/check.h"
#include "measure/values.h"

namespace twostep {
namespace {

constexpr std::uint64_t kSeed = 1;

std::int64_t up256(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Bytes of one layer's weights, and where each begins.
struct WeightPlaces {
  explicit WeightPlaces(int heads) {
    const std::int64_t d = std::int64_t{kKdaHeadDim} * heads;
    f_b = up256(12 * d * 4);
    a_log = f_b + up256(d * kKdaHeadDim * 2);
    dt_bias = a_log + up256(std::int64_t{heads} * 4);
    norm = dt_bias + up256(d * 4);
    bytes = norm + up256(kKdaHeadDim * 4);
  }
  std::int64_t f_b, a_log, dt_bias, norm, bytes;
};

TensorView vector_view(void* data, DType dtype, Device device, std::int64_t size) {
  TensorView v;
  v.data = data;
  v.dtype = dtype;
  v.device = device;
  v.rank = 1;
  v.shape[0] = size;
  v.stride[0] = 1;
  return v;
}

}  // namespace

KdaProblem problem_of(const KdaBenchOptions& options) {
  KdaProblem p;
  p.heads = options.heads;
  p.tokens = p.window = options.tokens;
  p.conv_len = options.conv_len;
  p.dim_first = options.dim_first;
  p.early_caches = options.early_caches;
  p.records = options.records;
  return p;
}

KdaProblem judged_problem(const KdaBenchOptions& options) {
  KdaProblem p = problem_of(options);
  p.requests = 2;
  p.seed = kSeed;
  return p;
}

KdaLayers::KdaLayers(KdaMemory& memory, const KdaBenchOptions& options, std::vector<std::int64_t> requests,
                     std::int64_t cache_bytes, std::shared_ptr<const KdaJudge> judge)
    : memory_(memory),
      options_(options),
      channels_(std::int64_t{kKdaHeadDim} * options.heads),
      columns_(options.records ? 1 : options.tokens),
      judge_(judge ? std::move(judge) : std::make_shared<const KdaJudge>(judged_problem(options))) {
  const std::int64_t q = options.tokens;
  const std::int64_t row = kda_row_stride(options.heads);
  std::int64_t rows = 0;
  for (const std::int64_t b : requests) {
    const KdaRing ring = plan_kda_ring(options.shape(b), cache_bytes);
    plans_[b].ring = ring;
    num_layers_ = std::max(num_layers_, ring.layers);
    rows = std::max(rows, ring.sets * b * q);
  }
  num_slots_ = rows / q * columns_ + 1;  // slot 0 is dead

  // Pages lie where an allocator happened to put them.
  std::vector<std::int32_t> ids(static_cast<std::size_t>(num_slots_ - 1));
  std::iota(ids.begin(), ids.end(), 1);
  std::mt19937_64 random(kSeed);
  for (std::size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[random() % i]);
  const std::size_t table = ids.size() * sizeof(std::int32_t);
  auto* slots = static_cast<std::int32_t*>(memory.allocate(table));
  memory.write(slots, ids.data(), table);
  for (auto& [b, plan] : plans_) plan.slots = slots;
  std::vector<std::int32_t> accepted;
  for (std::int64_t n = 0; n < rows; ++n)
    accepted.push_back(static_cast<std::int32_t>(options.records ? options.shape(1).pending() : 1 + n % q));
  accepted_ = static_cast<std::int32_t*>(memory.allocate(accepted.size() * sizeof(std::int32_t)));
  memory.write(accepted_, accepted.data(), accepted.size() * sizeof(std::int32_t));

  const auto filled = [&](std::int64_t count, const char* name, float scale) {
    void* data = memory.allocate(static_cast<std::size_t>(count) * 2);
    memory.fill(data, count, operand_base(name, kSeed), scale);
    return data;
  };
  projected_ = static_cast<std::uint16_t*>(filled(rows * row, "projected", 1));
  out_ = static_cast<std::uint16_t*>(memory.allocate(static_cast<std::size_t>(rows * channels_) * 2));
  const std::int64_t line = 3 * channels_ * options.conv_len;
  TensorView& conv = caches_.conv;
  conv = vector_view(filled(num_slots_ * line, "conv", 1), DType::kBF16, memory.device(), num_slots_);
  conv.rank = 3;
  conv.shape = {num_slots_, options.conv_len, 3 * channels_, 0};
  if (options.dim_first) std::swap(conv.shape[1], conv.shape[2]);
  conv.stride = {line, conv.shape[2], 1, 0};
  TensorView& state = caches_.state;
  const std::int64_t page = channels_ * kKdaHeadDim;
  state = vector_view(filled(num_slots_ * page * 2, "state", 0.3f), DType::kF32, memory.device(), num_slots_);
  state.rank = 4;
  state.shape = {num_slots_, options.heads, kKdaHeadDim, kKdaHeadDim};
  state.stride = {page, kKdaHeadDim * kKdaHeadDim, kKdaHeadDim, 1};

  if (options.records) make_records();

  const WeightPlaces at(options.heads);
  weights_ = static_cast<std::byte*>(memory.allocate(static_cast<std::size_t>(num_layers_ * at.bytes)));
  for (int layer = 0; layer < num_layers_; ++layer) {
    std::byte* base = weights_ + layer * at.bytes;
    const std::uint64_t seed = operand_base("weights", static_cast<std::uint64_t>(layer));
    memory.fill(base, 2 * 12 * channels_, seed, 0.5f);
    memory.fill(base + at.f_b, channels_ * kKdaHeadDim, seed + 1, weight_scale(kKdaHeadDim));
    memory.fill(base + at.a_log, 2 * options.heads, seed + 2, 0.5f);
    memory.fill(base + at.dt_bias, 2 * channels_, seed + 3, 1);
    memory.fill(base + at.norm, 2 * kKdaHeadDim, seed + 4, 1);
  }
}

// As a step of as many tokens leaves them; a decode step has nothing to fold.
void KdaLayers::make_records() {
  const std::int64_t entries = options_.conv_len - 2, area = kda_record_bytes(options_.heads, entries);
  auto* records = static_cast<std::uint8_t*>(memory_.allocate(static_cast<std::size_t>(num_slots_ * area)));
  memory_.fill(records, num_slots_ * area / 2, operand_base("records", kSeed), 0.5f);
  const std::vector<std::int32_t> counts(static_cast<std::size_t>(options_.heads),
                                         options_.tokens > 1 ? options_.tokens : 0);
  for (std::int64_t slot = 0; slot < num_slots_; ++slot)
    memory_.write(kda_records(records + slot * area, options_.heads, entries, 0).count, counts.data(),
                  counts.size() * sizeof(std::int32_t));
  caches_.records = TensorView::matrix(records, num_slots_, area, memory_.device(), 0, DType::kU8);
}

KdaWeights KdaLayers::weights(int layer) const {
  const WeightPlaces at(options_.heads);
  std::byte* base = weights_ + layer * at.bytes;
  const Device device = memory_.device();
  KdaWeights w;
  w.conv_weight = vector_view(base, DType::kF32, device, 3 * channels_);
  w.conv_weight.rank = 3;
  w.conv_weight.shape = {3 * channels_, 1, kKdaConvWidth, 0};
  w.conv_weight.stride = {kKdaConvWidth, kKdaConvWidth, 1, 0};
  w.f_b = TensorView::matrix(base + at.f_b, channels_, kKdaHeadDim, device);
  w.a_log = vector_view(base + at.a_log, DType::kF32, device, options_.heads);
  w.dt_bias = vector_view(base + at.dt_bias, DType::kF32, device, channels_);
  w.norm_weight = vector_view(base + at.norm, DType::kF32, device, kKdaHeadDim);
  return w;
}

void KdaLayers::prepare(const std::optional<KdaTactic>& tactic, std::optional<std::int64_t> requests) {
  layers_ = &made_[tactic ? to_string(*tactic) : ""];
  make_layers(tactic, requests ? ring(*requests).layers : num_layers_, *layers_);
  for (const auto& [b, plan] : plans_) check_values(layers_->front().tactic({b, options_.tokens}));
}

// Those that are missing of the first `count`.
void KdaLayers::make_layers(const std::optional<KdaTactic>& tactic, int count, std::vector<PreparedKda>& layers) const {
  KdaOptions o;
  o.heads = options_.heads;
  o.gate_lower_bound = -5.0f;
  o.conv_dim_first = options_.dim_first;
  o.early_caches = options_.early_caches;
  if (options_.records) o.state_mode = StateMode::kRecords;
  for (const auto& [b, plan] : plans_)
    o.policies.push_back({{b, options_.tokens}, kda_row_stride(options_.heads), GateSchedule::kInline, tactic});
  for (int layer = static_cast<int>(layers.size()); layer < count; ++layer) {
    PreparedKda made(weights(layer), o);
    made.prepare(caches_);
    layers.push_back(std::move(made));
  }
}

bool KdaLayers::judged(const KdaTactic& tactic) const {
  return std::any_of(values_.begin(), values_.end(), [&](const auto& pair) { return pair.first == tactic; });
}

void KdaLayers::add_values(const KdaTactic& tactic, const KdaErrors& errors) {
  if (!judged(tactic)) values_.emplace_back(tactic, errors);
}

void KdaLayers::check_values(const KdaTactic& tactic) {
  if (!judged(tactic)) {
    const auto scratch = memory_.fresh();
    add_values(tactic, memory_.device().is_cuda() ? judge_->judge(*scratch, tactic) : judge_->judge(*scratch));
  }
  for (const auto& [of, errors] : values_)
    if (const std::string rule = broken_rule(errors); of == tactic && !rule.empty())
      fail(StatusCode::kInternal, "measure.bench_kda", to_string(tactic), rule, "values within kda 11.1",
           "run twostep check kda");
}

void KdaLayers::run(std::int64_t requests, int launch) {
  const Plan& plan = plans_.at(requests);
  const std::int64_t rows = requests * options_.tokens;
  const std::int64_t set = launch % plan.ring.sets;
  const std::int64_t row = kda_row_stride(options_.heads);
  const Device device = memory_.device();
  KdaCall call;
  call.projected = TensorView::matrix(projected_ + set * rows * row, rows, 4 * channels_ + kKdaHeadDim + options_.heads,
                                      device, row);
  call.out = TensorView::matrix(out_ + set * rows * channels_, rows, channels_, device);
  call.caches = caches_;
  call.slots = TensorView::matrix(plan.slots + set * requests * columns_, requests, columns_, device, 0, DType::kI32);
  if (options_.tokens > 1) call.accepted = vector_view(accepted_, DType::kI32, device, requests);
  call.tokens = options_.tokens;
  (*layers_)[static_cast<std::size_t>(launch % plan.ring.layers)].run(call, memory_.stream());
}

KdaRow KdaLayers::row(std::int64_t requests) const {
  const KdaKey key{requests, options_.tokens};
  KdaRow row;
  row.shape = options_.shape(requests);
  row.cpu = !memory_.device().is_cuda();
  row.early_caches = options_.early_caches;
  row.tactic = layers_->front().tactic(key);
  row.kernel = layers_->front().kernel(key);
  row.ring = plans_.at(requests).ring;
  for (const auto& [tactic, errors] : values_)
    if (tactic == row.tactic) row.values = errors;
  return row;
}

}  // namespace twostep
