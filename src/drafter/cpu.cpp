// The phases of a draft step on the CPU: the roundings of the specification, plain loops.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "core/bf16.h"
#include "core/check.h"
#include "drafter/sampling.h"
#include "drafter/step.h"
#include "drafter/verify.h"

namespace twostep {
namespace {

constexpr std::int64_t kKeysAtOnce = 64;  // scores that share one rescaling of the running sum
constexpr std::size_t kAlign = 64;

// out = RMSNorm(x) * weight, FP32, one rounding. x may be out.
void rms_norm(const std::uint16_t* x, const float* weight, std::int64_t n, float eps, std::uint16_t* out) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < n; ++i) {
    const float value = bf16_to_float(x[i]);
    sum += value * value;
  }
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
  for (std::int64_t i = 0; i < n; ++i) out[i] = float_to_bf16(bf16_to_float(x[i]) * scale * weight[i]);
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

class CpuPhases final : public StepPhases {
 public:
  void* allocate(std::size_t bytes) override {
    const std::size_t size = (std::max<std::size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
    memory_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(kAlign, size)));
    if (!memory_.back())
      fail(StatusCode::kOutOfMemory, "drafter.prepare", "host memory", std::to_string(bytes) + " bytes", "free memory",
           "lower the limits, or load fewer layers");
    std::memset(memory_.back().get(), 0, size);
    return memory_.back().get();
  }
  void upload(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  int markov_reads() const override { return m_.k; }

  void prepare(const StepModel& model, const StepWeights& weights, const StepBuffers& buffers, const CacheShape& cache,
               std::int64_t) override {
    m_ = model;
    w_ = weights;
    b_ = buffers;
    cache_ = cache;
    threads_ = omp_get_max_threads();
    // Per thread: queries and sums of the k rows of one head, their scores, and one key.
    scratch_floats_ = m_.k * (m_.cache_width() + m_.kv_lora + kKeysAtOnce) + kKeysAtOnce * m_.cache_width();
    scratch_ = static_cast<float*>(allocate(static_cast<std::size_t>(threads_ * scratch_floats_) * sizeof(float)));
  }

  // ---- ingest

  void gather_taps(const StepBatch& batch, const Tap* taps, Stream) override {
    const std::int64_t width = m_.target_hidden;
#pragma omp parallel for collapse(2) num_threads(threads_)
    for (std::int64_t row = 0; row < batch.rows; ++row)
      for (std::int64_t tap = 0; tap < m_.taps; ++tap) {
        const std::uint16_t* from = taps[tap].data + row * taps[tap].stride;
        std::uint16_t* to = b_.taps + (row * m_.taps + tap) * width;
        if (w_.fc_norm) rms_norm(from, w_.fc_norm + tap * width, width, m_.eps, to);
        else std::copy_n(from, width, to);
      }
  }

  void norm_context(const StepBatch& batch, Stream) override {
#pragma omp parallel for num_threads(threads_)
    for (std::int64_t row = 0; row < batch.rows; ++row)
      rms_norm(b_.context + row * b_.context_width, w_.context_norm, m_.hidden, m_.eps,
               b_.context_normed + row * m_.hidden);
  }

  void cache_context(const StepBatch& batch, Stream) override {
    for (std::int64_t r = 0; r < batch.requests; ++r) {
      b_.status[r] = 0;
      const Rows rows = rows_of(batch, r);
      if (batch.request[r] >= 0 && !rows.good) b_.status[r] |= kBadInput;
      std::int32_t bits = 0;
#pragma omp parallel for reduction(| : bits) num_threads(threads_)
      for (std::int64_t i = 0; i < rows.valid; ++i) {
        const std::int64_t row = rows.first + i;
        const std::int64_t position = batch.positions[row];
        if (position < 0 || position >= m_.max_len) {
          bits |= kBadInput;
          continue;
        }
        const std::int64_t at = row_offset(batch, r, position);
        if (at < 0) {
          bits |= kBadPage;
          continue;
        }
        for (std::size_t layer = 0; layer < w_.layers.size(); ++layer)
          write_latent(layer, b_.context_kv + (row * m_.layers + static_cast<std::int64_t>(layer)) * m_.cache_width(),
                       position, at);
      }
      b_.status[r] |= bits;
    }
  }

  // ---- draft

  void queries(const StepBatch& batch, Stream) override {
    for (std::int64_t r = 0; r < batch.requests; ++r) {
      const Rows rows = rows_of(batch, r);
      const std::int64_t p = rows.good ? batch.positions[rows.first + rows.valid - 1] : -1;
      const std::int32_t anchor = batch.anchor[r];
      const bool good = p >= 0 && p < m_.max_len && anchor >= 0 && anchor < m_.vocab;
      if (batch.request[r] >= 0 && !good) b_.status[r] |= kBadInput;
      b_.first_position[r] = good ? p + 1 : -1;
      b_.end[r] = good ? std::min(p + 1 + m_.k, m_.max_len) : 0;
      for (std::int64_t j = 0; j < m_.k; ++j) {
        b_.ids[r * m_.k + j] = !good ? 0 : j == 0 ? anchor : static_cast<std::int32_t>(m_.mask_token);
        b_.sequence_position[r * m_.k + j] = good ? p + 1 + j : -1;
      }
      // Keys on bad pages are not visible; one look per page tells the host.
      for (std::int64_t key = 0; key < b_.end[r]; key += cache_.page_rows)
        if (row_offset(batch, r, key) < 0) b_.status[r] |= kBadPage;
    }
  }

  void embed(const StepBatch& batch, Stream) override {
#pragma omp parallel for num_threads(threads_)
    for (std::int64_t i = 0; i < batch.requests * m_.k; ++i) {
      std::uint16_t* residual = b_.residual + i * m_.hidden;
      const std::int64_t row = b_.ids[i] - w_.embed_first;
      if (row >= 0 && row < w_.embed_rows) std::copy_n(w_.embed + row * w_.embed_stride, m_.hidden, residual);
      else std::fill_n(residual, m_.hidden, std::uint16_t{0});
      rms_norm(residual, w_.layers[0].input_norm, m_.hidden, m_.eps, b_.x + i * m_.hidden);
    }
  }

  void latents(const StepBatch& batch, std::size_t layer, Stream) override {
    const std::int64_t width = m_.q_lora + m_.cache_width();
#pragma omp parallel for num_threads(threads_)
    for (std::int64_t i = 0; i < batch.requests * m_.k; ++i) {
      const std::uint16_t* qkv = b_.qkv + i * width;
      rms_norm(qkv, w_.layers[layer].q_norm, m_.q_lora, m_.eps, b_.q_lora + i * m_.q_lora);
      const std::int64_t position = b_.sequence_position[i];
      if (position < 0 || position >= m_.max_len) continue;
      const std::int64_t at = row_offset(batch, i / m_.k, position);
      if (at >= 0) write_latent(layer, qkv + m_.q_lora, position, at);
    }
  }

  void absorb(const StepBatch& batch, std::size_t layer, Stream) override {
    const std::int64_t rows_per_head = m_.nope + m_.v;
#pragma omp parallel for collapse(2) num_threads(threads_)
    for (std::int64_t i = 0; i < batch.requests * m_.k; ++i)
      for (std::int64_t head = 0; head < m_.heads; ++head) {
        float* sums = scratch();
        std::fill_n(sums, m_.kv_lora, 0.0f);
        const std::uint16_t* q = b_.q + (i * m_.heads + head) * m_.head_width();
        const std::uint16_t* w_uk = w_.layers[layer].kv_b + head * rows_per_head * m_.kv_lora;
        for (std::int64_t d = 0; d < m_.nope; ++d) {
          const float value = bf16_to_float(q[d]);
          for (std::int64_t c = 0; c < m_.kv_lora; ++c) sums[c] += value * bf16_to_float(w_uk[d * m_.kv_lora + c]);
        }
        std::uint16_t* out = b_.q_latent + (i * m_.heads + head) * m_.cache_width();
        for (std::int64_t c = 0; c < m_.kv_lora; ++c) out[c] = float_to_bf16(sums[c]);
        rotate(q + m_.nope, clamped(b_.sequence_position[i]), out + m_.kv_lora);
      }
  }

  void attend(const StepBatch& batch, std::size_t layer, Stream) override {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads_)
    for (std::int64_t r = 0; r < batch.requests; ++r)
      for (std::int64_t head = 0; head < m_.heads; ++head) attend_head(batch, w_.layers[layer], r, head);
  }

