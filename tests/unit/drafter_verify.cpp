// Verification of drafts: the greedy contract, the laws of both methods, hand-worked cases (spec: drafter 8).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/hash.h"
#include "drafter/verify.h"
#include "tests/common/allocations.h"
#include "tests/unit/chi_square.h"
#include "tests/unit/gemm_oracle.h"
#include "tests/unit/no_bias.h"

namespace twostep {
namespace {

using test::NoBias;
using Tokens = std::vector<std::int32_t>;
using Values = std::vector<float>;
using Method = VerifyMethod;
constexpr Method kMethods[] = {Method::kStandard, Method::kBlock};
constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

#ifdef __SANITIZE_ADDRESS__
constexpr int kShorter = 8;
#else
constexpr int kShorter = 1;
#endif

// Rows of FP32 or BF16, NaN where nothing was set: also between and behind the rows.
class Rows {
 public:
  Rows(std::int64_t rows, std::int64_t vocab, DType dtype = DType::kF32)
      : rows_(rows), vocab_(vocab), dtype_(dtype), f32_(rows * stride(), kNaN), bf16_(rows * stride(), 0x7fc1) {}

  void set(std::int64_t row, std::int64_t v, float value) {
    f32_[row * stride() + v] = value;
    bf16_[row * stride() + v] = float_to_bf16(value);
  }
  void set(std::int64_t row, const Values& values) {
    for (std::int64_t v = 0; v < vocab_; ++v) set(row, v, values[v]);
  }
  float at(std::int64_t row, std::int64_t v) const { return row_of(row)[v]; }
  void* data(std::int64_t row) {
    if (dtype_ == DType::kF32) return f32_.data() + row * stride();
    return bf16_.data() + row * stride();
  }
  RowView row_of(std::int64_t row) const { return {const_cast<Rows*>(this)->data(row), dtype_}; }
  TensorView view(std::int64_t first = 0) {
    return TensorView::matrix(data(first), rows_ - first, vocab_, {}, stride(), dtype_);
  }

