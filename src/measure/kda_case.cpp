#include "measure/kda_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <random>

#include "core/bf16.h"
#include "core/check.h"
#include "core/hash.h"
#include "measure/values.h"

namespace twostep {
namespace {

constexpr int kDim = kKdaHeadDim;

struct FreeAligned {
  void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{256}); }
};

class HostMemory final : public KdaMemory {
 public:
  Device device() const override { return Device::cpu(); }
  Stream stream() const override { return {}; }
  std::unique_ptr<KdaMemory> fresh() const override { return std::make_unique<HostMemory>(); }
  void* allocate(std::size_t bytes) override {
    blocks_.emplace_back(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{256})));
    return blocks_.back().get();
  }
  void write(void* to, const void* host, std::size_t bytes) override { std::memcpy(to, host, bytes); }
  void read(void* host, const void* from, std::size_t bytes) override { std::memcpy(host, from, bytes); }
  void fill(void* to, std::int64_t count, std::uint64_t base, float scale) override {
    constexpr std::int64_t kRow = 4096;  // rows are what the threads share
    auto* out = static_cast<std::uint16_t*>(to);
    const std::int64_t whole = count / kRow * kRow;
    fill_host(out, whole / kRow, kRow, kRow, base, Data::kNormal, scale);
    fill_host(out + whole, 1, count - whole, kRow, base + 1, Data::kNormal, scale);
  }

 private:
  std::vector<std::unique_ptr<std::byte, FreeAligned>> blocks_;
};

// Where everything lies, in elements.
struct Extent {
  std::int64_t channels = 0;  // D
  std::int64_t num_slots = 0;
  std::int64_t conv_stride = 0;
  std::int64_t state_stride = 0;
  std::int64_t record_bytes = 0;
  std::int64_t record_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t out_stride = 0;
  std::int64_t slots_stride = 0;  // between rows of the table
  std::int64_t table_rows = 0;    // of slots, accepted and lengths
};

Extent extent_of(const KdaProblem& p) {
  Extent e;
  e.channels = std::int64_t{kDim} * p.heads;
  e.num_slots = p.requests * p.window + 3;  // slot 0 is the null slot, two more belong to nobody
  e.conv_stride = 3 * e.channels * p.conv_len + (p.padded ? 8 : 0);
  e.state_stride = e.channels * kDim + (p.padded ? 4 : 0);
  e.record_bytes = kda_record_bytes(p.heads, p.conv_len - 2);
  e.record_stride = e.record_bytes + (p.padded ? 16 : 0);
  e.row_stride = kda_row_stride(p.heads) + (p.padded ? 8 : 0);
  e.out_stride = e.channels + (p.padded ? 8 : 0);
  e.slots_stride = p.window + (p.padded ? 3 : 0);
  e.table_rows = p.requests + (p.padded ? 2 : 0);
  return e;
}

// ---- Values: functions of a base and a place

float uniform(std::uint64_t base, std::int64_t i) {  // [-1, 1), every bit of the mantissa in use
  return static_cast<float>(mix64(base + static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15ull) >> 40) * 0x1p-23f - 1;
}

template <class T>
T* as(std::vector<std::byte>& bytes) {
  return reinterpret_cast<T*>(bytes.data());
}
template <class T>
const T* as(const std::vector<std::byte>& bytes) {
  return reinterpret_cast<const T*>(bytes.data());
}

std::vector<std::byte> nans(std::int64_t bytes) {
  return std::vector<std::byte>(static_cast<std::size_t>(bytes), std::byte{0xff});
}

// `count` normal values of a weight around `mean`, FP32 or BF16: the same values in both.
std::vector<std::byte> weight_values(const KdaProblem& p, const char* name, std::int64_t count, float mean,
                                     float scale) {
  std::vector<std::uint16_t> bits(static_cast<std::size_t>(count));
  fill_host(bits.data(), 1, count, count, operand_base(name, p.seed), Data::kNormal, scale);
  for (auto& b : bits) b = float_to_bf16(bf16_to_float(b) + mean);
  auto bytes = nans(count * (p.bf16_weights ? 2 : 4));
  if (p.bf16_weights) std::memcpy(bytes.data(), bits.data(), bytes.size());
  else std::transform(bits.begin(), bits.end(), as<float>(bytes), bf16_to_float);
  return bytes;
}

