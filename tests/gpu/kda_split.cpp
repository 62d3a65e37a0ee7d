// Tactics: every one of them, heads that are split over a cluster, and grids as large as they come (kda 7.3, 9.5, 11.2;
// T53, T55).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kda/plan.h"
#include "kda_fixture.h"

namespace twostep::kda_test {
namespace {

using KdaSplit = KdaGpuTest;
using KdaFaults = KdaGpuTest;

std::vector<KdaTactic> tactics(int tokens, bool records = false) {
  return valid_kda_tactics(tokens, device_facts(test::kDevice), records ? 8 : 0);
}

// The widest of each split, and the one whose CTAs stay.
std::vector<KdaTactic> one_of_each_split(int tokens, bool records) {
  std::vector<KdaTactic> chosen;
  for (const KdaTactic& tactic : tactics(tokens, records)) {
    const KdaTactic* last = chosen.empty() ? nullptr : &chosen.back();
    if (last != nullptr && last->split == tactic.split && last->stream == tactic.stream) chosen.back() = tactic;
    else chosen.push_back(tactic);
  }
  return chosen;
}

// Prepared side by side, for each is a compilation.
std::vector<std::unique_ptr<Scene>> scenes_of(Random& random, const std::vector<SceneSpec>& specs) {
  std::vector<std::unique_ptr<Scene>> scenes(specs.size());
  const std::uint64_t base = random();
  parallel_for(static_cast<std::int64_t>(specs.size()), [&](std::int64_t i) {
    Random own(base + static_cast<std::uint64_t>(i));
    scenes[static_cast<std::size_t>(i)] = std::make_unique<Scene>(own, specs[static_cast<std::size_t>(i)]);
  });
  return scenes;
}

std::string name_of(const SceneSpec& spec) {
  return to_string(*spec.rig.tactic) + ", " + std::to_string(spec.tokens) + " tokens" + (spec.dim_first ? ", DS" : "") +
         (spec.rig.early_caches ? ", early caches" : "") + (spec.records ? ", records" : "");
}

// The kernel that serves the scene's one key, once more from the table of loaded ones.
std::shared_ptr<const CompiledKernel> kernel_of(const Scene& scene) {
  const KdaModel model =
      check_kda(scene.layer.weights(), kda_options(scene.layer.values(), scene.shape, scene.rig.options()));
  const DeviceFacts facts = device_facts(test::kDevice);
  const KdaBuild build =
      kda_build(model, check_layouts(model, cache_views(scene.shape, nullptr)), model.options.policies[0], facts);
  return load_kernel(kda_compile_request(kda_kernel_text(build), facts.arch),
                     kda_smem_bytes(build.tokens, build.tactic, kda_folded(build)));
}

TEST_F(KdaSplit, every_tactic_is_right_repeats_its_bits_and_spills_nothing) {
  std::vector<SceneSpec> specs;
  for (const bool records : {false, true})
    for (const int tokens : {1, 2, 5, 8})
      for (const KdaTactic& tactic : tactics(tokens, records)) {
        const auto index = static_cast<int>(specs.size());
        SceneSpec spec{.heads = 2, .requests = 3, .tokens = tokens};
        spec.dim_first = index % 2 != 0;
        spec.softplus = index / 2 % 2 != 0;
        spec.records = records;
        if (records) spec.conv_len = 10;
        spec.rig.tactic = tactic;
        specs.push_back(spec);
      }
  Verdict pooled;
  for (const auto& scene : scenes_of(random, specs)) {
    SCOPED_TRACE(name_of(scene->spec));
    const KdaKey key{3, scene->spec.tokens};
    EXPECT_EQ(scene->rig.kda.tactic(key), *scene->spec.rig.tactic);
    const auto kernel = kernel_of(*scene);
    EXPECT_EQ(scene->rig.kda.kernel(key), kernel->key.name + " " + kernel->key.hash);
    EXPECT_EQ(kernel->local_bytes, 0) << "bytes of stack or spills";

    if (key.tokens > 1 || scene->spec.records) {
      const int last = scene->spec.records ? 8 : key.tokens;
      scene->step.accepted = {{1, last, 2}};
      scene->step.given_tokens = key.tokens;
    }
    if (key.tokens > 1) {
      scene->step.lengths = {{key.tokens, key.tokens - 1, key.tokens}};
    }
    scene->refill(random);
    const Outcome outcome = scene->run();
    const Verdict verdict = scene->judge(outcome);
    expect_right(verdict);
    pooled += verdict;
    expect_same_bits(scene->run(), outcome);
  }
  EXPECT_GE(pooled.plain.heads, 256);
  expect_right(pooled);
}

// ---- Dead requests meet their cluster

TEST_F(KdaSplit, dead_and_live_requests_share_a_grid_at_every_split) {
  std::vector<SceneSpec> specs;
  for (const int tokens : {1, 4, 8})
    for (const bool early_caches : {false, true})
      for (const bool records : {false, true})
        for (const KdaTactic& tactic : one_of_each_split(tokens, records)) {
          SceneSpec spec{.heads = 2, .requests = 8, .tokens = tokens, .records = records};
          spec.rig.tactic = tactic;
          spec.rig.early_caches = early_caches;
          if (tactic.stream) spec.rig.switches.fault = "kEveryLaneArrives";  // for racecheck, which runs this test
          specs.push_back(spec);
        }
  for (const auto& scene : scenes_of(random, specs)) {
    SCOPED_TRACE(name_of(scene->spec));
    const int tokens = scene->spec.tokens;
    const auto line = [&](int request) -> std::int32_t& {
      return scene->step.slots[static_cast<std::size_t>(request * scene->step.slots_stride)];
    };
    line(1) = 0;
    line(5) = static_cast<std::int32_t>(scene->shape.slots);
    // Lengths come to light when the copies of requests 2, 3 and 4 have begun, if those may begin early.
    scene->step.lengths = {{tokens, tokens, tokens + 1, -1, 0, tokens, 1, tokens}};
    scene->step.accepted = std::vector<std::int32_t>(8, 1);
    scene->refill(random);
    // So does request 7, by a count that does not fit.
    if (scene->spec.records) fill_records(random, &scene->before, scene->step.slot(7, 0), 1, -1);
    const Outcome outcome = scene->run();
    expect_right(scene->judge(outcome));
    EXPECT_EQ(outcome.counters.bad_length, 2u);
    EXPECT_EQ(outcome.counters.bad_slot, 1u);
    EXPECT_EQ(outcome.counters.stale_records, scene->spec.records ? 1u : 0u);
    for (int repeat = 0; repeat < 3; ++repeat) expect_same_bits(scene->run(), outcome);
  }
}

// That is not allowed (kda 7.8), and must end: the count that one request stores tells another, at the same time, that
// it is stale, and perhaps some of its CTAs alone.
TEST_F(KdaSplit, requests_on_one_slot_hang_nothing_and_leave_the_others_right) {
  constexpr int kRequests = 64, kLast = kRequests - 1;
  std::vector<SceneSpec> specs;
  for (const int tokens : {1, 8})
    for (const KdaTactic& tactic : one_of_each_split(tokens, true)) {
      SceneSpec spec{.heads = 12, .requests = kRequests, .tokens = tokens, .conv_len = 10, .records = true};
      spec.rig.tactic = tactic;
      specs.push_back(spec);
    }
  for (const auto& scene : scenes_of(random, specs)) {
    SCOPED_TRACE(name_of(scene->spec));
    const int tokens = scene->spec.tokens;
    scene->step.accepted = std::vector<std::int32_t>(kRequests, 1);
    scene->step.given_tokens = tokens;
    scene->refill(random);
    const auto lines_of_the_others = [&](const auto& line) {
      for (int n = 0; n < kLast; ++n) {
        scene->step.slots[static_cast<std::size_t>(n * scene->step.slots_stride)] = line(n);
        (*scene->step.accepted)[static_cast<std::size_t>(n)] = 1 + n % 2;
      }
    };
    std::vector<std::int32_t> shared;
    for (int n = 0; n < 3; ++n) shared.push_back(static_cast<std::int32_t>(scene->step.slot(n, 0)));
    lines_of_the_others([](int) { return 0; });
    const Outcome alone = scene->run();
    lines_of_the_others([&](int n) { return shared[static_cast<std::size_t>(n % 3)]; });
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Outcome outcome = scene->run();
      const auto of_last = std::ptrdiff_t{kLast} * tokens * outcome.out_stride;
      EXPECT_TRUE(std::equal(outcome.out.begin() + of_last, outcome.out.end(), alone.out.begin() + of_last));
      Caches others = outcome.caches;
      for (const std::int32_t slot : shared) copy_slot(alone.caches, slot, &others);
      expect_same_contents(others, alone.caches);
    }
  }
}

// ---- CTAs that stay

// Against the kernel whose CTAs do not: many requests to a CTA, each with a fate of its own, and heads that change in
// the middle of one.
TEST_F(KdaSplit, ctas_that_stay_leave_the_same_bits) {
  for (const int tokens : {3, 5, 8})
    for (const bool dim_first : {false, true}) {
      SceneSpec spec{.heads = 12, .requests = 80, .tokens = tokens, .conv_len = 10, .records = true};
      spec.softplus = spec.dim_first = dim_first;
      spec.rig.tactic = KdaTactic{1, 16, 4, true};
      if (const Status valid = kda_tactic_valid(*spec.rig.tactic, tokens, device_facts(test::kDevice), 8); !valid.ok())
        GTEST_SKIP() << valid.message();
      SCOPED_TRACE(name_of(spec));
      Scene scene(random, spec);
      RigOptions options = scene.rig.options();
      options.tactic = KdaTactic{1, 8, 4};
      Rig other(scene.layer, scene.shape, options);
      const auto drawn = [&](int low, int high) {
        return low + static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(high - low + 1));
      };
      std::vector<std::int32_t> accepted, lengths;
      for (int n = 0; n < spec.requests; ++n) {
        accepted.push_back(drawn(0, 9) == 0 ? 9 : drawn(1, tokens));
        lengths.push_back(drawn(0, 3) == 0 ? drawn(-1, tokens + 1) : tokens);
        if (drawn(0, 9) == 0) scene.step.slots[static_cast<std::size_t>(n * scene.step.slots_stride)] = drawn(-1, 0);
      }
      scene.step.accepted = accepted;
      scene.step.lengths = lengths;
      scene.step.given_tokens = tokens;
      scene.refill(random);
      for (int n = 0; n < spec.requests; n += 7)
        if (const std::int64_t slot = scene.step.slot(n, 0); slot > 0) fill_records(random, &scene.before, slot, 1, -1);
      const Outcome outcome = scene.run();
      expect_right(scene.judge(outcome));
      const Outcome same = run(other, scene.step, scene.before);
      expect_same_bits(outcome, same);
      EXPECT_EQ(outcome.counters.stale_records, same.counters.stale_records);
      EXPECT_EQ(outcome.counters.bad_length, same.counters.bad_length);
      for (int repeat = 0; repeat < 5; ++repeat) expect_same_bits(scene.run(), outcome);
    }
}

