// Dead requests and slots that a step does not name; keys that were not prepared.
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/kda/fixture.h"

namespace twostep::kda_test {
namespace {

using KdaSlots = KdaTest;

// Whatever a dead request's row holds must not matter.
void spoil_row(Step* step, std::int64_t row) {
  for (std::int64_t column = 0; column < step->columns().used(); ++column)
    step->at(row, column) = column % 2 ? 0x7f80 : 0xffff;  // Inf, NaN
}

void expect_same_row(const Outcome& a, const Outcome& b, std::int64_t row) {
  for (std::int64_t i = row * a.out_stride; i < (row + 1) * a.out_stride; ++i)
    ASSERT_EQ(a.out[static_cast<std::size_t>(i)], b.out[static_cast<std::size_t>(i)]) << "row " << row;
}

TEST_F(KdaSlots, dead_requests_give_zeros_and_touch_nothing_T18) {
  Scene scene(random, {.heads = 2, .requests = 4, .pool = 5});
  scene.set_slots({2, 3, 1, 4});
  scene.refill(random);
  fill_state(random, &scene.before, 0);  // the sentinel: a value that would be used without notice
  fill_line(random, &scene.before, 0, 0, 3);
  const Outcome all_live = scene.run();
  expect_right(scene.judge(all_live));

  scene.set_slots({2, 0, 1, -1});
  spoil_row(&scene.step, 1);
  spoil_row(&scene.step, 3);
  const Outcome outcome = scene.run();
  expect_right(scene.judge(outcome));
  expect_zero_row(outcome, 1);
  expect_zero_row(outcome, 3);
  expect_same_row(outcome, all_live, 0);
  expect_same_row(outcome, all_live, 2);
}

TEST_F(KdaSlots, nothing_of_a_dead_slot_reaches_an_output_T19) {
  Scene scene(random, {.requests = 2});
  for (const std::int32_t dead : {0, -1}) {
    scene.set_slots({1, dead});
    scene.refill(random);  // slot 0 is NaN
    const Outcome outcome = scene.run();
    expect_right(scene.judge(outcome));
    expect_zero_row(outcome, 1);
  }
}

TEST_F(KdaSlots, slot_0_may_be_live_T20) {
  Scene scene(random, {.requests = 2, .pool = 2, .rig = {.first_live_slot = 0}});
  scene.set_slots({0, 1});
  scene.refill(random);
  const Outcome both = scene.run();
  expect_right(scene.judge(both));
  scene.set_slots({0, -1});
  const Outcome one = scene.run();
  expect_right(scene.judge(one));
  expect_same_row(one, both, 0);
  for (int i = 0; i < kCells; ++i) ASSERT_EQ(one.caches.state(0, 0)[i], both.caches.state(0, 0)[i]);
}

TEST_F(KdaSlots, a_batch_may_be_dead_as_a_whole_T21) {
  for (const int tokens : {1, 2}) {
    Scene scene(random, {.requests = 3, .tokens = tokens});
    if (tokens == 1) scene.set_slots({0, -1, -5});
    else scene.set_slots({0, 1, -1, 2, -5, 3});
    const Outcome outcome = scene.run();
    scene.judge(outcome);
    expect_untouched(scene.before, outcome.caches);
    for (std::int64_t row = 0; row < scene.step.rows(); ++row) expect_zero_row(outcome, row);
  }
}

TEST_F(KdaSlots, a_slot_past_the_pool_is_dead_and_counted_T22) {
  for (const std::int32_t slot : {4, std::numeric_limits<std::int32_t>::max()}) {
    Scene scene(random, {.pool = 4});
    scene.set_slots({slot});
    const Outcome outcome = scene.run();
    scene.judge(outcome);
    expect_untouched(scene.before, outcome.caches);
    expect_zero_row(outcome, 0);
    EXPECT_EQ(outcome.counters.bad_slot, 1u);
  }
}

TEST_F(KdaSlots, a_warm_up_leaves_earlier_steps_alone_T23) {
  Scene scene(random, {.pool = 6});
  scene.set_slots({5});
  scene.refill(random);
  const Outcome first = scene.run();
  expect_right(scene.judge(first));
  scene.set_slots({0});
  const Outcome warm_up = run(scene.rig, scene.step, first.caches);
  expect_untouched(first.caches, warm_up.caches);
}

TEST_F(KdaSlots, counters_add_up_and_are_optional) {
  Scene scene(random, {.requests = 3, .tokens = 2, .pool = 8});
  scene.set_slots({1, 2, 8, 3, 4, 5});
  scene.step.accepted = {{3, 1, 0}};
  scene.step.lengths = {{2, 2, 2}};
  const Bound bound(scene.step, scene.before);
  scene.rig.clear();
  for (int launch = 0; launch < 3; ++launch) scene.rig.kda.run(bound.call(), backend().stream());
  const KdaCounters counts = bound.read(scene.rig).counters;
  EXPECT_EQ(counts.bad_accepted, 6u);
  EXPECT_EQ(counts.bad_slot, 3u);
  EXPECT_EQ(counts.bad_length, 0u);

  scene.rig.kda.set_counters(nullptr);
  scene.rig.kda.run(bound.call(), backend().stream());
  EXPECT_EQ(bound.read(scene.rig).counters.bad_accepted, 6u);
}

// ---- Keys and calls

TEST_F(KdaSlots, a_key_that_is_not_prepared_is_named_with_those_that_are_T47) {
  RigOptions options;
  options.keys = {{1, 1}, {2, 1}, {1, 4}, {2, 4}};
  Scene scene(random, {.requests = 3, .tokens = 4, .rig = options});
  const Bound bound(scene.step, scene.before);
  try {
    scene.rig.kda.run(bound.call(), backend().stream());
    FAIL() << "the key (3, 4) ran";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kNotPrepared);
    const std::string text = error.what();
    for (const char* part : {"kda.run", "(3, 4)", "prepared", "1", "2", "(1, 4)", "(2, 4)", "prepare again"})
      EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
  const Outcome outcome = bound.read(scene.rig);
  expect_untouched(scene.before, outcome.caches);
  for (const std::uint16_t out : outcome.out) ASSERT_EQ(out, 0xffff);

  options.row_stride = kda_row_stride(1);
  PreparedKda unprepared(scene.layer.weights(), kda_options(scene.layer.values(), scene.shape, options));
  EXPECT_EQ(code_of([&] { unprepared.run(bound.call(), backend().stream()); }), "not_prepared");
  EXPECT_TRUE(unprepared.keys().empty());
  EXPECT_EQ(scene.rig.kda.keys(), (std::vector<KdaKey>{{1, 1}, {1, 4}, {2, 1}, {2, 4}}));
}

TEST_F(KdaSlots, wrong_types_and_shapes_are_refused_with_nothing_changed_T48) {
  Scene scene(random, {.heads = 12});
  KdaWeights square = scene.layer.weights();
  square.f_b.shape = {1536, 1536, 0, 0};
  square.f_b.stride = {1536, 1, 0, 0};
  const KdaOptions options = kda_options(scene.layer.values(), scene.shape, scene.rig.options());
  EXPECT_EQ(code_of([&] { PreparedKda kda(square, options); }), "invalid_argument");

  const Bound bound(scene.step, scene.before);
  KdaCall call = bound.call();
  call.projected.dtype = DType::kF16;
  EXPECT_EQ(code_of([&] { scene.rig.kda.run(call, backend().stream()); }), "invalid_argument");
  const Outcome outcome = bound.read(scene.rig);
  expect_untouched(scene.before, outcome.caches);
  for (const std::uint16_t out : outcome.out) ASSERT_EQ(out, 0xffff);
  EXPECT_EQ(scene.rig.kda.stats().runs, 0u);
}

TEST_F(KdaSlots, each_output_holds_the_result_of_its_own_call_T48) {
  Scene scene(random, {.requests = 2});
  const Outcome first = scene.run();
  Step other = scene.step;
  other.projected = random_step(random, 1, 2, 1, other.row_stride, scene.shape.slots).projected;
  const Outcome second = run(scene.rig, other, scene.before);

  const Bound a(scene.step, scene.before), b(other, scene.before);
  scene.rig.kda.run(a.call(), backend().stream());
  scene.rig.kda.run(b.call(), backend().stream());
  expect_same_bits(a.read(scene.rig), first);
  expect_same_bits(b.read(scene.rig), second);
}

}  // namespace
}  // namespace twostep::kda_test
