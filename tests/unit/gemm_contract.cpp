// What DraftGemm takes and refuses, apart from any kernel.
#include <set>

#include "gemm/contract.h"
#include "tests/unit/gemm_oracle.h"

namespace twostep {
namespace {

using oracle::Buffer;

TensorView strided(void* data, std::int64_t rows, std::int64_t cols, std::int64_t row_stride, std::int64_t col_stride) {
  auto view = TensorView::matrix(data, rows, cols);
  view.stride = {row_stride, col_stride, 0, 0};
  return view;
}

StatusCode weight_code(const TensorView& view) {
  try {
    check_weight(view, "test");
    return StatusCode::kOk;
  } catch (const Error& error) {
    return error.code();
  }
}

struct Operands {
  Buffer w{16, 32}, x{4, 32}, out{4, 16};
  Weight weight = check_weight(w.view(), "test");
  StatusCode code(const TensorView& a, const TensorView& b) {
    std::int64_t m = 0;
    return check_operands(weight, a, b, &m).code;
  }
};

TEST(GemmContract, weight_layouts_that_some_kind_serves) {
  std::uint16_t memory[4096] = {};
  EXPECT_EQ(weight_code(strided(memory, 8, 16, 16, 1)), StatusCode::kOk);
  EXPECT_EQ(weight_code(strided(memory, 8, 16, 19, 1)), StatusCode::kOk);
  EXPECT_EQ(weight_code(strided(memory + 1, 8, 16, 16, 1)), StatusCode::kOk);
  EXPECT_EQ(weight_code(strided(memory, 1, 16, -7, 1)), StatusCode::kOk);  // one row has no stride
  EXPECT_EQ(weight_code(strided(memory, 8, 1, 3, -9)), StatusCode::kOk);   // nor has one column
  EXPECT_EQ(weight_code(strided(memory, 8, 16, 1, 8)), StatusCode::kOk);   // transposed
  EXPECT_EQ(weight_code(strided(memory, 8, 16, 1, 11)), StatusCode::kOk);
  EXPECT_EQ(weight_code(strided(nullptr, 0, 16, 0, 0)), StatusCode::kOk);
  EXPECT_EQ(weight_code(strided(nullptr, 8, 0, 0, 0)), StatusCode::kOk);

  EXPECT_FALSE(check_weight(strided(memory, 8, 16, 19, 1), "test").transposed);
  const Weight turned = check_weight(strided(memory, 8, 16, 1, 11), "test");
  EXPECT_TRUE(turned.transposed);
  EXPECT_EQ(turned.row_stride, 11);
}

TEST(GemmContract, weights_that_nothing_serves_are_refused_with_their_code) {
  std::uint16_t memory[4096] = {};
  for (auto [row, col] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {15, 1}, {0, 1}, {-16, 1}, {32, 2}, {1, 7}, {1, 1}, {2, 8}, {16, -1}, {1, -8}})
    EXPECT_EQ(weight_code(strided(memory, 8, 16, row, col)), StatusCode::kBadLayout) << row << ", " << col;
  EXPECT_EQ(weight_code(strided(reinterpret_cast<char*>(memory) + 1, 8, 16, 16, 1)), StatusCode::kBadLayout);
  EXPECT_EQ(weight_code(strided(nullptr, 8, 16, 16, 1)), StatusCode::kInvalidArgument);
  EXPECT_EQ(weight_code(strided(memory, -1, 16, 16, 1)), StatusCode::kInvalidArgument);
  auto view = strided(memory, 8, 16, 16, 1);
  view.rank = 3;
  EXPECT_EQ(weight_code(view), StatusCode::kInvalidArgument);
  view.rank = 2;
  view.dtype = DType::kF32;
  EXPECT_EQ(weight_code(view), StatusCode::kUnsupported);
}

TEST(GemmContract, only_a_new_address_stands_in_for_the_bound_weight) {
  Operands o;
  Buffer moved(16, 32);
  EXPECT_TRUE(same_weight(o.weight, moved.view()).ok());
  auto now = moved.view();
  now.shape[0] = 15;
  EXPECT_EQ(same_weight(o.weight, now).code, StatusCode::kWeightChanged);
  now = moved.view();
  now.dtype = DType::kF16;
  EXPECT_EQ(same_weight(o.weight, now).code, StatusCode::kWeightChanged);
  now = moved.view();
  now.device = Device::cuda(0);
  EXPECT_EQ(same_weight(o.weight, now).code, StatusCode::kWeightChanged);
  now = moved.view();
  now.data = nullptr;
  EXPECT_EQ(same_weight(o.weight, now).code, StatusCode::kWeightChanged);
  now = moved.view();
  now.rank = 1;
  const Status status = same_weight(o.weight, now);
  EXPECT_EQ(status.code, StatusCode::kWeightChanged);
  EXPECT_FALSE(status.remedy.empty());
}

TEST(GemmContract, operands_are_checked_in_the_order_of_the_chapter) {
  Operands o;
  auto x = o.x.view();
  auto out = o.out.view();
  EXPECT_EQ(o.code(x, out), StatusCode::kOk);
  // Overlap is the last, each line below breaks an earlier rule too.
  EXPECT_EQ(o.code(x, strided(o.x.data(), 4, 16, 32, 1)), StatusCode::kOverlap);
  EXPECT_EQ(o.code(x, strided(o.x.data(), 4, 16, 32, 2)), StatusCode::kBadLayout);
  EXPECT_EQ(o.code(x, strided(o.x.data(), 4, 15, 32, 2)), StatusCode::kInvalidArgument);
  out = strided(o.x.data(), 4, 15, 32, 2);
  out.device = Device::cuda(0);
  EXPECT_EQ(o.code(x, out), StatusCode::kWrongDevice);
  out.dtype = DType::kF32;
  EXPECT_EQ(o.code(x, out), StatusCode::kUnsupported);
  out.rank = 1;
  EXPECT_EQ(o.code(x, out), StatusCode::kInvalidArgument);
}

TEST(GemmContract, layouts_of_x_and_out_are_refused_alike) {
  Operands o;
  const auto x = o.x.view();
  const auto out = o.out.view();
  std::vector<std::uint16_t> memory(4096);
  for (auto [row, col] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{64, 2}, {0, 1}, {-64, 1}, {15, 1}, {64, 0}, {64, -1}}) {
    EXPECT_EQ(o.code(strided(memory.data() + 512, 4, 32, row, col), out), StatusCode::kBadLayout) << row << col;
    EXPECT_EQ(o.code(x, strided(memory.data() + 512, 4, 16, row, col)), StatusCode::kBadLayout) << row << col;
  }
  EXPECT_EQ(o.code(strided(memory.data(), 1, 32, 0, 1), strided(memory.data() + 512, 1, 16, -3, 1)), StatusCode::kOk);
  auto* odd = reinterpret_cast<char*>(memory.data()) + 1;
  EXPECT_EQ(o.code(strided(odd, 4, 32, 32, 1), out), StatusCode::kBadLayout);
  EXPECT_EQ(o.code(x, strided(odd, 4, 16, 16, 1)), StatusCode::kBadLayout);
  EXPECT_EQ(o.code(strided(nullptr, 4, 32, 32, 1), out), StatusCode::kInvalidArgument);
  EXPECT_EQ(o.code(x, strided(nullptr, 4, 16, 16, 1)), StatusCode::kInvalidArgument);
}