std::vector<std::byte> uniform_values(std::uint64_t base, std::int64_t count, float scale) {
  auto bytes = nans(count * 4);
  for (std::int64_t i = 0; i < count; ++i) as<float>(bytes)[i] = uniform(base, i) * scale;
  return bytes;
}

void fill_weights(const KdaProblem& p, KdaArrays& arrays) {
  const std::int64_t d = extent_of(p).channels;
  arrays[kConvWeight] = weight_values(p, "conv", 12 * d, 0, 0.5f);
  if (p.bias) arrays[kConvBias] = weight_values(p, "bias", 3 * d, 0, 0.2f);
  arrays[kFB] = nans(d * kDim * 2);
  fill_host(as<std::uint16_t>(arrays[kFB]), d, kDim, kDim, operand_base("f_b", p.seed), Data::kNormal,
            weight_scale(kDim));
  arrays[kALog] = uniform_values(operand_base("a_log", p.seed), p.heads, 1);
  arrays[kDtBias] = uniform_values(operand_base("dt_bias", p.seed), d, 2);
  arrays[kNormWeight] = weight_values(p, "norm", kDim, 1, 0.2f);
}

// Slots, accepted, lengths. Ids are a shuffle of the pool; the dead take each of their reasons in turn.
void fill_tables(const KdaProblem& p, const Extent& e, std::uint64_t draw, KdaArrays& arrays) {
  std::seed_seq mix{p.seed, draw, std::uint64_t{0x736c6f74}};
  std::mt19937_64 random(mix);
  const auto below = [&](std::int64_t limit) { return static_cast<int>(random() % static_cast<std::uint64_t>(limit)); };
  std::vector<int> ids(static_cast<std::size_t>(e.num_slots - 1));
  std::iota(ids.begin(), ids.end(), 1);
  for (std::size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[static_cast<std::size_t>(below(i))]);
  std::vector<int> slots(static_cast<std::size_t>(e.table_rows * e.slots_stride), 99);
  std::vector<int> accepted(static_cast<std::size_t>(e.table_rows), 99);
  std::vector<int> lengths(static_cast<std::size_t>(e.table_rows), 99);
  for (std::int64_t n = 0; n < p.requests; ++n) {
    int* row = slots.data() + n * e.slots_stride;
    std::fill_n(row, e.slots_stride, -7);
    for (int t = 0; t < p.window; ++t) row[t] = ids[static_cast<std::size_t>(n * p.window + t)];
    int& a = accepted[static_cast<std::size_t>(n)];
    int& length = lengths[static_cast<std::size_t>(n)];
    a = 1 + below(p.window);
    length = p.lengths ? 1 + below(p.tokens) : p.tokens;
    if (!p.dead || below(2) == 0) continue;
    const int pool = static_cast<int>(e.num_slots);
    switch (below(9)) {
      case 0: row[0] = 0; break;
      case 1: row[0] = -5; break;
      case 2: row[0] = pool; break;
      case 3: row[a - 1] = below(2) ? 0 : std::numeric_limits<int>::max(); break;
      case 4: a = below(2) ? 0 : p.window + 1; break;
      case 5: a = below(2) ? -1 : std::numeric_limits<int>::max(); break;
      case 6: length = 0; break;
      case 7: length = below(2) ? -1 : p.tokens + 1; break;
      case 8: row[p.tokens - 1] = below(2) ? -1 : pool + 4; break;  // in verify, the last store alone
    }
  }
  const auto bytes = [](const std::vector<int>& values) {
    const auto* first = reinterpret_cast<const std::byte*>(values.data());
    return std::vector<std::byte>(first, first + values.size() * sizeof(int));
  };
  arrays[kSlots] = bytes(slots);
  if (p.with_accepted()) arrays[kAccepted] = bytes(accepted);
  if (p.lengths) arrays[kLengths] = bytes(lengths);
}

// One head's records of a slot, in an array of all.
KdaRecords records_at(const KdaProblem& p, const Extent& e, const std::vector<std::byte>& records, int slot, int head) {
  auto* area = reinterpret_cast<std::uint8_t*>(const_cast<std::byte*>(records.data())) + slot * e.record_stride;
  return kda_records(area, p.heads, p.conv_len - 2, head);
}

