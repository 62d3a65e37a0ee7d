// The draft step on a GPU: against the CPU backend, from a captured graph, beside any neighbours (drafter 13.2, 14).
// What must hold between two backends is in tests/drafter, and holds in the emulator too.
#include <string>
#include <vector>

#include "gemm_fixture.h"
#include "measure/draft_loop_cuda.h"
#include "tests/drafter/step.h"

namespace twostep {
namespace {

using step_test::Case;
using step_test::Inputs;
using step_test::Outcome;
using step_test::Pair;
using step_test::Side;
using test::allocations;

class GpuSpace final : public step_test::Space {
 public:
  explicit GpuSpace(Stream stream) : stream_(stream) {}
  Device device() const override { return Device::cuda(test::kDevice); }
  Stream stream() const override { return stream_; }
  void* allocate(std::size_t bytes) override { return memory_.emplace_back(bytes).data(); }
  void put(void* to, const void* from, std::size_t bytes) override { copy_to_device(to, from, bytes, stream_); }
  void get(void* to, const void* from, std::size_t bytes) override { copy_to_host(to, from, bytes, stream_); }

 private:
  Stream stream_;
  std::vector<DeviceBuffer> memory_;
};

class DrafterStep : public test::GpuTest {
 protected:
  step_test::MakeSide gpu() const {
    return [stream = stream()](const Case& c, const DrafterWeights& weights, std::int64_t requests,
                               std::optional<std::int64_t> spoilt) {
      return std::make_unique<Side>(c, weights, requests, std::make_unique<GpuSpace>(stream), nullptr, spoilt);
    };
  }
};

// Rows past 64 are served by cuBLAS: without it there is no drafter to test.
class DrafterVerify : public DrafterStep {};
class DrafterGraph : public DrafterStep {};
class DrafterLoop : public DrafterStep {};

// ---- Against the CPU backend

TEST_F(DrafterStep, tiny_is_that_of_the_cpu) {
  TWOSTEP_NEEDS_CUBLAS();
  step_test::expect_the_same_step(step_test::tiny_case(), 1, gpu());
  step_test::expect_the_same_step(step_test::tiny_case(), 4, gpu());
}
TEST_F(DrafterStep, switched_is_that_of_the_cpu) {
  TWOSTEP_NEEDS_CUBLAS();
  step_test::expect_the_same_step(step_test::switched_case(), 2, gpu());
  step_test::expect_the_same_step(step_test::switched_case(), 18, gpu());
}
TEST_F(DrafterStep, long_blocks_are_those_of_the_cpu) {
  TWOSTEP_NEEDS_CUBLAS();
  step_test::expect_the_same_step(step_test::long_case(), 1, gpu());
  step_test::expect_the_same_step(step_test::long_case(), 2, gpu());
}
TEST_F(DrafterStep, wide_is_that_of_the_cpu) {
  TWOSTEP_NEEDS_CUBLAS();
  step_test::expect_the_same_step(step_test::wide_case(), 1, gpu());
  step_test::expect_the_same_step(step_test::wide_case(), 3, gpu());
  step_test::expect_the_same_step(step_test::wide_causal_case(), 2, gpu());
  step_test::expect_the_same_step(step_test::wide_causal_case(), 18, gpu());
}
TEST_F(DrafterStep, many_heads_are_those_of_the_cpu) {
  TWOSTEP_NEEDS_CUBLAS();
  step_test::expect_the_same_step(step_test::many_heads_case(), 1, gpu());
  step_test::expect_the_same_step(step_test::many_heads_case(), 2, gpu());
}
TEST_F(DrafterStep, picks_of_a_shard_that_fits_on_no_chip_are_those_of_the_cpu) {
  TWOSTEP_NEEDS_CUBLAS();
  Case c = step_test::switched_case();
  c.config.vocab_size = 76032;  // of two ranks: 288 rows of 1 kB are more than a CTA may have of shared memory
  c.config.markov_rank = 512;
  ASSERT_TRUE(step_kernel_needed(StepKernel::kPicksStreamed, step_test::kernel_model(c).model, {132, 227 << 10, true}));
  step_test::expect_the_same_step(c, 2, gpu());
  step_test::expect_the_same_step(c, 18, gpu());
}
// With cuBLAS's kernels in it, which racecheck reports.
TEST_F(DrafterStep, sampled_picks_of_a_shard_that_fits_on_no_chip_are_those_of_the_cpu) {
  TWOSTEP_NEEDS_CUBLAS();
  Case sampled = step_test::long_case();  // of a rank that is no multiple of a step of the product
  sampled.config.vocab_size = 60008;
  ASSERT_TRUE(
      step_kernel_needed(StepKernel::kPicksStreamed, step_test::kernel_model(sampled).model, {132, 227 << 10, true}));
  step_test::expect_the_same_step(sampled, 2, gpu());
}
TEST_F(DrafterStep, the_end_of_the_positions_is_that_of_the_cpu) {
  TWOSTEP_NEEDS_CUBLAS();
  step_test::expect_the_same_step(step_test::tiny_case(), 1, gpu(), 256);
}
TEST_F(DrafterStep, what_no_row_sees_does_not_matter) {
  TWOSTEP_NEEDS_CUBLAS();
  step_test::expect_what_no_row_sees_not_to_matter(step_test::tiny_case(), gpu());
  step_test::expect_what_no_row_sees_not_to_matter(step_test::wide_case(), gpu());
}
TEST_F(DrafterStep, later_rows_do_not_spoil_earlier_ones) {
  TWOSTEP_NEEDS_CUBLAS();
  step_test::expect_later_rows_not_to_spoil_earlier_ones(step_test::switched_case(), gpu());
  step_test::expect_later_rows_not_to_spoil_earlier_ones(step_test::wide_causal_case(), gpu());
}
TEST_F(DrafterStep, bad_pages_and_bad_numbers_touch_one_request_alone) {
  TWOSTEP_NEEDS_CUBLAS();
  step_test::expect_bad_pages_and_bad_numbers_touch_one_request_alone(gpu());
}
TEST_F(DrafterStep, a_request_has_the_bits_that_it_has_alone) {
  TWOSTEP_NEEDS_CUBLAS();
  step_test::expect_the_bits_of_a_request_alone(gpu());
}
TEST_F(DrafterStep, taps_in_one_buffer_give_the_same_bits) {
  TWOSTEP_NEEDS_CUBLAS();
  step_test::expect_the_same_bits_of_taps_in_one_buffer(gpu());
}
TEST_F(DrafterVerify, verdicts_are_those_of_the_host) {
  TWOSTEP_NEEDS_CUBLAS();
  step_test::expect_the_verdicts_of_the_host(step_test::tiny_case(), 4, false, gpu());
  step_test::expect_the_verdicts_of_the_host(step_test::tiny_case(), 4, true, gpu());
  step_test::expect_the_verdicts_of_the_host(step_test::long_case(), 2, false, gpu());
}

// ---- Runs and graphs

// A whole step, verification of its own drafts included, on memory that stays.
class Step {
 public:
  Step(const Case& c, std::int64_t requests, const step_test::MakeSide& make)
      : pair_(c, requests, make, rows_of(c, requests)),
        side_(*pair_.other),
        requests_(requests),
        k_(c.limits.num_draft_tokens),
        emitted_(side_.copy(std::vector<std::int32_t>(static_cast<std::size_t>(requests * (k_ + 1)), -7))),
        accepted_(side_.copy(std::vector<std::int32_t>(static_cast<std::size_t>(requests), -7))) {
    std::vector<float> logits(static_cast<std::size_t>(requests * (k_ + 1) * c.config.vocab_size));
    std::normal_distribution<float> normal;
    for (float& logit : logits) logit = 2 * normal(pair_.in.random);
    const Device device = side_.space().device();
    const DraftOutput& out = side_.drafter().output();
    verify_.draft_ids = TensorView::dense(out.tokens.data, DType::kI32, {requests, k_}, device);
    verify_.logits =
        TensorView::dense(side_.copy(logits), DType::kF32, {requests, k_ + 1, c.config.vocab_size}, device);
    verify_.emitted = TensorView::dense(emitted_, DType::kI32, {requests, k_ + 1}, device);
    verify_.accepted = TensorView::dense(accepted_, DType::kI32, {requests}, device);
    verify_.one_hot = c.limits.mode == DraftMode::kGreedy;
    redraw(0);
  }

