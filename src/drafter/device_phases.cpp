#include "drafter/device_phases.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "core/check.h"

namespace twostep {
namespace {

// Of kernels/draft, asserted in the text of each kernel that uses them.
constexpr std::int64_t kRowThreads = 256, kMergeThreads = 256, kVerifyThreads = 256, kActivateColumns = 256;
constexpr std::int64_t kQueryRows = 32, kKeys = 64, kStages = 2, kScoreSlices = 4, kAttendThreads = 512,
                       kMergeColumns = 256;                  // attention.cuh
constexpr std::int64_t kSm90AttendThreads = 256;             // sm90_attention.cuh
constexpr std::int64_t kPartStats = 40;                      // bytes, keys.cuh
constexpr std::int64_t kValueColumns = 16, kBlockRows = 16;  // block.cuh
constexpr std::int64_t kPad = 8, kHalfWarps = 8;             // block.cuh
constexpr std::int64_t kMaxSplits = 256;
constexpr std::int64_t kTileRows = 16, kPickShared = 31600, kFinishThreads = 512;  // sample.cuh
constexpr std::int64_t kStreamWarps = 4, kPickStages = 16;
constexpr std::int64_t kParts = 32;  // verify.cuh

std::int64_t pieces(std::int64_t size, std::int64_t piece) { return (size + piece - 1) / piece; }

// Whether a request has so many query rows that wide tiles fill a GPU: with 7 drafts K3 on one GPU, K3.1 on one or two.
bool has_many_rows(const StepModel& m) { return m.k * m.heads >= 256; }
// Queries of one CTA of sm90_attend. Tiles of 48 waste least of few rows; of many, wider ones leave more parts of the
// context while there are parts: K3.1 on one GPU with one request has 6 tiles of keys to a CTA, with 48 it would be 8.
std::int64_t query_columns(const StepModel& m) { return has_many_rows(m) ? 64 : 48; }
// Columns of one CTA of absorb, which has q from L2 by single words: wider ones read it less often.
std::int64_t absorb_columns(const StepModel& m) { return has_many_rows(m) && m.nope <= 128 ? 128 : 64; }

// Of a row of the Markov head in shared memory, bytes: kMarkovPitch of kernels/draft/sample.cuh.
std::int64_t markov_pitch(const StepModel& m) { return (2 * m.markov_rank + 63) / 128 * 128 + 64; }

std::int64_t pick_ctas(const StepModel& m, const StepGpu& gpu) {
  return std::min<std::int64_t>(gpu.sm_count, pieces(m.shard_vocab, kTileRows));
}

// The rings of kPicksStreamed, of as many tiles as fit, or of one that does not; and the shared memory of a CTA:
// StreamShared of kernels/draft/sample.cuh and they.
struct PickRings {
  std::int64_t stages, bytes;
};
PickRings pick_rings(const StepModel& m, const StepGpu& gpu) {
  const std::int64_t found = 8 * kStreamWarps * 8 + 4 * 8, arrived = 8 * kStreamWarps * kPickStages;
  const std::int64_t shared = pieces(8 * markov_pitch(m) + found, 128) * 128 + arrived;
  const std::int64_t stage = kStreamWarps * kTileRows * 2 * m.markov_rank;
  const std::int64_t stages = std::clamp<std::int64_t>((gpu.smem_per_block - shared) / stage, 1, kPickStages);
  return {stages, shared + stages * stage};
}

struct KernelText {
  const char* name;
  const char* file;
  const char* parameters;
  const char* call;
  std::int64_t threads;
  const char* asserts = "true";
};

const KernelText& text_of(StepKernel kernel) {
  static constexpr std::array<KernelText, kNumStepKernels> kTexts = {{
      {"gather_taps", "context", "const TapList<Model::kTaps> taps, const float* norm, u16* out",
       "gather_taps<Model>(taps, norm, out)", kRowThreads, "kRowThreads == 256"},
      {"norm_context", "context", "const u16* x, i64 x_stride, const float* norm, u16* out",
       "norm_context<Model>(x, x_stride, norm, out)", kRowThreads, "kRowThreads == 256"},
      {"begin_ingest", "context", "Batch batch, i32* status", "begin_ingest(batch, status)", kRowThreads,
       "kRowThreads == 256"},
      {"cache_context", "context",
       "Batch batch, const u16* kv, u16* const* caches, const float* const* norms, Cache cache, const float* "
       "frequency, "
       "i32* status",
       "cache_context<Model>(batch, kv, caches, norms, cache, frequency, status)", kRowThreads, "kRowThreads == 256"},
      {"embed", "block",
       "Batch batch, Cache cache, i32* ids, i64* position, i64* end, i64* first, i32* status, const u16* table, i64 "
       "table_stride, i64 first_token, i64 rows, const float* norm, u16* residual, u16* x",
       "embed<Model>(batch, cache, ids, position, end, first, status, table, table_stride, first_token, rows, norm, "
       "residual, x)",
       kRowThreads, "kRowThreads == 256"},
      {"add_norm", "block", "const u16* o, const float* norm, u16* residual, u16* out",
       "add_norm<Model>(o, norm, residual, out)", kRowThreads, "kRowThreads == 256"},
      {"latents", "block",
       "Batch batch, const u16* qkv, const i64* position, const float* q_norm, const float* kv_norm, const float* "
       "frequency, Cache cache, u16* q",
       "latents<Model>(batch, qkv, position, q_norm, kv_norm, frequency, cache, q)", kRowThreads, "kRowThreads == 256"},
      {"absorb", "block",
       "const u16* q, const u16* kv_b, const i64* position, const float* frequency, i64 rows, u16* out",
       "absorb<Model>(q, kv_b, position, frequency, rows, out)", 256, "kBlockRows == 16 && kHalfThreads == 256"},
      {"attend", "attention",
       "Batch batch, const u16* q, const i64* position, const i64* end, Cache cache, i64 window, int splits, u16* o, "
       "float* sums, PartStats* stats",
       "extern __shared__ uint4 memory[];\n  attend<Model, false>(batch, q, position, end, cache, window, splits, o, "
       "sums, stats, memory)",
       kAttendThreads,
       "kQueryRows == 32 && kKeys == 64 && kStages == 2 && kScoreSlices == 4 && kAttendThreads == 512 && "
       "sizeof(PartStats) == 40"},
      {"attend_causal", "attention",
       "Batch batch, const u16* q, const i64* position, const i64* end, Cache cache, i64 window, int splits, u16* o, "
       "float* sums, PartStats* stats",
       "extern __shared__ uint4 memory[];\n  attend<Model, true>(batch, q, position, end, cache, window, splits, o, "
       "sums, stats, memory)",
       kAttendThreads,
       "kQueryRows == 32 && kKeys == 64 && kStages == 2 && kScoreSlices == 4 && kAttendThreads == 512 && "
       "sizeof(PartStats) == 40"},
      {"merge", "attention",
       "const float* sums, const PartStats* stats, int splits, i64 requests, int warps_log2, u16* o",
       "merge<Model>(sums, stats, splits, requests, warps_log2, o)", kMergeThreads,
       "kMergeThreads == 256 && kMergeColumns == 256 && kMaxSplits == 256"},
      {"sm90_attend", "sm90_attention",
       "Batch batch, const u16* q, const i64* position, const i64* end, Cache cache, i64 window, int splits, u16* o, "
       "u16* sums, PartStats* stats",
       "extern __shared__ __align__(1024) u8 memory[];\n  sm90_attend<Model, false>(batch, q, position, end, cache, "
       "window, splits, o, "
       "sums, stats, memory)",
       kSm90AttendThreads, "kSm90AttendThreads == 256 && sizeof(PartStats) == 40"},
      {"sm90_attend_causal", "sm90_attention",
       "Batch batch, const u16* q, const i64* position, const i64* end, Cache cache, i64 window, int splits, u16* o, "
       "u16* sums, PartStats* stats",
       "extern __shared__ __align__(1024) u8 memory[];\n  sm90_attend<Model, true>(batch, q, position, end, cache, "
       "window, splits, o, "
       "sums, stats, memory)",
       kSm90AttendThreads, "kSm90AttendThreads == 256 && sizeof(PartStats) == 40"},
      {"sm90_merge", "attention",
       "const u16* sums, const PartStats* stats, int splits, i64 requests, int warps_log2, u16* o",
       "merge<Model>(sums, stats, splits, requests, warps_log2, o)", kMergeThreads,
       "kMergeThreads == 256 && kMergeColumns == 256 && kMaxSplits == 256"},
      {"values", "block", "const u16* o, const u16* kv_b, const u16* gate, i64 rows, u16* out",
       "values<Model>(o, kv_b, gate, rows, out)", 256,
       "kValueColumns == 16 && kBlockRows == 16 && kHalfThreads == 256"},
      {"activate", "block", "const u16* gate_up, u16* out", "activate<Model>(gate_up, out)", kActivateColumns},
      {"picks", "sample", "Batch batch, Sampling sampling",
       "extern __shared__ uint4 memory[];\n  picks<Model>(batch, sampling, memory)", 256,
       "kSampleThreads == 256 && kTileRows == 16 && sizeof(PickShared) == 31600"},
      {"picks_streamed", "sample", "Batch batch, Sampling sampling, int stages",
       "extern __shared__ __align__(128) u8 memory[];\n  picks_streamed<Model>(batch, sampling, stages, memory)",
       kStreamWarps * 32, "kStreamWarps == 4 && kTileRows == 16 && kMaxStages == 16"},
      {"finish", "sample",
       "Batch batch, Sampling sampling, int ctas, const u16* hidden, const float* weight, const float* calibration, "
       "float* confidence, float* survival",
       "finish<Model>(batch, sampling, ctas, hidden, weight, calibration, confidence, survival)", kFinishThreads,
       "kFinishThreads == 512"},
      {"row_statistics", "verify", "Batch batch, Verify verify", "row_statistics<Model>(batch, verify)", kVerifyThreads,
       "kVerifyThreads == 256 && kParts == 32"},
      {"residual_mass", "verify", "Batch batch, Verify verify", "residual_mass<Model>(batch, verify)", kVerifyThreads,
       "kVerifyThreads == 256 && kParts == 32"},
      {"draw", "verify", "Batch batch, Verify verify", "draw<Model>(batch, verify)", kVerifyThreads,
       "kVerifyThreads == 256 && kParts == 32"},
      {"emit", "verify", "Batch batch, Verify verify", "emit<Model>(batch, verify)", kParts, "kParts == kWarp"},
  }};
  return kTexts[static_cast<std::size_t>(kernel)];
}

// The launches of a step. Buffers of its own: parts of the attention, bests of the picks, statistics of the rows.
class DevicePhases final : public StepPhases {
 public:
  explicit DevicePhases(std::unique_ptr<StepLauncher> launcher) : launcher_(std::move(launcher)) {}

