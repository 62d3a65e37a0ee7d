// What PreparedKda takes and refuses, row by row of kda 14, apart from any kernel.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kda/contract.h"
#include "tests/common/allocations.h"
#include "twostep/kda.h"

namespace twostep {
namespace {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TensorView dense(void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
  return TensorView::dense(data, dtype, shape);
}

// Refused with this code, and the sentence has every part.
void expect_refusal(const Status& status, StatusCode code, const std::vector<std::string>& parts) {
  const std::string text = status.message();
  EXPECT_EQ(code_name(status.code), code_name(code)) << text;
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << '"' << part << "\" in: " << text;
  EXPECT_FALSE(status.accepted.empty()) << text;
}
template <class Call>
Status status_of(Call&& call) {
  try {
    call();
    return {};
  } catch (const Error& error) {
    return error.status();
  }
}

KdaPolicy policy(KdaKey key, std::int64_t row_stride, GateSchedule gate = GateSchedule::kInline) {
  KdaPolicy made;
  made.key = key;
  made.row_stride = row_stride;
  made.gate = gate;
  return made;
}

// A layer of two heads and all that its steps need, on the host.
constexpr int kHeads = 2;
constexpr std::int64_t kD = 128 * kHeads, kUsed = 4 * kD + 128 + kHeads, kStride = 1168;
constexpr std::int64_t kSlots = 5, kLength = 6;

struct Layer {
  std::vector<float> conv_weight = std::vector<float>(12 * kD, 0.25f), conv_bias = std::vector<float>(3 * kD, 0.5f);
  // Room for a whole `out` around what is shorter than its rows.
  std::vector<float> a_log = std::vector<float>(1024 + kHeads), dt_bias = std::vector<float>(kD + 512);
  std::vector<float> norm_weight = std::vector<float>(128, 1.0f);
  std::vector<std::uint16_t> f_b = std::vector<std::uint16_t>(kD * 128 + 1024, 0x3c00);
  KdaWeights weights;
  KdaOptions options;

  Layer() {
    weights.conv_weight = dense(conv_weight.data(), DType::kF32, {3 * kD, 1, 4});
    weights.conv_bias = dense(conv_bias.data(), DType::kF32, {3 * kD});
    weights.f_b = dense(f_b.data(), DType::kBF16, {kD, 128});
    weights.a_log = dense(a_log.data() + 512, DType::kF32, {kHeads});
    weights.dt_bias = dense(dt_bias.data(), DType::kF32, {kD});
    weights.norm_weight = dense(norm_weight.data(), DType::kF32, {128});
    options.heads = kHeads;
    options.gate_lower_bound = -5.0f;
    for (KdaKey key : {KdaKey{2, 2}, {4, 1}, {1, 4}, {1, 1}, {2, 1}, {1, 2}})
      options.policies.push_back(policy(key, kStride));
  }
  Status construct() const {
    return status_of([&] { check_kda(weights, options); });
  }
};

KdaCaches layouts(std::int64_t slots = kSlots, std::int64_t length = kLength) {
  return {dense(nullptr, DType::kBF16, {slots, length, 3 * kD}),
          dense(nullptr, DType::kF32, {slots, kHeads, 128, 128}),
          {}};
}

// ---- Construction

TEST(KdaContract, a_whole_layer_is_accepted_and_its_policies_come_in_rising_order) {
  Layer layer;
  const KdaModel model = check_kda(layer.weights, layer.options);
  EXPECT_EQ(model.heads, kHeads);
  EXPECT_EQ(model.channels(), kD);
  EXPECT_EQ(model.used_columns(), kUsed);
  EXPECT_EQ(model.device, Device::cpu());
  std::string keys;
  for (const auto& policy : model.options.policies) keys += to_string(policy.key) + " ";
  EXPECT_EQ(keys, "1 (1, 2) (1, 4) 2 (2, 2) 4 ");
}

TEST(KdaContract, the_natural_row_stride_is_that_of_the_chapter) {
  for (auto [heads, stride] : {std::pair<int, int>{12, 6288}, {24, 12448}, {48, 24752}, {96, 49376}})
    EXPECT_EQ(kda_row_stride(heads), stride);
}

TEST(KdaContract, row_1_heads_are_1_to_128) {
  for (int heads : {0, -1, 129}) {
    Layer layer;
    layer.options.heads = heads;
    expect_refusal(layer.construct(), StatusCode::kUnsupported,
                   {"kda.PreparedKda: heads = " + std::to_string(heads), "1 to 128"});
  }
}

TEST(KdaContract, row_1_every_head_count_in_range_is_accepted) {
  static float memory[1];
  for (int heads = 1; heads <= 128; ++heads) {
    const std::int64_t d = 128 * heads;
    KdaWeights weights{dense(memory, DType::kF32, {3 * d, 1, 4}), {}, {}, {}, {}, dense(memory, DType::kF32, {128})};
    alignas(16) std::uint16_t f_b[8] = {};
    weights.f_b = dense(f_b, DType::kBF16, {d, 128});
    weights.a_log = dense(memory, DType::kF32, {1, 1, heads, 1});
    weights.dt_bias = dense(memory, DType::kF32, {d});
    KdaOptions options;
    options.heads = heads;
    options.policies = {policy({1, 1}, kda_row_stride(heads))};
    EXPECT_EQ(status_of([&] { check_kda(weights, options); }).message(), "ok") << heads;
  }
}

TEST(KdaContract, row_2_other_head_dimensions_and_conv_widths_are_unsupported) {
  Layer layer;
  layer.weights.f_b.shape[0] = 64 * kHeads;
  expect_refusal(layer.construct(), StatusCode::kUnsupported, {"f_b.shape[0] = 128", "256"});
  layer = {};
  layer.weights.conv_weight = dense(layer.conv_weight.data(), DType::kF32, {3 * kD, 1, 3});
  expect_refusal(layer.construct(), StatusCode::kUnsupported, {"conv_weight.shape[2] = 3", "accepted: 4"});
}

TEST(KdaContract, row_3_each_weight_has_its_dtypes) {
  struct Case {
    const char* name;
    TensorView KdaWeights::*view;
    std::vector<DType> refused;
  };
  const std::vector<Case> cases{
      {"conv_weight", &KdaWeights::conv_weight, {DType::kF16, DType::kF64, DType::kI32}},
      {"norm_weight", &KdaWeights::norm_weight, {DType::kF16, DType::kF64}},
      {"a_log", &KdaWeights::a_log, {DType::kBF16, DType::kF16, DType::kF64}},
      {"dt_bias", &KdaWeights::dt_bias, {DType::kBF16, DType::kF16}},
      {"f_b", &KdaWeights::f_b, {DType::kF32, DType::kF16, DType::kU8}},
  };
  for (const auto& [name, view, dtypes] : cases)
    for (DType dtype : dtypes) {
      Layer layer;
      (layer.weights.*view).dtype = dtype;
      expect_refusal(layer.construct(), StatusCode::kInvalidArgument,
                     {std::string(name) + ".dtype = " + dtype_name(dtype)});
    }
  Layer layer;
  layer.weights.conv_bias->dtype = DType::kF16;
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"conv_bias.dtype = F16", "F32, BF16"});
  layer = {};
  for (auto* view : {&layer.weights.conv_weight, &*layer.weights.conv_bias, &layer.weights.norm_weight})
    view->dtype = DType::kBF16;
  EXPECT_EQ(layer.construct().message(), "ok");
}

TEST(KdaContract, row_3_weights_on_different_devices_are_refused) {
  for (auto view : {&KdaWeights::conv_weight, &KdaWeights::a_log, &KdaWeights::dt_bias, &KdaWeights::norm_weight}) {
    Layer layer;
    (layer.weights.*view).device = Device::cuda(1);
    expect_refusal(layer.construct(), StatusCode::kWrongDevice, {".device = cuda:1", "cpu"});
  }
  Layer layer;
  layer.weights.f_b.device = Device::cuda(0);
  expect_refusal(layer.construct(), StatusCode::kWrongDevice, {".device = cpu", "cuda:0"});
  layer = {};
  layer.weights.conv_bias->device = Device::cuda(0);
  expect_refusal(layer.construct(), StatusCode::kWrongDevice, {"conv_bias.device = cuda:0"});
}

TEST(KdaContract, row_4_each_length_is_checked_and_both_are_named) {
  Layer layer;
  layer.weights.conv_bias->shape[0] = kD;
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"conv_bias.shape = [256]", "[768]"});
  layer = {};
  layer.weights.dt_bias.shape[0] = kD + 1;
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"dt_bias.shape = [257]", "[256]"});
  layer = {};
  layer.weights.norm_weight.shape[0] = 64;
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"norm_weight.shape = [64]", "[128]"});
  layer = {};
  layer.weights.a_log.shape[0] = 3;
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"a_log.shape = [3]", "[2]"});
  layer = {};
  layer.weights.a_log = dense(layer.a_log.data(), DType::kF32, {1, kHeads, 1, 1});
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"a_log.shape = [1, 2, 1, 1]", "[1, 1, 2, 1]"});
  layer = {};
  layer.weights.a_log = dense(layer.a_log.data(), DType::kF32, {kHeads, 1});
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"a_log.shape = [2, 1]", "[2]"});
  layer = {};
  layer.weights.conv_weight.shape[0] = kD;
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"conv_weight.shape = [256, 1, 4]", "[768, 1, 4]"});
  layer = {};
  layer.weights.conv_weight.rank = 2;
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"conv_weight.rank = 2", "3"});
}

