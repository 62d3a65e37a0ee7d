// DraftLogits: the drafter's LM head, cut, capped and scaled (spec: draft-gemm 10; one rank).
//
//   l[i, j]   = bf16( sum over k of hidden[i, k] * head[j, k] )       j < vocab: rows of padding are not read
//   out[i, j] = bf16( scale * cap * tanh(l / cap) )                   FP32 between the two roundings
//
// Without cap the tanh is left out; without cap and with scale 1 the bits are those of DraftGemm.
#pragma once

#include <memory>
#include <optional>

#include "twostep/gemm.h"

namespace twostep {

// The last stage alone: cut, cap, scale, in this order. For logits that another method made.
class LogitsStage {
 public:
  // Loads the kernel, on a GPU. soft_cap: finite and above 0; absent: no cap. scale: finite. Throws kInvalidArgument,
  // kUnavailable, kUnsupported (architecture), kCompileFailed, kDeviceError.
  explicit LogitsStage(Device device, std::optional<float> soft_cap = {}, float scale = 1);
  LogitsStage(LogitsStage&&) noexcept;
  LogitsStage& operator=(LogitsStage&&) noexcept;
  ~LogitsStage();

  // out [M, V] from the first V columns of logits [M, >= V], both BF16, columns contiguous, rows any pitch >= width.
  // out may be logits itself (the same address and row stride), else they must not meet. One launch; may be captured;
  // re-entrant. M = 0 or V = 0 does nothing. Throws kInvalidArgument, kUnsupported (dtype), kBadLayout, kWrongDevice,
  // kOverlap.
  void run(const TensorView& logits, const TensorView& out, Stream stream = {}) const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

struct LogitsOptions {
  std::int64_t vocab = 0;  // V_true: rows of the head without padding, which lies behind them. 0: all rows
  std::optional<float> soft_cap = {};
  float scale = 1;
  Options gemm = {};
};

class DraftLogits {
 public:
  // A plan for one head [rows, K] on one device. The head is the caller's and is not copied. Throws as DraftGemm and
  // LogitsStage, and kInvalidArgument for a vocab below 0 or above the rows of the head.
  explicit DraftLogits(const TensorView& head, LogitsOptions options = {});

  // As DraftGemm::prepare.
  Kind prepare(int m, Stream stream = {}) { return gemm_.prepare(m, stream); }

  // out [M, vocab] BF16 from hidden [M, K] BF16, both as DraftGemm::run takes them; bytes behind column vocab of a
  // wider out are not touched. out is the caller's: nothing of it is kept. May be captured after prepare. Throws as
  // DraftGemm::run, before any launch.
  void run(const TensorView& hidden, const TensorView& out, Stream stream = {});
  // The same with the head as it is now: a new address is rebound, another shape is kWeightChanged.
  void run(const TensorView& head, const TensorView& hidden, const TensorView& out, Stream stream = {});

  DraftGemm& gemm() { return gemm_; }  // its questions, counters, pin, seal
  const DraftGemm& gemm() const { return gemm_; }
  std::int64_t vocab() const { return gemm_.n(); }

 private:
  std::int64_t rows_;  // of the head
  DraftGemm gemm_;
  std::optional<LogitsStage> stage_;  // absent where there is nothing to cap or scale
};

}  // namespace twostep