// Of the requests' slots: what was accepted, or nothing where that is 1 and by chance; counts that do not fit are one
// reason to be dead. Areas of other slots, and entries that are not accepted, hold NaN.
void fill_records(const KdaProblem& p, const Extent& e, std::uint64_t draw, KdaArrays& arrays) {
  std::uint64_t base = mix64(operand_base("records", p.seed) + draw);
  arrays[kRecords] = nans(e.num_slots * e.record_stride);
  for (std::int64_t n = 0; n < p.requests; ++n) {
    const int slot = as<int>(arrays[kSlots])[n * e.slots_stride];
    const int a = p.with_accepted() ? as<int>(arrays[kAccepted])[n] : 1;
    if (slot < 1 || slot >= e.num_slots) continue;
    base = mix64(base);
    const bool fits = !p.dead || base % 8 != 0;
    const bool pending = a > 1 || base / 8 % 2 != 0;
    for (int h = 0; h < p.heads; ++h) {
      const KdaRecords r = records_at(p, e, arrays[kRecords], slot, h);
      *r.count = !fits ? -1 : pending ? std::min(a, p.conv_len - 2) : 0;
      for (int t = 0; t < *r.count && t < kKdaMaxTokens; ++t) {
        const std::uint64_t place = base + static_cast<std::uint64_t>(h * kKdaMaxTokens + t);
        for (int v = 0; v < kDim; ++v) r.u[t * kDim + v] = uniform(place, v) * 0.5f;
        fill_host(r.k + t * kDim, 1, kDim, kDim, mix64(place), Data::kNormal, 0.5f);
        fill_host(r.g + t * kDim, 1, kDim, kDim, mix64(~place), Data::kNormal, 0.5f);
      }
    }
  }
}

// What a request reads, and nothing else: its line, and the state of column accepted - 1.
void fill_caches(const KdaProblem& p, const Extent& e, std::uint64_t draw, KdaArrays& arrays) {
  if (p.records) fill_records(p, e, draw, arrays);
  const std::uint64_t base = mix64(operand_base("state", p.seed) + draw);
  arrays[kConv] = nans(e.num_slots * e.conv_stride * 2);
  arrays[kState] = nans(e.num_slots * e.state_stride * 4);
  const auto fates = kda_fates(p, arrays);
  for (std::int64_t n = 0; n < p.requests; ++n) {
    if (!fates[static_cast<std::size_t>(n)].live) continue;
    const int* row = as<int>(arrays[kSlots]) + n * e.slots_stride;
    const int a = p.with_accepted() ? as<int>(arrays[kAccepted])[n] : 1;
    float* state = as<float>(arrays[kState]) + row[p.records ? 0 : a - 1] * e.state_stride;
    for (std::int64_t i = 0; i < e.channels * kDim; ++i) state[i] = uniform(base + static_cast<std::uint64_t>(n), i);
    std::uint16_t* line = as<std::uint16_t>(arrays[kConv]) + row[0] * e.conv_stride;
    std::vector<std::uint16_t> taps(static_cast<std::size_t>(9 * e.channels));
    fill_host(taps.data(), 1, 9 * e.channels, 9 * e.channels, ~base + static_cast<std::uint64_t>(n), Data::kNormal, 1);
    for (std::int64_t c = 0; c < 3 * e.channels; ++c)
      for (int i = 0; i < 3; ++i)
        line[p.dim_first ? c * p.conv_len + a - 1 + i : (a - 1 + i) * 3 * e.channels + c] =
            taps[static_cast<std::size_t>(3 * c + i)];
  }
}

// ---- Views

using Pointers = std::array<void*, kNumKdaArrays>;

