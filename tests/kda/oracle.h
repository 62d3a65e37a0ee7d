// What a step must do, written from kda 4 and 6 - 9 in FP64; shares no code with src/. The caches are pictures in
// host memory, every byte of them, so that a test can compare whole pools.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "twostep/kda.h"

namespace twostep::kda_test {

inline constexpr int kDim = 128;
inline constexpr int kCells = kDim * kDim;  // of the state of one head

double decode_bf16(std::uint16_t bits);
std::uint16_t encode_bf16(double value);  // to nearest, ties to even, in one rounding

// A layer, as values: those that may be BF16 in memory are BF16 numbers.
struct LayerValues {
  int heads = 1;
  std::optional<float> lower_bound = -5.0f;
  float scale = 0.08838834764831845f;
  float norm_eps = 1e-5f;
  std::vector<float> conv_weight;  // [3D][4]
  std::vector<float> conv_bias;    // [3D]; empty: absent
  std::vector<std::uint16_t> f_b;  // [D][128]
  std::vector<float> a_log;        // [H]
  std::vector<float> dt_bias;      // [D]
  std::vector<float> norm_weight;  // [128]
  std::int64_t channels() const { return std::int64_t{kDim} * heads; }
};

// Columns of a projection row.
struct Columns {
  std::int64_t channels;
  std::int64_t part(int s, std::int64_t channel) const { return s * channels + channel; }  // s = Q, K, V
  std::int64_t z(std::int64_t channel) const { return 3 * channels + channel; }
  std::int64_t f(std::int64_t i) const { return 4 * channels + i; }
  std::int64_t beta(std::int64_t head) const { return 4 * channels + kDim + head; }
  std::int64_t used() const { return 4 * channels + kDim + channels / kDim; }
};

// The data of one call. `slots` is a table of which the call sees a part: rows slots_stride apart from slots_first on.
struct Step {
  int heads = 1;
  int requests = 1;
  int tokens = 1;
  std::int64_t row_stride = 0;
  std::vector<std::uint16_t> projected;  // [requests * tokens][row_stride]
  std::vector<std::int32_t> slots;
  std::int64_t slots_first = 0;
  std::int64_t slots_stride = 1;
  std::int64_t slots_rows = 1;
  std::int64_t window = 0;  // columns; 0: the call passes [slots_rows]
  std::optional<std::vector<std::int32_t>> accepted;
  std::optional<std::vector<std::int32_t>> lengths;
  std::optional<int> given_tokens;  // KdaCall::tokens

  std::int64_t rows() const { return std::int64_t{requests} * tokens; }
  Columns columns() const { return {std::int64_t{kDim} * heads}; }
  std::uint16_t& at(std::int64_t row, std::int64_t column) {
    return projected[static_cast<std::size_t>(row * row_stride + column)];
  }
  double value(std::int64_t row, std::int64_t column) const {
    return decode_bf16(projected[static_cast<std::size_t>(row * row_stride + column)]);
  }
  std::int64_t slot(std::int64_t request, std::int64_t column) const {
    return slots[static_cast<std::size_t>(slots_first + request * slots_stride + column)];
  }
};

// Where the caches of a layer lie in one piece of memory. Bases and pitches in bytes.
struct CacheShape {
  int heads = 1;
  std::int64_t slots = 1;
  int conv_len = 3;
  bool dim_first = false;
  std::int64_t conv_base = 0;
  std::int64_t conv_pitch = 0;
  std::int64_t state_base = 0;
  std::int64_t state_pitch = 0;
  std::int64_t record_base = 0;
  std::int64_t record_pitch = 0;  // 0: state mode slots

