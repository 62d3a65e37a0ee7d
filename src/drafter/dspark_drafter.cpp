// DsparkDrafter: loads a rank's weights, sizes the buffers, and lists the phases of the step.
#include <algorithm>
#include <array>
#include <cstring>

#include "core/bf16.h"
#include "core/check.h"
#include "drafter/contract.h"
#include "drafter/linears.h"
#include "drafter/rope.h"
#include "drafter/stages.h"
#include "twostep/gemm.h"
#include "twostep/logits.h"

namespace twostep {

#if !TWOSTEP_CUDA
std::unique_ptr<StepPhases> make_cuda_phases(Device device) {
  fail(StatusCode::kUnavailable, "drafter.prepare", "device", to_string(device), "cpu",
       "this build has no GPU rooms: build with TWOSTEP_CUDA=ON");
}
#endif

namespace {

// A DraftGemm over packed operands, with the row counts of its calls prepared.
class Linear {
 public:
  Linear(const std::uint16_t* weight, std::int64_t n, std::int64_t k, Device device, const Options& options)
      : gemm_(TensorView::matrix(const_cast<std::uint16_t*>(weight), n, k, device), options), device_(device) {}

  void prepare(std::span<const int> rows) {
    for (const int m : rows) gemm_.prepare(m);
  }
  // Strides in elements; 0: packed.
  void run(const std::uint16_t* x, std::int64_t rows, std::uint16_t* out, Stream stream, std::int64_t x_stride = 0,
           std::int64_t out_stride = 0) {
    gemm_.run(TensorView::matrix(const_cast<std::uint16_t*>(x), rows, gemm_.k(), device_, x_stride),
              TensorView::matrix(out, rows, gemm_.n(), device_, out_stride), stream);
  }

 private:
  DraftGemm gemm_;
  Device device_;
};

struct LayerLinears {
  std::optional<Linear> qkv_a, q_b, g_proj, o_proj, gate_up, down;
};

std::vector<float> as_floats(const StoredTensor& tensor) {
  std::vector<float> out(static_cast<std::size_t>(tensor.bytes / (tensor.dtype == "F32" ? 4 : 2)));
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::uint16_t bits = 0;
    if (tensor.dtype == "F32") {
      std::memcpy(&out[i], tensor.data + 4 * i, 4);
    } else {
      std::memcpy(&bits, tensor.data + 2 * i, 2);
      out[i] = bf16_to_float(bits);
    }
  }
  return out;
}

}  // namespace

struct DsparkDrafter::Impl {
  Impl(const DrafterWeights& drafter_weights, const DrafterLimits& limits, const DrafterTarget& target,
       const DrafterMemory& memory, Device where, DrafterShard drafter_shard,
       const std::function<void(std::uint64_t, std::uint64_t)>& progress, std::unique_ptr<StepPhases> given = {})
      : files(drafter_weights), device(where), shard(drafter_shard), report(progress) {
    const DrafterConfig& config = files.config();
    check_target(config, target);
    contract = {{}, check_limits(config, limits), device};
    linears = draft_linears(config, shard.ranks, shard.rank);  // refuses a shard that does not divide the model
    contract.model = step_model(config, contract.limits, shard);
    const StepModel& m = contract.model;
    const CacheShape cache = check_cache(config, memory.cache, device);
    if (memory.embed_tokens) check_lent("memory.embed_tokens", *memory.embed_tokens, m.vocab, config, device);
    if (memory.lm_head) check_lent("memory.lm_head", *memory.lm_head, m.shard_vocab, config, device);
    if (memory.lm_head) std::erase_if(linears, [](const StepLinear& linear) { return linear.name == "lm_head"; });
    // What is missing or has changed is told before gigabytes are read.
    files.checkpoint().require_unchanged();
    for (const auto& linear : linears)
      for (const auto& part : linear.parts) (void)files.checkpoint().tensor(part.tensor);
    if (!memory.embed_tokens) (void)files.checkpoint().tensor("embed_tokens.weight");

    phases = given ? std::move(given) : device.is_cuda() ? make_cuda_phases(device) : make_cpu_phases();
    bytes_in_all = bytes_to_load(!memory.embed_tokens);
    load(memory);
    files.checkpoint().require_unchanged();  // what was read is of one file
    make_buffers();
    phases->prepare(m, weights, buffers, cache, contract.limits.request_counts.back());
    prepare_linears();
  }

