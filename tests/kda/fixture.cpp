#include "tests/kda/fixture.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <numeric>
#include <sstream>
#include <thread>
#include <utility>

namespace twostep::kda_test {
namespace {

constexpr std::size_t kGuard = 4096;
constexpr std::uint16_t kPoison = 0xffff;

float to_bf16_number(double value) { return static_cast<float>(decode_bf16(encode_bf16(value))); }

std::vector<std::uint16_t> bf16_bits(const std::vector<float>& values) {
  std::vector<std::uint16_t> bits(values.size());
  std::transform(values.begin(), values.end(), bits.begin(), encode_bf16);
  return bits;
}

// In memory as FP32 or as BF16.
Memory stored(const std::vector<float>& values, DType dtype) {
  return dtype == DType::kF32 ? Memory(values) : Memory(bf16_bits(values));
}
void store(Memory* memory, const std::vector<float>& values, DType dtype) {
  if (dtype == DType::kF32) memory->put(values);
  else memory->put(bf16_bits(values));
}

std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const char* given = std::getenv("TWOSTEP_TEST_SEED");
    return given ? std::strtoull(given, nullptr, 10) : std::uint64_t{std::random_device{}()};
  }();
  return value;
}
std::string replay() { return "replay with TWOSTEP_TEST_SEED=" + std::to_string(seed()); }

void parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& f) {
  const auto cores = static_cast<std::int64_t>(std::max(1u, std::thread::hardware_concurrency()));
  std::atomic<std::int64_t> next = 0;
  std::exception_ptr error;
  std::once_flag first;
  const auto work = [&] {
    try {
      for (std::int64_t i = next++; i < count; i = next++) f(i);
    } catch (...) {
      std::call_once(first, [&] { error = std::current_exception(); });
    }
  };
  std::vector<std::thread> others;
  for (std::int64_t i = 1; i < std::min(cores, count); ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  if (error) std::rethrow_exception(error);
}

// ---- Memory of the backend

Memory::Memory(const void* values, std::size_t bytes, Place place)
    : bytes_(bytes), front_(kGuard + static_cast<std::size_t>(place.offset)), back_(place.last ? 0 : kGuard) {
  base_ = backend().allocate(front_ + bytes_ + back_);
  const std::vector<std::byte> guard(front_ + back_, std::byte{0xff});
  backend().upload(base_, guard.data(), front_);
  if (back_ > 0) backend().upload(static_cast<char*>(data()) + bytes_, guard.data(), back_);
  if (values) put(values, bytes_);
  else poison();
}
Memory::Memory(Memory&& other) noexcept { *this = std::move(other); }
Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  std::swap(front_, other.front_);
  std::swap(back_, other.back_);
  return *this;
}
Memory::~Memory() {
  if (base_) backend().release(base_);
}
void Memory::poison() { put(std::vector<std::byte>(bytes_, std::byte{0xff})); }
void Memory::put(const void* from, std::size_t bytes) {
  ASSERT_LE(bytes, bytes_);
  if (bytes > 0) backend().upload(data(), from, bytes);
}
void Memory::take(void* to) const {
  if (bytes_ > 0) backend().download(to, data(), bytes_);
  std::vector<std::uint8_t> guard(front_ + back_);
  backend().download(guard.data(), base_, front_);
  if (back_ > 0) backend().download(guard.data() + front_, static_cast<const char*>(data()) + bytes_, back_);
  EXPECT_EQ(std::count(guard.begin(), guard.end(), 0xff), static_cast<std::ptrdiff_t>(guard.size()))
      << "bytes around an operand were written";
}

TensorView view_of(const Memory& memory, DType dtype, std::vector<std::int64_t> shape) {
  TensorView view;
  view.data = memory.data();
  view.dtype = dtype;
  view.device = backend().device();
  view.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    view.shape[i] = shape[i];
    view.stride[i] = stride;
    stride *= shape[i];
  }
  return view;
}

// ---- The layer