  void* allocate(std::size_t bytes) override { return launcher_->allocate(bytes); }
  void upload(void* to, const void* from, std::size_t bytes) override { launcher_->upload(to, from, bytes); }

  void prepare(const StepModel& model, const StepWeights& weights, const StepBuffers& buffers, const CacheShape& cache,
               std::int64_t max_requests) override {
    m_ = model;
    w_ = weights;
    b_ = buffers;
    cache_ = cache;
    max_requests_ = max_requests;
    gpu_ = launcher_->gpu();
    wgmma_ = step_kernel_possible(StepKernel::kSm90Attend, m_, gpu_);
    throw_if_error(check_picks(m_, gpu_));
    launcher_->load({model, buffers.gate != nullptr, weights.fc_norm != nullptr});

    std::vector<std::uint16_t*> caches;
    std::vector<const float*> norms;
    for (const LayerWeights& layer : w_.layers) {
      caches.push_back(layer.cache);
      norms.push_back(layer.kv_norm);
    }
    caches_ = copy(caches);
    norms_ = copy(norms);
    taps_.resize(static_cast<std::size_t>(2 * m_.taps));

    std::int64_t parts = 0;
    for (std::int64_t r = 1; r <= max_requests; ++r) parts = std::max(parts, r * splits_of(r));
    const std::int64_t rows = m_.k * m_.heads;
    sums_ = allocate(static_cast<std::size_t>(parts * rows * m_.kv_lora) * (wgmma_ ? 2 : 4));  // FP16 or FP32
    stats_ = allocate(static_cast<std::size_t>(parts * rows * kPartStats));
    picks_ = step_kernel_possible(StepKernel::kPicks, m_, gpu_) ? StepKernel::kPicks : StepKernel::kPicksStreamed;
    pick_stages_ = static_cast<std::int32_t>(pick_rings(m_, gpu_).stages);
    ctas_ = static_cast<std::int32_t>(pick_ctas(m_, gpu_));
    const auto requests = static_cast<std::size_t>(max_requests), k = static_cast<std::size_t>(m_.k);
    constexpr auto kNoneYet = ~std::uint64_t{0};  // sample.cuh
    sampling_ = {b_.base,
                 w_.markov_w1,
                 w_.markov_w2,
                 b_.ids,
                 b_.first_position,
                 b_.draft_logits,
                 copy(std::vector<std::uint64_t>(k * requests * static_cast<std::size_t>(ctas_), kNoneYet)),
                 b_.tokens,
                 b_.status};
    const auto of_request = static_cast<std::size_t>(kParts);
    row_stats_ = room<DeviceRowStats>(requests * (2 * k + 1) * of_request);
    masses_ = room<double>(requests * k * of_request);
    drawn_ = room<DeviceDrawn>(requests * of_request);
  }