TEST(KdaContract, row_5_f_b_is_row_major_aligned_and_128_columns_wide) {
  Layer layer;
  layer.weights.f_b.shape[1] = kD;
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"f_b.shape = [256, 256]", "[256, 128]"});
  layer = {};
  layer.weights.f_b.rank = 1;
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"f_b.rank = 1"});
  layer = {};
  layer.weights.f_b.stride = {1, kD, 0, 0};
  expect_refusal(layer.construct(), StatusCode::kBadLayout, {"f_b strides = (1, 256)", "(128, 1)"});
  layer = {};
  layer.weights.f_b.data = layer.f_b.data() + 4;
  expect_refusal(layer.construct(), StatusCode::kBadLayout, {"f_b.data", "16 bytes"});
}

TEST(KdaContract, weights_without_memory_alignment_or_contiguity_are_refused) {
  for (auto view : {&KdaWeights::conv_weight, &KdaWeights::f_b, &KdaWeights::a_log, &KdaWeights::dt_bias,
                    &KdaWeights::norm_weight}) {
    Layer layer;
    (layer.weights.*view).data = nullptr;
    expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {".data = null"});
    layer = {};
    auto& v = layer.weights.*view;
    v.data = static_cast<char*>(v.data) + 1;
    expect_refusal(layer.construct(), StatusCode::kBadLayout, {".data = 0x"});
    layer = {};
    (layer.weights.*view).stride[0] *= 2;
    expect_refusal(layer.construct(), StatusCode::kBadLayout, {" strides = ("});
  }
}

TEST(KdaContract, row_6_scalars_outside_their_range_are_refused) {
  for (float bound : {0.0f, 5.0f, kNan, kInfinity, -kInfinity}) {
    Layer layer;
    layer.options.gate_lower_bound = bound;
    expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"gate_lower_bound", "below 0"});
  }
  for (float eps : {0.0f, -1e-5f, kNan, kInfinity}) {
    Layer layer;
    layer.options.norm_eps = eps;
    expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"norm_eps", "above 0"});
  }
  for (float scale : {kNan, kInfinity, -kInfinity}) {
    Layer layer;
    layer.options.scale = scale;
    expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"scale", "finite"});
  }
  Layer layer;
  layer.options.gate_lower_bound.reset();
  layer.options.scale = -1.0f;
  EXPECT_EQ(layer.construct().message(), "ok");
}

TEST(KdaContract, row_7_keys_and_first_live_slot) {
  Layer layer;
  layer.options.first_live_slot = -1;
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"first_live_slot = -1"});
  layer.options.first_live_slot = 0;
  EXPECT_EQ(layer.construct().message(), "ok");
  layer.options.policies.clear();
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"policies = empty"});
  layer.options.policies = {policy({0, 1}, kStride)};
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"requests of a key = 0"});
  layer.options.policies = {policy({-3, 2}, kStride)};
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"requests of a key = (-3, 2)"});
  layer.options.policies = {policy({4, 1}, kStride), policy({2, 2}, kStride), policy(KdaKey{4}, kStride + 8)};
  expect_refusal(layer.construct(), StatusCode::kInvalidArgument, {"policies = key 4 twice"});
  layer.options.policies = {policy({kHuge, 8}, kStride)};
  expect_refusal(layer.construct(), StatusCode::kUnsupported, {"requests of a key = (9223372036854775807, 8)"});
}

TEST(KdaContract, row_8_what_is_not_served_is_named_with_its_key) {
  for (int tokens : {0, -1, 9}) {
    Layer layer;
    layer.options.policies = {policy({3, tokens}, kStride)};
    expect_refusal(layer.construct(), StatusCode::kUnsupported,
                   {"tokens of a key = (3, " + std::to_string(tokens) + ")", "1 to 8"});
  }
  Layer layer;
  layer.options.policies = {policy({3, 2}, kStride, GateSchedule::kShared)};
  expect_refusal(layer.construct(), StatusCode::kUnsupported, {"gate schedule of key (3, 2) = shared", "inline"});
  layer.options.policies = {policy({3, 1}, kStride, GateSchedule::kPrepass)};
  expect_refusal(layer.construct(), StatusCode::kUnsupported, {"gate schedule of key 3 = prepass", "inline"});
  layer = {};
  layer.options.state_dtype = DType::kBF16;
  expect_refusal(layer.construct(), StatusCode::kUnsupported, {"state_dtype = BF16", "F32"});
  layer = {};
  layer.options.state_mode = StateMode::kRecords;
  EXPECT_EQ(layer.construct().message(), "ok");
  layer.options.state_mode = static_cast<StateMode>(7);
  expect_refusal(layer.construct(), StatusCode::kUnsupported, {"state_mode = 7", "slots, records"});
}

TEST(KdaContract, row_9_row_strides_hold_a_row_and_keep_16_bytes) {
  for (std::int64_t stride : {std::int64_t{0}, std::int64_t{-1168}, kUsed - 2, kUsed, kStride + 4, kHuge - 7}) {
    Layer layer;
    layer.options.policies = {policy({2, 2}, stride)};
    expect_refusal(layer.construct(), StatusCode::kBadLayout,
                   {"row_stride of key (2, 2) = " + std::to_string(stride), "from 1160"});
  }
  Layer one_row;
  one_row.options.policies = {policy({1, 1}, kHuge - 7)};
  expect_refusal(one_row.construct(), StatusCode::kBadLayout, {"row_stride of key 1 = 9223372036854775800"});
  for (std::int64_t stride : {std::int64_t{1160}, kStride, kStride + 8, std::int64_t{1} << 50}) {
    Layer layer;
    layer.options.policies = {policy({2, 2}, stride)};
    EXPECT_EQ(layer.construct().message(), "ok") << stride;
  }
}

// ---- Prepare

class KdaLayoutContract : public testing::Test {
 protected:
  Layer layer;
  Status prepare(const KdaCaches& caches) {
    const KdaModel model = check_kda(layer.weights, layer.options);
    return status_of([&] { layout = check_layouts(model, caches); });
  }
  KdaLayout layout;
};

TEST_F(KdaLayoutContract, come_back_as_numbers_without_any_memory) {
  ASSERT_EQ(prepare(layouts()).message(), "ok");
  EXPECT_EQ(layout, (KdaLayout{kSlots, kLength, kLength * 3 * kD, 16384 * kHeads, 0, 0}));
  KdaCaches padded = layouts();
  padded.conv.stride[0] += 8;
  padded.state.stride[0] += 4;
  padded.conv.device = Device::cuda(3);  // a description has no place
  padded.records = TensorView{};         // nor has slots mode a use for records
  ASSERT_EQ(prepare(padded).message(), "ok");
  EXPECT_EQ(layout, (KdaLayout{kSlots, kLength, kLength * 3 * kD + 8, 16384 * kHeads + 4, 0, 0}));
  layer.options.conv_dim_first = true;
  KdaCaches turned = layouts();
  turned.conv = dense(nullptr, DType::kBF16, {kSlots, 3 * kD, kLength});
  ASSERT_EQ(prepare(turned).message(), "ok");
  EXPECT_EQ(layout, (KdaLayout{kSlots, kLength, kLength * 3 * kD, 16384 * kHeads, 0, 0}));
}

