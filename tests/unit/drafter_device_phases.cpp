// Which sizes of a model have kernels, without a GPU. What the kernels do is run in tests/emulate.
#include <gtest/gtest.h>

#include "drafter/device_phases.h"
#include "io/synth.h"

namespace twostep {
namespace {

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
  for (const auto& [model, field] :
       {std::pair(sizes(248, 624), "qk_nope_head_dim"), std::pair(sizes(240, 640), "kv_lora_rank"),
        std::pair(sizes(128, 520), "kv_lora_rank, qk_rope_head_dim")}) {
    const Status status = check_sizes(model);
    EXPECT_EQ(status.code, StatusCode::kUnsupported);
    EXPECT_EQ(status.argument, field);
    EXPECT_THROW((void)step_kernel_request(StepKernel::kPick, {model}, "sm_90a"), Error);
  }
}

TEST(DrafterDevicePhases, drafts_are_picked_in_one_launch_where_the_markov_shard_fits_on_chip) {
  constexpr int kSms = 132, kSmem = 227 << 10;
  const StepModel of_eight = sizes(128, 512), of_four = sizes(128, 512, 4);
  EXPECT_TRUE(step_kernel_needed(StepKernel::kPicks, of_eight, kSms, kSmem));
  EXPECT_FALSE(step_kernel_needed(StepKernel::kPick, of_eight, kSms, kSmem));
  EXPECT_FALSE(step_kernel_needed(StepKernel::kPicks, of_four, kSms, kSmem));
  EXPECT_TRUE(step_kernel_needed(StepKernel::kPick, of_four, kSms, kSmem));
  EXPECT_FALSE(step_kernel_needed(StepKernel::kPicks, of_eight, kSms, 99 << 10));  // of sm_120
  EXPECT_TRUE(step_kernel_needed(StepKernel::kFinish, of_four, kSms, kSmem));
}

}  // namespace
}  // namespace twostep