TEST(GemmContract, empty_products_take_any_pointer) {
  Operands o;
  EXPECT_EQ(o.code(strided(nullptr, 0, 32, 0, 5), strided(nullptr, 0, 16, 0, 7)), StatusCode::kOk);
  EXPECT_EQ(o.code(strided(nullptr, 0, 31, 0, 1), strided(nullptr, 0, 16, 0, 1)), StatusCode::kInvalidArgument);
  EXPECT_EQ(o.code(strided(nullptr, -1, 32, 0, 1), strided(nullptr, -1, 16, 0, 1)), StatusCode::kInvalidArgument);
}

TEST(GemmContract, rows_of_x_come_back_with_kOk) {
  Operands o;
  std::int64_t m = -1;
  ASSERT_TRUE(check_operands(o.weight, o.x.view(), o.out.view(), &m).ok());
  EXPECT_EQ(m, 4);
}

// 3.4, against sets of elements: exact for equal pitches and single rows, byte ranges otherwise.
TEST(GemmContract, overlap_is_exact_for_equal_pitches) {
  SCOPED_TRACE(oracle::replay());
  std::mt19937_64 random(oracle::seed());
  const auto draw = [&](int low, int high) {
    return std::int64_t{std::uniform_int_distribution<int>(low, high)(random)};
  };
  static std::uint16_t memory[1024];
  static std::uint16_t far_away[64 * 64];
  const auto elements = [](const TensorView& v) {
    std::set<const void*> found;
    for (std::int64_t i = 0; i < v.shape[0]; ++i)
      for (std::int64_t j = 0; j < v.shape[1]; ++j)
        found.insert(static_cast<const std::uint16_t*>(v.data) + i * v.stride[0] + j);
    return found;
  };
  int met = 0, apart = 0, gaps = 0;
  for (int round = 0; round < 100'000; ++round) {
    const std::int64_t m = draw(1, 4), k = draw(1, 24), n = draw(1, 24);
    const std::int64_t x_stride = draw(static_cast<int>(k), 40);
    const std::int64_t out_stride = draw(0, 2) ? std::max(x_stride, n) : std::int64_t{draw(static_cast<int>(n), 40)};
    const auto x = strided(memory + draw(0, 300), m, k, x_stride, 1);
    const auto out = strided(memory + draw(0, 300), m, n, out_stride, 1);
    const Weight weight = check_weight(TensorView::matrix(far_away, n, k), "test");
    std::int64_t rows = 0;
    const auto code = check_operands(weight, x, out, &rows).code;
    const auto a = elements(x);
    const auto b = elements(out);
    bool meets = false;
    for (const void* e : a) meets = meets || b.count(e);
    const bool ranges_meet = *a.begin() <= *b.rbegin() && *b.begin() <= *a.rbegin();
    const bool exact = m == 1 || x_stride == out_stride;
    const bool want = exact ? meets : ranges_meet;
    ASSERT_EQ(code == StatusCode::kOverlap, want)
        << to_string(x) << " at " << x.data << ", " << to_string(out) << " at " << out.data;
    (want ? met : apart)++;
    gaps += exact && !meets && ranges_meet;
  }
  EXPECT_GT(met, 1000);
  EXPECT_GT(apart, 1000);
  EXPECT_GT(gaps, 100);  // the cases that ranges alone would refuse
}

