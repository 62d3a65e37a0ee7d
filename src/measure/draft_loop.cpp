#include "measure/draft_loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

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

namespace {

class HostMachine final : public DraftMachine {
 public:
  Device device() const override { return Device::cpu(); }
  Stream stream() const override { return {}; }
  void* allocate(std::size_t bytes) override {
    const std::size_t size = (bytes + 64) / 64 * 64;
    memory_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(64, size)));
    if (!memory_.back()) fail(StatusCode::kOutOfMemory, "draft", "memory", fmt::format("{} bytes", size), "less");
    return std::memset(memory_.back().get(), 0, size);
  }
  void write(void* to, const void* host, std::size_t bytes) override { std::memcpy(to, host, bytes); }
  void read(void* host, const void* from, std::size_t bytes) override { std::memcpy(host, from, bytes); }
  void begin() override { marks_.assign(1, std::chrono::steady_clock::now()); }
  void mark() override { marks_.push_back(std::chrono::steady_clock::now()); }
  std::vector<double> between_marks() override {
    std::vector<double> times;
    for (std::size_t i = 1; i < marks_.size(); ++i)
      times.push_back(std::chrono::duration<double, std::micro>(marks_[i] - marks_[i - 1]).count());
    return times;
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::vector<std::unique_ptr<std::byte, Free>> memory_;
  std::vector<std::chrono::steady_clock::time_point> marks_;
};

// Values that the host knows, and where the drafter reads or writes them.
template <class T>
struct Mirror {
  std::vector<T> host;
  T* there = nullptr;

  void make(DraftMachine& machine, std::size_t count) {
    host.assign(count, T{});
    there = static_cast<T*>(machine.allocate(count * sizeof(T)));
  }
  void write(DraftMachine& machine) const { machine.write(there, host.data(), host.size() * sizeof(T)); }
  void read(DraftMachine& machine) { machine.read(host.data(), there, host.size() * sizeof(T)); }
};

}  // namespace

std::unique_ptr<DraftMachine> host_machine() { return std::make_unique<HostMachine>(); }

// What a serving process would keep: the batch, the taps, the target's logits. The caches are the machine's alone.
struct DraftLoop::Buffers {
  std::vector<Mirror<std::uint16_t>> taps;
  Mirror<std::int32_t> request, row_start, rejected, anchor, page_table, step, emitted, accepted;
  Mirror<std::int64_t> positions, seed;
  Mirror<float> temperature, logits;

  // All that changes from step to step, but for what `verify` reads.
  void write(DraftMachine& machine) const {
    for (const auto* values : {&row_start, &rejected, &anchor}) values->write(machine);
    positions.write(machine);
  }
  DraftBatch batch(std::int64_t requests, std::int64_t rows, Device device) const {
    const std::int64_t width = static_cast<std::int64_t>(page_table.host.size()) / requests;
    return {TensorView::dense(request.there, DType::kI32, {requests}, device),
            TensorView::dense(row_start.there, DType::kI32, {requests + 1}, device),
            TensorView::dense(rejected.there, DType::kI32, {requests}, device),
            TensorView::dense(anchor.there, DType::kI32, {requests}, device),
            TensorView::dense(positions.there, DType::kI64, {rows}, device),
            TensorView::dense(page_table.there, DType::kI32, {requests, width}, device),
            TensorView::dense(temperature.there, DType::kF32, {requests}, device),
            TensorView::dense(seed.there, DType::kI64, {requests}, device),
            TensorView::dense(step.there, DType::kI32, {requests}, device)};
  }
  std::vector<TensorView> tap_views(std::int64_t rows, std::int64_t width, Device device) const {
    std::vector<TensorView> views;
    for (const auto& tap : taps) views.push_back(TensorView::matrix(tap.there, rows, width, device));
    return views;
  }
};

// A mark after each stage of a call.
class DraftLoop::Marks final : public StageObserver {
 public:
  explicit Marks(DraftMachine& machine) : machine_(machine) {}
  void begin() {
    stages_.clear();
    machine_.begin();
  }
  void done(Stage stage, Stream) override {
    stages_.push_back(stage);
    machine_.mark();
  }
  void add_to(std::array<double, kNumStages>& times) {
    const std::vector<double> between = machine_.between_marks();
    for (std::size_t i = 0; i < stages_.size(); ++i) times[static_cast<std::size_t>(stages_[i])] += between[i];
  }

 private:
  DraftMachine& machine_;
  std::vector<Stage> stages_;
};