// ---- Shared memory

TEST_F(KdaSplit, nothing_is_read_from_shared_memory_before_it_is_written) {
  std::vector<SceneSpec> specs;
  for (const int tokens : {1, 4})
    for (const bool records : {false, true})
      for (const KdaTactic& tactic : one_of_each_split(tokens, records)) {
        SceneSpec spec{.heads = 2, .requests = 8, .tokens = tokens, .records = records};
        spec.rig.tactic = tactic;
        spec.rig.switches = switches();
        specs.push_back(spec);
      }
  for (const auto& scene : scenes_of(random, specs)) {
    SCOPED_TRACE(name_of(scene->spec));
    for (int repeat = 0; repeat < 5; ++repeat) {
      const Bound bound(scene->step, scene->before);
      scene->rig.clear();
      test::poison_shared_memory(stream());
      scene->rig.kda.run(bound.call(), stream());
      expect_right(scene->judge(bound.read(scene->rig)));
    }
  }
}

TEST_F(KdaFaults, a_step_that_does_not_wait_for_its_token_vectors_fails) {
  expect_fails("KdaSplit.nothing_is_read_from_shared_memory_before_it_is_written", "kNoTokenBarrier");
}

// ---- Large grids

// Some requests of a large step, with slots 1, 2, ... of a small pool: what of it the oracle judges.
class Part {
 public:
  Part(const Step& all, const CacheShape& pool, std::vector<int> requests)
      : pool_(pool), requests_(std::move(requests)), shape_(pool) {
    step = all;
    step.slots_rows = step.requests = static_cast<int>(requests_.size());
    step.projected.clear();
    if (all.accepted) step.accepted.emplace();
    for (const int n : requests_) {
      const auto rows = all.projected.begin() + std::int64_t{n} * all.tokens * all.row_stride;
      step.projected.insert(step.projected.end(), rows, rows + all.tokens * all.row_stride);
      for (std::int64_t column = 0; column < all.window; ++column) slots_.push_back(all.slot(n, column));
      if (all.accepted) step.accepted->push_back((*all.accepted)[static_cast<std::size_t>(n)]);
    }
    step.slots.resize(slots_.size());
    std::iota(step.slots.begin(), step.slots.end(), 1);
    shape_ = CacheShape::of(all.heads, static_cast<std::int64_t>(slots_.size()) + 1, pool.conv_len, pool.dim_first);
  }

