#include "tests/drafter/step.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "core/bf16.h"
#include "drafter/verify.h"
#include "io/checkpoint.h"

namespace twostep::step_test {
namespace {

namespace fs = std::filesystem;

constexpr std::uint16_t kNan = 0x7fc1;
// Relative norms, of drafter 13.1: linears of two backends add in another order, and all that is rounded may part.
constexpr double kCacheBound = 0.01, kHiddenBound = 0.02, kConfidenceBound = 0.02;

class HostSpace final : public Space {
 public:
  Device device() const override { return Device::cpu(); }
  Stream stream() const override { return {}; }
  void* allocate(std::size_t bytes) override {
    memory_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64)));
    return memory_.back().get();
  }
  void put(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void get(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::vector<std::unique_ptr<std::byte, Free>> memory_;
};

double relative_norm(const std::vector<std::uint16_t>& a, const std::vector<std::uint16_t>& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = bf16_to_float(a[i]), y = bf16_to_float(b[i]);
    if (std::isnan(x) && std::isnan(y)) continue;  // both left it as it was
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  return std::sqrt(difference / norm);
}

bool is_finite(const std::vector<std::uint16_t>& values, std::int64_t first, std::int64_t count) {
  return std::all_of(values.begin() + first, values.begin() + first + count,
                     [](std::uint16_t bits) { return std::isfinite(bf16_to_float(bits)); });
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace

std::unique_ptr<Space> host_space() { return std::make_unique<HostSpace>(); }

std::uint64_t inputs_number() {
  static const std::uint64_t number = [] {
    const char* given = std::getenv("TWOSTEP_TEST_SEED");
    return given ? std::strtoull(given, nullptr, 10) : std::uint64_t{std::random_device{}()};
  }();
  return number;
}

void expect_same_bits(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.status, b.status);
  EXPECT_EQ(a.first_position, b.first_position);
  EXPECT_TRUE(same_bits(a.confidence, b.confidence)) << "confidence differs";
  EXPECT_TRUE(same_bits(a.survival, b.survival)) << "survival differs";
  EXPECT_TRUE(same_bits(a.hidden, b.hidden)) << "hidden differs";
  EXPECT_TRUE(same_bits(a.base, b.base)) << "base logits differ";
  EXPECT_TRUE(same_bits(a.draft_logits, b.draft_logits)) << "draft logits differ";
  for (std::size_t layer = 0; layer < std::max(a.cache.size(), b.cache.size()); ++layer)
    EXPECT_TRUE(same_bits(a.cache.at(layer), b.cache.at(layer))) << "the cache of layer " << layer << " differs";
}

// ---- Inputs

Inputs::Inputs(const Case& c, std::int64_t requests, std::uint64_t number, std::int64_t rows)
    : random(number), count(requests), width(c.config.target_hidden_size) {
  std::int32_t row = 0;
  row_start.push_back(0);
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(n));
  };
  const std::int64_t longest = c.limits.max_ingest_rows / requests;
  for (std::int64_t r = 0; r < requests; ++r) {
    request.push_back(r == 4 ? -1 : static_cast<std::int32_t>(r));
    const std::int32_t of_request = rows > 0 ? static_cast<std::int32_t>(rows) : 1 + below(longest);
    rejected.push_back(below(std::min(of_request, 4)));
    for (std::int32_t i = 0; i < of_request; ++i) positions.push_back(i);
    row_start.push_back(row += of_request);
    anchor.push_back(below(c.config.vocab_size));
    temperature.push_back(r % 3 == 1 ? 0.0f : 0.5f + 0.25f * static_cast<float>(r % 4));
    seed.push_back(static_cast<std::int64_t>(random()));
    step.push_back(below(100));
  }
  for (std::int64_t page = 0; page < requests * kPagesOfRequest; ++page)
    page_table.push_back(static_cast<std::int32_t>(1 + page));
  std::shuffle(page_table.begin(), page_table.end(), random);
  for (std::int64_t tap = 0; tap < c.config.num_taps(); ++tap) {
    features.emplace_back(static_cast<std::size_t>(row * width));
    fill("tap." + std::to_string(tap), number, 0, ValueKind::kFeature, 0, features.back());
  }
}

