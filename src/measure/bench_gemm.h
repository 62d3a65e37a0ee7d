// DraftGemm against cuBLAS and the read limit, by the protocol of draft-gemm 12.1; and the search for a tactic.
#pragma once

#include <string>
#include <vector>

#include "measure/chain.h"
#include "measure/values_cuda.h"

namespace twostep {

// A tactic that was tried, best first in a ranking.
struct Candidate {
  Tactic tactic;
  double model_us = 0;
  Summary screening;    // few replays of an early chain
  Summary full;         // kept = 0 where the screening was enough
  std::string failure;  // compile, load or values; empty: it ran and was right
};

// One weight shape with rotating operands. All times are of one process and the same operands.
class GemmBench {
 public:
  // `device` must outlive the bench. Fills the weights. Throws kOutOfMemory, and kUnsupported where N or K is no
  // multiple of 8: weights and rows then lie too unevenly to follow each other in one buffer.
  // `options` are those of our plans; the baseline is cuBLAS in any case.
  GemmBench(const MeasureDevice& device, std::int64_t n, std::int64_t k, int max_rows, const Options& options = {});

  // Checks values, then times ours, cuBLAS and the limit in the early chain and, if asked, in the isolated one.
  // Values that break draft-gemm 1.4 are kInternal: a wrong kernel has no speed.
  BenchRow measure(int rows, bool isolated, Replays replays = {});

  // Tries the tactics of sweep_candidates for the bucket of `rows`: compiles them in parallel, screens each, and
  // times the best `finalists` in full. Ranked; failures last.
  std::vector<Candidate> sweep(int rows, int count, int finalists);

  // Keeps the GPU busy while its clocks are read.
  void describe_under_load(Machine& machine) const;

 private:
  void prepare(std::vector<DraftGemm>& plans, int rows, const Options& options) const;
  // Enqueues launch i of products that rotate; product(w, x, out, stream) runs on weight w.
  template <class Product>
  ChainTimer::Enqueue rotate(int rows, Product product) const;

  const MeasureDevice& device_;
  std::int64_t n_, k_;
  int max_rows_;
  Options options_;
  Ring ring_;
  CudaCase values_;  // its weight is the first of the ring
  DeviceBuffer more_weights_, x_, out_;
  std::vector<TensorView> weights_;
  std::vector<Piece> pieces_;
  std::vector<DraftGemm> ours_, cublas_;  // one for each weight
  ChainTimer timer_;
  Summary early_limit_, isolated_limit_;  // measured once
};

}  // namespace twostep
