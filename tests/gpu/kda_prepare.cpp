// prepare on a GPU, and what a prepared run costs on the host (kda 3.3, 3.4, 3.6; T49).
//
// That run takes no lock is left to review: the driver takes its own, so that counting them would say nothing.
#include <stdlib.h>

#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "child.h"
#include "kda/tactics.h"
#include "kda_fixture.h"

namespace twostep::kda_test {
namespace {

using KdaPrepare = KdaGpuTest;

std::uint64_t kernels_of(const PreparedKda& kda) { return kda.stats().compiles + kda.stats().cache_hits; }

// An object that is not prepared, for the scene's layer and keys.
PreparedKda unprepared(const Scene& scene, bool jit, std::vector<KdaKey> keys = {}) {
  RigOptions rig = scene.rig.options();
  if (!keys.empty()) rig.keys = std::move(keys);
  KdaOptions options = kda_options(scene.layer.values(), scene.shape, rig);
  options.jit = jit;
  return PreparedKda(scene.layer.weights(), options);
}

// Layouts as the scene's, with conv lines of another length.
KdaCaches layouts_of_length(const Scene& scene, int conv_len) {
  return cache_views(CacheShape::of(scene.shape.heads, scene.shape.slots, conv_len, scene.shape.dim_first), nullptr);
}

Outcome run_with(PreparedKda& kda, const Scene& scene) {
  const Bound bound(scene.step, scene.before);
  kda.run(bound.call(), backend().stream());
  return bound.read(scene.rig);
}

TEST_F(KdaPrepare, every_key_is_prepared_from_layouts_and_equal_builds_share_a_kernel_T49) {
  RigOptions options;
  options.strict = false;
  options.keys = {{1, 1}, {2, 1}, {64, 1}, {128, 1}, {1, 4}, {2, 4}, {64, 4}, {1, 8}};
  const DeviceFacts facts = device_facts(test::kDevice);
  for (const bool forced : {false, true}) {
    if (forced) options.tactic = KdaTactic{4, 8, 1};
    // The layouts of the scene have null data; this step is never run.
    Scene scene(random, {.heads = 12, .tokens = 8, .rig = options});
    PreparedKda& kda = scene.rig.kda;
    EXPECT_EQ(kda.keys(), (std::vector<KdaKey>{{1, 1}, {1, 4}, {1, 8}, {2, 1}, {2, 4}, {64, 1}, {64, 4}, {128, 1}}));
    std::set<std::pair<int, std::string>> builds;
    std::set<std::string> kernels;
    for (const KdaKey key : kda.keys()) {
      EXPECT_EQ(kda.tactic(key), forced ? *options.tactic : kda_tactic(12, key, facts)) << to_string(key);
      builds.emplace(key.tokens, to_string(kda.tactic(key)));
      kernels.insert(kda.kernel(key));
    }
    EXPECT_EQ(kernels_of(kda), builds.size());
    EXPECT_EQ(kernels.size(), builds.size());
    if (forced) {
      EXPECT_EQ(builds.size(), 3u);
    }

    // All is in memory now.
    const std::uint64_t compiles = kda.stats().compiles;
    kda.prepare(cache_views(scene.shape, nullptr));
    EXPECT_EQ(kda.stats().compiles, compiles);
    PreparedKda another = unprepared(scene, false);
    another.prepare(cache_views(scene.shape, nullptr));
    EXPECT_EQ(another.stats().compiles, 0u);
    EXPECT_EQ(another.stats().cache_hits, builds.size());
  }
}

TEST_F(KdaPrepare, a_kernel_has_a_name_and_a_hash) {
  RigOptions options;
  options.tactic = KdaTactic{2, 8, 2};
  const Scene scene(random, {.heads = 3, .tokens = 2, .dim_first = true, .rig = options});
  const std::string kernel = scene.rig.kda.kernel({1, 2});
  const std::size_t space = kernel.find(' ');
  ASSERT_NE(space, std::string::npos) << kernel;
  EXPECT_EQ(kernel.substr(0, space), "kda-h3-q2-ds-l4-s2w8p2-" + arch_name(device_facts(test::kDevice).arch));
  EXPECT_EQ(kernel.size() - space - 1, 32u) << kernel;
  EXPECT_EQ(kernel.find_first_not_of("0123456789abcdef", space + 1), std::string::npos) << kernel;
  EXPECT_EQ(code_of([&] { scene.rig.kda.kernel({2, 2}); }), "not_prepared");
  EXPECT_EQ(code_of([&] { scene.rig.kda.tactic({2, 2}); }), "not_prepared");
}

TEST_F(KdaPrepare, a_prepared_run_allocates_and_compiles_nothing_T49) {
  for (const int tokens : {1, 4}) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens");
    Scene scene(random, {.heads = 2, .requests = 3, .tokens = tokens});
    if (tokens > 1) scene.step.lengths = {{4, 0, 2}};
    const Bound bound(scene.step, scene.before);
    const KdaCall call = bound.call();
    PreparedKda& kda = scene.rig.kda;
    kda.run(call, stream());
    test::synchronize();
    std::size_t free_before = 0, free_after = 0, total = 0;
    TWOSTEP_CUDA_CHECK(cuMemGetInfo(&free_before, &total), "test");
    const KdaStats before = kda.stats();
    const std::uint64_t allocations = test::allocations();
    for (int i = 0; i < 100; ++i) kda.run(call, stream());
    EXPECT_EQ(test::allocations() - allocations, 0u);
    EXPECT_EQ(kda.stats().runs - before.runs, 100u);
    EXPECT_EQ(kda.stats().compiles, before.compiles);
    EXPECT_EQ(kda.stats().cache_hits, before.cache_hits);
    test::synchronize();
    TWOSTEP_CUDA_CHECK(cuMemGetInfo(&free_after, &total), "test");
    EXPECT_EQ(free_after, free_before);
  }
  const std::uint64_t counted = test::allocations();
  ::operator delete(::operator new(16));  // called by name: a new expression may be optimised away
  EXPECT_GT(test::allocations(), counted) << "the counter counts";
}

// ---- Failures

TEST_F(KdaPrepare, refused_layouts_leave_the_object_as_it_was) {
  Scene scene(random, {.heads = 2, .requests = 2, .tokens = 2});
  const Outcome before = scene.run();
  PreparedKda& kda = scene.rig.kda;
  const std::string kernel = kda.kernel({2, 2});
  const KdaCaches good = cache_views(scene.shape, nullptr);
  const auto with = [&](auto change) {
    KdaCaches layouts = good;
    change(layouts);
    return layouts;
  };
  const std::vector<std::pair<KdaCaches, std::string>> refused = {
      {layouts_of_length(scene, 3), "invalid_argument"},
      {with([](KdaCaches& l) { l.conv.dtype = DType::kF16; }), "invalid_argument"},
      {with([](KdaCaches& l) { --l.state.shape[0]; }), "invalid_argument"},
      {with([](KdaCaches& l) { l.state.stride[0] += 1; }), "bad_layout"},
      {with([](KdaCaches& l) { std::swap(l.state.stride[2], l.state.stride[3]); }), "bad_layout"},
  };
  for (std::size_t i = 0; i < refused.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "case " << i);
    EXPECT_EQ(code_of([&] { kda.prepare(refused[i].first); }), refused[i].second);
    EXPECT_EQ(kda.keys(), (std::vector<KdaKey>{{2, 2}}));
    EXPECT_EQ(kda.kernel({2, 2}), kernel);
    expect_same_bits(scene.run(), before);
  }
}

