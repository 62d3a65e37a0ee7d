// Rotary frequencies and scales of a drafter (spec: drafter 4.3-4.5).
#pragma once

#include <vector>

#include "twostep/drafter_config.h"

namespace twostep {

struct Rope {
  std::vector<float> inverse_frequency;  // [rope / 2], FP64 rounded once
  float amplitude = 1;                   // times cos and sin
  float softmax_scale = 1;
};

Rope make_rope(const DrafterConfig& config);

}  // namespace twostep