Inputs Inputs::of(const std::vector<std::int64_t>& requests) const {
  Inputs some = *this;
  some.count = static_cast<std::int64_t>(requests.size());
  const auto pick = [&](auto& to, const auto& from, auto&& range) {
    to.clear();
    for (const std::int64_t r : requests) {
      const auto [first, last] = range(r);
      to.insert(to.end(), from.begin() + first, from.begin() + last);
    }
  };
  const auto one = [](std::int64_t r) { return std::pair(r, r + 1); };
  const auto pages = [](std::int64_t r) { return std::pair(r * kPagesOfRequest, (r + 1) * kPagesOfRequest); };
  const auto rows = [&](std::int64_t r) {
    return std::pair(row_start[static_cast<std::size_t>(r)], row_start[static_cast<std::size_t>(r + 1)]);
  };
  const auto values = [&](std::int64_t r) { return std::pair(rows(r).first * width, rows(r).second * width); };
  pick(some.request, request, one);
  pick(some.rejected, rejected, one);
  pick(some.anchor, anchor, one);
  pick(some.step, step, one);
  pick(some.seed, seed, one);
  pick(some.temperature, temperature, one);
  pick(some.page_table, page_table, pages);
  pick(some.positions, positions, rows);
  for (std::size_t tap = 0; tap < features.size(); ++tap) pick(some.features[tap], features[tap], values);
  some.row_start = {0};
  for (const std::int64_t r : requests)
    some.row_start.push_back(some.row_start.back() + rows(r).second - rows(r).first);
  return some;
}

// ---- Side

Side::Side(const Case& c, const DrafterWeights& weights, std::int64_t requests, std::unique_ptr<Space> space,
           std::unique_ptr<StepPhases> phases, std::optional<std::int64_t> spoilt)
    : k_(c.limits.num_draft_tokens),
      most_(requests),
      most_rows_(c.limits.max_ingest_rows),
      pages_(1 + requests * kPagesOfRequest),
      width_(c.config.kv_lora_rank + c.config.qk_rope_head_dim),
      space_(std::move(space)) {
  const Device device = space_->device();
  DrafterMemory memory;
  for (std::int64_t layer = 0; layer < c.config.num_hidden_layers; ++layer) {
    cache_.push_back(
        static_cast<std::uint16_t*>(space_->allocate(static_cast<std::size_t>(pages_ * kPageRows * width_) * 2)));
    memory.cache.push_back(TensorView::dense(cache_.back(), DType::kBF16, {pages_, kPageRows, width_}, device));
  }
  poison_cache();
  if (spoilt) {
    const std::int64_t hidden = c.config.hidden_size;
    std::vector<std::uint16_t> embedding(static_cast<std::size_t>(c.config.vocab_size * hidden));
    std::memcpy(embedding.data(), weights.checkpoint().tensor("embed_tokens.weight").data, embedding.size() * 2);
    std::fill_n(embedding.begin() + *spoilt * hidden, hidden, kNan);
    memory.embed_tokens = TensorView::matrix(copy(embedding), c.config.vocab_size, hidden, device);
  }
  const auto room = [&](auto*& to, std::int64_t count) {
    to = static_cast<std::remove_reference_t<decltype(to)>>(
        space_->allocate(static_cast<std::size_t>(count) * sizeof(*to)));
  };
  for (auto** to : {&request_, &rejected_, &anchor_, &step_}) room(*to, requests);
  room(row_start_, requests + 1);
  room(page_table_, requests * kPagesOfRequest);
  room(positions_, most_rows_);
  room(seed_, requests);
  room(temperature_, requests);
  room(features_, c.config.num_taps() * most_rows_ * c.config.target_hidden_size);
  const DrafterTarget target{c.config.target_layer_ids, c.config.aux_hidden_stream, {}, {}};
  drafter_ = std::make_unique<DsparkDrafter>(
      phases ? prepare_on(std::move(phases), weights, c.limits, target, memory, c.shard)
             : DsparkDrafter::prepare(weights, c.limits, target, memory, device, c.shard));
}