 private:
  std::int64_t stride() const { return vocab_ + 3; }
  std::int64_t rows_, vocab_;
  DType dtype_;
  Values f32_;
  std::vector<std::uint16_t> bf16_;
};

struct Verdict {
  VerifyResult result;
  Tokens emitted;
};
Verdict run(Method method, const VerifyRequest& request) {
  Verdict verdict{{}, Tokens(request.drafts.size() + 1, 77)};
  verdict.result = verify(method, request, verdict.emitted);
  return verdict;
}
Verdict run(Method method, const Tokens& drafts, Rows& target, Rows* q, float temperature, DrawKey key = {}) {
  return run(method, {drafts, target.view(), q ? q->view() : TensorView{}, temperature, key});
}

Values logs(const std::vector<double>& law) {
  Values out;
  for (const double p : law) out.push_back(static_cast<float>(std::log(p)));
  return out;
}

std::int32_t argmax(const Values& values) {
  return static_cast<std::int32_t>(std::ranges::max_element(values) - values.begin());
}

// The toy target of the chapter: the logits after tokens a, b.
Values toy(std::uint64_t seed, std::int64_t vocab, std::int64_t a, std::int64_t b) {
  Values row(vocab);
  const std::uint64_t base = fnv1a64("toy") + (seed + a * vocab + b) * 0xd1342543de82ef95ull;
  for (std::int64_t v = 0; v < vocab; ++v)
    row[v] = 4 * (static_cast<float>(mix64(base + (v + 1) * 0x9e3779b97f4a7c15ull) >> 40) * 0x1p-23f - 1);
  return row;
}

// ---- Greedy.

enum class Draft { kGood, kGoodThenBad, kBad, kGarbage, kRepeats, kCount };

Tokens drafts_of(Draft kind, const Tokens& truth, std::int32_t vocab, std::mt19937_64& random) {
  const std::size_t k = truth.size(), turn = random() % k;
  const auto any = [&] { return static_cast<std::int32_t>(random() % (vocab + 4)) - 2; };  // -2..vocab+1
  Tokens drafts = truth;
  for (std::size_t i = 0; i < k; ++i) switch (kind) {
      case Draft::kGoodThenBad:
        if (i < turn) break;
        [[fallthrough]];
      case Draft::kBad: drafts[i] = (truth[i] + 1) % vocab; break;
      case Draft::kGarbage: drafts[i] = i == turn ? -1 : any(); break;
      case Draft::kRepeats: drafts[i] = truth[0]; break;
      default: break;
    }
  return drafts;
}

// Rows base..base + k of the logits that follow the drafts; the rows behind an invalid draft stay NaN.
void fill_target(Rows* rows, std::int64_t base, std::uint64_t seed, std::int64_t vocab, std::int32_t a, std::int32_t b,
                 const Tokens& drafts) {
  for (std::size_t i = 0;; ++i) {
    rows->set(base + static_cast<std::int64_t>(i), toy(seed, vocab, a, b));
    if (i == drafts.size() || drafts[i] < 0 || drafts[i] >= vocab) return;
    a = b;
    b = drafts[i];
  }
}

TEST(GreedyContract, emitted_tokens_are_those_of_greedy_decoding_whatever_the_drafts) {
  std::mt19937_64 random{oracle::seed()};
  SCOPED_TRACE(oracle::replay());
  constexpr std::int64_t kVocab = 24;
  constexpr std::size_t kTokens = 64;
  for (int prompt = 0; prompt < 1000; ++prompt) {
    const std::size_t k = 1 + prompt % 8;
    const std::uint64_t seed = random();
    Tokens truth = {static_cast<std::int32_t>(random() % kVocab), static_cast<std::int32_t>(random() % kVocab)};
    while (truth.size() < 2 + kTokens + k) truth.push_back(argmax(toy(seed, kVocab, truth.end()[-2], truth.end()[-1])));
    for (const Method method : kMethods)
      for (std::size_t done = 2; done < 2 + kTokens;) {
        const auto kind = static_cast<Draft>(random() % static_cast<std::uint64_t>(Draft::kCount));
        const Tokens drafts = drafts_of(kind, Tokens(truth.begin() + done, truth.begin() + done + k), kVocab, random);
        const std::int32_t a = truth[done - 2], b = truth[done - 1];
        // Rows of three requests; the outer ones sample. The draft logits stay NaN.
        const auto width = static_cast<std::int64_t>(k + 1);
        Rows target(3 * width, kVocab), q(3 * width, kVocab);
        std::vector<Verdict> verdicts;
        for (int place = 0; place < 3; ++place) {
          fill_target(&target, place * width, seed, kVocab, a, b, drafts);
          const bool with_logits = random() % 2 == 0;
          verdicts.push_back(run(method, {drafts,
                                          target.view(place * width),
                                          with_logits ? q.view() : TensorView{},
                                          place == 1 ? 0.0f : 1.0f,
                                          {random(), 3, 4}}));
        }
        const auto& [result, emitted] = verdicts[1];
        std::size_t same = 0;
        while (same < k && drafts[same] == truth[done + same]) ++same;
        ASSERT_EQ(result.accepted_drafts, same);
        ASSERT_FALSE(result.nonfinite);
        for (std::size_t i = 0; i <= k; ++i) ASSERT_EQ(emitted[i], i <= same ? truth[done + i] : -1) << i;
        for (const Verdict& other : verdicts) {
          ASSERT_GE(other.result.accepted(), 1);
          for (std::size_t i = 0; i <= k; ++i) {
            const bool kept = static_cast<int>(i) < other.result.accepted();
            ASSERT_TRUE(kept ? other.emitted[i] >= 0 && other.emitted[i] < kVocab : other.emitted[i] == -1);
          }
        }
        done += static_cast<std::size_t>(result.accepted());
      }
  }
}

TEST(GreedyContract, of_equal_logits_the_lowest_id_is_the_answer) {
  Rows target(3, 6);
  for (int i = 0; i < 3; ++i) target.set(i, {0, 2, 1, 2, 2, kNaN});
  for (const Method method : kMethods) {
    EXPECT_EQ(run(method, {1, 3}, target, nullptr, 0).emitted, (Tokens{1, 1, -1}));
    EXPECT_EQ(run(method, {1, 1}, target, nullptr, 0).emitted, (Tokens{1, 1, 1}));
    EXPECT_EQ(run(method, {3, 1}, target, nullptr, 9.9e-6f).emitted, (Tokens{1, -1, -1}));
  }
}

// ---- Rows that are no logits.

TEST(Verify, nan_counts_as_minus_infinity_and_a_row_of_nothing_else_gives_token_0_and_is_told) {
  for (const Method method : kMethods)
    for (const float temperature : {0.0f, 1.0f})
      for (const float nothing : {kNaN, -kInf})
        for (int bad = 0; bad < 4; ++bad) {  // row `bad` has no value; 3: none such
          Rows target(3, 5);
          for (int i = 0; i < 3; ++i) target.set(i, {nothing, nothing, nothing, i == bad ? nothing : -3e38f, nothing});
          for (std::uint32_t step = 0; step < 20; ++step) {
            const auto [result, emitted] = run(method, {3, 3}, target, nullptr, temperature, {1, 2, step});
            const Tokens wanted[] = {{0, -1, -1}, {3, 0, -1}, {3, 3, 0}, {3, 3, 3}};
            ASSERT_EQ(emitted, wanted[bad]);
            ASSERT_EQ(result.nonfinite, bad < 3);
          }
          // Rows behind the first refusal say nothing.
          ASSERT_EQ(run(method, {1, 3}, target, nullptr, temperature).result.nonfinite, bad == 0);
        }
}

TEST(Verify, plus_infinity_takes_all) {
  Rows target(2, 4);
  target.set(0, {1, kInf, kNaN, kInf});
  target.set(1, {1, 2, kInf, 0});
  for (const Method method : kMethods)
    for (const float temperature : {0.0f, 0.7f}) {
      EXPECT_EQ(run(method, {1}, target, nullptr, temperature).emitted, (Tokens{1, 2}));
      EXPECT_EQ(run(method, {3}, target, nullptr, temperature).emitted, (Tokens{1, -1}));
      EXPECT_FALSE(run(method, {1}, target, nullptr, temperature).result.nonfinite);
    }
}

// From such a row pick_draft takes token 0, so 0 must pass as certain, not as impossible.
TEST(Verify, a_draft_from_a_row_without_values_counts_as_certain) {
  Rows target(2, 2), q(1, 2);
  for (int i = 0; i < 2; ++i) target.set(i, logs({0.25, 0.75}));
  int accepted = 0;
  for (std::uint32_t step = 0; step < 4000; ++step)
    for (const Method method : kMethods)
      accepted += run(method, {0}, target, &q, 1, {1, 2, step}).result.accepted_drafts;
  EXPECT_NEAR(accepted / 8000.0, 0.25, 0.03);
}

// The bonus law of row 0, and not its residual, which would be token 0 alone.
TEST(Verify, without_a_valid_draft_the_token_is_drawn_from_the_first_row) {
  Rows target(1, 2), q(2, 2);
  target.set(0, logs({0.2, 0.8}));
  q.set(0, logs({0, 1}));
  for (const Method method : kMethods)
    for (const Tokens& drafts : {Tokens{}, Tokens{-1, 0}, Tokens{2, 0}})
      for (Rows* logits : {&q, static_cast<Rows*>(nullptr)}) {
        int ones = 0;
        for (std::uint32_t step = 0; step < 4000; ++step) {
          const auto [result, emitted] = run(method, drafts, target, logits, 1, {9, 8, step});
          ASSERT_EQ(result.accepted(), 1);
          ones += emitted[0];
        }
        EXPECT_NEAR(ones / 4000.0, 0.8, 0.04);
      }
}

TEST(Verify, allocates_nothing) {
  Rows target(5, 100), q(4, 100);
  for (int i = 0; i < 5; ++i) target.set(i, toy(1, 100, 2, i));
  for (int i = 0; i < 4; ++i) q.set(i, toy(2, 100, 2, i));
  const Tokens drafts = {1, 2, 3, 4};
  Tokens emitted(5);
  for (const Method method : kMethods)
    for (const float temperature : {0.0f, 1.0f}) {
      const VerifyRequest request{drafts, target.view(), q.view(), temperature, {1, 2, 3}};
      const auto before = test::allocations();
      verify(method, request, emitted);
      EXPECT_EQ(test::allocations(), before);
    }
}

// ---- Hand-worked.

double u_of(const DrawKey& key, std::uint32_t i) {
  return uniform(philox(key.seed, 0, key.position + i, key.step, kAcceptStream)[0]);
}

// P_1 = 2/3; S_1 = 2/3 * 0.9 - 0.5 = 0.1, h_1 = 0.1 / (0.1 + 1/3) = 3/13; P_2 = h_2 = 2/3 * 0.1/0.5 = 2/15.
// After one draft only token 0 has a residual, after none only token 1 has.
TEST(BlockByHand, two_drafts) {
  Rows target(3, 2), q(2, 2);
  target.set(0, logs({0.5, 0.5}));
  target.set(1, logs({0.9, 0.1}));
  target.set(2, logs({1, 0}));
  q.set(0, logs({0.75, 0.25}));
  q.set(1, logs({0.5, 0.5}));
  int counts[3] = {};
  for (std::uint32_t step = 0; step < 3000; ++step) {
    const DrawKey key{7, 11, step};
    const int tau = u_of(key, 1) <= 2.0 / 15 ? 2 : u_of(key, 0) <= 3.0 / 13 ? 1 : 0;
    const auto [result, emitted] = run(Method::kBlock, {0, 1}, target, &q, 1, key);
    const Tokens wanted[] = {{1, -1, -1}, {0, 0, -1}, {0, 1, 0}};
    ASSERT_EQ(result.accepted_drafts, tau) << step;
    ASSERT_EQ(emitted, wanted[tau]) << step;
    ++counts[tau];
  }
  EXPECT_NEAR(counts[2] / 3000.0, 2.0 / 15, 0.025);
  EXPECT_NEAR(counts[1] / 3000.0, 13.0 / 15 * 3 / 13, 0.03);
}

// P_1 = 1 and q_2 = p_2: S_1 = 0 and the denominator is 0, so h_1 = 1.
TEST(BlockByHand, drafts_from_the_target_itself_are_all_accepted) {
  Rows target(4, 50), q(3, 50);
  for (int i = 0; i < 4; ++i) target.set(i, toy(3, 50, 1, i));
  for (int i = 0; i < 3; ++i) q.set(i, toy(3, 50, 1, i));
  for (std::uint32_t step = 0; step < 500; ++step)
    for (const Method method : kMethods)
      ASSERT_EQ(run(method, {7, 8, 9}, target, &q, 1, {5, 6, step}).result.accepted_drafts, 3);
}

// The same h_1, but a second draft that neither law has: P_2 = 0. One draft passes, its residual is empty, and the
// token comes from p_2.
TEST(BlockByHand, an_empty_residual_is_drawn_from_the_target) {
  Rows target(3, 3), q(2, 3);
  for (int i = 0; i < 3; ++i) target.set(i, logs({0.25, 0.75, 0}));
  for (int i = 0; i < 2; ++i) q.set(i, logs({0.25, 0.75, 0}));
  int ones = 0;
  for (std::uint32_t step = 0; step < 4000; ++step)
    for (const Method method : kMethods) {
      const auto [result, emitted] = run(method, {0, 2}, target, &q, 1, {5, 6, step});
      ASSERT_EQ(result.accepted_drafts, 1);
      ones += emitted[1];
    }
  EXPECT_NEAR(ones / 8000.0, 0.75, 0.04);
}

// P_1 = 0 must hold for the drafts behind, even for one that q could not give (there the quotient is infinite).
TEST(BlockByHand, a_draft_that_the_target_excludes_ends_the_block) {
  Rows target(3, 3), q(2, 3);
  target.set(0, {-kInf, 0, 0});
  target.set(1, {0, 0, 0});
  target.set(2, {0, 0, 0});
  q.set(0, {0, 0, 0});
  q.set(1, {0, 0, -kInf});
  for (std::uint32_t step = 0; step < 500; ++step)
    for (const Method method : kMethods)
      for (const std::int32_t second : {0, 2}) {
        const auto [result, emitted] = run(method, {0, second}, target, &q, 1, {5, 6, step});
        ASSERT_EQ(result.accepted_drafts, 0);
        ASSERT_GT(emitted[0], 0);
      }
}

// S_1 = 0 with P_1 < 1: P_1 * p_2 is nowhere above q_2, so h_1 = 0, and all hangs on h_2 = P_2.
TEST(BlockByHand, without_residual_the_block_passes_whole_or_not_at_all) {
  Rows target(3, 2), q(2, 2);
  for (int i = 0; i < 3; ++i) target.set(i, logs({0.5, 0.5}));
  q.set(0, logs({1, 0}));
  q.set(1, logs({0.5, 0.5}));
  for (std::uint32_t step = 0; step < 1000; ++step) {
    const DrawKey key{7, 11, step};
    const auto [result, emitted] = run(Method::kBlock, {0, 1}, target, &q, 1, key);
    ASSERT_EQ(result.accepted_drafts, u_of(key, 1) <= 0.5 ? 2 : 0);
  }
}

// ---- Against the chapter's words in probabilities, without a logarithm or a short cut.

std::vector<double> softmax(const Rows& rows, std::int64_t row, std::int64_t vocab, float temperature) {
  std::vector<double> law(vocab);
  const float z = 1 / temperature;
  double top = -HUGE_VAL, sum = 0;
  for (std::int64_t v = 0; v < vocab; ++v)
    if (const float x = rows.at(row, v) * z; !std::isnan(x)) top = std::max(top, double{x});
  for (std::int64_t v = 0; v < vocab; ++v)
    if (const float x = rows.at(row, v) * z; !std::isnan(x)) sum += law[v] = std::exp(double{x} - top);
  for (double& p : law) p /= sum;
  return law;
}

struct Restated {
  std::size_t tau = 0;
  std::int32_t token = 0;
  double margin = HUGE_VAL;  // the least distance of a comparison from its bound
};

std::int32_t gumbel_max(const std::vector<double>& weights, const DrawKey& key, std::size_t i, double* margin) {
  std::vector<double> scores;
  for (std::uint32_t v = 0; v < weights.size(); ++v)
    scores.push_back(std::log(weights[v]) +
                     gumbel(philox(key.seed, v >> 2, key.position + static_cast<std::uint32_t>(i), key.step,
                                   kResampleStream)[v & 3]));
  const auto best = std::ranges::max_element(scores);
  for (auto other = scores.begin(); other != scores.end(); ++other)
    if (other != best) *margin = std::min(*margin, *best - *other);
  return static_cast<std::int32_t>(best - scores.begin());
}

Restated restated(Method method, const Tokens& drafts, const std::vector<std::vector<double>>& p,
                  const std::vector<std::vector<double>>& q, const DrawKey& key) {
  Restated out;
  const std::size_t k = drafts.size();
  double kept_P = 1, P = 1;
  const auto residual = [&](std::size_t i, double scale) {
    std::vector<double> left;
    for (std::size_t v = 0; v < p[i].size(); ++v) left.push_back(std::max(scale * p[i][v] - q[i][v], 0.0));
    return left;
  };
  const auto sum = [](const std::vector<double>& values) {
    double total = 0;
    for (const double value : values) total += value;
    return total;
  };
  for (std::size_t i = 0; i < k; ++i) {
    const double px = p[i][drafts[i]], qx = q[i][drafts[i]], u = u_of(key, static_cast<std::uint32_t>(i));
    double h = px / qx;
    if (method == Method::kBlock) {
      P = P == 0 || px == 0 ? 0 : std::min(P * px / qx, 1.0);
      const double S = i + 1 < k ? sum(residual(i + 1, P)) : 0;
      h = i + 1 == k ? P : S + 1 - P == 0 ? 1 : S / (S + 1 - P);
      if (i + 1 < k && S + 1 - P < 1e-9) out.margin = 0;
    }
    out.margin = std::min(out.margin, std::abs(u - h));
    if (u <= h) {
      out.tau = i + 1;
      kept_P = P;
    } else if (method == Method::kStandard) {
      break;
    }
  }
  std::vector<double> law = out.tau < k ? residual(out.tau, kept_P) : p[out.tau];
  if (const double mass = sum(law); mass < 1e-9) {
    if (mass > 0) out.margin = 0;
    law = p[out.tau];
  }
  out.token = gumbel_max(law, key, out.tau, &out.margin);
  return out;
}

TEST(Verify, is_what_the_chapter_says_in_probabilities) {
  std::mt19937_64 random{oracle::seed()};
  SCOPED_TRACE(oracle::replay());
  std::normal_distribution<float> normal;
  const auto one_in = [&](std::uint64_t n) { return random() % n == 0; };
  int close = 0;
  const int cases = 40'000 / kShorter;
  for (int c = 0; c < cases; ++c) {
    const auto vocab = static_cast<std::int64_t>(std::array{2, 3, 7, 16, 33}[random() % 5]);
    const std::size_t k = random() % 9;
    const float temperature = std::array{0.3f, 1.0f, 2.0f}[random() % 3];
    const bool one_hot = one_in(4), holes = one_in(3);
    const float noise = std::array{0.0f, 0.3f, 2.0f}[random() % 3];
    const auto dtype = [&] { return one_in(2) ? DType::kBF16 : DType::kF32; };
    Rows target(static_cast<std::int64_t>(k) + 2, vocab, dtype());  // the last row stays NaN
    Rows q_rows(static_cast<std::int64_t>(k) + 1, vocab, dtype());
    Tokens drafts;
    const DrawKey key{random(), 5, static_cast<std::uint32_t>(c)};
    std::vector<std::vector<double>> p, q;
    for (std::size_t i = 0; i <= k; ++i) {
      const auto row = static_cast<std::int64_t>(i);
      for (std::int64_t v = 0; v < vocab; ++v) {
        const float l = normal(random), other = one_in(3) ? kNaN : -kInf;
        const auto hole = [&] { return holes && v != vocab / 2 && one_in(6); };
        target.set(row, v, hole() ? other : l);
        if (i < k) q_rows.set(row, v, hole() ? other : l + noise * normal(random));
      }
      p.push_back(softmax(target, row, vocab, 1));
      if (i == k) break;
      const NoBias head(vocab);
      const Pick pick = head.pick(q_rows.row_of(row), one_hot ? 0 : temperature,
                                  {key.seed, key.position + static_cast<std::uint32_t>(i), key.step});
      drafts.push_back(one_in(5) ? static_cast<std::int32_t>(random() % vocab) : pick.token);
      q.push_back(softmax(q_rows, row, vocab, temperature));
      if (one_hot)
        for (std::int64_t v = 0; v < vocab; ++v) q[i][v] = v == drafts[i];
    }
    for (const Method method : kMethods) {
      const Restated wanted = restated(method, drafts, p, q, key);
      if (wanted.margin < 1e-5) {
        ++close;
        continue;
      }
      const auto [result, emitted] = run(method, drafts, target, one_hot ? nullptr : &q_rows, temperature, key);
      SCOPED_TRACE(testing::Message() << "case " << c << (method == Method::kBlock ? ", block" : ", standard"));
      ASSERT_EQ(result.accepted_drafts, wanted.tau);
      for (std::size_t i = 0; i <= k; ++i)
        ASSERT_EQ(emitted[i], i < wanted.tau ? drafts[i] : i == wanted.tau ? wanted.token : -1) << i;
      ASSERT_FALSE(result.nonfinite);
      if (k == 1) {
        const auto same = run(method == Method::kBlock ? Method::kStandard : Method::kBlock, drafts, target,
                              one_hot ? nullptr : &q_rows, temperature, key);
        ASSERT_EQ(same.emitted, emitted) << "one draft: both methods are the same";
      }
    }
  }
  EXPECT_LT(close, cases / 10);
}

// ---- Laws. Decoding of a toy target with a toy drafter, step after step.

constexpr std::size_t kVocab = 16;

// Logits after each pair of tokens, all BF16 values, so that both dtypes hold the same law.
using Table = std::vector<Values>;
Table table(const std::function<float(std::size_t pair, std::size_t v)>& logit) {
  Table out;
  for (std::size_t pair = 0; pair < kVocab * kVocab; ++pair) {
    Values row;
    for (std::size_t v = 0; v < kVocab; ++v) row.push_back(bf16_to_float(float_to_bf16(logit(pair, v))));
    out.push_back(row);
  }
  return out;
}
Table toy_table(std::uint64_t seed) {
  return table([=](std::size_t pair, std::size_t v) { return toy(seed, kVocab, pair / kVocab, pair % kVocab)[v]; });
}

struct Drafter {
  std::string name;
  Table logits;
  bool one_hot = false;
};

struct Decoding {
  Method method = Method::kStandard;
  const Table* target = nullptr;
  const Drafter* drafter = nullptr;
  std::int64_t drafts = 3;
  float temperature = 1;
  DType dtype = DType::kF32;
};

// One request: its tokens (the first two are the prompt) and where it stands.
struct Request {
  explicit Request(const Decoding& d, std::uint64_t seed)
      : decoding(d),
        key{seed, 40, 0},
        head(kVocab),
        target(d.drafts + 1, kVocab, d.dtype),
        q(d.drafts, kVocab, d.dtype),
        x(d.drafts),
        emitted(d.drafts + 1) {}