TEST_F(KdaPrepare, a_refused_tactic_is_named_and_nothing_is_prepared) {
  Scene scene(random, {.requests = 2});
  for (const KdaTactic tactic : {KdaTactic{3, 8, 1}, KdaTactic{1, 12, 1}, KdaTactic{8, 8, 2}}) {
    RigOptions rig = scene.rig.options();
    rig.keys = {{1, 1}, {2, 1}};
    KdaOptions options = kda_options(scene.layer.values(), scene.shape, rig);
    options.policies[1].tactic = tactic;
    PreparedKda kda(scene.layer.weights(), options);
    try {
      kda.prepare(cache_views(scene.shape, nullptr));
      ADD_FAILURE() << to_string(tactic) << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kUnsupported);
      EXPECT_EQ(error.status().place, "kda.prepare");
      EXPECT_EQ(error.status().argument.substr(0, 7), "tactic.") << error.what();
    }
    EXPECT_TRUE(kda.keys().empty());
    EXPECT_EQ(code_of([&] { kda.tactic({1, 1}); }), "not_prepared");
    EXPECT_EQ(code_of([&] { run_with(kda, scene); }), "not_prepared");
  }
}

// The second prepare finds the kernel of its first key and not that of its second.
TEST_F(KdaPrepare, a_prepare_that_fails_half_way_leaves_the_object_as_it_was) {
  if (!test::in_child()) {
    const test::ChildResult child = test::run_this_test({{"TWOSTEP_CACHE", "0"}}, 60);
    ASSERT_TRUE(child.passed) << child.output;
    return;
  }
  RigOptions options;
  options.keys = {{2, 1}, {2, 2}};
  Scene scene(random, {.heads = 2, .requests = 2, .tokens = 2, .rig = options});  // compiles both for L = 4
  PreparedKda kda = unprepared(scene, false);
  kda.prepare(cache_views(scene.shape, nullptr));
  EXPECT_EQ(kda.stats().compiles, 0u);
  const std::string kernel = kda.kernel({2, 1});
  const Outcome before = run_with(kda, scene);

  PreparedKda decode = unprepared(scene, true, {{2, 1}});
  decode.prepare(layouts_of_length(scene, 5));
  EXPECT_EQ(decode.stats().compiles, 1u);
  EXPECT_EQ(code_of([&] { kda.prepare(layouts_of_length(scene, 5)); }), "unavailable");
  EXPECT_EQ(kda.keys(), (std::vector<KdaKey>{{2, 1}, {2, 2}}));
  EXPECT_EQ(kda.kernel({2, 1}), kernel);
  EXPECT_NE(decode.kernel({2, 1}), kernel);
  expect_same_bits(run_with(kda, scene), before);
}

