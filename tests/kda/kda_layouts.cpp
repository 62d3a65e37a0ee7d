// Where operands may lie: strides, pages, bases, tables, both conv cache layouts.
#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/kda/fixture.h"

namespace twostep::kda_test {
namespace {

using KdaLayouts = KdaTest;

TEST_F(KdaLayouts, a_wider_row_stride_changes_no_bit_T10) {
  Scene scene(random, {.heads = 12});
  ASSERT_EQ(scene.step.row_stride, 6288);
  ASSERT_EQ(scene.step.columns().used(), 6284);
  const Outcome natural = scene.run();
  expect_right(scene.judge(natural));

  RigOptions options = scene.spec.rig;
  options.row_stride = 6296;
  Rig rig(scene.layer, scene.shape, options);
  Step wide = scene.step;
  wide.row_stride = 6296;
  wide.projected.resize(6296, 0xffff);  // NaN behind the used columns, as in the natural row
  expect_same_bits(run(rig, wide, scene.before), natural);
}

TEST_F(KdaLayouts, wide_outputs_and_slots_change_no_bit_and_keep_what_lies_between_T11) {
  for (const int tokens : {1, 3}) {
    Scene scene(random, {.heads = 2, .requests = 2, .tokens = tokens});
    const std::int64_t channels = scene.step.columns().channels;
    const Outcome dense = scene.run();
    expect_right(scene.judge(dense));

    const CacheShape wide = CacheShape::of(2, scene.shape.slots, scene.shape.conv_len, scene.shape.dim_first, 16);
    Rig rig(scene.layer, wide, scene.spec.rig);
    const Caches before = reshaped(scene.before, wide);
    const Outcome outcome = run(rig, scene.step, before, {.out_stride = channels + 8});
    judge(rig, scene.step, before, outcome);  // of which the exact rules matter here
    expect_same_contents(dense.caches, outcome.caches);
    for (std::int64_t row = 0; row < scene.step.rows(); ++row)
      EXPECT_EQ(std::memcmp(outcome.out.data() + row * outcome.out_stride, dense.out.data() + row * channels,
                            static_cast<std::size_t>(2 * channels)),
                0)
          << "row " << row;
  }
}

TEST_F(KdaLayouts, slots_may_lie_far_apart_T12) {
  for (const bool dim_first : {false, true}) {
    CacheShape shape = CacheShape::of(1, 2, 3, dim_first);
    shape.conv_pitch *= 3;
    shape.state_pitch *= 3;
    shape.state_base = 2 * shape.conv_pitch;
    Scene scene(random, {.shape = shape});
    scene.set_slots({1});
    scene.refill(random);
    expect_right(scene.judge(scene.run()));
  }
}

TEST_F(KdaLayouts, line_and_state_may_share_a_page_T13) {
  Scene scene(random, {.heads = 12, .pool = 3, .paged = true});
  ASSERT_EQ(scene.shape.state_pitch, 814080);
  expect_right(scene.judge(scene.run()));

  Scene verify(random, {.heads = 2, .requests = 2, .tokens = 3, .dim_first = true, .paged = true});
  expect_right(verify.judge(verify.run()));
}

TEST_F(KdaLayouts, slots_may_be_a_column_of_a_table_T14) {
  Scene scene(random, {.requests = 2});
  const Outcome compact = scene.run();
  expect_right(scene.judge(compact));

  const std::vector<std::int32_t> ids = scene.step.slots;
  scene.step.slots.assign(16, -7);
  scene.step.slots[0] = ids[0];
  scene.step.slots[8] = ids[1];
  scene.step.slots_stride = 8;
  scene.step.window = 0;  // [B]
  expect_same_bits(scene.run(), compact);
}

TEST_F(KdaLayouts, requests_find_their_slots_in_any_order_T15) {
  Scene scene(random, {.requests = 2, .pool = 4});
  scene.set_slots({3, 1});
  scene.refill(random);
  expect_right(scene.judge(scene.run()));  // slots 0 and 2 as they were, too
}

TEST_F(KdaLayouts, bases_are_aligned_to_16_bytes_T16) {
  for (const bool dim_first : {false, true}) {
    Scene scene(random, {.requests = 2, .tokens = 2, .dim_first = dim_first});
    const Outcome aligned = scene.run();
    const Outcome moved = scene.run({.projected_offset = 16, .out_offset = 16, .caches_offset = 16});
    expect_right(scene.judge(moved));
    expect_same_bits(moved, aligned);

    for (const Placement& placement :
         {Placement{.projected_offset = 8}, Placement{.out_offset = 8}, Placement{.caches_offset = 8}}) {
      const Bound bound(scene.step, scene.before, placement);
      EXPECT_EQ(code_of([&] { scene.rig.kda.run(bound.call(), backend().stream()); }), "bad_layout");
      const Outcome outcome = bound.read(scene.rig);
      expect_untouched(scene.before, outcome.caches);
      for (const std::uint16_t out : outcome.out) ASSERT_EQ(out, 0xffff);
    }
  }
}

TEST_F(KdaLayouts, both_conv_layouts_give_the_same_bits_T17) {
  for (const int tokens : {1, 3}) {
    Scene scene(random, {.heads = 2, .requests = 3, .tokens = tokens, .bias = true});
    const Outcome rows = scene.run();
    expect_right(scene.judge(rows));

    const CacheShape turned = CacheShape::of(2, scene.shape.slots, scene.shape.conv_len, true);
    Rig rig(scene.layer, turned, scene.spec.rig);
    const Outcome columns = run(rig, scene.step, reshaped(scene.before, turned));
    expect_same_out(rows, columns);
    expect_same_contents(rows.caches, columns.caches);
  }
}

// kda 5.7: slot 1 lies more than 2^31 elements behind slot 0, in each cache in turn.
TEST_F(KdaLayouts, slot_offsets_have_64_bits) {
  if (kSlowBuild) GTEST_SKIP() << "8 GiB of address space";
  for (const bool records : {false, true}) {
    Scene scene(random, {.requests = 1, .tokens = 1, .pool = 2, .records = records});
    scene.set_slots({1});
    scene.refill(random);
    const Outcome near = scene.run();
    expect_right(scene.judge(near));

    const std::int64_t far = (std::int64_t{1} << 32) + 16;  // bytes; of 4-byte elements, twice
    for (const int far_cache : {0, 1, 2}) {
      if (far_cache == 2 && !records) continue;
      CacheShape shape = scene.shape;
      std::int64_t* const pitches[] = {&shape.conv_pitch, &shape.state_pitch, &shape.record_pitch};
      *pitches[far_cache] = far_cache == 1 ? 2 * far : far;
      shape.conv_base = 0;
      shape.state_base = shape.conv_pitch + 1024 * 64;
      if (records) shape.record_base = shape.state_base + shape.state_pitch + 1024 * 1024;
      Rig rig(scene.layer, shape, scene.spec.rig);
      // Nothing but slot 1 is ever written, so that the host need not hold the rest.
      struct Part {
        std::int64_t near, far, bytes;
      };
      std::vector<Part> parts = {{scene.shape.conv_base + scene.shape.conv_pitch, shape.conv_pitch, shape.conv_bytes()},
                                 {scene.shape.state_base + scene.shape.state_pitch,
                                  shape.state_base + shape.state_pitch, shape.state_bytes()}};
      if (records)
        parts.push_back({scene.shape.record_base + scene.shape.record_pitch, shape.record_base + shape.record_pitch,
                         shape.record_bytes()});
      char* const base = static_cast<char*>(backend().allocate(static_cast<std::size_t>(shape.bytes())));
      for (const Part& part : parts)
        backend().upload(base + part.far, scene.before.bytes.data() + part.near, static_cast<std::size_t>(part.bytes));
      const Bound bound(scene.step, scene.before);
      KdaCall call = bound.call();
      call.caches = cache_views(shape, base);
      rig.kda.run(call, backend().stream());

      Outcome outcome = near;
      outcome.out = bound.read(rig).out;
      for (const Part& part : parts)
        backend().download(outcome.caches.bytes.data() + part.near, base + part.far,
                           static_cast<std::size_t>(part.bytes));
      backend().release(base);
      expect_same_bits(outcome, near);
    }
  }
}

}  // namespace
}  // namespace twostep::kda_test