  void values(const StepBatch& batch, std::size_t layer, Stream) override {
    const std::int64_t rows_per_head = m_.nope + m_.v;
#pragma omp parallel for collapse(2) num_threads(threads_)
    for (std::int64_t i = 0; i < batch.requests * m_.k; ++i)
      for (std::int64_t head = 0; head < m_.heads; ++head) {
        const std::uint16_t* o = b_.attended + (i * m_.heads + head) * m_.kv_lora;
        const std::uint16_t* w_uv = w_.layers[layer].kv_b + (head * rows_per_head + m_.nope) * m_.kv_lora;
        for (std::int64_t d = 0; d < m_.v; ++d) {
          float sum = 0;
#pragma omp simd reduction(+ : sum)
          for (std::int64_t c = 0; c < m_.kv_lora; ++c)
            sum += bf16_to_float(o[c]) * bf16_to_float(w_uv[d * m_.kv_lora + c]);
          const std::int64_t at = (i * m_.heads + head) * m_.v + d;
          std::uint16_t value = float_to_bf16(sum);
          if (b_.gate) value = float_to_bf16(bf16_to_float(value) * sigmoid(bf16_to_float(b_.gate[at])));
          b_.values[at] = value;
        }
      }
  }

  void add_norm(const StepBatch& batch, const float* weight, std::uint16_t* out, Stream) override {
#pragma omp parallel for num_threads(threads_)
    for (std::int64_t i = 0; i < batch.requests * m_.k; ++i) {
      std::uint16_t* residual = b_.residual + i * m_.hidden;
      const std::uint16_t* o = b_.o + i * m_.hidden;
      for (std::int64_t c = 0; c < m_.hidden; ++c)
        residual[c] = float_to_bf16(bf16_to_float(residual[c]) + bf16_to_float(o[c]));
      rms_norm(residual, weight, m_.hidden, m_.eps, out + i * m_.hidden);
    }
  }