  // Their lines and states from the pool on the GPU; all else is NaN.
  Caches fetch(const KdaCall& call) const {
    Caches caches(shape_);
    each_slot(call, [&](std::int64_t to, void* from, std::size_t bytes) {
      backend().download(caches.bytes.data() + to, from, bytes);
    });
    return caches;
  }
  void store(const Caches& caches, const KdaCall& call) const {
    each_slot(call, [&](std::int64_t from, void* to, std::size_t bytes) {
      backend().upload(to, caches.bytes.data() + from, bytes);
    });
  }
  // What the run left of them; `out` and `rounded` are of all requests.
  Outcome outcome(const Rig& rig, const KdaCall& call, const std::vector<std::uint16_t>& out) const {
    const std::int64_t channels = step.columns().channels;
    const std::vector<std::uint16_t> rounded = rig.rounded();
    Outcome outcome;
    outcome.out_stride = channels;
    outcome.caches = fetch(call);
    outcome.counters = rig.counters();
    for (const int n : requests_) {
      const std::int64_t row = std::int64_t{n} * step.tokens;
      outcome.out.insert(outcome.out.end(), out.begin() + row * channels, out.begin() + (row + step.tokens) * channels);
      outcome.rounded.insert(outcome.rounded.end(), rounded.begin() + row * 4 * channels,
                             rounded.begin() + (row + step.tokens) * 4 * channels);
    }
    return outcome;
  }

