// The GPU side of the draft step without a GPU: the launches of device_phases.cpp with the kernels of kernels/draft in
// the emulator, against the CPU backend.
#include <emulated_models.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <random>

#include "draft/attention.cuh"
#include "draft/block.cuh"
#include "draft/context.cuh"
#include "draft/sample.cuh"
#include "draft/verify.cuh"
#include "drafter/stages.h"
#include "drafter/verify.h"
#include "tests/emulate/models.h"

namespace twostep {
namespace {

namespace fs = std::filesystem;
namespace d = draft;
using emulate::Case;

static_assert(sizeof(d::Batch) == sizeof(StepBatch) && sizeof(d::Cache) == sizeof(DeviceCache));
static_assert(sizeof(d::Sampling) == sizeof(DeviceSampling) && sizeof(d::Verify) == sizeof(DeviceVerify));
static_assert(sizeof(d::Best) == sizeof(DeviceBest) && sizeof(d::RowStats) == sizeof(DeviceRowStats));

constexpr int kSms = 8;  // of the GPU that is played: several parts of a context, several CTAs of a pick

template <class Model>
class EmulatedLauncher final : public StepLauncher {
 public:
  explicit EmulatedLauncher(const Case& c) : text_(step_model_text(emulate::kernel_model(c))) {}

  int sm_count() const override { return kSms; }
  void* allocate(std::size_t bytes) override {
    memory_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64)));
    std::memset(memory_.back().get(), 0, (bytes + 64) / 64 * 64);
    return memory_.back().get();
  }
  void upload(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void load(const StepKernelModel& model) override {
    ASSERT_EQ(step_model_text(model), text_) << "compiled for another model";
    smem_.resize(static_cast<std::size_t>(step_kernel_smem(StepKernel::kAttend, model.model)));
    ASSERT_EQ(smem_.size(), sizeof(d::AttendShared<Model>));
  }

  void launch(StepKernel kernel, Grid grid, Stream, void** arguments) override {
    const emulate::Dim dim{static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z)};
    std::memset(smem_.data(), 0xff, smem_.size());  // NaN
    emulate::run(dim, step_kernel_threads(kernel), [&] { call(kernel, arguments); });
  }

 private:
  // Parameter i, as the type that the kernel's parameter has.
  struct Parameter {
    void* at;
    template <class T>
    operator T() const {
      return *static_cast<T*>(at);
    }
  };
  template <class T>
  static const T& as(void* at) {
    return *static_cast<const T*>(at);
  }

  void call(StepKernel kernel, void** a) {
    const auto p = [&](int i) { return Parameter{a[i]}; };
    switch (kernel) {
      case StepKernel::kGatherTaps: return d::gather_taps<Model>(as<d::TapList<Model::kTaps>>(a[0]), p(1), p(2));
      case StepKernel::kNormContext: return d::norm_context<Model>(p(0), p(1), p(2), p(3));
      case StepKernel::kBeginIngest: return d::begin_ingest(as<d::Batch>(a[0]), p(1));
      case StepKernel::kCacheContext:
        return d::cache_context<Model>(as<d::Batch>(a[0]), p(1), p(2), p(3), as<d::Cache>(a[4]), p(5), p(6));
      case StepKernel::kQueries:
        return d::queries<Model>(as<d::Batch>(a[0]), as<d::Cache>(a[1]), p(2), p(3), p(4), p(5), p(6));
      case StepKernel::kEmbed: return d::embed<Model>(p(0), p(1), p(2), p(3), p(4), p(5), p(6), p(7));
      case StepKernel::kAddNorm: return d::add_norm<Model>(p(0), p(1), p(2), p(3));
      case StepKernel::kLatents:
        return d::latents<Model>(as<d::Batch>(a[0]), p(1), p(2), p(3), p(4), p(5), as<d::Cache>(a[6]), p(7));
      case StepKernel::kAbsorb: return d::absorb<Model>(p(0), p(1), p(2), p(3), p(4), p(5));
      case StepKernel::kAttend:
        return d::attend<Model, false>(as<d::Batch>(a[0]), p(1), p(2), p(3), as<d::Cache>(a[4]), p(5), p(6), p(7), p(8),
                                       p(9), smem_.data());
      case StepKernel::kAttendCausal:
        return d::attend<Model, true>(as<d::Batch>(a[0]), p(1), p(2), p(3), as<d::Cache>(a[4]), p(5), p(6), p(7), p(8),
                                      p(9), smem_.data());
      case StepKernel::kMerge: return d::merge<Model>(p(0), p(1), p(2), p(3));
      case StepKernel::kValues: return d::values<Model>(p(0), p(1), p(2), p(3), p(4));
      case StepKernel::kActivate: return d::activate<Model>(p(0), p(1));
      case StepKernel::kPick: return d::pick<Model>(as<d::Batch>(a[0]), as<d::Sampling>(a[1]), p(2));
      case StepKernel::kFinish:
        return d::finish<Model>(as<d::Batch>(a[0]), as<d::Sampling>(a[1]), p(2), p(3), p(4), p(5), p(6), p(7));
      case StepKernel::kRowStatistics: return d::row_statistics<Model>(as<d::Batch>(a[0]), as<d::Verify>(a[1]));
      case StepKernel::kResidualMass: return d::residual_mass<Model>(as<d::Batch>(a[0]), as<d::Verify>(a[1]));
      case StepKernel::kDecide: return d::decide<Model>(as<d::Batch>(a[0]), as<d::Verify>(a[1]));
    }
  }

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  const std::string text_;
  std::vector<std::unique_ptr<std::byte, Free>> memory_;
  std::vector<std::byte> smem_;
};

