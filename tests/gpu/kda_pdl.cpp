// Programmatic dependent launch of a step: what it may read before its predecessor is done, which edges of a graph are
// programmatic, and the proof that the wait is needed (kda 12.2; T52).
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cuda/launch.h"
#include "kda_fixture.h"

namespace twostep::kda_test {
namespace {

constexpr int kReplays = 20;

// A kernel of others that keeps the rules of this library's chain.
void count_as_own(Stream stream) { PdlChain::record(primary_context(test::kDevice), stream, true); }

class KdaPdl : public KdaGpuTest {
 protected:
  void SetUp() override {
    KdaGpuTest::SetUp();
    if (IsSkipped()) return;
    test::sleep(0, stream());  // the kernel is loaded before any capture
    test::synchronize();
  }
};
using KdaFaults = KdaGpuTest;

// Operands side by side in one matrix, so that one kernel writes them all, long after its successor has started.
class LateOperands {
 public:
  // A place for an operand; it holds `stale` until write() has brought `fresh`.
  template <class T>
  std::size_t add(const std::vector<T>& fresh, const std::vector<T>& stale) {
    const std::size_t place = fresh_.size(), bytes = fresh.size() * sizeof(T);
    const std::size_t end = (place + bytes + 255) / 256 * 256;
    fresh_.resize(end);
    stale_.resize(end);
    std::memcpy(fresh_.data() + place, fresh.data(), bytes);
    std::memcpy(stale_.data() + place, stale.data(), bytes);
    return place;
  }
  void allocate() {
    fresh_matrix_.emplace(matrix_of(fresh_));
    stale_matrix_.emplace(matrix_of(stale_));
    memory_.emplace(1, elements());
  }
  void* at(std::size_t place) const { return static_cast<char*>(memory_->data()) + place; }
  void reset(Stream stream) const { test::write_late(*memory_, *stale_matrix_, elements(), 0, stream); }
  void write(Stream stream) const { test::write_late(*memory_, *fresh_matrix_, elements(), 100, stream); }
  template <class T>
  std::vector<T> get(std::size_t place, std::size_t count) const {
    const test::HostMatrix all = memory_->get();
    std::vector<T> values(count);
    std::memcpy(values.data(), reinterpret_cast<const char*>(all.bits.data()) + place, count * sizeof(T));
    return values;
  }

 private:
  static test::HostMatrix matrix_of(const std::vector<char>& bytes) {
    test::HostMatrix matrix(1, static_cast<std::int64_t>(bytes.size() / 2));
    std::memcpy(matrix.bits.data(), bytes.data(), bytes.size());
    return matrix;
  }
  std::int64_t elements() const { return static_cast<std::int64_t>(fresh_.size() / 2); }