TEST_F(KdaLayoutContract, row_10_conv_has_its_dtype_channels_and_positions) {
  const auto refuse = [&](const TensorView& conv, StatusCode code, const std::vector<std::string>& parts) {
    KdaCaches caches = layouts();
    caches.conv = conv;
    expect_refusal(prepare(caches), code, parts);
  };
  const auto invalid = StatusCode::kInvalidArgument;
  refuse(dense(nullptr, DType::kF32, {kSlots, kLength, 3 * kD}), invalid, {"kda.prepare: conv.dtype = F32", "BF16"});
  refuse(dense(nullptr, DType::kBF16, {kSlots, 3 * kD}), invalid, {"conv.rank = 2"});
  refuse(dense(nullptr, DType::kBF16, {kSlots, kLength, kD}), invalid, {"conv.shape = [5, 6, 256]", "[slots, L, 768]"});
  refuse(dense(nullptr, DType::kBF16, {kSlots, 3 * kD, kLength}), invalid,
         {"conv.shape = [5, 768, 6]", "[slots, L, 768]", "conv_dim_first"});
  refuse(dense(nullptr, DType::kBF16, {kSlots, 5, 3 * kD}), invalid, {"conv positions L = 5", "6", "key (1, 4)"});
  refuse(dense(nullptr, DType::kBF16, {0, kLength, 3 * kD}), invalid, {"conv.shape[0] = 0"});
  refuse(dense(nullptr, DType::kBF16, {-1, kLength, 3 * kD}), invalid, {"conv.shape[0] = -1"});
  refuse(dense(nullptr, DType::kBF16, {std::int64_t{1} << 31, kLength, 3 * kD}), invalid,
         {"conv.shape[0] = 2147483648", "1 to 2147483647 slots"});
  refuse(dense(nullptr, DType::kBF16, {1, kHuge / (3 * kD), 3 * kD}), StatusCode::kUnsupported, {"conv positions L"});
  TensorView loose = dense(nullptr, DType::kBF16, {kSlots, kLength, 3 * kD});
  loose.stride = {kLength * 1000, 1000, 1, 0};
  refuse(loose, StatusCode::kBadLayout, {"conv strides = (6000, 1000, 1)", "(slot stride, 768, 1)"});
  layer.options.conv_dim_first = true;
  refuse(dense(nullptr, DType::kBF16, {kSlots, kLength, 3 * kD}), invalid,
         {"conv.shape = [5, 6, 768]", "[slots, 768, L]", "conv_dim_first"});
}

TEST_F(KdaLayoutContract, row_10_decode_alone_needs_three_positions) {
  layer.options.policies = {policy({1, 1}, kStride)};
  expect_refusal(prepare(layouts(kSlots, 2)), StatusCode::kInvalidArgument, {"conv positions L = 2", "3 and more"});
  EXPECT_EQ(prepare(layouts(kSlots, 3)).message(), "ok");
}

TEST_F(KdaLayoutContract, row_10_state_is_fp32_dense_and_values_before_keys) {
  const auto refuse = [&](const TensorView& state, StatusCode code, const std::vector<std::string>& parts) {
    KdaCaches caches = layouts();
    caches.state = state;
    expect_refusal(prepare(caches), code, parts);
  };
  const auto invalid = StatusCode::kInvalidArgument;
  refuse(dense(nullptr, DType::kBF16, {kSlots, kHeads, 128, 128}), invalid, {"state.dtype = BF16", "F32"});
  refuse(dense(nullptr, DType::kF32, {kSlots, kHeads, 16384}), invalid, {"state.rank = 3"});
  refuse(dense(nullptr, DType::kF32, {kSlots, 3, 128, 128}), invalid,
         {"state.shape = [5, 3, 128, 128]", "[slots, 2, 128, 128]"});
  refuse(dense(nullptr, DType::kF32, {kSlots, kHeads, 128, 64}), invalid, {"state.shape = [5, 2, 128, 64]"});
  TensorView turned = dense(nullptr, DType::kF32, {kSlots, kHeads, 128, 128});
  turned.stride = {16384 * kHeads, 16384, 1, 128};
  refuse(turned, StatusCode::kBadLayout, {"state strides = (32768, 16384, 1, 128)", "(slot stride, 16384, 128, 1)"});
  TensorView loose = dense(nullptr, DType::kF32, {kSlots, kHeads, 128, 128});
  loose.stride = {20000 * kHeads, 20000, 128, 1};
  refuse(loose, StatusCode::kBadLayout, {"state strides = (40000, 20000, 128, 1)"});
}

TEST_F(KdaLayoutContract, row_11_slot_strides_and_counts) {
  for (std::int64_t stride :
       {std::int64_t{0}, std::int64_t{-4608}, std::int64_t{4600}, std::int64_t{4612}, kHuge - 7, kHuge / 8 * 8}) {
    KdaCaches caches = layouts();
    caches.conv.stride[0] = stride;
    expect_refusal(prepare(caches), StatusCode::kBadLayout,
                   {"conv slot stride = " + std::to_string(stride), "multiples of 8 elements (16 bytes) from 4608"});
  }
  for (std::int64_t stride : {std::int64_t{32764}, std::int64_t{32770}, kHuge - 3}) {
    KdaCaches caches = layouts();
    caches.state.stride[0] = stride;
    expect_refusal(prepare(caches), StatusCode::kBadLayout,
                   {"state slot stride = " + std::to_string(stride), "multiples of 4 elements (16 bytes) from 32768"});
  }
  KdaCaches caches = layouts();
  caches.state.shape[0] = kSlots + 1;
  expect_refusal(prepare(caches), StatusCode::kInvalidArgument, {"state.shape[0] = 6", "5, the slots of conv"});
}

// Two heads, four tokens: 2 * (1024 * 4 + 4), rounded up to 16.
constexpr std::int64_t kArea = 8208;
KdaCaches layouts_with_records(std::int64_t slots = kSlots, std::int64_t bytes = kArea) {
  KdaCaches caches = layouts(slots);
  caches.records = dense(nullptr, DType::kU8, {slots, bytes});
  return caches;
}

TEST_F(KdaLayoutContract, record_areas_are_those_of_the_chapter) {
  EXPECT_EQ(kda_record_bytes(kHeads, 4), kArea);
  // 5.6: the page of L = 6 and 10 with records, less that without.
  EXPECT_EQ(kda_record_bytes(12, 4), 890'928 - 841'728);
  EXPECT_EQ(kda_record_bytes(12, 8), 976'944 - 878'592);
  EXPECT_EQ(kda_record_bytes(96, 8), 7'815'552 - 7'028'736);
  std::vector<std::uint8_t> area(static_cast<std::size_t>(kda_record_bytes(3, 4)));
  const KdaRecords last = kda_records(area.data(), 3, 4, 2);
  EXPECT_EQ(reinterpret_cast<std::uint8_t*>(last.u) - area.data(), 2 * 4096);
  EXPECT_EQ(reinterpret_cast<std::uint8_t*>(last.k) - area.data(), 2 * 4096 + 512 * 4);
  EXPECT_EQ(reinterpret_cast<std::uint8_t*>(last.g) - area.data(), 2 * 4096 + 768 * 4);
  EXPECT_EQ(reinterpret_cast<std::uint8_t*>(last.count) - area.data(), 3 * 4096 + 8);
}

TEST_F(KdaLayoutContract, row_12_records_mode_has_room_for_its_records) {
  layer.options.state_mode = StateMode::kRecords;
  const auto invalid = StatusCode::kInvalidArgument;
  expect_refusal(prepare(layouts()), invalid, {"kda.prepare: records = absent", "8208", "slots"});
  expect_refusal(prepare(layouts_with_records(kSlots, kArea - 16)), invalid,
                 {"records.shape[1] = 8192", "8208 bytes and more", "kda_record_bytes"});
  KdaCaches caches = layouts_with_records();
  caches.records->dtype = DType::kF32;
  expect_refusal(prepare(caches), invalid, {"records.dtype = F32", "U8"});
  caches = layouts_with_records();
  caches.records->rank = 3;
  expect_refusal(prepare(caches), invalid, {"records.rank = 3", "2"});
  caches = layouts_with_records();
  caches.records->shape[0] = kSlots - 1;
  expect_refusal(prepare(caches), invalid, {"records.shape[0] = 4", "5, the slots of conv"});
  for (std::int64_t stride : {std::int64_t{0}, kArea - 16, kArea + 8, kHuge - 15}) {
    caches = layouts_with_records();
    caches.records->stride[0] = stride;
    expect_refusal(
        prepare(caches), StatusCode::kBadLayout,
        {"records slot stride = " + std::to_string(stride), "multiples of 16 elements (16 bytes) from 8208"});
  }
  caches = layouts_with_records();
  caches.records->stride[1] = 2;
  expect_refusal(prepare(caches), StatusCode::kBadLayout, {"records strides = (8208, 2)"});

  caches = layouts_with_records(kSlots, kArea + 5);
  caches.records->stride[0] = std::int64_t{1} << 40;
  ASSERT_EQ(prepare(caches).message(), "ok");
  EXPECT_EQ(layout.record_bytes, kArea + 5);
  EXPECT_EQ(layout.record_stride, std::int64_t{1} << 40);
  EXPECT_EQ(layout.entries(), 4);
  EXPECT_EQ(prepare(layouts_with_records(1)).message(), "ok");
}

TEST_F(KdaLayoutContract, strides_that_memory_could_hold_are_accepted) {
  KdaCaches caches = layouts();
  caches.conv.stride[0] = std::int64_t{1} << 40;
  caches.state.stride[0] = (std::int64_t{1} << 40) + 4;
  ASSERT_EQ(prepare(caches).message(), "ok");
  EXPECT_EQ(layout.conv_stride, std::int64_t{1} << 40);
  EXPECT_EQ(layout.state_stride, (std::int64_t{1} << 40) + 4);
}