KdaWeights weights_of(const KdaProblem& p, const Pointers& at, Device device) {
  const std::int64_t d = extent_of(p).channels;
  const DType owned = p.bf16_weights ? DType::kBF16 : DType::kF32;
  KdaWeights w;
  w.conv_weight = TensorView::dense(at[kConvWeight], owned, {3 * d, 1, kKdaConvWidth}, device);
  if (p.bias) w.conv_bias = TensorView::dense(at[kConvBias], owned, {3 * d}, device);
  w.f_b = TensorView::dense(at[kFB], DType::kBF16, {d, kDim}, device);
  w.a_log = TensorView::dense(at[kALog], DType::kF32, {p.heads}, device);
  w.dt_bias = TensorView::dense(at[kDtBias], DType::kF32, {d}, device);
  w.norm_weight = TensorView::dense(at[kNormWeight], owned, {kDim}, device);
  return w;
}

KdaOptions options_of(const KdaProblem& p) {
  KdaOptions o;
  o.heads = p.heads;
  if (!p.softplus) o.gate_lower_bound = -5.0f;
  KdaPolicy policy;
  policy.key = {p.requests, p.tokens};
  policy.row_stride = extent_of(p).row_stride;
  policy.tactic = p.tactic;
  o.policies = {policy};
  o.conv_dim_first = p.dim_first;
  o.early_caches = p.early_caches;
  o.state_mode = p.mode();
  return o;
}

KdaCaches caches_of(const KdaProblem& p, const Pointers& at, Device device) {
  const Extent e = extent_of(p);
  KdaCaches caches;
  caches.conv = p.dim_first
                    ? TensorView::dense(at[kConv], DType::kBF16, {e.num_slots, 3 * e.channels, p.conv_len}, device)
                    : TensorView::dense(at[kConv], DType::kBF16, {e.num_slots, p.conv_len, 3 * e.channels}, device);
  caches.conv.stride[0] = e.conv_stride;
  caches.state = TensorView::dense(at[kState], DType::kF32, {e.num_slots, p.heads, kDim, kDim}, device);
  caches.state.stride[0] = e.state_stride;
  if (p.records)
    caches.records = TensorView::matrix(at[kRecords], e.num_slots, e.record_bytes, device, e.record_stride, DType::kU8);
  return caches;
}

KdaCall call_of(const KdaProblem& p, const Pointers& at, Device device) {
  const Extent e = extent_of(p);
  const std::int64_t rows = p.requests * p.tokens;
  KdaCall call;
  call.projected = TensorView::matrix(at[kProjected], rows, 4 * e.channels + kDim + p.heads, device, e.row_stride);
  call.out = TensorView::matrix(at[kOut], rows, e.channels, device, e.out_stride);
  call.caches = caches_of(p, at, device);
  call.slots = p.window > 1 ? TensorView::dense(at[kSlots], DType::kI32, {e.table_rows, p.window}, device)
                            : TensorView::dense(at[kSlots], DType::kI32, {e.table_rows}, device);
  call.slots.stride[0] = e.slots_stride;
  if (p.with_accepted()) call.accepted = TensorView::dense(at[kAccepted], DType::kI32, {e.table_rows}, device);
  if (p.lengths) call.lengths = TensorView::dense(at[kLengths], DType::kI32, {e.table_rows}, device);
  if (p.window != p.tokens) call.tokens = p.tokens;
  return call;
}

// ---- Judgement

std::uint64_t different(const std::byte* a, const std::byte* b, std::int64_t count) {
  std::uint64_t sum = 0;
  if (std::memcmp(a, b, static_cast<std::size_t>(count)) == 0) return 0;
  for (std::int64_t i = 0; i < count; ++i) sum += a[i] != b[i];
  return sum;
}

// Bytes between `used` ones of a row, row by row, or of whole rows where `named` says no.
template <class Named>
std::uint64_t changed_outside(const std::vector<std::byte>& before, const std::vector<std::byte>& after,
                              std::int64_t rows, std::int64_t pitch, std::int64_t used, Named&& named) {
  std::uint64_t sum = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t from = r * pitch + (named(r) ? used : 0);
    sum += different(before.data() + from, after.data() + from, (r + 1) * pitch - from);
  }
  return sum;
}