// The same with out and the weight, whose row counts differ, a single row among them.
TEST(GemmContract, overlap_with_the_weight_is_exact_too) {
  SCOPED_TRACE(oracle::replay());
  std::mt19937_64 random(oracle::seed());
  const auto draw = [&](int low, int high) {
    return std::int64_t{std::uniform_int_distribution<int>(low, high)(random)};
  };
  static std::uint16_t memory[2048];
  static std::uint16_t far_away[64 * 64];
  int met = 0, gaps = 0;
  for (int round = 0; round < 100'000; ++round) {
    const std::int64_t m = draw(1, 4), k = draw(1, 24), n = draw(1, 12);
    const bool transposed = draw(0, 1) && n > 1 && k > 1;
    const std::int64_t w_rows = transposed ? k : n, w_cols = transposed ? n : k;
    const std::int64_t w_stride = draw(static_cast<int>(w_cols), 40);
    const std::int64_t out_stride = draw(0, 2) ? std::max(w_stride, n) : draw(static_cast<int>(n), 40);
    auto* w = memory + draw(0, 500);
    auto* to = memory + draw(0, 500);
    const auto view = transposed ? strided(w, n, k, 1, w_stride) : strided(w, n, k, w_stride, 1);
    std::int64_t rows = 0;
    const auto code = check_operands(check_weight(view, "test"), strided(far_away, m, k, k, 1),
                                     strided(to, m, n, out_stride, 1), &rows)
                          .code;
    bool meets = false;
    for (std::int64_t i = 0; i < w_rows; ++i)
      for (std::int64_t j = 0; j < w_cols; ++j) {
        const std::int64_t at = w + i * w_stride + j - to;
        meets = meets || (at >= 0 && at / out_stride < m && at % out_stride < n) || (m == 1 && at >= 0 && at < n);
      }
    const std::int64_t w_end = (w_rows - 1) * w_stride + w_cols, out_end = (m - 1) * out_stride + n;
    const bool ranges_meet = w < to + out_end && to < w + w_end;
    const bool exact = m == 1 || w_rows == 1 || w_stride == out_stride;
    if (m == 1) {
      meets = false;
      for (std::int64_t i = 0; i < w_rows; ++i)
        meets = meets || (w + i * w_stride < to + n && to < w + i * w_stride + w_cols);
    }
    ASSERT_EQ(code == StatusCode::kOverlap, exact ? meets : ranges_meet)
        << to_string(view) << " at " << w << ", out rows " << m << " stride " << out_stride << " at " << to;
    met += meets;
    gaps += exact && !meets && ranges_meet;
  }
  EXPECT_GT(met, 1000);
  EXPECT_GT(gaps, 100);
}