  // ---- ingest

  void gather_taps(const StepBatch& batch, const Tap* taps, Stream stream) override {
    const auto count = static_cast<std::size_t>(m_.taps);
    for (std::size_t i = 0; i < count; ++i) {
      taps_[i] = reinterpret_cast<std::uint64_t>(taps[i].data);
      taps_[count + i] = static_cast<std::uint64_t>(taps[i].stride);
    }
    void* arguments[] = {taps_.data(), &w_.fc_norm, &b_.taps};
    launch(StepKernel::kGatherTaps, {batch.rows, m_.taps, 1}, stream, arguments);
  }

  void norm_context(const StepBatch& batch, Stream stream) override {
    void* arguments[] = {&b_.context, &b_.context_width, &w_.context_norm, &b_.context_normed};
    launch(StepKernel::kNormContext, {batch.rows, 1, 1}, stream, arguments);
  }

  void cache_context(const StepBatch& batch, Stream stream) override {
    StepBatch on_device = batch;
    DeviceCache cache = cache_of(nullptr);
    void* begin[] = {&on_device, &b_.status};
    launch(StepKernel::kBeginIngest, {1, 1, 1}, stream, begin);
    void* arguments[] = {&on_device, &b_.context_kv, &caches_, &norms_, &cache, &w_.inverse_frequency, &b_.status};
    launch(StepKernel::kCacheContext, {batch.rows, m_.layers, 1}, stream, arguments);
  }

