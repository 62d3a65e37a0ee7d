// What a mailbox accepts, and what it says otherwise.
#include <gtest/gtest.h>

#include "core/env.h"
#include "mailbox/contract.h"
#include "mailbox/kernels.h"

namespace twostep {
namespace {

constexpr Device kDevice = {Device::Type::kCuda, 0};

MailboxConfig good_config() {
  MailboxConfig config;
  config.size = 4;
  config.rank = 1;
  config.max_cols = 40'960;
  config.peer_limit_s = 2;
  return config;
}
// Addresses that nobody follows.
void* address(std::uintptr_t at) { return reinterpret_cast<void*>(0x10000 * at); }
TensorView matrix(std::uintptr_t at, std::int64_t rows, std::int64_t cols, std::int64_t stride = 0) {
  return TensorView::matrix(address(at), rows, cols, kDevice, stride);
}

TEST(MailboxContract, a_config_is_refused_by_the_number_that_is_wrong) {
  const auto argument = [](auto change) {
    MailboxConfig config = good_config();
    change(config);
    const Status status = check_mailbox_config(&config, 4);
    EXPECT_TRUE(status.ok() || status.code == StatusCode::kInvalidArgument);
    return status.argument;
  };
  EXPECT_EQ(argument([](MailboxConfig&) {}), "");
  EXPECT_EQ(argument([](MailboxConfig& c) { c.size = 1; }), "size");
  EXPECT_EQ(argument([](MailboxConfig& c) { c.size = 9; }), "size");
  EXPECT_EQ(argument([](MailboxConfig& c) { c.size = 3; }), "size") << "the group has four";
  EXPECT_EQ(argument([](MailboxConfig& c) { c.rank = 4; }), "rank");
  EXPECT_EQ(argument([](MailboxConfig& c) { c.rank = -1; }), "rank");
  EXPECT_EQ(argument([](MailboxConfig& c) { c.max_rows = 257; }), "max_rows");
  EXPECT_EQ(argument([](MailboxConfig& c) { c.max_cols = 0; }), "max_cols");
  EXPECT_EQ(argument([](MailboxConfig& c) { c.max_cols = 12; }), "max_cols");
  EXPECT_EQ(argument([](MailboxConfig& c) { c.max_cols = std::int64_t{1} << 50; }), "max_cols");
  EXPECT_EQ(argument([](MailboxConfig& c) { c.max_hidden = 16'392; }), "max_hidden");
  EXPECT_EQ(argument([](MailboxConfig& c) { c.max_words = 0; }), "max_words");
  EXPECT_EQ(argument([](MailboxConfig& c) { c.max_ctas = -1; }), "max_ctas");
  EXPECT_EQ(argument([](MailboxConfig& c) { c.peer_limit_s = -1; }), "peer_limit_s");
  EXPECT_EQ(argument([](MailboxConfig& c) { c.peer_limit_s = std::numeric_limits<double>::quiet_NaN(); }),
            "peer_limit_s");
  MailboxConfig config = good_config();
  config.peer_limit_s = 0;
  EXPECT_TRUE(check_mailbox_config(&config, 4).ok());
  EXPECT_EQ(config.peer_limit_s, environment().peer_limit_s);
}

TEST(MailboxContract, the_region_is_as_large_as_the_specification_says) {
  for (const int ranks : {2, 4, 8}) {
    MailboxConfig config = good_config();
    config.size = ranks;
    config.max_cols = 163'840 / ranks;
    const RegionLayout layout = region_layout(config);
    EXPECT_EQ(3 * ranks * layout.segment_bytes[0], 62'914'560);           // 62.9 MB for any P
    EXPECT_EQ(3 * ranks * layout.segment_bytes[1], 3 * ranks * 16'384);   // words
    EXPECT_EQ(3 * ranks * layout.segment_bytes[2], 3 * ranks * 917'504);  // 64 rows of 14,336 bytes
    for (const std::int64_t offset : layout.offset) EXPECT_EQ(offset % 256, 0);
    EXPECT_GE(layout.bytes, layout.offset[2] + 3 * ranks * (16 + layout.segment_bytes[2]));
  }
}

TEST(MailboxContract, accepts_depends_on_sizes_alone) {
  const MailboxConfig config = good_config();
  const auto code = [&](MailboxOp op, std::int64_t rows, std::int64_t cols, DType dtype = DType::kBF16) {
    return mailbox_accepts(config, op, rows, cols, dtype).code;
  };
  constexpr MailboxOp kGather = MailboxOp::kAllGather, kWords = MailboxOp::kAllGatherWords,
                      kReduce = MailboxOp::kAllReduceAddNorm;
  EXPECT_EQ(code(kGather, 0, 8), StatusCode::kOk);
  EXPECT_EQ(code(kGather, 64, 40'960), StatusCode::kOk);
  EXPECT_EQ(code(kGather, 65, 8), StatusCode::kUnsupported);
  EXPECT_EQ(code(kGather, -1, 8), StatusCode::kUnsupported);
  EXPECT_EQ(code(kGather, 1, 12), StatusCode::kUnsupported);
  EXPECT_EQ(code(kGather, 1, 40'968), StatusCode::kUnsupported);
  EXPECT_EQ(code(kGather, 1, 8, DType::kF32), StatusCode::kUnsupported);
  EXPECT_EQ(code(kReduce, 8, 7168), StatusCode::kOk);
  EXPECT_EQ(code(kReduce, 8, 7176), StatusCode::kUnsupported);
  EXPECT_EQ(code(kWords, 1, 3, DType::kI32), StatusCode::kOk);
  EXPECT_EQ(code(kWords, 1, 4097, DType::kI32), StatusCode::kUnsupported);
  EXPECT_EQ(code(kWords, 1, 3), StatusCode::kUnsupported);
  EXPECT_NE(mailbox_accepts(config, kGather, 65, 8, DType::kBF16).remedy.find("NCCL"), std::string::npos);
}

TEST(MailboxContract, operands_of_a_gather) {
  const MailboxConfig config = good_config();
  GatherStep step;
  const auto code = [&](const TensorView& in, const TensorView& out) {
    return check_all_gather(config, kDevice, in, out, &step).code;
  };
  EXPECT_EQ(code(matrix(1, 3, 16, 24), matrix(2, 3, 64, 72)), StatusCode::kOk);
  EXPECT_EQ(step.in_stride, 24);
  EXPECT_EQ(step.out_stride, 72);
  EXPECT_EQ(step.rows, 3u);
  EXPECT_EQ(step.cols, 16u);
  EXPECT_EQ(code(matrix(1, 3, 16), matrix(2, 3, 48)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(matrix(1, 3, 16), matrix(2, 2, 64)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(matrix(1, 3, 16, 20), matrix(2, 3, 64)), StatusCode::kBadLayout);
  EXPECT_EQ(code(matrix(1, 3, 16), matrix(2, 3, 64, 68)), StatusCode::kBadLayout);
  EXPECT_EQ(code(matrix(1, 0, 16), matrix(2, 0, 64)), StatusCode::kOk) << "a round without data";
  TensorView odd = matrix(1, 3, 16);
  odd.data = static_cast<std::byte*>(odd.data) + 8;
  EXPECT_EQ(code(odd, matrix(2, 3, 64)), StatusCode::kBadLayout);
  TensorView elsewhere = matrix(1, 3, 16);
  elsewhere.device = Device::cuda(1);
  EXPECT_EQ(code(elsewhere, matrix(2, 3, 64)), StatusCode::kWrongDevice);
  EXPECT_EQ(code(matrix(0, 3, 16), matrix(2, 3, 64)), StatusCode::kInvalidArgument) << "null";
  // in may be the rank's own columns of out, and nothing else of it.
  TensorView own = matrix(2, 3, 16, 64);
  own.data = static_cast<std::uint16_t*>(own.data) + 16;
  EXPECT_EQ(code(own, matrix(2, 3, 64)), StatusCode::kOk);
  EXPECT_EQ(code(matrix(2, 3, 16, 64), matrix(2, 3, 64)), StatusCode::kOverlap);
}

TEST(MailboxContract, nccl_takes_what_a_mailbox_does_not) {
  constexpr Carrier kNccl = Carrier::kNccl;
  constexpr MailboxOp kGather = MailboxOp::kAllGather, kReduce = MailboxOp::kAllReduceAddNorm;
  MailboxConfig config = good_config();
  config.size = 12;
  config.max_rows = 1000;
  config.max_cols = 101;
  EXPECT_FALSE(check_mailbox_config(&config, 12).ok());
  ASSERT_TRUE(check_mailbox_config(&config, 12, kNccl).ok()) << check_mailbox_config(&config, 12, kNccl).message();
  const auto accepts = [&](MailboxOp op, std::int64_t rows, std::int64_t cols, DType dtype = DType::kBF16) {
    return mailbox_accepts(config, op, rows, cols, dtype, kNccl).ok();
  };
  EXPECT_TRUE(accepts(kGather, 1000, 101));
  EXPECT_FALSE(accepts(kGather, 1000, 102));
  EXPECT_FALSE(accepts(kGather, 1001, 1));
  EXPECT_TRUE(accepts(kGather, 3, 50, DType::kF32));
  EXPECT_FALSE(accepts(kGather, 3, 51, DType::kF32)) << "more bytes than there is room for";
  EXPECT_TRUE(accepts(kGather, 3, 202, DType::kU8));
  EXPECT_TRUE(accepts(kReduce, 1000, 7168));
  EXPECT_FALSE(accepts(kReduce, 1, 12));
  EXPECT_FALSE(accepts(kReduce, 1, 16, DType::kF32));
  const Status refused = mailbox_accepts(config, kGather, 1001, 1, DType::kBF16, kNccl);
  EXPECT_EQ(refused.place, "nccl.all_gather");

  GatherStep step;
  const auto code = [&](const TensorView& in, const TensorView& out) {
    return check_all_gather(config, kDevice, in, out, &step, kNccl).code;
  };
  TensorView odd = matrix(1, 2, 5, 7);
  odd.data = static_cast<std::byte*>(odd.data) + 2;
  EXPECT_EQ(code(odd, matrix(2, 2, 60, 61)), StatusCode::kOk);
  odd.data = static_cast<std::byte*>(odd.data) + 1;
  EXPECT_EQ(code(odd, matrix(2, 2, 60, 61)), StatusCode::kBadLayout);
  EXPECT_EQ(code(matrix(1, 2, 5), TensorView::matrix(address(2), 2, 60, kDevice, 0, DType::kF32)),
            StatusCode::kUnsupported);
  for (auto change : {+[](MailboxConfig& c) { c.size = 1; }, +[](MailboxConfig& c) { c.max_cols = 0; },
                      +[](MailboxConfig& c) { c.max_rows = 1 << 20; }, +[](MailboxConfig& c) { c.max_hidden = 12; },
                      +[](MailboxConfig& c) { c.max_cols = 1 << 30; }}) {
    MailboxConfig bad = config;
    change(bad);
    EXPECT_EQ(check_mailbox_config(&bad, bad.size, kNccl).place, "nccl.create");
  }
}

TEST(MailboxContract, operands_of_words) {
  const MailboxConfig config = good_config();
  GatherStep step;
  const auto words = [](std::uintptr_t at, std::int64_t count, DType dtype = DType::kI32) {
    return TensorView::dense(address(at), dtype, {count}, kDevice);
  };
  const auto table = [](std::uintptr_t at, std::int64_t rows, std::int64_t count, DType dtype = DType::kI32) {
    return TensorView::dense(address(at), dtype, {rows, count}, kDevice);
  };
  const auto code = [&](const TensorView& in, const TensorView& out) {
    return check_all_gather_words(config, kDevice, in, out, &step).code;
  };
  EXPECT_EQ(code(words(1, 5), table(2, 4, 5)), StatusCode::kOk);
  EXPECT_EQ(step.cols, 5u);
  EXPECT_EQ(code(words(1, 5, DType::kF32), table(2, 4, 5, DType::kF32)), StatusCode::kOk);
  EXPECT_EQ(code(words(1, 5), table(2, 4, 5, DType::kF32)), StatusCode::kUnsupported);
  EXPECT_EQ(code(words(1, 5), table(2, 3, 5)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(words(1, 0), table(2, 4, 0)), StatusCode::kUnsupported);
  EXPECT_EQ(code(words(2, 5), table(2, 4, 5)), StatusCode::kOverlap);
}

TEST(MailboxContract, operands_of_the_reduction) {
  const MailboxConfig config = good_config();
  AddNormStep step{};
  const TensorView gamma = TensorView::dense(address(9), DType::kF32, {64}, kDevice);
  using View = std::optional<TensorView>;
  const auto code = [&](const TensorView& in, const View& residual, const TensorView& residual_out, const View& weight,
                        const View& norm_out, float eps = 1e-5f) {
    return check_add_norm(config, kDevice, in, residual, residual_out, weight, eps, norm_out, &step).code;
  };
  const TensorView in = matrix(1, 2, 64), other = matrix(2, 2, 64), third = matrix(3, 2, 64), fourth = matrix(4, 2, 64);
  EXPECT_EQ(code(in, other, third, gamma, fourth), StatusCode::kOk);
  EXPECT_EQ(step.gamma_f32, 1u);
  EXPECT_EQ(code(in, {}, third, {}, {}), StatusCode::kOk);
  EXPECT_EQ(step.residual, nullptr);
  EXPECT_EQ(code(in, other, other, gamma, in), StatusCode::kOk) << "in place";
  EXPECT_EQ(code(in, other, third, gamma, {}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(in, other, third, {}, fourth), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(in, other, in, gamma, fourth), StatusCode::kOverlap) << "norm_out alone may be in";
  EXPECT_EQ(code(in, other, third, gamma, third), StatusCode::kOverlap);
  EXPECT_EQ(code(in, other, third, gamma, other), StatusCode::kOverlap);
  EXPECT_EQ(code(in, other, third, gamma, fourth, -1.0f), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(in, matrix(2, 1, 64), third, gamma, fourth), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(in, other, third, TensorView::dense(address(9), DType::kI32, {64}, kDevice), fourth),
            StatusCode::kUnsupported);
}

TEST(MailboxContract, a_report_becomes_a_sentence_with_rank_peer_and_epoch) {
  MailboxReport report{};
  EXPECT_TRUE(status_of(report, 2).ok());
  report.cause = MailboxCause::kPeerLost;
  report.op = static_cast<std::int32_t>(MailboxOp::kAllGather);
  report.rank = 1;
  report.peer = 3;
  report.epoch = 812;
  report.elapsed_ns = 2'000'000'000;
  const std::string lost = status_of(report, 2).message();
  for (const char* part : {"mailbox.all_gather", "peer = 3", "epoch 812", "2.000 s", "rank 1"})
    EXPECT_NE(lost.find(part), std::string::npos) << lost;
  EXPECT_EQ(status_of(report, 2).code, StatusCode::kPeerLost);
  report.cause = static_cast<MailboxCause>(77);
  EXPECT_EQ(status_of(report, 2).code, StatusCode::kInternal);
}

TEST(MailboxContract, grids_follow_the_sizes) {
  EXPECT_EQ(mailbox_grid(MailboxOp::kAllGather, 0, 0, 64), 1u);
  EXPECT_EQ(mailbox_grid(MailboxOp::kAllGather, 1, 10'240, 64), 20u);
  EXPECT_EQ(mailbox_grid(MailboxOp::kAllGather, 64, 655'360, 64), 64u);
  EXPECT_EQ(mailbox_grid(MailboxOp::kAllReduceAddNorm, 8, 7168, 64), 8u);
  EXPECT_EQ(mailbox_grid(MailboxOp::kAllReduceAddNorm, 200, 100, 64), 64u);
}

TEST(MailboxContract, calls_keep_to_the_stream_of_the_first_one_and_captures_bind_nothing) {
  const Stream a{address(1)}, b{address(2)};
  BoundStream bound;
  bound.require("test", a, true);
  bound.keep(a, true);
  EXPECT_NO_THROW(bound.require("test", b, false)) << "a stream that captures came first";
  bound.keep(b, false);
  EXPECT_NO_THROW(bound.require("test", b, false));
  EXPECT_NO_THROW(bound.require("test", a, true));
  EXPECT_THROW(bound.require("test", a, false), Error);
}

}  // namespace
}  // namespace twostep