  bool records() const { return record_pitch > 0; }
  std::int64_t entries() const { return conv_len - 2; }
  std::int64_t most_pending() const { return entries() < kKdaMaxTokens ? entries() : kKdaMaxTokens; }
  std::int64_t conv_bytes() const { return std::int64_t{6} * kDim * heads * conv_len; }  // dense, of a slot
  std::int64_t state_bytes() const { return std::int64_t{4} * kCells * heads; }
  std::int64_t record_bytes() const { return (heads * (1024 * entries() + 4) + 15) / 16 * 16; }
  std::int64_t bytes() const;
  // Slots `pad` bytes further apart than dense, in each cache.
  static CacheShape of(int heads, std::int64_t slots, int conv_len, bool dim_first, std::int64_t pad = 0,
                       bool records = false);
  // All of a slot in one page.
  static CacheShape paged(int heads, std::int64_t slots, int conv_len, bool dim_first, bool records = false);
};

struct Caches {
  CacheShape shape;
  std::vector<std::byte> bytes;

  Caches() = default;
  explicit Caches(const CacheShape& of, std::uint64_t seed = 0);  // NaN everywhere, each with its own payload
  std::uint16_t conv(std::int64_t slot, std::int64_t channel, std::int64_t position) const;
  void set_conv(std::int64_t slot, std::int64_t channel, std::int64_t position, std::uint16_t bits);
  float* state(std::int64_t slot, std::int64_t head);  // [v][k]
  const float* state(std::int64_t slot, std::int64_t head) const;
  // Of the record area: [128] of one token, and the number of tokens.
  float* u(std::int64_t slot, std::int64_t head, std::int64_t token);
  std::uint16_t* k(std::int64_t slot, std::int64_t head, std::int64_t token);
  std::uint16_t* g(std::int64_t slot, std::int64_t head, std::int64_t token);
  std::int32_t& count(std::int64_t slot, std::int64_t head);
  const float* u(std::int64_t slot, std::int64_t head, std::int64_t token) const;
  const std::uint16_t* k(std::int64_t slot, std::int64_t head, std::int64_t token) const;
  const std::uint16_t* g(std::int64_t slot, std::int64_t head, std::int64_t token) const;
  std::int32_t count(std::int64_t slot, std::int64_t head) const;
};

// kStock has the roundings of kda 4.2; kFp32 the last one alone, and must fail where the library passes.
enum class Profile { kStock, kFp32 };

// q, k, v after SiLU and g of one token of one head.
struct Rounded {
  std::array<double, kDim> q, k, v, g;
};

// What the slots, accepted and lengths of a request decide (kda 7 and 9).
struct Fate {
  bool live = false;
  int tokens = 0;                                   // that are run
  std::int64_t line = -1;                           // slot of the conv line
  std::int64_t history = 0;                         // position of its oldest tap
  std::int64_t read = -1;                           // slot of the state
  int pending = 0;                                  // recorded tokens that come first; their state is stored
  std::array<std::int64_t, kKdaMaxTokens> store{};  // slot that token t's state goes to; -1: none
  bool last_to(int token) const;                    // no later token of the request stores to the same slot
};
std::vector<Fate> fates(const Step& step, std::int64_t pool, std::int64_t first_live_slot, KdaCounters* counts);
// The same, in records mode with the counts of head 0.
std::vector<Fate> fates(const Step& step, const Caches& before, std::int64_t first_live_slot, KdaCounters* counts);

// The conv lines after the step, in place.
void shift_lines(const Step& step, const std::vector<Fate>& fates, Caches* caches);

// Steps 1, 3 and 5 for token t of a live request.
Rounded token_inputs(const LayerValues& layer, const Step& step, const Caches& before, const Fate& fate, int request,
                     int token, int head, Profile profile);

// Steps 4 and 6 - 10 on the state of one head, [k][v]: the transpose of the cache.
using State = std::vector<double>;
State load_state(const float* cells);
// The first `tokens` records of a slot's head, in order.
void fold(const LayerValues& layer, const Caches& caches, std::int64_t slot, int head, int tokens, double* state);
std::array<std::uint16_t, kDim> advance(const LayerValues& layer, const Step& step, std::int64_t row, int head,
                                        const Rounded& inputs, Profile profile, double* state);

}  // namespace twostep::kda_test
