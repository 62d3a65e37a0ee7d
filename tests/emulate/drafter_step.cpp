// The GPU side of the draft step without a GPU: the launches of device_phases.cpp with the kernels of kernels/draft in
// the emulator, against the CPU backend.
#include <emulated_models.h>

#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "draft/attention.cuh"
#include "draft/block.cuh"
#include "draft/context.cuh"
#include "draft/sample.cuh"
#include "draft/sm90_attention.cuh"
#include "draft/verify.cuh"
#include "tests/drafter/step.h"
#include "tests/emulate/emulator.h"

namespace twostep {
namespace {

namespace d = draft;
using step_test::Case;

static_assert(sizeof(d::Batch) == sizeof(StepBatch) && sizeof(d::Cache) == sizeof(DeviceCache));
static_assert(sizeof(d::Sampling) == sizeof(DeviceSampling) && sizeof(d::Verify) == sizeof(DeviceVerify));
static_assert(sizeof(d::Best) == sizeof(DeviceBest) && sizeof(d::RowStats) == sizeof(DeviceRowStats));
static_assert(sizeof(d::Drawn) == sizeof(DeviceDrawn));

template <class Model>
class EmulatedLauncher final : public StepLauncher {
 public:
  explicit EmulatedLauncher(const Case& c)
      : gpu_(step_test::gpu_of(c)), text_(step_model_text(step_test::kernel_model(c))) {}

  StepGpu gpu() const override { return gpu_; }
  void* allocate(std::size_t bytes) override { return std::memset(space_->allocate(bytes), 0, bytes); }
  void upload(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void load(const StepKernelModel& model) override {
    ASSERT_EQ(step_model_text(model), text_) << "compiled for another model";
    model_ = model.model;
    ASSERT_EQ(smem_of(StepKernel::kAttend), sizeof(d::AttendShared<Model>));
    const auto of_rings = smem_of(StepKernel::kPicksStreamed) - sizeof(d::StreamShared<Model>);
    constexpr std::size_t kStage = d::kStreamWarps * 2 * d::Stream<Model>::kTileElements;
    ASSERT_EQ(of_rings % kStage, 0u);
    ASSERT_GE(of_rings, kStage);
    ASSERT_LE(of_rings, d::kMaxStages * kStage);
    if constexpr (kWide) {
      ASSERT_EQ(smem_of(StepKernel::kSm90Attend), sizeof(d::Sm90AttendShared<Model>));
    }
  }

  void launch(StepKernel kernel, Grid grid, Stream, void** arguments) override {
    const emulate::Dim dim{static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z)};
    const auto body = [&] { call(kernel, arguments); };
    if (step_kernel_cooperative(kernel))
      emulate::run_streams({{{dim, step_kernel_threads(kernel), body, false, smem_of(kernel)}}},
                           step_test::inputs_number());
    else emulate::run(dim, step_kernel_threads(kernel), body, smem_of(kernel));
  }

 private:
  std::size_t smem_of(StepKernel kernel) const {
    return static_cast<std::size_t>(step_kernel_smem(kernel, model_, gpu_));
  }

  // Parameter i, as the type that the kernel's parameter has.
  struct Parameter {
    void* at;
    template <class T>
    operator T() const {
      return *static_cast<T*>(at);
    }
  };
  template <class T>
  static const T& as(void* at) {
    return *static_cast<const T*>(at);
  }

  static constexpr bool kWide = Model::kKvLora % 128 == 0 && Model::kRope % 64 == 0;

