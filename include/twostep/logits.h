// DraftLogits: the drafter's LM head, gathered, cut, capped and scaled (spec: draft-gemm 10).
//
//   l[i, j]   = bf16( sum over k of hidden[i, k] * head[j, k] )       j < vocab
//   out[i, j] = bf16( scale * cap * tanh(l / cap) )                   FP32 between the two roundings
//
// Without cap the tanh is left out; without cap and with scale 1 the bits are those of DraftGemm.
#pragma once

#include <memory>
#include <optional>

#include "twostep/gemm.h"
#include "twostep/mailbox.h"

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
  std::int64_t vocab = 0;  // V_true: rows of the whole head without padding, which lies behind them. 0: all rows
  std::optional<float> soft_cap = {};
  float scale = 1;
  Options gemm = {};
  // Lent: the head is one rank's shard, all of one size, in the order of ranks, and each rank gets all logits. It must
  // outlive the DraftLogits. Null: the head is the whole one, and rows of padding are not read.
  Mailbox* mailbox = nullptr;
};

class DraftLogits {
 public:
  // A plan for one head [rows, K] on one device. The head is the caller's and is not copied. With a mailbox, memory for
  // its max_rows is taken where the logits cannot be gathered in out. Throws as DraftGemm and LogitsStage;
  // kInvalidArgument for a vocab below 0 or above the rows of the head, of all ranks together; kUnsupported for a shard
  // that the mailbox does not take.
  explicit DraftLogits(const TensorView& head, LogitsOptions options = {});

  // As DraftGemm::prepare.
  Kind prepare(int m, Stream stream = {}) { return gemm_.prepare(m, stream); }

  // out [M, vocab] BF16 from hidden [M, K] BF16, both as DraftGemm::run takes them; bytes behind column vocab of a
  // wider out are not touched. out is the caller's: nothing of it is kept. May be captured after prepare. Throws as
  // DraftGemm::run, before any launch. With a mailbox M is the same on all ranks, and a call with M = 0 is a round of
  // it, so that a rank that has rows is told; throws as Mailbox::all_gather too.
  void run(const TensorView& hidden, const TensorView& out, Stream stream = {});
  // The same with the head as it is now: a new address is rebound, another shape is kWeightChanged.
  void run(const TensorView& head, const TensorView& hidden, const TensorView& out, Stream stream = {});

  DraftGemm& gemm() { return gemm_; }  // its questions, counters, pin, seal
  const DraftGemm& gemm() const { return gemm_; }
  std::int64_t vocab() const { return vocab_; }

 private:
  void gather(const TensorView* head, const TensorView& hidden, const TensorView& out, Stream stream);

  std::int64_t rows_;   // of the head
  std::int64_t vocab_;  // of out
  DraftGemm gemm_;
  std::optional<LogitsStage> stage_;  // absent where there is nothing to cap or scale, and nothing to copy
  Mailbox* mailbox_;
  bool in_out_ = false;             // nothing to cut, cap or scale: gathered in out, where its layout allows
  std::shared_ptr<void> gathered_;  // [max_rows, ranks * rows] BF16, else
};

}  // namespace twostep