// Each phase is a process over one folder, empty at first.
TEST_F(KdaPrepare, without_jit_the_caches_alone_serve) {
  if (!test::in_child()) {
    std::string folder = "/tmp/twostep-kda-XXXXXX";
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    for (const char* phase : {"empty", "compile", "disk"}) {
      const test::ChildResult child = test::run_this_test(
          {{"TWOSTEP_CACHE_DIR", folder}, {"TWOSTEP_CACHE", "1"}, {"TWOSTEP_TEST_PHASE", phase}}, 60);
      EXPECT_TRUE(child.passed) << phase << "\n" << child.output;
    }
    std::filesystem::remove_all(folder);
    return;
  }
  const std::string phase = test::variable("TWOSTEP_TEST_PHASE");
  const Layer layer(random_layer(random, {.heads = 2}));
  const CacheShape shape = CacheShape::of(2, 4, 3, false);
  RigOptions rig;
  rig.keys = {{1, 1}};
  rig.row_stride = kda_row_stride(2);
  KdaOptions options = kda_options(layer.values(), shape, rig);
  options.jit = phase == "compile";
  PreparedKda kda(layer.weights(), options);
  const KdaCaches layouts = cache_views(shape, nullptr);
  if (phase == "empty") {
    EXPECT_EQ(code_of([&] { kda.prepare(layouts); }), "unavailable");
    EXPECT_TRUE(kda.keys().empty());
    return;
  }
  kda.prepare(layouts);
  EXPECT_EQ(kda.stats().compiles, phase == "compile" ? 1u : 0u);
  EXPECT_EQ(kda.stats().cache_hits, phase == "compile" ? 0u : 1u);
}

// ---- Devices

