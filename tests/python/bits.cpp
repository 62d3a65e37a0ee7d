// What the C++ API computes, for comparison with Python: operands and results are raw files in a folder.
//   bits FOLDER gemm M N K                weight, x -> out
//   bits FOLDER kda HEADS REQUESTS TOKENS conv_weight, f_b, a_log, dt_bias, norm_weight, projected, slots, accepted,
//                                         conv, state -> out, conv, state
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>
#include <vector>

#include "twostep/gemm.h"
#include "twostep/kda.h"

using namespace twostep;

namespace {

std::string folder;

std::vector<char> read(const std::string& name) {
  std::ifstream file(folder + "/" + name, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void write(const std::string& name, const std::vector<char>& bytes) {
  std::ofstream(folder + "/" + name, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

TensorView dense(std::vector<char>& bytes, DType dtype, std::initializer_list<std::int64_t> shape) {
  return TensorView::dense(bytes.data(), dtype, shape);
}

void gemm(std::int64_t m, std::int64_t n, std::int64_t k) {
  auto weight = read("weight"), x = read("x");
  std::vector<char> out(static_cast<std::size_t>(m * n) * 2);
  DraftGemm plan(dense(weight, DType::kBF16, {n, k}));
  plan.run(dense(x, DType::kBF16, {m, k}), dense(out, DType::kBF16, {m, n}));
  write("out", out);
}

void kda(int heads, std::int64_t requests, int tokens) {
  const std::int64_t d = 128 * heads, rows = requests * tokens, stride = kda_row_stride(heads);
  auto conv_weight = read("conv_weight"), f_b = read("f_b"), a_log = read("a_log"), dt_bias = read("dt_bias"),
       norm_weight = read("norm_weight"), projected = read("projected"), slots = read("slots"),
       accepted = read("accepted"), conv = read("conv"), state = read("state");
  std::vector<char> out(static_cast<std::size_t>(rows * d) * 2);
  const std::int64_t num_slots = 1 + requests * tokens, length = 2 + tokens;
  const KdaWeights weights{dense(conv_weight, DType::kF32, {3 * d, 1, 4}),
                           {},
                           dense(f_b, DType::kBF16, {d, 128}),
                           dense(a_log, DType::kF32, {heads}),
                           dense(dt_bias, DType::kF32, {d}),
                           dense(norm_weight, DType::kF32, {128})};
  KdaOptions options;
  options.heads = heads;
  options.gate_lower_bound = -5.0f;
  options.policies = {{.key = {requests, tokens}, .row_stride = stride}};
  PreparedKda core(weights, options);
  const KdaCaches caches{dense(conv, DType::kBF16, {num_slots, length, 3 * d}),
                         dense(state, DType::kF32, {num_slots, heads, 128, 128}),
                         {}};
  core.prepare(caches);
  KdaCall call;
  call.projected = dense(projected, DType::kBF16, {rows, stride});
  call.out = dense(out, DType::kBF16, {rows, d});
  call.caches = caches;
  call.slots = dense(slots, DType::kI32, {requests, tokens});
  call.accepted = dense(accepted, DType::kI32, {requests});
  core.run(call);
  write("out", out);
  write("conv", conv);
  write("state", state);
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 6) return 2;
  folder = argv[1];
  const std::string what = argv[2];
  const int a = std::atoi(argv[3]), b = std::atoi(argv[4]), c = std::atoi(argv[5]);
  if (what == "gemm") gemm(a, b, c);
  else kda(a, b, c);
  return 0;
} catch (const Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