TEST_F(KdaLayoutContract, the_stride_of_a_single_slot_and_of_a_single_head_counts_for_nothing) {
  KdaCaches caches = layouts(1);
  caches.conv.stride[0] = -3;
  caches.state.stride[0] = kHuge;
  ASSERT_EQ(prepare(caches).message(), "ok");
  EXPECT_EQ(layout.conv_stride, kLength * 3 * kD);
  EXPECT_EQ(layout.state_stride, 16384 * kHeads);

  KdaModel one = check_kda(layer.weights, layer.options);
  one.heads = 1;
  KdaCaches head{dense(nullptr, DType::kBF16, {2, kLength, 384}), dense(nullptr, DType::kF32, {2, 1, 128, 128}), {}};
  head.state.stride[1] = 7;
  EXPECT_EQ(check_layouts(one, head).state_stride, 16384);
}

// ---- Run

class KdaCallContract : public Layer, public testing::Test {
 protected:
  std::vector<std::uint16_t> projected = std::vector<std::uint16_t>(8 * kStride, 0x3c00);
  std::vector<std::uint16_t> out = std::vector<std::uint16_t>(8 * (kD + 8) + 16, 0x7fa5);
  std::vector<std::uint16_t> conv = std::vector<std::uint16_t>(kSlots * kLength * 3 * kD + 1024, 0x3c00);
  std::vector<float> state = std::vector<float>(kSlots * 16384 * kHeads + 512, 0.5f);
  std::vector<std::int32_t> slots = std::vector<std::int32_t>(64, 1), accepted = std::vector<std::int32_t>(16, 1),
                            lengths = std::vector<std::int32_t>(16, 1);
  std::unique_ptr<PreparedKda> kda;

  void SetUp() override { kda = prepared(); }
  std::unique_ptr<PreparedKda> prepared() {
    auto made = std::make_unique<PreparedKda>(weights, options);
    made->prepare(layouts());
    return made;
  }
  KdaCall call(std::int64_t requests, int tokens) {
    KdaCall c;
    const std::int64_t rows = requests * tokens;
    c.projected = TensorView::matrix(projected.data(), rows, kUsed, Device::cpu(), kStride);
    c.out = TensorView::matrix(out.data(), rows, kD);
    c.caches = layouts();
    c.caches.conv.data = conv.data();
    c.caches.state.data = state.data();
    c.slots = dense(slots.data(), DType::kI32, {requests, tokens});
    if (tokens > 1) c.accepted = dense(accepted.data(), DType::kI32, {requests});
    return c;
  }
  void expect_accepted(const KdaCall& c) {
    const auto before = kda->stats().runs;
    EXPECT_EQ(status_of([&] { kda->run(c); }).message(), "ok");
    EXPECT_EQ(kda->stats().runs, before + 1);
  }
  // Refused, and no byte of any operand differs.
  void expect_refused(const KdaCall& c, StatusCode code, const std::vector<std::string>& parts) {
    const auto before = std::tuple(projected, out, conv, state, slots, accepted, lengths);
    const auto runs = kda->stats().runs;
    const Status status = status_of([&] { kda->run(c); });
    expect_refusal(status, code, parts);
    EXPECT_EQ(status.place, "kda.run");
    EXPECT_TRUE(before == std::tuple(projected, out, conv, state, slots, accepted, lengths)) << status.message();
    EXPECT_EQ(kda->stats().runs, runs);
  }
};

TEST_F(KdaCallContract, of_every_prepared_key_are_accepted) {
  for (KdaKey key : kda->keys()) expect_accepted(call(key.requests, key.tokens));
  EXPECT_EQ(kda->keys().size(), 6u);
}

TEST_F(KdaCallContract, a_call_that_passes_gives_what_a_launch_needs) {
  const KdaModel model = check_kda(weights, options);
  const KdaLayout layout = check_layouts(model, layouts());
  KdaCall c = call(2, 2);
  c.out = TensorView::matrix(out.data(), 4, kD, Device::cpu(), kD + 8);
  c.slots = TensorView::matrix(slots.data(), 4, 3, Device::cpu(), 8, DType::kI32);
  c.accepted = dense(accepted.data(), DType::kI32, {5});
  c.lengths = dense(lengths.data(), DType::kI32, {2});
  c.tokens = 2;
  KdaStep step;
  ASSERT_EQ(check_call(model, &layout, c, &step).message(), "ok");
  EXPECT_EQ(to_string(model.options.policies[step.key].key), "(2, 2)");
  EXPECT_EQ(step.requests, 2);
  EXPECT_EQ(step.tokens, 2);
  EXPECT_EQ(step.projected, projected.data());
  EXPECT_EQ(step.row_stride, kStride);
  EXPECT_EQ(step.out, out.data());
  EXPECT_EQ(step.out_stride, kD + 8);
  EXPECT_EQ(step.conv, conv.data());
  EXPECT_EQ(step.state, state.data());
  EXPECT_EQ(step.slots, slots.data());
  EXPECT_EQ(step.slots_stride, 8);
  EXPECT_EQ(step.window, 3);
  EXPECT_EQ(step.accepted, accepted.data());
  EXPECT_EQ(step.lengths, lengths.data());
  // A decode without accepted uses column 0 alone, however wide the table is.
  c = call(1, 1);
  c.slots = TensorView::matrix(slots.data(), 1, 40, Device::cpu(), 40, DType::kI32);
  ASSERT_EQ(check_call(model, &layout, c, &step).message(), "ok");
  EXPECT_EQ(step.window, 1);
  EXPECT_EQ(step.accepted, nullptr);
  EXPECT_EQ(step.lengths, nullptr);
}

TEST_F(KdaCallContract, allocate_nothing_when_they_pass) {
  const KdaModel model = check_kda(weights, options);
  const KdaLayout layout = check_layouts(model, layouts());
  KdaCall decode = call(4, 1), verify = call(2, 2);
  verify.lengths = dense(lengths.data(), DType::kI32, {2});
  KdaStep step;
  const auto before = test::allocations();
  for (int i = 0; i < 100; ++i)
    for (const KdaCall* c : {&decode, &verify}) {
      const Status status = check_call(model, &layout, *c, &step);
      if (!status.ok()) FAIL() << status.message();
    }
  EXPECT_EQ(test::allocations(), before);
  std::string text(100, 'x');  // the counter counts
  EXPECT_EQ(test::allocations(), before + 1);
}

TEST_F(KdaCallContract, run_allocates_nothing) {
  KdaCall decode = call(4, 1), verify = call(2, 2);
  const auto before = test::allocations();
  for (int i = 0; i < 10; ++i)
    for (const KdaCall* c : {&decode, &verify}) kda->run(*c);
  EXPECT_EQ(test::allocations(), before);
}

TEST_F(KdaCallContract, row_15_before_prepare_nothing_is_prepared) {
  kda = std::make_unique<PreparedKda>(weights, options);
  EXPECT_TRUE(kda->keys().empty());
  expect_refused(call(2, 2), StatusCode::kNotPrepared, {"key = (2, 2)", "prepared keys (none)", "call prepare first"});
  expect_refused(call(3, 1), StatusCode::kNotPrepared, {"key = 3", "prepared keys (none)", "add it to policies"});
  expect_refusal(status_of([&] { kda->tactic({2, 2}); }), StatusCode::kNotPrepared, {"kda.tactic: key = (2, 2)"});
  expect_refusal(status_of([&] { kda->kernel({1, 1}); }), StatusCode::kNotPrepared, {"kda.kernel: key = 1"});
}

TEST_F(KdaCallContract, row_15_a_key_that_is_not_prepared_is_named_with_those_that_are) {
  expect_refused(call(2, 4), StatusCode::kNotPrepared, {});
  const Status status = status_of([&] { kda->run(call(2, 4)); });
  EXPECT_EQ(status.message(),
            "kda.run: key = (2, 4); accepted: prepared keys 1, (1, 2), (1, 4), 2, (2, 2), 4; add it to policies and "
            "prepare again");
  expect_refused(call(3, 1), StatusCode::kNotPrepared, {"key = 3;"});
  KdaCall c = call(4, 1);
  c.tokens = 4;  // the key (1, 4), then
  expect_refused(c, StatusCode::kInvalidArgument, {"slots columns = 1", "4 and more"});
  EXPECT_EQ(kda->tactic({2, 2}), KdaTactic{});
  EXPECT_FALSE(kda->kernel({2, 2}).empty());
}

TEST_F(KdaCallContract, row_16_the_row_stride_is_the_policys) {
  KdaCall c = call(2, 1);
  c.projected.stride[0] = kStride + 8;
  expect_refused(c, StatusCode::kBadLayout, {"projected row stride = 1176", "1168"});
  c.projected.stride[0] = 0;
  expect_refused(c, StatusCode::kBadLayout, {"projected row stride = 0"});
  c = call(2, 1);
  c.projected.stride[1] = 2;
  expect_refused(c, StatusCode::kBadLayout, {"projected column stride = 2"});
  for (std::int64_t stride : {std::int64_t{0}, std::int64_t{-5}, kHuge}) {
    c = call(1, 1);  // R = 1: a single row has none
    c.projected.stride[0] = stride;
    expect_accepted(c);
  }
}