  void activate(const StepBatch& batch, Stream) override {
#pragma omp parallel for num_threads(threads_)
    for (std::int64_t i = 0; i < batch.requests * m_.k; ++i) {
      const std::uint16_t* gate = b_.gate_up + 2 * i * m_.inner;
      const std::uint16_t* up = gate + m_.inner;
      for (std::int64_t c = 0; c < m_.inner; ++c) {
        const float g = bf16_to_float(gate[c]);
        float u = bf16_to_float(up[c]);
        float left = g;
        if (m_.situ) {
          left = m_.situ_beta * std::tanh(g / m_.situ_beta);
          if (m_.situ_linear_beta > 0) u = m_.situ_linear_beta * std::tanh(u / m_.situ_linear_beta);
        }
        b_.inner[i * m_.inner + c] = float_to_bf16(left * sigmoid(g) * u);
      }
    }
  }

  // ---- Sampling

  void sample(const StepBatch& batch, Stream) override {
    const MarkovHead head{w_.markov_w2, m_.shard_vocab, m_.markov_rank, m_.logit_scale, m_.first_token};
    const DType dtype = m_.draft_logits_bf16 ? DType::kBF16 : DType::kF32;
    for (std::int64_t r = 0; r < batch.requests; ++r) {
      std::int32_t previous = b_.ids[r * m_.k];
      for (std::int64_t i = 0; i < m_.k; ++i) {
        const std::int64_t row = r * m_.k + i;
        if (b_.first_position[r] < 0) {
          b_.tokens[row] = -1;
          continue;
        }
        OutRow out;
        if (m_.probabilistic)
          out = {static_cast<std::byte*>(b_.draft_logits) +
                     static_cast<std::size_t>(row * m_.shard_vocab) * dtype_size(dtype),
                 dtype};
        const Pick pick = pick_draft(head, w_.markov_w1 + previous * m_.markov_rank,
                                     RowView{b_.base + row * m_.shard_vocab, DType::kBF16},
                                     m_.probabilistic ? batch.temperature[r] : 0, key_of(batch, r, i), out);
        if (pick.nonfinite) b_.status[r] |= kNonFinite;
        previous = b_.tokens[row] = pick.token;
      }
    }
  }

  void confidence(const StepBatch& batch, Stream) override {
    ConfidenceHead head;
    head.weight = {w_.confidence, DType::kF32};
    head.hidden = m_.hidden;
    head.rank = m_.confidence_with_markov ? m_.markov_rank : 0;
    head.bias = w_.confidence[head.hidden + head.rank];
    for (std::int64_t r = 0; r < batch.requests; ++r) {
      float survival = 1;
      for (std::int64_t i = 0; i < m_.k; ++i) {
        const std::int64_t row = r * m_.k + i;
        if (b_.first_position[r] < 0) {
          b_.confidence[row] = b_.survival[row] = 0;
          continue;
        }
        const std::int64_t previous = i == 0 ? b_.ids[row] : b_.tokens[row - 1];
        b_.confidence[row] = twostep::confidence(head, b_.hidden + row * m_.hidden,
                                                 w_.markov_w1 + previous * m_.markov_rank, w_.calibration[i]);
        b_.survival[row] = survival *= b_.confidence[row];
      }
    }
  }