// Of the record cache, with entries that are written taken out and counts put where they must be.
std::uint64_t changed_records(const KdaProblem& p, const std::vector<KdaFate>& fates, const KdaArrays& before,
                              const KdaArrays& after) {
  const Extent e = extent_of(p);
  std::vector<std::byte> expected = before[kRecords];
  for (const KdaFate& fate : fates)
    for (int h = 0; fate.live && h < p.heads; ++h) {
      const KdaRecords to = records_at(p, e, expected, fate.line, h);
      const KdaRecords from = records_at(p, e, after[kRecords], fate.line, h);
      const int noted = p.tokens > 1 ? fate.length : 0;
      *to.count = noted;
      std::copy_n(from.u, noted * kDim, to.u);
      std::copy_n(from.k, noted * kDim, to.k);
      std::copy_n(from.g, noted * kDim, to.g);
    }
  return different(expected.data(), after[kRecords].data(), static_cast<std::int64_t>(expected.size()));
}

void judge_outputs(const KdaProblem& p, const std::vector<KdaFate>& fates, const KdaArrays& result,
                   const KdaArrays& reference, KdaErrors& errors) {
  const Extent e = extent_of(p);
  for (std::int64_t r = 0; r < p.requests * p.tokens; ++r) {
    const KdaFate& fate = fates[static_cast<std::size_t>(r / p.tokens)];
    const std::uint16_t* out = as<std::uint16_t>(result[kOut]) + r * e.out_stride;
    const std::uint16_t* ref = as<std::uint16_t>(reference[kOut]) + r * e.out_stride;
    for (std::int64_t c = 0; c < e.channels; ++c) {
      if (!fate.live || r % p.tokens >= fate.length) {
        errors.nonzero += out[c] != 0;
        continue;
      }
      const double value = bf16_to_float(out[c]);
      const double wanted = bf16_to_float(ref[c]);
      ++errors.outputs;
      errors.equal += out[c] == ref[c];
      errors.norm += wanted * wanted;
      if (std::isnan(value)) ++errors.nans;
      else errors.difference += (value - wanted) * (value - wanted);
    }
  }
}

// Of one slot; `single`: after one token, whose flips are all there are.
void judge_state(const KdaProblem& p, KdaArray array, int slot, bool single, const KdaArrays& result,
                 const KdaArrays& reference, KdaErrors& errors) {
  const Extent e = extent_of(p);
  for (int h = 0; h < p.heads; ++h) {
    const std::int64_t at = slot * e.state_stride + std::int64_t{h} * kDim * kDim;
    const float* state = as<float>(result[array]) + at;
    const float* ref = as<float>(reference[array]) + at;
    double gap = 0, m = 1;
    std::uint64_t bad = 0;
    for (int i = 0; i < kDim * kDim; ++i) {
      bad += std::isnan(state[i]);
      gap = std::max(gap, std::fabs(double{state[i]} - ref[i]));
      m = std::max(m, std::fabs(double{ref[i]}));
    }
    errors.nans += bad;
    errors.worst = std::max(errors.worst, gap / m);
    if (!single) continue;
    ++errors.heads;
    errors.close += bad == 0 && gap <= 1e-5 * m;
  }
}

void judge_states(const KdaProblem& p, const std::vector<KdaFate>& fates, const KdaArrays& result,
                  const KdaArrays& reference, KdaErrors& errors) {
  for (const KdaFate& fate : fates) {
    for (std::size_t t = 0; t < fate.stores.size(); ++t)
      if (fate.stores[t] >= 0) judge_state(p, kState, fate.stores[t], t == 0, result, reference, errors);
    if (p.records && fate.live) judge_state(p, kFolded, fate.line, false, result, reference, errors);
  }
}

}  // namespace

std::unique_ptr<KdaMemory> make_host_memory() { return std::make_unique<HostMemory>(); }

namespace {

struct Shape {
  KdaModel model;
  KdaLayout layout;
};

Shape shape_of(const KdaProblem& p) {
  alignas(256) static std::byte nowhere[256];  // checks look at addresses, not at values
  Pointers at;
  at.fill(nowhere);
  Shape shape{check_kda(weights_of(p, at, Device::cpu()), options_of(p)), {}};
  shape.layout = check_layouts(shape.model, caches_of(p, at, Device::cpu()));
  return shape;
}

}  // namespace