  // ---- Weights

  std::uint64_t bytes_to_load(bool embedding) const {
    const StepModel& m = contract.model;
    std::int64_t bytes = (m.layers * m.heads * (m.nope + m.v) * m.kv_lora + (m.vocab + m.shard_vocab) * m.markov_rank +
                          (embedding ? m.shard_vocab * m.hidden : 0)) *
                         2;
    for (const auto& linear : linears) bytes += linear.weight_bytes();
    return static_cast<std::uint64_t>(bytes);
  }

  template <class T>
  T* allocate(std::int64_t count) {
    return static_cast<T*>(phases->allocate(static_cast<std::size_t>(count) * sizeof(T)));
  }

  // A slice of the checkpoint on the drafter's device.
  std::uint16_t* load_matrix(const StepLinear& linear) {
    auto* to = allocate<std::uint16_t>(linear.n * linear.k);
    const auto count = static_cast<std::size_t>(linear.n * linear.k);
    if (device.is_cuda()) {
      std::vector<std::uint16_t> host(count);
      read_weight(linear, files.checkpoint(), host);
      phases->upload(to, host.data(), 2 * count);
    } else {
      read_weight(linear, files.checkpoint(), {to, count});
    }
    weight_bytes += 2 * static_cast<std::int64_t>(count);
    bytes_done += 2 * count;
    if (report) report(bytes_done, bytes_in_all);
    return to;
  }
  std::uint16_t* load_rows(const std::string& tensor, std::int64_t first, std::int64_t rows, std::int64_t width) {
    return load_matrix({tensor, -1, rows, width, RowsKind::kBlock, {{tensor, first, rows, 0}}});
  }

  const float* load_floats(const std::vector<float>& values) {
    auto* to = allocate<float>(static_cast<std::int64_t>(values.size()));
    phases->upload(to, values.data(), values.size() * sizeof(float));
    weight_bytes += static_cast<std::int64_t>(values.size() * sizeof(float));
    return to;
  }
  const float* load_vector(const std::string& tensor) {
    return load_floats(as_floats(files.checkpoint().tensor(tensor)));
  }