  void verify(const StepBatch& batch, const VerifyStep& what, Stream) override {
    const std::size_t logits_size = what.logits_bf16 ? 2 : 4;
    const DType drafts = m_.draft_logits_bf16 ? DType::kBF16 : DType::kF32;
    for (std::int64_t r = 0; r < batch.requests; ++r) {
      const std::span<std::int32_t> emitted(what.emitted + r * what.emitted_stride, static_cast<std::size_t>(m_.k + 1));
      if (b_.first_position[r] < 0 || batch.request[r] < 0) {
        std::fill(emitted.begin(), emitted.end(), -1);
        what.accepted[r] = 0;
        continue;
      }
      VerifyRequest request;
      request.drafts = {what.draft_ids + r * what.draft_ids_stride, static_cast<std::size_t>(m_.k)};
      const auto* rows = static_cast<const std::byte*>(what.logits) +
                         static_cast<std::size_t>(r * what.logits_request_stride) * logits_size;
      request.target = TensorView::matrix(const_cast<std::byte*>(rows), m_.k + 1, m_.vocab, {}, what.logits_row_stride,
                                          what.logits_bf16 ? DType::kBF16 : DType::kF32);
      if (!what.one_hot)
        request.draft_logits =
            TensorView::matrix(static_cast<std::byte*>(b_.draft_logits) +
                                   static_cast<std::size_t>(r * m_.k * m_.shard_vocab) * dtype_size(drafts),
                               m_.k, m_.shard_vocab, {}, 0, drafts);
      request.temperature = batch.temperature[r];
      request.key = key_of(batch, r, 0);
      const VerifyResult result = twostep::verify(what.method, request, emitted);
      if (result.nonfinite) b_.status[r] |= kNonFinite;
      what.accepted[r] = result.accepted();
      batch.step[r] = static_cast<std::int32_t>(static_cast<std::uint32_t>(batch.step[r]) + 1);
    }
  }

 private:
  DrawKey key_of(const StepBatch& batch, std::int64_t r, std::int64_t row) const {
    return {static_cast<std::uint64_t>(batch.seed[r]), static_cast<std::uint32_t>(b_.first_position[r] + row),
            static_cast<std::uint32_t>(batch.step[r])};
  }

  struct Rows {
    std::int64_t first = 0;
    std::int64_t valid = 0;
    bool good = false;  // the batch's numbers make sense, and the request is no padding
  };

  // The context rows of a request that were not rejected.
  static Rows rows_of(const StepBatch& batch, std::int64_t r) {
    if (batch.request[r] < 0) return {};
    const std::int64_t first = batch.row_start[r], rows = batch.row_start[r + 1] - first;
    const std::int64_t rejected = batch.rejected[r];
    if (first < 0 || rows < 1 || first + rows > batch.rows || rejected < 0 || rejected >= rows) return {};
    return {first, rows - rejected, true};
  }

  // Where each layer's cache keeps a position, in elements; -1 where the page is bad or none.
  std::int64_t row_offset(const StepBatch& batch, std::int64_t r, std::int64_t position) const {
    const std::int64_t index = position / cache_.page_rows;
    if (index >= batch.page_table_width) return -1;
    const std::int64_t page = batch.page_table[r * batch.page_table_stride + index];
    if (page < 1 || page >= cache_.pages) return -1;
    return page * cache_.page_stride + position % cache_.page_rows * m_.cache_width();
  }

  std::int64_t clamped(std::int64_t position) const { return std::clamp<std::int64_t>(position, 0, m_.max_len - 1); }

  float* scratch() const { return scratch_ + omp_get_thread_num() * scratch_floats_; }

  // out[rope] = x turned by the angles of a position, FP32, one rounding. Sine and cosine of the FP32 angle.
  void rotate(const std::uint16_t* x, std::int64_t position, std::uint16_t* out) const {
    const std::int64_t half = m_.rope / 2;
    for (std::int64_t i = 0; i < half; ++i) {
      const std::int64_t a = m_.neox ? i : 2 * i, b = m_.neox ? i + half : 2 * i + 1;
      const double angle = static_cast<float>(position) * w_.inverse_frequency[i];
      const float cosine = static_cast<float>(std::cos(angle)) * m_.rope_amplitude;
      const float sine = static_cast<float>(std::sin(angle)) * m_.rope_amplitude;
      const float x0 = bf16_to_float(x[a]), x1 = bf16_to_float(x[b]);
      out[a] = float_to_bf16(x0 * cosine - x1 * sine);
      out[b] = float_to_bf16(x0 * sine + x1 * cosine);
    }
  }