LayerValues random_layer(Random& random, const LayerSpec& spec) {
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  const auto sign = [&random] { return random() % 2 ? 1.0 : -1.0; };
  LayerValues layer;
  layer.heads = spec.heads;
  if (spec.softplus) layer.lower_bound.reset();
  const auto channels = static_cast<std::size_t>(layer.channels());
  // Of realistic size, but no larger than where one BF16 step more in k, v or g ("flip", kda 4.5) stays within the
  // 5e-3 of 11.1. A step in a v of 4 does not; nor does one in a g of 1, if exp(A_log) = 16 and g + dt_bias is near 0,
  // where the lower-bound gate is steepest. So: taps of 1/4 to 1/2, g of about 1/4, dt_bias away from 0.
  layer.conv_weight.resize(12 * channels);
  for (float& x : layer.conv_weight) x = to_bf16_number((0.25 + 0.25 * uniform(random)) * sign());
  layer.conv_bias.resize(spec.bias ? 3 * channels : 0);
  for (float& x : layer.conv_bias) x = to_bf16_number(0.2 * normal(random));
  layer.f_b.resize(channels * kDim);
  for (std::uint16_t& x : layer.f_b) x = encode_bf16(0.25 * normal(random) / std::sqrt(128.0));
  layer.a_log.resize(static_cast<std::size_t>(spec.heads));
  for (float& x : layer.a_log) x = static_cast<float>(std::log(16.0) * uniform(random));
  layer.dt_bias.resize(channels);
  for (float& x : layer.dt_bias) x = static_cast<float>((1 + 2 * uniform(random)) * sign());
  layer.norm_weight.resize(kDim);
  for (float& x : layer.norm_weight) x = to_bf16_number(1 + 0.1 * normal(random));
  return layer;
}

void forget(LayerValues& layer) {
  for (float& x : layer.a_log) x = 0;
  for (float& x : layer.dt_bias) x = -std::abs(x);
}

Layer::Layer(LayerValues values, DType small)
    : values_(std::move(values)),
      small_(small),
      conv_weight_(stored(values_.conv_weight, small)),
      conv_bias_(stored(values_.conv_bias, small)),
      f_b_(values_.f_b),
      a_log_(values_.a_log),
      dt_bias_(values_.dt_bias),
      norm_weight_(stored(values_.norm_weight, small)) {}

KdaWeights Layer::weights() const {
  const std::int64_t channels = values_.channels();
  KdaWeights weights;
  weights.conv_weight = view_of(conv_weight_, small_, {3 * channels, 1, 4});
  if (!values_.conv_bias.empty()) weights.conv_bias = view_of(conv_bias_, small_, {3 * channels});
  weights.f_b = view_of(f_b_, DType::kBF16, {channels, kDim});
  weights.a_log = view_of(a_log_, DType::kF32, {values_.heads});
  weights.dt_bias = view_of(dt_bias_, DType::kF32, {channels});
  weights.norm_weight = view_of(norm_weight_, small_, {kDim});
  return weights;
}

void Layer::put(LayerValues values) {
  values_ = std::move(values);
  store(&conv_weight_, values_.conv_weight, small_);
  store(&conv_bias_, values_.conv_bias, small_);
  f_b_.put(values_.f_b);
  a_log_.put(values_.a_log);
  dt_bias_.put(values_.dt_bias);
  store(&norm_weight_, values_.norm_weight, small_);
}

// ---- The object under test

KdaCaches cache_views(const CacheShape& shape, void* base) {
  const auto at = [base](std::int64_t bytes) {
    return base ? static_cast<void*>(static_cast<char*>(base) + bytes) : base;
  };
  const std::int64_t channels = std::int64_t{3} * kDim * shape.heads;
  KdaCaches caches;
  TensorView& conv = caches.conv;
  conv.data = at(shape.conv_base);
  conv.dtype = DType::kBF16;
  conv.rank = 3;
  conv.device = backend().device();
  conv.shape = {shape.slots, shape.conv_len, channels, 0};
  if (shape.dim_first) std::swap(conv.shape[1], conv.shape[2]);
  conv.stride = {shape.conv_pitch / 2, conv.shape[2], 1, 0};
  TensorView& state = caches.state;
  state.data = at(shape.state_base);
  state.dtype = DType::kF32;
  state.rank = 4;
  state.device = backend().device();
  state.shape = {shape.slots, shape.heads, kDim, kDim};
  state.stride = {shape.state_pitch / 4, kCells, kDim, 1};
  if (shape.records())
    caches.records = TensorView::matrix(at(shape.record_base), shape.slots, shape.record_bytes(), backend().device(),
                                        shape.record_pitch, DType::kU8);
  return caches;
}

