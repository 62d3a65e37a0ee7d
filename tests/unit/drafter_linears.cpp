#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "drafter/linears.h"
#include "io/synth.h"

namespace twostep {
namespace {

using Matrix = std::vector<std::vector<std::uint16_t>>;

// A checkpoint in memory, filled by the synthetic formula.
struct Memory {
  explicit Memory(DrafterConfig c) : config(std::move(c)) {
    for (const auto& tensor : expected_tensors(config, false)) add(drafter, tensor);
    for (const auto& tensor : target_tensors(config)) add(target, tensor);
  }
  void add(TensorSet& set, const ExpectedTensor& tensor) {
    std::size_t count = 1;
    for (const std::int64_t size : tensor.shape) count *= static_cast<std::size_t>(size);
    std::vector<std::uint16_t>& data = values[tensor.name];
    data.resize(count);
    fill(tensor.name, 9, 0, value_kind(tensor.name, tensor.shape), tensor.shape.back(), data);
    set.tensors.emplace(tensor.name, StoredTensor{tensor.name, "BF16", tensor.shape,
                                                  reinterpret_cast<const std::byte*>(data.data()), 2 * count, 0, "m"});
  }
  Checkpoint checkpoint() const { return Checkpoint(config, drafter, target, "memory"); }
  Matrix matrix(const std::string& name, std::int64_t rows, std::int64_t columns) const {
    const auto& data = values.at(name);
    EXPECT_EQ(data.size(), static_cast<std::size_t>(rows * columns)) << name;
    Matrix out;
    for (std::int64_t r = 0; r < rows; ++r)
      out.emplace_back(data.begin() + r * columns, data.begin() + (r + 1) * columns);
    return out;
  }

