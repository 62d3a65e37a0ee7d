#include "measure/kda_bytes.h"

#include <algorithm>

#include "twostep/kda.h"

namespace twostep {

int least_conv_len(int tokens, bool records) {
  if (tokens == 1 && records) return 2 + kKdaMaxTokens;
  return tokens == 1 ? 3 : 2 + tokens;
}

std::int64_t kda_weight_bytes(int heads) { return std::int64_t{heads} * (6144 + 32768 + 512 + 4) + 512; }

std::int64_t kda_request_bytes(const KdaShape& shape) {
  const std::int64_t h = shape.heads;
  const std::int64_t q = shape.tokens;
  // Three taps touch every 32-byte sector of a DS line.
  const std::int64_t taps = shape.dim_first && shape.conv_len > 3 ? 768 * std::int64_t{shape.conv_len} : 2304;
  if (q == 1) return h * (131072 + taps + 2304 + 1026 + 256) + 260;
  if (shape.records)
    return h * (131072 + taps + 768 * (q + 2) + 1282 * q + 1024 * (shape.pending() + q) + 8) + 256 * q + 8;
  return h * (65536 * (1 + q) + taps + 768 * (q + 2) + 1282 * q) + 260 * q + 4;
}

std::int64_t kda_step_bytes(const KdaShape& shape) {
  return kda_weight_bytes(shape.heads) + shape.requests * kda_request_bytes(shape);
}

std::int64_t kda_state_bytes(const KdaShape& shape) {
  const int written = shape.records ? 1 : shape.tokens;
  return std::int64_t{65536} * (1 + written) * shape.heads * shape.requests;
}

double kda_writes_per_read(const KdaShape& shape) {
  const int q = shape.tokens;
  if (!shape.records || q == 1) return q;
  // State, conv line, projection or output, records and count of a head.
  return (65536.0 + 768 * (q + 2) + 256 * q + 1024 * q + 4) / (65536.0 + 2304 + 1026 * q + 1024 * shape.pending() + 4);
}

std::optional<double> kda_bar_us(const KdaShape& shape, double floor_us, bool early_caches) {
  if (shape.tokens == 1) return 1.12 * floor_us + (early_caches ? 3 : 4);
  if (shape.tokens == 4 || shape.tokens == 8) return (shape.records ? 1.2 : 1.12) * floor_us + 5;
  return std::nullopt;
}

std::optional<double> kda_cpu_bar_us(const KdaShape& shape, double copy_rate) {
  if (shape.tokens != 1) return std::nullopt;
  return static_cast<double>(kda_state_bytes(shape)) / (0.6 * copy_rate);
}

KdaRing plan_kda_ring(const KdaShape& shape, std::int64_t cache_bytes) {
  constexpr std::int64_t kModelLayers = 69;
  constexpr std::int64_t kLeastLaunches = 64;
  // Two large sets in turn would find a part of themselves in a cache that does not replace the oldest first.
  constexpr std::int64_t kLeast = 3;
  const auto up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const std::int64_t past = std::max<std::int64_t>(256'000'000, 4 * cache_bytes);
  const std::int64_t slots = std::int64_t{65536} * shape.heads * shape.requests * (shape.records ? 1 : shape.tokens);
  const std::int64_t layers = std::clamp(up(past, kda_step_bytes(shape)), kLeast, kModelLayers);
  const std::int64_t sets = up(up(past, slots), layers) * layers;
  return {static_cast<int>(layers), static_cast<int>(sets), static_cast<int>(up(kLeastLaunches, sets) * sets)};
}

int kda_launches(const KdaShape& shape, const KdaRing& ring, std::int64_t bytes) {
  const std::int64_t turn = kda_step_bytes(shape) * ring.sets;
  const std::int64_t turns = std::clamp<std::int64_t>(bytes / turn + (bytes % turn > 0), 1, ring.launches / ring.sets);
  return static_cast<int>(turns) * ring.sets;
}

}  // namespace twostep
