// The logits of a head in shards: those of the shards side by side, then cut, cap and scale (draft-gemm 10).
#include "twostep/logits.h"

#include "core/bf16.h"
#include "core/hash.h"
#include "group.h"

namespace twostep::test {
namespace {

using LogitsOverRanks = MailboxTest;

TEST_P(LogitsOverRanks, are_the_shards_side_by_side_then_cut_capped_and_scaled) {
  on_ranks(GetParam(), [](Rank& r) {
    constexpr std::int64_t kWidth = 512, kK = 1024;
    const auto values = [&](std::size_t count, std::uint64_t stream) {
      std::vector<std::uint16_t> v(count);
      for (std::size_t i = 0; i < count; ++i)
        v[i] = float_to_bf16(static_cast<float>(mix64(test_seed() + mix64((stream << 32) + i)) % 17) / 16 - 0.5f);
      return v;
    };
    auto* head = reinterpret_cast<std::uint16_t*>(r.memory);
    std::uint16_t *hidden = head + (4 << 20), *shard = head + (8 << 20), *out = head + (12 << 20),
                  *all = head + (16 << 20);
    const auto own_head = values(kWidth * kK, 1 + static_cast<std::uint64_t>(r.rank));
    r.write(head, own_head.data(), 2 * own_head.size());
    const TensorView head_view = TensorView::matrix(head, kWidth, kK, r.device);
    const std::int64_t width = r.size * kWidth;
    struct Variant {
      std::int64_t vocab;
      std::optional<float> cap;
      float scale;
      std::int64_t stride;
    };
    const Variant variants[] = {
        {0, {}, 1, width}, {0, {}, 1, width + 1}, {width - 7, {}, 1, width}, {0, 15.0f, 0.5f, width + 8}};
    DraftGemm gemm(head_view);
    for (const Variant& variant : variants) {
      LogitsOptions options;
      options.vocab = variant.vocab;
      options.soft_cap = variant.cap;
      options.scale = variant.scale;
      options.mailbox = r.mailbox;
      DraftLogits logits(head_view, options);
      const std::int64_t vocab = logits.vocab();
      EXPECT_EQ(vocab, variant.vocab ? variant.vocab : width);
      const LogitsStage stage(r.device, variant.cap, variant.scale);
      r.stream->synchronize();
      r.meet();  // all memory is taken
      for (const std::int64_t m : {8, 1, 0}) {
        logits.prepare(static_cast<int>(std::max<std::int64_t>(m, 1)), r.stream->view());
        gemm.prepare(static_cast<int>(std::max<std::int64_t>(m, 1)), r.stream->view());
        r.stream->synchronize();
        r.meet();
        const auto x = values(static_cast<std::size_t>(m * kK), 100);  // the same on all ranks
        r.write(hidden, x.data(), 2 * x.size());
        std::vector<std::uint16_t> got(static_cast<std::size_t>(8 * variant.stride), 0xfff3);
        r.write(out, got.data(), 2 * got.size());
        const TensorView x_view = TensorView::matrix(hidden, m, kK, r.device);
        const TensorView out_view = TensorView::matrix(out, m, vocab, r.device, variant.stride);
        logits.run(x_view, out_view, r.stream->view());
        r.read(got.data(), out, 2 * got.size());
        r.mailbox->check();
        // The same by parts, the shards exchanged by the host.
        const TensorView shard_view = TensorView::matrix(shard, m, kWidth, r.device);
        gemm.run(x_view, shard_view, r.stream->view());
        std::vector<std::uint16_t> mine(8 * kWidth), shards(mine.size() * static_cast<std::size_t>(r.size));
        r.read(mine.data(), shard, static_cast<std::size_t>(2 * m * kWidth));
        r.bootstrap->all_gather_bytes(mine.data(), shards.data(), 2 * mine.size(), 60);
        std::vector<std::uint16_t> whole(static_cast<std::size_t>(m * width)),
            expected(static_cast<std::size_t>(m * vocab));
        for (std::int64_t row = 0; row < m; ++row)
          for (std::int64_t j = 0; j < width; ++j)
            whole[static_cast<std::size_t>(row * width + j)] =
                shards[static_cast<std::size_t>(j / kWidth) * mine.size() +
                       static_cast<std::size_t>(row * kWidth + j % kWidth)];
        r.write(all, whole.data(), 2 * whole.size());
        const TensorView expected_view = TensorView::matrix(shard, m, vocab, r.device);
        stage.run(TensorView::matrix(all, m, width, r.device), expected_view, r.stream->view());
        r.read(expected.data(), shard, 2 * expected.size());
        for (std::int64_t row = 0; row < 8; ++row)
          for (std::int64_t j = 0; j < variant.stride; ++j) {
            const std::uint16_t is = got[static_cast<std::size_t>(row * variant.stride + j)];
            if (row < m && j < vocab)
              ASSERT_EQ(is, expected[static_cast<std::size_t>(row * vocab + j)]) << row << ", " << j;
            else ASSERT_EQ(is, 0xfff3) << "outside of out: " << row << ", " << j;
          }
      }
      r.meet();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LogitsOverRanks,
                         testing::Values(Setting{2, false}, Setting{4, false}, Setting{2, true}), [](const auto& of) {
                           return std::to_string(of.param.size) + (of.param.spread ? "_gpus" : "_virtual");
                         });

}  // namespace
}  // namespace twostep::test