// A drafter and all that its calls read.
struct Side {
  Side(const Case& c, const DrafterWeights& weights, std::int64_t requests, std::unique_ptr<StepPhases> phases)
      : k(c.limits.num_draft_tokens), count(requests), vocab(c.config.vocab_size) {
    const std::int64_t width = c.config.kv_lora_rank + c.config.qk_rope_head_dim;
    pages = 1 + requests * kPagesOfRequest;
    DrafterMemory memory;
    cache.assign(static_cast<std::size_t>(c.config.num_hidden_layers),
                 std::vector<std::uint16_t>(static_cast<std::size_t>(pages * kPageRows * width + 8), 0x7fc1));
    for (auto& layer : cache)
      memory.cache.push_back(TensorView::dense(aligned(layer), DType::kBF16, {pages, kPageRows, width}));
    const DrafterTarget target{c.config.target_layer_ids, c.config.aux_hidden_stream, {}, {}};
    drafter.emplace(prepare_on(std::move(phases), weights, c.limits, target, memory, c.shard));
  }
  static std::uint16_t* aligned(std::vector<std::uint16_t>& values) {
    return reinterpret_cast<std::uint16_t*>((reinterpret_cast<std::uintptr_t>(values.data()) + 15) / 16 * 16);
  }

  static constexpr std::int64_t kPageRows = 16, kPagesOfRequest = 16;
  const int k;
  const std::int64_t count, vocab;
  std::int64_t pages = 0;
  std::vector<std::vector<std::uint16_t>> cache;
  std::optional<DsparkDrafter> drafter;
};

// What both sides read. The fifth of the requests, if there are so many, is padding.
struct Inputs {
  Inputs(const Case& c, std::int64_t requests, std::uint64_t number) : random(number), count(requests) {
    std::int32_t row = 0;
    row_start.push_back(0);
    const auto below = [&](std::uint64_t n) { return static_cast<std::int32_t>(random() % n); };
    const std::int64_t longest = c.limits.max_ingest_rows / requests;
    for (std::int64_t r = 0; r < requests; ++r) {
      request.push_back(r == 4 ? -1 : static_cast<std::int32_t>(r));
      const std::int32_t rows = 1 + below(static_cast<std::uint64_t>(longest));
      rejected.push_back(below(static_cast<std::uint64_t>(std::min(rows, 4))));
      for (std::int32_t i = 0; i < rows; ++i) positions.push_back(i);
      row_start.push_back(row += rows);
      anchor.push_back(below(512));
      temperature.push_back(r % 3 == 1 ? 0.0f : 0.5f + 0.25f * static_cast<float>(r % 4));
      seed.push_back(static_cast<std::int64_t>(random()));
      step.push_back(below(100));
    }
    for (std::int64_t page = 0; page < requests * Side::kPagesOfRequest; ++page)
      page_table.push_back(static_cast<std::int32_t>(1 + page));
    std::shuffle(page_table.begin(), page_table.end(), random);
    for (std::int64_t tap = 0; tap < c.config.num_taps(); ++tap) {
      features.emplace_back(static_cast<std::size_t>(row * c.config.target_hidden_size));
      fill("tap." + std::to_string(tap), number, 0, ValueKind::kFeature, 0, features.back());
      taps.push_back(TensorView::matrix(features.back().data(), row, c.config.target_hidden_size));
    }
  }
  DraftBatch batch() {
    const auto vector = [](auto& values, DType dtype) {
      return TensorView::dense(values.data(), dtype, {static_cast<std::int64_t>(values.size())});
    };
    return {vector(request, DType::kI32),
            vector(row_start, DType::kI32),
            vector(rejected, DType::kI32),
            vector(anchor, DType::kI32),
            vector(positions, DType::kI64),
            TensorView::dense(page_table.data(), DType::kI32, {count, Side::kPagesOfRequest}),
            vector(temperature, DType::kF32),
            vector(seed, DType::kI64),
            vector(step, DType::kI32)};
  }

