#include "measure/draft_loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "core/check.h"
#include "core/hash.h"
#include "io/synth.h"

namespace twostep {
namespace {

constexpr std::int64_t kPageRows = 64;
constexpr std::int64_t kPrefillRows = 1024;  // ingested at once

float toy_logit(std::uint64_t base, std::int64_t token) {
  return 4 * synth_unit(base, static_cast<std::uint64_t>(token));
}

std::uint64_t toy_base(std::uint64_t seed, std::int64_t a, std::int64_t b, std::int64_t vocab) {
  return synth_base("toy", seed + static_cast<std::uint64_t>(a * vocab + b));
}

void check(const DraftLoopOptions& o, const DrafterConfig& config) {
  const auto within = [](const char* name, std::int64_t value, std::int64_t low, std::int64_t high,
                         const char* remedy = "") {
    if (value < low || value > high)
      fail(StatusCode::kInvalidArgument, "draft", name, std::to_string(value), fmt::format("{} to {}", low, high),
           remedy);
  };
  within("requests", o.requests, 1, 512);
  within("draft-tokens", o.draft_tokens, 1, kMaxDraftTokens);
  // A step may reach draft_tokens + 1 positions, and the last one drafts beyond. What is left after it is for steps.
  const std::int64_t per_step = o.draft_tokens + 1, room = config.max_position_embeddings - 1;
  within("context", o.context, 2, room - per_step, "leave room for one step below max_position_embeddings");
  within("steps", o.steps, 1, std::min<std::int64_t>(1'000'000, (room - o.context) / per_step),
         "shorten the context, or take another max_position_embeddings");
  if (o.temperature > 0 && o.shard.ranks > 1)
    fail(StatusCode::kUnsupported, "draft", "temperature", fmt::format("{}", o.temperature), "0 with tp above 1",
         "draft logits of one rank are no law over the vocabulary");
  if (!(o.temperature >= 0 && o.temperature <= 1e6f))
    fail(StatusCode::kInvalidArgument, "draft", "temperature", fmt::format("{}", o.temperature), "0 to 1e6");
}

}  // namespace

void toy_logits(std::uint64_t seed, std::int64_t a, std::int64_t b, std::span<float> out) {
  const std::uint64_t base = toy_base(seed, a, b, static_cast<std::int64_t>(out.size()));
  for (std::size_t v = 0; v < out.size(); ++v) out[v] = toy_logit(base, static_cast<std::int64_t>(v));
}

std::int32_t toy_greedy(std::uint64_t seed, std::int64_t a, std::int64_t b, std::int64_t vocab) {
  const std::uint64_t base = toy_base(seed, a, b, vocab);
  std::int64_t best = 0;
  for (std::int64_t v = 1; v < vocab; ++v)
    if (toy_logit(base, v) > toy_logit(base, best)) best = v;
  return static_cast<std::int32_t>(best);
}

// What a serving process would keep: the caches, the batch, the target's logits.
struct DraftLoop::Buffers {
  std::vector<std::vector<std::uint16_t>> cache;  // per layer
  std::vector<std::vector<std::uint16_t>> taps;
  std::vector<std::int32_t> request, row_start, rejected, anchor, page_table, step, emitted, accepted;
  std::vector<std::int64_t> positions, seed;
  std::vector<float> temperature, logits;

  DraftBatch batch(std::int64_t requests, std::int64_t rows) {
    const std::int64_t width = static_cast<std::int64_t>(page_table.size()) / requests;
    return {TensorView::dense(request.data(), DType::kI32, {requests}),
            TensorView::dense(row_start.data(), DType::kI32, {requests + 1}),
            TensorView::dense(rejected.data(), DType::kI32, {requests}),
            TensorView::dense(anchor.data(), DType::kI32, {requests}),
            TensorView::dense(positions.data(), DType::kI64, {rows}),
            TensorView::dense(page_table.data(), DType::kI32, {requests, width}),
            TensorView::dense(temperature.data(), DType::kF32, {requests}),
            TensorView::dense(seed.data(), DType::kI64, {requests}),
            TensorView::dense(step.data(), DType::kI32, {requests})};
  }
};

class DraftLoop::Timer final : public StageObserver {
 public:
  void start() {
    step_.fill(0);
    last_ = std::chrono::steady_clock::now();
  }
  void done(Stage stage, Stream) override {
    const auto now = std::chrono::steady_clock::now();
    step_[static_cast<std::size_t>(stage)] += std::chrono::duration<double, std::micro>(now - last_).count();
    last_ = now;
  }
  void skip() { last_ = std::chrono::steady_clock::now(); }  // what went by was none of the drafter's
  void keep() {
    for (std::size_t i = 0; i < kNumStages; ++i) times[i].push_back(step_[i]);
  }
  std::array<std::vector<double>, kNumStages> times;

