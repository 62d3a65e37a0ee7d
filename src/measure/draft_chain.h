// The linears of a draft step as chains: what is timed as one, where each linear reads and writes, and the row that a
// chain becomes (spec: draft-gemm 7.5, 12.1; style 7.4, 7.5). Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "measure/row.h"

namespace twostep {

inline constexpr int kDraftTokens = 7;  // of each request (draft-gemm 0.2)

// R of R * 7 rows. Throws kInvalidArgument where `rows` is no such product.
std::int64_t draft_requests(int rows);

// One linear of a draft step, in the order of the step.
struct ChainLinear {
  std::string name;  // "layers.0.qkv_a"
  int layer = -1;    // -1: not of a layer
  std::int64_t n = 0;
  std::int64_t k = 0;
  int rows = 0;
  double bytes() const { return 2.0 * static_cast<double>(n) * static_cast<double>(k); }
};

// Neighbours of the step, by index.
struct LinearRange {
  std::size_t first = 0;
  std::size_t count = 0;
};
double bytes_of(std::span<const ChainLinear> step, const LinearRange& range);

// What is timed as one. A graph runs the units one after another, each on weights of its own, and a time is that of
// one unit.
struct DraftChain {
  std::string name;  // "layer", "five_layers", "step"
  std::vector<LinearRange> units;
};

// One layer, all layers and the whole step. The chain of one layer has every layer as a unit, so that its weights are
// as cold as in the step. Throws kInvalidArgument where there is no layer, or layers differ.
std::vector<DraftChain> draft_chains(std::span<const ChainLinear> step);

// Linear i reads the first k columns of buffer i and writes the first n of buffer i + 1: each waits for the one
// before. Columns that the one before does not write hold values of their own, as those of another rank would.
struct ChainBuffer {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};
std::vector<ChainBuffer> chain_buffers(std::span<const ChainLinear> step);  // one more than linears

// What served a linear.
struct LinearChoice {
  Kind kind = Kind::kWarp;
  std::string tactic, key;    // empty where no kernel of ours ran
  std::string why_code, why;  // empty for 'warp'
};

// The most that a five-layer early chain of K3.1 at TP8 with 7 rows may take over its read limit.
inline constexpr double kFiveLayerBar = 1.30;

struct DraftChainRow {
  std::string model;
  int tp = 1;
  int rank = 0;
  int rows = 0;
  std::string name;                  // of the DraftChain
  std::size_t units = 1;             // of one graph
  std::vector<ChainLinear> linears;  // of the first unit
  std::vector<LinearChoice> choices;
  double graph_bytes = 0;  // of all units
  Chain chain;             // "early" or "isolated"; microseconds of one unit
  Summary ordinary;        // the ordinary kernels of one unit, alone; subtracted from each time of `chain`
  std::size_t ordinary_kernels = 0;
  std::string baseline;  // "cuBLASLt 13.0.2"; empty: none
  ValueErrors values;    // of every linear of the step, in the early chain

  double bytes() const;
  double over_limit() const { return chain.ours.median / chain.limit.median; }
  const char* verdict() const;  // "win", "tie", "loss", "none": against the baseline
  std::optional<double> bar() const;
  const char* bar_verdict() const;  // "holds", "misses"; "none" where no bar is named
};

std::string json_line(const DraftChainRow& row, const Machine& machine);

}  // namespace twostep
