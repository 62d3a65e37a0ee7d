// One draft of one request: Markov bias, pick, confidence (spec: drafter 6). Host arithmetic; allocates nothing.
//
// Of a score, NaN counts as -inf and +inf as the largest value: the lowest id that has it is taken. A row with no score
// above -inf gives token 0 and is reported as `nonfinite`.
#pragma once

#include <cstdint>
#include <limits>

#include "core/bf16.h"
#include "drafter/philox.h"
#include "twostep/tensor.h"

namespace twostep {

// FP32 or BF16 values side by side.
struct RowView {
  const void* data = nullptr;
  DType dtype = DType::kF32;

  float operator[](std::int64_t i) const {
    return dtype == DType::kF32 ? static_cast<const float*>(data)[i]
                                : bf16_to_float(static_cast<const std::uint16_t*>(data)[i]);
  }
};

// The same, to write to; without data nothing is kept.
struct OutRow {
  void* data = nullptr;
  DType dtype = DType::kF32;

  // Stores value i and returns what a reader of the row will see.
  float keep(std::int64_t i, float value) const {
    if (!data) return value;
    if (dtype == DType::kF32) return static_cast<float*>(data)[i] = value;
    return bf16_to_float(static_cast<std::uint16_t*>(data)[i] = float_to_bf16(value));
  }
};

// The best score so far and its token.
struct Best {
  double score = -std::numeric_limits<double>::infinity();
  std::int32_t token = -1;  // none above -inf yet

  // In ascending order of tokens: of equal scores the first stays. NaN compares as false.
  void consider(double value, std::int64_t id) {
    if (value > score) *this = {value, static_cast<std::int32_t>(id)};
  }
};

// Below 1e-5, and where it is NaN, a temperature counts as 0.
inline bool is_greedy(float temperature) { return !(temperature >= 1e-5f); }

struct MarkovHead {
  const std::uint16_t* w2 = nullptr;  // [vocab, rank] BF16, packed
  std::int64_t vocab = 0;             // below 2^31
  std::int64_t rank = 0;              // a multiple of 8
  float logit_scale = 1;
  std::int64_t first_token = 0;  // id of row 0 where the rows are one rank's; a multiple of 4
};

struct Pick {
  std::int32_t token = 0;
  bool nonfinite = false;
};

// x = argmax over v of l[v] * fl32(1/temperature) + G(v), or of l[v] where is_greedy(temperature); lowest id on ties.
//   l[v] = fl32(base[v] + logit_scale * (W2[v] . e)), the product an FP32 sum in a fixed order
//   e    [rank] BF16    row x_{i-1} of W1
//   base [vocab] FP32 or BF16
//   out  [vocab] FP32 or BF16; l is rounded to it before it is used, so that softmax(out / temperature) is exactly the
//        law of x. Greedy draft mode is temperature 0 and no out.
// G(v) is Gumbel noise of kDraftStream at `key`, whose position is s_i. Spread over OpenMP's threads where V is large;
// the bits of out and x do not depend on their number.
Pick pick_draft(const MarkovHead& head, const std::uint16_t* e, RowView base, float temperature, const DrawKey& key,
                OutRow out = {});

struct ConfidenceHead {
  RowView weight;           // [hidden + rank]
  std::int64_t hidden = 0;  // a multiple of 8
  std::int64_t rank = 0;    // a multiple of 8; 0: no Markov input
  float bias = 0;
};

// sigmoid((w . [h | e] + bias) / temperature) in FP32, `temperature` the calibration of this draft. e is not read where
// rank is 0. The survival of draft i is the product of the confidences of drafts 0 to i.
float confidence(const ConfidenceHead& head, const std::uint16_t* h, const std::uint16_t* e, float temperature = 1);

}  // namespace twostep