  std::mt19937_64 random;
  std::int64_t count;
  std::vector<std::int32_t> request, row_start, rejected, anchor, page_table, step;
  std::vector<std::int64_t> positions, seed;
  std::vector<float> temperature;
  std::vector<std::vector<std::uint16_t>> features;
  std::vector<TensorView> taps;
};

double relative_norm(const std::uint16_t* a, const std::uint16_t* b, std::int64_t count) {
  double difference = 0, norm = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const double x = bf16_to_float(a[i]), y = bf16_to_float(b[i]);
    if (std::isnan(x) && std::isnan(y)) continue;  // both left it as it was
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  return std::sqrt(difference / norm);
}
double relative_norm(const TensorView& a, const TensorView& b, std::int64_t rows) {
  return relative_norm(static_cast<const std::uint16_t*>(a.data), static_cast<const std::uint16_t*>(b.data),
                       rows * a.shape[1]);
}
template <class T>
T at(const TensorView& view, std::int64_t i) {
  return static_cast<const T*>(view.data)[i];
}

std::uint64_t fresh() {
  static const std::uint64_t number = std::random_device{}();
  return number;
}

template <class Model>
class Emulated {
 public:
  Emulated(Case of, std::int64_t of_requests) : c(std::move(of)), requests(of_requests), in(c, requests, fresh()) {
    folder_ = fs::temp_directory_path() / ("twostep-emulated-" + std::to_string(::getpid()));
    write_synthetic(c.config, 3, folder_, true, [](std::uint64_t, std::uint64_t) {});
    const DrafterWeights weights = DrafterWeights::load(folder_);
    cpu.emplace(c, weights, requests, make_cpu_phases());
    gpu.emplace(c, weights, requests, make_device_phases(std::make_unique<EmulatedLauncher<Model>>(c)));
  }
  ~Emulated() { fs::remove_all(folder_); }

  void run() {
    for (Side* side : {&*cpu, &*gpu}) {
      side->drafter->ingest(in.batch(), in.taps);
      side->drafter->draft(in.batch());
    }
  }

  const Case c;
  const std::int64_t requests;
  Inputs in;
  std::optional<Side> cpu, gpu;

 private:
  fs::path folder_;
};

template <class Model>
void expect_the_same_step(const Case& c, std::int64_t requests) {
  SCOPED_TRACE(testing::Message() << c.name << ", " << requests << " requests, inputs " << fresh());
  Emulated<Model> both(c, requests);
  both.run();
  const DraftOutput &cpu = both.cpu->drafter->output(), &gpu = both.gpu->drafter->output();
  const std::int64_t k = c.limits.num_draft_tokens;
  for (std::size_t layer = 0; layer < both.cpu->cache.size(); ++layer) {
    const auto size = static_cast<std::int64_t>(both.cpu->cache[layer].size()) - 8;
    EXPECT_LT(relative_norm(Side::aligned(both.gpu->cache[layer]), Side::aligned(both.cpu->cache[layer]), size), 0.01);
  }
  EXPECT_LT(relative_norm(gpu.hidden, cpu.hidden, requests * k), 0.01);
  EXPECT_LT(relative_norm(gpu.base_logits, cpu.base_logits, requests * k), 0.01);
  // Picks are compared on the same base logits: where two scores are close, the backends' own may part, and what
  // follows another token is another draft.
  std::memcpy(cpu.base_logits.data, gpu.base_logits.data,
              static_cast<std::size_t>(requests * k * gpu.base_logits.shape[1]) * 2);
  sample_again(*both.cpu->drafter, both.in.batch());
  for (std::int64_t r = 0; r < requests; ++r) {
    EXPECT_EQ(at<std::int64_t>(gpu.first_position, r), at<std::int64_t>(cpu.first_position, r));
    EXPECT_EQ(at<std::int32_t>(gpu.status, r), 0);
    for (std::int64_t i = r * k; i < r * k + k; ++i) {
      const auto token = at<std::int32_t>(gpu.tokens, i);
      EXPECT_TRUE(r == 4 ? token == -1 : token >= 0 && token < 512) << token;
      EXPECT_EQ(token, at<std::int32_t>(cpu.tokens, i)) << "request " << r << ", draft " << i % k;
      EXPECT_NEAR(at<float>(gpu.confidence, i), at<float>(cpu.confidence, i), 0.01);
      EXPECT_NEAR(at<float>(gpu.survival, i), at<float>(cpu.survival, i), 0.02);
    }
  }
}