void Side::put(const Inputs& in, bool one_buffer) {
  ASSERT_LE(in.count, most_);
  ASSERT_LE(in.rows(), most_rows_);
  requests_ = in.count;
  rows_ = in.rows();
  pages_of_ = in.page_table;
  const auto give = [&](auto* to, const auto& values) {
    space_->put(to, values.data(), values.size() * sizeof(values[0]));
  };
  give(request_, in.request);
  give(row_start_, in.row_start);
  give(rejected_, in.rejected);
  give(anchor_, in.anchor);
  give(page_table_, in.page_table);
  give(step_, in.step);
  give(positions_, in.positions);
  give(seed_, in.seed);
  give(temperature_, in.temperature);
  const auto count = static_cast<std::int64_t>(in.features.size());
  std::vector<std::uint16_t> all;
  taps_.clear();
  for (std::int64_t tap = 0; tap < count; ++tap) {
    const std::int64_t first = one_buffer ? tap * in.width : tap * most_rows_ * in.width;
    taps_.push_back(TensorView::matrix(features_ + first, rows_, in.width, space_->device(),
                                       one_buffer ? count * in.width : in.width));
    if (!one_buffer) give(features_ + first, in.features[static_cast<std::size_t>(tap)]);
  }
  if (!one_buffer) return;
  for (std::int64_t row = 0; row < rows_; ++row)
    for (const auto& tap : in.features)
      all.insert(all.end(), tap.begin() + row * in.width, tap.begin() + (row + 1) * in.width);
  give(features_, all);
}

DraftBatch Side::batch() const {
  const auto vector = [&](auto* data, DType dtype, std::int64_t count) {
    return TensorView::dense(data, dtype, {count}, space_->device());
  };
  return {vector(request_, DType::kI32, requests_),
          vector(row_start_, DType::kI32, requests_ + 1),
          vector(rejected_, DType::kI32, requests_),
          vector(anchor_, DType::kI32, requests_),
          vector(positions_, DType::kI64, rows_),
          TensorView::dense(page_table_, DType::kI32, {requests_, kPagesOfRequest}, space_->device()),
          vector(temperature_, DType::kF32, requests_),
          vector(seed_, DType::kI64, requests_),
          vector(step_, DType::kI32, requests_)};
}

Outcome Side::read() const {
  const DraftOutput& out = drafter_->output();
  const std::int64_t rows = requests_ * k_, vocab = out.base_logits.shape[1];
  Outcome o;
  o.tokens = get<std::int32_t>(out.tokens.data, rows);
  o.status = get<std::int32_t>(out.status.data, requests_);
  o.first_position = get<std::int64_t>(out.first_position.data, requests_);
  o.hidden = get<std::uint16_t>(out.hidden.data, rows * out.hidden.shape[1]);
  o.base = get<std::uint16_t>(out.base_logits.data, rows * vocab);
  if (out.confidence.rank > 0) {
    o.confidence = get<float>(out.confidence.data, rows);
    o.survival = get<float>(out.survival.data, rows);
  }
  if (out.draft_logits.rank > 0)
    o.draft_logits = get<std::byte>(out.draft_logits.data,
                                    rows * vocab * static_cast<std::int64_t>(dtype_size(out.draft_logits.dtype)));
  for (const auto* cache : cache_) o.cache.push_back(get<std::uint16_t>(cache, pages_ * kPageRows * width_));
  return o;
}

void Side::spoil(std::size_t layer, std::int64_t r, std::int64_t position) {
  const std::int64_t page = pages_of_[static_cast<std::size_t>(r * kPagesOfRequest + position / kPageRows)];
  const std::vector<std::uint16_t> row(static_cast<std::size_t>(width_), kNan);
  space_->put(cache_[layer] + (page * kPageRows + position % kPageRows) * width_, row.data(), row.size() * 2);
}

void Side::poison_cache() {
  const std::vector<std::uint16_t> nan(static_cast<std::size_t>(pages_ * kPageRows * width_), kNan);
  for (auto* cache : cache_) space_->put(cache, nan.data(), nan.size() * 2);
}

void Side::poison_output() {
  const DraftOutput& out = drafter_->output();
  for (const TensorView* view : {&out.tokens, &out.draft_logits, &out.base_logits, &out.hidden, &out.confidence,
                                 &out.survival, &out.first_position, &out.status}) {
    if (view->rank == 0) continue;
    std::size_t bytes = dtype_size(view->dtype);
    for (int i = 0; i < view->rank; ++i) bytes *= static_cast<std::size_t>(view->shape[static_cast<std::size_t>(i)]);
    const std::vector<std::byte> nan(bytes, std::byte{0xff});
    space_->put(view->data, nan.data(), bytes);
  }
}