  // [latent | rope] of one row, normed and rotated, into the cache of a layer.
  void write_latent(std::size_t layer, const std::uint16_t* kv, std::int64_t position, std::int64_t at) const {
    std::uint16_t* row = w_.layers[layer].cache + at;
    rms_norm(kv, w_.layers[layer].kv_norm, m_.kv_lora, m_.eps, row);
    rotate(kv + m_.kv_lora, position, row + m_.kv_lora);
  }

  // One head of the k rows of a request: softmax over the visible keys with a running maximum, keys in rising order.
  void attend_head(const StepBatch& batch, const LayerWeights& layer, std::int64_t r, std::int64_t head) const {
    const std::int64_t k = m_.k, width = m_.cache_width(), latent = m_.kv_lora;
    float* const q = scratch();
    float* const sums = q + k * width;
    float* const scores = sums + k * latent;
    float* const keys = scores + k * kKeysAtOnce;
    std::array<float, kMaxDraftTokens> maximum, total{};
    maximum.fill(-std::numeric_limits<float>::infinity());
    std::fill_n(sums, k * latent, 0.0f);
    for (std::int64_t j = 0; j < k; ++j)
      for (std::int64_t c = 0; c < width; ++c)
        q[j * width + c] = bf16_to_float(b_.q_latent[((r * k + j) * m_.heads + head) * width + c]);

    for (std::int64_t first = 0; first < b_.end[r]; first += kKeysAtOnce) {
      const std::int64_t count = std::min(kKeysAtOnce, b_.end[r] - first);
      std::array<bool, kKeysAtOnce> there;
      for (std::int64_t n = 0; n < count; ++n) {
        const std::int64_t at = row_offset(batch, r, first + n);
        there[static_cast<std::size_t>(n)] = at >= 0;
        for (std::int64_t c = 0; at >= 0 && c < width; ++c) keys[n * width + c] = bf16_to_float(layer.cache[at + c]);
      }
      for (std::int64_t j = 0; j < k; ++j) {
        const auto row = static_cast<std::size_t>(j);
        const std::int64_t position = b_.sequence_position[r * k + j];
        const auto visible = [&](std::int64_t n) {
          const std::int64_t key = first + n;
          return there[static_cast<std::size_t>(n)] && (!layer.causal || key <= position) &&
                 (layer.window == 0 || key > clamped(position) - layer.window);
        };
        float* score = scores + j * kKeysAtOnce;
        float highest = maximum[row];
        for (std::int64_t n = 0; n < count; ++n) {
          if (!visible(n)) continue;
          float dot = 0;
#pragma omp simd reduction(+ : dot)
          for (std::int64_t c = 0; c < width; ++c) dot += q[j * width + c] * keys[n * width + c];
          score[n] = m_.softmax_scale * dot;
          highest = std::max(highest, score[n]);
        }
        if (highest == -std::numeric_limits<float>::infinity()) continue;
        const float shrink = std::exp(maximum[row] - highest);
        maximum[row] = highest;
        total[row] *= shrink;
        float* sum = sums + j * latent;
        for (std::int64_t c = 0; c < latent; ++c) sum[c] *= shrink;
        for (std::int64_t n = 0; n < count; ++n) {
          if (!visible(n)) continue;
          const float weight = std::exp(score[n] - highest);
          total[row] += weight;
          for (std::int64_t c = 0; c < latent; ++c) sum[c] += weight * keys[n * width + c];
        }
      }
    }
    for (std::int64_t j = 0; j < k; ++j) {
      const float sum = total[static_cast<std::size_t>(j)];
      const float scale = sum > 0 ? 1.0f / sum : 0.0f;  // a row that sees nothing gives 0
      for (std::int64_t c = 0; c < latent; ++c)
        b_.attended[((r * k + j) * m_.heads + head) * latent + c] = float_to_bf16(sums[j * latent + c] * scale);
    }
  }

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::vector<std::unique_ptr<std::byte, Free>> memory_;
  StepModel m_;
  StepWeights w_;
  StepBuffers b_;
  CacheShape cache_;
  int threads_ = 1;
  float* scratch_ = nullptr;
  std::int64_t scratch_floats_ = 0;  // per thread
};

}  // namespace

std::unique_ptr<StepPhases> make_cpu_phases() { return std::make_unique<CpuPhases>(); }

}  // namespace twostep