TEST_F(KdaCallContract, row_17_rows_are_whole_requests) {
  KdaCall c = call(2, 2);
  c.projected.shape[0] = 0;
  expect_refused(c, StatusCode::kInvalidArgument, {"projected.shape[0] = 0"});
  c.projected.shape[0] = -4;
  expect_refused(c, StatusCode::kInvalidArgument, {"projected.shape[0] = -4"});
  c.projected.shape[0] = 3;
  expect_refused(c, StatusCode::kInvalidArgument, {"projected.shape[0] = 3", "tokens = 2"});
  for (int tokens : {0, -2}) {
    c = call(2, 2);
    c.tokens = tokens;
    expect_refused(c, StatusCode::kInvalidArgument, {"tokens = " + std::to_string(tokens)});
  }
  c = call(2, 2);
  c.slots.shape[1] = kHuge;
  expect_refused(c, StatusCode::kInvalidArgument, {"tokens = 9223372036854775807"});
  c = call(1, 4);  // not 4 tokens
  c.projected.shape[0] = c.slots.shape[1] = (std::int64_t{1} << 32) + 4;
  expect_refused(c, StatusCode::kInvalidArgument, {"tokens = 4294967300"});
}

TEST_F(KdaCallContract, row_17_projected_and_out_have_their_dtype_and_shape) {
  KdaCall c = call(2, 1);
  c.projected.dtype = DType::kF16;
  expect_refused(c, StatusCode::kInvalidArgument, {"projected.dtype = F16", "BF16"});
  c = call(2, 1);
  c.projected.rank = 3;
  expect_refused(c, StatusCode::kInvalidArgument, {"projected.rank = 3"});
  c = call(2, 1);
  c.projected.shape[1] = kUsed - 1;
  expect_refused(c, StatusCode::kInvalidArgument, {"projected.shape[1] = 1153", "1154"});
  c = call(2, 1);
  c.out.dtype = DType::kF32;
  expect_refused(c, StatusCode::kInvalidArgument, {"out.dtype = F32", "BF16"});
  c = call(2, 1);
  c.out.rank = 1;
  expect_refused(c, StatusCode::kInvalidArgument, {"out.shape = [2]", "[2, 256]"});
  c = call(2, 1);
  c.out.shape[0] = 3;
  expect_refused(c, StatusCode::kInvalidArgument, {"out.shape = [3, 256]", "[2, 256]"});
  c = call(2, 1);
  c.out.shape[1] = 128;
  expect_refused(c, StatusCode::kInvalidArgument, {"out.shape = [2, 128]"});
}

TEST_F(KdaCallContract, row_17_output_strides_hold_a_row_and_keep_16_bytes) {
  for (std::int64_t stride : {std::int64_t{0}, std::int64_t{-256}, kD - 8, kD + 4, kHuge - 7}) {
    KdaCall c = call(4, 1);
    c.out.stride[0] = stride;
    expect_refused(c, StatusCode::kBadLayout,
                   {"out row stride = " + std::to_string(stride), "multiples of 8 from 256"});
  }
  KdaCall c = call(2, 1);
  c.out.stride[1] = 0;
  expect_refused(c, StatusCode::kBadLayout, {"out column stride = 0"});
  c = call(4, 1);
  c.out.stride[0] = kD + 8;
  expect_accepted(c);
  c = call(1, 1);
  c.out.stride[0] = 3;
  expect_accepted(c);
}

TEST_F(KdaCallContract, row_18_bases_are_aligned_to_16_bytes) {
  KdaCall c = call(2, 1);
  c.projected.data = projected.data() + 4;
  expect_refused(c, StatusCode::kBadLayout, {"projected.data = 0x", "16 bytes"});
  c.projected.data = projected.data() + 8;
  expect_accepted(c);
  c = call(2, 1);
  c.out.data = out.data() + 4;
  expect_refused(c, StatusCode::kBadLayout, {"out.data = 0x", "16 bytes"});
  c.out.data = out.data() + 8;
  expect_accepted(c);
  c = call(2, 1);
  c.caches.conv.data = conv.data() + 4;
  expect_refused(c, StatusCode::kBadLayout, {"conv.data = 0x", "16 bytes"});
  c.caches.conv.data = conv.data() + 8;
  expect_accepted(c);
  c = call(2, 1);
  c.caches.state.data = state.data() + 2;
  expect_refused(c, StatusCode::kBadLayout, {"state.data = 0x", "16 bytes"});
  c.caches.state.data = state.data() + 4;
  expect_accepted(c);
  c = call(2, 1);
  c.slots.data = reinterpret_cast<char*>(slots.data()) + 2;
  expect_refused(c, StatusCode::kBadLayout, {"slots.data = 0x", "4 bytes"});
  c.slots.data = slots.data() + 1;
  expect_accepted(c);
}

TEST_F(KdaCallContract, row_18_every_operand_is_on_the_device_of_the_weights) {
  const auto elsewhere = [&](const char* name, auto view) {
    KdaCall c = call(2, 2);
    c.lengths = dense(lengths.data(), DType::kI32, {2});
    view(c).device = Device::cuda(0);
    expect_refused(c, StatusCode::kWrongDevice, {std::string(name) + ".device = cuda:0", "cpu"});
  };
  elsewhere("projected", [](KdaCall& c) -> TensorView& { return c.projected; });
  elsewhere("out", [](KdaCall& c) -> TensorView& { return c.out; });
  elsewhere("conv", [](KdaCall& c) -> TensorView& { return c.caches.conv; });
  elsewhere("state", [](KdaCall& c) -> TensorView& { return c.caches.state; });
  elsewhere("slots", [](KdaCall& c) -> TensorView& { return c.slots; });
  elsewhere("accepted", [](KdaCall& c) -> TensorView& { return *c.accepted; });
  elsewhere("lengths", [](KdaCall& c) -> TensorView& { return *c.lengths; });
}

TEST_F(KdaCallContract, operands_without_memory_are_refused) {
  const auto missing = [&](const char* name, auto view) {
    KdaCall c = call(2, 2);
    c.lengths = dense(lengths.data(), DType::kI32, {2});
    view(c).data = nullptr;
    expect_refused(c, StatusCode::kInvalidArgument, {std::string(name) + ".data = null"});
  };
  missing("projected", [](KdaCall& c) -> TensorView& { return c.projected; });
  missing("out", [](KdaCall& c) -> TensorView& { return c.out; });
  missing("conv", [](KdaCall& c) -> TensorView& { return c.caches.conv; });
  missing("state", [](KdaCall& c) -> TensorView& { return c.caches.state; });
  missing("slots", [](KdaCall& c) -> TensorView& { return c.slots; });
  missing("accepted", [](KdaCall& c) -> TensorView& { return *c.accepted; });
  missing("lengths", [](KdaCall& c) -> TensorView& { return *c.lengths; });
}

TEST_F(KdaCallContract, row_18_out_overlaps_no_other_argument) {
  std::vector<std::int32_t> apart(3 * 1024, 1);  // slots, accepted and lengths, each with room for out around it
  const auto at = [&](void* data) {
    KdaCall c = call(2, 2);
    c.slots.data = apart.data() + 512;
    c.accepted->data = apart.data() + 1024 + 512;
    c.lengths = dense(apart.data() + 2048 + 512, DType::kI32, {2});
    c.out.data = data;
    return c;
  };
  const auto overlap = [&](const KdaCall& c, const char* name) {
    expect_refused(c, StatusCode::kOverlap, {"out = ", std::string(" of ") + name + " at 0x"});
  };
  overlap(at(projected.data()), "projected");
  overlap(at(projected.data() + 3 * kStride + kUsed / 8 * 8), "projected");
  overlap(at(conv.data()), "conv");
  overlap(at(conv.data() + kSlots * kLength * 3 * kD - 8), "conv");
  overlap(at(state.data()), "state");
  overlap(at(state.data() + kSlots * 16384 * kHeads - 4), "state");
  overlap(at(f_b.data() + kD * 128 - 8), "f_b");
  overlap(at(f_b.data()), "f_b");
  overlap(at(dt_bias.data() + kD - 4), "dt_bias");
  // Reached by the last bytes of out, its row stride included.
  KdaCall c = at(nullptr);
  for (const auto& [name, view] :
       {std::pair{"slots", c.slots}, {"accepted", *c.accepted}, {"lengths", *c.lengths}, {"a_log", weights.a_log}}) {
    auto* end = static_cast<char*>(view.data) + 16;
    overlap(at(end - reinterpret_cast<std::uintptr_t>(end) % 16 - 8 * kD), name);
  }
  // Between the rows of out, where it does not write, an argument is refused too.
  c = at(out.data());
  c.out.stride[0] = kD + 8;
  auto* gap = out.data() + kD;
  c.accepted = dense(gap, DType::kI32, {2});
  overlap(c, "accepted");
}

