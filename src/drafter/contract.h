// What DsparkDrafter accepts and, if not, why not (spec: drafter 1.4, 2.4, 2.5, 5). Pure: no driver call.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "drafter/step.h"

namespace twostep {

inline constexpr int kMaxRequests = 512;
inline constexpr std::int64_t kMaxIngestRows = std::int64_t{1} << 20;
inline constexpr std::size_t kMaxTaps = 128;

// Of prepare. Each throws one Error that lists every problem that it finds.
// Limits with their defaults resolved, request_counts ascending and each once.
DrafterLimits check_limits(const DrafterConfig& config, const DrafterLimits& limits);
void check_target(const DrafterConfig& config, const DrafterTarget& target);
CacheShape check_cache(const DrafterConfig& config, const std::vector<TensorView>& cache, Device device);
// A table that the target lends: [rows, H] BF16, any row stride.
void check_lent(const char* name, const TensorView& table, std::int64_t rows, const DrafterConfig& config,
                Device device);

// What the step calls are checked against.
struct StepContract {
  StepModel model;
  DrafterLimits limits;
  Device device;
};

// Of the step calls. Text is made only when they refuse.
Status check_batch(const StepContract& contract, const DraftBatch& batch, const char* place, StepBatch* step);
Status check_taps(const StepContract& contract, std::span<const TensorView> taps, std::int64_t rows, Tap* out);
// After check_batch, which checked `batch`. `own`: what `draft` left.
Status check_verify(const StepContract& contract, const DraftBatch& batch, const VerifyBatch& verify,
                    const DraftOutput& own, std::int64_t requests, VerifyStep* step);

// True where the taps are adjacent windows of one [T, taps * H_t] buffer, in order. Of one row no stride counts.
bool taps_are_one_buffer(std::span<const Tap> taps, std::int64_t rows, std::int64_t width);

}  // namespace twostep