  // ---- draft

  void queries(const StepBatch&, Stream) override {}  // `embed` does it

  void embed(const StepBatch& batch, Stream stream) override {
    StepBatch on_device = batch;
    DeviceCache cache = cache_of(nullptr);
    void* arguments[] = {
        &on_device,   &cache,    &b_.ids,          &b_.sequence_position, &b_.end,        &b_.first_position,
        &b_.status,   &w_.embed, &w_.embed_stride, &w_.embed_first,       &w_.embed_rows, &w_.layers[0].input_norm,
        &b_.residual, &b_.x};
    launch(StepKernel::kEmbed, {batch.requests * (1 + m_.k), 1, 1}, stream, arguments);
  }

  void latents(const StepBatch& batch, std::size_t layer, Stream stream) override {
    StepBatch on_device = batch;
    LayerWeights& w = w_.layers[layer];
    DeviceCache cache = cache_of(w.cache);
    void* arguments[] = {&on_device, &b_.qkv,   &b_.sequence_position, &w.q_norm, &w.kv_norm, &w_.inverse_frequency,
                         &cache,     &b_.q_lora};
    launch(StepKernel::kLatents, {batch.requests * m_.k, 2, 1}, stream, arguments);
  }

  void absorb(const StepBatch& batch, std::size_t layer, Stream stream) override {
    std::int64_t rows = batch.requests * m_.k;
    void* arguments[] = {&b_.q,       &w_.layers[layer].kv_b, &b_.sequence_position, &w_.inverse_frequency, &rows,
                         &b_.q_latent};
    launch(StepKernel::kAbsorb, {pieces(m_.kv_lora, absorb_columns(m_)) + 1, m_.heads, pieces(rows, kBlockRows)},
           stream, arguments);
  }

