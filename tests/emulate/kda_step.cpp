// The step kernels of PreparedKda without a GPU: the text and the configurations that NVRTC is given, in the emulator,
// judged as on a GPU (kda 11.1). CTAs take turns in a drawn order, each with its threads from the first or from the
// last; copies in arrive when they are waited for, copies out the last one first. exp2 and 1 / x are the host's: no
// subnormal is flushed.
#include <emulated_kda.h>

#include <utility>
#include <vector>

#include "tests/emulate/emulator.h"
#include "tests/emulate/kda_cases.h"
#include "tests/kda/fixture.h"

namespace twostep::kda_test {
namespace {

using KdaEmulated = KdaTest;

constexpr int kSms = 3;  // of the GPU: CTAs that stay, with units of more than one head each

struct Emulated {
  KdaBuild build;
  void (*kernel)(const kda::Params&, u8*);
  int smem_bytes;
};

std::vector<Emulated> all_emulated() {
  std::vector<Emulated> all;
  const std::vector<KdaBuild> builds = emulated_kda();
#define EMULATED(i, kernel) all.push_back({builds[i], &kda::kernel<kda_##i::Config>, kda_##i::Config::kSmemBytes});
  FOR_EMULATED_KDA(EMULATED)
#undef EMULATED
  return all;
}

std::string name_of(const KdaBuild& b) {
  return to_string(b.tactic) + ", " + std::to_string(b.tokens) + " tokens, L " + std::to_string(b.conv_len) +
         (b.conv_dim_first ? ", DS" : "") + (b.lower_bound ? "" : ", softplus") + (b.bias ? ", bias" : "") +
         (b.early_caches ? ", early caches" : "") + (b.records ? ", records" : "");
}

SceneSpec spec_of(const KdaBuild& b, int requests) {
  SceneSpec spec{.heads = b.heads, .requests = requests, .tokens = b.tokens, .conv_len = b.conv_len};
  spec.softplus = !b.lower_bound;
  spec.bias = b.bias;
  spec.dim_first = b.conv_dim_first;
  spec.records = b.records;
  spec.rig.row_stride = b.row_stride;
  spec.rig.counters = false;  // those of the layer on the CPU
  return spec;
}

// `most_late`: turns by which a third of the CTAs may begin later.
Outcome run_emulated(const Emulated& emulated, Scene& scene, std::uint64_t seed, std::uint64_t most_late = 0) {
  const KdaBuild& build = emulated.build;
  const LayerValues& layer = scene.layer.values();
  const CacheShape& shape = scene.shape;
  const Bound bound(scene.step, scene.before);
  scene.rig.clear();
  const KdaCall call = bound.call();
  const KdaWeights weights = scene.layer.weights();
  std::vector<float> owned(static_cast<std::size_t>(KdaOwned::floats(layer.channels())));
  fill_owned(weights, layer.channels(), owned.data());
  KdaCounters counters;

  kda::Params p{};
  p.projected = static_cast<const u16*>(call.projected.data);
  p.out = static_cast<u16*>(call.out.data);
  p.conv = static_cast<u16*>(call.caches.conv.data);
  p.state = static_cast<float*>(call.caches.state.data);
  p.slots = static_cast<const int*>(call.slots.data);
  p.accepted = call.accepted ? static_cast<const int*>(call.accepted->data) : nullptr;
  p.lengths = call.lengths ? static_cast<const int*>(call.lengths->data) : nullptr;
  p.counters = &counters.bad_accepted;
  p.rounded = scene.rig.options().switches.rounded;
  p.owned = owned.data();
  p.f_b = static_cast<const u16*>(weights.f_b.data);
  p.a_log = static_cast<const float*>(weights.a_log.data);
  p.dt_bias = static_cast<const float*>(weights.dt_bias.data);
  p.out_stride = call.out.stride[0];
  p.conv_stride = call.caches.conv.stride[0];
  p.state_stride = call.caches.state.stride[0];
  p.slots_stride = call.slots.stride[0];
  p.num_slots = shape.slots;
  p.first_live_slot = scene.rig.options().first_live_slot;
  p.window = static_cast<int>(call.slots.shape[1]);
  p.scale = layer.scale;
  p.norm_eps = layer.norm_eps;
  p.lower_bound = layer.lower_bound.value_or(0);
  if (build.records) {
    p.records = static_cast<u8*>(call.caches.records->data);
    p.record_stride = call.caches.records->stride[0];
  }
  p.requests = scene.step.requests;

  cluster_size = static_cast<unsigned>(build.tactic.split);
  cluster_threads = static_cast<unsigned>(kda_threads(build.tactic));
  clusters.clear();
  emulate::Launch launch;
  DeviceFacts facts;
  facts.sm_count = kSms;
  launch.grid.x = kda_grid(build.heads, scene.step.requests, build.tactic, facts);
  launch.threads = cluster_threads;
  launch.memory = static_cast<std::size_t>(emulated.smem_bytes);
  std::vector<std::uint64_t> late(launch.grid.x);
  Random order(seed);
  for (std::uint64_t& turns : late) turns = order() % 3 == 0 ? order() % (most_late + 1) : 0;
  launch.kernel = [&] {
    for (std::uint64_t turn = 0; turn < late[emulate::block.x]; ++turn) emulate::give_way();
    emulated.kernel(p, static_cast<u8*>(emulate::cta_memory()));
  };
  emulate::run_streams({{launch}}, seed);
  EXPECT_TRUE(all_copies_landed()) << "a CTA ended before its copies were there";
  EXPECT_TRUE(end_copies()) << "a thread ended before its states had left shared memory";
  Outcome outcome = bound.read(scene.rig);
  outcome.counters = counters;
  return outcome;
}

TEST_F(KdaEmulated, every_configuration_is_right_in_any_order) {
  Verdict pooled;
  for (const Emulated& emulated : all_emulated()) {
    const KdaBuild& build = emulated.build;
    SCOPED_TRACE(name_of(build));
    Scene scene(random, spec_of(build, 4));
    if (build.tokens > 1 || build.records) {
      const int last = build.records ? std::min(build.conv_len - 2, 8) : build.tokens;
      scene.step.accepted = {{1, last, 2, 1}};
      scene.step.given_tokens = build.tokens;
    }
    if (build.tokens > 1) scene.step.lengths = {{build.tokens, build.tokens - 1, build.tokens, 1}};
    scene.step.slots[static_cast<std::size_t>(3 * scene.step.slots_stride)] = 0;  // dead
    scene.refill(random);
    const Outcome outcome = run_emulated(emulated, scene, random());
    const Verdict verdict = scene.judge(outcome);
    expect_right(verdict);
    pooled += verdict;
    expect_same_bits(run_emulated(emulated, scene, random()), outcome);
  }
  expect_right(pooled);
}

// The way out that they take leaves no copy behind.
TEST_F(KdaEmulated, dead_requests_leave_nothing_under_way) {
  for (const Emulated& emulated : all_emulated()) {
    const KdaBuild& build = emulated.build;
    SCOPED_TRACE(name_of(build));
    Scene scene(random, spec_of(build, 7));
    const int q = build.tokens;
    scene.step.slots[static_cast<std::size_t>(scene.step.slots_stride)] = 0;
    scene.step.slots[static_cast<std::size_t>(2 * scene.step.slots_stride)] =
        static_cast<std::int32_t>(scene.shape.slots);
    scene.step.lengths = {{q, q, q, q + 1, -1, 0, q}};
    scene.step.accepted = std::vector<std::int32_t>(7, 1);
    scene.refill(random);
    if (build.records) fill_records(random, &scene.before, scene.step.slot(6, 0), 1, -1);
    const Outcome outcome = run_emulated(emulated, scene, random());
    expect_right(scene.judge(outcome));
    EXPECT_EQ(outcome.counters.bad_length, 2u);
    EXPECT_EQ(outcome.counters.bad_slot, 1u);
    EXPECT_EQ(outcome.counters.stale_records, build.records ? 1u : 0u);
  }
}

// Two states for one slot: the copies keep no order, and the later one must win.
TEST_F(KdaEmulated, the_last_of_two_states_for_a_slot_stays) {
  for (const Emulated& emulated : all_emulated()) {
    const KdaBuild& build = emulated.build;
    if (build.records || build.tokens < 4) continue;
    SCOPED_TRACE(name_of(build));
    Scene scene(random, spec_of(build, 2));
    for (int n = 0; n < 2; ++n)
      for (int t = 0; t < build.tokens; ++t)
        scene.step.slots[static_cast<std::size_t>(n * scene.step.slots_stride + t)] =
            static_cast<std::int32_t>(scene.step.slot(n, n == 0 ? 0 : t % 2));
    scene.refill(random);
    expect_right(scene.judge(run_emulated(emulated, scene, random())));
  }
}

// Not allowed (kda 7.8), and must end: the count that one request stores makes another stale, or some of its CTAs
// alone.
TEST_F(KdaEmulated, requests_on_one_slot_end) {
  for (const Emulated& emulated : all_emulated()) {
    const KdaBuild& build = emulated.build;
    if (!build.records) continue;
    SCOPED_TRACE(name_of(build));
    Scene scene(random, spec_of(build, 6));
    scene.step.accepted = {{1, 2, 1, 2, 1, 2}};
    scene.step.given_tokens = build.tokens;
    const auto shared = static_cast<std::int32_t>(scene.step.slot(0, 0));
    const auto lines_of_the_first_five = [&](std::int32_t line) {
      for (int n = 0; n < 5; ++n) scene.step.slots[static_cast<std::size_t>(n * scene.step.slots_stride)] = line;
    };
    lines_of_the_first_five(0);
    scene.refill(random);
    fill_state(random, &scene.before, shared);
    fill_line(random, &scene.before, shared, 0, build.conv_len);
    fill_records(random, &scene.before, shared, 2, 2);
    const Outcome alone = run_emulated(emulated, scene, random());
    expect_right(scene.judge(alone));
    lines_of_the_first_five(shared);
    for (int repeat = 0; repeat < (kSlowBuild ? 1 : 2); ++repeat) {
      Outcome outcome = run_emulated(emulated, scene, random(), 600);
      const auto of_last = std::ptrdiff_t{5} * build.tokens * outcome.out_stride;
      EXPECT_TRUE(std::equal(outcome.out.begin() + of_last, outcome.out.end(), alone.out.begin() + of_last));
      copy_slot(alone.caches, shared, &outcome.caches);
      expect_same_contents(outcome.caches, alone.caches);
    }
  }
}

}  // namespace
}  // namespace twostep::kda_test