TEST_F(KdaPrepare, operands_elsewhere_are_refused_and_nothing_is_launched) {
  Scene scene(random, {.heads = 2, .requests = 2, .tokens = 2});
  scene.step.lengths = {{2, 1}};
  const Bound bound(scene.step, scene.before);
  const std::vector<TensorView& (*)(KdaCall&)> operands = {
      [](KdaCall& call) -> TensorView& { return call.projected; },
      [](KdaCall& call) -> TensorView& { return call.out; },
      [](KdaCall& call) -> TensorView& { return call.caches.conv; },
      [](KdaCall& call) -> TensorView& { return call.caches.state; },
      [](KdaCall& call) -> TensorView& { return call.slots; },
      [](KdaCall& call) -> TensorView& { return *call.accepted; },
      [](KdaCall& call) -> TensorView& { return *call.lengths; },
  };
  for (std::size_t i = 0; i < operands.size(); ++i)
    for (const Device elsewhere : {Device::cpu(), Device::cuda(test::kDevice + 1)}) {
      SCOPED_TRACE(testing::Message() << "operand " << i << " on " << to_string(elsewhere));
      KdaCall call = bound.call();
      operands[i](call).device = elsewhere;
      EXPECT_EQ(code_of([&] { scene.rig.kda.run(call, stream()); }), "wrong_device");
    }
  EXPECT_EQ(scene.rig.kda.stats().runs, 0u);
  const Outcome outcome = bound.read(scene.rig);
  expect_untouched(scene.before, outcome.caches);
  for (const std::uint16_t out : outcome.out) ASSERT_EQ(out, 0xffff);
}

TEST_F(KdaPrepare, a_layer_on_another_gpu_needs_no_current_context) {
  constexpr int kOther = test::kDevice + 1;
  if (device_count() <= kOther) GTEST_SKIP() << "needs two GPUs";
  // The layer's weights and a step, copied to the other GPU; the context of the first one stays current.
  Scene scene(random, {.heads = 2, .requests = 2});
  const Outcome expected = scene.run();
  const Bound bound(scene.step, scene.before);
  std::vector<DeviceBuffer> copies;
  const auto moved = [&](TensorView view, std::size_t bytes) {
    std::vector<std::byte> host(bytes);
    backend().download(host.data(), view.data, bytes);
    const ContextGuard other(kOther);
    copies.emplace_back(bytes);
    copy_to_device(copies.back().data(), host.data(), bytes);
    view.data = copies.back().data();
    view.device = Device::cuda(kOther);
    return view;
  };
  const auto dense = [&](const TensorView& view) {
    std::size_t bytes = dtype_size(view.dtype);
    for (int d = 0; d < view.rank; ++d) bytes *= static_cast<std::size_t>(view.shape[static_cast<std::size_t>(d)]);
    return moved(view, bytes);
  };
  KdaWeights weights = scene.layer.weights();
  weights.conv_weight = dense(weights.conv_weight);
  weights.f_b = dense(weights.f_b);
  weights.a_log = dense(weights.a_log);
  weights.dt_bias = dense(weights.dt_bias);
  weights.norm_weight = dense(weights.norm_weight);
  PreparedKda kda(weights, kda_options(scene.layer.values(), scene.shape, scene.rig.options()));
  KdaCaches layouts = cache_views(scene.shape, nullptr);
  EXPECT_EQ(code_of([&] { kda.run(bound.call()); }), "not_prepared");
  layouts.conv.device = layouts.state.device = Device::cuda(kOther);
  kda.prepare(layouts);
  EXPECT_EQ(code_of([&] { kda.run(bound.call()); }), "wrong_device");

  KdaCall call = bound.call();
  call.projected = moved(call.projected, scene.step.projected.size() * 2);
  call.out = dense(call.out);
  // Both caches lie in one piece of memory, conv lines first.
  call.caches.conv = moved(call.caches.conv, scene.before.bytes.size());
  call.caches.state.data = static_cast<char*>(call.caches.conv.data) + scene.shape.state_base;
  call.caches.state.device = Device::cuda(kOther);
  call.slots = dense(call.slots);
  kda.run(call);
  Outcome outcome = expected;
  const ContextGuard other(kOther);
  test::synchronize();
  copy_to_host(outcome.out.data(), call.out.data, outcome.out.size() * 2);
  copy_to_host(outcome.caches.bytes.data(), call.caches.conv.data, outcome.caches.bytes.size());
  expect_same_bits(outcome, expected);
}

}  // namespace
}  // namespace twostep::kda_test
