// A KDA layer in decode and verify: projection (DraftGemm), core (PreparedKda), output projection (DraftGemm).
//
// One request drafts three tokens behind a known one; the target keeps two of the four. The next step starts from the
// state after those two, with no copy: the step before left one state per token. At the end the same tokens are decoded
// one by one, and both ways must agree.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "twostep/gemm.h"
#include "twostep/kda.h"

using namespace twostep;

namespace {

constexpr int kHeads = 2, kD = 128 * kHeads, kHidden = 256;
constexpr int kDraft = 3, kTokens = kDraft + 1;  // of a verify step
constexpr int kLine = 2 + kTokens;               // positions of a conv line: L
constexpr int kSlots = 1 + kTokens;              // slot 0 is dead: padding

using Bf16 = std::uint16_t;  // the upper half of an FP32
float widen(Bf16 bits) {
  const std::uint32_t word = std::uint32_t{bits} << 16;
  float value;
  static_assert(sizeof(value) == sizeof(word));
  __builtin_memcpy(&value, &word, sizeof(value));
  return value;
}

std::mt19937 random_bits(7);
std::vector<float> random_floats(std::int64_t count, float spread, float centre = 0) {
  std::normal_distribution<float> normal(centre, spread);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random_bits);
  return values;
}
std::vector<Bf16> random_bf16(std::int64_t count, float spread) {
  std::vector<Bf16> values;
  for (const float value : random_floats(count, spread)) {
    std::uint32_t word;
    __builtin_memcpy(&word, &value, sizeof(word));
    values.push_back(static_cast<Bf16>(word >> 16));
  }
  return values;
}

TensorView view(void* data, DType dtype, std::initializer_list<std::int64_t> shape) {  // dense, on the CPU
  TensorView v;
  v.data = data;
  v.dtype = dtype;
  for (const std::int64_t size : shape) v.shape[v.rank++] = size;
  for (int i = v.rank - 1; i >= 0; --i) v.stride[i] = i + 1 == v.rank ? 1 : v.stride[i + 1] * v.shape[i + 1];
  return v;
}

// The weights of a layer, and the core prepared for its two kinds of step.
struct Layer {
  std::int64_t columns = kda_row_stride(kHeads);  // Q K V z f beta, rounded up to 16
  std::vector<Bf16> w_in = random_bf16(columns * kHidden, 0.06f), w_out = random_bf16(kHidden * kD, 0.06f);
  std::vector<Bf16> f_b = random_bf16(kD * 128, 0.09f);
  std::vector<float> conv = random_floats(3 * kD * 4, 0.5f), a_log = random_floats(kHeads, 0.3f, 1),
                     dt_bias = random_floats(kD, 0.3f), norm = random_floats(128, 0.1f, 1);
  DraftGemm project{TensorView::matrix(w_in.data(), columns, kHidden)};
  DraftGemm project_out{TensorView::matrix(w_out.data(), kHidden, kD)};
  PreparedKda core{weights(), options()};

  KdaWeights weights() {
    KdaWeights w;
    w.conv_weight = view(conv.data(), DType::kF32, {3 * kD, 1, 4});
    w.f_b = view(f_b.data(), DType::kBF16, {kD, 128});
    w.a_log = view(a_log.data(), DType::kF32, {kHeads});
    w.dt_bias = view(dt_bias.data(), DType::kF32, {kD});
    w.norm_weight = view(norm.data(), DType::kF32, {128});
    return w;
  }
  KdaOptions options() const {
    KdaOptions o;
    o.heads = kHeads;
    o.gate_lower_bound = -5.0f;
    o.policies = {{.key = {.requests = 1, .tokens = 1}, .row_stride = columns},
                  {.key = {.requests = 1, .tokens = kTokens}, .row_stride = columns}};
    return o;
  }
};

// What a request owns: a conv line and a state per slot.
struct Caches {
  std::vector<Bf16> conv = std::vector<Bf16>(kSlots * kLine * 3 * kD);
  std::vector<float> state = std::vector<float>(kSlots * kHeads * 128 * 128);
  KdaCaches views() {
    return {view(conv.data(), DType::kBF16, {kSlots, kLine, 3 * kD}),
            view(state.data(), DType::kF32, {kSlots, kHeads, 128, 128}),
            {}};
  }
};

// Rows of hidden values through the layer. `accepted`: tokens kept of the request's last verify step.
std::vector<Bf16> step(Layer& layer, Caches& caches, const Bf16* hidden, int tokens, std::int32_t accepted) {
  std::vector<std::int32_t> slots = {1, 2, 3, 4};  // column t takes the state after token t
  std::vector<Bf16> projected(tokens * layer.columns), core_out(tokens * kD), out(tokens * kHidden);
  const TensorView rows = TensorView::matrix(projected.data(), tokens, layer.columns);
  const TensorView heads = TensorView::matrix(core_out.data(), tokens, kD);

  layer.project.run(TensorView::matrix(const_cast<Bf16*>(hidden), tokens, kHidden), rows);
  KdaCall call;
  call.projected = rows;
  call.out = heads;
  call.caches = caches.views();
  call.slots = view(slots.data(), DType::kI32, {1, kTokens});
  call.accepted = view(&accepted, DType::kI32, {1});
  call.tokens = tokens;
  layer.core.run(call);
  layer.project_out.run(heads, TensorView::matrix(out.data(), tokens, kHidden));
  return out;
}

double largest_difference(const Bf16* a, const Bf16* b, int count) {
  double largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max<double>(largest, std::abs(widen(a[i]) - widen(b[i])));
  return largest;
}

}  // namespace

int main() try {
  Layer layer;
  Caches caches;
  layer.core.prepare(caches.views());
  for (const int rows : {1, kTokens}) layer.project.prepare(rows), layer.project_out.prepare(rows);

  // A decode step, then a verify step of four tokens; the target keeps two of them (accepted counts the bonus token),
  // and the next step, again a decode, starts from there.
  const auto hidden = random_bf16((1 + kTokens + 1) * kHidden, 1);
  const auto first = step(layer, caches, hidden.data(), 1, 1);
  const auto verify = step(layer, caches, hidden.data() + kHidden, kTokens, 1);
  const std::int32_t accepted = 2;
  const auto next = step(layer, caches, hidden.data() + (1 + kTokens) * kHidden, 1, accepted);

  // The same four kept tokens, one by one.
  Caches plain;
  const int kept[] = {0, 1, 2, 1 + kTokens};
  const Bf16* batched[] = {first.data(), verify.data(), verify.data() + kHidden, next.data()};
  double worst = 0;
  for (int i = 0; i < 4; ++i) {
    const auto out = step(layer, plain, hidden.data() + kept[i] * kHidden, 1, 1);
    worst = std::max(worst, largest_difference(out.data(), batched[i], kHidden));
  }
  std::printf("KDA layer, %d heads: decode, verify %d tokens, keep %d, decode\n", kHeads, kTokens, accepted);
  std::printf("largest difference from decoding one by one: %.4f (outputs of size 1)\n", worst);
  std::printf("kernel: %s\n", layer.core.kernel({1, kTokens}).c_str());
  return worst < 0.03 ? 0 : 1;
} catch (const Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
