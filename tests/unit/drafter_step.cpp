// DsparkDrafter in C++: tables of the rope, whole loops, memory, what prepare refuses. Values against the independent
// reference are in tests/python/test_drafter.py.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "core/bf16.h"
#include "drafter/contract.h"
#include "drafter/rope.h"
#include "io/checkpoint.h"
#include "io/synth.h"
#include "measure/draft_loop.h"
#include "tests/common/allocations.h"
#include "tests/unit/code_of.h"

namespace twostep {
namespace {

using test::code_of;
namespace fs = std::filesystem;

const fs::path& tiny_folder() {
  static const fs::path folder = [] {
    const fs::path path = fs::temp_directory_path() / ("twostep-drafter-" + std::to_string(::getpid()));
    write_synthetic(synth_preset("tiny"), 1, path, true, [](std::uint64_t, std::uint64_t) {});
    std::atexit([] { fs::remove_all(fs::temp_directory_path() / ("twostep-drafter-" + std::to_string(::getpid()))); });
    return path;
  }();
  return folder;
}

TEST(DrafterRope, frequencies_and_scales_of_k3_are_the_specifications) {
  const Rope rope = make_rope(synth_preset("k3"));
  ASSERT_EQ(rope.inverse_frequency.size(), 32u);
  EXPECT_EQ(rope.inverse_frequency[0], 1.0f);
  EXPECT_FLOAT_EQ(rope.inverse_frequency[16], 0.00407828307f);
  EXPECT_FLOAT_EQ(rope.inverse_frequency[31], 8.76441291e-7f);
  EXPECT_FLOAT_EQ(rope.amplitude, 1);
  EXPECT_NEAR(rope.softmax_scale, 0.1308608, 1e-7);
  EXPECT_NEAR(make_rope(synth_preset("tiny")).softmax_scale, 0.2106071, 1e-7);
}

TEST(DrafterRope, without_yarn_the_factor_is_ignored) {
  DrafterConfig config = synth_preset("tiny");
  config.rope.rope_type = "default";
  const Rope rope = make_rope(config);
  EXPECT_FLOAT_EQ(rope.softmax_scale, 1 / std::sqrt(48.0f));
  EXPECT_FLOAT_EQ(rope.inverse_frequency[7], static_cast<float>(std::pow(50000.0, -14.0 / 16)));
}

TEST(DraftLoop, greedy_steps_say_what_the_target_alone_would) {
  DraftLoopOptions options;
  options.requests = 5;
  options.draft_tokens = 3;
  options.steps = 400;
  options.seed = 17;
  DraftLoop loop(DrafterWeights::load(tiny_folder()), options);
  std::int64_t emitted = 0;
  for (int i = 0; i < options.steps; ++i) loop.step();
  for (int r = 0; r < options.requests; ++r) emitted += loop.emitted(r);
  EXPECT_GE(emitted, 2000);
  EXPECT_TRUE(loop.is_targets_own());
}

TEST(DraftLoop, equal_seeds_give_equal_tokens_and_others_do_not) {
  DraftLoopOptions options;
  options.requests = 2;
  options.draft_tokens = 3;
  options.steps = 10;
  options.temperature = 1;
  const auto tokens_of = [&](std::uint64_t seed) {
    options.seed = seed;
    DraftLoop loop(DrafterWeights::load(tiny_folder()), options);
    for (int i = 0; i < options.steps; ++i) loop.step();
    return loop.tokens(1);
  };
  EXPECT_EQ(tokens_of(3), tokens_of(3));
  EXPECT_NE(tokens_of(3), tokens_of(4));
}

TEST(DraftLoop, refuses_what_does_not_fit) {
  const DrafterWeights weights = DrafterWeights::load(tiny_folder());
  const auto refused = [&](auto&& change) {
    DraftLoopOptions options;
    options.draft_tokens = 3;
    change(options);
    return code_of([&] { DraftLoop loop(weights, options); });
  };
  EXPECT_EQ(refused([](auto& o) { o.requests = 0; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused([](auto& o) { o.requests = 513; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused([](auto& o) { o.draft_tokens = 17; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused([](auto& o) { o.context = 1; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused([](auto& o) { o.context = 2048; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused([](auto& o) { o.steps = 1000; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused([](auto& o) { o.temperature = -1; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused([](auto& o) { o.temperature = std::nanf(""); }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused([](auto& o) { o.shard = {3, 0}; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused([](auto& o) { o.shard = {2, 2}; }), StatusCode::kInvalidArgument);
}

// One request on one page after the other, and the memory of its calls.
struct Step {
  static constexpr int kTokens = 3;
  static constexpr std::int64_t kContext = 20, kPages = 3, kPageRows = 16;

  explicit Step(const DrafterWeights& weights, DrafterLimits limits = {}, DrafterMemory memory = {},
                DrafterShard shard = {})
      : config(weights.config()) {
    const std::int64_t width = config.kv_lora_rank + config.qk_rope_head_dim;
    cache.assign(static_cast<std::size_t>(config.num_hidden_layers),
                 std::vector<std::uint16_t>(static_cast<std::size_t>(kPages * kPageRows * width), 0x7fc1));
    for (auto& layer : cache)
      memory.cache.push_back(TensorView::dense(layer.data(), DType::kBF16, {kPages, kPageRows, width}));
    limits.num_draft_tokens = kTokens;
    limits.max_ingest_rows = kContext;
    const DrafterTarget target{config.target_layer_ids, config.aux_hidden_stream, {}, {}};
    drafter.emplace(DsparkDrafter::prepare(weights, limits, target, memory, Device::cpu(), shard));
    for (std::size_t i = 0; i < static_cast<std::size_t>(kContext); ++i) positions[i] = static_cast<std::int64_t>(i);
    for (std::size_t tap = 0; tap < config.target_layer_ids.size(); ++tap) {
      features.emplace_back(static_cast<std::size_t>(kContext * config.target_hidden_size));
      fill("tap." + std::to_string(tap), 5, 0, ValueKind::kFeature, 0, features.back());
      taps.push_back(TensorView::matrix(features.back().data(), kContext, config.target_hidden_size));
    }
    batch = {TensorView::dense(&request, DType::kI32, {1}),
             TensorView::dense(row_start.data(), DType::kI32, {2}),
             TensorView::dense(&rejected, DType::kI32, {1}),
             TensorView::dense(&anchor, DType::kI32, {1}),
             TensorView::dense(positions.data(), DType::kI64, {kContext}),
             TensorView::dense(pages.data(), DType::kI32, {1, kPages - 1}),
             TensorView::dense(&temperature, DType::kF32, {1}),
             TensorView::dense(&seed, DType::kI64, {1}),
             TensorView::dense(&step, DType::kI32, {1})};
  }

  void run() {
    drafter->ingest(batch, taps);
    drafter->draft(batch);
  }
  std::vector<std::uint16_t> logits() const {
    const TensorView& view = drafter->output().base_logits;
    const auto* data = static_cast<const std::uint16_t*>(view.data);
    return {data, data + view.shape[0] * view.shape[1]};
  }

  DrafterConfig config;
  std::vector<std::vector<std::uint16_t>> cache, features;
  std::vector<TensorView> taps;
  std::int32_t request = 0, rejected = 0, anchor = 7, step = 0;
  std::array<std::int32_t, 2> row_start = {0, kContext}, pages = {1, 2};
  std::array<std::int64_t, kContext> positions{};
  float temperature = 1;
  std::int64_t seed = 9;
  DraftBatch batch;
  std::optional<DsparkDrafter> drafter;
};

TEST(DsparkDrafter, the_step_allocates_nothing) {
  DrafterLimits limits;
  limits.mode = DraftMode::kProbabilistic;
  Step step(DrafterWeights::load(tiny_folder()), limits);
  std::vector<float> logits(4 * 512, 0.5f);
  std::array<std::int32_t, 4> emitted{};
  std::int32_t accepted = 0;
  VerifyBatch verify;
  verify.draft_ids = step.drafter->output().tokens;
  verify.logits = TensorView::dense(logits.data(), DType::kF32, {1, 4, 512});
  verify.emitted = TensorView::dense(emitted.data(), DType::kI32, {1, 4});
  verify.accepted = TensorView::dense(&accepted, DType::kI32, {1});
  step.run();
  step.drafter->verify(step.batch, verify);
  const std::uint64_t before = test::allocations();
  step.run();
  step.drafter->verify(step.batch, verify);
  EXPECT_EQ(test::allocations(), before);
  EXPECT_GE(accepted, 1);
}

TEST(DsparkDrafter, files_and_memory_and_lent_tensors_give_the_same_bits) {
  const DrafterWeights files = DrafterWeights::load(tiny_folder());
  Step wanted(files);
  wanted.run();

  std::map<std::string, TensorView> tensors;
  for (const auto& [name, tensor] : files.checkpoint().tensors().tensors) {
    TensorView view;
    view.data = const_cast<std::byte*>(tensor.data);
    view.rank = static_cast<int>(tensor.shape.size());
    std::int64_t stride = 1;
    for (std::size_t i = tensor.shape.size(); i-- > 0; stride *= tensor.shape[i]) {
      view.shape[i] = tensor.shape[i];
      view.stride[i] = stride;
    }
    tensors[name] = view;
  }
  Step memory(DrafterWeights::from_memory(files.config(), tensors, {}));
  memory.run();
  EXPECT_EQ(memory.logits(), wanted.logits());

  DrafterMemory lent;
  lent.embed_tokens = tensors.at("embed_tokens.weight");
  lent.lm_head = tensors.at("lm_head.weight");
  tensors.erase("embed_tokens.weight");
  tensors.erase("lm_head.weight");
  EXPECT_EQ(code_of([&] { (void)DrafterWeights::from_memory(files.config(), tensors, {}); }), StatusCode::kDataError);
  DrafterWeights::Options options;
  options.embedding_lent = true;
  const DrafterWeights without = DrafterWeights::from_memory(files.config(), tensors, options);
  EXPECT_EQ(code_of([&] { Step step(without); }), StatusCode::kDataError) << "no head";
  Step borrowed(without, {}, lent);
  borrowed.run();
  EXPECT_EQ(borrowed.logits(), wanted.logits());
}

TEST(DsparkDrafter, a_file_that_changed_since_load_is_refused_and_one_that_was_replaced_is_not) {
  const fs::path folder = tiny_folder().string() + "-changed";
  fs::remove_all(folder);
  fs::copy(tiny_folder(), folder);
  const fs::path file = folder / "model.safetensors";
  const auto refused = [](const DrafterWeights& weights) {
    try {
      Step step(weights);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kDataError) << error.what();
      return error.status().value;
    }
    return std::string("accepted");
  };
  const DrafterWeights renamed = DrafterWeights::load(folder);
  fs::copy(file, folder / "new");
  fs::rename(folder / "new", file);
  EXPECT_EQ(refused(renamed), "accepted");

  const DrafterWeights cut = DrafterWeights::load(folder);
  fs::resize_file(file, 4096);
  EXPECT_EQ(refused(cut), "4096 bytes now");

  fs::copy(tiny_folder() / "model.safetensors", file, fs::copy_options::overwrite_existing);
  const DrafterWeights written = DrafterWeights::load(folder);
  fs::last_write_time(file, fs::last_write_time(file) + std::chrono::seconds(1));
  EXPECT_EQ(refused(written), "written since it was opened");
  fs::remove_all(folder);
}

// 9.2 and 3.3: shards of the linears, kv_b, W2, the embedding; W1 and norms.
TEST(DsparkDrafter, a_rank_holds_its_shards_and_little_else) {
  const DrafterWeights weights = DrafterWeights::load(tiny_folder());
  const auto bytes_of = [&](int ranks) { return Step(weights, {}, {}, {ranks, ranks - 1}).drafter->weight_bytes(); };
  const std::int64_t replicated = 2 * (208 * 256 * 2 + 160 * 256 + 512 * 32);  // qkv_a, kv, W1
  const std::int64_t split =
      2 * (2 * (192 * 128 + 256 * 64 + 256 * 128 + 3 * 512 * 256) + 256 * 512 + 512 * 32 + 2 * 512 * 256);
  for (const int ranks : {1, 2, 4}) {
    EXPECT_GE(bytes_of(ranks), replicated + split / ranks);
    EXPECT_LE(bytes_of(ranks), 1.02 * static_cast<double>(replicated + split / ranks)) << ranks;
  }
}

TEST(DsparkDrafter, a_rank_embeds_its_own_tokens_and_zero_for_those_of_others) {
  const DrafterWeights weights = DrafterWeights::load(tiny_folder());
  const StoredTensor& stored = weights.checkpoint().tensor("embed_tokens.weight");
  std::vector<std::uint16_t> table(512 * 256);
  for (const int rank : {0, 1}) {  // the anchor is the first one's, the mask token the second's
    std::memcpy(table.data(), stored.data, stored.bytes);
    std::fill_n(table.begin() + (1 - rank) * 256 * 256, 256 * 256, std::uint16_t{0});
    DrafterMemory lent;
    lent.embed_tokens = TensorView::matrix(table.data(), 512, 256);
    Step wanted(weights, {}, lent, {2, rank}), own(weights, {}, {}, {2, rank});
    wanted.run();
    own.run();
    EXPECT_EQ(own.logits(), wanted.logits()) << rank;
  }
}

TEST(DsparkDrafter, weights_that_are_not_finite_are_refused_on_demand) {
  const DrafterWeights files = DrafterWeights::load(tiny_folder());
  const StoredTensor& stored = files.checkpoint().tensor("final_norm.weight");
  std::vector<std::uint16_t> values(256);
  std::memcpy(values.data(), stored.data, 512);
  values[77] = 0x7f80;
  std::map<std::string, TensorView> tensors;
  for (const auto& [name, tensor] : files.checkpoint().tensors().tensors)
    tensors[name] = tensor.shape.size() == 1
                        ? TensorView::dense(const_cast<std::byte*>(tensor.data), DType::kBF16, {tensor.shape[0]})
                        : TensorView::matrix(const_cast<std::byte*>(tensor.data), tensor.shape[0], tensor.shape[1]);
  tensors["final_norm.weight"] = TensorView::dense(values.data(), DType::kBF16, {256});
  DrafterWeights::Options options;
  (void)DrafterWeights::from_memory(files.config(), tensors, options);
  options.check_finite = true;
  try {
    (void)DrafterWeights::from_memory(files.config(), tensors, options);
    FAIL() << "infinity was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kDataError);
    EXPECT_NE(std::string(error.what()).find("final_norm.weight"), std::string::npos);
  }
}

TEST(DsparkDrafter, one_error_names_every_broken_limit) {
  DrafterLimits limits;
  limits.request_counts = {0, 513};
  limits.max_len = 1 << 30;
  limits.draft_logits = DType::kF16;
  try {
    Step step(DrafterWeights::load(tiny_folder()), limits);
    FAIL() << "taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
    for (const char* part : {"request_counts = 0", "request_counts = 513", "max_len", "draft_logits"})
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << ": " << error.what();
  }
}

TEST(DsparkDrafter, layers_of_the_cache_may_lie_between_each_other_but_not_meet) {
  const DrafterWeights weights = DrafterWeights::load(tiny_folder());
  constexpr std::int64_t kPages = 3, kRows = 16, kWidth = 80, kPage = kRows * kWidth;
  std::vector<std::uint16_t> pool(static_cast<std::size_t>(2 * kPages * kPage));
  const auto refused = [&](std::int64_t second, std::int64_t stride) {
    DrafterMemory memory;
    for (const std::int64_t first : {std::int64_t{0}, second}) {
      memory.cache.push_back(TensorView::dense(pool.data() + first, DType::kBF16, {kPages, kRows, kWidth}));
      memory.cache.back().stride[0] = stride;
    }
    DrafterLimits limits;
    limits.num_draft_tokens = 3;
    return code_of([&] {
      (void)DsparkDrafter::prepare(weights, limits, {{1, 3}, "prefix", {}, {}}, memory, Device::cpu());
    });
  };
  EXPECT_EQ(refused(kPages * kPage, kPage), StatusCode::kOk);  // one after the other
  EXPECT_EQ(refused(kPage, 2 * kPage), StatusCode::kOk);       // [pages, layers, rows, width]
  EXPECT_EQ(refused(0, kPage), StatusCode::kOverlap);
  EXPECT_EQ(refused(kPage, kPage), StatusCode::kOverlap);
  EXPECT_EQ(refused(kPages * kPage - 8, kPage), StatusCode::kOverlap);
  EXPECT_EQ(refused(kPage - 8, 2 * kPage), StatusCode::kOverlap);
  EXPECT_EQ(refused(kPage + 8, 2 * kPage), StatusCode::kOverlap);
}

TEST(DsparkDrafter, what_verify_writes_meets_nothing_that_it_reads) {
  DrafterLimits limits;
  limits.mode = DraftMode::kProbabilistic;
  Step step(DrafterWeights::load(tiny_folder()), limits);
  step.run();
  std::vector<float> logits(4 * 512, 0.5f);
  std::array<std::int32_t, 8> room{};
  const auto refused = [&](std::int32_t* emitted, std::int32_t* accepted) {
    VerifyBatch verify;
    verify.draft_ids = TensorView::dense(room.data(), DType::kI32, {1, 3});
    verify.logits = TensorView::dense(logits.data(), DType::kF32, {1, 4, 512});
    verify.emitted = TensorView::dense(emitted, DType::kI32, {1, 4});
    verify.accepted = TensorView::dense(accepted, DType::kI32, {1});
    return code_of([&] { step.drafter->verify(step.batch, verify); });
  };
  const auto in = [](auto* data) { return reinterpret_cast<std::int32_t*>(data); };
  EXPECT_EQ(refused(room.data() + 3, room.data() + 7), StatusCode::kOk);
  EXPECT_EQ(refused(room.data() + 2, room.data() + 7), StatusCode::kOverlap);
  EXPECT_EQ(refused(room.data() + 3, room.data() + 6), StatusCode::kOverlap);
  EXPECT_EQ(refused(room.data() + 3, &step.step), StatusCode::kOverlap);
  EXPECT_EQ(refused(room.data() + 3, &step.request), StatusCode::kOverlap);
  EXPECT_EQ(refused(room.data() + 3, in(&step.seed)), StatusCode::kOverlap);
  EXPECT_EQ(refused(room.data() + 3, in(&step.temperature)), StatusCode::kOverlap);
  EXPECT_EQ(refused(in(logits.data() + 2040), room.data() + 7), StatusCode::kOverlap);
  for (const TensorView DraftOutput::*own :
       {&DraftOutput::status, &DraftOutput::first_position, &DraftOutput::draft_logits})
    EXPECT_EQ(refused(room.data() + 3, in((step.drafter->output().*own).data)), StatusCode::kOverlap);
}

TEST(DsparkDrafter, progress_ends_at_its_total) {
  const DrafterWeights weights = DrafterWeights::load(tiny_folder());
  std::vector<std::uint16_t> layers(2 * 3 * 16 * 80);
  DrafterMemory memory;
  for (const std::int64_t first : {0, 3 * 16 * 80})
    memory.cache.push_back(TensorView::dense(layers.data() + first, DType::kBF16, {3, 16, 80}));
  DrafterLimits limits;
  limits.num_draft_tokens = 3;
  std::uint64_t last = 0, total = 0;
  (void)DsparkDrafter::prepare(weights, limits, {{1, 3}, "prefix", {}, {}}, memory, Device::cpu(), {},
                               [&](std::uint64_t done, std::uint64_t all) {
                                 EXPECT_LE(last, done);
                                 last = done;
                                 total = all;
                               });
  EXPECT_EQ(last, total);
}

TEST(DsparkDrafter, a_refusal_says_what_would_be_taken_and_what_to_do) {
  const DrafterWeights weights = DrafterWeights::load(tiny_folder());
  const auto message = [](auto&& work) {
    try {
      work();
    } catch (const Error& error) {
      EXPECT_FALSE(error.status().remedy.empty()) << error.what();
      return error.status().argument + ": " + error.status().accepted;
    }
    return std::string("accepted");
  };
  DrafterLimits limits;
  limits.max_len = -1;
  EXPECT_EQ(message([&] { Step step(weights, limits); }), "limits.max_len: 0, which is the largest, or 4 to 2048");
  EXPECT_EQ(message([&] { Step step(weights, {}, {}, {3, 0}); }), "tp: divisors of num_attention_heads = 4");
  Step step(weights);
  step.taps[1].dtype = DType::kF16;
  EXPECT_EQ(message([&] { step.run(); }), "taps[1].dtype: BF16");
  step.taps[1] = step.taps[0];
  step.taps[1].shape[0] = 3;
  EXPECT_EQ(message([&] { step.run(); }), "taps[1].shape: [20, 256]");
  step.batch.anchor.shape[0] = 2;
  EXPECT_EQ(message([&] { step.run(); }), "batch.anchor.shape: [1]");
  step.batch.anchor.shape[0] = 1;
  VerifyBatch verify;
  verify.one_hot = true;
  verify.logits.dtype = DType::kF64;
  EXPECT_EQ(message([&] { step.drafter->verify(step.batch, verify); }), "logits.dtype: F32, BF16");
}

// The stride of one row is of no matter: its windows are one buffer, whatever the view says.
TEST(DsparkDrafter, taps_of_one_row_are_read_in_place) {
  const std::array<std::uint16_t, 32> row{};
  const auto one = [&](std::int64_t rows, std::int64_t stride, std::int64_t gap) {
    const std::array<Tap, 2> taps = {{{row.data(), stride}, {row.data() + 8 + gap, stride}}};
    return taps_are_one_buffer(taps, rows, 8);
  };
  EXPECT_TRUE(one(1, 8, 0));
  EXPECT_TRUE(one(2, 16, 0));
  EXPECT_FALSE(one(2, 8, 0));
  EXPECT_FALSE(one(1, 8, 1));
}

TEST(DsparkDrafter, a_cache_on_another_device_is_refused) {
  DrafterMemory memory;
  for (int i = 0; i < 2; ++i)
    memory.cache.push_back(TensorView::dense(nullptr, DType::kBF16, {3, 16, 80}, Device::cuda(0)));
  DrafterLimits limits;
  limits.num_draft_tokens = 3;
  EXPECT_EQ(code_of([&] {
              (void)DsparkDrafter::prepare(DrafterWeights::load(tiny_folder()), limits, {{1, 3}, "prefix", {}, {}},
                                           memory, Device::cpu());
            }),
            StatusCode::kWrongDevice);
}

}  // namespace
}  // namespace twostep