DraftLoop::DraftLoop(const DrafterWeights& weights, const DraftLoopOptions& options,
                     const std::function<void(std::uint64_t, std::uint64_t)>& progress,
                     std::unique_ptr<DraftMachine> machine)
    : options_(options),
      machine_(std::move(machine)),
      drafts_(static_cast<std::size_t>(std::max(options.requests, 0))),
      b_(std::make_unique<Buffers>()),
      marks_(std::make_unique<Marks>(*machine_)) {
  const DrafterConfig& config = weights.config();
  check(options, config);
  const auto requests = static_cast<std::size_t>(options.requests);
  status_.assign(requests, 0);
  const std::int64_t verified = options.draft_tokens + 1;
  const Device device = machine_->device();

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
  const std::int64_t all_pages = 1 + options.requests * pages;
  DrafterMemory memory;
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    memory.cache.push_back(
        TensorView::dense(machine_->allocate(static_cast<std::size_t>(all_pages * kPageRows * width) * 2), DType::kBF16,
                          {all_pages, kPageRows, width}, device));
  drafter_.emplace(DsparkDrafter::prepare(weights, limits, target, memory, device, options.shard, progress));
  observe_stages(*drafter_, marks_.get());

  b_->taps.resize(static_cast<std::size_t>(config.num_taps()));
  for (auto& tap : b_->taps)
    tap.make(*machine_, static_cast<std::size_t>(limits.max_ingest_rows * config.target_hidden_size));
  for (auto* values : {&b_->request, &b_->rejected, &b_->anchor, &b_->step, &b_->accepted})
    values->make(*machine_, requests);
  b_->row_start.make(*machine_, requests + 1);
  b_->page_table.make(*machine_, requests * static_cast<std::size_t>(pages));
  b_->emitted.make(*machine_, requests * static_cast<std::size_t>(verified));
  b_->positions.make(*machine_, static_cast<std::size_t>(limits.max_ingest_rows));
  b_->seed.make(*machine_, requests);
  b_->temperature.make(*machine_, requests);
  b_->logits.make(*machine_, requests * static_cast<std::size_t>(verified * config.vocab_size));
  for (int r = 0; r < options.requests; ++r) {
    const auto index = static_cast<std::size_t>(r);
    b_->request.host[index] = r;
    b_->temperature.host[index] = options.temperature;
    b_->seed.host[index] = static_cast<std::int64_t>(options.seed + static_cast<std::uint64_t>(r));
    for (std::int64_t page = 0; page < pages; ++page)
      b_->page_table.host[static_cast<std::size_t>(r * pages + page)] = static_cast<std::int32_t>(1 + r * pages + page);
    std::vector<std::int32_t> prompt;
    for (std::int64_t i = 0; i < options.context; ++i)
      prompt.push_back(
          static_cast<std::int32_t>(mix64(options.seed + static_cast<std::uint64_t>(r * options.context + i)) %
                                    static_cast<std::uint64_t>(config.vocab_size)));
    prompt.push_back(toy_greedy(options.seed, prompt[prompt.size() - 2], prompt.back(), config.vocab_size));
    tokens_.push_back(std::move(prompt));
  }
  b_->request.write(*machine_);
  b_->page_table.write(*machine_);
  b_->seed.write(*machine_);
  b_->temperature.write(*machine_);

  const std::int64_t at_once = std::max<std::int64_t>(1, limits.max_ingest_rows / options.requests);
  for (std::int64_t first = 0; first < options.context; first += at_once)
    ingest(std::min(at_once, options.context - first), std::vector<std::int64_t>(requests, first));
}

DraftLoop::~DraftLoop() {
  if (drafter_) observe_stages(*drafter_, nullptr);
}

void DraftLoop::timed(const std::function<void()>& call) {
  marks_->begin();
  call();
  marks_->add_to(step_times_);
}

void DraftLoop::enqueue(Call call) {
  const std::int64_t requests = options_.requests, k = options_.draft_tokens, rows = b_->row_start.host.back();
  const Device device = machine_->device();
  const DraftBatch batch = b_->batch(requests, rows, device);
  if (call == Call::kIngest) {
    drafter_->ingest(batch, b_->tap_views(rows, drafter_->config().target_hidden_size, device), machine_->stream());
  } else if (call == Call::kDraft) {
    drafter_->draft(batch, machine_->stream());
  } else {
    VerifyBatch verify;
    verify.draft_ids = drafter_->output().tokens;
    verify.logits =
        TensorView::dense(b_->logits.there, DType::kF32, {requests, k + 1, drafter_->config().vocab_size}, device);
    verify.emitted = TensorView::dense(b_->emitted.there, DType::kI32, {requests, k + 1}, device);
    verify.accepted = TensorView::dense(b_->accepted.there, DType::kI32, {requests}, device);
    verify.one_hot = options_.temperature == 0;
    verify.method = options_.method;
    drafter_->verify(batch, verify, machine_->stream());
  }
}