TEST_F(KdaCallContract, out_directly_before_or_behind_an_argument_is_accepted) {
  KdaCall c = call(2, 2);
  std::vector<std::uint16_t> both(4 * kStride + 8 * kD);
  c.projected.data = both.data() + 4 * kD;
  c.out.data = both.data();
  expect_accepted(c);
  c.out.data = both.data() + 4 * kD + 3 * kStride + (kUsed + 7) / 8 * 8;
  expect_accepted(c);
}

TEST_F(KdaCallContract, row_19_caches_are_those_of_the_layouts_field_by_field) {
  const auto differ = [&](auto change, const std::vector<std::string>& parts) {
    KdaCall c = call(2, 1);
    change(c.caches);
    expect_refused(c, StatusCode::kInvalidArgument, parts);
  };
  differ([](KdaCaches& c) { c.conv.dtype = DType::kF16; }, {"conv.dtype = F16", "BF16"});
  differ([](KdaCaches& c) { c.conv.rank = 2; }, {"conv.shape = [5, 6]", "[5, 6, 768]"});
  differ([](KdaCaches& c) { c.conv.shape[0] = 4; }, {"conv.shape = [4, 6, 768]", "[5, 6, 768]"});
  differ([](KdaCaches& c) { c.conv.shape[1] = 7; }, {"conv.shape = [5, 7, 768]"});
  differ([](KdaCaches& c) { std::swap(c.conv.shape[1], c.conv.shape[2]); }, {"conv.shape = [5, 768, 6]"});
  differ([](KdaCaches& c) { c.conv.stride[0] += 8; }, {"conv slot stride = (4616, 768, 1)", "(4608, 768, 1)"});
  differ([](KdaCaches& c) { c.conv.stride[1] += 8; }, {"conv strides = (4608, 776, 1)"});
  differ([](KdaCaches& c) { c.state.dtype = DType::kBF16; }, {"state.dtype = BF16", "F32"});
  differ([](KdaCaches& c) { c.state.shape[1] = 1; }, {"state.shape = [5, 1, 128, 128]", "[5, 2, 128, 128]"});
  differ([](KdaCaches& c) { c.state.stride[0] += 4; }, {"state slot stride = (32772, 16384, 128, 1)"});
  differ([](KdaCaches& c) { std::swap(c.state.stride[2], c.state.stride[3]); }, {"state strides = ", "1, 128)"});
}

TEST_F(KdaCallContract, row_20_slots_are_int32_with_a_row_for_each_request_and_a_column_for_each_token) {
  const auto invalid = StatusCode::kInvalidArgument;
  KdaCall c = call(2, 2);
  c.slots.dtype = DType::kI64;
  expect_refused(c, invalid, {"slots.dtype = I64", "I32"});
  for (int rank : {0, 3}) {
    c = call(2, 2);
    c.slots.rank = rank;
    expect_refused(c, invalid, {"slots.rank = " + std::to_string(rank)});
  }
  c = call(2, 2);
  c.slots.shape[0] = 1;
  expect_refused(c, invalid, {"slots.shape[0] = 1", "2 rows"});
  c = call(2, 2);
  c.slots.shape[1] = 1;
  c.tokens = 2;
  expect_refused(c, invalid, {"slots columns = 1", "2 and more"});
  c = call(2, 2);
  c.slots = dense(slots.data(), DType::kI32, {2});
  c.tokens = 2;
  expect_refused(c, invalid, {"slots columns = 1", "2 and more"});
  c = call(2, 1);
  c.slots.shape[1] = 0;
  expect_refused(c, invalid, {"slots columns = 0", "1 and more"});
}

TEST_F(KdaCallContract, row_20_a_window_is_at_most_l_minus_2_wide) {
  KdaCall c = call(2, 2);
  c.tokens = 2;
  c.slots = TensorView::matrix(slots.data(), 2, 5, Device::cpu(), 5, DType::kI32);
  expect_refused(c, StatusCode::kInvalidArgument, {"slots columns = 5", "at most L - 2 = 4"});
  c.slots.shape[1] = 4;
  expect_accepted(c);
  c = call(2, 1);  // a decode as well, but only with accepted
  c.slots = TensorView::matrix(slots.data(), 2, 5, Device::cpu(), 5, DType::kI32);
  expect_accepted(c);
  c.accepted = dense(accepted.data(), DType::kI32, {2});
  c.tokens = 1;
  expect_refused(c, StatusCode::kInvalidArgument, {"slots columns = 5", "at most L - 2 = 4"});
  c.slots.shape[1] = 4;
  expect_accepted(c);
}

TEST_F(KdaCallContract, row_20_columns_of_slots_are_adjacent_and_rows_rise) {
  KdaCall c = call(2, 2);
  c.slots.stride[1] = 2;
  expect_refused(c, StatusCode::kBadLayout, {"slots column stride = 2", "1"});
  for (std::int64_t stride : {std::int64_t{0}, std::int64_t{-2}}) {
    c = call(2, 2);
    c.slots.stride[0] = stride;
    expect_refused(c, StatusCode::kBadLayout, {"slots row stride = " + std::to_string(stride), "1 and more"});
  }
  c = call(4, 1);
  c.slots.stride[0] = kHuge;
  expect_refused(c, StatusCode::kBadLayout, {"slots row stride = 9223372036854775807"});
}

TEST_F(KdaCallContract, tables_are_taken_as_they_lie) {
  KdaCall c = call(2, 1);
  c.slots = TensorView::matrix(slots.data(), 6, 1, Device::cpu(), 8, DType::kI32);  // column 0 of a table, more rows
  expect_accepted(c);
  c.slots.rank = 1;  // the same as [B]
  c.slots.stride[1] = -9;
  expect_accepted(c);
  c = call(2, 2);
  c.slots = TensorView::matrix(slots.data(), 4, 2, Device::cpu(), 8, DType::kI32);
  c.accepted = dense(accepted.data(), DType::kI32, {4});
  c.lengths = dense(lengths.data(), DType::kI32, {9});
  expect_accepted(c);  // and tokens follow from the columns
  c = call(1, 1);
  c.slots = dense(slots.data(), DType::kI32, {1, 1});
  c.slots.stride = {-4, 99, 0, 0};
  c.accepted = dense(accepted.data(), DType::kI32, {1});
  c.accepted->stride[0] = 0;
  expect_accepted(c);
}

TEST_F(KdaCallContract, row_21_verify_needs_accepted) {
  KdaCall c = call(2, 2);
  c.accepted.reset();
  c.tokens = 2;
  expect_refused(c, StatusCode::kInvalidArgument, {"accepted = absent"});
}

TEST_F(KdaCallContract, row_21_accepted_and_lengths_are_int32_long_enough_and_contiguous) {
  for (const char* name : {"accepted", "lengths"}) {
    const auto with = [&](auto change) {
      KdaCall c = call(2, 2);
      c.lengths = dense(lengths.data(), DType::kI32, {2});
      change(name == std::string("accepted") ? *c.accepted : *c.lengths);
      return c;
    };
    const std::string n = name;
    expect_refused(with([](TensorView& v) { v.dtype = DType::kI64; }), StatusCode::kInvalidArgument,
                   {n + ".dtype = I64", "I32"});
    expect_refused(with([](TensorView& v) { v.rank = 2; }), StatusCode::kInvalidArgument, {n + ".rank = 2"});
    expect_refused(with([](TensorView& v) { v.shape[0] = 1; }), StatusCode::kInvalidArgument,
                   {n + ".shape[0] = 1", "2 and more"});
    expect_refused(with([](TensorView& v) { v.stride[0] = 2; }), StatusCode::kBadLayout, {n + " stride = 2"});
    expect_refused(with([](TensorView& v) { v.data = static_cast<char*>(v.data) + 2; }), StatusCode::kBadLayout,
                   {n + ".data = 0x"});
  }
}

TEST_F(KdaCallContract, a_failing_prepare_leaves_the_object_as_it_was) {
  KdaCaches wrong = layouts();
  wrong.state.shape[0] = 4;
  expect_refusal(status_of([&] { kda->prepare(wrong); }), StatusCode::kInvalidArgument,
                 {"kda.prepare: state.shape[0]"});
  EXPECT_EQ(kda->keys().size(), 6u);
  expect_accepted(call(2, 2));
  PreparedKda fresh(weights, options);
  expect_refusal(status_of([&] { fresh.prepare(wrong); }), StatusCode::kInvalidArgument, {"kda.prepare"});
  EXPECT_TRUE(fresh.keys().empty());
}