  Step step;

 private:
  template <class Copy>
  void each_slot(const KdaCall& call, const Copy& copy) const {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const auto own = static_cast<std::int64_t>(i) + 1;
      copy(shape_.conv_base + own * shape_.conv_pitch,
           static_cast<char*>(call.caches.conv.data) + slots_[i] * pool_.conv_pitch,
           static_cast<std::size_t>(shape_.conv_bytes()));
      copy(shape_.state_base + own * shape_.state_pitch,
           static_cast<char*>(call.caches.state.data) + slots_[i] * pool_.state_pitch,
           static_cast<std::size_t>(shape_.state_bytes()));
    }
  }

  CacheShape pool_;
  std::vector<int> requests_;
  CacheShape shape_;
  std::vector<std::int64_t> slots_;  // in the pool
};

// All of `out`, which is dense.
std::vector<std::uint16_t> fetch_out(const KdaCall& call) {
  std::vector<std::uint16_t> out(static_cast<std::size_t>(call.out.shape[0] * call.out.shape[1]));
  backend().download(out.data(), call.out.data, out.size() * 2);
  return out;
}

TEST_F(KdaSplit, split_heads_shift_their_lines_once_T53) {
  for (const auto& [requests, tokens] : {std::pair{192, 1}, std::pair{48, 4}}) {
    Scene scene(random, {.heads = 12, .requests = requests, .tokens = tokens});
    if (tokens > 1) {
      for (std::int32_t& accepted : *scene.step.accepted) accepted = 1 + static_cast<std::int32_t>(random() % 4);
      scene.refill(random);
    }
    std::vector<RigOptions> options;
    for (const KdaTactic& tactic : tactics(tokens)) {
      if (tactic.split == 1) continue;
      options.push_back(scene.spec.rig);
      options.back().tactic = tactic;
    }
    std::vector<std::unique_ptr<Rig>> rigs(options.size());
    parallel_for(static_cast<std::int64_t>(rigs.size()), [&](std::int64_t i) {
      const auto at = static_cast<std::size_t>(i);
      rigs[at] = std::make_unique<Rig>(scene.layer, scene.shape, options[at]);
    });

    Bound bound(scene.step, scene.before);
    const KdaCall call = bound.call();
    const Memory pristine(scene.before.bytes);
    const auto restore = [&] {
      TWOSTEP_CUDA_CHECK(cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(call.caches.conv.data),
                                           reinterpret_cast<CUdeviceptr>(pristine.data()), pristine.bytes(),
                                           static_cast<CUstream>(stream().handle)),
                         "test");
    };
    const auto lines = [&] {
      std::vector<std::byte> bytes(static_cast<std::size_t>(scene.shape.slots * scene.shape.conv_pitch));
      backend().download(bytes.data(), call.caches.conv.data, bytes.size());
      return bytes;
    };
    ASSERT_EQ(scene.shape.conv_base, 0);  // the pool begins with the lines
    const Part part(scene.step, scene.shape, {0, 1, requests / 2, requests - 1});
    const Caches part_before = part.fetch(call);
    Caches expected = scene.before;  // its lines, those of requests that are not judged included
    KdaCounters counts;
    shift_lines(scene.step, fates(scene.step, scene.shape.slots, 1, &counts), &expected);
    for (const auto& rig : rigs) {
      SCOPED_TRACE(to_string(*rig->options().tactic) + ", " + std::to_string(tokens) + " tokens");
      std::vector<std::uint16_t> first_out;
      std::vector<std::byte> first_lines;
      for (int repeat = 0; repeat < 20 && !HasFailure(); ++repeat) {
        restore();
        bound.poison_out();
        rig->clear();
        rig->kda.run(call, stream());
        const std::vector<std::uint16_t> out = fetch_out(call);
        const std::vector<std::byte> now = lines();
        if (repeat == 0) {
          expect_right(judge(*rig, part.step, part_before, part.outcome(*rig, call, out)));
          EXPECT_TRUE(std::equal(now.begin(), now.end(), expected.bytes.begin())) << "conv lines differ";
          first_out = out;
          first_lines = now;
        }
        EXPECT_TRUE(out == first_out) << "outputs differ, repeat " << repeat;
        EXPECT_TRUE(now == first_lines) << "conv lines differ, repeat " << repeat;
      }
    }
  }
}

