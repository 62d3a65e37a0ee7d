#include "tests/kda/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace twostep::kda_test {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x / (1 + std::exp(-x)); }
double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }
double r16(double x) { return decode_bf16(encode_bf16(x)); }

std::uint64_t mix(std::uint64_t z) {  // splitmix64
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::size_t conv_offset(const CacheShape& shape, std::int64_t slot, std::int64_t channel, std::int64_t position) {
  const std::int64_t cell = shape.dim_first ? channel * shape.conv_len + position
                                            : position * (std::int64_t{3} * kDim * shape.heads) + channel;
  return static_cast<std::size_t>(shape.conv_base + slot * shape.conv_pitch + 2 * cell);
}

std::size_t record_offset(const CacheShape& shape, std::int64_t slot, std::int64_t head, std::int64_t in_block) {
  return static_cast<std::size_t>(shape.record_base + slot * shape.record_pitch + head * 1024 * shape.entries() +
                                  in_block);
}
std::size_t count_offset(const CacheShape& shape, std::int64_t slot, std::int64_t head) {
  return record_offset(shape, slot, shape.heads, 4 * head);
}

std::size_t state_offset(const CacheShape& shape, std::int64_t slot, std::int64_t head) {
  return static_cast<std::size_t>(shape.state_base + slot * shape.state_pitch + head * 4 * kCells);
}

}  // namespace

double decode_bf16(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// 8 significant bits, exponents from -126, multiples of 2^-133 below.
std::uint16_t encode_bf16(double value) {
  if (std::isnan(value)) return 0x7fc0;
  double rounded = value;
  if (std::isfinite(value) && value != 0) {
    const int lowest = std::max(std::ilogb(value), -126) - 7;
    rounded = std::scalbn(std::nearbyint(std::scalbn(value, -lowest)), lowest);
  }
  const auto single = static_cast<float>(rounded);  // exact, or infinite
  std::uint32_t bits;
  std::memcpy(&bits, &single, 4);
  return static_cast<std::uint16_t>(bits >> 16);
}

std::int64_t CacheShape::bytes() const {
  return std::max({conv_base + (slots - 1) * conv_pitch + conv_bytes(),
                   state_base + (slots - 1) * state_pitch + state_bytes(),
                   records() ? record_base + (slots - 1) * record_pitch + record_bytes() : 0});
}

CacheShape CacheShape::of(int heads, std::int64_t slots, int conv_len, bool dim_first, std::int64_t pad, bool records) {
  CacheShape shape{heads, slots, conv_len, dim_first};
  shape.conv_pitch = shape.conv_bytes() + pad;
  shape.state_pitch = shape.state_bytes() + pad;
  shape.state_base = slots * shape.conv_pitch + 1024;  // what lies between is NaN too
  if (!records) return shape;
  shape.record_base = shape.state_base + slots * shape.state_pitch + 1024;
  shape.record_pitch = shape.record_bytes() + pad;
  return shape;
}

CacheShape CacheShape::paged(int heads, std::int64_t slots, int conv_len, bool dim_first, bool records) {
  CacheShape shape{heads, slots, conv_len, dim_first};
  shape.state_base = shape.conv_bytes();
  shape.conv_pitch = shape.state_pitch = shape.conv_bytes() + shape.state_bytes();
  if (!records) return shape;
  shape.record_base = shape.conv_pitch;
  shape.conv_pitch += shape.record_bytes();
  shape.state_pitch = shape.record_pitch = shape.conv_pitch;
  return shape;
}

Caches::Caches(const CacheShape& of, std::uint64_t seed) : shape(of), bytes(static_cast<std::size_t>(of.bytes())) {
  // As BF16 and as FP32, every element is a NaN; no two neighbours are alike, so that a copy to a wrong place shows.
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    word = (mix(seed + i) & 0x003f003f003f003fu) | 0x7fc07fc07fc07fc0u;
    std::memcpy(bytes.data() + i, &word, std::min<std::size_t>(8, bytes.size() - i));
  }
}

std::uint16_t Caches::conv(std::int64_t slot, std::int64_t channel, std::int64_t position) const {
  std::uint16_t bits;
  std::memcpy(&bits, bytes.data() + conv_offset(shape, slot, channel, position), 2);
  return bits;
}