TEST_F(KdaCallContract, another_prepare_takes_other_layouts) {
  kda->prepare(layouts(3));
  expect_refused(call(2, 2), StatusCode::kInvalidArgument, {"conv.shape = [5, 6, 768]", "[3, 6, 768]"});
  KdaCall c = call(2, 2);
  c.caches.conv.shape[0] = c.caches.state.shape[0] = 3;
  expect_accepted(c);
}

// ---- Reload

TEST_F(KdaCallContract, row_24_only_other_values_in_place_of_the_weights_are_loaded) {
  const auto refuse = [&](auto change, const std::vector<std::string>& parts) {
    KdaWeights now = weights;
    change(now);
    const Status status = status_of([&] { kda->reload(now); });
    expect_refusal(status, StatusCode::kWeightChanged, parts);
    EXPECT_EQ(status.place, "kda.reload");
  };
  refuse([](KdaWeights& w) { w.conv_weight.shape[0] = 384; }, {"conv_weight = F32[384, 1, 4]", "F32[768, 1, 4]"});
  refuse([](KdaWeights& w) { w.conv_weight.dtype = DType::kBF16; }, {"conv_weight = BF16[", "F32["});
  refuse([](KdaWeights& w) { w.conv_weight.data = nullptr; }, {"conv_weight.data = 0x0"});
  refuse([](KdaWeights& w) { w.conv_weight.data = static_cast<char*>(w.conv_weight.data) + 2; },
         {"conv_weight.data = 0x", "aligned"});
  refuse([](KdaWeights& w) { w.conv_bias.reset(); }, {"conv_bias = absent", "given"});
  refuse([](KdaWeights& w) { w.conv_bias->shape[0] = 3; }, {"conv_bias = F32[3]", "F32[768]"});
  refuse([](KdaWeights& w) { w.norm_weight.device = Device::cuda(0); }, {"norm_weight = ", "cuda:0", "cpu"});
  refuse([](KdaWeights& w) { w.norm_weight.stride[0] = 2; }, {"norm_weight = ", "strides (2)", "strides (1)"});
  refuse([](KdaWeights& w) { w.a_log = dense(w.a_log.data, DType::kF32, {1, 1, kHeads, 1}); }, {"a_log = ", "F32[2]"});
  std::vector<std::uint16_t> other_f_b(f_b);
  std::vector<float> other(kD);
  refuse([&](KdaWeights& w) { w.f_b.data = other_f_b.data(); }, {"f_b.data = 0x"});
  refuse([&](KdaWeights& w) { w.a_log.data = other.data(); }, {"a_log.data = 0x"});
  refuse([&](KdaWeights& w) { w.dt_bias.data = other.data(); }, {"dt_bias.data = 0x"});
  expect_accepted(call(2, 2));

  KdaWeights moved = weights;  // what is copied may come from anywhere
  std::vector<float> conv_now(conv_weight), bias_now(conv_bias), norm_now(norm_weight);
  moved.conv_weight.data = conv_now.data();
  moved.conv_bias->data = bias_now.data();
  moved.norm_weight.data = norm_now.data();
  EXPECT_EQ(status_of([&] { kda->reload(moved); }).message(), "ok");
}

TEST_F(KdaCallContract, reloaded_values_are_those_of_the_next_run) {
  const auto result = [&] {
    std::fill(conv.begin(), conv.end(), 0x3c00);
    std::fill(state.begin(), state.end(), 0.5f);
    kda->run(call(1, 1));
    return std::vector<std::uint16_t>(out.begin(), out.begin() + kD);
  };
  const auto before = result();
  const std::vector<float> norm(norm_weight);
  for (float& value : norm_weight) value = 2.0f;
  EXPECT_EQ(result(), before);  // an owned copy
  kda->reload(weights);
  auto doubled = before;
  for (auto& bits : doubled)
    if (bits & 0x7fff) bits = static_cast<std::uint16_t>(bits + 0x80);
  EXPECT_EQ(result(), doubled);
  EXPECT_NE(doubled, before);
}

// ---- Owned copies

TEST(KdaConvWeight, decoded_values_are_those_of_the_formula) {
  constexpr std::int64_t d = 256;
  std::vector<float> single(12 * d);
  std::vector<std::uint16_t> half(12 * d);
  for (std::size_t i = 0; i < single.size(); ++i) {
    half[i] = static_cast<std::uint16_t>(0x3000 + i % 4096);
    single[i] = static_cast<float>(i);
  }
  const auto half_value = [&](std::size_t i) {
    return std::ldexp(static_cast<float>(128 + (half[i] & 127)), (half[i] >> 7) - 134);
  };
  std::vector<float> from_single(12 * d, kNan), from_half(12 * d, kNan);
  decode_conv_weight(dense(single.data(), DType::kF32, {3 * d, 1, 4}),
                     dense(from_single.data(), DType::kF32, {3, 4, d}));
  decode_conv_weight(dense(half.data(), DType::kBF16, {3 * d, 1, 4}), dense(from_half.data(), DType::kF32, {3, 4, d}));
  for (std::int64_t s = 0; s < 3; ++s)
    for (std::int64_t i = 0; i < 4; ++i)
      for (std::int64_t c = 0; c < d; ++c) {
        const auto to = static_cast<std::size_t>((s * 4 + i) * d + c),
                   from = static_cast<std::size_t>((s * d + c) * 4 + i);
        ASSERT_EQ(from_single[to], single[from]);
        ASSERT_EQ(from_half[to], half_value(from));
      }
}

TEST(KdaConvWeight, its_operands_are_checked) {
  constexpr std::int64_t d = 128;
  std::vector<float> weight(12 * d), out(12 * d, 3.0f);
  const auto good = dense(weight.data(), DType::kF32, {3 * d, 1, 4}), to = dense(out.data(), DType::kF32, {3, 4, d});
  const auto refuse = [&](TensorView from, TensorView target, StatusCode code, const std::vector<std::string>& parts) {
    const Status status = status_of([&] { decode_conv_weight(from, target); });
    expect_refusal(status, code, parts);
    EXPECT_EQ(status.place, "kda.decode_conv_weight");
    EXPECT_EQ(out, std::vector<float>(12 * d, 3.0f));
  };
  const auto invalid = StatusCode::kInvalidArgument;
  refuse(dense(weight.data(), DType::kF32, {3 * d, 1, 3}), to, StatusCode::kUnsupported, {"conv_weight.shape[2] = 3"});
  refuse(dense(weight.data(), DType::kF16, {3 * d, 1, 4}), to, invalid, {"conv_weight.dtype = F16"});
  refuse(dense(weight.data(), DType::kF32, {d, 1, 4}), to, invalid, {"conv_weight.shape = [128, 1, 4]", "[384, 1, 4]"});
  refuse(good, dense(out.data(), DType::kBF16, {3, 4, d}), invalid, {"out.dtype = BF16"});
  refuse(good, dense(out.data(), DType::kF32, {4, 3, d}), invalid, {"out.shape = [4, 3, 128]", "[3, 4, 128]"});
  for (std::int64_t columns : {0, 64, 200, 128 * 129})
    refuse(good, dense(out.data(), DType::kF32, {3, 4, columns}), invalid,
           {"out.shape[2] = " + std::to_string(columns)});
  refuse(good, dense(out.data(), DType::kF32, {12, d}), invalid, {"out.rank = 2"});
  refuse(good, dense(nullptr, DType::kF32, {3, 4, d}), invalid, {"out.data = null"});
  auto view = good;
  view.stride[0] = 8;
  refuse(view, to, StatusCode::kBadLayout, {"conv_weight strides = (8, 4, 1)"});
  view = to;
  view.device = Device::cuda(0);
  refuse(good, view, StatusCode::kWrongDevice, {"out.device = cuda:0", "cpu"});
  refuse(dense(out.data() + 12 * d - 1, DType::kF32, {3 * d, 1, 4}), to, StatusCode::kOverlap, {"out = 0x"});
}

TEST(KdaOwnedBlock, holds_conv_bias_and_norm_weight) {
  Layer layer;
  for (std::size_t i = 0; i < layer.conv_bias.size(); ++i) layer.conv_bias[i] = static_cast<float>(i);
  std::vector<std::uint16_t> norm(128, 0x4040);  // 3
  layer.weights.norm_weight = dense(norm.data(), DType::kBF16, {128});
  const std::int64_t floats = KdaOwned::floats(kD), bias = KdaOwned::bias_offset(kD), end = KdaOwned::norm_offset(kD);
  std::vector<float> owned(static_cast<std::size_t>(floats) + 1, 7.0f);
  fill_owned(layer.weights, kD, owned.data());
  for (std::int64_t c = 0; c < bias; ++c) ASSERT_EQ(owned[static_cast<std::size_t>(c)], 0.25f);
  for (std::int64_t c = bias; c < end; ++c) ASSERT_EQ(owned[static_cast<std::size_t>(c)], static_cast<float>(c - bias));
  for (std::int64_t c = end; c < floats; ++c) ASSERT_EQ(owned[static_cast<std::size_t>(c)], 3.0f);
  EXPECT_EQ(owned.back(), 7.0f);
  layer.weights.conv_bias.reset();
  fill_owned(layer.weights, kD, owned.data());
  for (std::int64_t c = bias; c < end; ++c) ASSERT_EQ(owned[static_cast<std::size_t>(c)], 0.0f);
}

