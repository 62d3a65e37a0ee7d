// The linears of one draft step on one rank: shapes, rows, and where their weights are in the checkpoint
// (spec: drafter 3.3, draft-gemm 13). kv_b is absorbed and served elsewhere.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "io/cases.h"
#include "io/checkpoint.h"

namespace twostep {

// A rectangle of a stored tensor.
struct WeightPart {
  std::string tensor;
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
  std::int64_t first_column = 0;  // the width is the linear's k
};

struct StepLinear {
  std::string name;  // as the cases spell it: "qkv_a"
  int layer = -1;    // -1: not of a layer
  std::int64_t n = 0;
  std::int64_t k = 0;
  RowsKind rows = RowsKind::kBlock;
  std::vector<WeightPart> parts;  // stacked from row 0; rows that no part reaches are zero

  std::string label() const;  // "layers.0.qkv_a", "lm_head"
  std::int64_t weight_bytes() const { return 2 * n * k; }
};

// In the order of a step: context_proj, context_kv_proj, then per layer qkv_a, q_b, g_proj (where on), o_proj,
// gate_up, down, then lm_head. qkv_a and context_kv_proj are whole on every rank. Throws kInvalidArgument where
// tp does not divide the heads, the intermediate size or vocab_size / 8, or rank is not below tp.
std::vector<StepLinear> draft_linears(const DrafterConfig& config, int tp, int rank);

// Rows of context_proj on each of tp ranks: multiples of 8, so that the last ranks may have rows of zeros.
std::int64_t context_shard_rows(const DrafterConfig& config, int tp);

// Copies rows [first_row, first_row + out.size() / k) of the linear's weight. Only these are read from the files.
void read_rows(const StepLinear& linear, const Checkpoint& checkpoint, std::int64_t first_row,
               std::span<std::uint16_t> out);

// The whole slice [n, k], packed; in parallel.
void read_weight(const StepLinear& linear, const Checkpoint& checkpoint, std::span<std::uint16_t> out);

}  // namespace twostep