  void attend(const StepBatch& batch, std::size_t layer, Stream stream) override {
    StepBatch on_device = batch;
    LayerWeights& w = w_.layers[layer];
    DeviceCache cache = cache_of(w.cache);
    auto splits = static_cast<std::int32_t>(splits_of(batch.requests));
    void* arguments[] = {&on_device, &b_.q_latent, &b_.sequence_position, &b_.end, &cache,
                         &w.window,  &splits,      &b_.attended,          &sums_,  &stats_};
    const StepKernel kernel = wgmma_     ? w.causal ? StepKernel::kSm90AttendCausal : StepKernel::kSm90Attend
                              : w.causal ? StepKernel::kAttendCausal
                                         : StepKernel::kAttend;
    launch(kernel, {query_tiles(), splits, batch.requests}, stream, arguments);
    if (splits == 1) return;
    // A row's parts are shared by so many warps that each has its own under way at once, up to all of a CTA.
    const std::int64_t at_once = wgmma_ ? 9 : 4;
    std::int32_t log2 = 0;
    while ((32 << log2) < kMergeThreads && (at_once << log2) < splits) ++log2;
    std::int64_t requests = batch.requests;
    void* parts[] = {&sums_, &stats_, &splits, &requests, &log2, &b_.attended};
    const std::int64_t units = requests * m_.k * m_.heads * pieces(m_.kv_lora, kMergeColumns);
    launch(wgmma_ ? StepKernel::kSm90Merge : StepKernel::kMerge, {pieces(units << log2, kMergeThreads / 32), 1, 1},
           stream, parts);
  }

  void values(const StepBatch& batch, std::size_t layer, Stream stream) override {
    std::int64_t rows = batch.requests * m_.k;
    void* arguments[] = {&b_.attended, &w_.layers[layer].kv_b, &b_.gate, &rows, &b_.values};
    launch(StepKernel::kValues, {pieces(m_.v, kValueColumns), m_.heads, pieces(rows, kBlockRows)}, stream, arguments);
  }

  void add_norm(const StepBatch& batch, const float* weight, std::uint16_t* out, Stream stream) override {
    void* arguments[] = {&b_.o, &weight, &b_.residual, &out};
    launch(StepKernel::kAddNorm, {batch.requests * m_.k, 1, 1}, stream, arguments);
  }

  void activate(const StepBatch& batch, Stream stream) override {
    void* arguments[] = {&b_.gate_up, &b_.inner};
    launch(StepKernel::kActivate, {pieces(m_.inner, kActivateColumns), batch.requests * m_.k, 1}, stream, arguments);
  }

  void sample(const StepBatch& batch, Stream stream) override {
    StepBatch on_device = batch;
    void* drafts[] = {&on_device, &sampling_, &pick_stages_};  // picks takes the first two
    launch(picks_, {ctas_, 1, 1}, stream, drafts);
    void* arguments[] = {&on_device,     &sampling_,      &ctas_,         &b_.hidden,
                         &w_.confidence, &w_.calibration, &b_.confidence, &b_.survival};
    launch(StepKernel::kFinish, {batch.requests, 1, 1}, stream, arguments);
  }

  int markov_reads() const override { return picks_ == StepKernel::kPicks ? 1 : m_.k; }

  void confidence(const StepBatch&, Stream) override {}  // `finish` gave it

