// The maths of a step: values against the oracle, exact small cases, extreme inputs, long chains, large batches.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/kda/fixture.h"

namespace twostep::kda_test {
namespace {

using KdaValues = KdaTest;

float rounded_value(const Outcome& outcome, const Step& step, int part, std::int64_t channel, std::int64_t row = 0) {
  const std::int64_t channels = step.columns().channels;
  return static_cast<float>(
      decode_bf16(outcome.rounded[static_cast<std::size_t>((row * 4 + part) * channels + channel)]));
}

// g[j] = value for every row whose f is (1, 0, 0, ...).
void set_g(LayerValues& layer, double value) {
  std::fill(layer.f_b.begin(), layer.f_b.end(), std::uint16_t{0});
  for (std::size_t j = 0; j < layer.f_b.size(); j += kDim) layer.f_b[j] = encode_bf16(value);
}
void set_unit_f(Step* step) {
  for (std::int64_t row = 0; row < step->rows(); ++row)
    for (int i = 0; i < kDim; ++i) step->at(row, step->columns().f(i)) = encode_bf16(i == 0 ? 1 : 0);
}
void set_part(Step* step, int part, double value) {
  for (std::int64_t row = 0; row < step->rows(); ++row)
    for (std::int64_t c = 0; c < step->columns().channels; ++c)
      step->at(row, step->columns().part(part, c)) = encode_bf16(value);
}
void set_beta(Step* step, double logit) {
  for (std::int64_t row = 0; row < step->rows(); ++row)
    for (std::int64_t h = 0; h < step->heads; ++h) step->at(row, step->columns().beta(h)) = encode_bf16(logit);
}
void set_state(Scene* scene, float value) {
  for (int h = 0; h < scene->shape.heads; ++h)
    std::fill_n(scene->before.state(scene->step.slot(0, 0), h), kCells, value);
}
void clear_taps(LayerValues& layer, int part) {
  const auto channels = static_cast<std::ptrdiff_t>(layer.channels());
  std::fill_n(layer.conv_weight.begin() + 4 * part * channels, 4 * channels, 0.0f);
}

// 256 decode steps of one head, over several layers.
Verdict draws(Random& random, bool softplus, Profile profile) {
  Verdict verdict;
  for (int layer = 0; layer < 8; ++layer) {
    Scene scene(random, {.softplus = softplus});
    for (int draw = 0; draw < 32; ++draw) {
      scene.redraw(random);
      verdict += scene.judge(scene.run(), profile);
    }
  }
  return verdict;
}

TEST_F(KdaValues, random_draws_are_right_T1) {
  for (const bool softplus : {false, true}) {
    SCOPED_TRACE(softplus ? "softplus" : "lower bound");
    const Verdict verdict = draws(random, softplus, Profile::kStock);
    EXPECT_EQ(verdict.plain.heads, 256);
    RecordProperty(softplus ? "softplus" : "lower_bound", to_string(verdict.plain));
    expect_right(verdict);
  }
}

TEST_F(KdaValues, an_oracle_that_rounds_the_output_alone_is_told_apart_T2) {
  for (const bool softplus : {false, true}) {
    const Tally tally = draws(random, softplus, Profile::kFp32).plain;
    EXPECT_GT(static_cast<double>(tally.unequal), 0.01 * static_cast<double>(tally.outputs)) << to_string(tally);
  }
}

// ---- T3

struct Cross {
  int heads, tokens;
  bool dim_first, softplus, bias;
};

// Everything where there is time; else every pair of two settings.
std::vector<Cross> cross() {
  std::vector<Cross> cases;
  int row = 0;
  for (const int heads : {1, 2, 12, 24, 48, 96, 128}) {
    for (int tokens = 1; tokens <= kKdaMaxTokens; ++tokens) {
      if (backend().whole()) {
        for (int bits = 0; bits < 8; ++bits)
          cases.push_back({heads, tokens, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0});
      } else if (!kSlowBuild || heads <= 2 || tokens == 1) {
        // The rows 000, 011, 101, 110 in turn: any two columns of them hold all four pairs.
        const int at = (row + tokens) % 4;
        cases.push_back({heads, tokens, at >= 2, at == 1 || at == 3, at == 1 || at == 2});
      }
    }
    ++row;
  }
  return cases;
}

// A case strict, and with the same bits from weights in FP32; its plain tally is pooled by the caller.
Tally expect_strict_case(Random& random, const Cross& one) {
  SCOPED_TRACE(testing::Message() << replay() << ", H " << one.heads << ", q " << one.tokens
                                  << (one.dim_first ? ", DS" : ", SD")
                                  << (one.softplus ? ", softplus" : ", lower bound") << (one.bias ? ", bias" : ""));
  Scene scene(random, {.heads = one.heads,
                       .requests = 2,
                       .tokens = one.tokens,
                       .softplus = one.softplus,
                       .bias = one.bias,
                       .dim_first = one.dim_first,
                       .small = DType::kBF16});
  const Outcome outcome = scene.run();
  const Verdict verdict = scene.judge(outcome);
  expect_strict(verdict.strict);
  expect_states(verdict.plain);

  const Layer wide(scene.layer.values(), DType::kF32);
  Rig rig(wide, scene.shape, scene.spec.rig);
  expect_same_bits(run(rig, scene.step, scene.before), outcome);
  return verdict.plain;
}

TEST_F(KdaValues, every_head_count_layout_gate_bias_and_token_count_is_right_T3) {
  const std::vector<Cross> cases = cross();
  std::vector<Tally> tallies(cases.size());
  const std::uint64_t base = random();
  parallel_for(static_cast<std::int64_t>(cases.size()), [&](std::int64_t i) {  // on a GPU each is a compilation
    Random own(base + static_cast<std::uint64_t>(i));
    tallies[static_cast<std::size_t>(i)] = expect_strict_case(own, cases[static_cast<std::size_t>(i)]);
  });
  Tally plain[2];
  for (std::size_t i = 0; i < cases.size(); ++i) plain[cases[i].softplus] += tallies[i];
  RecordProperty("lower_bound", to_string(plain[0]));
  RecordProperty("softplus", to_string(plain[1]));
  expect_plain(plain[0]);
  expect_plain(plain[1]);
}

TEST_F(KdaValues, the_debug_output_changes_no_bit) {
  for (const int tokens : {1, 4}) {
    Scene scene(random, {.heads = 2, .requests = 3, .tokens = tokens});
    RigOptions bare = scene.spec.rig;
    bare.strict = bare.counters = false;
    Rig rig(scene.layer, scene.shape, bare);
    expect_same_bits(run(rig, scene.step, scene.before), scene.run());
  }
}

TEST_F(KdaValues, the_same_inputs_give_the_same_bits_on_every_run) {
  for (const int tokens : {1, 4}) {
    Scene scene(random, {.heads = 3, .requests = 5, .tokens = tokens});
    const Outcome first = scene.run();
    for (int repeat = 0; repeat < 20; ++repeat) expect_same_bits(scene.run(), first);
  }
}

TEST_F(KdaValues, taps_meet_their_positions_T4) {
  Scene scene(random, {}, [](LayerValues& layer) {
    for (std::size_t c = 2 * kDim; c < 3 * kDim; ++c)
      for (std::size_t tap = 0; tap < 4; ++tap)
        layer.conv_weight[4 * c + tap] = std::vector<float>{1, 16, 256, 4096}[tap];
  });
  const std::int64_t slot = scene.step.slot(0, 0);
  set_state(&scene, 0);
  set_beta(&scene.step, 0);
  set_part(&scene.step, 2, 8);
  for (std::int64_t c = 2 * kDim; c < 3 * kDim; ++c)
    for (int position = 0; position < 3; ++position)
      scene.before.set_conv(slot, c, position, encode_bf16(1 << position));
  const Outcome outcome = scene.run();
  expect_right(scene.judge(outcome));

  double squares = 1e-6;
  for (int j = 0; j < kDim; ++j) squares += std::pow(rounded_value(outcome, scene.step, 1, j), 2);
  for (int v = 0; v < kDim; ++v) {
    ASSERT_EQ(rounded_value(outcome, scene.step, 2, v), 33792.0f);
    for (int k = 0; k < kDim; ++k) {
      const double want = 16896 * rounded_value(outcome, scene.step, 1, k) / std::sqrt(squares);
      ASSERT_NEAR(outcome.caches.state(slot, 0)[v * kDim + k], want, 1e-6 * 16896);
    }
    for (int position = 0; position < 3; ++position)
      ASSERT_EQ(decode_bf16(outcome.caches.conv(slot, 2 * kDim + v, position)), 2 << position);
  }
}

TEST_F(KdaValues, a_state_that_is_transposed_shows_T5) {
  Scene scene(random, {}, [](LayerValues& layer) { clear_taps(layer, 2); });
  set_state(&scene, 0);
  scene.before.state(scene.step.slot(0, 0), 0)[3 * kDim + 7] = 1;
  const Outcome outcome = scene.run();
  expect_right(scene.judge(outcome));
  for (int v = 0; v < kDim; ++v) {
    const double out = decode_bf16(outcome.out[static_cast<std::size_t>(v)]);
    if (v == 3) EXPECT_NE(out, 0);
    else EXPECT_EQ(out, 0) << "v " << v;
  }
}

TEST_F(KdaValues, the_decay_is_that_of_its_gate_form_T6) {
  for (const bool softplus : {false, true}) {
    Scene scene(random, {.softplus = softplus}, [](LayerValues& layer) {
      for (int part = 0; part < 3; ++part) clear_taps(layer, part);
      std::fill(layer.dt_bias.begin(), layer.dt_bias.end(), 0.5f);
      layer.a_log[0] = std::log(4.0f);
    });
    set_state(&scene, 1);
    for (int i = 0; i < kDim; ++i) scene.step.at(0, scene.step.columns().f(i)) = 0;
    const Outcome outcome = scene.run();
    expect_right(scene.judge(outcome));
    const double want = softplus ? std::exp(-4 * std::log(1 + std::exp(0.5))) : std::exp(-5 / (1 + std::exp(-2.0)));
    ASSERT_NEAR(want, softplus ? 0.0203168 : 0.0122285, 1e-7);
    const float* cells = outcome.caches.state(scene.step.slot(0, 0), 0);
    for (int i = 0; i < kCells; ++i) ASSERT_NEAR(cells[i], want, 1e-5 * want);
  }
}

TEST_F(KdaValues, the_norm_adds_its_epsilon_to_the_sum_T7) {
  Scene zero(random, {}, [](LayerValues& layer) {
    clear_taps(layer, 0);
    clear_taps(layer, 1);
  });
  const Outcome nothing = zero.run();
  expect_right(zero.judge(nothing));
  for (const std::uint16_t out : nothing.out) EXPECT_EQ(decode_bf16(out), 0);

  // The K channel 5 alone is not 0: 0.0019989 before SiLU, 0.00099945 after.
  Scene one(random, {}, [](LayerValues& layer) {
    clear_taps(layer, 1);
    layer.conv_weight[4 * (kDim + 5) + 3] = 1;
  });
  set_state(&one, 0);
  set_beta(&one.step, 80);
  one.step.at(0, one.step.columns().part(1, 5)) = encode_bf16(0.0019989);
  const Outcome outcome = one.run();
  expect_right(one.judge(outcome));
  ASSERT_NEAR(rounded_value(outcome, one.step, 1, 5), 0.00099945, 1e-8);
  for (int v = 0; v < kDim; ++v) {
    const double value = rounded_value(outcome, one.step, 2, v);
    EXPECT_NEAR(outcome.caches.state(one.step.slot(0, 0), 0)[v * kDim + 5], 0.70691 * value,
                1e-5 * std::abs(value) + 1e-12);
  }
}

// ---- T8, T9

void expect_finite(const Outcome& outcome, std::int64_t slot) {
  for (const std::uint16_t out : outcome.out) ASSERT_TRUE(std::isfinite(decode_bf16(out)));
  for (int i = 0; i < kCells; ++i) ASSERT_TRUE(std::isfinite(outcome.caches.state(slot, 0)[i]));
}

TEST_F(KdaValues, extreme_inputs_are_finite_and_right_T8) {
  struct Extreme {
    const char* name;
    std::function<void(LayerValues&)> layer;
    std::function<void(Scene&)> data;
  };
  const auto nothing = [](LayerValues&) {};
  const auto fill_z = [](double z) {
    return [z](Scene& scene) {
      for (int v = 0; v < kDim; ++v) scene.step.at(0, scene.step.columns().z(v)) = encode_bf16(z);
    };
  };
  const auto logit = [](double b) { return [b](Scene& scene) { set_beta(&scene.step, b); }; };
  const auto unit_f = [](Scene& scene) { set_unit_f(&scene.step); };
  const auto data_as_is = [](Scene&) {};
  const std::vector<Extreme> extremes = {
      {"beta 80", nothing, logit(80)},
      {"beta -80", nothing, logit(-80)},
      {"z 80", nothing, fill_z(80)},
      {"z -80", nothing, fill_z(-80)},
      {"g 1e4", [](LayerValues& layer) { set_g(layer, 1e4); }, unit_f},
      {"g -1e4", [](LayerValues& layer) { set_g(layer, -1e4); }, unit_f},
      {"A_log 5", [](LayerValues& layer) { layer.a_log[0] = 5; }, data_as_is},
      {"A_log -5", [](LayerValues& layer) { layer.a_log[0] = -5; }, data_as_is},
      {"dt_bias -9", [](LayerValues& layer) { std::fill(layer.dt_bias.begin(), layer.dt_bias.end(), -9.0f); },
       data_as_is},
      {"S 1e4", nothing, [](Scene& scene) { set_state(&scene, 1e4f); }},
  };
  for (const bool softplus : {false, true})
    for (const Extreme& extreme : extremes) {
      SCOPED_TRACE(std::string(extreme.name) + (softplus ? ", softplus" : ", lower bound"));
      Scene scene(random, {.softplus = softplus}, extreme.layer);
      extreme.data(scene);
      const Outcome outcome = scene.run();
      expect_finite(outcome, scene.step.slot(0, 0));
      expect_right(scene.judge(outcome));
    }
}

// SiLU far below zero is zero, not a small part of its argument.
TEST_F(KdaValues, silu_of_large_negative_sums_is_zero) {
  for (const double x : {-90.0, -1e4, -1e36, -1e38}) {
    SCOPED_TRACE(x);
    Scene scene(random, {}, [](LayerValues& layer) {
      for (std::size_t c = 2 * kDim; c < 3 * kDim; ++c)
        for (std::size_t tap = 0; tap < 4; ++tap) layer.conv_weight[4 * c + tap] = tap == 3 ? 1.0f : 0.0f;
    });
    set_part(&scene.step, 2, x);
    const Outcome outcome = scene.run();
    for (int v = 0; v < kDim; ++v) {
      const float y = rounded_value(outcome, scene.step, 2, v);
      EXPECT_TRUE(y <= 0 && y > -1e-30f) << "v " << v << " " << y;
    }
  }
}

// kda 9.5: what is not a number stays so, and spoils no other request.
TEST_F(KdaValues, a_nan_spoils_the_outputs_of_its_own_request) {
  for (const char* where : {"q", "v", "z", "f", "beta"}) {
    SCOPED_TRACE(where);
    Scene scene(random, {.requests = 2});
    const Outcome clean = scene.run();
    const Columns columns = scene.step.columns();
    const std::string_view name = where;
    const std::int64_t column = name == "q"   ? columns.part(0, 5)
                                : name == "v" ? columns.part(2, 5)
                                : name == "z" ? columns.z(5)
                                : name == "f" ? columns.f(5)
                                              : columns.beta(0);
    scene.step.at(0, column) = 0x7fc0;
    const Outcome outcome = scene.run();
    bool spoilt = false;
    for (int v = 0; v < kDim; ++v) spoilt |= std::isnan(decode_bf16(outcome.out[static_cast<std::size_t>(v)]));
    EXPECT_TRUE(spoilt);
    for (int v = 0; v < kDim; ++v) {
      const auto at = static_cast<std::size_t>(outcome.out_stride + v);
      EXPECT_EQ(outcome.out[at], clean.out[at]);
    }
  }
}

// Denormal numbers may be flushed (kda 4.4): an output is then 0 where the oracle has less than 1e-30.
TEST_F(KdaValues, denormal_inputs_are_finite_and_right_T8) {
  for (const bool softplus : {false, true}) {
    Scene scene(random, {.softplus = softplus});
    for (std::int64_t column = 0; column < scene.step.columns().used(); ++column)
      scene.step.at(0, column) = static_cast<std::uint16_t>(1 + random() % 0x7f);
    const std::int64_t slot = scene.step.slot(0, 0);
    for (std::int64_t c = 0; c < 3 * kDim; ++c)
      for (int position = 0; position < 3; ++position)
        scene.before.set_conv(slot, c, position, static_cast<std::uint16_t>(1 + random() % 0x7f));
    const Outcome outcome = scene.run();
    expect_finite(outcome, slot);
    const Verdict verdict = scene.judge(outcome);
    EXPECT_LE(verdict.plain.worst, 1e-5);
    EXPECT_LE(verdict.strict.worst, 1e-5);
    EXPECT_LE(verdict.strict.worst_rounded, 1);
    for (const std::uint16_t out : outcome.out) EXPECT_LT(std::abs(decode_bf16(out)), 1e-30);
  }
}

TEST_F(KdaValues, a_state_may_decay_to_nothing_T9) {
  Scene scene(random, {.tokens = 4, .softplus = true}, [](LayerValues& layer) {
    set_g(layer, 10);
    layer.a_log[0] = std::log(20.0f);
  });
  set_unit_f(&scene.step);
  const Outcome outcome = scene.run();
  for (int t = 0; t < 4; ++t) expect_finite(outcome, scene.step.slot(0, t));
  expect_right(scene.judge(outcome));
}

// ---- Chains and batches

TEST_F(KdaValues, errors_do_not_grow_over_512_steps_T56) {
  for (const bool softplus : {false, true}) {
    Scene scene(random, {.softplus = softplus}, forget);
    Carried carried;
    Verdict verdict;
    const Step first = scene.step;
    for (int step = 0; step < 512; ++step) {
      if (step > 0) {
        const Step next = random_step(random, 1, 1, 1, first.row_stride, scene.shape.slots);
        scene.step.projected = next.projected;
      }
      Outcome outcome = scene.run();
      verdict += judge(scene.rig, scene.step, scene.before, outcome, Profile::kStock, &carried);
      scene.before = std::move(outcome.caches);
    }
    EXPECT_EQ(verdict.plain.heads, 512);
    RecordProperty(softplus ? "softplus" : "lower_bound", to_string(verdict.plain));
    expect_chain(verdict);
  }
}

TEST_F(KdaValues, a_request_keeps_its_bits_anywhere_in_the_batch_T54) {
  const std::vector<int> batches = backend().whole() ? std::vector<int>{10, 11, 12, 21, 22, 23, 32, 33, 34, 257}
                                   : kSlowBuild      ? std::vector<int>{3}
                                                     : std::vector<int>{10, 11, 33};
  for (const int requests : batches) {
    SCOPED_TRACE(testing::Message() << "B " << requests);
    Scene scene(random, {.heads = 12, .requests = requests});
    const Outcome outcome = scene.run();
    expect_right(scene.judge(outcome));

    Step turned = scene.step;
    const int by = 1 + static_cast<int>(random() % static_cast<std::uint64_t>(requests - 1));
    std::rotate(turned.slots.begin(), turned.slots.begin() + by, turned.slots.end());
    std::rotate(turned.projected.begin(), turned.projected.begin() + by * turned.row_stride, turned.projected.end());
    Outcome other = run(scene.rig, turned, scene.before);
    std::rotate(other.out.begin(), other.out.end() - by * other.out_stride, other.out.end());
    expect_same_bits(outcome, other);
  }
}

}  // namespace
}  // namespace twostep::kda_test