void check_problem_shape(const KdaProblem& p) {
  (void)shape_of(p);
  if (p.window < p.tokens || (p.with_accepted() && p.window > p.conv_len - 2))
    fail(StatusCode::kInvalidArgument, "measure.kda", "window", std::to_string(p.window),
         fmt::format("{} to L - 2 = {}", p.tokens, p.conv_len - 2), "pass a longer conv line");
}

KdaBuild kda_build_of(const KdaProblem& p, const DeviceFacts& facts) {
  const Shape shape = shape_of(p);
  return kda_build(shape.model, shape.layout, shape.model.options.policies.front(), facts);
}

KdaKernelText kda_fold_text_of(const KdaProblem& p) {
  const Shape shape = shape_of(p);
  return kda_fold_text(shape.model, shape.layout);
}

std::string to_options(const KdaProblem& p) {
  std::string text = fmt::format("--heads {} --requests {} --tokens {} --conv-len {} --window {} --layout {} --gate {}",
                                 p.heads, p.requests, p.tokens, p.conv_len, p.window, p.dim_first ? "ds" : "sd",
                                 p.softplus ? "softplus" : "bound");
  const std::pair<bool, const char*> flags[] = {
      {p.bias, "--bias"}, {p.bf16_weights, "--bf16-weights"}, {p.padded, "--padded"},       {p.lengths, "--lengths"},
      {p.dead, "--dead"}, {p.early_caches, "--early-caches"}, {p.records, "--mode records"}};
  for (const auto& [set, name] : flags)
    if (set) text += fmt::format(" {}", name);
  if (p.tactic)
    text += fmt::format(" --tactic {},{},{}{}", p.tactic->split, p.tactic->warps, p.tactic->pass_rows,
                        p.tactic->stream ? ",stream" : "");
  return text + fmt::format(" --seed {}", p.seed);
}

KdaArrays make_kda_arrays(const KdaProblem& p, std::uint64_t draw) {
  const Extent e = extent_of(p);
  const std::int64_t rows = p.requests * p.tokens;
  KdaArrays arrays;
  fill_weights(p, arrays);
  arrays[kProjected] = nans(rows * e.row_stride * 2);
  fill_host(as<std::uint16_t>(arrays[kProjected]), rows, 4 * e.channels + kDim + p.heads, e.row_stride,
            mix64(operand_base("projected", p.seed) + draw), Data::kNormal, 1);
  arrays[kOut] = nans(rows * e.out_stride * 2);
  fill_tables(p, e, draw, arrays);
  fill_caches(p, e, draw, arrays);
  arrays[kCounters].assign(sizeof(KdaCounters), std::byte{0});
  return arrays;
}

std::vector<KdaFate> kda_fates(const KdaProblem& p, const KdaArrays& arrays) {
  const Extent e = extent_of(p);
  const auto names = [&](int slot) { return slot >= 1 && slot < e.num_slots; };
  std::vector<KdaFate> fates;
  for (std::int64_t n = 0; n < p.requests; ++n) {
    const int* row = as<int>(arrays[kSlots]) + n * e.slots_stride;
    const int a = p.with_accepted() ? as<int>(arrays[kAccepted])[n] : 1;
    const int length = p.lengths ? as<int>(arrays[kLengths])[n] : p.tokens;
    KdaFate fate;
    fate.line = row[0];
    if (p.records) {
      const int count = names(row[0]) ? *records_at(p, e, arrays[kRecords], row[0], 0).count : 0;
      fate.live = names(row[0]) && length >= 1 && length <= p.tokens && a >= 1 && a <= p.conv_len - 2 &&
                  (count == 0 ? a == 1 : a <= std::min(count, kKdaMaxTokens));
      fate.length = fate.live ? length : 0;
      fate.pending = fate.live && count > 0 ? a : 0;
      if (fate.live && (p.tokens == 1 || fate.pending > 0)) fate.stores.push_back(row[0]);
      fates.push_back(fate);
      continue;
    }
    fate.live = names(row[0]) && length >= 1 && length <= p.tokens && a >= 1 && a <= p.window && names(row[a - 1]);
    fate.length = fate.live ? length : 0;
    for (int t = 0; t < fate.length; ++t) fate.stores.push_back(names(row[t]) ? row[t] : -1);
    fates.push_back(fate);
  }
  return fates;
}