// ---- Records: run, reset_records, fold_records

class KdaRecordsContract : public KdaCallContract {
 protected:
  std::vector<std::uint8_t> records = std::vector<std::uint8_t>(kSlots * kArea + 512);
  std::vector<std::int32_t> targets = std::vector<std::int32_t>(16, 2);

  void SetUp() override {
    options.state_mode = StateMode::kRecords;
    kda = std::make_unique<PreparedKda>(weights, options);
    kda->prepare(layouts_with_records());
  }
  KdaCaches caches() {
    KdaCaches c = layouts_with_records();
    c.conv.data = conv.data();
    c.state.data = state.data();
    c.records->data = records.data();
    return c;
  }
  KdaCall step(std::int64_t requests, int tokens) {
    KdaCall c = call(requests, tokens);
    c.caches = caches();
    return c;
  }
  TensorView ids(std::int64_t rows = 1) { return dense(slots.data(), DType::kI32, {rows}); }
  TensorView counts(std::int64_t rows = 1) { return dense(accepted.data(), DType::kI32, {rows}); }
  // By both calls, or by fold_records alone where it is about its own arguments; no byte differs.
  void expect_refused_fold(const KdaCaches& c, const TensorView& slot_ids, const std::optional<TensorView>& kept,
                           const std::optional<TensorView>& dst, StatusCode code,
                           const std::vector<std::string>& parts) {
    const auto before = std::tuple(conv, state, records, slots, accepted, targets);
    const Status folded = status_of([&] { kda->fold_records(c, slot_ids, kept ? *kept : counts(4), dst); });
    expect_refusal(folded, code, parts);
    EXPECT_EQ(folded.place, "kda.fold_records");
    if (!kept && !dst) {
      const Status reset = status_of([&] { kda->reset_records(c, slot_ids); });
      expect_refusal(reset, code, parts);
      EXPECT_EQ(reset.place, "kda.reset_records");
    }
    EXPECT_TRUE(before == std::tuple(conv, state, records, slots, accepted, targets)) << folded.message();
  }
};

TEST_F(KdaRecordsContract, a_step_needs_one_column_of_slots_and_its_records) {
  for (KdaKey key : kda->keys()) {
    KdaCall c = step(key.requests, key.tokens);
    c.slots = ids(key.requests);
    c.tokens = key.tokens;
    expect_accepted(c);
    c.slots = TensorView::matrix(slots.data(), key.requests, 9, Device::cpu(), 9, DType::kI32);  // past L - 2
    expect_accepted(c);
  }
  KdaCall c = step(2, 2);
  c.caches.records.reset();
  expect_refused(c, StatusCode::kInvalidArgument, {"records = absent", "U8 [slots, 8208 and more]"});
  c = step(2, 2);
  c.caches.records->stride[0] += 16;
  expect_refused(c, StatusCode::kInvalidArgument, {"records slot stride = (8224, 1)", "(8208, 1)"});
  c = step(2, 2);
  c.caches.records->shape[1] += 16;
  expect_refused(c, StatusCode::kInvalidArgument, {"records.shape = [5, 8224]", "[5, 8208]"});
  c = step(2, 2);
  c.caches.records->device = Device::cuda(1);
  expect_refused(c, StatusCode::kWrongDevice, {"records.device = cuda:1"});
  c = step(2, 2);
  c.caches.records->data = records.data() + 8;
  expect_refused(c, StatusCode::kBadLayout, {"records.data = 0x", "16 bytes"});
  c = step(2, 2);
  c.out.data = records.data() + 16;
  expect_refused(c, StatusCode::kOverlap, {"out", "of records at 0x"});
  c = step(2, 2);
  c.slots = TensorView::matrix(slots.data(), 2, 4, Device::cpu(), 8, DType::kI32);
  c.tokens = 2;
  c.slots.stride[1] = 2;
  expect_refused(c, StatusCode::kBadLayout, {"slots column stride = 2"});
  c = step(2, 2);
  c.accepted.reset();
  c.tokens = 2;
  expect_refused(c, StatusCode::kInvalidArgument, {"accepted = absent"});
}

TEST_F(KdaRecordsContract, between_steps_the_same_rows_hold) {
  const auto invalid = StatusCode::kInvalidArgument;
  KdaCaches c = caches();
  c.records.reset();
  expect_refused_fold(c, ids(), {}, {}, invalid, {"records = absent"});
  c = caches();
  c.conv.dtype = DType::kF32;
  expect_refused_fold(c, ids(), {}, {}, invalid, {"conv.dtype = F32"});
  c = caches();
  c.state.data = state.data() + 1;
  expect_refused_fold(c, ids(), {}, {}, StatusCode::kBadLayout, {"state.data = 0x"});
  c = caches();
  TensorView v = ids();
  v.dtype = DType::kI64;
  expect_refused_fold(c, v, {}, {}, invalid, {"slots.dtype = I64"});
  v = ids();
  v.rank = 3;
  expect_refused_fold(c, v, {}, {}, invalid, {"slots.rank = 3", "1, 2"});
  expect_refused_fold(c, ids(0), {}, {}, invalid, {"slots.shape[0] = 0"});
  expect_refused_fold(c, ids(kHuge), {}, {}, invalid, {"slots.shape[0] = 9223372036854775807"});
  v = ids(2);
  v.stride[0] = 0;
  expect_refused_fold(c, v, {}, {}, StatusCode::kBadLayout, {"slots row stride = 0"});
  v = ids();
  v.device = Device::cuda(0);
  expect_refused_fold(c, v, {}, {}, StatusCode::kWrongDevice, {"slots.device = cuda:0"});
  expect_refused_fold(c, ids(3), counts(2), {}, invalid, {"accepted.shape[0] = 2", "3 and more"});
  v = counts(3);
  v.stride[0] = 2;
  expect_refused_fold(c, ids(3), v, {}, StatusCode::kBadLayout, {"accepted stride = 2"});
  v = dense(targets.data(), DType::kF32, {3});
  expect_refused_fold(c, ids(3), {}, v, invalid, {"dst_slots.dtype = F32"});
  v = dense(targets.data(), DType::kI32, {2});
  expect_refused_fold(c, ids(3), {}, v, invalid, {"dst_slots.shape[0] = 2", "3 rows and more"});

  kda = std::make_unique<PreparedKda>(weights, options);
  expect_refused_fold(c, ids(), {}, {}, StatusCode::kNotPrepared, {"layouts = (none)", "call prepare first"});
  options.state_mode = StateMode::kSlots;
  kda = prepared();
  expect_refused_fold(c, ids(), {}, {}, invalid, {"state_mode = slots", "records"});
}

TEST_F(KdaRecordsContract, columns_of_tables_are_taken_as_they_lie) {
  slots = {1, 9, 9, 3, 9, 9};
  targets = {2, 7, 4};
  const KdaModel model = check_kda(weights, options);
  const KdaLayout layout = check_layouts(model, layouts_with_records());
  const TensorView table = TensorView::matrix(slots.data(), 2, 3, Device::cpu(), 3, DType::kI32);
  const TensorView dst = dense(targets.data(), DType::kI32, {2}), kept = counts(2);
  KdaFold fold;
  ASSERT_EQ(check_fold(model, &layout, caches(), table, &kept, dst, &fold).message(), "ok");
  EXPECT_EQ(fold.requests, 2);
  EXPECT_EQ(fold.slots, slots.data());
  EXPECT_EQ(fold.slots_stride, 3);
  EXPECT_EQ(fold.dst_slots, targets.data());
  EXPECT_EQ(fold.dst_stride, 1);
  EXPECT_EQ(fold.accepted, accepted.data());
  EXPECT_EQ(fold.conv, conv.data());
  EXPECT_EQ(fold.state, state.data());
  EXPECT_EQ(fold.records, records.data());
  ASSERT_EQ(check_fold(model, &layout, caches(), table, nullptr, {}, &fold).message(), "ok");
  EXPECT_EQ(fold.dst_slots, slots.data());
  EXPECT_EQ(fold.dst_stride, 3);
  EXPECT_EQ(fold.accepted, nullptr);
}

TEST_F(KdaRecordsContract, nothing_is_allocated) {
  const KdaCall verify = step(2, 2);
  const KdaCaches c = caches();
  const auto before = test::allocations();
  for (int i = 0; i < 10; ++i) {
    kda->run(verify);
    kda->fold_records(c, ids(2), counts(2));
    kda->reset_records(c, ids(2));
  }
  EXPECT_EQ(test::allocations(), before);
}

}  // namespace
}  // namespace twostep
