#include "drafter/verify.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

namespace twostep {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();  // the logarithm of 0

RowView row_of(const TensorView& rows, std::int64_t i) {
  const std::int64_t bytes = i * rows.stride[0] * static_cast<std::int64_t>(dtype_size(rows.dtype));
  return {static_cast<const std::byte*>(rows.data) + bytes, rows.dtype};
}

// A law over tokens, as logarithms.
struct Law {
  std::int32_t token = -1;  // where the row has no data, all is on this one; -1: on none
  RowView row = {};
  float z = 1;
  double log_sum = 0;  // log of the sum of exp(row * z)

  double log(std::int64_t v) const {
    if (!row.data) return v == token ? 0 : kNever;
    const float scaled = row[v] * z;
    return std::isnan(scaled) ? kNever : scaled - log_sum;
  }
};

Best largest(RowView row, float z, std::int64_t vocab) {
  Best best;
  for (std::int64_t v = 0; v < vocab; ++v) best.consider(row[v] * z, v);
  return best;
}

Law softmax(RowView row, float z, std::int64_t vocab) {
  const Best best = largest(row, z, vocab);
  if (!std::isfinite(best.score)) return {std::max(best.token, 0)};
  double sum = 0;
  for (std::int64_t v = 0; v < vocab; ++v)
    if (const float scaled = row[v] * z; !std::isnan(scaled)) sum += std::exp(scaled - best.score);
  return {-1, row, z, best.score + std::log(sum)};
}

// log max(p' - q, 0) from log p' and log q.
double log_residual(double p, double q) { return q >= p ? kNever : p + std::log1p(-std::exp(q - p)); }

// log P_i = log min(P_{i-1} * p / q, 1). A draft that the target cannot emit ends the block for good.
double log_prefix(double before, double p, double q) {
  if (before == kNever || p == kNever) return kNever;
  return std::min(before + p - q, 0.0);
}

struct Walk {
  int accepted_drafts = 0;
  double log_prefix = 0;  // log P_tau; 0 under kStandard
};

class Verification {
 public:
  Verification(const VerifyRequest& request, int drafts)
      : r_(request),
        drafts_(drafts),
        vocab_(request.target.shape[1]),
        z_(is_greedy(request.temperature) ? 1 : 1 / request.temperature) {}

  Walk standard() const {
    int i = 0;
    while (i < drafts_ && target(i).log(r_.drafts[i]) > std::log(u(i)) + draft(i).log(r_.drafts[i])) ++i;
    return {i};
  }

  // The largest i whose draft passes, so failures do not end the walk.
  Walk block() const {
    if (drafts_ == 0) return {};
    Walk kept;
    double prefix = 0;
    Law p = target(0), q = draft(0);
    for (int i = 1; i <= drafts_; ++i) {
      const std::int32_t x = r_.drafts[i - 1];
      prefix = log_prefix(prefix, p.log(x), q.log(x));
      double h = std::exp(prefix);
      if (i < drafts_) {
        p = target(i);
        q = draft(i);
        const double kept_mass = residual_mass(prefix, p, q), all = kept_mass - std::expm1(prefix);
        h = all == 0 ? 1 : kept_mass / all;
      }
      if (u(i - 1) <= h) kept = {i, prefix};
    }
    return kept;
  }

  // The token after the accepted drafts.
  std::int32_t next(const Walk& walk) const {
    const int i = walk.accepted_drafts;
    const Law p = target(i), none;
    if (i < drafts_)
      if (const Best best = draw(i, p, walk.log_prefix, draft(i)); best.token >= 0) return best.token;
    return draw(i, p, 0, none).token;  // the bonus token, or a residual that rounding has emptied
  }

  // Of row i; 0 where it has no value above -inf.
  std::int32_t argmax(int i) const { return std::max(largest(row_of(r_.target, i), 1, vocab_).token, 0); }

  bool nonfinite(int i) const {
    const RowView row = row_of(r_.target, i);
    std::int64_t v = 0;
    while (v < vocab_ && !(row[v] > kNever)) ++v;
    return v == vocab_;
  }

 private:
  Law target(int i) const { return softmax(row_of(r_.target, i), 1, vocab_); }
  Law draft(int i) const {
    return r_.draft_logits.data ? softmax(row_of(r_.draft_logits, i), z_, vocab_) : Law{r_.drafts[i]};
  }

  std::uint32_t position(int i) const { return r_.key.position + static_cast<std::uint32_t>(i); }
  double u(int i) const { return uniform(philox(r_.key.seed, 0, position(i), r_.key.step, kAcceptStream)[0]); }

  // S_i: the sum over tokens of max(P_i * p - q, 0).
  double residual_mass(double prefix, const Law& p, const Law& q) const {
    double sum = 0;
    for (std::int64_t v = 0; v < vocab_; ++v)
      if (const double log_p = prefix + p.log(v), log_q = q.log(v); log_p > log_q)
        sum += std::exp(log_p) - std::exp(log_q);
    return sum;
  }

  // From max(P * p - q, 0) normalised; no token where that is 0 everywhere.
  Best draw(int i, const Law& p, double prefix, const Law& q) const {
    Best best;
    std::array<std::uint32_t, 4> words{};
    for (std::int64_t v = 0; v < vocab_; ++v) {
      if (v % 4 == 0)
        words = philox(r_.key.seed, static_cast<std::uint32_t>(v / 4), position(i), r_.key.step, kResampleStream);
      const std::uint32_t word = words[static_cast<std::size_t>(v % 4)];
      const double log_p = prefix + p.log(v);
      if (log_p + gumbel_ceiling(word) > best.score) best.consider(log_residual(log_p, q.log(v)) + gumbel(word), v);
    }
    return best;
  }

  const VerifyRequest& r_;
  const int drafts_;  // k_r
  const std::int64_t vocab_;
  const float z_;  // of the drafts
};

int leading_valid(const VerifyRequest& request) {
  const auto valid = [&](std::int32_t id) { return id >= 0 && id < request.target.shape[1]; };
  return static_cast<int>(std::ranges::find_if_not(request.drafts, valid) - request.drafts.begin());
}

}  // namespace

VerifyResult verify(VerifyMethod method, const VerifyRequest& request, std::span<std::int32_t> emitted) {
  const int drafts = leading_valid(request);
  const Verification verification(request, drafts);
  std::ranges::fill(emitted, -1);
  int accepted = 0;
  if (is_greedy(request.temperature)) {
    for (;; ++accepted) {
      emitted[accepted] = verification.argmax(accepted);
      if (accepted == drafts || emitted[accepted] != request.drafts[accepted]) break;
    }
  } else {
    const Walk walk = method == VerifyMethod::kBlock ? verification.block() : verification.standard();
    accepted = walk.accepted_drafts;
    std::copy_n(request.drafts.begin(), accepted, emitted.begin());
    emitted[accepted] = verification.next(walk);
  }
  VerifyResult result{accepted};
  for (int i = 0; i <= accepted; ++i) result.nonfinite |= verification.nonfinite(i);
  return result;
}

}  // namespace twostep
