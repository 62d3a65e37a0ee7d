// Random steps with everything that a step may hold, bad data included.
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "tests/kda/fixture.h"

namespace twostep::kda_test {
namespace {

using KdaProperty = KdaTest;

struct Dice {
  Random& random;
  std::int64_t in(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  }
  bool one_in(int n) { return in(1, n) == 1; }
  template <class T>
  T of(const std::vector<T>& values) {
    return values[static_cast<std::size_t>(in(0, static_cast<std::int64_t>(values.size()) - 1))];
  }
};

SceneSpec random_spec(Dice& dice) {
  SceneSpec spec;
  spec.heads = static_cast<int>(dice.in(1, 5));
  spec.requests = static_cast<int>(dice.in(1, 6));
  spec.tokens = dice.one_in(3) ? 1 : static_cast<int>(dice.in(2, kKdaMaxTokens));
  spec.conv_len = 2 + spec.tokens + static_cast<int>(dice.in(0, 3));
  spec.window = dice.in(spec.tokens, spec.conv_len - 2);
  spec.softplus = dice.one_in(2);
  spec.bias = dice.one_in(2);
  spec.dim_first = dice.one_in(2);
  spec.small = dice.one_in(2) ? DType::kBF16 : DType::kF32;
  spec.pad = 16 * dice.in(0, 3);
  spec.paged = dice.one_in(4);
  spec.records = dice.one_in(3);
  spec.rig.first_live_slot = dice.in(0, 3);
  spec.rig.row_stride = kda_row_stride(spec.heads) + 8 * dice.in(0, 2);
  spec.rig.counters = !dice.one_in(4);
  return spec;
}

// Live requests keep slots of their own.
void spoil(Dice& dice, const Scene& scene, Step* step) {
  const std::int64_t pool = scene.shape.slots, live = scene.spec.rig.first_live_slot;
  const auto most = std::numeric_limits<std::int32_t>::max(), least = std::numeric_limits<std::int32_t>::min();
  const std::vector<std::int64_t> dead_ids = {live - 1, live - 1, -1, -5, least};
  const std::vector<std::int64_t> past_pool = {pool, pool + 7, most};
  const auto id = [&](std::int64_t n, std::int64_t column) -> std::int32_t& {
    return step->slots[static_cast<std::size_t>(n * step->slots_stride + column)];
  };

  if (step->tokens > 1 || dice.one_in(2)) {
    step->accepted.emplace();
    for (int n = 0; n < step->requests; ++n)
      step->accepted->push_back(static_cast<std::int32_t>(
          dice.one_in(8) ? dice.of<std::int64_t>({0, -1, step->window + 1, most, least}) : dice.in(1, step->window)));
    step->given_tokens = step->tokens;
  }
  if (dice.one_in(2)) {
    step->lengths.emplace();
    for (int n = 0; n < step->requests; ++n)
      step->lengths->push_back(static_cast<std::int32_t>(
          dice.one_in(8) ? dice.of<std::int64_t>({-1, step->tokens + 1, most, least}) : dice.in(0, step->tokens)));
  }
  for (int n = 0; n < step->requests; ++n)
    for (std::int64_t column = 0; column < step->window; ++column) {
      if (dice.one_in(12)) id(n, column) = static_cast<std::int32_t>(dice.of(dead_ids));
      else if (dice.one_in(16)) id(n, column) = static_cast<std::int32_t>(dice.of(past_pool));
      else if (dice.one_in(8)) id(n, column) = id(n, dice.in(0, step->window - 1));
    }

  // Dead requests may name the slots of others and hold anything.
  KdaCounters ignored;
  const std::int64_t most_accepted = scene.shape.records() ? scene.shape.entries() : step->window;
  const Caches caches = random_caches(dice.random, scene.shape, *step, live);
  const std::vector<Fate> all = fates(*step, caches, live, &ignored);
  for (int n = 0; n < step->requests; ++n) {
    if (all[static_cast<std::size_t>(n)].live) continue;
    const bool by_accepted = step->accepted && ((*step->accepted)[static_cast<std::size_t>(n)] < 1 ||
                                                (*step->accepted)[static_cast<std::size_t>(n)] > most_accepted);
    const std::int64_t other = dice.in(0, step->requests - 1);
    for (std::int64_t column = by_accepted ? 0 : step->window; column < step->window; ++column)
      id(n, column) = id(other, column);
    for (int t = 0; t < step->tokens; ++t)
      for (std::int64_t column = 0; column < step->columns().used(); ++column)
        step->at(std::int64_t{n} * step->tokens + t, column) = dice.one_in(2) ? 0xffff : 0x7f80;
  }
  // The table may be a slice.
  if (dice.one_in(2)) {
    const std::int64_t wide = step->window + dice.in(1, 4), first = dice.in(0, wide - step->window);
    std::vector<std::int32_t> table(static_cast<std::size_t>(wide * step->requests), 1);
    for (int n = 0; n < step->requests; ++n)
      for (std::int64_t column = 0; column < step->window; ++column)
        table[static_cast<std::size_t>(n * wide + first + column)] = id(n, column);
    step->slots = table;
    step->slots_first = first;
    step->slots_stride = wide;
  }
}

// Counts that do not fit what was accepted. Not positive ones: a request that shares the slot could fit them, and have
// no records.
void spoil_counts(Dice& dice, const Step& step, Caches* caches) {
  for (int n = 0; n < step.requests; ++n) {
    const std::int64_t slot = step.slot(n, 0);
    if (slot < 0 || slot >= caches->shape.slots || !dice.one_in(6)) continue;
    const auto count = dice.of<std::int32_t>({0, -1, std::numeric_limits<std::int32_t>::min()});
    for (int h = 0; h < step.heads; ++h) caches->count(slot, h) = count;
  }
}

Verdict one_case(Random& random) {
  Dice dice{random};
  Scene scene(random, random_spec(dice));
  spoil(dice, scene, &scene.step);
  scene.refill(random);
  if (scene.shape.records()) spoil_counts(dice, scene.step, &scene.before);
  const Placement placement{.out_stride = scene.step.columns().channels + 8 * dice.in(0, 2),
                            .projected_offset = 16 * dice.in(0, 2),
                            .out_offset = 16 * dice.in(0, 2),
                            .caches_offset = 16 * dice.in(0, 2),
                            .slots_last = dice.one_in(2)};
  const Outcome outcome = scene.run(placement);
  const Verdict verdict = scene.judge(outcome);
  if (verdict.plain.outputs > 0) {
    expect_strict(verdict.strict);
    expect_states(verdict.plain);
  }
  return verdict;
}

// TWOSTEP_TEST_CASE with the seed repeats one case.
TEST_F(KdaProperty, random_steps_are_right) {
  const int cases = backend().whole() || kSlowBuild ? 60 : 150;  // some 12 heads each
  const char* only = std::getenv("TWOSTEP_TEST_CASE");
  const int first = only ? std::atoi(only) : 0;
  std::vector<Verdict> verdicts(only ? 1 : static_cast<std::size_t>(cases));
  parallel_for(static_cast<std::int64_t>(verdicts.size()), [&](std::int64_t i) {  // on a GPU each is a compilation
    const std::int64_t index = first + i;
    SCOPED_TRACE(replay() + " TWOSTEP_TEST_CASE=" + std::to_string(index));
    Random own(seed() + 0x9e3779b97f4a7c15u * static_cast<std::uint64_t>(index + 1));
    verdicts[static_cast<std::size_t>(i)] = one_case(own);
  });
  if (only) return;
  Verdict pooled;
  for (const Verdict& verdict : verdicts) pooled += verdict;
  EXPECT_GE(pooled.plain.heads, 256);
  expect_right(pooled);
}

}  // namespace
}  // namespace twostep::kda_test