KdaOptions kda_options(const LayerValues& layer, const CacheShape& shape, const RigOptions& options) {
  KdaOptions result;
  result.heads = layer.heads;
  result.gate_lower_bound = layer.lower_bound;
  result.scale = layer.scale;
  result.norm_eps = layer.norm_eps;
  result.conv_dim_first = shape.dim_first;
  if (shape.records()) result.state_mode = StateMode::kRecords;
  result.first_live_slot = options.first_live_slot;
  result.early_caches = options.early_caches;
  for (const KdaKey key : options.keys) {
    KdaPolicy policy;
    policy.key = key;
    policy.row_stride = options.row_stride;
    policy.tactic = options.tactic;
    result.policies.push_back(policy);
  }
  return result;
}

namespace {

std::size_t rounded_bytes(const LayerValues& layer, const RigOptions& options) {
  std::int64_t rows = 0;
  for (const KdaKey key : options.keys) rows = std::max(rows, key.requests * key.tokens);
  return options.strict ? static_cast<std::size_t>(rows * 4 * layer.channels() * 2) : 0;
}

RigOptions bound_to(RigOptions options, const LayerValues& layer, const Memory& rounded) {
  if (options.row_stride == 0) options.row_stride = kda_row_stride(layer.heads);
  if (options.strict) options.switches.rounded = static_cast<std::uint16_t*>(rounded.data());
  return options;
}

}  // namespace

Rig::Rig(const Layer& layer, const CacheShape& shape, RigOptions options)
    : layer_(&layer.values()),
      shape_(shape),
      rounded_(rounded_bytes(layer.values(), options)),
      counters_(sizeof(KdaCounters)),
      kda((options_ = bound_to(std::move(options), layer.values(), rounded_),
           make_prepared_kda(layer.weights(), kda_options(layer.values(), shape, options_), options_.switches))) {
  kda.prepare(cache_views(shape, nullptr));
  if (options_.counters) kda.set_counters(static_cast<KdaCounters*>(counters_.data()));
}

KdaCounters Rig::counters() const {
  const std::vector<std::uint32_t> counts = counters_.get<std::uint32_t>();
  return {counts[0], counts[1], counts[2], counts[3]};
}

void Rig::clear() {
  counters_.put(std::vector<std::uint32_t>(4, 0));
  rounded_.poison();
}

// ---- One call

Bound::Bound(const Step& step, const Caches& caches, const Placement& placement)
    : step_(step),
      shape_(caches.shape),
      out_stride_(placement.out_stride ? placement.out_stride : step.columns().channels),
      projected_(step.projected, {placement.projected_offset, false}),
      out_(static_cast<std::size_t>(step.rows() * out_stride_ * 2), {placement.out_offset, false}),
      caches_(caches.bytes, {placement.caches_offset, false}),
      slots_(step.slots, {0, placement.slots_last}) {
  if (step.accepted) accepted_ = Memory(*step.accepted, {0, placement.slots_last});
  if (step.lengths) lengths_ = Memory(*step.lengths, {0, placement.slots_last});
}

KdaCall Bound::call() const {
  const std::int64_t channels = step_.columns().channels;
  const Device device = backend().device();
  KdaCall call;
  call.projected =
      TensorView::matrix(projected_.data(), step_.rows(), step_.columns().used(), device, step_.row_stride);
  call.out = TensorView::matrix(out_.data(), step_.rows(), channels, device, out_stride_);
  call.caches = cache_views(shape_, caches_.data());
  call.slots.data = static_cast<std::int32_t*>(slots_.data()) + step_.slots_first;
  call.slots.dtype = DType::kI32;
  call.slots.rank = step_.window > 0 ? 2 : 1;
  call.slots.shape = {step_.slots_rows, step_.window, 0, 0};
  call.slots.stride = {step_.slots_stride, 1, 0, 0};
  call.slots.device = device;
  const auto list = [](const Memory& memory) {
    return view_of(memory, DType::kI32, {static_cast<std::int64_t>(memory.bytes() / 4)});
  };
  if (step_.accepted) call.accepted = list(accepted_);
  if (step_.lengths) call.lengths = list(lengths_);
  call.tokens = step_.given_tokens;
  return call;
}

void Bound::put(const Step& step) {
  step_ = step;
  projected_.put(step.projected);
  slots_.put(step.slots);
  if (step.accepted) accepted_.put(*step.accepted);
  if (step.lengths) lengths_.put(*step.lengths);
}
void Bound::put(const Caches& caches) { caches_.put(caches.bytes); }
void Bound::poison_out() { out_.poison(); }