  // As many rows of each request as the largest ingest leaves it.
  static std::int64_t rows_of(const Case& c, std::int64_t requests) { return c.limits.max_ingest_rows / requests; }

  void redraw(std::uint64_t number) {
    in_.emplace(pair_.c, requests_, step_test::inputs_number() + number, rows_of(pair_.c, requests_));
    if (requests_ > 2 && number % 3 == 1) in_->request[2] = -1;  // padding comes and goes
    if (number % 7 == 3) in_->page_table[0] = -5;
  }
  void enqueue() {
    side_.run();
    side_.verify(verify_);
  }
  struct Left {
    Outcome step;
    std::vector<std::int32_t> emitted, accepted, steps;
  };
  // What `work` leaves of the inputs, from memory full of NaN.
  template <class Work>
  Left left_by(Work&& work) {
    side_.put(*in_);
    side_.poison_cache();
    side_.poison_output();
    work();
    return {side_.read(), side_.get<std::int32_t>(emitted_, requests_ * (k_ + 1)),
            side_.get<std::int32_t>(accepted_, requests_), side_.get<std::int32_t>(side_.steps(), requests_)};
  }

 private:
  Pair pair_;
  Side& side_;
  const std::int64_t requests_, k_;
  std::optional<Inputs> in_;
  std::int32_t *emitted_, *accepted_;
  VerifyBatch verify_;
};

void expect_same(const Step::Left& a, const Step::Left& b) {
  step_test::expect_same_bits(a.step, b.step);
  EXPECT_EQ(a.emitted, b.emitted);
  EXPECT_EQ(a.accepted, b.accepted);
  EXPECT_EQ(a.steps, b.steps);
}

// Eager launches are ordinary, those of a graph programmatic: equal bits also say that no kernel reads too early.
void expect_replays_to_be_eager(const Case& c, std::int64_t requests, const step_test::MakeSide& make, Stream stream,
                                int replays) {
  SCOPED_TRACE(testing::Message() << c.name << ", " << requests
                                  << " requests, TWOSTEP_TEST_SEED=" << step_test::inputs_number());
  Step step(c, requests, make);
  (void)step.left_by([&] { step.enqueue(); });  // the inputs are there
  const Graph graph(stream, [&] { step.enqueue(); });
  EXPECT_GT(graph.num_nodes(), 30u);
  EXPECT_GT(graph.num_programmatic_edges(), graph.num_nodes() / 2);
  for (int i = 0; i < replays && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(testing::Message() << "replay " << i);
    step.redraw(static_cast<std::uint64_t>(i));
    const auto eager = step.left_by([&] { step.enqueue(); });
    expect_same(step.left_by([&] { graph.launch(stream); }), eager);
  }
}
TEST_F(DrafterGraph, replays_with_other_data_are_the_eager_step) {
  TWOSTEP_NEEDS_CUBLAS();
  expect_replays_to_be_eager(step_test::tiny_case(), 1, gpu(), stream(), 1000);
  expect_replays_to_be_eager(step_test::tiny_case(), 4, gpu(), stream(), 1000);
  expect_replays_to_be_eager(step_test::switched_case(), 2, gpu(), stream(), 1000);
  expect_replays_to_be_eager(step_test::long_case(), 2, gpu(), stream(), 1000);
  expect_replays_to_be_eager(step_test::wide_case(), 3, gpu(), stream(), 1000);
}

TEST_F(DrafterGraph, replays_that_follow_each_other_at_once_repeat_their_bits) {
  TWOSTEP_NEEDS_CUBLAS();
  Step step(step_test::tiny_case(), 4, gpu());
  const auto eager = step.left_by([&] { step.enqueue(); });
  const Graph graph(stream(), [&] { step.enqueue(); });
  auto replayed = step.left_by([&] {
    for (int i = 0; i < 100; ++i) graph.launch(stream());
  });
  for (std::size_t r = 0; r < replayed.steps.size(); ++r) replayed.steps[r] -= 99;
  // Each verification counts a step, and with it all later draws are others: what is drafted greedily stays.
  EXPECT_EQ(replayed.steps, eager.steps);
  EXPECT_EQ(replayed.step.hidden, eager.step.hidden);
  EXPECT_EQ(replayed.step.tokens_of(1, 3), eager.step.tokens_of(1, 3));  // temperature 0
}

TEST_F(DrafterGraph, a_step_allocates_nothing) {
  TWOSTEP_NEEDS_CUBLAS();
  Step step(step_test::tiny_case(), 4, gpu());
  (void)step.left_by([&] { step.enqueue(); });
  std::size_t before = 0, after = 0, total = 0;
  TWOSTEP_CUDA_CHECK(cuMemGetInfo(&before, &total), "test");
  const std::uint64_t counted = allocations();
  for (int i = 0; i < 100; ++i) step.enqueue();
  const std::uint64_t more = allocations() - counted;
  test::synchronize();
  TWOSTEP_CUDA_CHECK(cuMemGetInfo(&after, &total), "test");
  EXPECT_EQ(more, 0u) << "on the host";
  EXPECT_EQ(after, before) << "on the device";
}

// ---- Whole loops

TEST_F(DrafterLoop, greedy_steps_say_what_the_target_alone_would) {
  TWOSTEP_NEEDS_CUBLAS();
  const DrafterWeights weights = step_test::synthetic_weights(synth_preset("tiny"));
  const MeasureDevice device(test::kDevice);
  for (const VerifyMethod method : {VerifyMethod::kStandard, VerifyMethod::kBlock}) {
    DraftLoopOptions options;
    options.requests = 3;
    options.draft_tokens = 3;
    options.context = 70;
    options.steps = 20;
    options.method = method;
    DraftLoop loop(weights, options, {}, cuda_machine(device));
    for (std::int64_t i = 0; i < options.steps; ++i) loop.step();
    EXPECT_TRUE(loop.is_targets_own());
    EXPECT_GE(loop.accept_length(), 1);
  }
}

TEST_F(DrafterLoop, a_sampled_step_is_timed_by_stage_and_in_a_graph) {
  TWOSTEP_NEEDS_CUBLAS();
  const DrafterWeights weights = step_test::synthetic_weights(synth_preset("tiny"));
  const MeasureDevice device(test::kDevice);
  DraftLoopOptions options;
  options.draft_tokens = 3;
  options.temperature = 0.8f;
  options.steps = 3;
  DraftLoop loop(weights, options, {}, cuda_machine(device));
  for (std::int64_t i = 0; i < options.steps; ++i) loop.step();
  for (const DraftStage& stage : draft_stages(loop, options))
    EXPECT_TRUE(stage.time.median > 0 || stage.stage == Stage::kTaps || stage.stage == Stage::kConfidence)
        << stage_name(stage.stage);
  Machine machine;
  const DraftGraphs graphs = time_draft_graphs(device, loop, options, machine, {1, 3});
  EXPECT_GT(graphs.draft.median, 0);
  EXPECT_GT(graphs.step.median, graphs.draft.median);
  EXPECT_GT(graphs.draft_limit.median, 0);
  EXPECT_GT(graphs.programmatic, graphs.launches / 2);
}

}  // namespace
}  // namespace twostep