  void load(const DrafterMemory& memory) {
    const StepModel& m = contract.model;
    const DrafterConfig& config = files.config();
    const Options options{.strict = contract.limits.strict};
    layers.resize(static_cast<std::size_t>(m.layers));
    for (const auto& linear : linears) {
      if (linear.name == "lm_head") continue;
      std::optional<Linear>& at = place_of(linear);
      at.emplace(load_matrix(linear), linear.n, linear.k, device, options);
    }
    for (std::int64_t i = 0; i < m.layers; ++i) {
      const std::string layer = "layers." + std::to_string(i) + ".";
      const auto at = static_cast<std::size_t>(i);
      LayerWeights w;
      w.input_norm = load_vector(layer + "input_layernorm.weight");
      w.post_norm = load_vector(layer + "post_attention_layernorm.weight");
      w.q_norm = load_vector(layer + "self_attn.q_a_layernorm.weight");
      w.kv_norm = load_vector(layer + "self_attn.kv_a_layernorm.weight");
      const std::int64_t rows = m.heads * (m.nope + m.v);
      w.kv_b = load_rows(layer + "self_attn.kv_b_proj.weight", shard.rank * rows, rows, m.kv_lora);
      w.window = config.sliding_window[at].value_or(0);
      w.causal = config.causal[at];
      w.cache = static_cast<std::uint16_t*>(memory.cache[at].data);
      weights.layers.push_back(w);
    }
    if (config.fc_norm) {
      std::vector<float> all;
      for (std::int64_t tap = 0; tap < m.taps; ++tap) {
        const auto one = as_floats(files.checkpoint().tensor("fc_norm." + std::to_string(tap) + ".weight"));
        all.insert(all.end(), one.begin(), one.end());
      }
      weights.fc_norm = load_floats(all);
    }
    weights.context_norm = load_vector("context_norm.weight");
    weights.final_norm = load_vector("final_norm.weight");
    weights.markov_w1 = load_rows("markov_head.markov_w1.weight", 0, m.vocab, m.markov_rank);
    weights.markov_w2 = load_rows("markov_head.markov_w2.weight", m.first_token, m.shard_vocab, m.markov_rank);
    if (config.enable_confidence_head.value_or(false)) {
      auto values = as_floats(files.checkpoint().tensor("confidence_head.proj.weight"));
      values.push_back(as_floats(files.checkpoint().tensor("confidence_head.proj.bias")).at(0));
      weights.confidence = load_floats(values);
    }
    weights.calibration = load_floats(contract.limits.calibration);
    weights.inverse_frequency = load_floats(make_rope(config).inverse_frequency);

    if (memory.embed_tokens) {
      weights.embed = static_cast<const std::uint16_t*>(memory.embed_tokens->data);
      weights.embed_stride = memory.embed_tokens->stride[0];  // of 8 rows or more
      weights.embed_rows = m.vocab;
    } else {
      weights.embed = load_rows("embed_tokens.weight", m.first_token, m.shard_vocab, m.hidden);
      weights.embed_stride = m.hidden;
      weights.embed_first = m.first_token;
      weights.embed_rows = m.shard_vocab;
    }
    TensorView head = memory.lm_head.value_or(TensorView{});
    if (!memory.lm_head) head = TensorView::matrix(load_matrix(linears.back()), m.shard_vocab, m.hidden, device);
    LogitsOptions logits;
    logits.scale = m.logit_scale;
    logits.gemm = options;
    lm_head.emplace(head, logits);
  }

  std::optional<Linear>& place_of(const StepLinear& linear) {
    if (linear.name == "context_proj") return context_proj;
    if (linear.name == "context_kv_proj") return context_kv;
    LayerLinears& layer = layers[static_cast<std::size_t>(linear.layer)];
    if (linear.name == "qkv_a") return layer.qkv_a;
    if (linear.name == "q_b") return layer.q_b;
    if (linear.name == "g_proj") return layer.g_proj;
    if (linear.name == "o_proj") return layer.o_proj;
    if (linear.name == "gate_up") return layer.gate_up;
    return layer.down;
  }

  // ---- Buffers