DrafterWeights synthetic_weights(const DrafterConfig& config) {
  const fs::path folder = fs::temp_directory_path() / ("twostep-step-" + std::to_string(::getpid()));
  write_synthetic(config, 3, folder, true, [](std::uint64_t, std::uint64_t) {});
  DrafterWeights weights = DrafterWeights::load(folder);
  fs::remove_all(folder);
  return weights;
}

Pair::Pair(Case of, std::int64_t of_requests, const MakeSide& make, std::int64_t rows,
           std::optional<std::int64_t> spoilt)
    : c(std::move(of)), requests(of_requests), in(c, requests, inputs_number(), rows) {
  const DrafterWeights weights = synthetic_weights(c.config);
  cpu = std::make_unique<Side>(c, weights, requests, host_space(), make_cpu_phases(), spoilt);
  other = make(c, weights, requests, spoilt);
}

// ---- What must hold

void expect_the_same_step(const Case& c, std::int64_t requests, const MakeSide& make, std::int64_t rows) {
  SCOPED_TRACE(testing::Message() << c.name << ", " << requests << " requests, TWOSTEP_TEST_SEED=" << inputs_number());
  Pair both(c, requests, make, rows);
  both.run();
  Outcome cpu = both.cpu->read();
  const Outcome other = both.other->read();
  const int k = c.limits.num_draft_tokens;
  for (std::size_t layer = 0; layer < cpu.cache.size(); ++layer)
    EXPECT_LT(relative_norm(other.cache[layer], cpu.cache[layer]), kCacheBound);
  EXPECT_LT(relative_norm(other.hidden, cpu.hidden), kHiddenBound);
  EXPECT_LT(relative_norm(other.base, cpu.base), kHiddenBound);
  // Picks are compared on the same base logits: where two scores are close, the backends' own may part, and what
  // follows another token is another draft.
  std::memcpy(both.cpu->drafter().output().base_logits.data, other.base.data(), other.base.size() * 2);
  sample_again(both.cpu->drafter(), both.cpu->batch());
  cpu = both.cpu->read();
  EXPECT_EQ(other.first_position, cpu.first_position);
  EXPECT_EQ(other.tokens, cpu.tokens);
  for (const std::int32_t status : other.status) EXPECT_EQ(status, 0);
  for (std::int64_t i = 0; i < requests * k; ++i) {
    const auto index = static_cast<std::size_t>(i);
    const std::int32_t token = other.tokens[index];
    EXPECT_TRUE(i / k == 4 ? token == -1 : token >= 0 && token < c.config.vocab_size) << token;
    EXPECT_NEAR(other.confidence[index], cpu.confidence[index], kConfidenceBound);
    EXPECT_NEAR(other.survival[index], cpu.survival[index], 2 * kConfidenceBound);
  }
}