namespace {

// In the order of 9.3: the first check that fails decides.
KdaCounters expected_counters(const KdaProblem& p, const KdaArrays& arrays, const std::vector<KdaFate>& fates) {
  const Extent e = extent_of(p);
  KdaCounters counters;
  for (std::int64_t n = 0; n < p.requests; ++n) {
    const int* row = as<int>(arrays[kSlots]) + n * e.slots_stride;
    const int a = p.with_accepted() ? as<int>(arrays[kAccepted])[n] : 1;
    const int length = p.lengths ? as<int>(arrays[kLengths])[n] : p.tokens;
    const KdaFate& fate = fates[static_cast<std::size_t>(n)];
    if (row[0] < 1) continue;
    if (row[0] >= e.num_slots) ++counters.bad_slot;
    else if (length < 0 || length > p.tokens) ++counters.bad_length;
    else if (length == 0) continue;
    else if (a < 1 || a > (p.records ? p.conv_len - 2 : p.window)) ++counters.bad_accepted;
    else if (p.records) counters.stale_records += !fate.live;
    else if (row[a - 1] >= e.num_slots) ++counters.bad_slot;
    else if (fate.live) counters.bad_slot += std::any_of(row, row + length, [&](int s) { return s >= e.num_slots; });
  }
  return counters;
}

Pointers upload_weights(KdaMemory& memory, const KdaArrays& arrays) {
  Pointers at{};
  for (int i = 0; i < kNumKdaArrays; ++i) {
    const auto& bytes = arrays[static_cast<std::size_t>(i)];
    if (bytes.empty()) continue;
    at[static_cast<std::size_t>(i)] = memory.allocate(bytes.size());
    memory.write(at[static_cast<std::size_t>(i)], bytes.data(), bytes.size());
  }
  return at;
}

KdaTestSwitches switches(const char* cpu_path) {
  KdaTestSwitches test;
  test.cpu_path = cpu_path;
  return test;
}

}  // namespace

KdaSide::KdaSide(KdaMemory& memory, const KdaProblem& problem, const KdaArrays& arrays, const char* cpu_path)
    : memory_(memory),
      problem_(problem),
      at_(upload_weights(memory, arrays)),
      kda_(make_prepared_kda(weights_of(problem, at_, memory.device()), options_of(problem), switches(cpu_path))) {
  kda_.prepare(caches_of(problem, Pointers{}, memory.device()));
  kda_.set_counters(static_cast<KdaCounters*>(at_[kCounters]));
}

KdaArrays KdaSide::run(const KdaArrays& arrays) {
  KdaArrays after = arrays;
  for (std::size_t i = kProjected; i < kNumKdaArrays; ++i)
    if (!arrays[i].empty()) memory_.write(at_[i], arrays[i].data(), arrays[i].size());
  kda_.run(call_of(problem_, at_, memory_.device()), memory_.stream());
  const auto read = [&](KdaArray from, KdaArray to) { memory_.read(after[to].data(), at_[from], after[to].size()); };
  for (const KdaArray i : {kOut, kConv, kState, kCounters}) read(i, i);
  if (!problem_.records) return after;
  read(kRecords, kRecords);
  fold(arrays);
  after[kFolded].resize(after[kState].size());
  read(kState, kFolded);
  return after;
}

// All that the step recorded, in place; a decode step recorded nothing.
void KdaSide::fold(const KdaArrays& arrays) {
  const std::vector<KdaFate> fates = kda_fates(problem_, arrays);
  std::vector<int> slots, accepted;
  for (const KdaFate& fate : fates) {
    slots.push_back(fate.live ? fate.line : 0);
    accepted.push_back(problem_.tokens > 1 ? fate.length : 1);
  }
  const auto memory = memory_.fresh();
  const auto upload = [&](const std::vector<int>& values) {
    void* to = memory->allocate(values.size() * sizeof(int));
    memory->write(to, values.data(), values.size() * sizeof(int));
    return TensorView::dense(to, DType::kI32, {problem_.requests}, memory->device());
  };
  const TensorView ids = upload(slots), counts = upload(accepted);
  kda_.fold_records(caches_of(problem_, at_, memory_.device()), ids, counts, {}, memory_.stream());
  // The copies must stay until the fold is done.
  std::byte last;
  memory_.read(&last, at_[kState], 1);
}

