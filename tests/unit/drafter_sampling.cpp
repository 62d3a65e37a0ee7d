// Random words, Markov bias, pick and confidence of one draft (spec: drafter 6, 7).
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "drafter/sampling.h"
#include "tests/common/allocations.h"
#include "tests/unit/chi_square.h"
#include "tests/unit/gemm_oracle.h"
#include "tests/unit/no_bias.h"

namespace twostep {
namespace {

using test::NoBias;
using Bf16s = std::vector<std::uint16_t>;
constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

#ifdef __SANITIZE_ADDRESS__
constexpr int kDraws = 100'000;
#else
constexpr int kDraws = 1'000'000;
#endif

Bf16s random_bf16(std::size_t count, float scale, std::mt19937_64& random) {
  std::normal_distribution<float> normal(0, scale);
  Bf16s out(count);
  for (auto& bits : out) bits = float_to_bf16(normal(random));
  return out;
}

RowView row_of(const std::vector<float>& values) { return {values.data(), DType::kF32}; }

// As in the chapter, one token after the other and with no short cut.
std::int32_t plain_draw(const std::vector<float>& l, float temperature, const DrawKey& key) {
  const float z = 1 / temperature;
  float best = -kInf;
  std::int32_t token = 0;
  for (std::uint32_t v = 0; v < l.size(); ++v) {
    const float g = gumbel(philox(key.seed, v >> 2, key.position, key.step, kDraftStream)[v & 3]);
    if (const float score = l[v] * z + g; score > best) {
      best = score;
      token = static_cast<std::int32_t>(v);
    }
  }
  return token;
}

// The first three are the known answers that come with Random123.
TEST(Philox, words_are_the_published_ones) {
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox(0, 0, 0, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~0ull, ~0u, ~0u, ~0u, ~0u), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox(0x299f31d0a4093822, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
  EXPECT_EQ(philox(42, 5 >> 2, 17, 3, kDraftStream)[5 & 3], 0x4a88f33eu);
}

TEST(Philox, every_part_of_the_key_and_each_stream_gives_other_words) {
  const auto words = philox(42, 1, 17, 3, kDraftStream);
  EXPECT_NE(words, philox(43, 1, 17, 3, kDraftStream));
  EXPECT_NE(words, philox(42 + (1ull << 32), 1, 17, 3, kDraftStream));
  EXPECT_NE(words, philox(42, 2, 17, 3, kDraftStream));
  EXPECT_NE(words, philox(42, 1, 18, 3, kDraftStream));
  EXPECT_NE(words, philox(42, 1, 17, 4, kDraftStream));
  std::vector<std::uint32_t> all;
  for (const auto stream : {kDraftStream, kAcceptStream, kResampleStream})
    for (std::uint32_t quad = 0; quad < 100; ++quad)
      for (const std::uint32_t word : philox(42, quad, 17, 3, stream)) all.push_back(word);
  std::ranges::sort(all);
  EXPECT_EQ(std::ranges::adjacent_find(all), all.end());
}

TEST(Noise, has_the_check_values) {
  EXPECT_FLOAT_EQ(uniform(0x4a88f33e), 0.29115218f);
  EXPECT_FLOAT_EQ(gumbel(0x4a88f33e), 1.0667811f);
}

TEST(Noise, is_finite_and_below_its_ceiling_for_every_word) {
  std::vector<std::uint32_t> words = {0, ~0u, ~0u - 127, ~0u - 128, ~0u - 129};
  for (int bit = 0; bit < 32; ++bit)
    for (const std::uint32_t off : {-1u, 0u, 1u}) words.push_back((1u << bit) + off);
  std::mt19937_64 random{oracle::seed()};
  for (int i = 0; i < 100'000; ++i) words.push_back(static_cast<std::uint32_t>(random() >> (random() % 32)));
  for (const std::uint32_t word : words) {
    ASSERT_GT(uniform(word), 0.0f) << word;
    ASSERT_LT(uniform(word), 1.0f) << word;
    ASSERT_TRUE(std::isfinite(gumbel(word))) << word;
    ASSERT_LT(gumbel(word), gumbel_ceiling(word)) << word;
    ASSERT_LT(gumbel_ceiling(word) - std::max(gumbel(word), 0.0f), 1.4f) << word << ": the ceiling is of no use";
  }
}

// Teacher-forced: each logit against FP64, each token against the row that was written, over a chain of drafts.
TEST(PickDraft, logits_and_tokens_are_those_of_the_formula) {
  std::mt19937_64 random{oracle::seed()};
  const std::size_t vocab = 1003;
  for (const std::size_t rank : {32, 512})
    for (const bool bf16 : {false, true})
      for (const float temperature : {0.0f, 0.6f, 1.0f}) {
        SCOPED_TRACE(testing::Message() << "rank " << rank << ", BF16 " << bf16 << ", temperature " << temperature
                                        << ", " << oracle::replay());
        const Bf16s w1 = random_bf16(vocab * rank, 1, random);
        const Bf16s w2 = random_bf16(vocab * rank, 1 / std::sqrt(static_cast<float>(rank)), random);
        const MarkovHead head{w2.data(), static_cast<std::int64_t>(vocab), static_cast<std::int64_t>(rank), 0.7f};
        std::int32_t token = 17;
        for (std::uint32_t i = 0; i < 8; ++i) {
          const std::uint16_t* e = w1.data() + static_cast<std::size_t>(token) * rank;
          const Bf16s base = random_bf16(vocab, 2, random);
          std::vector<float> l(vocab, kNaN);
          Bf16s l_bf16(vocab, 0x7fc1);
          const OutRow out = bf16 ? OutRow{l_bf16.data(), DType::kBF16} : OutRow{l.data(), DType::kF32};
          const DrawKey key{random(), 100 + i, 9};
          const Pick pick = pick_draft(head, e, {base.data(), DType::kBF16}, temperature, key, out);
          for (std::size_t v = 0; v < vocab; ++v) {
            double sum = 0, absolute = 0;
            for (std::size_t c = 0; c < rank; ++c) {
              const double product = double{bf16_to_float(w2[v * rank + c])} * bf16_to_float(e[c]);
              sum += product;
              absolute += std::abs(product);
            }
            const double exact = bf16_to_float(base[v]) + double{0.7f} * sum;
            if (bf16) l[v] = bf16_to_float(l_bf16[v]);
            const double rounding = std::abs(exact) * (bf16 ? 0x1.01p-8 : 0x1p-23);
            ASSERT_NEAR(l[v], exact, rounding + absolute * 0x1p-18) << v;
          }
          EXPECT_FALSE(pick.nonfinite);
          token = temperature == 0 ? static_cast<std::int32_t>(std::ranges::max_element(l) - l.begin())
                                   : plain_draw(l, temperature, key);
          ASSERT_EQ(pick.token, token);
        }
      }
}

TEST(PickDraft, of_equal_scores_the_lowest_id_wins) {
  const std::size_t vocab = 2000;
  const NoBias head(vocab);
  for (const std::size_t first : {0, 3, 255, 256, 1000, 1998}) {
    std::vector<float> base(vocab, -1);
    base[first] = base[first + 1] = base[vocab - 1] = 2;
    EXPECT_EQ(head.pick(row_of(base)).token, first);
    base[first] = base[first + 1] = base[vocab - 1] = kInf;
    for (const float temperature : {0.0f, 1.0f}) EXPECT_EQ(head.pick(row_of(base), temperature).token, first);
  }
}

TEST(PickDraft, nan_counts_as_minus_infinity_and_a_row_of_nothing_else_is_told) {
  const std::size_t vocab = 600;
  const NoBias head(vocab);
  for (const float temperature : {0.0f, 1.0f})
    for (const float nothing : {kNaN, -kInf}) {
      std::vector<float> base(vocab, nothing), l(vocab);
      Pick pick = head.pick(row_of(base), temperature, {}, {l.data(), DType::kF32});
      EXPECT_EQ(pick.token, 0);
      EXPECT_TRUE(pick.nonfinite);
      base[417] = -3e38f;
      pick = head.pick(row_of(base), temperature, {}, {l.data(), DType::kF32});
      EXPECT_EQ(pick.token, 417);
      EXPECT_FALSE(pick.nonfinite);
    }
}

// The two best differ by less than a BF16 step: rounded they are equal, and the lower id wins.
TEST(PickDraft, bf16_logits_are_rounded_before_use) {
  const NoBias head(16);
  std::vector<float> base(16, -9);
  base[4] = 3;
  base[11] = 3.001f;
  Bf16s out(16);
  EXPECT_EQ(head.pick(row_of(base)).token, 11);
  EXPECT_EQ(head.pick(row_of(base), 0, {}, {out.data(), DType::kBF16}).token, 4);
  // At z = 10^5 the noise is small beside the step that rounding takes away.
  EXPECT_EQ(head.pick(row_of(base), 1e-5f, {1, 2, 3}).token, 11);
  base[11] = 2.999f;
  base[4] = 2.998f;
  EXPECT_EQ(head.pick(row_of(base), 1e-5f, {1, 2, 3}).token, 11);
  int fours = 0;
  for (std::uint32_t step = 0; step < 64; ++step)
    fours += head.pick(row_of(base), 1e-5f, {1, 2, step}, {out.data(), DType::kBF16}).token == 4;
  EXPECT_GT(fours, 10);
  EXPECT_LT(fours, 54);
}

TEST(PickDraft, a_temperature_below_a_hundred_thousandth_is_greedy) {
  const NoBias head(64);
  std::vector<float> base(64, 0);
  base[40] = 1e-6f;
  for (const float temperature : {0.0f, 9.9e-6f, -1.0f, kNaN})
    for (std::uint32_t step = 0; step < 20; ++step)
      EXPECT_EQ(head.pick(row_of(base), temperature, {5, 6, step}).token, 40);
}

TEST(PickDraft, bits_do_not_depend_on_the_number_of_threads_and_nothing_is_allocated) {
  std::mt19937_64 random{oracle::seed()};
  const std::int64_t vocab = 20'011, rank = 64;
  const Bf16s w2 = random_bf16(vocab * rank, 0.1f, random), e = random_bf16(rank, 1, random);
  const Bf16s base = random_bf16(vocab, 1, random);
  const int before = omp_get_max_threads();
  for (const float temperature : {0.0f, 1.0f})
    for (std::uint32_t step = 0; step < 10; ++step) {
      std::vector<float> first(vocab), l(vocab);
      Pick wanted;
      for (const int threads : {1, 2, 3, 7}) {
        omp_set_num_threads(threads);
        const auto allocations = test::allocations();
        const Pick pick = pick_draft({w2.data(), vocab, rank}, e.data(), {base.data(), DType::kBF16}, temperature,
                                     {3, 4, step}, {l.data(), DType::kF32});
        EXPECT_EQ(test::allocations(), allocations);
        if (threads == 1) {
          wanted = pick;
          first = l;
        }
        EXPECT_EQ(pick.token, wanted.token) << threads << " threads, " << oracle::replay();
        EXPECT_EQ(l, first) << threads << " threads, " << oracle::replay();
      }
    }
  omp_set_num_threads(before);
}

TEST(PickDraft, law_of_a_draw_is_softmax) {
  constexpr std::size_t kVocab = 512;
  std::mt19937_64 random{20260501};
  std::normal_distribution<float> normal(0, 1.5f);
  const NoBias head(kVocab);
  std::vector<float> base(kVocab);
  for (float& value : base) value = normal(random);
  const float temperature = 0.8f;
  std::vector<double> law(kVocab);
  double sum = 0;
  for (std::size_t v = 0; v < kVocab; ++v) sum += law[v] = std::exp(double{base[v]} / temperature);
  for (double& p : law) p /= sum;

  std::vector<std::int32_t> tokens(kDraws);
#pragma omp parallel for
  for (int i = 0; i < kDraws; ++i) {  // a few seeds, many positions and steps
    const auto n = static_cast<std::uint32_t>(i);
    tokens[static_cast<std::size_t>(i)] = head.pick(row_of(base), temperature, {n % 7, n / 1000, n % 1000}).token;
  }
  std::vector<std::int64_t> counts(kVocab);
  for (const std::int32_t token : tokens) ++counts[static_cast<std::size_t>(token)];
  EXPECT_GT(test::chi_square_p(counts, law), 1e-4);
}

TEST(Confidence, is_the_sigmoid_of_the_calibrated_product) {
  std::mt19937_64 random{oracle::seed()};
  const std::int64_t hidden = 256;
  for (const std::int64_t rank : {0, 32, 512})
    for (const DType dtype : {DType::kF32, DType::kBF16})
      for (const float temperature : {1.0f, 1.7f}) {
        const Bf16s h = random_bf16(hidden, 1, random), e = random_bf16(rank, 1, random);
        const Bf16s w_bf16 = random_bf16(hidden + rank, 0.05f, random);
        std::vector<float> w;
        for (const auto bits : w_bf16) w.push_back(bf16_to_float(bits));
        double x = 0.25;
        for (std::int64_t i = 0; i < hidden + rank; ++i)
          x += double{w[i]} * bf16_to_float(i < hidden ? h[i] : e[i - hidden]);
        const RowView weight = dtype == DType::kF32 ? RowView{w.data(), dtype} : RowView{w_bf16.data(), dtype};
        EXPECT_NEAR(confidence({weight, hidden, rank, 0.25f}, h.data(), rank ? e.data() : nullptr, temperature),
                    1 / (1 + std::exp(-x / double{temperature})), 2e-6)
            << "rank " << rank << ", " << dtype_name(dtype) << ", " << oracle::replay();
      }
}

}  // namespace
}  // namespace twostep