void expect_the_verdicts_of_the_host(const Case& c, std::int64_t requests, bool one_hot, const MakeSide& make) {
  SCOPED_TRACE(testing::Message() << c.name << (one_hot ? ", one-hot" : "")
                                  << ", TWOSTEP_TEST_SEED=" << inputs_number());
  Pair both(c, requests, make);
  both.put();
  both.other->run();
  Side& side = *both.other;
  const Outcome out = side.read();
  const std::int64_t k = c.limits.num_draft_tokens, vocab = c.config.vocab_size;
  const Device device = side.space().device();
  std::normal_distribution<float> normal;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(requests * k)), steps = both.in.step;
  std::vector<std::int32_t> wanted(static_cast<std::size_t>(k + 1));
  std::vector<float> logits(static_cast<std::size_t>(requests * (k + 1) * vocab));
  auto* ids_there = side.copy(ids);
  auto* logits_there = side.copy(logits);
  auto* emitted_there = side.copy(std::vector<std::int32_t>(static_cast<std::size_t>(requests * (k + 1))));
  auto* accepted_there = side.copy(std::vector<std::int32_t>(static_cast<std::size_t>(requests)));
  const DType draft_type = c.limits.draft_logits;
  const auto draft_logit = [&](std::int64_t r, std::int64_t i, std::int64_t v) {
    if (one_hot) return 0.0f;
    const std::byte* at =
        out.draft_logits.data() + static_cast<std::size_t>((r * k + i) * vocab + v) * dtype_size(draft_type);
    std::uint16_t half = 0;
    float whole = 0;
    if (draft_type == DType::kBF16) std::memcpy(&half, at, 2);
    else std::memcpy(&whole, at, 4);
    return draft_type == DType::kBF16 ? bf16_to_float(half) : whole;
  };
  for (int round = 0; round < 4; ++round) {
    ids = out.tokens;
    if (round == 1) ids[static_cast<std::size_t>(k - 1)] = -1;
    if (round == 2) ids[0] = static_cast<std::int32_t>(vocab);
    for (std::int64_t r = 0; r < requests; ++r)
      for (std::int64_t i = 0; i <= k; ++i) {
        float* row = logits.data() + (r * (k + 1) + i) * vocab;
        const float like = static_cast<float>(both.in.random() % 3) / 2;
        for (std::int64_t v = 0; v < vocab; ++v)
          row[v] = (i < k ? like * draft_logit(r, i, v) : 0) + normal(both.in.random);
        if (i < k && both.in.random() % 2) row[ids[static_cast<std::size_t>(r * k + i)] & 511] = 9;
        if (round == 3 && i == 1) row[0] = std::nanf("");
        if (round == 3 && i == 0) std::fill_n(row, vocab, -std::numeric_limits<float>::infinity());
      }
    side.space().put(ids_there, ids.data(), ids.size() * 4);
    side.space().put(logits_there, logits.data(), logits.size() * 4);
    for (const VerifyMethod method : {VerifyMethod::kStandard, VerifyMethod::kBlock}) {
      VerifyBatch verify;
      verify.draft_ids = TensorView::dense(ids_there, DType::kI32, {requests, k}, device);
      verify.logits = TensorView::dense(logits_there, DType::kF32, {requests, k + 1, vocab}, device);
      verify.emitted = TensorView::dense(emitted_there, DType::kI32, {requests, k + 1}, device);
      verify.accepted = TensorView::dense(accepted_there, DType::kI32, {requests}, device);
      verify.one_hot = one_hot;
      verify.method = method;
      side.verify(verify);
      const auto emitted = side.get<std::int32_t>(emitted_there, requests * (k + 1));
      const auto accepted = side.get<std::int32_t>(accepted_there, requests);
      const auto after = side.get<std::int32_t>(side.steps(), requests);
      const auto status = side.get<std::int32_t>(side.drafter().output().status.data, requests);
      for (std::int64_t r = 0; r < requests; ++r) {
        SCOPED_TRACE(testing::Message() << "request " << r << ", round " << round);
        const auto index = static_cast<std::size_t>(r);
        if (both.in.request[index] < 0) {
          EXPECT_EQ(accepted[index], 0);
          EXPECT_EQ(after[index], steps[index]);
          continue;
        }
        VerifyRequest request;
        request.drafts = {ids.data() + r * k, static_cast<std::size_t>(k)};
        request.target = TensorView::matrix(logits.data() + r * (k + 1) * vocab, k + 1, vocab, {}, 0, DType::kF32);
        if (!one_hot)
          request.draft_logits =
              TensorView::matrix(const_cast<std::byte*>(out.draft_logits.data()) +
                                     static_cast<std::size_t>(r * k * vocab) * dtype_size(draft_type),
                                 k, vocab, {}, 0, draft_type);
        request.temperature = both.in.temperature[index];
        request.key = {static_cast<std::uint64_t>(both.in.seed[index]),
                       static_cast<std::uint32_t>(out.first_position[index]), static_cast<std::uint32_t>(steps[index])};
        const VerifyResult result = twostep::verify(method, request, wanted);
        EXPECT_EQ(accepted[index], result.accepted());
        EXPECT_EQ(after[index], steps[index] + 1);
        EXPECT_EQ((status[index] & kNonFinite) != 0, round == 3);
        EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), emitted.begin() + r * (k + 1)));
      }
      steps = after;
    }
  }
}