  void make_buffers() {
    const StepModel& m = contract.model;
    const std::int64_t requests = contract.limits.request_counts.back();
    const std::int64_t block = requests * m.k;
    const std::int64_t context = contract.limits.max_ingest_rows;
    const auto bf16 = [&](std::uint16_t*& to, std::int64_t rows, std::int64_t width) {
      to = allocate<std::uint16_t>(rows * width);
    };
    StepBuffers& b = buffers;
    bf16(b.taps, context, m.taps * m.target_hidden);
    b.context_width = m.context_rows * shard.ranks;
    bf16(b.context, context, b.context_width);
    bf16(b.context_normed, context, m.hidden);
    bf16(b.context_kv, context, m.layers * m.cache_width());
    b.ids = allocate<std::int32_t>(block);
    b.sequence_position = allocate<std::int64_t>(block);
    b.end = allocate<std::int64_t>(requests);
    bf16(b.residual, block, m.hidden);
    bf16(b.x, block, m.hidden);
    bf16(b.o, block, m.hidden);
    bf16(b.qkv, block, m.q_lora + m.cache_width());
    bf16(b.q_lora, block, m.q_lora);
    bf16(b.q, block, m.heads * m.head_width());
    bf16(b.q_latent, block, m.heads * m.cache_width());
    bf16(b.attended, block, m.heads * m.kv_lora);
    bf16(b.values, block, m.heads * m.v);
    if (files.config().mla_use_output_gate) bf16(b.gate, block, m.heads * m.v);
    bf16(b.gate_up, block, 2 * m.inner);
    bf16(b.inner, block, m.inner);
    bf16(b.hidden, block, m.hidden);
    bf16(b.base, block, m.shard_vocab);
    b.tokens = allocate<std::int32_t>(block);
    b.first_position = allocate<std::int64_t>(requests);
    b.status = allocate<std::int32_t>(requests);

    output.tokens = TensorView::dense(b.tokens, DType::kI32, {requests, m.k}, device);
    output.base_logits = TensorView::dense(b.base, DType::kBF16, {block, m.shard_vocab}, device);
    output.hidden = TensorView::dense(b.hidden, DType::kBF16, {block, m.hidden}, device);
    output.first_position = TensorView::dense(b.first_position, DType::kI64, {requests}, device);
    output.status = TensorView::dense(b.status, DType::kI32, {requests}, device);
    if (m.probabilistic) {
      const DType dtype = contract.limits.draft_logits;
      b.draft_logits = phases->allocate(static_cast<std::size_t>(block * m.shard_vocab) * dtype_size(dtype));
      output.draft_logits = TensorView::dense(b.draft_logits, dtype, {requests, m.k, m.shard_vocab}, device);
    }
    if (weights.confidence) {
      b.confidence = allocate<float>(block);
      b.survival = allocate<float>(block);
      output.confidence = TensorView::dense(b.confidence, DType::kF32, {requests, m.k}, device);
      output.survival = TensorView::dense(b.survival, DType::kF32, {requests, m.k}, device);
    }
  }

  // Every padded batch, and for the context every bucket of rows that a kernel serves.
  void prepare_linears() {
    const DrafterLimits& limits = contract.limits;
    std::vector<int> block, context;
    for (const int requests : limits.request_counts) {
      block.push_back(requests * limits.num_draft_tokens);
      context.push_back(requests * (limits.num_draft_tokens + 1));
    }
    const auto most = static_cast<int>(limits.max_ingest_rows);
    for (int m = kRowBucket; m <= std::min(most, kMaxWarpRows); m += kRowBucket) context.push_back(m);
    context.push_back(most);
    std::erase_if(context, [&](int m) { return m > most; });

    context_proj->prepare(context);
    context_kv->prepare(context);
    for (LayerLinears& layer : layers)
      for (auto* linear : {&layer.qkv_a, &layer.q_b, &layer.g_proj, &layer.o_proj, &layer.gate_up, &layer.down})
        if (*linear) (*linear)->prepare(block);
    for (const int m : block) lm_head->prepare(m);
  }

  // ---- The step

  void done(Stage stage, Stream stream) const {
    if (observer) observer->done(stage, stream);
  }

  void ingest(const StepBatch& batch, std::span<const Tap> taps, Stream stream) {
    const StepModel& m = contract.model;
    const bool aligned =  // as DraftGemm's kernels want a row
        !device.is_cuda() || (reinterpret_cast<std::uintptr_t>(taps[0].data) % 16 == 0 && taps[0].stride % 8 == 0);
    const bool in_place = aligned && !weights.fc_norm && taps_are_one_buffer(taps, batch.rows, m.target_hidden);
    if (!in_place) phases->gather_taps(batch, taps.data(), stream);
    done(Stage::kTaps, stream);
    const std::uint16_t* x = in_place ? taps[0].data : buffers.taps;
    const std::int64_t packed = m.taps * m.target_hidden;
    const std::int64_t x_stride = in_place && batch.rows > 1 ? taps[0].stride : packed;
    context_proj->run(x, batch.rows, buffers.context + shard.rank * m.context_rows, stream, x_stride,
                      buffers.context_width);
    done(Stage::kContextProj, stream);
    phases->norm_context(batch, stream);
    done(Stage::kContextNorm, stream);
    context_kv->run(buffers.context_normed, batch.rows, buffers.context_kv, stream);
    done(Stage::kContextKv, stream);
    phases->cache_context(batch, stream);
    done(Stage::kContextCache, stream);
  }