  std::vector<char> fresh_, stale_;
  std::optional<test::Matrix> fresh_matrix_, stale_matrix_, memory_;
};

// A step right behind the kernel that writes what it reads: all of it; with early_caches the projection and lengths.
void expect_waits(Random& random, int tokens, bool early_caches) {
  SCOPED_TRACE(testing::Message() << tokens << " tokens" << (early_caches ? ", early caches" : ""));
  SceneSpec spec{.heads = 2, .requests = 2, .tokens = tokens, .dim_first = tokens > 1};
  spec.rig.early_caches = early_caches;
  spec.rig.switches = switches();
  Scene scene(random, spec);
  scene.step.accepted = {{1, tokens}};
  scene.step.lengths = {{tokens, 1}};
  scene.refill(random);
  const Outcome expected = scene.run();
  expect_right(scene.judge(expected));

  const Step& step = scene.step;
  const Step other = random_step(random, 2, 2, tokens, step.row_stride, scene.shape.slots);
  const std::vector<std::int32_t> zeros(2, 0);
  LateOperands late;
  const std::size_t projected = late.add(step.projected, other.projected);
  const std::size_t lengths = late.add(*step.lengths, zeros);
  std::size_t caches = 0, slots = 0, accepted = 0;
  if (!early_caches) {
    caches = late.add(scene.before.bytes, Caches(scene.shape, random()).bytes);
    slots = late.add(step.slots, std::vector<std::int32_t>(step.slots.size(), 0));
    accepted = late.add(*step.accepted, zeros);
  }
  late.allocate();
  Bound bound(step, scene.before);
  KdaCall call = bound.call();
  call.projected.data = late.at(projected);
  call.lengths->data = late.at(lengths);
  if (!early_caches) {
    call.caches = cache_views(scene.shape, late.at(caches));
    call.slots.data = late.at(slots);
    call.accepted->data = late.at(accepted);
  }

  const Stream stream = backend().stream();
  const Graph graph(stream, [&] {
    late.write(stream);
    count_as_own(stream);
    scene.rig.kda.run(call, stream);
  });
  EXPECT_EQ(graph.num_nodes(), 2u);
  EXPECT_EQ(graph.num_programmatic_edges(), 1u);
  for (int replay = 0; replay < kReplays && !testing::Test::HasFailure(); ++replay) {
    SCOPED_TRACE(testing::Message() << "replay " << replay);
    late.reset(stream);
    bound.put(scene.before);
    bound.poison_out();
    scene.rig.clear();
    graph.launch(stream);
    Outcome outcome = bound.read(scene.rig);
    if (!early_caches) outcome.caches.bytes = late.get<std::byte>(caches, scene.before.bytes.size());
    expect_same_bits(outcome, expected);
  }
}

TEST_F(KdaPdl, weights_alone_are_read_before_the_predecessor_is_done_T52) {
  for (const int tokens : {1, 4}) expect_waits(random, tokens, false);
}

TEST_F(KdaPdl, with_early_caches_the_projection_may_still_be_late_T52) {
  for (const int tokens : {1, 4}) expect_waits(random, tokens, true);
}

TEST_F(KdaFaults, a_step_without_dependency_wait_fails_T52) {
  expect_fails("KdaPdl.weights_alone_are_read_before_the_predecessor_is_done_T52", "kNoDependencyWait");
}
TEST_F(KdaFaults, a_step_with_early_caches_and_no_dependency_wait_fails_T52) {
  expect_fails("KdaPdl.with_early_caches_the_projection_may_still_be_late_T52", "kNoDependencyWait");
}

// The first step is the slow producer of the caches for the second.
TEST_F(KdaPdl, a_step_sees_the_caches_that_the_step_before_it_wrote_T52) {
  for (const int tokens : {1, 4}) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens");
    Scene scene(random, {.heads = 2, .requests = 3, .tokens = tokens});
    const Outcome first = scene.run();
    Step next = scene.step;
    next.projected = random_step(random, 2, 3, tokens, next.row_stride, scene.shape.slots).projected;
    if (tokens > 1) next.accepted = {{1, tokens, 2}};
    const Outcome second = run(scene.rig, next, first.caches);
    expect_right(judge(scene.rig, next, first.caches, second));

    Bound first_bound(scene.step, scene.before), second_bound(next, scene.before);
    const KdaCall first_call = first_bound.call();
    KdaCall second_call = second_bound.call();
    second_call.caches = first_call.caches;
    const Graph graph(stream(), [&] {
      test::sleep(50, stream());
      count_as_own(stream());
      scene.rig.kda.run(first_call, stream());
      scene.rig.kda.run(second_call, stream());
    });
    EXPECT_EQ(graph.num_nodes(), 3u);
    EXPECT_EQ(graph.num_programmatic_edges(), 2u);
    for (int replay = 0; replay < kReplays && !HasFailure(); ++replay) {
      first_bound.put(scene.before);
      first_bound.poison_out();
      second_bound.poison_out();
      graph.launch(stream());
      const Outcome left = first_bound.read(scene.rig);
      expect_same_out(left, first);
      Outcome right = second_bound.read(scene.rig);
      right.caches = left.caches;
      expect_same_bits(right, second);
    }
  }
}

// Projection, step, output projection, as a layer has them.
TEST_F(KdaPdl, a_layer_is_one_chain_of_dependent_launches_T52) {
  constexpr int kHeads = 12, kRequests = 2;
  constexpr std::int64_t kHidden = 1088, kOutputs = 272;
  const std::int64_t columns = kda_row_stride(kHeads), channels = std::int64_t{kDim} * kHeads;
  const test::HostMatrix weight = test::normals(columns, kHidden, 1);
  const test::Matrix in_weight(weight), out_weight(test::normals(kOutputs, channels, 2));
  DraftGemm in(in_weight.view()), out(out_weight.view());
  for (const int tokens : {1, 4})
    for (const bool early_caches : {false, true}) {
      SCOPED_TRACE(testing::Message() << tokens << " tokens" << (early_caches ? ", early caches" : ""));
      SceneSpec spec{.heads = kHeads, .requests = kRequests, .tokens = tokens};
      spec.rig.early_caches = early_caches;
      Scene scene(random, spec);
      const auto rows = static_cast<int>(scene.step.rows());
      test::prepare_on(in, rows, Kind::kWarp, stream());
      test::prepare_on(out, rows, Kind::kWarp, stream());

      // Row i of x is 1 in one column: the projection is that column of the weight, in every bit.
      test::HostMatrix hidden(rows, kHidden);
      for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t one = static_cast<std::int64_t>(random() % kHidden);
        hidden.at(row, one) = encode_bf16(1);
        for (std::int64_t column = 0; column < columns; ++column) scene.step.at(row, column) = weight.at(column, one);
      }
      const Outcome expected = scene.run();
      expect_right(scene.judge(expected));
      test::HostMatrix expected_out(rows, channels);
      expected_out.bits = expected.out;
      const test::HostMatrix result = test::run(out, test::Matrix(expected_out), kOutputs, stream());

      const test::Matrix x(hidden);
      test::Matrix projected(rows, columns), core(rows, channels), last(rows, kOutputs);
      Bound bound(scene.step, scene.before);
      KdaCall call = bound.call();
      call.projected.data = projected.data();
      call.out.data = core.data();
      const Graph graph(stream(), [&] {
        in.run(x.view(), projected.view(), stream());
        scene.rig.kda.run(call, stream());
        out.run(core.view(), last.view(), stream());
      });
      EXPECT_EQ(graph.num_nodes(), 3u);
      EXPECT_EQ(graph.num_programmatic_edges(), 2u);
      for (int replay = 0; replay < kReplays && !HasFailure(); ++replay) {
        for (test::Matrix* matrix : {&projected, &core, &last}) matrix->poison();
        bound.put(scene.before);
        graph.launch(stream());
        Outcome outcome = bound.read(scene.rig);
        outcome.out = core.get().bits;
        expect_same_bits(outcome, expected);
        EXPECT_EQ(last.get(), result);
      }
    }
}

