// Verify steps: which state and which taps a request reads, where it leaves them, and that a chain of steps equals
// decoding one by one.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "tests/kda/fixture.h"

namespace twostep::kda_test {
namespace {

using KdaVerify = KdaTest;

// ---- One step

TEST_F(KdaVerify, decode_with_a_window_and_accepted_1_is_plain_decode_T24) {
  Scene scene(random, {.heads = 2, .requests = 3, .conv_len = 4, .window = 2});
  ASSERT_EQ(scene.step.given_tokens, 1);
  const Outcome without = scene.run();
  expect_right(scene.judge(without));
  scene.step.accepted = {{1, 1, 1}};
  expect_same_bits(scene.run(), without);
}

TEST_F(KdaVerify, accepted_0_after_a_discarded_step_is_dead_T26) {
  for (const bool dim_first : {false, true}) {
    Scene scene(random, {.requests = 2, .tokens = 2, .pool = 5, .dim_first = dim_first});
    scene.set_slots({1, 2, 3, 4});
    scene.step.accepted = {{1, 0}};
    scene.refill(random);
    fill_line(random, &scene.before, 3, 0, 3);  // line 3 is sound; the bytes in front of it and slot 2 are NaN
    fill_state(random, &scene.before, 3);
    const Outcome outcome = scene.run();
    expect_right(scene.judge(outcome));
    expect_zero_row(outcome, 2);
    expect_zero_row(outcome, 3);
    EXPECT_EQ(outcome.counters.bad_accepted, 1u);
  }
}

TEST_F(KdaVerify, accepted_out_of_range_is_dead_and_counted_T27) {
  Scene scene(random, {.requests = 4, .tokens = 2});
  scene.step.accepted = {{-1, 0, 3, std::numeric_limits<std::int32_t>::max()}};
  for (std::int64_t slot = 1; slot < scene.shape.slots; ++slot) {  // sound, were they read
    fill_state(random, &scene.before, slot);
    fill_line(random, &scene.before, slot, 0, 4);
  }
  const Outcome outcome = scene.run();
  scene.judge(outcome);
  expect_untouched(scene.before, outcome.caches);
  for (std::int64_t row = 0; row < 8; ++row) expect_zero_row(outcome, row);
  EXPECT_EQ(outcome.counters.bad_accepted, 4u);
}

TEST_F(KdaVerify, nothing_behind_the_slots_row_is_read_T28) {
  Scene scene(random, {.tokens = 2});
  scene.step.accepted = {{3}};
  const Outcome outcome = scene.run({.slots_last = true});
  scene.judge(outcome);
  expect_zero_row(outcome, 0);
  expect_zero_row(outcome, 1);
  expect_untouched(scene.before, outcome.caches);
}

TEST_F(KdaVerify, the_state_is_that_of_the_last_accepted_token_T29) {
  Scene one(random, {.tokens = 4});
  one.step.accepted = {{4}};
  one.refill(random);
  for (int t = 0; t < 3; ++t) fill_state(random, &one.before, one.step.slot(0, t));  // finite, and wrong
  fill_line(random, &one.before, one.step.slot(0, 3), 0, 6);
  expect_right(one.judge(one.run()));

  Scene three(random, {.requests = 3, .tokens = 3});
  three.step.accepted = {{1, 2, 3}};
  three.refill(random);
  for (int n = 0; n < 3; ++n)
    for (int t = 0; t < 3; ++t)
      if (t != n) fill_state(random, &three.before, three.step.slot(n, t));
  expect_right(three.judge(three.run()));
}

TEST_F(KdaVerify, the_new_line_starts_behind_the_rejected_inputs_T31) {
  for (const bool dim_first : {false, true}) {
    Scene scene(random, {.tokens = 2, .dim_first = dim_first});
    scene.step.accepted = {{2}};
    scene.refill(random);
    const std::int64_t line = scene.step.slot(0, 0), other = scene.step.slot(0, 1);
    fill_line(random, &scene.before, line, 0, 4);
    fill_line(random, &scene.before, other, 0, 4);
    const Outcome outcome = scene.run();
    expect_right(scene.judge(outcome));
    for (std::int64_t c = 0; c < 3 * kDim; ++c) {
      ASSERT_EQ(outcome.caches.conv(line, c, 0), scene.before.conv(line, c, 2));
      ASSERT_EQ(outcome.caches.conv(line, c, 1), scene.before.conv(line, c, 3));
      ASSERT_EQ(outcome.caches.conv(line, c, 2), scene.step.at(0, c));
      ASSERT_EQ(outcome.caches.conv(line, c, 3), scene.step.at(1, c));
      for (int position = 0; position < 4; ++position)
        ASSERT_EQ(outcome.caches.conv(other, c, position), scene.before.conv(other, c, position));
    }
  }
}

TEST_F(KdaVerify, dead_slots_in_the_window_kill_the_request_or_skip_a_store_T32) {
  Scene two(random, {.tokens = 2, .pool = 3});
  two.step.accepted = {{2}};
  for (const std::vector<std::int32_t>& table : {std::vector<std::int32_t>{0, 2}, std::vector<std::int32_t>{2, 0}}) {
    two.set_slots(table);
    fill_state(random, &two.before, 2);
    fill_line(random, &two.before, 2, 0, 4);
    const Outcome outcome = two.run();
    two.judge(outcome);
    expect_zero_row(outcome, 0);
    expect_zero_row(outcome, 1);
    expect_untouched(two.before, outcome.caches);
  }

  Scene three(random, {.tokens = 3, .pool = 3});
  three.set_slots({1, 0, 2});
  three.refill(random);
  const Outcome outcome = three.run();
  const Verdict verdict = three.judge(outcome);  // slot 0 as it was
  expect_right(verdict);
  EXPECT_EQ(verdict.plain.outputs, 3 * kDim);
  EXPECT_EQ(verdict.plain.heads, 2);
}

TEST_F(KdaVerify, the_last_token_of_a_repeated_slot_stays) {
  Scene scene(random, {.tokens = 4, .pool = 3});
  scene.set_slots({1, 2, 1, 2});
  scene.step.accepted = {{2}};
  scene.refill(random);
  const Verdict verdict = scene.judge(scene.run());
  expect_right(verdict);
  EXPECT_EQ(verdict.plain.heads, 2);
}

TEST_F(KdaVerify, a_part_of_a_wider_table_is_a_verify_step_T33) {
  Scene scene(random, {.requests = 3, .tokens = 2});
  const Outcome compact = scene.run();
  expect_right(scene.judge(compact));

  const std::vector<std::int32_t> ids = scene.step.slots;
  scene.step.slots.assign(5 * 8, -7);
  scene.step.slots_first = 3;
  scene.step.slots_stride = 8;
  scene.step.slots_rows = 4;
  for (std::size_t n = 0; n < 5; ++n)
    for (std::size_t t = 0; t < 2; ++t) scene.step.slots[8 * n + 3 + t] = n < 3 ? ids[2 * n + t] : 99;
  scene.step.slots_rows = 5;
  scene.step.accepted = {{1, 1, 1, 99, 99}};
  ASSERT_FALSE(scene.step.given_tokens);
  expect_same_bits(scene.run(), compact);
}

TEST_F(KdaVerify, the_first_step_after_prefill_reads_three_positions_T35) {
  for (const bool dim_first : {false, true})
    for (const int tokens : {2, 8}) {
      Scene scene(random, {.heads = 2, .tokens = tokens, .conv_len = 10, .dim_first = dim_first});
      const Outcome outcome = scene.run();  // positions 3 .. 9 are NaN
      expect_right(scene.judge(outcome));
      const std::int64_t line = scene.step.slot(0, 0);
      for (std::int64_t c = 0; c < 3 * kDim; ++c)
        for (int position = tokens + 2; position < 10; ++position)
          ASSERT_EQ(outcome.caches.conv(line, c, position), scene.before.conv(line, c, position));
    }
}

TEST_F(KdaVerify, requests_may_be_shorter_T36) {
  for (const bool dim_first : {false, true}) {
    Scene scene(random, {.requests = 3, .tokens = 4, .dim_first = dim_first});
    scene.step.lengths = {{4, 0, 2}};
    scene.refill(random);
    for (const std::int64_t row : {4, 5, 6, 7, 10, 11})
      for (std::int64_t column = 0; column < scene.step.columns().used(); ++column) scene.step.at(row, column) = 0xffff;
    const Outcome outcome = scene.run();
    const Verdict verdict = scene.judge(outcome);
    expect_right(verdict);
    EXPECT_EQ(verdict.plain.heads, 4 + 2);
    for (const std::int64_t row : {4, 5, 6, 7, 10, 11}) expect_zero_row(outcome, row);
  }
}

TEST_F(KdaVerify, a_length_out_of_range_is_dead_and_counted_T37) {
  Scene scene(random, {.tokens = 4});
  scene.step.lengths = {{5}};
  Bound bound(scene.step, scene.before);
  scene.rig.clear();
  scene.rig.kda.run(bound.call(), backend().stream());
  Step second = scene.step;
  second.lengths = {{-1}};
  bound.put(second);
  scene.rig.kda.run(bound.call(), backend().stream());
  const Outcome outcome = bound.read(scene.rig);
  expect_untouched(scene.before, outcome.caches);
  for (std::int64_t row = 0; row < 4; ++row) expect_zero_row(outcome, row);
  EXPECT_EQ(outcome.counters.bad_length, 2u);
}

TEST_F(KdaVerify, a_window_may_be_wider_than_the_step_T38) {
  for (const bool dim_first : {false, true}) {
    Scene scene(random, {.tokens = 4, .conv_len = 10, .window = 8, .dim_first = dim_first});
    scene.step.accepted = {{6}};
    scene.refill(random);
    const Outcome outcome = scene.run();
    expect_right(scene.judge(outcome));
    const std::int64_t line = scene.step.slot(0, 0);
    for (std::int64_t c = 0; c < 3 * kDim; ++c)
      ASSERT_EQ(outcome.caches.conv(line, c, 0), scene.before.conv(line, c, 6));
  }
}

// ---- Chains

// One object on caches of its own, with an oracle that carries its states.
struct Track {
  Rig& rig;
  Caches caches;
  Carried carried{};
  Verdict verdict{};