  void draft(const StepBatch& batch, Stream stream) {
    const StepModel& m = contract.model;
    const std::int64_t rows = batch.requests * m.k;
    phases->queries(batch, stream);
    done(Stage::kQueries, stream);
    phases->embed(batch, stream);
    done(Stage::kEmbed, stream);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      attention(batch, i, stream);
      mlp(batch, i, stream);
    }
    lm_head->run(TensorView::matrix(buffers.hidden, rows, m.hidden, device),
                 TensorView::matrix(buffers.base, rows, m.shard_vocab, device), stream);
    done(Stage::kLmHead, stream);
    phases->sample(batch, stream);
    done(Stage::kSampling, stream);
    if (weights.confidence) phases->confidence(batch, stream);
    done(Stage::kConfidence, stream);
  }

  // x, the normed residual, to o and on to the normed residual that the MLP reads.
  void attention(const StepBatch& batch, std::size_t i, Stream stream) {
    const std::int64_t rows = batch.requests * contract.model.k;
    const StepBuffers& b = buffers;
    LayerLinears& layer = layers[i];
    layer.qkv_a->run(b.x, rows, b.qkv, stream);
    done(Stage::kQkvA, stream);
    phases->latents(batch, i, stream);
    done(Stage::kLatents, stream);
    layer.q_b->run(b.q_lora, rows, b.q, stream);
    done(Stage::kQB, stream);
    phases->absorb(batch, i, stream);
    done(Stage::kAbsorb, stream);
    phases->attend(batch, i, stream);
    done(Stage::kAttention, stream);
    if (layer.g_proj) layer.g_proj->run(b.x, rows, b.gate, stream);
    done(Stage::kGate, stream);
    phases->values(batch, i, stream);
    done(Stage::kValues, stream);
    layer.o_proj->run(b.values, rows, b.o, stream);
    done(Stage::kOProj, stream);
    phases->add_norm(batch, weights.layers[i].post_norm, b.x, stream);
    done(Stage::kNorms, stream);
  }

  // On to the normed residual that the next layer reads, or the head.
  void mlp(const StepBatch& batch, std::size_t i, Stream stream) {
    const std::int64_t rows = batch.requests * contract.model.k;
    const StepBuffers& b = buffers;
    LayerLinears& layer = layers[i];
    layer.gate_up->run(b.x, rows, b.gate_up, stream);
    done(Stage::kGateUp, stream);
    phases->activate(batch, stream);
    done(Stage::kActivation, stream);
    layer.down->run(b.inner, rows, b.o, stream);
    done(Stage::kDown, stream);
    if (i + 1 < layers.size()) phases->add_norm(batch, weights.layers[i + 1].input_norm, b.x, stream);
    else phases->add_norm(batch, weights.final_norm, b.hidden, stream);
    done(Stage::kNorms, stream);
  }

  void verify(const StepBatch& batch, const VerifyStep& what, Stream stream) {
    phases->verify(batch, what, stream);
    done(Stage::kVerify, stream);
  }

  const DrafterWeights files;
  const Device device;
  const DrafterShard shard;
  const std::function<void(std::uint64_t, std::uint64_t)> report;
  StepContract contract;
  std::vector<StepLinear> linears;                 // where each weight is in the checkpoint
  std::uint64_t bytes_done = 0, bytes_in_all = 0;  // of matrices, for `report`
  std::int64_t weight_bytes = 0;
  std::unique_ptr<StepPhases> phases;  // owns the memory below
  StepWeights weights;
  StepBuffers buffers;
  std::optional<Linear> context_proj, context_kv;
  std::vector<LayerLinears> layers;
  std::optional<DraftLogits> lm_head;
  DraftOutput output;
  StageObserver* observer = nullptr;
};

