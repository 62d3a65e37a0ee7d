// Graphs and streams: what run records, capture before there is data, replay with other data, reload (kda 12; T46, T50
// - T52).
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kda_fixture.h"

namespace twostep::kda_test {
namespace {

using KdaGraph = KdaGpuTest;

// What a replay on these contents leaves.
Outcome replay_of(const Graph& graph, Scene& scene, Bound& bound, const Step& step, const Caches& caches) {
  bound.put(step);
  bound.put(caches);
  bound.poison_out();
  scene.rig.clear();
  graph.launch(backend().stream());
  return bound.read(scene.rig);
}

// ---- T51

// Every token kept, or some of them: what a request may have accepted of its last step.
std::vector<std::int32_t> any_accepted(Random& random, const std::vector<std::int32_t>& most) {
  std::vector<std::int32_t> accepted;
  for (const std::int32_t limit : most)
    accepted.push_back(1 + static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(limit)));
  return accepted;
}

TEST_F(KdaGraph, what_was_captured_without_data_replays_with_any_T51) {
  for (const int tokens : {1, 4})
    for (const bool dim_first : {false, true}) {
      SCOPED_TRACE(testing::Message() << tokens << " tokens" << (dim_first ? ", DS" : ", SD"));
      constexpr int kRequests = 3;
      Scene scene(random, {.heads = 2,
                           .requests = kRequests,
                           .tokens = tokens,
                           .pool = 2 * kRequests * tokens,
                           .dim_first = dim_first});
      const std::vector<std::int32_t> all(kRequests, tokens);

      // As a server warms up: slots 0, everything accepted, eager and then captured.
      Step warm_up = scene.step;
      std::fill(warm_up.slots.begin(), warm_up.slots.end(), 0);
      warm_up.accepted = warm_up.lengths = all;
      Bound bound(warm_up, scene.before);
      const KdaCall call = bound.call();
      scene.rig.clear();
      scene.rig.kda.run(call, stream());
      const Graph graph(stream(), [&] { scene.rig.kda.run(call, stream()); });
      EXPECT_EQ(graph.num_nodes(), 1u);
      expect_untouched(scene.before, bound.read(scene.rig).caches);
      const Outcome nothing = replay_of(graph, scene, bound, warm_up, scene.before);
      expect_untouched(scene.before, nothing.caches);
      for (std::int64_t row = 0; row < warm_up.rows(); ++row) expect_zero_row(nothing, row);

      const auto expect_eager_bits = [&](const Step& step, const Caches& caches) {
        const Outcome replayed = replay_of(graph, scene, bound, step, caches);
        expect_right(judge(scene.rig, step, caches, replayed));
        expect_same_bits(replayed, run(scene.rig, step, caches));
        return replayed;
      };
      scene.step.accepted = any_accepted(random, all);
      scene.step.lengths = any_accepted(random, all);
      scene.refill(random);
      const Outcome first = expect_eager_bits(scene.step, scene.before);

      // The next step of the same requests, on what the first left.
      Step second = scene.step;
      second.accepted = any_accepted(random, *scene.step.lengths);
      second.lengths = all;
      second.projected = random_step(random, 2, kRequests, tokens, second.row_stride, scene.shape.slots).projected;
      expect_eager_bits(second, first.caches);

      // Other requests.
      const std::vector<std::int32_t> slots = scene.step.slots;
      while (scene.step.slots == slots) scene.redraw(random);
      scene.step.accepted = any_accepted(random, all);
      scene.step.lengths = all;
      scene.refill(random);
      expect_eager_bits(scene.step, scene.before);
    }
}

TEST_F(KdaGraph, decode_and_verify_of_one_object_replay_in_any_order) {
  RigOptions options;
  options.keys = {{2, 1}, {2, 3}};
  options.strict = false;  // the rounded values are those of the last run alone
  Scene scene(random, {.heads = 2, .requests = 2, .tokens = 3, .rig = options});
  Step decode = random_step(random, 2, 2, 1, scene.step.row_stride, scene.shape.slots);
  const Caches decode_before = random_caches(random, scene.shape, decode, 1);
  const Outcome verified = scene.run(), decoded = run(scene.rig, decode, decode_before);
  Bound verify_bound(scene.step, scene.before), decode_bound(decode, decode_before);
  const KdaCall verify_call = verify_bound.call(), decode_call = decode_bound.call();
  const Graph verify_graph(stream(), [&] { scene.rig.kda.run(verify_call, stream()); });
  const Graph decode_graph(stream(), [&] { scene.rig.kda.run(decode_call, stream()); });
  for (int i = 0; i < 20; ++i) {
    if (random() % 2)
      expect_same_bits(replay_of(verify_graph, scene, verify_bound, scene.step, scene.before), verified);
    else expect_same_bits(replay_of(decode_graph, scene, decode_bound, decode, decode_before), decoded);
  }
}

// ---- T46

TEST_F(KdaGraph, fresh_and_pending_requests_share_a_captured_step_T46) {
  for (const bool early_caches : {false, true}) {
    Scene scene(random,
                {.heads = 2, .requests = 2, .tokens = 2, .records = true, .rig = {.early_caches = early_caches}});
    Step warm_up = scene.step;
    std::fill(warm_up.slots.begin(), warm_up.slots.end(), 0);
    Bound bound(warm_up, scene.before);
    const KdaCall call = bound.call();
    const Graph graph(stream(), [&] { scene.rig.kda.run(call, stream()); });
    EXPECT_EQ(graph.num_nodes(), 1u);
    expect_untouched(scene.before, bound.read(scene.rig).caches);

    scene.step.accepted = {{1, 2}};
    scene.refill(random);
    fill_records(random, &scene.before, scene.step.slot(0, 0), 0, 0);
    Step step = scene.step;
    Caches caches = scene.before;
    for (int i = 0; i < 4; ++i) {
      const Outcome outcome = replay_of(graph, scene, bound, step, caches);
      expect_right(judge(scene.rig, step, caches, outcome));
      expect_same_bits(outcome, run(scene.rig, step, caches));
      caches = outcome.caches;
      step.accepted = {{1 + i % 2, 2 - i % 2}};
      step.projected = random_step(random, 2, 2, 2, step.row_stride, scene.shape.slots).projected;
    }
  }
}

// The chain as a server captures it: between two steps of one graph the state is complete.
TEST_F(KdaGraph, fold_and_reset_are_captured_and_no_step_overtakes_them) {
  Scene scene(random,
              {.heads = 12, .requests = 2, .tokens = 2, .pool = 8, .records = true, .rig = {.early_caches = true}});
  scene.step.accepted = {{1, 1}};
  for (int n = 0; n < 2; ++n) fill_records(random, &scene.before, scene.step.slot(n, 0), 0, 0);
  const std::vector<std::int32_t> slots = {static_cast<std::int32_t>(scene.step.slot(0, 0)),
                                           static_cast<std::int32_t>(scene.step.slot(1, 0))};
  Bound bound(scene.step, scene.before);
  const KdaCall call = bound.call();
  const Memory ids(slots), kept(std::vector<std::int32_t>{2, 1});
  const TensorView id_view = view_of(ids, DType::kI32, {2}), kept_view = view_of(kept, DType::kI32, {2});
  const Graph graph(stream(), [&] {
    scene.rig.kda.reset_records(call.caches, id_view, stream());
    scene.rig.kda.run(call, stream());
    scene.rig.kda.fold_records(call.caches, id_view, kept_view, {}, stream());
    scene.rig.kda.run(call, stream());
  });
  EXPECT_EQ(graph.num_nodes(), 4u);
  const Outcome first = scene.run();
  const Caches complete = folded(scene.rig, first.caches, slots, {{2, 1}});
  const Outcome second = run(scene.rig, scene.step, complete);
  for (int repeat = 0; repeat < 20; ++repeat) {
    Caches stale = scene.before;
    for (const std::int32_t slot : slots)
      for (int h = 0; h < 12; ++h) stale.count(slot, h) = 5;
    expect_same_bits(replay_of(graph, scene, bound, scene.step, stale), second);
  }
}

// ---- T50

TEST_F(KdaGraph, a_replay_uses_the_weights_of_the_last_reload_T50) {
  for (const int tokens : {1, 3}) {
    Scene scene(random, {.heads = 2, .requests = 3, .tokens = tokens, .bias = true, .small = DType::kBF16});
    Bound bound(scene.step, scene.before);
    const KdaCall call = bound.call();
    const Graph graph(stream(), [&] { scene.rig.kda.run(call, stream()); });
    const Outcome old = replay_of(graph, scene, bound, scene.step, scene.before);
    expect_right(scene.judge(old));
    for (int reload = 0; reload < 2; ++reload) {
      scene.layer.put(random_layer(random, {.heads = 2, .bias = true}));
      scene.rig.kda.reload(scene.layer.weights(), stream());
      const Outcome replayed = replay_of(graph, scene, bound, scene.step, scene.before);
      EXPECT_NE(replayed.out, old.out);
      expect_right(scene.judge(replayed));
      expect_same_bits(scene.run(), replayed);
    }
  }
}

TEST_F(KdaGraph, reload_under_capture_is_refused_and_leaves_the_capture_whole) {
  Scene scene(random, {.heads = 2, .requests = 2});
  Bound bound(scene.step, scene.before);
  const KdaCall call = bound.call();
  std::string refused;
  const Graph graph(stream(), [&] {
    refused = code_of([&] { scene.rig.kda.reload(scene.layer.weights(), stream()); });
    scene.rig.kda.run(call, stream());
  });
  EXPECT_EQ(refused, "capturing");
  EXPECT_EQ(graph.num_nodes(), 1u);
  expect_right(scene.judge(replay_of(graph, scene, bound, scene.step, scene.before)));
}

TEST_F(KdaGraph, reload_of_other_weights_is_refused_and_changes_nothing) {
  Scene scene(random, {.heads = 2, .requests = 2, .bias = true});
  const Outcome before = scene.run();
  // Of the same shapes, at other addresses: what is owned could be taken, what is borrowed not.
  const Layer other(random_layer(random, {.heads = 2, .bias = true}));
  const KdaWeights bound = scene.layer.weights(), elsewhere = other.weights();
  const auto with = [&](auto change) {
    KdaWeights weights = elsewhere;
    weights.f_b = bound.f_b;
    weights.a_log = bound.a_log;
    weights.dt_bias = bound.dt_bias;
    change(weights);
    return weights;
  };
  const std::vector<KdaWeights> refused = {
      with([&](KdaWeights& w) { w.f_b = elsewhere.f_b; }),
      with([&](KdaWeights& w) { w.a_log = elsewhere.a_log; }),
      with([&](KdaWeights& w) { w.dt_bias = elsewhere.dt_bias; }),
      with([&](KdaWeights& w) { w.conv_weight.dtype = DType::kBF16; }),
      with([&](KdaWeights& w) { w.conv_weight.shape[0] = 384; }),
      with([&](KdaWeights& w) { w.conv_bias.reset(); }),
      with([&](KdaWeights& w) { w.norm_weight.shape[0] = 64; }),
  };
  for (const KdaWeights& weights : refused) {
    EXPECT_EQ(code_of([&] { scene.rig.kda.reload(weights, stream()); }), "weight_changed");
    expect_same_bits(scene.run(), before);
  }
  scene.rig.kda.reload(with([](KdaWeights&) {}), stream());
  EXPECT_NE(scene.run().out, before.out);
}

// ---- Streams

TEST_F(KdaGraph, the_default_stream_serves_T52) {
  Scene scene(random, {.heads = 2, .requests = 3, .tokens = 2});
  const Outcome expected = scene.run();
  const Bound bound(scene.step, scene.before);
  scene.rig.clear();
  scene.rig.kda.run(bound.call());
  test::synchronize();
  const Outcome outcome = bound.read(scene.rig);
  expect_right(scene.judge(outcome));
  expect_same_bits(outcome, expected);
}

TEST_F(KdaGraph, one_object_serves_several_streams_at_a_time) {
  constexpr std::size_t kStreams = 3, kRuns = 20;
  RigOptions options;
  options.strict = options.counters = false;  // all runs would write the same buffers
  Scene scene(random, {.heads = 2, .requests = 4, .rig = options});
  std::vector<Outcome> expected;
  std::vector<Bound> bounds;
  std::vector<OwnedStream> streams(kStreams);
  for (std::size_t i = 0; i < kStreams; ++i) {
    scene.redraw(random);
    bounds.emplace_back(scene.step, scene.before);
    // The chain of runs on its own: each starts from what the last left.
    Caches caches = scene.before;
    Outcome outcome;
    for (std::size_t run_idx = 0; run_idx < kRuns; ++run_idx) {
      outcome = run(scene.rig, scene.step, caches);
      caches = outcome.caches;
    }
    expected.push_back(std::move(outcome));
  }
  for (std::size_t run_idx = 0; run_idx < kRuns; ++run_idx)
    for (std::size_t i = 0; i < kStreams; ++i) scene.rig.kda.run(bounds[i].call(), streams[i].view());
  test::synchronize();
  for (std::size_t i = 0; i < kStreams; ++i) expect_same_bits(bounds[i].read(scene.rig), expected[i]);
}

}  // namespace
}  // namespace twostep::kda_test