  void call(StepKernel kernel, void** a) {
    const auto p = [&](int i) { return Parameter{a[i]}; };
    switch (kernel) {
      case StepKernel::kGatherTaps: return d::gather_taps<Model>(as<d::TapList<Model::kTaps>>(a[0]), p(1), p(2));
      case StepKernel::kNormContext: return d::norm_context<Model>(p(0), p(1), p(2), p(3));
      case StepKernel::kBeginIngest: return d::begin_ingest(as<d::Batch>(a[0]), p(1));
      case StepKernel::kCacheContext:
        return d::cache_context<Model>(as<d::Batch>(a[0]), p(1), p(2), p(3), as<d::Cache>(a[4]), p(5), p(6));
      case StepKernel::kEmbed:
        return d::embed<Model>(as<d::Batch>(a[0]), as<d::Cache>(a[1]), p(2), p(3), p(4), p(5), p(6), p(7), p(8), p(9),
                               p(10), p(11), p(12), p(13));
      case StepKernel::kAddNorm: return d::add_norm<Model>(p(0), p(1), p(2), p(3));
      case StepKernel::kLatents:
        return d::latents<Model>(as<d::Batch>(a[0]), p(1), p(2), p(3), p(4), p(5), as<d::Cache>(a[6]), p(7));
      case StepKernel::kAbsorb: return d::absorb<Model>(p(0), p(1), p(2), p(3), p(4), p(5));
      case StepKernel::kAttend:
        return d::attend<Model, false>(as<d::Batch>(a[0]), p(1), p(2), p(3), as<d::Cache>(a[4]), p(5), p(6), p(7), p(8),
                                       p(9), emulate::cta_memory());
      case StepKernel::kAttendCausal:
        return d::attend<Model, true>(as<d::Batch>(a[0]), p(1), p(2), p(3), as<d::Cache>(a[4]), p(5), p(6), p(7), p(8),
                                      p(9), emulate::cta_memory());
      case StepKernel::kMerge: return d::merge<Model>(static_cast<const float*>(p(0)), p(1), p(2), p(3), p(4), p(5));
      case StepKernel::kSm90Attend:
        if constexpr (kWide)
          d::sm90_attend<Model, false>(as<d::Batch>(a[0]), p(1), p(2), p(3), as<d::Cache>(a[4]), p(5), p(6), p(7), p(8),
                                       p(9), emulate::cta_memory());
        return;
      case StepKernel::kSm90AttendCausal:
        if constexpr (kWide)
          d::sm90_attend<Model, true>(as<d::Batch>(a[0]), p(1), p(2), p(3), as<d::Cache>(a[4]), p(5), p(6), p(7), p(8),
                                      p(9), emulate::cta_memory());
        return;
      case StepKernel::kSm90Merge:
        return d::merge<Model>(static_cast<const unsigned short*>(p(0)), p(1), p(2), p(3), p(4), p(5));
      case StepKernel::kValues: return d::values<Model>(p(0), p(1), p(2), p(3), p(4));
      case StepKernel::kActivate: return d::activate<Model>(p(0), p(1));
      case StepKernel::kPicks: return d::picks<Model>(as<d::Batch>(a[0]), as<d::Sampling>(a[1]), emulate::cta_memory());
      case StepKernel::kPicksStreamed:
        return d::picks_streamed<Model>(as<d::Batch>(a[0]), as<d::Sampling>(a[1]), p(2), emulate::cta_memory());
      case StepKernel::kFinish:
        return d::finish<Model>(as<d::Batch>(a[0]), as<d::Sampling>(a[1]), p(2), p(3), p(4), p(5), p(6), p(7));
      case StepKernel::kRowStatistics: return d::row_statistics<Model>(as<d::Batch>(a[0]), as<d::Verify>(a[1]));
      case StepKernel::kResidualMass: return d::residual_mass<Model>(as<d::Batch>(a[0]), as<d::Verify>(a[1]));
      case StepKernel::kDraw: return d::draw<Model>(as<d::Batch>(a[0]), as<d::Verify>(a[1]));
      case StepKernel::kEmit: return d::emit<Model>(as<d::Batch>(a[0]), as<d::Verify>(a[1]));
    }
  }

