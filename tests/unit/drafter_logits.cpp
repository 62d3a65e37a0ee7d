// DraftLogits and its last stage on the CPU: values, cut, refusals (G44, G45).
#include <algorithm>
#include <cmath>

#include "core/bf16.h"
#include "tests/unit/code_of.h"
#include "tests/unit/gemm_oracle.h"
#include "twostep/logits.h"

namespace twostep {
namespace {

using test::code_of;

TensorView rows_of(std::vector<std::uint16_t>& values, std::int64_t rows, std::int64_t cols, std::int64_t stride) {
  return TensorView::matrix(values.data(), rows, cols, {}, stride);
}

constexpr std::uint16_t kUntouched = 0x7fc1;

// Every BF16 value from -120 to 120, against FP64: cap, then scale, one rounding. FP32 may be 2^-20 off, which moves a
// result by one BF16 step where the exact value lies next to the middle of two.
TEST(LogitsStage, every_value_is_capped_then_scaled_with_one_rounding) {
  std::vector<std::uint16_t> logits;
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits)
    if (const float v = bf16_to_float(static_cast<std::uint16_t>(bits)); std::abs(v) <= 120)
      logits.push_back(static_cast<std::uint16_t>(bits));
  const auto cols = static_cast<std::int64_t>(logits.size());
  for (const auto cap : {std::optional<float>(30), std::optional<float>(0.1f), std::optional<float>()})
    for (const float scale : {0.5f, 1.0f, 1.7f}) {
      std::vector<std::uint16_t> out(logits.size(), kUntouched);
      LogitsStage(Device::cpu(), cap, scale).run(rows_of(logits, 1, cols, cols), rows_of(out, 1, cols, cols));
      for (std::size_t i = 0; i < out.size(); ++i) {
        const double l = bf16_to_float(logits[i]);
        const double exact = double{scale} * (cap ? double{*cap} * std::tanh(l / double{*cap}) : l);
        const double low = exact * (1 - 0x1p-20), high = exact * (1 + 0x1p-20);
        ASSERT_TRUE(out[i] == double_to_bf16(low) || out[i] == double_to_bf16(exact) || out[i] == double_to_bf16(high))
            << "l = " << l << ", cap " << cap.value_or(0) << ", scale " << scale;
      }
    }
}

TEST(LogitsStage, cuts_columns_and_leaves_what_is_behind_a_row_alone) {
  std::vector<std::uint16_t> logits(3 * 8, float_to_bf16(2)), out(3 * 7, kUntouched);
  LogitsStage(Device::cpu(), {}, 0.5f).run(rows_of(logits, 3, 8, 8), rows_of(out, 3, 5, 7));
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], i % 7 < 5 ? float_to_bf16(1) : kUntouched);
}

TEST(LogitsStage, refuses_before_it_writes) {
  std::vector<std::uint16_t> logits(4 * 8, float_to_bf16(2)), out(4 * 8, kUntouched);
  const LogitsStage stage(Device::cpu(), 30.0f, 1);
  const TensorView from = rows_of(logits, 4, 8, 8), to = rows_of(out, 4, 8, 8);
  const auto changed = [](TensorView view, auto&& change) {
    change(view);
    return view;
  };
  EXPECT_EQ(code_of([&] { stage.run(from, rows_of(out, 3, 8, 8)); }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { stage.run(rows_of(logits, 4, 7, 8), to); }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { stage.run(changed(from, [](auto& v) { v.rank = 1; }), to); }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { stage.run(changed(from, [](auto& v) { v.dtype = DType::kF32; }), to); }),
            StatusCode::kUnsupported);
  EXPECT_EQ(code_of([&] { stage.run(from, changed(to, [](auto& v) { v.stride[1] = 2; })); }), StatusCode::kBadLayout);
  EXPECT_EQ(code_of([&] { stage.run(from, changed(to, [](auto& v) { v.stride[0] = 4; })); }), StatusCode::kBadLayout);
  EXPECT_EQ(code_of([&] { stage.run(from, changed(to, [](auto& v) { v.device = Device::cuda(0); })); }),
            StatusCode::kWrongDevice);
  EXPECT_EQ(code_of([&] { stage.run(from, rows_of(logits, 4, 8, 9)); }), StatusCode::kOverlap);
  EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](std::uint16_t v) { return v == kUntouched; }));
  for (const float cap : {0.0f, -1.0f, INFINITY, NAN})
    EXPECT_EQ(code_of([&] { LogitsStage(Device::cpu(), cap); }), StatusCode::kInvalidArgument) << cap;
  EXPECT_EQ(code_of([&] { LogitsStage(Device::cpu(), {}, NAN); }), StatusCode::kInvalidArgument);
}

// G44: padding rows of huge values never show.
TEST(DraftLogits, padding_rows_are_not_read_and_the_rest_has_the_bits_of_the_product) {
  const std::int64_t rows = 1024, vocab = 1001, k = 96;
  std::mt19937_64 random{oracle::seed()};
  oracle::Buffer head(rows, k), hidden(3, k);
  head.fill(oracle::small_integers(random));
  hidden.fill(oracle::small_integers(random));
  DraftGemm whole(head.view());
  std::vector<std::uint16_t> wanted(3 * rows), out(3 * (vocab + 6), kUntouched);
  whole.run(hidden.view(), rows_of(wanted, 3, rows, rows));
  for (std::int64_t i = vocab; i < rows; ++i)
    std::fill_n(static_cast<std::uint16_t*>(head.view().data) + i * k, k, float_to_bf16(3e38f));

  DraftLogits logits(head.view(), {.vocab = vocab});
  EXPECT_EQ(logits.vocab(), vocab);
  logits.run(head.view(), hidden.view(), rows_of(out, 3, vocab, vocab + 6));
  for (std::int64_t i = 0; i < 3; ++i)
    for (std::int64_t j = 0; j < vocab + 6; ++j)
      ASSERT_EQ(out[i * (vocab + 6) + j], j < vocab ? wanted[i * rows + j] : kUntouched) << i << ", " << j;

  const TensorView fewer = TensorView::matrix(head.view().data, rows - 1, k);
  EXPECT_EQ(code_of([&] { logits.run(fewer, hidden.view(), rows_of(out, 3, vocab, vocab)); }),
            StatusCode::kWeightChanged);
  EXPECT_EQ(code_of([&] { DraftLogits(head.view(), {.vocab = rows + 1}); }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { DraftLogits(head.view(), {.vocab = -1}); }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { DraftLogits(head.view(), {.scale = INFINITY}); }), StatusCode::kInvalidArgument);
}

// G46: a result is not touched by the next call, and is scaled once.
TEST(DraftLogits, results_are_the_callers_and_scaled_once) {
  std::mt19937_64 random{oracle::seed()};
  oracle::Buffer head(48, 64), hidden(2, 64);
  head.fill(oracle::small_integers(random));
  hidden.fill(oracle::small_integers(random));
  std::vector<std::uint16_t> plain(2 * 48), first(2 * 48), second(2 * 48);
  DraftGemm(head.view()).run(hidden.view(), rows_of(plain, 2, 48, 48));
  DraftLogits logits(head.view(), {.scale = 0.5f});
  logits.run(hidden.view(), rows_of(first, 2, 48, 48));
  const auto kept = first;
  logits.run(hidden.view(), rows_of(second, 2, 48, 48));
  EXPECT_EQ(first, kept);
  EXPECT_EQ(first, second);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(bf16_to_float(first[i]), bf16_to_float(plain[i]) * 0.5f);
}

}  // namespace
}  // namespace twostep