TEST(EmulatedStep, tiny) {
  expect_the_same_step<Tiny::Model>(emulate::tiny_case(), 1);
  expect_the_same_step<Tiny::Model>(emulate::tiny_case(), 4);
}
TEST(EmulatedStep, switched) {
  expect_the_same_step<Switched::Model>(emulate::switched_case(), 2);
  expect_the_same_step<Switched::Model>(emulate::switched_case(), 18);
}
TEST(EmulatedStep, long_blocks) {
  expect_the_same_step<Long::Model>(emulate::long_case(), 1);
  expect_the_same_step<Long::Model>(emulate::long_case(), 2);
}

template <class Model>
void expect_the_verdicts_of_the_host(const Case& c, std::int64_t requests, bool one_hot) {
  SCOPED_TRACE(testing::Message() << c.name << (one_hot ? ", one-hot" : "") << ", inputs " << fresh());
  Emulated<Model> both(c, requests);
  both.run();
  const std::int64_t k = c.limits.num_draft_tokens, vocab = c.config.vocab_size;
  const DraftOutput& out = both.gpu->drafter->output();
  std::normal_distribution<float> normal;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(requests * k)),
      emitted(static_cast<std::size_t>(requests * (k + 1)));
  std::vector<std::int32_t> accepted(static_cast<std::size_t>(requests)), wanted(static_cast<std::size_t>(k + 1));
  std::vector<float> logits(static_cast<std::size_t>(requests * (k + 1) * vocab));
  const auto draft_logit = [&](std::int64_t r, std::int64_t i, std::int64_t v) {
    const std::int64_t index = (r * k + i) * vocab + v;
    if (one_hot) return 0.0f;
    return c.limits.draft_logits == DType::kBF16 ? bf16_to_float(at<std::uint16_t>(out.draft_logits, index))
                                                 : at<float>(out.draft_logits, index);
  };
  for (int round = 0; round < 4; ++round) {
    for (std::int64_t i = 0; i < requests * k; ++i) ids[static_cast<std::size_t>(i)] = at<std::int32_t>(out.tokens, i);
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
    for (const VerifyMethod method : {VerifyMethod::kStandard, VerifyMethod::kBlock}) {
      const auto steps = both.in.step;
      VerifyBatch verify;
      verify.draft_ids = TensorView::dense(ids.data(), DType::kI32, {requests, k});
      verify.logits = TensorView::dense(logits.data(), DType::kF32, {requests, k + 1, vocab});
      verify.emitted = TensorView::dense(emitted.data(), DType::kI32, {requests, k + 1});
      verify.accepted = TensorView::dense(accepted.data(), DType::kI32, {requests});
      verify.one_hot = one_hot;
      verify.method = method;
      both.gpu->drafter->verify(both.in.batch(), verify);
      for (std::int64_t r = 0; r < requests; ++r) {
        const auto index = static_cast<std::size_t>(r);
        if (both.in.request[index] < 0) {
          EXPECT_EQ(accepted[index], 0);
          EXPECT_EQ(both.in.step[index], steps[index]);
          continue;
        }
        VerifyRequest request;
        request.drafts = {ids.data() + r * k, static_cast<std::size_t>(k)};
        request.target = TensorView::matrix(logits.data() + r * (k + 1) * vocab, k + 1, vocab, {}, 0, DType::kF32);
        if (!one_hot) {
          const auto size = static_cast<std::int64_t>(dtype_size(c.limits.draft_logits));
          request.draft_logits =
              TensorView::matrix(static_cast<std::byte*>(out.draft_logits.data) + r * k * vocab * size, k, vocab, {}, 0,
                                 c.limits.draft_logits);
        }
        request.temperature = both.in.temperature[index];
        request.key = {static_cast<std::uint64_t>(both.in.seed[index]),
                       static_cast<std::uint32_t>(at<std::int64_t>(out.first_position, r)),
                       static_cast<std::uint32_t>(steps[index])};
        const VerifyResult result = twostep::verify(method, request, wanted);
        EXPECT_EQ(accepted[index], result.accepted()) << "request " << r << ", round " << round;
        EXPECT_EQ(both.in.step[index], steps[index] + 1);
        EXPECT_EQ((at<std::int32_t>(out.status, r) & kNonFinite) != 0, round == 3);
        for (std::int64_t i = 0; i <= k; ++i)
          EXPECT_EQ(emitted[static_cast<std::size_t>(r * (k + 1) + i)], wanted[static_cast<std::size_t>(i)])
              << "request " << r << ", round " << round << ", token " << i;
      }
    }
  }
}
TEST(EmulatedVerify, verdicts_are_those_of_the_host) {
  expect_the_verdicts_of_the_host<Tiny::Model>(emulate::tiny_case(), 4, false);
  expect_the_verdicts_of_the_host<Tiny::Model>(emulate::tiny_case(), 4, true);
  expect_the_verdicts_of_the_host<Long::Model>(emulate::long_case(), 2, false);
}