  const StepGpu gpu_;
  const std::string text_;
  const std::unique_ptr<step_test::Space> space_ = step_test::host_space();
  StepModel model_;
};

template <class Model>
std::unique_ptr<step_test::Side> emulated(const Case& c, const DrafterWeights& weights, std::int64_t requests,
                                          std::optional<std::int64_t> spoilt) {
  return std::make_unique<step_test::Side>(c, weights, requests, step_test::host_space(),
                                           make_device_phases(std::make_unique<EmulatedLauncher<Model>>(c)), spoilt);
}
constexpr auto kTiny = emulated<Tiny::Model>;
constexpr auto kSwitched = emulated<Switched::Model>;
constexpr auto kLong = emulated<Long::Model>;
constexpr auto kWide = emulated<Wide::Model>;
constexpr auto kWideCausal = emulated<WideCausal::Model>;
constexpr auto kManyHeads = emulated<ManyHeads::Model>;

TEST(EmulatedStep, tiny) {
  step_test::expect_the_same_step(step_test::tiny_case(), 1, kTiny);
  step_test::expect_the_same_step(step_test::tiny_case(), 4, kTiny);
}
TEST(EmulatedStep, switched) {
  step_test::expect_the_same_step(step_test::switched_case(), 2, kSwitched);
  step_test::expect_the_same_step(step_test::switched_case(), 18, kSwitched);
}
TEST(EmulatedStep, long_blocks) {
  step_test::expect_the_same_step(step_test::long_case(), 1, kLong);
  step_test::expect_the_same_step(step_test::long_case(), 2, kLong);
}
TEST(EmulatedStep, wide) {
  step_test::expect_the_same_step(step_test::wide_case(), 1, kWide);
  step_test::expect_the_same_step(step_test::wide_case(), 3, kWide);
}
TEST(EmulatedStep, wide_causal) {
  step_test::expect_the_same_step(step_test::wide_causal_case(), 2, kWideCausal);
  step_test::expect_the_same_step(step_test::wide_causal_case(), 18, kWideCausal);
}
TEST(EmulatedStep, many_heads) {
  step_test::expect_the_same_step(step_test::many_heads_case(), 1, kManyHeads);
  step_test::expect_the_same_step(step_test::many_heads_case(), 2, kManyHeads);
}
// The merge by itself, against FP64: one part of a warp, several in one round of loads and in more, warps without a
// part, empty parts that hold NaN, and CTAs without a row.
template <class Model, class Sum>
void expect_merged(int splits, int warps_log2, std::mt19937_64& random) {
  SCOPED_TRACE(testing::Message() << splits << " parts, " << (1 << warps_log2) << " warps");
  constexpr std::size_t kRows = Model::kK * Model::kHeads, kColumns = Model::kKvLora, kRequests = 2;
  constexpr bool kScaled = sizeof(Sum) == 2;
  const auto parts = kRequests * static_cast<std::size_t>(splits) * kRows;
  std::uniform_real_distribution<float> bases(-12, 12), totals(1, 8), scales(0.1f, 10), values(-2, 2);
  std::vector<d::PartStats> stats(parts);
  std::vector<Sum> sums(parts * kColumns);
  for (std::size_t i = 0; i < parts; ++i) {
    const bool empty = i / kRows % static_cast<std::size_t>(splits) != 0 && random() % 4 == 0;
    stats[i].base = empty ? -INFINITY : bases(random);
    stats[i].total = empty ? 0 : totals(random);
    for (float& scale : stats[i].scale) scale = scales(random);
    for (std::size_t c = 0; c < kColumns; ++c)
      if constexpr (kScaled)  // of FP16: a sign, an exponent of -5 to 0, ten bits
        sums[i * kColumns + c] =
            static_cast<Sum>(empty ? 0x7e00 : random() % 2 << 15 | (10 + random() % 6) << 10 | random() % 1024);
      else sums[i * kColumns + c] = empty ? NAN : values(random);
  }
  std::vector<unsigned short> out(kRequests * kRows * kColumns, 0x7fc0);
  constexpr std::size_t kUnits = kRequests * kRows * ((kColumns + 255) / 256);
  const auto ctas = static_cast<unsigned>(((kUnits << warps_log2) + 7) / 8 + 1);
  emulate::run({ctas}, 256, [&] {
    d::merge<Model>(std::as_const(sums).data(), stats.data(), splits, kRequests, warps_log2, out.data());
  });
  double error = 0, norm = 0;
  for (std::size_t row = 0; row < kRequests * kRows; ++row)
    for (std::size_t c = 0; c < kColumns; ++c) {
      double sum = 0, total = 0;
      for (std::size_t s = 0; s < static_cast<std::size_t>(splits); ++s) {
        const std::size_t i = (row / kRows * static_cast<std::size_t>(splits) + s) * kRows + row % kRows;
        if (stats[i].total == 0) continue;
        const double weight = std::exp2(double(stats[i].base));
        total += weight * stats[i].total;
        if constexpr (kScaled)
          sum += weight * stats[i].scale[2 * c / kColumns * 4 + c % 64 / 16] * f16_to_float(sums[i * kColumns + c]);
        else sum += weight * sums[i * kColumns + c];
      }
      const double difference = sum / total - bf16_to_float(out[row * kColumns + c]);
      error += difference * difference, norm += sum / total * (sum / total);
    }
  EXPECT_LT(std::sqrt(error / norm), 0x1p-8);  // of one rounding to BF16, and NaN is not less
}
TEST(EmulatedStep, parts_are_merged_in_one_round_and_in_several) {
  std::mt19937_64 random(step_test::inputs_number());
  for (const int splits : {2, 9, 10, 33, 72, 73, 256})
    for (const int warps_log2 : {0, 1, 3}) {
      expect_merged<Wide::Model, unsigned short>(splits, warps_log2, random);
      expect_merged<Tiny::Model, float>(splits, warps_log2, random);
    }
}
TEST(EmulatedStep, bad_pages_and_bad_numbers_touch_one_request_alone) {
  step_test::expect_bad_pages_and_bad_numbers_touch_one_request_alone(kTiny);
}
TEST(EmulatedStep, what_no_row_sees_does_not_matter) {
  step_test::expect_what_no_row_sees_not_to_matter(step_test::tiny_case(), kTiny);
  step_test::expect_what_no_row_sees_not_to_matter(step_test::wide_case(), kWide);
}
TEST(EmulatedStep, later_rows_do_not_spoil_earlier_ones) {
  step_test::expect_later_rows_not_to_spoil_earlier_ones(step_test::switched_case(), kSwitched);
  step_test::expect_later_rows_not_to_spoil_earlier_ones(step_test::wide_causal_case(), kWideCausal);
}
TEST(EmulatedStep, a_request_has_the_bits_that_it_has_alone) { step_test::expect_the_bits_of_a_request_alone(kTiny); }
TEST(EmulatedStep, taps_in_one_buffer_give_the_same_bits) {
  step_test::expect_the_same_bits_of_taps_in_one_buffer(kTiny);
}
TEST(EmulatedStep, the_end_of_the_positions_is_that_of_the_cpu) {
  step_test::expect_the_same_step(step_test::tiny_case(), 1, kTiny, 256);
}
// On three SMs the longest case's vocabulary fits on chip, in chunks; on one it does not.
TEST(EmulatedStep, picks_of_rows_that_stay_are_those_of_rows_that_pass) {
  step_test::expect_the_same_bits_of_a_smaller_gpu(step_test::tiny_case(), 4, kTiny);
  step_test::expect_the_same_bits_of_a_smaller_gpu(step_test::switched_case(), 18, kSwitched);
  Case c = step_test::long_case();
  c.sms = 3;
  step_test::expect_the_same_bits_of_a_smaller_gpu(c, 2, kLong);
}
TEST(EmulatedVerify, verdicts_are_those_of_the_host) {
  step_test::expect_the_verdicts_of_the_host(step_test::tiny_case(), 4, false, kTiny);
  step_test::expect_the_verdicts_of_the_host(step_test::tiny_case(), 4, true, kTiny);
  step_test::expect_the_verdicts_of_the_host(step_test::long_case(), 2, false, kLong);
}

TEST(Emulator, threads_that_wait_for_each_other_in_vain_are_told) {
  EXPECT_THROW(emulate::run({1, 1, 1}, 64,
                            [] {
                              if (emulate::thread.x % 32 < 16) emulate::warp_barrier();
                              else emulate::cta_barrier();
                            }),
               std::logic_error);
}

}  // namespace
}  // namespace twostep