void expect_bad_pages_and_bad_numbers_touch_one_request_alone(const MakeSide& make) {
  SCOPED_TRACE(testing::Message() << "TWOSTEP_TEST_SEED=" << inputs_number());
  Pair both(tiny_case(), 4, make);
  const auto outcome = [&] {
    both.other->poison_cache();
    both.other->put(both.in);
    both.other->run();
    return both.other->read();
  };
  const Outcome before = outcome();
  const auto good = before.tokens_of(0, 3);
  for (const std::int32_t bad : {-5, 0, static_cast<std::int32_t>(both.other->pages()), 1 << 30}) {
    const std::int32_t kept = std::exchange(both.in.page_table[2 * kPagesOfRequest], bad);
    const Outcome out = outcome();
    EXPECT_EQ(out.status[2], kBadPage) << bad;
    EXPECT_EQ(out.status[0], 0);
    EXPECT_EQ(out.tokens_of(0, 3), good);
    both.in.page_table[2 * kPagesOfRequest] = kept;
  }
  for (int fault = 0; fault < 4; ++fault) {
    const Inputs saved = both.in;
    if (fault == 0) both.in.rejected[2] = 1000;
    if (fault == 1) both.in.anchor[2] = 512;
    if (fault == 2) both.in.positions[static_cast<std::size_t>(both.in.row_start[3] - 1 - both.in.rejected[2])] = 256;
    if (fault == 3) both.in.row_start[4] = 1 << 20;  // of request 3
    const Outcome out = outcome();
    const std::size_t r = fault == 3 ? 3 : 2;
    EXPECT_EQ(out.status[r], kBadInput) << fault;
    EXPECT_EQ(out.tokens_of(static_cast<std::int64_t>(r), 3), (std::vector<std::int32_t>{-1, -1, -1})) << fault;
    EXPECT_EQ(out.tokens_of(0, 3), good);
    both.in = saved;
  }
  // Where one number of two neighbours is bad, the rows of the next one are still its own.
  both.in.row_start[2] = 1 << 20;
  const Outcome out = outcome();
  EXPECT_EQ(out.status, (std::vector<std::int32_t>{0, kBadInput, kBadInput, 0}));
  EXPECT_EQ(out.tokens_of(0, 3), good);
  EXPECT_EQ(out.tokens_of(3, 3), before.tokens_of(3, 3));
}

void expect_what_no_row_sees_not_to_matter(const Case& c, const MakeSide& make) {
  SCOPED_TRACE(testing::Message() << "TWOSTEP_TEST_SEED=" << inputs_number());
  constexpr std::int64_t kRows = 180, kWindow = 70;  // the window begins inside a tile of keys
  ASSERT_EQ(c.config.sliding_window[0], kWindow);
  Pair both(c, 1, make, kRows);
  both.put();
  const std::int64_t first = both.in.rows() - both.in.rejected[0];  // position of the block's first row
  for (Side* side : {&*both.cpu, &*both.other}) {
    side->ingest();
    for (std::int64_t position = 0; position < first - kWindow + 1; ++position) side->spoil(0, 0, position);
    for (std::size_t layer = 0; layer < 2; ++layer)
      for (std::int64_t position = first + c.limits.num_draft_tokens; position < c.limits.max_len; ++position)
        side->spoil(layer, 0, position);
    side->draft();
  }
  const Outcome cpu = both.cpu->read(), other = both.other->read();
  EXPECT_EQ(other.status[0], 0);
  EXPECT_TRUE(is_finite(other.hidden, 0, static_cast<std::int64_t>(other.hidden.size())));
  EXPECT_LT(relative_norm(other.hidden, cpu.hidden), kHiddenBound);
}

void expect_later_rows_not_to_spoil_earlier_ones(const Case& c, const MakeSide& make) {
  SCOPED_TRACE(testing::Message() << "TWOSTEP_TEST_SEED=" << inputs_number());
  const std::int64_t hidden = c.config.hidden_size, k = c.limits.num_draft_tokens;
  Pair both(c, 2, make, 0, c.config.mask_token_id);
  for (std::int32_t& anchor : both.in.anchor) anchor %= 500;  // not the mask
  both.run();
  const Outcome cpu = both.cpu->read(), other = both.other->read();
  for (std::int64_t r = 0; r < 2; ++r) {
    EXPECT_EQ(other.status[static_cast<std::size_t>(r)], kNonFinite);
    EXPECT_TRUE(is_finite(other.hidden, r * k * hidden, hidden)) << "row 0 of request " << r;
    for (std::int64_t row = r * k + 1; row < (r + 1) * k; ++row)
      EXPECT_FALSE(is_finite(other.hidden, row * hidden, hidden));
  }
  EXPECT_LT(relative_norm(other.hidden, cpu.hidden), kHiddenBound);
}