// What the device cannot check before the launch.
TEST(EmulatedStep, bad_pages_and_bad_numbers_touch_one_request_alone) {
  Emulated<Tiny::Model> both(emulate::tiny_case(), 4);
  const auto tokens_of = [&](std::int64_t r) {
    std::vector<std::int32_t> tokens;
    for (std::int64_t i = 3 * r; i < 3 * r + 3; ++i)
      tokens.push_back(at<std::int32_t>(both.gpu->drafter->output().tokens, i));
    return tokens;
  };
  both.run();
  const auto good = tokens_of(0);
  for (const std::int32_t bad : {-5, 0, static_cast<std::int32_t>(both.gpu->pages), 1 << 30}) {
    const std::int32_t kept = std::exchange(both.in.page_table[2 * Side::kPagesOfRequest], bad);
    both.run();
    EXPECT_EQ(at<std::int32_t>(both.gpu->drafter->output().status, 2), kBadPage) << bad;
    EXPECT_EQ(at<std::int32_t>(both.gpu->drafter->output().status, 0), 0);
    EXPECT_EQ(tokens_of(0), good);
    both.in.page_table[2 * Side::kPagesOfRequest] = kept;
  }
  for (int fault = 0; fault < 4; ++fault) {
    Inputs saved = both.in;
    if (fault == 0) both.in.rejected[2] = 1000;
    if (fault == 1) both.in.anchor[2] = 512;
    if (fault == 2) both.in.positions[static_cast<std::size_t>(both.in.row_start[3] - 1 - both.in.rejected[2])] = 256;
    if (fault == 3) both.in.row_start[4] = 1 << 20;  // of request 3
    both.run();
    const std::int64_t r = fault == 3 ? 3 : 2;
    EXPECT_EQ(at<std::int32_t>(both.gpu->drafter->output().status, r), kBadInput) << fault;
    EXPECT_EQ(tokens_of(r), (std::vector<std::int32_t>{-1, -1, -1})) << fault;
    EXPECT_EQ(tokens_of(0), good);
    both.in.rejected = saved.rejected;
    both.in.anchor = saved.anchor;
    both.in.positions = saved.positions;
    both.in.row_start = saved.row_start;
  }
}

TEST(Emulator, threads_that_wait_for_each_other_in_vain_are_told) {
  EXPECT_THROW(emulate::run({1, 1, 1}, 64,
                            [] {
                              if (emulate::thread.x % 32 < 16) emulate::warp_barrier();
                              else emulate::cta_barrier();
                            }),
               std::logic_error);
}

}  // namespace
}  // namespace twostep
