// The KDA core of one layer: a decode step of two requests on the CPU. kda_layer.cpp shows verify and acceptance.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "twostep/kda.h"

using namespace twostep;

int main() try {
  const std::int64_t heads = 2, d = 128 * heads, columns = kda_row_stride(heads), slots = 3;  // slot 0 is padding
  std::vector<float> conv_weight(3 * d * 4, 0.5f), a_log(heads), dt_bias(d), norm(128, 1.0f);
  std::vector<std::uint16_t> f_b(d * 128), projected(2 * columns, 0x3f80), out(2 * d), conv(slots * 3 * 3 * d);
  std::vector<float> state(slots * heads * 128 * 128);
  std::vector<std::int32_t> ids = {1, 2};  // where the two requests keep their caches

  const auto f32 = [](auto& data, auto... shape) { return TensorView::dense(data.data(), DType::kF32, {shape...}); };
  const auto bf16 = [](auto& data, auto... shape) { return TensorView::dense(data.data(), DType::kBF16, {shape...}); };
  const KdaCaches caches{bf16(conv, slots, 3, 3 * d), f32(state, slots, heads, 128, 128), {}};
  PreparedKda kda(
      {f32(conv_weight, 3 * d, 1, 4), {}, bf16(f_b, d, 128), f32(a_log, heads), f32(dt_bias, d), f32(norm, 128)},
      {.heads = heads, .gate_lower_bound = -5.0f, .policies = {{.key = {2}, .row_stride = columns}}});
  kda.prepare(caches);  // compiles; needs no data
  KdaCall call;
  call.projected = bf16(projected, 2, columns), call.out = bf16(out, 2, d), call.caches = caches;
  call.slots = TensorView::dense(ids.data(), DType::kI32, {2});
  kda.run(call);

  std::printf("%s: out[0] = 0x%04x\n", kda.kernel({2}).c_str(), out[0]);
  return out[0] != 0 && out[0] == out[d] ? 0 : 1;
} catch (const Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