TEST_F(KdaSplit, more_request_heads_than_65535_are_one_launch_T55) {
  constexpr int kHeads = 96, kRequests = 683;
  if (!test::has_free_memory(std::size_t{8} << 30)) GTEST_SKIP() << "needs 8 GB of free GPU memory";
  const Layer layer(random_layer(random, {.heads = kHeads}));
  const CacheShape shape = CacheShape::of(kHeads, kRequests + 2, 3, false);
  RigOptions options;
  options.keys = {{kRequests, 1}};
  Rig rig(layer, shape, options);

  // Rows of eight requests, repeated: those that are judged, the first and the last among them, have states of their
  // own; the others start from zeros.
  const std::vector<int> judged = {0, 1, 94, 95, 341, 600, 681, 682};
  const Step rows = random_step(random, kHeads, 8, 1, kda_row_stride(kHeads), shape.slots);
  Step step = rows;
  step.slots_rows = step.requests = kRequests;
  step.projected.clear();
  for (int n = 0; n < kRequests; ++n) {
    const auto row = rows.projected.begin() + n % 8 * rows.row_stride;
    step.projected.insert(step.projected.end(), row, row + rows.row_stride);
  }
  step.slots.resize(kRequests);
  std::iota(step.slots.begin(), step.slots.end(), 1);
  std::shuffle(step.slots.begin(), step.slots.end(), random);

  const DeviceBuffer pool(static_cast<std::size_t>(shape.bytes()));
  TWOSTEP_CUDA_CHECK(cuMemsetD8Async(pool.address(), 0, pool.bytes(), static_cast<CUstream>(stream().handle)), "test");
  const Bound bound(step, Caches(CacheShape::of(kHeads, 1, 3, false)));
  KdaCall call = bound.call();
  call.caches = cache_views(shape, pool.data());
  const Part part(step, shape, judged);
  Caches part_before = part.fetch(call);
  for (std::int64_t slot = 1; slot <= 8; ++slot) {
    fill_state(random, &part_before, slot);
    fill_line(random, &part_before, slot, 0, 3);
  }
  part.store(part_before, call);

  rig.clear();
  rig.kda.run(call, stream());
  const std::vector<std::uint16_t> out = fetch_out(call);
  expect_right(judge(rig, part.step, part_before, part.outcome(rig, call, out)));
  const auto strange =
      std::count_if(out.begin(), out.end(), [](std::uint16_t bits) { return !std::isfinite(decode_bf16(bits)); });
  EXPECT_EQ(strange, 0);
}

}  // namespace
}  // namespace twostep::kda_test
