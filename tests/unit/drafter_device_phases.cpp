// Which sizes of a model have kernels, without a GPU. What the kernels do is run in tests/emulate.
#include <gtest/gtest.h>

#include "drafter/device_phases.h"
#include "io/synth.h"

namespace twostep {
namespace {

constexpr StepGpu kH200 = {132, 227 << 10, true};

StepModel sizes(std::int64_t nope, std::int64_t kv_lora, int ranks = 8) {
  const DrafterConfig config = synth_preset("k3.1");
  DrafterLimits limits;
  limits.max_len = config.max_position_embeddings;
  StepModel model = step_model(config, limits, {ranks, 0});
  model.nope = nope;
  model.kv_lora = kv_lora;
  return model;
}

TEST(DrafterDevicePhases, sizes_past_the_shared_memory_of_a_kernel_are_refused_by_name) {
  EXPECT_TRUE(check_sizes(sizes(128, 512)).ok());
  EXPECT_TRUE(check_sizes(sizes(240, 624)).ok());
  // On one GPU a CTA of absorb takes 128 columns, but of deeper heads 64.
  EXPECT_TRUE(check_sizes(sizes(128, 512, 1)).ok());
  EXPECT_TRUE(check_sizes(sizes(240, 624, 1)).ok());
  for (const auto& [model, field] :
       {std::pair(sizes(248, 624), "qk_nope_head_dim"), std::pair(sizes(248, 624, 1), "qk_nope_head_dim"),
        std::pair(sizes(240, 640), "kv_lora_rank"), std::pair(sizes(128, 520), "kv_lora_rank, qk_rope_head_dim")}) {
    const Status status = check_sizes(model);
    EXPECT_EQ(status.code, StatusCode::kUnsupported);
    EXPECT_EQ(status.argument, field);
    EXPECT_THROW((void)step_kernel_request(StepKernel::kPicksStreamed, {model}, "sm_90a"), Error);
  }
}

TEST(DrafterDevicePhases, the_markov_shard_is_read_once_where_it_fits_on_chip) {
  const StepModel of_eight = sizes(128, 512), of_four = sizes(128, 512, 4);
  EXPECT_TRUE(step_kernel_needed(StepKernel::kPicks, of_eight, kH200));
  EXPECT_FALSE(step_kernel_needed(StepKernel::kPicksStreamed, of_eight, kH200));
  EXPECT_FALSE(step_kernel_needed(StepKernel::kPicks, of_four, kH200));
  EXPECT_TRUE(step_kernel_needed(StepKernel::kPicksStreamed, of_four, kH200));
  EXPECT_FALSE(step_kernel_needed(StepKernel::kPicks, of_eight, {132, 99 << 10, false}));  // of sm_120
  EXPECT_TRUE(step_kernel_needed(StepKernel::kFinish, of_four, kH200));
}

TEST(DrafterDevicePhases, a_markov_rank_that_fits_nowhere_is_refused_by_name) {
  constexpr StepGpu kSm120 = {188, 99 << 10, false};
  for (const auto& [gpu, largest] : {std::pair(kH200, 1600), std::pair(kSm120, 688)}) {
    StepModel model = sizes(128, 512, 1);
    model.markov_rank = largest;
    EXPECT_TRUE(check_picks(model, gpu).ok());
    EXPECT_LE(step_kernel_smem(StepKernel::kPicksStreamed, model, gpu), gpu.smem_per_block);
    model.markov_rank = largest + 8;
    const Status status = check_picks(model, gpu);
    EXPECT_EQ(status.code, StatusCode::kUnsupported);
    EXPECT_EQ(status.argument, "markov_rank");
    EXPECT_NE(status.accepted.find(std::to_string(largest)), std::string::npos) << status.accepted;
    EXPECT_FALSE(step_kernel_needed(StepKernel::kPicksStreamed, model, gpu));
  }
}

TEST(DrafterDevicePhases, attention_is_that_of_sm90_where_its_tiles_fit) {
  const auto expect = [](const StepModel& model, const StepGpu& gpu, bool wgmma) {
    for (const StepKernel kernel : {StepKernel::kSm90Attend, StepKernel::kSm90AttendCausal, StepKernel::kSm90Merge})
      EXPECT_EQ(step_kernel_needed(kernel, model, gpu), wgmma);
    for (const StepKernel kernel : {StepKernel::kAttend, StepKernel::kAttendCausal, StepKernel::kMerge})
      EXPECT_EQ(step_kernel_needed(kernel, model, gpu), !wgmma);
  };
  expect(sizes(128, 512), kH200, true);
  expect(sizes(128, 512, 1), kH200, true);  // tiles of 64 queries
  expect(sizes(128, 256), kH200, true);
  expect(sizes(128, 448), kH200, false);
  expect(sizes(128, 640), kH200, false);
  expect(sizes(128, 512), {148, 227 << 10, false}, false);  // of sm_100
  expect(sizes(128, 512), {132, 200 << 10, true}, false);
  StepModel narrow = sizes(128, 512);
  narrow.rope = 32;
  expect(narrow, kH200, false);
}

}  // namespace
}  // namespace twostep
