// The phases of a draft step, as each backend implements them (spec: drafter 4-8). Plain data: pointers of the
// drafter's device, sizes in elements. BF16 is std::uint16_t. Each phase is one launch or loop, in stream order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "twostep/drafter.h"

namespace twostep {

// Sizes of the model as one rank runs it.
struct StepModel {
  std::int64_t hidden = 0;         // H
  std::int64_t target_hidden = 0;  // H_t
  std::int64_t taps = 0;
  std::int64_t layers = 0;  // L
  std::int64_t heads = 0;   // of this rank
  std::int64_t q_lora = 0;
  std::int64_t kv_lora = 0;
  std::int64_t nope = 0;
  std::int64_t rope = 0;
  std::int64_t v = 0;
  std::int64_t inner = 0;         // I of this rank
  std::int64_t context_rows = 0;  // of context_proj on this rank
  std::int64_t vocab = 0;         // V of the whole model
  std::int64_t shard_vocab = 0;   // of this rank
  std::int64_t first_token = 0;   // global id of its first
  std::int64_t markov_rank = 0;
  std::int64_t mask_token = 0;
  std::int64_t max_len = 0;
  int k = 0;  // tokens drafted per request
  float eps = 0;
  float softmax_scale = 0;
  float rope_amplitude = 0;
  float logit_scale = 1;
  bool neox = false;
  bool situ = false;
  float situ_beta = 0;
  float situ_linear_beta = 0;  // 0: linear up branch
  bool probabilistic = false;
  bool draft_logits_bf16 = false;
  bool confidence_with_markov = false;
  bool strict = true;  // of DrafterLimits

  std::int64_t cache_width() const { return kv_lora + rope; }  // of a row [latent | rope]
  std::int64_t head_width() const { return nope + rope; }
};

StepModel step_model(const DrafterConfig& config, const DrafterLimits& limits, DrafterShard shard);

// A cache of one layer. All layers share all but `data`.
struct CacheShape {
  std::int64_t pages = 0;
  std::int64_t page_rows = 0;
  std::int64_t page_stride = 0;  // elements
};

// A batch that passed all checks.
struct StepBatch {
  std::int64_t requests = 0;  // R
  std::int64_t rows = 0;      // T
  const std::int32_t* request = nullptr;
  const std::int32_t* row_start = nullptr;
  const std::int32_t* rejected = nullptr;
  const std::int32_t* anchor = nullptr;
  const std::int64_t* positions = nullptr;
  const std::int32_t* page_table = nullptr;
  std::int64_t page_table_stride = 0;
  std::int64_t page_table_width = 0;
  const float* temperature = nullptr;
  const std::int64_t* seed = nullptr;
  std::int32_t* step = nullptr;
};

struct VerifyStep {
  const std::int32_t* draft_ids = nullptr;  // [R, k]
  std::int64_t draft_ids_stride = 0;
  const void* logits = nullptr;  // [R, k + 1, V]
  bool logits_bf16 = false;
  std::int64_t logits_request_stride = 0;
  std::int64_t logits_row_stride = 0;
  std::int32_t* emitted = nullptr;  // [R, k + 1]
  std::int64_t emitted_stride = 0;
  std::int32_t* accepted = nullptr;
  bool one_hot = false;
  VerifyMethod method = VerifyMethod::kBlock;
};

// One rank's weights that are no linear of DraftGemm.
struct LayerWeights {
  const float* input_norm = nullptr;    // [H]
  const float* post_norm = nullptr;     // [H]
  const float* q_norm = nullptr;        // [q_lora]
  const float* kv_norm = nullptr;       // [kv_lora]
  const std::uint16_t* kv_b = nullptr;  // [heads, nope + v, kv_lora]: W_UK rows, then W_UV rows, per head
  std::int64_t window = 0;              // 0: the whole context
  bool causal = false;
  std::uint16_t* cache = nullptr;
};

struct StepWeights {
  std::vector<LayerWeights> layers;
  const float* fc_norm = nullptr;  // [taps, H_t]; null: off
  const float* context_norm = nullptr;
  const float* final_norm = nullptr;
  const std::uint16_t* embed = nullptr;  // [embed_rows, H] from token embed_first on, rows embed_stride apart; other
  std::int64_t embed_stride = 0;         // tokens are another rank's and count as zero
  std::int64_t embed_first = 0;
  std::int64_t embed_rows = 0;
  const std::uint16_t* markov_w1 = nullptr;  // [V, r]
  const std::uint16_t* markov_w2 = nullptr;  // [shard_vocab, r]
  const float* confidence = nullptr;         // [H (+ r)], then the bias; null: no head
  const float* calibration = nullptr;        // [k]
  const float* inverse_frequency = nullptr;  // [rope / 2]
};

// Where the step keeps what passes from phase to phase. M = R * k rows of the block, T rows of the context.
struct StepBuffers {
  std::uint16_t* taps = nullptr;     // [T, taps * H_t]
  std::uint16_t* context = nullptr;  // [T, context_width]: context_proj of this rank at its columns, the rest zero
  std::int64_t context_width = 0;
  std::uint16_t* context_normed = nullptr;  // [T, H]
  std::uint16_t* context_kv = nullptr;      // [T, L * (kv_lora + rope)]