Outcome Bound::read(const Rig& rig) const {
  Outcome outcome;
  outcome.out_stride = out_stride_;
  outcome.out = out_.get<std::uint16_t>();
  outcome.caches.shape = shape_;
  outcome.caches.bytes = caches_.get<std::byte>();
  outcome.rounded = rig.rounded();
  if (rig.options().counters) outcome.counters = rig.counters();
  // The other operands are only read.
  const auto unchanged = [](const auto& values, const Memory& memory) {
    const auto now = memory.get<typename std::decay_t<decltype(values)>::value_type>();
    EXPECT_TRUE(now == values) << "an input was written";
  };
  unchanged(step_.slots, slots_);
  if (step_.accepted) unchanged(*step_.accepted, accepted_);
  if (step_.lengths) unchanged(*step_.lengths, lengths_);
  unchanged(step_.projected, projected_);
  return outcome;
}

Outcome run(Rig& rig, const Step& step, const Caches& caches, const Placement& placement) {
  const Bound bound(step, caches, placement);
  rig.clear();
  rig.kda.run(bound.call(), backend().stream());
  return bound.read(rig);
}

Caches folded(Rig& rig, const Caches& caches, const std::vector<std::int32_t>& slots,
              const std::optional<std::vector<std::int32_t>>& accepted,
              const std::optional<std::vector<std::int32_t>>& dst_slots) {
  const Memory memory(caches.bytes), ids(slots);
  const KdaCaches views = cache_views(caches.shape, memory.data());
  const auto rows = static_cast<std::int64_t>(slots.size());
  const auto list = [rows](const Memory& values) { return view_of(values, DType::kI32, {rows}); };
  rig.clear();
  if (accepted) {
    const Memory counts(*accepted), targets(dst_slots.value_or(std::vector<std::int32_t>{}));
    rig.kda.fold_records(views, list(ids), list(counts), dst_slots ? std::optional(list(targets)) : std::nullopt,
                         backend().stream());
  } else {
    rig.kda.reset_records(views, list(ids), backend().stream());
  }
  Caches after;
  after.shape = caches.shape;
  after.bytes = memory.get<std::byte>();
  return after;
}

// ---- Steps and caches

Step random_step(Random& random, int heads, int requests, int tokens, std::int64_t row_stride, std::int64_t pool,
                 std::int64_t window, std::int64_t first_live_slot) {
  std::normal_distribution<double> normal;
  Step step;
  step.heads = heads;
  step.requests = requests;
  step.tokens = tokens;
  step.row_stride = row_stride;
  step.projected.assign(static_cast<std::size_t>(step.rows() * row_stride), kPoison);
  for (std::int64_t row = 0; row < step.rows(); ++row)
    for (std::int64_t column = 0; column < step.columns().used(); ++column)
      step.at(row, column) = encode_bf16(normal(random));
  step.window = window ? window : tokens;
  step.slots_stride = step.window;
  step.slots_rows = requests;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(pool - first_live_slot));
  std::iota(ids.begin(), ids.end(), static_cast<std::int32_t>(first_live_slot));
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(static_cast<std::size_t>(requests * step.window));
  step.slots = ids;
  if (tokens > 1) step.accepted = std::vector<std::int32_t>(static_cast<std::size_t>(requests), 1);
  if (step.window != tokens) step.given_tokens = tokens;
  return step;
}

void fill_state(Random& random, Caches* caches, std::int64_t slot) {
  for (int h = 0; h < caches->shape.heads; ++h) {
    const std::uint64_t base = random();
    float* cells = caches->state(slot, h);
    for (std::size_t i = 0; i < kCells; ++i) {
      const std::uint64_t bits = mix(base + 0x9e3779b97f4a7c15u * (i + 1));
      // The sum of two uniform numbers of -1..1: |S| <= 2.
      cells[i] = static_cast<float>(static_cast<std::int32_t>(bits >> 32)) * 0x1p-31f +
                 static_cast<float>(static_cast<std::int32_t>(bits & 0xffffffffu)) * 0x1p-31f;
    }
  }
}

