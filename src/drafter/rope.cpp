#include "drafter/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace twostep {
namespace {

// YaRN's share of the interpolated frequency: 0 for pairs that turn fast, 1 for those that turn slowly.
double interpolated(const RopeParameters& r, double d, double pair) {
  const auto dimension_of = [&](double turns) {
    return d * std::log(static_cast<double>(r.original_max_position_embeddings) / (2 * std::numbers::pi * turns)) /
           (2 * std::log(r.rope_theta));
  };
  const double low = std::max(std::floor(dimension_of(r.beta_fast)), 0.0);
  double high = std::min(std::ceil(dimension_of(r.beta_slow)), d - 1);
  if (high == low) high += 0.001;
  return std::clamp((pair - low) / (high - low), 0.0, 1.0);
}

double magnitude(double scale, double factor) { return 0.1 * scale * std::log(factor) + 1; }

}  // namespace

Rope make_rope(const DrafterConfig& config) {
  const RopeParameters& r = config.rope;
  const bool yarn = r.rope_type != "default";
  const auto d = static_cast<double>(config.qk_rope_head_dim);
  const auto width = static_cast<double>(config.qk_nope_head_dim + config.qk_rope_head_dim);
  Rope rope;
  if (config.mla_use_nope) {  // turned by no angle
    rope.inverse_frequency.assign(static_cast<std::size_t>(config.qk_rope_head_dim / 2), 0.0f);
    rope.softmax_scale = static_cast<float>(1 / std::sqrt(width));
    return rope;
  }
  for (std::int64_t i = 0; i < config.qk_rope_head_dim / 2; ++i) {
    const auto pair = static_cast<double>(i);
    const double frequency = std::pow(r.rope_theta, -2 * pair / d);
    const double ramp = yarn ? interpolated(r, d, pair) : 0;
    rope.inverse_frequency.push_back(static_cast<float>(frequency * (1 - ramp) + frequency / r.factor * ramp));
  }
  const double all = yarn ? magnitude(r.mscale_all_dim, r.factor) : 1;
  rope.amplitude = static_cast<float>(yarn ? magnitude(r.mscale, r.factor) / all : 1);
  rope.softmax_scale = static_cast<float>(all * all / std::sqrt(width));
  return rope;
}

}  // namespace twostep