  Outcome step(const Step& step) {
    Outcome outcome = run(rig, step, caches);
    verdict += judge(rig, step, caches, outcome, Profile::kStock, &carried);
    caches = outcome.caches;
    return outcome;
  }
};

// What the two chains of kda 7.9 have in common.
struct Common {
  std::int64_t outputs = 0;
  std::int64_t unequal = 0;
  double worst = 0;  // difference of two states, over max(1, |S|max)

  void add_row(const Outcome& a, std::int64_t row_a, const Outcome& b, std::int64_t row_b) {
    for (std::int64_t v = 0; v < a.out_stride; ++v) {
      ++outputs;
      unequal += a.out[static_cast<std::size_t>(row_a * a.out_stride + v)] !=
                 b.out[static_cast<std::size_t>(row_b * b.out_stride + v)];
    }
  }
  void add_state(const float* a, const float* b) {
    double largest = 1, error = 0;
    for (int i = 0; i < kCells; ++i) {
      largest = std::max(largest, static_cast<double>(std::abs(a[i])));
      error = std::max(error, static_cast<double>(std::abs(a[i] - b[i])));
    }
    worst = std::max(worst, error / largest);
  }
  void expect_equal() const {
    // A chain of few outputs may exceed the rate by three standard deviations.
    const double rate = 0.01 * static_cast<double>(outputs);
    EXPECT_LE(static_cast<double>(unequal), rate + (outputs < 256 * kDim ? 3 * std::sqrt(rate) : 0)) << outputs;
    EXPECT_LE(worst, 2 * 5e-3);  // each within 5e-3 of the oracle's
  }
};

// Slot and step of the chain that decodes one by one, on caches of the same shape.
Step decode_step(const Step& verify, std::int64_t row, std::int32_t slot) {
  Step step;
  step.heads = verify.heads;
  step.row_stride = verify.row_stride;
  const auto first = verify.projected.begin() + row * verify.row_stride;
  step.projected.assign(first, first + verify.row_stride);
  step.slots = {slot};
  step.window = 1;
  return step;
}

// The live history of `verify` from position `from` on is positions 0 .. 2 of `decoded`.
void expect_same_taps(const Caches& verify, std::int64_t line, std::int64_t from, const Caches& decoded,
                      std::int64_t other) {
  for (std::int64_t c = 0; c < 3 * kDim * verify.shape.heads; ++c)
    for (std::int64_t j = 0; j < 3; ++j)
      ASSERT_EQ(verify.conv(line, c, from + j), decoded.conv(other, c, j)) << "channel " << c << " tap " << j;
}

struct Chain {
  Chain(Random& random, SceneSpec spec) : scene(random, with_decode(std::move(spec)), forget) {
    slot = scene.step.slots[0];
    alone = static_cast<std::int32_t>(slot);
    verify.caches = decoded.caches = scene.before;
  }
  static SceneSpec with_decode(SceneSpec spec) {
    spec.rig.keys = {{1, 1}};
    if (spec.tokens > 1) spec.rig.keys.push_back({1, spec.tokens});
    return spec;
  }
  // Runs `step` on one track and its first `kept` tokens one by one on the other.
  void advance(const Step& step, int kept) {
    const Outcome outcome = verify.step(step);
    for (int t = 0; t < kept; ++t) {
      const Outcome one = decoded.step(decode_step(step, t, alone));
      common.add_row(outcome, t, one, 0);
      common.add_state(outcome.caches.state(step.slot(0, t), 0), one.caches.state(alone, 0));
    }
    expect_same_taps(verify.caches, slot, kept - 1, decoded.caches, alone);
  }
  void expect_equal() const {
    expect_chain(verify.verdict);
    expect_chain(decoded.verdict);
    common.expect_equal();
  }