void observe_stages(DsparkDrafter& drafter, StageObserver* observer) { drafter.impl().observer = observer; }
DsparkDrafter prepare_on(std::unique_ptr<StepPhases> phases, const DrafterWeights& weights, const DrafterLimits& limits,
                         const DrafterTarget& target, const DrafterMemory& memory, DrafterShard shard) {
  return DsparkDrafter(std::make_unique<DsparkDrafter::Impl>(weights, limits, target, memory, Device::cpu(), shard,
                                                             std::function<void(std::uint64_t, std::uint64_t)>(),
                                                             std::move(phases)));
}
void sample_again(DsparkDrafter& drafter, const DraftBatch& batch) {
  StepBatch step;
  DsparkDrafter::Impl& impl = drafter.impl();
  throw_if_error(check_batch(impl.contract, batch, "drafter.draft", &step));
  impl.phases->sample(step, {});
  if (impl.weights.confidence) impl.phases->confidence(step, {});  // it reads the tokens
}
TensorView stage_result(const DsparkDrafter& drafter, Stage stage) {
  const DsparkDrafter::Impl& impl = drafter.impl();
  const StepBuffers& b = impl.buffers;
  const StepModel& m = impl.contract.model;
  if (stage == Stage::kContextProj)
    return TensorView::matrix(b.context, impl.contract.limits.max_ingest_rows, b.context_width, impl.device);
  if (stage == Stage::kValues)
    return TensorView::matrix(b.values, impl.contract.limits.request_counts.back() * m.k, m.heads * m.v, impl.device);
  fail(StatusCode::kUnsupported, "drafter.stage_result", "stage", stage_name(stage), "context_proj, values");
}
const StepModel& model_of(const DsparkDrafter& drafter) { return drafter.impl().contract.model; }
int markov_reads_of(const DsparkDrafter& drafter) { return drafter.impl().phases->markov_reads(); }

DsparkDrafter::DsparkDrafter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DsparkDrafter::DsparkDrafter(DsparkDrafter&&) noexcept = default;
DsparkDrafter& DsparkDrafter::operator=(DsparkDrafter&&) noexcept = default;
DsparkDrafter::~DsparkDrafter() = default;

DsparkDrafter DsparkDrafter::prepare(const DrafterWeights& weights, const DrafterLimits& limits,
                                     const DrafterTarget& target, const DrafterMemory& memory, Device device,
                                     DrafterShard shard,
                                     const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  return DsparkDrafter(std::make_unique<Impl>(weights, limits, target, memory, device, shard, progress));
}

void DsparkDrafter::ingest(const DraftBatch& batch, std::span<const TensorView> taps, Stream stream) {
  StepBatch step;
  throw_if_error(check_batch(impl_->contract, batch, "drafter.ingest", &step));
  std::array<Tap, kMaxTaps> found;
  throw_if_error(check_taps(impl_->contract, taps, step.rows, found.data()));
  impl_->ingest(step, {found.data(), taps.size()}, stream);
}

void DsparkDrafter::draft(const DraftBatch& batch, Stream stream) {
  StepBatch step;
  throw_if_error(check_batch(impl_->contract, batch, "drafter.draft", &step));
  impl_->draft(step, stream);
}

void DsparkDrafter::verify(const DraftBatch& batch, const VerifyBatch& verify, Stream stream) {
  StepBatch step;
  throw_if_error(check_batch(impl_->contract, batch, "drafter.verify", &step));
  VerifyStep what;
  throw_if_error(check_verify(impl_->contract, batch, verify, impl_->output, step.requests, &what));
  impl_->verify(step, what, stream);
}

const DraftOutput& DsparkDrafter::output() const { return impl_->output; }
const DrafterConfig& DsparkDrafter::config() const { return impl_->files.config(); }
std::int64_t DsparkDrafter::weight_bytes() const { return impl_->weight_bytes; }

}  // namespace twostep