// `rows` rows of each request, from its first position on. Which of them count is in `rejected`.
void DraftLoop::ingest(std::int64_t rows, const std::vector<std::int64_t>& first_positions) {
  const std::int64_t width = drafter_->config().target_hidden_size;
  for (std::size_t tap = 0; tap < b_->taps.size(); ++tap) {
    const std::string name = "tap." + std::to_string(tap);
    for (int r = 0; r < options_.requests; ++r) {
      const auto first = first_positions[static_cast<std::size_t>(r)];
      fill(name, options_.seed + static_cast<std::uint64_t>(r), static_cast<std::uint64_t>(first * width),
           ValueKind::kFeature, 0,
           std::span(b_->taps[tap].host)
               .subspan(static_cast<std::size_t>(r * rows * width), static_cast<std::size_t>(rows * width)));
    }
    b_->taps[tap].write(*machine_);
  }
  for (std::int64_t r = 0; r <= options_.requests; ++r)
    b_->row_start.host[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(r * rows);
  for (std::int64_t r = 0; r < options_.requests; ++r)
    for (std::int64_t i = 0; i < rows; ++i)
      b_->positions.host[static_cast<std::size_t>(r * rows + i)] = first_positions[static_cast<std::size_t>(r)] + i;
  b_->write(*machine_);
  timed([&] { enqueue(Call::kIngest); });
  keep_status();
}

void DraftLoop::keep_status() {
  std::vector<std::int32_t> bits(status_.size());
  machine_->read(bits.data(), drafter_->output().status.data, bits.size() * sizeof(bits[0]));
  for (std::size_t r = 0; r < status_.size(); ++r) status_[r] |= bits[r];
}

void DraftLoop::step() {
  const std::int64_t vocab = drafter_->config().vocab_size, k = options_.draft_tokens, requests = options_.requests;
  step_times_.fill(0);
  for (std::int64_t r = 0; r < requests; ++r)
    b_->anchor.host[static_cast<std::size_t>(r)] = tokens(static_cast<int>(r)).back();
  b_->write(*machine_);
  // The rows of the last ingest say where the block starts.
  timed([&] { enqueue(Call::kDraft); });

  // The target's logits after the anchor and after each draft.
  for (std::int64_t r = 0; r < requests; ++r) {
    std::vector<std::int32_t>& drafts = drafts_[static_cast<std::size_t>(r)];
    drafts.resize(static_cast<std::size_t>(k));
    machine_->read(drafts.data(), static_cast<const std::int32_t*>(drafter_->output().tokens.data) + r * k,
                   drafts.size() * sizeof(drafts[0]));
    const auto& sequence = tokens(static_cast<int>(r));
    std::int64_t a = sequence[sequence.size() - 2], b = sequence.back();
    for (std::int64_t i = 0; i <= k; ++i) {
      const auto row =
          std::span(b_->logits.host)
              .subspan(static_cast<std::size_t>((r * (k + 1) + i) * vocab), static_cast<std::size_t>(vocab));
      toy_logits(options_.seed, a, b, row);
      if (options_.temperature > 0)
        for (float& logit : row) logit /= options_.temperature;
      if (i < k) a = std::exchange(b, drafts[static_cast<std::size_t>(i)]);
    }
  }
  b_->logits.write(*machine_);
  timed([&] { enqueue(Call::kVerify); });
  b_->emitted.read(*machine_);
  b_->accepted.read(*machine_);
  keep_status();

  // The rows that the target verified: the anchor's, then the drafts'.
  std::vector<std::int64_t> first;
  for (std::size_t r = 0; r < tokens_.size(); ++r) {
    first.push_back(static_cast<std::int64_t>(tokens_[r].size()) - 1);
    const std::int32_t accepted = b_->accepted.host[r];
    const auto emitted = b_->emitted.host.begin() + static_cast<std::ptrdiff_t>(r) * (k + 1);
    tokens_[r].insert(tokens_[r].end(), emitted, emitted + accepted);
    b_->rejected.host[r] = static_cast<std::int32_t>(k + 1 - accepted);
  }
  ingest(k + 1, first);
  for (std::size_t i = 0; i < kNumStages; ++i) times_[i].push_back(step_times_[i]);
  ++steps_done_;
}

std::int64_t DraftLoop::emitted(int r) const {
  return static_cast<std::int64_t>(tokens(r).size()) - options_.context - 1;
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

}  // namespace twostep