  std::int32_t* ids = nullptr;                // [M]; padding: 0
  std::int64_t* sequence_position = nullptr;  // [M] s_j, unclamped; padding: -1
  std::int64_t* end = nullptr;                // [R] keys read, from 0: min(p + 1 + k, max_len); padding: 0
  std::uint16_t* residual = nullptr;          // [M, H]
  std::uint16_t* x = nullptr;                 // [M, H]: normed
  std::uint16_t* o = nullptr;                 // [M, H]: of o_proj and down
  std::uint16_t* qkv = nullptr;               // [M, q_lora + kv_lora + rope]
  std::uint16_t* q_lora = nullptr;            // [M, q_lora]: normed
  std::uint16_t* q = nullptr;                 // [M, heads, nope + rope]
  std::uint16_t* q_latent = nullptr;          // [M, heads, kv_lora + rope]: absorbed, rotated
  std::uint16_t* attended = nullptr;          // [M, heads, kv_lora]
  std::uint16_t* values = nullptr;            // [M, heads * v]
  std::uint16_t* gate = nullptr;              // [M, heads * v]; null: off
  std::uint16_t* gate_up = nullptr;           // [M, 2 * I]
  std::uint16_t* inner = nullptr;             // [M, I]
  std::uint16_t* hidden = nullptr;            // [M, H]
  std::uint16_t* base = nullptr;              // [M, shard_vocab]

  std::int32_t* tokens = nullptr;  // [R, k]
  void* draft_logits = nullptr;    // [R, k, shard_vocab]; null in greedy mode
  float* confidence = nullptr;     // [R, k]; null: no head
  float* survival = nullptr;
  std::int64_t* first_position = nullptr;  // [R]
  std::int32_t* status = nullptr;          // [R]
};

// A tap as the caller passes it.
struct Tap {
  const std::uint16_t* data = nullptr;
  std::int64_t stride = 0;
};

class StepPhases {
 public:
  virtual ~StepPhases() = default;

  // Only while preparing. Memory lives as long as the object and is zero. `upload` copies host memory there.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  // After all weights and buffers have their addresses.
  virtual void prepare(const StepModel& model, const StepWeights& weights, const StepBuffers& buffers,
                       const CacheShape& cache, std::int64_t max_requests) = 0;

  // ---- ingest
  virtual void gather_taps(const StepBatch& batch, const Tap* taps, Stream stream) = 0;  // C0: copy, or fc_norm
  virtual void norm_context(const StepBatch& batch, Stream stream) = 0;                  // C2
  virtual void cache_context(const StepBatch& batch, Stream stream) = 0;                 // C4, C5

  // ---- draft
  virtual void queries(const StepBatch& batch, Stream stream) = 0;                     // 5.1
  virtual void embed(const StepBatch& batch, Stream stream) = 0;                       // B0, B1 of layer 0
  virtual void latents(const StepBatch& batch, std::size_t layer, Stream stream) = 0;  // B3, and kv of B6
  virtual void absorb(const StepBatch& batch, std::size_t layer, Stream stream) = 0;   // B5, and q of B6
  virtual void attend(const StepBatch& batch, std::size_t layer, Stream stream) = 0;   // B7
  virtual void values(const StepBatch& batch, std::size_t layer, Stream stream) = 0;   // B8
  // residual += o; out = RMSNorm(residual) with `weight`: of B9, B1 and B11.
  virtual void add_norm(const StepBatch& batch, const float* weight, std::uint16_t* out, Stream stream) = 0;
  virtual void activate(const StepBatch& batch, Stream stream) = 0;    // B10
  virtual void sample(const StepBatch& batch, Stream stream) = 0;      // 6.1-6.5
  virtual int markov_reads() const = 0;                                // of W2, that a call of up to 8 requests needs
  virtual void confidence(const StepBatch& batch, Stream stream) = 0;  // 6.6

  virtual void verify(const StepBatch& batch, const VerifyStep& verify, Stream stream) = 0;  // 8
};

std::unique_ptr<StepPhases> make_cpu_phases();
std::unique_ptr<StepPhases> make_cuda_phases(Device device);

}  // namespace twostep