void Caches::set_conv(std::int64_t slot, std::int64_t channel, std::int64_t position, std::uint16_t bits) {
  std::memcpy(bytes.data() + conv_offset(shape, slot, channel, position), &bits, 2);
}

float* Caches::state(std::int64_t slot, std::int64_t head) {
  return reinterpret_cast<float*>(bytes.data() + state_offset(shape, slot, head));
}
const float* Caches::state(std::int64_t slot, std::int64_t head) const {
  return reinterpret_cast<const float*>(bytes.data() + state_offset(shape, slot, head));
}

float* Caches::u(std::int64_t slot, std::int64_t head, std::int64_t token) {
  return reinterpret_cast<float*>(bytes.data() + record_offset(shape, slot, head, 512 * token));
}
std::uint16_t* Caches::k(std::int64_t slot, std::int64_t head, std::int64_t token) {
  const std::int64_t in_block = 512 * shape.entries() + 256 * token;
  return reinterpret_cast<std::uint16_t*>(bytes.data() + record_offset(shape, slot, head, in_block));
}
std::uint16_t* Caches::g(std::int64_t slot, std::int64_t head, std::int64_t token) {
  const std::int64_t in_block = 768 * shape.entries() + 256 * token;
  return reinterpret_cast<std::uint16_t*>(bytes.data() + record_offset(shape, slot, head, in_block));
}
std::int32_t& Caches::count(std::int64_t slot, std::int64_t head) {
  return *reinterpret_cast<std::int32_t*>(bytes.data() + count_offset(shape, slot, head));
}
const float* Caches::u(std::int64_t slot, std::int64_t head, std::int64_t token) const {
  return const_cast<Caches*>(this)->u(slot, head, token);
}
const std::uint16_t* Caches::k(std::int64_t slot, std::int64_t head, std::int64_t token) const {
  return const_cast<Caches*>(this)->k(slot, head, token);
}
const std::uint16_t* Caches::g(std::int64_t slot, std::int64_t head, std::int64_t token) const {
  return const_cast<Caches*>(this)->g(slot, head, token);
}
std::int32_t Caches::count(std::int64_t slot, std::int64_t head) const {
  return const_cast<Caches*>(this)->count(slot, head);
}

bool Fate::last_to(int token) const {
  for (int later = token + 1; later < tokens; ++later)
    if (store[static_cast<std::size_t>(later)] == store[static_cast<std::size_t>(token)]) return false;
  return true;
}

std::vector<Fate> fates(const Step& step, std::int64_t pool, std::int64_t first_live_slot, KdaCounters* counts) {
  std::vector<Fate> all(static_cast<std::size_t>(step.requests));
  const std::int64_t window = std::max<std::int64_t>(step.window, 1);
  for (int n = 0; n < step.requests; ++n) {
    Fate& fate = all[static_cast<std::size_t>(n)];
    fate.store.fill(-1);
    // The order is that of 9.3; the first that fails decides.
    const std::int64_t line = step.slot(n, 0);
    if (line < first_live_slot) continue;
    if (line >= pool) {
      ++counts->bad_slot;
      continue;
    }
    const int length = step.lengths ? (*step.lengths)[static_cast<std::size_t>(n)] : step.tokens;
    if (length < 0 || length > step.tokens) {
      ++counts->bad_length;
      continue;
    }
    if (length == 0) continue;
    const std::int64_t accepted = step.accepted ? (*step.accepted)[static_cast<std::size_t>(n)] : 1;
    if (accepted < 1 || accepted > window) {
      ++counts->bad_accepted;
      continue;
    }
    const std::int64_t read = step.slot(n, accepted - 1);
    if (read < first_live_slot) continue;
    if (read >= pool) {
      ++counts->bad_slot;
      continue;
    }
    fate.live = true;
    fate.tokens = length;
    fate.line = line;
    fate.history = accepted - 1;
    fate.read = read;
    bool store_past_pool = false;
    for (int t = 0; t < length; ++t) {
      const std::int64_t slot = step.slot(n, t);
      store_past_pool |= slot >= pool;
      if (slot >= first_live_slot && slot < pool) fate.store[static_cast<std::size_t>(t)] = slot;
    }
    counts->bad_slot += store_past_pool;
  }
  return all;
}