 private:
  std::array<double, kNumStages> step_{};
  std::chrono::steady_clock::time_point last_;
};

DraftLoop::DraftLoop(const DrafterWeights& weights, const DraftLoopOptions& options,
                     const std::function<void(std::uint64_t, std::uint64_t)>& progress)
    : options_(options), b_(std::make_unique<Buffers>()), timer_(std::make_unique<Timer>()) {
  const DrafterConfig& config = weights.config();
  check(options, config);
  const auto requests = static_cast<std::size_t>(options.requests);
  status_.assign(requests, 0);
  const std::int64_t verified = options.draft_tokens + 1;

  DrafterLimits limits;
  limits.request_counts = {options.requests};
  limits.num_draft_tokens = options.draft_tokens;
  limits.max_ingest_rows =
      std::max(options.requests * verified, std::min(options.requests * options.context, kPrefillRows));
  limits.mode = options.temperature > 0 ? DraftMode::kProbabilistic : DraftMode::kGreedy;
  DrafterTarget target{config.target_layer_ids, config.aux_hidden_stream, {}, {}};

  const std::int64_t longest = options.context + options.steps * verified + verified;
  const std::int64_t pages = (longest + kPageRows - 1) / kPageRows;  // of one request; page 0 is nobody's
  const std::int64_t width = config.kv_lora_rank + config.qk_rope_head_dim;
  DrafterMemory memory;
  b_->cache.resize(static_cast<std::size_t>(config.num_hidden_layers));
  for (auto& cache : b_->cache) {
    cache.resize(static_cast<std::size_t>((1 + options.requests * pages) * kPageRows * width));
    memory.cache.push_back(
        TensorView::dense(cache.data(), DType::kBF16, {1 + options.requests * pages, kPageRows, width}));
  }
  drafter_.emplace(DsparkDrafter::prepare(weights, limits, target, memory, Device::cpu(), options.shard, progress));
  observe_stages(*drafter_, timer_.get());

  b_->taps.assign(
      static_cast<std::size_t>(config.num_taps()),
      std::vector<std::uint16_t>(static_cast<std::size_t>(limits.max_ingest_rows * config.target_hidden_size)));
  b_->row_start.resize(requests + 1);
  b_->rejected.assign(requests, 0);
  b_->anchor.resize(requests);
  b_->temperature.assign(requests, options.temperature);
  b_->step.assign(requests, 0);
  b_->emitted.resize(requests * static_cast<std::size_t>(verified));
  b_->accepted.resize(requests);
  b_->positions.resize(static_cast<std::size_t>(limits.max_ingest_rows));
  b_->logits.resize(requests * static_cast<std::size_t>(verified * config.vocab_size));
  for (int r = 0; r < options.requests; ++r) {
    b_->request.push_back(r);
    b_->seed.push_back(static_cast<std::int64_t>(options.seed + static_cast<std::uint64_t>(r)));
    for (std::int64_t page = 0; page < pages; ++page)
      b_->page_table.push_back(static_cast<std::int32_t>(1 + r * pages + page));
    std::vector<std::int32_t> prompt;
    for (std::int64_t i = 0; i < options.context; ++i)
      prompt.push_back(
          static_cast<std::int32_t>(mix64(options.seed + static_cast<std::uint64_t>(r * options.context + i)) %
                                    static_cast<std::uint64_t>(config.vocab_size)));
    prompt.push_back(toy_greedy(options.seed, prompt[prompt.size() - 2], prompt.back(), config.vocab_size));
    tokens_.push_back(std::move(prompt));
  }

  const std::int64_t at_once = std::max<std::int64_t>(1, limits.max_ingest_rows / options.requests);
  for (std::int64_t first = 0; first < options.context; first += at_once)
    ingest(std::min(at_once, options.context - first), std::vector<std::int64_t>(requests, first));
}

DraftLoop::~DraftLoop() {
  if (drafter_) observe_stages(*drafter_, nullptr);
}

// `rows` rows of each request, from its first position on. Which of them count is in `rejected`.
void DraftLoop::ingest(std::int64_t rows, const std::vector<std::int64_t>& first_positions) {
  const std::int64_t width = drafter_->config().target_hidden_size;
  std::vector<TensorView> taps;
  for (std::size_t tap = 0; tap < b_->taps.size(); ++tap) {
    const std::string name = "tap." + std::to_string(tap);
    for (int r = 0; r < options_.requests; ++r) {
      const auto first = first_positions[static_cast<std::size_t>(r)];
      fill(name, options_.seed + static_cast<std::uint64_t>(r), static_cast<std::uint64_t>(first * width),
           ValueKind::kFeature, 0,
           std::span(b_->taps[tap])
               .subspan(static_cast<std::size_t>(r * rows * width), static_cast<std::size_t>(rows * width)));
    }
    taps.push_back(TensorView::matrix(b_->taps[tap].data(), options_.requests * rows, width));
  }
  for (std::int64_t r = 0; r <= options_.requests; ++r)
    b_->row_start[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(r * rows);
  for (std::int64_t r = 0; r < options_.requests; ++r)
    for (std::int64_t i = 0; i < rows; ++i)
      b_->positions[static_cast<std::size_t>(r * rows + i)] = first_positions[static_cast<std::size_t>(r)] + i;
  timer_->skip();
  drafter_->ingest(b_->batch(options_.requests, options_.requests * rows), taps);
  keep_status();
}

void DraftLoop::keep_status() {
  const auto* bits = static_cast<const std::int32_t*>(drafter_->output().status.data);
  for (std::size_t r = 0; r < status_.size(); ++r) status_[r] |= bits[r];
}

void DraftLoop::step() {
  const std::int64_t vocab = drafter_->config().vocab_size, k = options_.draft_tokens, requests = options_.requests;
  timer_->start();
  for (std::int64_t r = 0; r < requests; ++r)
    b_->anchor[static_cast<std::size_t>(r)] = tokens(static_cast<int>(r)).back();
  // The rows of the last ingest say where the block starts.
  const std::int64_t rows = b_->row_start.back();
  const DraftBatch batch = b_->batch(requests, rows);
  timer_->skip();
  drafter_->draft(batch);

  // The target's logits after the anchor and after each draft.
  const auto* drafts = static_cast<const std::int32_t*>(drafter_->output().tokens.data);
  for (std::int64_t r = 0; r < requests; ++r) {
    const auto& sequence = tokens(static_cast<int>(r));
    std::int64_t a = sequence[sequence.size() - 2], b = sequence.back();
    for (std::int64_t i = 0; i <= k; ++i) {
      const auto row =
          std::span(b_->logits)
              .subspan(static_cast<std::size_t>((r * (k + 1) + i) * vocab), static_cast<std::size_t>(vocab));
      toy_logits(options_.seed, a, b, row);
      if (options_.temperature > 0)
        for (float& logit : row) logit /= options_.temperature;
      if (i < k) a = std::exchange(b, drafts[r * k + i]);
    }
  }
  VerifyBatch verify;
  verify.draft_ids = drafter_->output().tokens;
  verify.logits = TensorView::dense(b_->logits.data(), DType::kF32, {requests, k + 1, vocab});
  verify.emitted = TensorView::dense(b_->emitted.data(), DType::kI32, {requests, k + 1});
  verify.accepted = TensorView::dense(b_->accepted.data(), DType::kI32, {requests});
  verify.one_hot = options_.temperature == 0;
  verify.method = options_.method;
  timer_->skip();
  drafter_->verify(batch, verify);
  keep_status();

  // The rows that the target verified: the anchor's, then the drafts'.
  std::vector<std::int64_t> first;
  for (std::size_t r = 0; r < tokens_.size(); ++r) {
    first.push_back(static_cast<std::int64_t>(tokens_[r].size()) - 1);
    const std::int32_t accepted = b_->accepted[r];
    const auto emitted = b_->emitted.begin() + static_cast<std::ptrdiff_t>(r) * (k + 1);
    tokens_[r].insert(tokens_[r].end(), emitted, emitted + accepted);
    b_->rejected[r] = static_cast<std::int32_t>(k + 1 - accepted);
  }
  ingest(k + 1, first);
  timer_->keep();
  ++steps_done_;
}

std::int64_t DraftLoop::emitted(int r) const {
  return static_cast<std::int64_t>(tokens(r).size()) - options_.context - 1;
}

std::vector<std::int32_t> DraftLoop::drafts(int r) const {
  const auto* ids = static_cast<const std::int32_t*>(drafter_->output().tokens.data) + r * options_.draft_tokens;
  return {ids, ids + options_.draft_tokens};
}

double DraftLoop::accept_length() const {
  std::int64_t sum = 0;
  for (int r = 0; r < options_.requests; ++r) sum += emitted(r);
  return static_cast<double>(sum) / static_cast<double>(std::max<std::int64_t>(1, steps_done_ * options_.requests));
}

bool DraftLoop::is_targets_own() const {
  const std::int64_t vocab = drafter_->config().vocab_size;
  for (const auto& sequence : tokens_)
    for (auto i = static_cast<std::size_t>(options_.context); i < sequence.size(); ++i)
      if (sequence[i] != toy_greedy(options_.seed, sequence[i - 2], sequence[i - 1], vocab)) return false;
  return true;
}

const std::vector<double>& DraftLoop::stage_times(Stage stage) const {
  return timer_->times[static_cast<std::size_t>(stage)];
}

}  // namespace twostep
