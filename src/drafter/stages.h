// The stages of a draft step by name, with the bytes that each must read: what a measurement asks for.
#pragma once

#include <array>
#include <cstdint>

#include "drafter/step.h"

namespace twostep {

// In the order of a step. The same stage of all layers counts as one.
enum class Stage : std::uint8_t {
  kTaps,  // ingest
  kContextProj,
  kContextNorm,
  kContextKv,
  kContextCache,
  kQueries,  // draft
  kEmbed,
  kQkvA,
  kLatents,
  kQB,
  kAbsorb,
  kAttention,
  kGate,
  kValues,
  kOProj,
  kNorms,
  kGateUp,
  kActivation,
  kDown,
  kLmHead,
  kSampling,
  kConfidence,
  kVerify,
};
inline constexpr std::size_t kNumStages = 23;
const char* stage_name(Stage stage);

// Weights and cache rows that a stage must read: `requests` of `keys` rows each; all layers together. W2 counts
// `markov_reads` times (drafter 9.3: once where it fits on the chip, else at each draft).
std::int64_t stage_bytes(Stage stage, const StepModel& model, bool gate, std::int64_t requests, std::int64_t keys,
                         int markov_reads);

// Hears of the end of each stage, in the order of the calls.
class StageObserver {
 public:
  virtual ~StageObserver() = default;
  virtual void done(Stage stage, Stream stream) = 0;
};

// DsparkDrafter::prepare over phases that are given, on host memory; and its sampling once more, with the confidence of
// the new tokens: for tests.
DsparkDrafter prepare_on(std::unique_ptr<StepPhases> phases, const DrafterWeights& weights, const DrafterLimits& limits,
                         const DrafterTarget& target, const DrafterMemory& memory, DrafterShard shard);
void sample_again(DsparkDrafter& drafter, const DraftBatch& batch);

// Null: nobody. Not while a call is under way.
void observe_stages(DsparkDrafter& drafter, StageObserver* observer);
// What the last call left behind a stage, for tests: of kContextProj [rows, context width], of kValues, in the last
// layer, [rows, heads * v], both BF16. Rows of the largest call. Other stages: kUnsupported.
TensorView stage_result(const DsparkDrafter& drafter, Stage stage);
const StepModel& model_of(const DsparkDrafter& drafter);
int markov_reads_of(const DsparkDrafter& drafter);

}  // namespace twostep