std::vector<Fate> fates(const Step& step, const Caches& before, std::int64_t first_live_slot, KdaCounters* counts) {
  const CacheShape& shape = before.shape;
  if (!shape.records()) return fates(step, shape.slots, first_live_slot, counts);
  std::vector<Fate> all(static_cast<std::size_t>(step.requests));
  for (int n = 0; n < step.requests; ++n) {
    Fate& fate = all[static_cast<std::size_t>(n)];
    fate.store.fill(-1);
    const std::int64_t slot = step.slot(n, 0);
    const int length = step.lengths ? (*step.lengths)[static_cast<std::size_t>(n)] : step.tokens;
    const std::int64_t accepted = step.accepted ? (*step.accepted)[static_cast<std::size_t>(n)] : 1;
    if (slot < first_live_slot) continue;
    if (slot >= shape.slots) {
      ++counts->bad_slot;
      continue;
    }
    if (length < 0 || length > step.tokens) {
      ++counts->bad_length;
      continue;
    }
    if (length == 0) continue;
    if (accepted < 1 || accepted > shape.entries()) {
      ++counts->bad_accepted;
      continue;
    }
    const std::int32_t count = before.count(slot, 0);
    if (count == 0 ? accepted != 1 : accepted > count || accepted > kKdaMaxTokens) {
      ++counts->stale_records;
      continue;
    }
    fate.live = true;
    fate.tokens = length;
    fate.line = fate.read = slot;
    fate.history = accepted - 1;
    fate.pending = count > 0 ? static_cast<int>(accepted) : 0;
    if (step.tokens == 1) fate.store[0] = slot;
  }
  return all;
}

void shift_lines(const Step& step, const std::vector<Fate>& fates, Caches* caches) {
  const std::int64_t channels = step.columns().channels;
  for (int n = 0; n < step.requests; ++n) {
    const Fate& fate = fates[static_cast<std::size_t>(n)];
    if (!fate.live) continue;
    for (std::int64_t c = 0; c < 3 * channels; ++c) {
      const std::uint16_t h1 = caches->conv(fate.line, c, fate.history + 1);
      const std::uint16_t h2 = caches->conv(fate.line, c, fate.history + 2);
      caches->set_conv(fate.line, c, 0, h1);
      caches->set_conv(fate.line, c, 1, h2);
      for (int t = 0; t < fate.tokens; ++t) {
        const std::int64_t row = std::int64_t{n} * step.tokens + t;
        caches->set_conv(fate.line, c, 2 + t, step.projected[static_cast<std::size_t>(row * step.row_stride + c)]);
      }
    }
  }
}

Rounded token_inputs(const LayerValues& layer, const Step& step, const Caches& before, const Fate& fate, int request,
                     int token, int head, Profile profile) {
  const Columns columns = step.columns();
  const std::int64_t first_row = std::int64_t{request} * step.tokens;
  const auto round = [profile](double x) { return profile == Profile::kStock ? r16(x) : x; };
  Rounded inputs;
  for (int s = 0; s < 3; ++s) {
    auto& y = s == 0 ? inputs.q : s == 1 ? inputs.k : inputs.v;
    for (int j = 0; j < kDim; ++j) {
      const std::int64_t channel = columns.part(s, std::int64_t{kDim} * head + j);
      double acc = layer.conv_bias.empty() ? 0 : layer.conv_bias[static_cast<std::size_t>(channel)];
      for (int tap = 0; tap < 4; ++tap) {
        const int place = token + tap;  // in the sequence h0, h1, h2, x_0, x_1, ...
        const double x = place < 3 ? decode_bf16(before.conv(fate.line, channel, fate.history + place))
                                   : step.value(first_row + place - 3, channel);
        acc += layer.conv_weight[static_cast<std::size_t>(4 * channel + tap)] * x;
      }
      y[static_cast<std::size_t>(j)] = round(silu(acc));
    }
  }
  std::array<double, kDim> f;
  for (int i = 0; i < kDim; ++i) f[static_cast<std::size_t>(i)] = step.value(first_row + token, columns.f(i));
  for (int j = 0; j < kDim; ++j) {
    const std::uint16_t* weights = layer.f_b.data() + (std::size_t{kDim} * static_cast<std::size_t>(head) + j) * kDim;
    double sum = 0;
    for (std::size_t i = 0; i < kDim; ++i) sum += f[i] * decode_bf16(weights[i]);
    inputs.g[static_cast<std::size_t>(j)] = round(sum);
  }
  return inputs;
}