// ---- Ordinary launches

TEST_F(KdaPdl, the_first_launch_after_a_reload_is_ordinary_T52) {
  Scene scene(random, {.heads = 2, .requests = 3});
  const Bound bound(scene.step, scene.before);
  const KdaCall call = bound.call();
  const auto programmatic_edges = [&] {
    const Graph graph(stream(), [&] {
      test::sleep(0, stream());
      count_as_own(stream());
      scene.rig.kda.run(call, stream());
      scene.rig.kda.run(call, stream());
    });
    return graph.num_programmatic_edges();
  };
  EXPECT_EQ(programmatic_edges(), 2u);
  scene.rig.kda.reload(scene.layer.weights(), stream());
  EXPECT_EQ(programmatic_edges(), 1u);
  EXPECT_EQ(programmatic_edges(), 2u);
}

TEST_F(KdaPdl, what_does_not_follow_a_kernel_of_ours_is_ordinary) {
  Scene scene(random, {.heads = 2, .requests = 3});
  const Bound bound(scene.step, scene.before);
  const KdaCall call = bound.call();
  const DeviceBuffer other(256);
  scene.rig.kda.run(call, stream());  // not of the capture
  const Graph first(stream(), [&] { scene.rig.kda.run(call, stream()); });
  EXPECT_EQ(first.num_programmatic_edges(), 0u);
  const Graph memset(stream(), [&] {
    scene.rig.kda.run(call, stream());
    TWOSTEP_CUDA_CHECK(cuMemsetD8Async(other.address(), 0, 256, static_cast<CUstream>(stream().handle)), "test");
    scene.rig.kda.run(call, stream());
  });
  EXPECT_EQ(memset.num_nodes(), 3u);
  EXPECT_EQ(memset.num_programmatic_edges(), 0u);
  const Graph foreign(stream(), [&] {
    scene.rig.kda.run(call, stream());
    test::sleep(0, stream());
    scene.rig.kda.run(call, stream());
  });
  EXPECT_EQ(foreign.num_nodes(), 3u);
  EXPECT_EQ(foreign.num_programmatic_edges(), 0u);
}

}  // namespace
}  // namespace twostep::kda_test
