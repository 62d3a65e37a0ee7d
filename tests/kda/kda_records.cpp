// State mode records: what a step folds, notes and leaves alone; the calls between steps; and that a chain has the bits
// of slots mode (kda 8; T39 - T46).
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/kda/fixture.h"

namespace twostep::kda_test {
namespace {

using KdaRecords = KdaTest;

void expect_counts(const Caches& caches, std::int64_t slot, std::int32_t count) {
  for (int h = 0; h < caches.shape.heads; ++h) EXPECT_EQ(caches.count(slot, h), count) << "slot " << slot;
}

void expect_same_state(const Caches& a, std::int64_t slot_a, const Caches& b, std::int64_t slot_b) {
  EXPECT_EQ(std::memcmp(a.state(slot_a, 0), b.state(slot_b, 0), static_cast<std::size_t>(a.shape.state_bytes())), 0)
      << "the states of slots " << slot_a << " and " << slot_b << " differ";
}

// Positions from .. from + count - 1 of one line against those from 0 on of another.
void expect_same_line(const Caches& a, std::int64_t slot_a, std::int64_t from, const Caches& b, std::int64_t slot_b,
                      std::int64_t count) {
  for (std::int64_t c = 0; c < 3 * kDim * a.shape.heads; ++c)
    for (std::int64_t p = 0; p < count; ++p)
      ASSERT_EQ(a.conv(slot_a, c, from + p), b.conv(slot_b, c, p)) << "channel " << c << ", position " << p;
}

// NaN in all that the next step may not use: entries from `accepted` on.
void spoil_records(Caches* caches, std::int64_t slot, std::int64_t accepted) {
  for (int h = 0; h < caches->shape.heads; ++h)
    for (std::int64_t t = accepted; t < caches->shape.entries(); ++t) {
      std::memset(caches->u(slot, h, t), 0xff, 512);
      std::memset(caches->k(slot, h, t), 0xff, 256);
      std::memset(caches->g(slot, h, t), 0xff, 256);
    }
}

// The same requests with other inputs.
Step next_step(Random& random, const Step& step, std::vector<std::int32_t> accepted, std::int64_t pool) {
  Step next = step;
  next.projected =
      random_step(random, step.heads, step.requests, step.tokens, step.row_stride, pool, step.window).projected;
  next.accepted = std::move(accepted);
  return next;
}

// ---- One step

TEST_F(KdaRecords, a_fresh_request_uses_no_record_and_stores_no_state_T40) {
  for (const bool dim_first : {false, true}) {
    Scene scene(random, {.heads = 2, .tokens = 2, .dim_first = dim_first, .records = true});
    const auto slot = static_cast<std::int32_t>(scene.step.slot(0, 0));
    spoil_records(&scene.before, slot, 0);
    for (int h = 0; h < 2; ++h) scene.before.count(slot, h) = 7;
    scene.before = folded(scene.rig, scene.before, {slot});
    expect_counts(scene.before, slot, 0);
    const Outcome outcome = scene.run();
    expect_right(scene.judge(outcome));
    expect_same_state(outcome.caches, slot, scene.before, slot);
    expect_counts(outcome.caches, slot, 2);
  }
}

TEST_F(KdaRecords, what_is_folded_is_right_in_both_gate_forms_T41) {
  for (const bool softplus : {false, true}) {
    Scene scene(random, {.heads = 2, .tokens = 2, .softplus = softplus, .records = true});
    const auto slot = static_cast<std::int32_t>(scene.step.slot(0, 0));
    for (int h = 0; h < 2; ++h) scene.before.count(slot, h) = 0;
    const Outcome first = scene.run();
    expect_right(scene.judge(first));
    // The next step folds one token; the judge compares the state that it stores with the oracle's.
    const Step second = next_step(random, scene.step, {1}, scene.shape.slots);
    const Outcome outcome = run(scene.rig, second, first.caches);
    const Verdict verdict = judge(scene.rig, second, first.caches, outcome);
    expect_right(verdict);
    EXPECT_EQ(verdict.plain.heads, 2 * 2);  // the folded state, and that behind the new tokens' records
    // And fold_records alone, the same bits.
    expect_same_state(folded(scene.rig, first.caches, {slot}, {{1}}), slot, outcome.caches, slot);
  }
}

TEST_F(KdaRecords, decode_folds_and_leaves_nothing_pending_T42) {
  for (const bool dim_first : {false, true}) {
    RigOptions options;
    options.keys = {{1, 1}, {1, 2}};
    Scene scene(random, {.heads = 2, .tokens = 2, .dim_first = dim_first, .records = true, .rig = options});
    const std::int64_t slot = scene.step.slot(0, 0);
    const Outcome first = scene.run();
    expect_right(scene.judge(first));

    Step decode = random_step(random, 2, 1, 1, scene.step.row_stride, scene.shape.slots);
    decode.slots = {static_cast<std::int32_t>(slot)};
    decode.accepted = {{2}};
    const Outcome second = run(scene.rig, decode, first.caches);
    expect_right(judge(scene.rig, decode, first.caches, second));
    expect_counts(second.caches, slot, 0);

    decode.accepted.reset();  // absent is 1
    const Outcome third = run(scene.rig, decode, second.caches);
    expect_right(judge(scene.rig, decode, second.caches, third));

    const Step last = next_step(random, scene.step, {1}, scene.shape.slots);
    const Outcome fourth = run(scene.rig, last, third.caches);
    expect_right(judge(scene.rig, last, third.caches, fourth));
    expect_counts(fourth.caches, slot, 2);
  }
}

TEST_F(KdaRecords, accepted_that_does_not_fit_the_records_is_dead_and_counted_T45) {
  for (const int tokens : {1, 2})
    for (const auto& [accepted, count] :
         std::vector<std::pair<int, int>>{{2, 1}, {2, 0}, {1, -1}, {2, std::numeric_limits<int>::min()}}) {
      SCOPED_TRACE(testing::Message() << tokens << " tokens, accepted " << accepted << ", count " << count);
      Scene scene(random, {.heads = 2, .requests = 2, .tokens = tokens, .conv_len = 4, .records = true});
      scene.step.accepted = {{accepted, 1}};
      scene.step.given_tokens = tokens;
      const std::int64_t slot = scene.step.slot(0, 0);
      fill_state(random, &scene.before, slot);  // sound, were it read
      fill_line(random, &scene.before, slot, 0, 4);
      fill_records(random, &scene.before, slot, 2, count);
      const Outcome outcome = scene.run();
      expect_right(scene.judge(outcome));
      for (int t = 0; t < tokens; ++t) expect_zero_row(outcome, t);
      EXPECT_EQ(outcome.counters.stale_records, 1u);
    }

  // As it comes about: one token was real, two are said to be accepted.
  Scene scene(random, {.tokens = 2, .records = true});
  scene.step.lengths = {{1}};
  const Outcome first = scene.run();
  expect_right(scene.judge(first));
  Step second = next_step(random, scene.step, {2}, scene.shape.slots);
  second.lengths.reset();
  const Outcome outcome = run(scene.rig, second, first.caches);
  judge(scene.rig, second, first.caches, outcome);
  expect_untouched(first.caches, outcome.caches);
  EXPECT_EQ(outcome.counters.stale_records, 1u);
}

TEST_F(KdaRecords, more_than_a_step_records_is_never_pending) {
  Scene scene(random, {.tokens = 2, .conv_len = 14, .records = true});
  const std::int64_t slot = scene.step.slot(0, 0);
  for (const auto& [accepted, bad, stale] : {std::tuple{12, 0u, 1u}, {9, 0u, 1u}, {13, 1u, 0u}, {8, 0u, 0u}}) {
    scene.step.accepted = {{accepted}};
    fill_state(random, &scene.before, slot);
    fill_line(random, &scene.before, slot, 0, 14);
    fill_records(random, &scene.before, slot, 12, 12);
    const Outcome outcome = scene.run();
    scene.judge(outcome);
    EXPECT_EQ(outcome.counters.bad_accepted, bad) << accepted;
    EXPECT_EQ(outcome.counters.stale_records, stale) << accepted;
  }
}

TEST_F(KdaRecords, fresh_and_pending_requests_share_a_step_T46) {
  for (const int tokens : {1, 2, 8}) {
    Scene scene(random, {.heads = 2, .requests = 3, .tokens = tokens, .conv_len = 10, .records = true});
    scene.step.accepted = {{1, 1, 5}};
    scene.step.given_tokens = tokens;
    scene.refill(random);
    fill_records(random, &scene.before, scene.step.slot(0, 0), 0, 0);
    fill_records(random, &scene.before, scene.step.slot(1, 0), 1, 3);
    const Outcome outcome = scene.run();
    const Verdict verdict = scene.judge(outcome);
    expect_right(verdict);
    EXPECT_EQ(verdict.plain.outputs, 3 * tokens * 2 * kDim);
  }
}

TEST_F(KdaRecords, only_column_0_is_used) {
  Scene scene(random, {.requests = 2, .tokens = 3, .conv_len = 6, .records = true});
  scene.step.accepted = {{3, 2}};
  scene.refill(random);
  const Outcome outcome = scene.run();
  expect_right(scene.judge(outcome));

  const std::vector<std::int32_t> ids = scene.step.slots;
  const auto most = std::numeric_limits<std::int32_t>::max();
  scene.set_slots({ids[0], most, 0, ids[3], -1, ids[0]});
  expect_same_bits(scene.run(), outcome);
  scene.step.window = 0;  // [B]: the tokens must be told
  scene.set_slots({ids[0], ids[3]});
  scene.step.given_tokens = 3;
  expect_same_bits(scene.run(), outcome);
  scene.step.window = 9;  // wider than the records have room
  scene.set_slots({ids[0], 1, 1, 1, 1, 1, 1, 1, 1, ids[3], 1, 1, 1, 1, 1, 1, 1, 1});
  expect_same_bits(scene.run(), outcome);
}

TEST_F(KdaRecords, dead_requests_keep_their_records) {
  for (const int tokens : {1, 3}) {
    Scene scene(random, {.requests = 5, .tokens = tokens, .conv_len = 6, .records = true});
    scene.step.accepted = {{1, 0, 5, 2, 2}};
    scene.step.lengths = {{0, tokens, tokens, tokens + 1, tokens}};
    scene.step.given_tokens = tokens;
    for (int n = 0; n < 5; ++n) {
      const std::int64_t slot = scene.step.slot(n, 0);
      fill_state(random, &scene.before, slot);
      fill_line(random, &scene.before, slot, 0, 6);
      fill_records(random, &scene.before, slot, 4, 4);
    }
    const Outcome outcome = scene.run();
    expect_right(scene.judge(outcome));
    EXPECT_EQ(outcome.counters.bad_accepted, 2u);
    EXPECT_EQ(outcome.counters.bad_length, 1u);
    for (std::int64_t row = 0; row < 4 * tokens; ++row) expect_zero_row(outcome, row);
  }
}

TEST_F(KdaRecords, line_state_and_records_may_share_a_page) {
  Scene scene(random, {.heads = 12, .tokens = 4, .pool = 7, .paged = true, .records = true});
  ASSERT_EQ(scene.shape.state_pitch, 890928);
  scene.step.accepted = {{3}};
  scene.refill(random);
  expect_right(scene.judge(scene.run()));

  Scene other(random, {.heads = 2, .requests = 2, .tokens = 3, .dim_first = true, .paged = true, .records = true});
  other.step.accepted = {{2, 3}};
  other.refill(random);
  const Outcome paged = other.run({.caches_offset = 16});
  expect_right(other.judge(paged));
  // Elsewhere, and further apart: the same bits.
  const CacheShape wide = CacheShape::of(2, other.shape.slots, other.shape.conv_len, false, 48, true);
  Rig rig(other.layer, wide, other.spec.rig);
  const Outcome apart = run(rig, other.step, reshaped(other.before, wide));
  expect_same_out(paged, apart);
  expect_same_contents(paged.caches, apart.caches);
}

// ---- Between steps

TEST_F(KdaRecords, fold_in_place_moves_the_line_once_T43) {
  Scene scene(random, {.heads = backend().whole() ? 96 : 24, .tokens = 2, .conv_len = 10, .records = true});
  const auto slot = static_cast<std::int32_t>(scene.step.slot(0, 0));
  fill_line(random, &scene.before, slot, 0, 10);
  fill_records(random, &scene.before, slot, 2, 3);
  const Caches first = folded(scene.rig, scene.before, {slot}, {{2}});
  expect_same_line(scene.before, slot, 1, first, slot, 3);
  expect_counts(first, slot, 0);
  for (int repeat = 1; repeat < 20; ++repeat) {
    const Caches again = folded(scene.rig, scene.before, {slot}, {{2}});
    EXPECT_TRUE(again.bytes == first.bytes) << "repeat " << repeat << " differs";
  }
  expect_untouched(first, folded(scene.rig, first, {slot}, {{1}}));  // nothing is left to fold
}

TEST_F(KdaRecords, fold_into_another_slot_is_the_state_after_that_many_tokens_T44) {
  for (const bool dim_first : {false, true})
    for (const bool softplus : {false, true}) {
      Scene slots(random, {.heads = 2, .tokens = 8, .pool = 10, .softplus = softplus, .dim_first = dim_first});
      const CacheShape shape = CacheShape::of(2, 10, 10, dim_first, 0, true);
      RigOptions options = slots.spec.rig;
      options.tactic = slots.rig.kda.tactic({1, 8});
      Rig rig(slots.layer, shape, options);
      const std::int64_t from = slots.step.slot(0, 0);
      Caches before = reshaped(slots.before, shape);
      for (int h = 0; h < 2; ++h) before.count(from, h) = 0;
      const Outcome states = slots.run(), records = run(rig, slots.step, before);
      expect_same_out(states, records);
      const auto source = static_cast<std::int32_t>(from), dst = source == 1 ? 2 : 1;
      for (int m = 1; m <= 8; ++m) {
        Caches after = folded(rig, records.caches, {source}, {{m}}, {{dst}});
        expect_same_state(after, dst, states.caches, slots.step.slot(0, m - 1));
        expect_same_line(records.caches, source, m - 1, after, dst, 3);
        expect_counts(after, dst, 0);
        // Nothing but these was written.
        for (int h = 0; h < 2; ++h) after.count(dst, h) = records.caches.count(dst, h);
        for (std::int64_t c = 0; c < 6 * kDim; ++c)
          for (int p = 0; p < 3; ++p) after.set_conv(dst, c, p, records.caches.conv(dst, c, p));
        std::memcpy(after.state(dst, 0), records.caches.state(dst, 0), static_cast<std::size_t>(shape.state_bytes()));
        expect_untouched(records.caches, after);
      }
    }
}

TEST_F(KdaRecords, a_fresh_request_is_copied_as_it_is) {
  Scene scene(random, {.heads = 2, .tokens = 2, .records = true});
  const auto slot = static_cast<std::int32_t>(scene.step.slot(0, 0));
  fill_records(random, &scene.before, slot, 0, 0);
  const std::int32_t dst = slot == 1 ? 2 : 1;
  const Caches after = folded(scene.rig, scene.before, {slot}, {{1}}, {{dst}});
  expect_same_state(after, dst, scene.before, slot);
  expect_same_line(scene.before, slot, 0, after, dst, 3);
  expect_counts(after, dst, 0);
}

TEST_F(KdaRecords, bad_requests_of_a_fold_are_left_alone_and_counted) {
  Scene scene(random, {.heads = 2, .tokens = 2, .conv_len = 6, .pool = 8, .records = true});
  for (std::int64_t slot = 0; slot < 8; ++slot) {
    fill_state(random, &scene.before, slot);
    fill_line(random, &scene.before, slot, 0, 6);
    fill_records(random, &scene.before, slot, 4, slot == 3 ? 0 : 2);
  }
  const Caches after = folded(scene.rig, scene.before, {0, -1, 8, 1, 1, 1, 2, 3, 4, 5},
                              {{2, 2, 2, 0, 5, 3, 2, 2, 1, 1}}, {{7, 7, 7, 7, 7, 7, 8, 7, 0, 6}});
  const KdaCounters counts = scene.rig.counters();
  EXPECT_EQ(counts.bad_slot, 2u);
  EXPECT_EQ(counts.bad_accepted, 2u);
  EXPECT_EQ(counts.stale_records, 2u);
  EXPECT_EQ(counts.bad_length, 0u);
  // The last one alone was folded.
  Caches expected = scene.before;
  const Caches one = folded(scene.rig, scene.before, {5}, {{1}}, {{6}});
  expect_untouched(one, after);
  expect_counts(one, 6, 0);

  const Caches reset = folded(scene.rig, scene.before, {0, -7, 9, 4, 2});
  EXPECT_EQ(scene.rig.counters().bad_slot, 1u);
  for (int h = 0; h < 2; ++h) expected.count(4, h) = expected.count(2, h) = 0;
  expect_untouched(expected, reset);
}

TEST_F(KdaRecords, many_layers_are_folded_by_one_call) {
  Scene a(random, {.heads = 2, .tokens = 2, .records = true}),
      b(random, {.heads = 1, .tokens = 2, .softplus = true, .records = true});
  for (Scene* scene : {&a, &b}) fill_records(random, &scene->before, 1, 2, 2);
  for (Scene* scene : {&a, &b}) {
    fill_state(random, &scene->before, 1);
    fill_line(random, &scene->before, 1, 0, 4);
  }
  const Memory memory_a(a.before.bytes), memory_b(b.before.bytes);
  const Memory slots(std::vector<std::int32_t>{1}), accepted(std::vector<std::int32_t>{2});
  const TensorView ids = view_of(slots, DType::kI32, {1}), counts = view_of(accepted, DType::kI32, {1});
  const std::vector<KdaLayerCaches> layers = {{&a.rig.kda, cache_views(a.shape, memory_a.data())},
                                              {&b.rig.kda, cache_views(b.shape, memory_b.data())}};
  PreparedKda::fold_records(layers, ids, counts, {}, backend().stream());
  EXPECT_TRUE(memory_a.get<std::byte>() == folded(a.rig, a.before, {1}, {{2}}).bytes);
  EXPECT_TRUE(memory_b.get<std::byte>() == folded(b.rig, b.before, {1}, {{2}}).bytes);

  // What is wrong with the second layer is seen before the first is touched.
  std::vector<KdaLayerCaches> wrong = layers;
  wrong[1].caches.records.reset();
  const std::vector<std::byte> now = memory_a.get<std::byte>();
  EXPECT_EQ(code_of([&] { PreparedKda::fold_records(wrong, ids, counts, {}, backend().stream()); }),
            "invalid_argument");
  EXPECT_EQ(code_of([&] { PreparedKda::reset_records(wrong, ids, backend().stream()); }), "invalid_argument");
  EXPECT_TRUE(memory_a.get<std::byte>() == now);
}

// ---- Chains: procedure 8.7

void expect_the_bits_of_slots_mode(Random& random, bool softplus, bool dim_first, bool spoiled) {
  SCOPED_TRACE(testing::Message() << (softplus ? "softplus" : "lower bound") << (dim_first ? ", DS" : ", SD")
                                  << (spoiled ? ", NaN in unused records" : ""));
  constexpr int kRequests = 3, kTokens = 4, kHeads = 12, kSteps = 12;
  const int pattern[] = {1, 4, 2, 3};
  Scene scene(
      random,
      {.heads = kHeads, .requests = kRequests, .tokens = kTokens, .softplus = softplus, .dim_first = dim_first});
  RigOptions options = scene.spec.rig;
  options.tactic = scene.rig.kda.tactic({kRequests, kTokens});
  const CacheShape shape = CacheShape::of(kHeads, 2 * kRequests + 1, 6, dim_first, 0, true);
  Rig rig(scene.layer, shape, options);

  Step by_slots = scene.step, by_records = scene.step;
  by_records.slots = {3, 1, 2};
  by_records.window = by_records.slots_stride = 1;
  by_records.given_tokens = kTokens;
  Caches states = scene.before, records(shape);
  for (int n = 0; n < kRequests; ++n) {
    const std::int64_t from = by_slots.slot(n, 0), to = by_records.slot(n, 0);
    for (std::int64_t c = 0; c < 3 * kDim * kHeads; ++c)
      for (int p = 0; p < 6; ++p) records.set_conv(to, c, p, states.conv(from, c, p));
    std::memcpy(records.state(to, 0), states.state(from, 0), static_cast<std::size_t>(shape.state_bytes()));
    fill_records(random, &records, to, 0, 0);
  }
  for (int step = 0; step < kSteps; ++step) {
    const Outcome a = run(scene.rig, by_slots, states), b = run(rig, by_records, records);
    expect_same_out(a, b);
    EXPECT_EQ(b.counters.stale_records, 0u);
    states = a.caches;
    records = b.caches;
    std::vector<std::int32_t> accepted;
    for (int n = 0; n < kRequests; ++n) accepted.push_back(pattern[(step + 1 + n) % 4]);
    for (int n = 0; n < kRequests; ++n) {
      const auto slot = static_cast<std::int32_t>(by_records.slot(n, 0));
      const auto kept = accepted[static_cast<std::size_t>(n)];
      expect_same_line(states, by_slots.slot(n, 0), 0, records, slot, 6);
      if (spoiled) spoil_records(&records, slot, kept);
      const Caches after = folded(rig, records, {slot}, {{kept}}, {{kRequests + 1 + n}});
      expect_same_state(after, kRequests + 1 + n, states, by_slots.slot(n, kept - 1));
    }
    by_slots = next_step(random, by_slots, accepted, scene.shape.slots);
    by_records.projected = by_slots.projected;
    by_records.accepted = accepted;
    if (testing::Test::HasFailure()) return;
  }
}

TEST_F(KdaRecords, a_chain_has_the_bits_of_slots_mode_T39) {
  for (const bool softplus : {false, true})
    for (const bool dim_first : {false, true})
      for (const bool spoiled : {false, true}) {
        Random same = random;  // both passes on the same data
        expect_the_bits_of_slots_mode(same, softplus, dim_first, spoiled);
      }
}

}  // namespace
}  // namespace twostep::kda_test