State load_state(const float* cells) {
  State state(kCells);
  for (std::size_t v = 0; v < kDim; ++v)
    for (std::size_t k = 0; k < kDim; ++k) state[k * kDim + v] = cells[v * kDim + k];
  return state;
}

namespace {

// Step 4, of k.
std::array<double, kDim> unit_k(const std::array<double, kDim>& k) {
  double squares = 1e-6;
  for (const double x : k) squares += x * x;
  std::array<double, kDim> unit;
  for (std::size_t j = 0; j < kDim; ++j) unit[j] = k[j] / std::sqrt(squares);
  return unit;
}

// Step 6, of the head's channel j.
double decay_of(const LayerValues& layer, int head, std::size_t j, double g) {
  const double a = std::exp(static_cast<double>(layer.a_log[static_cast<std::size_t>(head)]));
  const double s = g + layer.dt_bias[static_cast<std::size_t>(head) * kDim + j];
  return std::exp(layer.lower_bound ? *layer.lower_bound * sigmoid(a * s) : -a * softplus(s));
}

}  // namespace

void fold(const LayerValues& layer, const Caches& caches, std::int64_t slot, int head, int tokens, double* state) {
  for (int t = 0; t < tokens; ++t) {
    std::array<double, kDim> k;
    std::transform(caches.k(slot, head, t), caches.k(slot, head, t) + kDim, k.begin(), decode_bf16);
    k = unit_k(k);
    for (std::size_t j = 0; j < kDim; ++j) {
      const double decay = decay_of(layer, head, j, decode_bf16(caches.g(slot, head, t)[j]));
      for (std::size_t v = 0; v < kDim; ++v)
        state[j * kDim + v] = state[j * kDim + v] * decay + caches.u(slot, head, t)[v] * k[j];
    }
  }
}

std::array<std::uint16_t, kDim> advance(const LayerValues& layer, const Step& step, std::int64_t row, int head,
                                        const Rounded& inputs, Profile profile, double* state) {
  const Columns columns = step.columns();
  std::array<double, kDim> q, k, decay, p{}, u, o{};

  double q_squares = 1e-6;
  for (const double x : inputs.q) q_squares += x * x;
  for (std::size_t j = 0; j < kDim; ++j) q[j] = layer.scale * (inputs.q[j] / std::sqrt(q_squares));
  k = unit_k(inputs.k);
  for (std::size_t j = 0; j < kDim; ++j) decay[j] = decay_of(layer, head, j, inputs.g[j]);
  const double beta = sigmoid(step.value(row, columns.beta(head)));

  for (std::size_t j = 0; j < kDim; ++j)
    for (std::size_t v = 0; v < kDim; ++v) {
      state[j * kDim + v] *= decay[j];
      p[v] += state[j * kDim + v] * k[j];
    }
  for (std::size_t v = 0; v < kDim; ++v) u[v] = beta * (inputs.v[v] - p[v]);
  for (std::size_t j = 0; j < kDim; ++j)
    for (std::size_t v = 0; v < kDim; ++v) {
      state[j * kDim + v] += u[v] * k[j];
      o[v] += state[j * kDim + v] * q[j];
    }

  double squares = 0;
  for (double& x : o) {
    if (profile == Profile::kStock) x = r16(x);
    squares += x * x;
  }
  const double factor = 1 / std::sqrt(squares / kDim + layer.norm_eps);
  std::array<std::uint16_t, kDim> out;
  for (std::size_t v = 0; v < kDim; ++v) {
    const double z = step.value(row, columns.z(std::int64_t{kDim} * head + static_cast<std::int64_t>(v)));
    out[v] = encode_bf16(o[v] * factor * layer.norm_weight[v] * sigmoid(z));
  }
  return out;
}

}  // namespace twostep::kda_test