  Scene scene;
  std::int64_t slot = 0;   // of the conv line
  std::int32_t alone = 0;  // the one slot of the other chain
  Track verify{scene.rig, {}};
  Track decoded{scene.rig, {}};
  Common common;
};

TEST_F(KdaVerify, decode_follows_a_verify_step_T25) {
  for (const bool dim_first : {false, true}) {
    Chain chain(random, {.tokens = 2, .dim_first = dim_first});
    chain.advance(chain.scene.step, 2);

    Step next = chain.scene.step;
    next.tokens = 1;
    next.given_tokens = 1;
    next.accepted = {{2}};
    next.projected = random_step(random, 1, 1, 1, next.row_stride, chain.scene.shape.slots).projected;
    chain.advance(next, 1);
    chain.expect_equal();
    EXPECT_EQ(chain.decoded.verdict.plain.heads, 3);
  }
}

TEST_F(KdaVerify, every_token_leaves_the_state_of_decoding_so_far_T30) {
  Chain chain(random, {.tokens = 4});
  chain.advance(chain.scene.step, 4);
  chain.expect_equal();
  EXPECT_EQ(chain.verify.verdict.plain.heads, 4);
}

Verdict expect_sixteen_steps_equal_decode(Random& random, int q, bool dim_first) {
  SCOPED_TRACE(testing::Message() << replay() << ", q " << q << (dim_first ? ", DS" : ", SD"));
  Chain chain(random, {.tokens = q, .softplus = q % 2 == 0, .bias = dim_first, .dim_first = dim_first});
  const int cycle[] = {1, q, 2, q - 1};
  const auto kept = [&](int step) { return std::clamp(cycle[step % 4], 1, q); };
  for (int step = 0; step < 16; ++step) {
    Step& now = chain.scene.step;
    if (step > 0) {
      const Step next = random_step(random, 1, 1, q, now.row_stride, chain.scene.shape.slots);
      now.projected = next.projected;
      now.accepted = {{kept(step - 1)}};
    }
    chain.advance(now, step < 15 ? kept(step) : q);
  }
  chain.expect_equal();
  Verdict both = chain.verify.verdict;
  both += chain.decoded.verdict;
  return both;
}

TEST_F(KdaVerify, sixteen_steps_with_rejections_equal_one_by_one_decode_T34) {
  const std::uint64_t base = random();
  std::vector<Verdict> verdicts(2 * kKdaMaxTokens);
  parallel_for(2 * kKdaMaxTokens, [&](std::int64_t i) {  // on a GPU each is two compilations
    Random own(base + static_cast<std::uint64_t>(i));
    verdicts[static_cast<std::size_t>(i)] =
        expect_sixteen_steps_equal_decode(own, 1 + static_cast<int>(i / 2), i % 2 != 0);
  });
  Verdict all;
  for (const Verdict& verdict : verdicts) all += verdict;
  expect_chain(all);
}

}  // namespace
}  // namespace twostep::kda_test