  DrafterConfig config;
  std::map<std::string, std::vector<std::uint16_t>> values;
  TensorSet drafter;
  TensorSet target;
};

Matrix rows_of_matrix(const Matrix& m, std::int64_t first, std::int64_t count) {
  return Matrix(m.begin() + first, m.begin() + first + count);
}
Matrix columns_of(const Matrix& m, std::int64_t first, std::int64_t count) {
  Matrix out;
  for (const auto& row : m) out.emplace_back(row.begin() + first, row.begin() + first + count);
  return out;
}
Matrix stacked(Matrix upper, const Matrix& lower) {
  upper.insert(upper.end(), lower.begin(), lower.end());
  return upper;
}

// What the linears of rank must hold, written from the chapter's words with whole matrices.
std::map<std::string, Matrix> expected_weights(const Memory& m, int tp, int rank) {
  std::map<std::string, Matrix> want;
  const std::int64_t H = 256, I = 512, V = 512, heads = 4, latent = 64 + 16;
  Matrix context = m.matrix("context_proj.weight", H, 2 * H);
  const std::int64_t context_rows = 8 * ((H + 8 * tp - 1) / (8 * tp));
  context.resize(static_cast<std::size_t>(context_rows * tp), std::vector<std::uint16_t>(2 * H, 0));
  want["context_proj"] = rows_of_matrix(context, rank * context_rows, context_rows);
  const auto kv_a = [&](int i) {
    return m.matrix("layers." + std::to_string(i) + ".self_attn.kv_a_proj_with_mqa.weight", latent, H);
  };
  want["context_kv_proj"] = stacked(kv_a(0), kv_a(1));
  for (int i = 0; i < 2; ++i) {
    const std::string layer = "layers." + std::to_string(i) + ".";
    const std::int64_t q_rows = heads / tp * (32 + 16), v_width = heads / tp * 32, inner = I / tp;
    want[layer + "qkv_a"] = stacked(m.matrix(layer + "self_attn.q_a_proj.weight", 128, H), kv_a(i));
    want[layer + "q_b"] =
        rows_of_matrix(m.matrix(layer + "self_attn.q_b_proj.weight", heads * 48, 128), rank * q_rows, q_rows);
    want[layer + "g_proj"] =
        rows_of_matrix(m.matrix(layer + "self_attn.g_proj.weight", heads * 32, H), rank * v_width, v_width);
    want[layer + "o_proj"] =
        columns_of(m.matrix(layer + "self_attn.o_proj.weight", H, heads * 32), rank * v_width, v_width);
    want[layer + "gate_up"] =
        stacked(rows_of_matrix(m.matrix(layer + "mlp.gate_proj.weight", I, H), rank * inner, inner),
                rows_of_matrix(m.matrix(layer + "mlp.up_proj.weight", I, H), rank * inner, inner));
    want[layer + "down"] = columns_of(m.matrix(layer + "mlp.down_proj.weight", H, I), rank * inner, inner);
  }
  want["lm_head"] = rows_of_matrix(m.matrix("lm_head.weight", V, H), rank * (V / tp), V / tp);
  return want;
}

TEST(drafter_linears, each_slice_equals_the_slice_of_the_whole) {
  DrafterConfig config = synth_preset("tiny");
  config.mla_use_output_gate = true;
  const Memory memory(config);
  const Checkpoint checkpoint = memory.checkpoint();
  for (const int tp : {1, 2, 4})
    for (int rank = 0; rank < tp; ++rank) {
      const auto want = expected_weights(memory, tp, rank);
      const auto linears = draft_linears(config, tp, rank);
      EXPECT_EQ(linears.size(), want.size());
      for (const auto& linear : linears) {
        std::vector<std::uint16_t> got(static_cast<std::size_t>(linear.n * linear.k), 0x7fc0);
        read_weight(linear, checkpoint, got);
        std::vector<std::uint16_t> flat;
        for (const auto& row : want.at(linear.label())) flat.insert(flat.end(), row.begin(), row.end());
        EXPECT_TRUE(got == flat) << linear.label() << " tp " << tp << " rank " << rank;
        std::vector<std::uint16_t> row(static_cast<std::size_t>(2 * linear.k), 0x7fc0);
        read_rows(linear, checkpoint, linear.n - 2, row);
        EXPECT_TRUE(std::equal(row.begin(), row.end(), flat.end() - 2 * linear.k)) << linear.label();
      }
    }
}

TEST(drafter_linears, rows_of_the_context_split_that_no_rank_has_are_zero) {
  // 192 rows on 5 ranks: 40 each, and 32 on the last.
  DrafterConfig config = synth_preset("tiny");
  config.hidden_size = config.target_hidden_size = 192;
  config.num_attention_heads = 5;
  config.intermediate_size = 320;
  config.vocab_size = 320;
  config.mask_token_id = 319;
  const Memory memory(config);
  const Checkpoint checkpoint = memory.checkpoint();
  const auto linear = draft_linears(config, 5, 4).front();
  ASSERT_EQ(linear.n, 40);
  std::vector<std::uint16_t> got(static_cast<std::size_t>(linear.n * linear.k), 0x7fc0);
  read_weight(linear, checkpoint, got);
  const auto& whole = memory.values.at("context_proj.weight");
  EXPECT_TRUE(std::equal(got.begin(), got.begin() + 32 * linear.k, whole.begin() + 160 * linear.k));
  EXPECT_TRUE(std::all_of(got.begin() + 32 * linear.k, got.end(), [](std::uint16_t v) { return v == 0; }));
}

TEST(drafter_linears, the_cases_are_the_linears_of_every_rank_count) {
  for (const char* model : {"k3", "k3.1"})
    for (const int tp : {1, 4, 8, 16}) {
      // name -> n, k, rows, count
      std::map<std::string, std::vector<std::int64_t>> want;
      for (const auto& linear : draft_linears(synth_preset(model), tp, tp - 1)) {
        auto& entry = want[linear.name];
        if (entry.empty()) entry = {linear.n, linear.k, static_cast<std::int64_t>(linear.rows), 0};
        EXPECT_EQ(entry[0], linear.n);
        EXPECT_EQ(entry[1], linear.k);
        ++entry[3];
      }
      std::map<std::string, std::vector<std::int64_t>> have;
      for (const auto& item : gemm_cases({model, tp, ""}))
        if (item.count > 0) have[item.layer] = {item.n, item.k, static_cast<std::int64_t>(item.rows), item.count};
      EXPECT_EQ(have, want) << model << " tp " << tp;
    }
}

TEST(drafter_linears, the_output_gate_case_is_the_linear_of_a_gated_drafter) {
  DrafterConfig config = synth_preset("k3.1");
  config.mla_use_output_gate = true;
  const auto linears = draft_linears(config, 8, 0);
  const auto gate = std::find_if(linears.begin(), linears.end(), [](const auto& l) { return l.name == "g_proj"; });
  ASSERT_NE(gate, linears.end());
  const auto item = gemm_cases({"k3.1", 8, "g_proj"}).front();
  EXPECT_EQ(item.n, gate->n);
  EXPECT_EQ(item.k, gate->k);
}

// Bytes of 13.4, "all, with these shards", less the absorbed kv_b, in MB.
TEST(drafter_linears, bytes_of_a_step_are_those_of_the_chapter) {
  const std::map<std::pair<std::string, int>, double> table = {
      {{"k3", 1}, 6998},   {{"k3", 4}, 1894},   {{"k3", 8}, 1043},   {{"k3", 16}, 618},
      {{"k3.1", 1}, 7428}, {{"k3.1", 4}, 2001}, {{"k3.1", 8}, 1097}, {{"k3.1", 16}, 645}};
  for (const auto& [key, megabytes] : table) {
    const DrafterConfig config = synth_preset(key.first);
    double bytes = 5.0 * 2 * static_cast<double>(config.num_attention_heads / key.second) * 256 * 512;
    for (const auto& linear : draft_linears(config, key.second, 0)) bytes += static_cast<double>(linear.weight_bytes());
    EXPECT_NEAR(bytes * 1e-6, megabytes, 1.0) << key.first << " tp " << key.second;
  }
}

TEST(drafter_linears, a_shard_that_does_not_divide_is_refused_with_the_field) {
  const DrafterConfig config = synth_preset("tiny");
  const auto argument = [&](int tp, int rank) -> std::string {
    try {
      (void)draft_linears(config, tp, rank);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
      return error.status().argument + " " + error.status().accepted;
    }
    return "accepted";
  };
  EXPECT_EQ(argument(0, 0), "tp 1 or more");
  EXPECT_EQ(argument(4, 4), "rank 0 to 3");
  EXPECT_EQ(argument(4, -1), "rank 0 to 3");
  EXPECT_EQ(argument(8, 0), "tp divisors of num_attention_heads = 4");
  EXPECT_EQ(argument(4, 3), "accepted");
}

}  // namespace
}  // namespace twostep