void expect_the_bits_of_a_request_alone(const MakeSide& make) {
  SCOPED_TRACE(testing::Message() << "TWOSTEP_TEST_SEED=" << inputs_number());
  constexpr std::int64_t kRows = 15, kIngests = 10;  // at once few enough for one family of kernels
  const Case c = tiny_case();
  Pair both(c, 4, make, kRows);
  Side& side = *both.other;
  const auto left_by = [&](const std::vector<std::int64_t>& requests) {
    side.poison_cache();
    for (std::int64_t i = 0; i < kIngests; ++i) {
      Inputs in = both.in.of(requests);
      for (std::int64_t& position : in.positions) position += i * kRows;
      if (i + 1 < kIngests) std::fill(in.rejected.begin(), in.rejected.end(), 0);
      side.put(in);
      side.ingest();
    }
    side.draft();
    return side.read();
  };
  const auto part = [](const auto& values, std::int64_t i, std::int64_t of) {
    const auto size = static_cast<std::int64_t>(values.size()) / of;
    return std::decay_t<decltype(values)>(values.begin() + i * size, values.begin() + (i + 1) * size);
  };
  const std::vector<std::int64_t> order = {2, 0, 3, 1};
  const Outcome all = left_by({0, 1, 2, 3}), shuffled = left_by(order);
  const auto expect_same_part = [&](const Outcome& other, std::int64_t at, std::int64_t of, std::int64_t r) {
    EXPECT_EQ(part(other.tokens, at, of), part(all.tokens, r, 4)) << "request " << r << " of " << of;
    EXPECT_TRUE(same_bits(part(other.hidden, at, of), part(all.hidden, r, 4))) << "request " << r << " of " << of;
    EXPECT_TRUE(same_bits(part(other.draft_logits, at, of), part(all.draft_logits, r, 4))) << "request " << r;
    EXPECT_TRUE(same_bits(part(other.confidence, at, of), part(all.confidence, r, 4))) << "request " << r;
  };
  for (std::int64_t i = 0; i < 4; ++i) {
    const std::int64_t r = order[static_cast<std::size_t>(i)];
    expect_same_part(shuffled, i, 4, r);
    expect_same_part(left_by({r}), 0, 1, r);
  }
}

void expect_the_same_bits_of_taps_in_one_buffer(const MakeSide& make) {
  SCOPED_TRACE(testing::Message() << "TWOSTEP_TEST_SEED=" << inputs_number());
  Pair both(tiny_case(), 4, make);
  Side& side = *both.other;
  side.put(both.in);
  side.run();
  const Outcome apart = side.read();
  side.poison_cache();
  side.put(both.in, true);
  side.run();
  expect_same_bits(side.read(), apart);
}

void expect_the_same_bits_of_a_smaller_gpu(const Case& c, std::int64_t requests, const MakeSide& make) {
  SCOPED_TRACE(testing::Message() << c.name << ", " << requests << " requests, TWOSTEP_TEST_SEED=" << inputs_number());
  const auto needs_picks = [&](const Case& of) {
    return step_kernel_needed(StepKernel::kPicks, kernel_model(of).model, gpu_of(of));
  };
  Case smaller = c;
  smaller.smem_per_block = 48 << 10;
  while (needs_picks(smaller)) smaller.smem_per_block /= 2;
  ASSERT_TRUE(needs_picks(c));
  const DrafterWeights weights = synthetic_weights(c.config);
  const auto side = make(c, weights, requests, {}), other = make(smaller, weights, requests, {});
  for (std::uint64_t round = 0; round < 2; ++round) {  // the second on what the first one left
    const Inputs in(c, requests, inputs_number() + round);
    for (Side* of : {&*side, &*other}) {
      of->poison_cache();
      of->put(in);
      of->run();
    }
    expect_same_bits(side->read(), other->read());
  }
}

}  // namespace twostep::step_test