void fill_records(Random& random, Caches* caches, std::int64_t slot, int tokens, int count) {
  std::normal_distribution<double> normal;
  for (int h = 0; h < caches->shape.heads; ++h) {
    caches->count(slot, h) = count;
    for (int t = 0; t < tokens; ++t)
      for (int j = 0; j < kDim; ++j) {
        caches->u(slot, h, t)[j] = static_cast<float>(0.5 * normal(random));
        caches->k(slot, h, t)[j] = encode_bf16(0.5 * normal(random));
        caches->g(slot, h, t)[j] = encode_bf16(0.25 * normal(random));
      }
  }
}

void fill_line(Random& random, Caches* caches, std::int64_t slot, std::int64_t first, std::int64_t count) {
  std::normal_distribution<double> normal;
  for (std::int64_t channel = 0; channel < 3 * kDim * caches->shape.heads; ++channel)
    for (std::int64_t position = first; position < first + count; ++position)
      caches->set_conv(slot, channel, position, encode_bf16(normal(random)));
}

Caches random_caches(Random& random, const CacheShape& shape, const Step& step, std::int64_t first_live_slot) {
  Caches caches(shape, random());
  KdaCounters ignored;
  for (int n = 0; shape.records() && n < step.requests; ++n) {
    const std::int64_t slot = step.slot(n, 0);
    const std::int64_t accepted = step.accepted ? (*step.accepted)[static_cast<std::size_t>(n)] : 1;
    if (slot < first_live_slot || slot >= shape.slots || accepted < 1 || accepted > shape.most_pending()) continue;
    const std::int64_t spare = shape.most_pending() - accepted;
    const bool fresh = accepted == 1 && random() % 2 == 0;
    const auto count = accepted + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(spare + 1));
    fill_records(random, &caches, slot, fresh ? 0 : static_cast<int>(accepted), fresh ? 0 : static_cast<int>(count));
  }
  for (const Fate& fate : fates(step, caches, first_live_slot, &ignored)) {
    if (!fate.live) continue;
    fill_state(random, &caches, fate.read);
    fill_line(random, &caches, fate.line, fate.history, 3);
  }
  return caches;
}

namespace {

SceneSpec completed(SceneSpec spec) {
  if (spec.shape) spec.pool = spec.shape->slots;
  if (spec.conv_len == 0) spec.conv_len = spec.tokens > 1 ? 2 + spec.tokens : 3;
  if (spec.window == 0) spec.window = spec.tokens;
  if (spec.pool == 0) spec.pool = spec.rig.first_live_slot + spec.requests * spec.window + 1;
  if (spec.rig.row_stride == 0) spec.rig.row_stride = kda_row_stride(spec.heads);
  if (spec.rig.keys.empty()) spec.rig.keys = {{spec.requests, spec.tokens}};
  return spec;
}

CacheShape shape_of(const SceneSpec& spec) {
  if (spec.shape) return *spec.shape;
  return spec.paged ? CacheShape::paged(spec.heads, spec.pool, spec.conv_len, spec.dim_first, spec.records)
                    : CacheShape::of(spec.heads, spec.pool, spec.conv_len, spec.dim_first, spec.pad, spec.records);
}

LayerValues layer_of(Random& random, const SceneSpec& spec, const std::function<void(LayerValues&)>& edit) {
  LayerValues values = random_layer(random, {spec.heads, spec.softplus, spec.bias});
  if (edit) edit(values);
  return values;
}

}  // namespace

Scene::Scene(Random& random, SceneSpec given, const std::function<void(LayerValues&)>& edit)
    : spec(completed(std::move(given))),
      shape(shape_of(spec)),
      layer(layer_of(random, spec, edit), spec.small),
      rig(layer, shape, spec.rig) {
  redraw(random);
}

void Scene::redraw(Random& random) {
  step = random_step(random, spec.heads, spec.requests, spec.tokens, spec.rig.row_stride, spec.pool, spec.window,
                     spec.rig.first_live_slot);
  refill(random);
}

void Scene::refill(Random& random) { before = random_caches(random, shape, step, spec.rig.first_live_slot); }

void Scene::set_slots(std::vector<std::int32_t> table) {
  step.slots = std::move(table);
  step.slots_stride = std::max<std::int64_t>(step.window, 1);
  step.slots_rows = static_cast<std::int64_t>(step.slots.size()) / step.slots_stride;
}

Verdict Scene::judge(const Outcome& outcome, Profile profile) const {
  return kda_test::judge(rig, step, before, outcome, profile);
}

}  // namespace twostep::kda_test
