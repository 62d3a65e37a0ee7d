// The phases of a draft step as launches of kernels/draft: which kernel, over which grid, with what. Pure: whoever
// lends the launcher runs them.
#pragma once

#include <cstdint>
#include <string>

#include "drafter/step.h"
#include "jit/compile.h"

namespace twostep {

enum class StepKernel : std::uint8_t {
  kGatherTaps,
  kNormContext,
  kBeginIngest,
  kCacheContext,
  kEmbed,
  kAddNorm,
  kLatents,
  kAbsorb,
  kAttend,
  kAttendCausal,
  kMerge,
  kSm90Attend,  // in place of the three before, where step_kernel_possible()
  kSm90AttendCausal,
  kSm90Merge,
  kValues,
  kActivate,
  kPicks,
  kPicksStreamed,  // where kPicks is not possible
  kFinish,
  kRowStatistics,
  kResidualMass,
  kDraw,
  kEmit,
};
inline constexpr int kNumStepKernels = 23;

// What the kernels are compiled for: the model as named constants.
struct StepKernelModel {
  StepModel model;
  bool gate = false;
  bool fc_norm = false;
};

// "struct Model { static constexpr int kHidden = 7168; .. };"
std::string step_model_text(const StepKernelModel& model);

// kUnsupported, with the field, where the kernels' tiles or the 48 kB of shared memory that a launch gets unasked do
// not allow a size of the model.
Status check_sizes(const StepModel& model);

// For "sm_90a". Throws kUnsupported where a size of the model has no kernels of ours.
CompileRequest step_kernel_request(StepKernel kernel, const StepKernelModel& model, const std::string& arch);

// What the choice of kernels depends on.
struct StepGpu {
  int sm_count = 0;
  std::int64_t smem_per_block = 0;  // bytes that a CTA may ask for
  bool wgmma = false;               // it has the instructions of sm_90a
};

// Dynamic shared memory of one CTA, bytes.
std::int64_t step_kernel_smem(StepKernel kernel, const StepModel& model, const StepGpu& gpu);

// The picks, kSm90Attend and its like: whether the GPU and the sizes of the model allow it. All others are.
bool step_kernel_possible(StepKernel kernel, const StepModel& model, const StepGpu& gpu);

// Possible, and no better one in its place: kPicks drafts where it may, else kPicksStreamed.
bool step_kernel_needed(StepKernel kernel, const StepModel& model, const StepGpu& gpu);

// kUnsupported, with the largest rank that the GPU takes, where no kernel of the Markov head is possible.
Status check_picks(const StepModel& model, const StepGpu& gpu);

// CTAs of a pick wait for each other: the grid must be resident as a whole.
inline bool step_kernel_cooperative(StepKernel kernel) {
  return kernel == StepKernel::kPicks || kernel == StepKernel::kPicksStreamed;
}

std::uint32_t step_kernel_threads(StepKernel kernel);  // of one CTA

struct Grid {
  std::int64_t x = 1, y = 1, z = 1;
};

class StepLauncher {
 public:
  virtual ~StepLauncher() = default;
  virtual StepGpu gpu() const = 0;
  virtual void* allocate(std::size_t bytes) = 0;  // zero; lives as long as the launcher
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual void load(const StepKernelModel& model) = 0;  // every kernel that is needed
  // `arguments` are addresses of the parameters. Allocates nothing.
  virtual void launch(StepKernel kernel, Grid grid, Stream stream, void** arguments) = 0;
};

std::unique_ptr<StepPhases> make_device_phases(std::unique_ptr<StepLauncher> launcher);

// Parameters as the kernels declare them.
struct DeviceCache {  // Cache of kernels/draft/row.cuh
  std::uint16_t* data;
  std::int64_t pages, page_rows, page_stride;
};
struct DeviceBest {  // Best of kernels/draft/random.cuh
  float score;
  std::int32_t token;
};
struct DeviceSampling {  // Sampling of kernels/draft/sample.cuh
  const std::uint16_t *base, *w1, *w2;
  const std::int32_t* ids;
  const std::int64_t* first_position;
  void* draft_logits;
  std::uint64_t* best;
  std::int32_t *tokens, *status;
};
struct DeviceRowStats {  // RowStats of kernels/draft/verify.cuh
  float largest;
  std::int32_t token;
  double sum;
};
struct DeviceDrawn {  // Drawn of kernels/draft/verify.cuh
  DeviceBest residual, target;
};
struct DeviceVerify {  // Verify of kernels/draft/verify.cuh
  const std::int32_t* draft_ids;
  std::int64_t draft_ids_stride;
  const void* logits;
  std::int64_t logits_request_stride, logits_row_stride;
  const void* draft_logits;
  std::int32_t* emitted;
  std::int64_t emitted_stride;
  std::int32_t* accepted;
  const std::int64_t* first_position;
  std::int32_t* status;
  DeviceRowStats* stats;
  double* masses;
  DeviceDrawn* drawn;
  std::int32_t logits_bf16, one_hot, block;
};

}  // namespace twostep