  void verify(const StepBatch& batch, const VerifyStep& v, Stream stream) override {
    StepBatch on_device = batch;
    const bool block = v.method == VerifyMethod::kBlock;
    DeviceVerify what = {v.draft_ids,
                         v.draft_ids_stride,
                         v.logits,
                         v.logits_request_stride,
                         v.logits_row_stride,
                         b_.draft_logits,
                         v.emitted,
                         v.emitted_stride,
                         v.accepted,
                         b_.first_position,
                         b_.status,
                         row_stats_,
                         masses_,
                         drawn_,
                         v.logits_bf16,
                         v.one_hot,
                         block};
    void* arguments[] = {&on_device, &what};
    launch(StepKernel::kRowStatistics, {kParts, 2 * m_.k + 1, batch.requests}, stream, arguments);
    if (block && !v.one_hot && m_.k > 1)
      launch(StepKernel::kResidualMass, {kParts, m_.k - 1, batch.requests}, stream, arguments);
    launch(StepKernel::kDraw, {kParts, batch.requests, 1}, stream, arguments);
    launch(StepKernel::kEmit, {batch.requests, 1, 1}, stream, arguments);
  }

 private:
  // No launch is empty: a grid must not be.
  void launch(StepKernel kernel, Grid grid, Stream stream, void** arguments) {
    if (grid.x > 0 && grid.y > 0 && grid.z > 0) launcher_->launch(kernel, grid, stream, arguments);
  }

  template <class T>
  T* room(std::size_t count) {
    return static_cast<T*>(allocate(count * sizeof(T)));
  }
  template <class T>
  T* copy(const std::vector<T>& values) {
    auto* to = room<T>(values.size());
    upload(to, values.data(), values.size() * sizeof(T));
    return to;
  }

  DeviceCache cache_of(std::uint16_t* data) const { return {data, cache_.pages, cache_.page_rows, cache_.page_stride}; }

  std::int64_t query_tiles() const { return pieces(m_.k * m_.heads, wgmma_ ? query_columns(m_) : kQueryRows); }

  // Parts of the context: so many that the CTAs of one step fill the GPU once. A part shorter than a tile is empty.
  // A request's bits depend on how its context is parted: strict, all batches part it alike, into as many as a small
  // one likes and a full one can write and read again.
  std::int64_t splits_of(std::int64_t requests) const {
    constexpr std::int64_t kStrictSplits = 16;
    const auto filling = [&](std::int64_t r) { return gpu_.sm_count / (r * query_tiles()); };
    const std::int64_t parts =
        m_.strict ? std::min(filling(1), std::max(kStrictSplits, filling(max_requests_))) : filling(requests);
    return std::clamp<std::int64_t>(parts, 1, std::clamp<std::int64_t>(m_.max_len / kKeys, 1, kMaxSplits));
  }

