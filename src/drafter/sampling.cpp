#include "drafter/sampling.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace twostep {
namespace {

constexpr std::int64_t kTile = 256;  // tokens per piece of work; a multiple of Philox's four
constexpr std::int64_t kLanes = 8;
constexpr std::int64_t kParallelFrom = 1 << 18;  // multiply-adds, 0.06 ms of one EPYC core

// Of two pieces of a row. Total order, so the pieces may meet in any order.
Best better(const Best& a, const Best& b) {
  const bool first = a.score > b.score || (a.score == b.score && a.token < b.token);
  return first ? a : b;
}
#pragma omp declare reduction(better:Best : omp_out = better(omp_out, omp_in))

float value_of(float value) { return value; }
float value_of(std::uint16_t bits) { return bf16_to_float(bits); }

// FP32: element i goes to sum i % 8, then the eight sums are added by halves. The compiler can vectorise this as it is.
template <class Weight>
float dot(const Weight* w, const std::uint16_t* x, std::int64_t count) {
  float sums[kLanes] = {};
  for (std::int64_t i = 0; i < count; i += kLanes)
    for (std::int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += value_of(w[i + lane]) * bf16_to_float(x[i + lane]);
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2)
    for (std::int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

Best largest(const float* logits, std::int64_t first, std::int64_t count) {
  Best best;
  for (std::int64_t i = 0; i < count; ++i) best.consider(logits[i], first + i);
  return best;
}

Best draw(const float* logits, std::int64_t first, std::int64_t count, float z, const DrawKey& key) {
  Best best;
  std::array<std::uint32_t, 4> words{};
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t v = first + i;
    if (v % 4 == 0) words = philox(key.seed, static_cast<std::uint32_t>(v / 4), key.position, key.step, kDraftStream);
    const std::uint32_t word = words[static_cast<std::size_t>(v % 4)];
    const float scaled = logits[i] * z;
    if (scaled + gumbel_ceiling(word) > best.score) best.consider(scaled + gumbel(word), v);
  }
  return best;
}

}  // namespace

Pick pick_draft(const MarkovHead& head, const std::uint16_t* e, RowView base, float temperature, const DrawKey& key,
                OutRow out) {
  const auto best_of_tile = [&](std::int64_t first) {
    const std::int64_t count = std::min(kTile, head.vocab - first);
    float logits[kTile];
    for (std::int64_t i = 0; i < count; ++i) {
      const float bias = head.logit_scale * dot(head.w2 + (first + i) * head.rank, e, head.rank);
      logits[i] = out.keep(first + i, base[first + i] + bias);
    }
    const std::int64_t token = head.first_token + first;
    return is_greedy(temperature) ? largest(logits, token, count) : draw(logits, token, count, 1 / temperature, key);
  };
  Best best;
  if (head.vocab * head.rank < kParallelFrom) {  // no team, and not the lock by which its parts meet
    for (std::int64_t first = 0; first < head.vocab; first += kTile) best = better(best, best_of_tile(first));
  } else {
#pragma omp parallel for schedule(static) reduction(better : best)
    for (std::int64_t first = 0; first < head.vocab; first += kTile) best = better(best, best_of_tile(first));
  }
  return best.token < 0 ? Pick{static_cast<std::int32_t>(head.first_token), true} : Pick{best.token, false};
}

float confidence(const ConfidenceHead& head, const std::uint16_t* h, const std::uint16_t* e, float temperature) {
  const auto sum = [&](const auto* w) { return dot(w, h, head.hidden) + dot(w + head.hidden, e, head.rank); };
  const float product = head.weight.dtype == DType::kF32 ? sum(static_cast<const float*>(head.weight.data))
                                                         : sum(static_cast<const std::uint16_t*>(head.weight.data));
  return 1 / (1 + std::exp(-(product + head.bias) / temperature));
}

}  // namespace twostep