double KdaErrors::rms() const { return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference); }

void KdaErrors::add(const KdaErrors& more) {
  outputs += more.outputs;
  equal += more.equal;
  difference += more.difference;
  norm += more.norm;
  heads += more.heads;
  close += more.close;
  worst = std::max(worst, more.worst);
  nans += more.nans;
  conv += more.conv;
  nonzero += more.nonzero;
  outside += more.outside;
  counters += more.counters;
  unrepeated += more.unrepeated;
}

KdaErrors judge_kda(const KdaProblem& p, const KdaArrays& before, const KdaArrays& result, const KdaArrays& reference) {
  const Extent e = extent_of(p);
  const std::vector<KdaFate> fates = kda_fates(p, before);
  std::vector<bool> lines(static_cast<std::size_t>(e.num_slots)), states(lines);
  for (const KdaFate& fate : fates) {
    if (fate.live) lines[static_cast<std::size_t>(fate.line)] = true;
    for (const int slot : fate.stores)
      if (slot >= 0) states[static_cast<std::size_t>(slot)] = true;
  }
  KdaErrors errors;
  judge_outputs(p, fates, result, reference, errors);
  judge_states(p, fates, result, reference, errors);
  const std::int64_t dense = 3 * e.channels * p.conv_len;
  for (std::int64_t s = 0; s < e.num_slots; ++s)
    if (lines[static_cast<std::size_t>(s)])
      errors.conv += different(result[kConv].data() + s * e.conv_stride * 2,
                               reference[kConv].data() + s * e.conv_stride * 2, dense * 2);
  errors.outside += changed_outside(before[kConv], result[kConv], e.num_slots, e.conv_stride * 2, dense * 2,
                                    [&](std::int64_t s) { return lines[static_cast<std::size_t>(s)]; });
  errors.outside +=
      changed_outside(before[kState], result[kState], e.num_slots, e.state_stride * 4, e.channels * kDim * 4,
                      [&](std::int64_t s) { return states[static_cast<std::size_t>(s)]; });
  if (p.records) errors.outside += changed_records(p, fates, before, result);
  errors.outside += changed_outside(before[kOut], result[kOut], p.requests * p.tokens, e.out_stride * 2, e.channels * 2,
                                    [](std::int64_t) { return true; });
  const KdaCounters wanted = expected_counters(p, before, fates);
  const KdaCounters found = *as<KdaCounters>(result[kCounters]);
  errors.counters = (wanted.bad_accepted != found.bad_accepted) + (wanted.bad_slot != found.bad_slot) +
                    (wanted.bad_length != found.bad_length) + (wanted.stale_records != found.stale_records);
  return errors;
}

std::string broken_rule(const KdaErrors& e) {
  constexpr std::uint64_t kPooled = 256;
  if (e.outside > 0) return fmt::format("5.6, 9.2: {} bytes beside the named slots and rows were written", e.outside);
  if (e.nonzero > 0) return fmt::format("9.2: {} outputs of dead rows are not +0", e.nonzero);
  if (e.counters > 0) return fmt::format("9.4: {} counters are wrong", e.counters);
  if (e.nans > 0) return fmt::format("{} NaN in outputs and states", e.nans);
  if (e.conv > 0) return fmt::format("7.3: {} bytes of conv lines differ", e.conv);
  if (!(e.worst <= 5e-3)) return fmt::format("11.1: a state differs by {:.2e} m, above 5e-3", e.worst);
  if (e.equal_share() < 0.99)
    return fmt::format("11.1: {:.2f} % of outputs are equal, below 99", 100 * e.equal_share());
  if (!(e.rms() <= 5e-4)) return fmt::format("11.1: relative RMS of outputs {:.2e}, above 5e-4", e.rms());
  if (e.heads >= kPooled && e.close_share() < 0.98)
    return fmt::format("11.1: {:.2f} % of {} heads within 1e-5 m, below 98", 100 * e.close_share(), e.heads);
  if (e.unrepeated > 0) return fmt::format("11.2: {} bytes differ in a second run", e.unrepeated);
  return {};
}

}  // namespace twostep
