// Which sizes of a model have kernels, without a GPU. What the kernels do is run in tests/emulate.
#include <gtest/gtest.h>

#include "drafter/device_phases.h"
#include "io/synth.h"

namespace twostep {
namespace {

StepModel sizes(std::int64_t markov_rank, std::int64_t nope, std::int64_t kv_lora) {
  const DrafterConfig config = synth_preset("k3.1");
  DrafterLimits limits;
  limits.max_len = config.max_position_embeddings;
  StepModel model = step_model(config, limits, {8, 0});
  model.markov_rank = markov_rank;
  model.nope = nope;
  model.kv_lora = kv_lora;
  return model;
}

TEST(DrafterDevicePhases, sizes_past_the_shared_memory_of_a_kernel_are_refused_by_name) {
  EXPECT_TRUE(check_sizes(sizes(512, 128, 512)).ok());
  EXPECT_TRUE(check_sizes(sizes(2008, 768, 1536)).ok());
  for (const auto& [model, field] :
       {std::pair(sizes(2016, 768, 1536), "markov_rank"), std::pair(sizes(2008, 776, 1536), "qk_nope_head_dim"),
        std::pair(sizes(2008, 768, 1552), "kv_lora_rank"),
        std::pair(sizes(512, 128, 520), "kv_lora_rank, qk_rope_head_dim")}) {
    const Status status = check_sizes(model);
    EXPECT_EQ(status.code, StatusCode::kUnsupported);
    EXPECT_EQ(status.argument, field);
    EXPECT_THROW((void)step_kernel_request(StepKernel::kPick, {model}, "sm_90a"), Error);
  }
}

}  // namespace
}  // namespace twostep