TEST(GemmContract, warp_takes_operands_tests_base_and_pitch_of_each_operand_apart) {
  alignas(64) static std::uint16_t memory[8192];
  const auto x = [&](std::int64_t offset, std::int64_t stride, std::int64_t rows = 3) {
    return strided(memory + 2048 + offset, rows, 64, stride, 1);
  };
  const auto out = [&](std::int64_t offset, std::int64_t stride, std::int64_t rows = 3) {
    return strided(memory + 4096 + offset, rows, 16, stride, 1);
  };
  EXPECT_EQ(warp_takes_operands(x(0, 64), out(0, 16)), WhyCode::kNone);
  EXPECT_EQ(warp_takes_operands(x(8, 72), out(8, 24)), WhyCode::kNone);
  EXPECT_EQ(warp_takes_operands(x(4, 64), out(0, 16)), WhyCode::kXLayout);
  EXPECT_EQ(warp_takes_operands(x(0, 68), out(0, 16)), WhyCode::kXLayout);
  EXPECT_EQ(warp_takes_operands(x(0, 64), out(2, 16)), WhyCode::kOutLayout);
  EXPECT_EQ(warp_takes_operands(x(0, 64), out(0, 18)), WhyCode::kOutLayout);
  // 3.1: a single row has no stride.
  EXPECT_EQ(warp_takes_operands(x(0, 67, 1), out(0, 17, 1)), WhyCode::kNone);
  EXPECT_EQ(warp_takes_operands(x(1, 67, 1), out(0, 17, 1)), WhyCode::kXLayout);
  // A TMA pitch is below 2^40 bytes; out is not written by TMA.
  constexpr std::int64_t kTooWide = std::int64_t{1} << 39;
  EXPECT_EQ(warp_takes_operands(x(0, kTooWide - 8), out(0, 16)), WhyCode::kNone);
  EXPECT_EQ(warp_takes_operands(x(0, kTooWide), out(0, 16)), WhyCode::kXLayout);
  EXPECT_EQ(warp_takes_operands(x(0, kTooWide, 1), out(0, 16)), WhyCode::kNone);
  EXPECT_EQ(warp_takes_operands(x(0, 64), out(0, kTooWide)), WhyCode::kNone);
  EXPECT_NE(sentence_of(WhyCode::kXLayout, x(0, kTooWide), out(0, 16)).find("less than 2^39"), std::string::npos);
  EXPECT_EQ(sentence_of(WhyCode::kOutLayout, x(0, 64), out(0, 18)).find("2^39"), std::string::npos);
}

TEST(GemmContract, warp_takes_weight_names_the_broken_rule) {
  alignas(64) static std::uint16_t memory[16384];
  const auto code = [&](const TensorView& view, int align = 16) {
    const auto reason = warp_takes_weight(check_weight(view, "test"), align);
    EXPECT_EQ(reason.sentence.empty(), reason.code == WhyCode::kNone);
    return reason.code;
  };
  EXPECT_EQ(code(strided(memory, 16, 64, 64, 1)), WhyCode::kNone);
  EXPECT_EQ(code(strided(memory, 24, 64, 64, 1)), WhyCode::kNNotMultipleOf16);
  EXPECT_EQ(code(strided(memory, 16, 96, 96, 1)), WhyCode::kKNotMultipleOf64);
  EXPECT_EQ(code(strided(memory, 16, 64, 68, 1)), WhyCode::kWeightLayout);
  EXPECT_EQ(code(strided(memory, 16, 64, 1, 16)), WhyCode::kWeightLayout);
  EXPECT_EQ(code(strided(memory, 16, 64, std::int64_t{1} << 39, 1)), WhyCode::kWeightLayout);
  EXPECT_EQ(code(strided(memory, 16, 64, (std::int64_t{1} << 39) - 8, 1)), WhyCode::kNone);
  EXPECT_EQ(code(strided(memory + 4, 16, 64, 64, 1)), WhyCode::kWeightAlignment);
  EXPECT_EQ(code(strided(memory + 8, 16, 64, 64, 1)), WhyCode::kNone);
  EXPECT_EQ(code(strided(memory + 8, 16, 64, 64, 1), 32), WhyCode::kWeightAlignment);
}

TEST(GemmContract, every_why_code_has_its_own_word) {
  std::set<std::string_view> words;
  for (int code = 0; code < kNumWhyCodes; ++code) words.insert(why_name(static_cast<WhyCode>(code)));
  EXPECT_EQ(words.size(), static_cast<std::size_t>(kNumWhyCodes));
  EXPECT_EQ(words.count("unknown"), 0u);
  EXPECT_EQ(why_name(WhyCode::kNone), "");
}

TEST(GemmContract, buckets_are_eight_rows) {
  for (int m = 1; m <= kMaxWarpRows; ++m) {
    EXPECT_GE(bucket_of(m), m);
    EXPECT_LT(bucket_of(m) - m, kRowBucket);
    EXPECT_EQ(bucket_of(m), (bucket_index(m) + 1) * kRowBucket);
  }
  EXPECT_EQ(bucket_index(kMaxWarpRows), kNumBuckets - 1);
}

}  // namespace
}  // namespace twostep
