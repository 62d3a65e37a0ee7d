#include "drafter/linears.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "drafter.linears";

void check_shard(const DrafterConfig& config, int tp, int rank) {
  if (tp < 1)
    fail(StatusCode::kInvalidArgument, kPlace, "tp", std::to_string(tp), "1 or more", "1 is one GPU with all weights");
  if (rank < 0 || rank >= tp)
    fail(StatusCode::kInvalidArgument, kPlace, "rank", std::to_string(rank), fmt::format("0 to {}", tp - 1),
         "ranks are counted from 0");
  const auto divides = [&](std::int64_t size, const char* field) {
    if (size % tp != 0)
      fail(StatusCode::kInvalidArgument, kPlace, "tp", std::to_string(tp),
           fmt::format("divisors of {} = {}", field, size), "shares are whole: choose another number of ranks");
  };
  divides(config.num_attention_heads, "num_attention_heads");
  divides(config.intermediate_size, "intermediate_size");
  divides(config.vocab_size / 8, "vocab_size / 8");
}

}  // namespace

std::string StepLinear::label() const { return layer < 0 ? name : fmt::format("layers.{}.{}", layer, name); }

std::int64_t context_shard_rows(const DrafterConfig& config, int tp) {
  return 8 * ((config.hidden_size + 8 * tp - 1) / (8 * tp));
}

std::vector<StepLinear> draft_linears(const DrafterConfig& c, int tp, int rank) {
  check_shard(c, tp, rank);
  std::vector<StepLinear> list;
  const auto add = [&](const char* name, int layer, std::int64_t k, RowsKind rows, std::vector<WeightPart> parts) {
    std::int64_t n = 0;
    for (const auto& part : parts) n += part.rows;
    list.push_back({name, layer, n, k, rows, std::move(parts)});
  };
  // Rank's share of `size` rows or columns, from the front.
  const auto share = [&](std::int64_t size) { return size / tp; };
  const auto row_shard = [&](std::string tensor, std::int64_t size) {
    return WeightPart{std::move(tensor), rank * share(size), share(size), 0};
  };
  const auto layer_tensor = [](std::int64_t layer, const char* name) {
    return fmt::format("layers.{}.{}.weight", layer, name);
  };

  const std::int64_t hidden = c.hidden_size;
  const std::int64_t context_rows = context_shard_rows(c, tp);
  const std::int64_t context_first = std::min(rank * context_rows, hidden);
  add("context_proj", -1, c.num_taps() * c.target_hidden_size, RowsKind::kContext,
      {{"context_proj.weight", context_first, std::min(context_rows, hidden - context_first), 0}});
  list.back().n = context_rows;

  const std::int64_t latent = c.kv_lora_rank + c.qk_rope_head_dim;
  std::vector<WeightPart> all_layers;
  for (std::int64_t i = 0; i < c.num_hidden_layers; ++i)
    all_layers.push_back({layer_tensor(i, "self_attn.kv_a_proj_with_mqa"), 0, latent, 0});
  add("context_kv_proj", -1, hidden, RowsKind::kContext, std::move(all_layers));

  const std::int64_t heads = c.num_attention_heads;
  for (int i = 0; i < c.num_hidden_layers; ++i) {
    add("qkv_a", i, hidden, RowsKind::kBlock,
        {{layer_tensor(i, "self_attn.q_a_proj"), 0, c.q_lora_rank, 0},
         {layer_tensor(i, "self_attn.kv_a_proj_with_mqa"), 0, latent, 0}});
    add("q_b", i, c.q_lora_rank, RowsKind::kBlock,
        {row_shard(layer_tensor(i, "self_attn.q_b_proj"), heads * (c.qk_nope_head_dim + c.qk_rope_head_dim))});
    if (c.mla_use_output_gate)
      add("g_proj", i, hidden, RowsKind::kBlock,
          {row_shard(layer_tensor(i, "self_attn.g_proj"), heads * c.v_head_dim)});
    const std::int64_t values = share(heads * c.v_head_dim);
    add("o_proj", i, values, RowsKind::kBlock, {{layer_tensor(i, "self_attn.o_proj"), 0, hidden, rank * values}});
    add("gate_up", i, hidden, RowsKind::kBlock,
        {row_shard(layer_tensor(i, "mlp.gate_proj"), c.intermediate_size),
         row_shard(layer_tensor(i, "mlp.up_proj"), c.intermediate_size)});
    const std::int64_t inner = share(c.intermediate_size);
    add("down", i, inner, RowsKind::kBlock, {{layer_tensor(i, "mlp.down_proj"), 0, hidden, rank * inner}});
  }
  add("lm_head", -1, hidden, RowsKind::kBlock, {row_shard("lm_head.weight", c.vocab_size)});
  return list;
}

void read_rows(const StepLinear& linear, const Checkpoint& checkpoint, std::int64_t first_row,
               std::span<std::uint16_t> out) {
  const std::int64_t end_row = first_row + static_cast<std::int64_t>(out.size()) / linear.k;
  const auto width = static_cast<std::size_t>(linear.k);
  std::uint16_t* to = out.data();
  std::int64_t row = first_row;
  std::int64_t part_first = 0;  // in the linear
  for (const auto& part : linear.parts) {
    const StoredTensor& tensor = checkpoint.tensor(part.tensor);
    for (; row < std::min(end_row, part_first + part.rows); ++row, to += width) {
      const std::int64_t source = (part.first_row + row - part_first) * tensor.shape[1] + part.first_column;
      std::memcpy(to, tensor.data + 2 * source, 2 * width);
    }
    part_first += part.rows;
  }
  std::fill(to, out.data() + out.size(), std::uint16_t{0});
}

void read_weight(const StepLinear& linear, const Checkpoint& checkpoint, std::span<std::uint16_t> out) {
  constexpr std::int64_t kRowsAtOnce = 64;
  // All names are looked up here, so that nothing throws inside the parallel loop.
  for (const auto& part : linear.parts) (void)checkpoint.tensor(part.tensor);
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t row = 0; row < linear.n; row += kRowsAtOnce) {
    const std::int64_t rows = std::min(kRowsAtOnce, linear.n - row);
    read_rows(linear, checkpoint, row,
              out.subspan(static_cast<std::size_t>(row * linear.k), static_cast<std::size_t>(rows * linear.k)));
  }
}

}  // namespace twostep