  const std::unique_ptr<StepLauncher> launcher_;
  StepModel m_;
  StepWeights w_;
  StepBuffers b_;
  CacheShape cache_;
  std::int64_t max_requests_ = 0;
  std::uint16_t** caches_ = nullptr;
  const float** norms_ = nullptr;
  std::vector<std::uint64_t> taps_;  // TapList of kernels/draft/context.cuh: addresses, then strides
  StepGpu gpu_;
  bool wgmma_ = false;  // the attention's kernels are those of sm_90a
  void* sums_ = nullptr;
  void* stats_ = nullptr;
  StepKernel picks_ = StepKernel::kPicks;
  std::int32_t pick_stages_ = 0;  // of its rings
  std::int32_t ctas_ = 0;         // of its grid
  DeviceSampling sampling_{};
  DeviceRowStats* row_stats_ = nullptr;
  double* masses_ = nullptr;
  DeviceDrawn* drawn_ = nullptr;
};

}  // namespace

std::string step_model_text(const StepKernelModel& what) {
  const StepModel& m = what.model;
  std::string text = "struct Model {\n";
  const auto integer = [&](const char* name, std::int64_t value) {
    text += fmt::format("  static constexpr int {} = {};\n", name, value);
  };
  const auto real = [&](const char* name, float value) {  // exact: in hexadecimal
    text += fmt::format("  static constexpr float {} = {:a}f;\n", name, value);
  };
  const auto flag = [&](const char* name, bool value) {
    text += fmt::format("  static constexpr bool {} = {};\n", name, value);
  };
  integer("kHidden", m.hidden);
  integer("kTargetHidden", m.target_hidden);
  integer("kTaps", m.taps);
  integer("kLayers", m.layers);
  integer("kHeads", m.heads);
  integer("kQLora", m.q_lora);
  integer("kKvLora", m.kv_lora);
  integer("kQueryColumns", query_columns(m));
  integer("kAbsorbColumns", absorb_columns(m));
  integer("kNope", m.nope);
  integer("kRope", m.rope);
  integer("kV", m.v);
  integer("kInner", m.inner);
  integer("kVocab", m.vocab);
  integer("kShardVocab", m.shard_vocab);
  integer("kFirstToken", m.first_token);
  integer("kMarkovRank", m.markov_rank);
  integer("kMaskToken", m.mask_token);
  text += fmt::format("  static constexpr long long kMaxLen = {};\n", m.max_len);  // up to 2^31
  integer("kK", m.k);
  integer("kCacheWidth", m.cache_width());
  integer("kHeadWidth", m.head_width());
  real("kEps", m.eps);
  real("kScale", m.softmax_scale);
  real("kRopeAmplitude", m.rope_amplitude);
  real("kLogitScale", m.logit_scale);
  real("kSituBeta", m.situ_beta);
  real("kSituLinearBeta", m.situ_linear_beta);
  flag("kNeox", m.neox);
  flag("kSitu", m.situ);
  flag("kGate", what.gate);
  flag("kFcNorm", what.fc_norm);
  flag("kProbabilistic", m.probabilistic);
  flag("kDraftLogitsBf16", m.draft_logits_bf16);
  flag("kConfidenceWithMarkov", m.confidence_with_markov);
  return text + "};\n";
}

Status check_sizes(const StepModel& m) {
  const auto refuse = [](const char* name, const std::string& value, const std::string& accepted) {
    return refusal(StatusCode::kUnsupported, "drafter.prepare", name, value, accepted, "run the draft step on the CPU");
  };
  const auto within = [&](const char* name, std::int64_t value, std::int64_t bytes_of_one, std::int64_t other) {
    constexpr std::int64_t kStatic = 48 << 10;
    const std::int64_t most = (kStatic - other) / bytes_of_one / 8 * 8;
    return value <= most ? Status() : refuse(name, std::to_string(value), fmt::format("up to {} on a GPU", most));
  };
  if (m.kv_lora % 16 != 0 || m.rope % 16 != 0)
    return refuse("kv_lora_rank, qk_rope_head_dim", fmt::format("{}, {}", m.kv_lora, m.rope),
                  "multiples of 16 on a GPU");
  // absorb: rows of W_UK, the depth rounded up to 32, and q's, in registers, at the same price. values: rows of o and
  // of W_UV, FP32 sums of each warp.
  const std::int64_t of_depth = 2 * (kBlockRows + absorb_columns(m) + kPad);
  if (auto s = within("qk_nope_head_dim", m.nope, of_depth, 31 * of_depth + 2 * kBlockRows * kPad); !s.ok()) return s;
  return within("kv_lora_rank", m.kv_lora, 2 * (kBlockRows + kValueColumns),
                2 * (kBlockRows + kValueColumns) * kPad + 4 * kHalfWarps * kBlockRows * kValueColumns);
}

Status check_picks(const StepModel& m, const StepGpu& gpu) {
  const auto possible = [&](StepKernel kernel, const StepModel& of) { return step_kernel_possible(kernel, of, gpu); };
  if (possible(StepKernel::kPicks, m) || possible(StepKernel::kPicksStreamed, m)) return {};
  StepModel smaller = m;
  while (smaller.markov_rank > 8 && !possible(StepKernel::kPicksStreamed, smaller)) smaller.markov_rank -= 8;
  return refusal(StatusCode::kUnsupported, "drafter.prepare", "markov_rank", std::to_string(m.markov_rank),
                 fmt::format("up to {} on this GPU, with {} bytes of shared memory for a block", smaller.markov_rank,
                             gpu.smem_per_block),
                 "run the draft step on the CPU");
}

CompileRequest step_kernel_request(StepKernel kernel, const StepKernelModel& what, const std::string& arch) {
  const StepModel& m = what.model;
  throw_if_error(check_sizes(m));
  const KernelText& text = text_of(kernel);
  return {
      fmt::format("draft-{}-h{}-n{}-k{}-{}", text.name, m.hidden, m.heads, m.k, arch), "kernel",
      fmt::format("#include \"draft/{}.cuh\"\n\nnamespace twostep::draft {{\n\n{}\nstatic_assert({});\n\nextern \"C\" "
                  "__global__ void __launch_bounds__({}, 1) kernel({}) {{\n  {};\n}}\n\n}}  // namespace "
                  "twostep::draft\n",
                  text.file, step_model_text(what), text.asserts, text.threads, text.parameters, text.call),
      arch, "draft-1"};
}

std::int64_t step_kernel_smem(StepKernel kernel, const StepModel& m, const StepGpu& gpu) {
  switch (kernel) {
    case StepKernel::kPicks: {
      const std::int64_t tiles = pieces(m.shard_vocab, kTileRows);
      return kPickShared + pieces(tiles, gpu.sm_count) * kTileRows * markov_pitch(m);
    }
    case StepKernel::kPicksStreamed: return pick_rings(m, gpu).bytes;
    case StepKernel::kAttend:
    case StepKernel::kAttendCausal:  // AttendShared of kernels/draft/attention.cuh
      return 2 * (kQueryRows + kStages * kKeys) * (m.cache_width() + 8) + 2 * kQueryRows * (kKeys + 8) +
             4 * kScoreSlices * kQueryRows * (kKeys + 4) + 4 * 3 * kQueryRows + kStages * (8 + 4 * kKeys);
    case StepKernel::kSm90Attend:
    case StepKernel::kSm90AttendCausal:  // Sm90AttendShared of kernels/draft/sm90_attention.cuh
      return 2 * (query_columns(m) + 2 * kKeys) * m.cache_width() + (2 * kKeys + 30) * query_columns(m) + 16 * kKeys;
    default: return 0;
  }
}

bool step_kernel_possible(StepKernel kernel, const StepModel& m, const StepGpu& gpu) {
  switch (kernel) {
    case StepKernel::kPicks:
    case StepKernel::kPicksStreamed: return step_kernel_smem(kernel, m, gpu) <= gpu.smem_per_block;
    case StepKernel::kSm90Attend:
    case StepKernel::kSm90AttendCausal:
    case StepKernel::kSm90Merge:  // up to four blocks of o^T in registers
      return gpu.wgmma && m.kv_lora % 128 == 0 && m.kv_lora <= 512 && m.rope % 64 == 0 &&
             step_kernel_smem(StepKernel::kSm90Attend, m, gpu) <= gpu.smem_per_block;
    default: return true;
  }
}

bool step_kernel_needed(StepKernel kernel, const StepModel& m, const StepGpu& gpu) {
  const auto without = [&](StepKernel better) { return !step_kernel_possible(better, m, gpu); };
  switch (kernel) {
    case StepKernel::kPicksStreamed: return without(StepKernel::kPicks) && step_kernel_possible(kernel, m, gpu);
    case StepKernel::kAttend: return without(StepKernel::kSm90Attend);
    case StepKernel::kAttendCausal: return without(StepKernel::kSm90AttendCausal);
    case StepKernel::kMerge: return without(StepKernel::kSm90Merge);
    default: return step_kernel_possible(kernel, m, gpu);
  }
}

std::uint32_t step_kernel_threads(StepKernel kernel) { return static_cast<std::uint32_t>(text_of(kernel).threads); }

std::unique_ptr<StepPhases> make_device_phases(std::unique_ptr<StepLauncher> launcher) {
  return std::make_unique<DevicePhases>(std::move(launcher));
}

}  // namespace twostep
