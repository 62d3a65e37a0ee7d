// DraftGemm and single tactics against cuBLAS and the read limit, by the protocol of draft-gemm 12.1.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "gemm/cublas.h"
#include "measure/chain.h"
#include "measure/values_cuda.h"

namespace twostep {

// One weight shape. Weights and outputs rotate past L2; x is one buffer, in L2 as the kernel before would leave it. All
// times are of one process and the same operands.
class GemmBench {
 public:
  // `device` must outlive the bench. Fills the weights. Throws kOutOfMemory, and kUnsupported where N or K is no
  // multiple of 8: weights and rows then lie too unevenly to follow each other in one buffer.
  // `options` are those of the plans that `measure` makes; the baseline is cuBLAS in any case.
  GemmBench(const MeasureDevice& device, std::int64_t n, std::int64_t k, int max_rows, const Options& options = {});

  // Checks values, then times ours, cuBLAS and the limit in the early chain and, if asked, in the isolated one.
  // Values that break draft-gemm 1.4 are kInternal: a wrong kernel has no speed.
  BenchRow measure(int rows, bool isolated, Replays replays = {});

  // One time of the early chain: of a tactic, whose values are checked first, of cuBLAS, and of the limit, which is
  // measured once and serves all row counts.
  Summary tactic(const Tactic& tactic, int rows, Replays replays = {});
  Summary cublas(int rows, Replays replays = {});
  Summary limit(Replays replays = {});

  std::int64_t n() const { return n_; }
  std::int64_t k() const { return k_; }

  // Keeps the GPU busy while its clocks are read.
  void describe_under_load(Machine& machine) const;

 private:
  // Launches of products that rotate; product(w, x, out, stream) runs on weight w.
  template <class Product>
  ChainTimer::Enqueue rotate(int rows, Product product) const;
  ChainTimer::Enqueue rotate_cublas(int rows);

  const MeasureDevice& device_;
  std::int64_t n_, k_;
  int max_rows_;
  Options options_;
  Ring ring_;
  CudaCase values_;  // its weight is the first of the ring
  DeviceBuffer more_weights_, x_, out_;
  std::vector<Weight> weights_;
  std::vector<Piece> pieces_;
  std::vector<DraftGemm> ours_;       // a plan for each weight
  std::optional<CublasGemm> cublas_;  // one algorithm for all weights
  Counters counters_;                 // of cublas_
  ChainTimer timer_;
  Summary early_limit_, isolated_limit_;  // measured once
};

}  // namespace twostep