  static std::size_t pair(std::int32_t a, std::int32_t b) { return a * kVocab + b; }

  // The drafts depend on the key alone, not on the method.
  VerifyResult step() {
    std::int32_t a = tokens.end()[-2], b = tokens.end()[-1];
    for (std::int64_t i = 0; i < decoding.drafts; ++i) {
      q.set(i, decoding.drafter->logits[pair(a, b)]);
      target.set(i, (*decoding.target)[pair(a, b)]);
      const DrawKey at{key.seed, key.position + static_cast<std::uint32_t>(i), key.step};
      x[i] = head.pick(q.row_of(i), decoding.drafter->one_hot ? 0 : decoding.temperature, at).token;
      a = b;
      b = x[i];
    }
    target.set(decoding.drafts, (*decoding.target)[pair(a, b)]);
    const TensorView logits = decoding.drafter->one_hot ? TensorView{} : q.view();
    const VerifyResult result = verify(decoding.method, {x, target.view(), logits, decoding.temperature, key}, emitted);
    tokens.insert(tokens.end(), emitted.begin(), emitted.begin() + result.accepted());
    key.position += static_cast<std::uint32_t>(result.accepted());
    ++key.step;
    return result;
  }

  const Decoding& decoding;
  DrawKey key;
  NoBias head;
  Rows target, q;
  Tokens x, emitted;
  Tokens tokens = {0, 0};
};

// The least chi-square p over the joint laws of three tokens in a row, up to the last of `length`.
double least_p(const Decoding& decoding, std::size_t length, std::int64_t sequences) {
  constexpr std::size_t kPairs = kVocab * kVocab, kTriples = kPairs * kVocab;
  std::vector<std::vector<std::int64_t>> counts(length - 2, std::vector<std::int64_t>(kTriples));
#pragma omp parallel
  {
    auto own = counts;
    for (auto& window : own) std::ranges::fill(window, 0);
#pragma omp for
    for (std::int64_t n = 0; n < sequences; ++n) {
      Request request(decoding, static_cast<std::uint64_t>(n));
      while (request.tokens.size() < 2 + length) request.step();
      const auto* t = request.tokens.data() + 2;
      for (std::size_t w = 0; w < own.size(); ++w) ++own[w][(t[w] * kVocab + t[w + 1]) * kVocab + t[w + 2]];
    }
#pragma omp critical
    for (std::size_t w = 0; w < own.size(); ++w)
      for (std::size_t i = 0; i < kTriples; ++i) counts[w][i] += own[w][i];
  }

  std::vector<std::vector<double>> laws;
  for (const Values& row : *decoding.target) {
    Rows rows(1, kVocab);
    rows.set(0, row);
    laws.push_back(softmax(rows, 0, kVocab, 1));
  }
  std::vector<double> pairs(kPairs), triples(kTriples);  // of tokens w, w + 1 and w, w + 1, w + 2
  for (std::size_t a = 0; a < kVocab; ++a)
    for (std::size_t b = 0; b < kVocab; ++b) pairs[a * kVocab + b] = laws[0][a] * laws[a][b];
  double least = 1;
  for (const auto& window : counts) {
    std::vector<double> next(kPairs);
    for (std::size_t pair = 0; pair < kPairs; ++pair)
      for (std::size_t v = 0; v < kVocab; ++v)
        next[pair % kVocab * kVocab + v] += triples[pair * kVocab + v] = pairs[pair] * laws[pair][v];
    least = std::min(least, test::chi_square_p(window, triples));
    pairs = next;
  }
  return least;
}

const Table kTarget = toy_table(1);

std::vector<Drafter> drafters() {
  const Table other = toy_table(1000);
  const Table near = table([&](auto pair, auto v) { return kTarget[pair][v] + 0.3f * other[pair][v]; });
  return {{"near", near}, {"far", other}, {"equal", kTarget}, {"one-hot", near, true}};
}

// Enough tokens that every sequence takes the named number of steps.
std::size_t length_of(std::size_t steps, std::int64_t drafts) { return (steps - 1) * (drafts + 1) + 1; }

TEST(SamplingContract, law_of_three_steps_of_standard_is_that_of_the_target) {
  for (const Drafter& drafter : drafters()) {
    const bool bf16 = drafter.name == "far";
    const Decoding decoding{Method::kStandard, &kTarget, &drafter, 3, 1, bf16 ? DType::kBF16 : DType::kF32};
    EXPECT_GT(least_p(decoding, length_of(3, 3), 60'000 / kShorter), 1e-4) << drafter.name;
  }
}

TEST(SamplingContract, law_of_five_steps_of_block_is_that_of_the_target) {
  for (const Drafter& drafter : drafters()) {
    const bool bf16 = drafter.name == "far";
    const Decoding decoding{Method::kBlock, &kTarget, &drafter, 3, 0.8f, bf16 ? DType::kBF16 : DType::kF32};
    EXPECT_GT(least_p(decoding, length_of(5, 3), 40'000 / kShorter), 1e-4) << drafter.name;
  }
}

TEST(SamplingContract, holds_where_draft_and_target_have_no_token_in_common) {
  const Table even = table([](auto pair, auto v) { return v % 2 ? -kInf : kTarget[pair][v]; });
  const Drafter odd{"odd", table([](auto pair, auto v) { return v % 2 ? kTarget[pair][v] : -kInf; })};
  for (const Method method : kMethods) {
    const Decoding decoding{method, &even, &odd, 2};
    EXPECT_GT(least_p(decoding, 5, 30'000 / kShorter), 1e-4);
  }
}

// Paired: the same drafts from the same prefix under both methods.
TEST(SamplingContract, block_accepts_as_many_drafts_as_standard_or_more) {
  for (const Drafter& drafter : drafters()) {
    const std::int64_t prefixes = 40'000 / kShorter;
    double sum = 0, squares = 0;
#pragma omp parallel for reduction(+ : sum, squares)
    for (std::int64_t n = 0; n < prefixes; ++n) {
      int tau[2];
      for (const Method method : kMethods) {
        const Decoding decoding{method, &kTarget, &drafter, 4};
        Request request(decoding, static_cast<std::uint64_t>(n));
        request.tokens = {static_cast<std::int32_t>(n % 16), static_cast<std::int32_t>(n / 16 % 16)};
        tau[method == Method::kBlock] = request.step().accepted_drafts;
      }
      sum += tau[1] - tau[0];
      squares += (tau[1] - tau[0]) * (tau[1] - tau[0]);
    }
    const double mean = sum / static_cast<double>(prefixes),
                 spread = std::sqrt(squares) / static_cast<double>(prefixes);
    EXPECT_GE(mean, -4 * spread) << drafter.name;
    if (drafter.name == "near" || drafter.name == "far") {
      EXPECT_GT(mean, 4 * spread) << drafter.name;
    }
  }
}

}  // namespace
}  // namespace twostep
