// PreparedKda on the CPU: decode and verify per vector path, beside a plain copy.
// States are rotated through more memory than the last-level cache holds. Each case first measures the copy, so that
// both meet the same machine: `copy` is the memcpy rate of as many threads, bytes read and written; bytes_per_second
// and `share`, its part of `copy`, count the states that the step must read and write, and nothing else.
//   twostep_bench_cpu_kda --benchmark_filter=decode --benchmark_repetitions=5
#include <benchmark/benchmark.h>
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "core/bf16.h"
#include "core/timer.h"
#include "kda/contract.h"

namespace twostep {
namespace {

constexpr int kHeads = 12;
constexpr std::int64_t kChannels = std::int64_t{kHeads} * kKdaHeadDim;
constexpr int kConvLen = 2 + kKdaMaxTokens;
constexpr std::int64_t kSlots = 1344;  // 1 GiB of states; the dead slot 0 comes before them
constexpr std::int64_t kStateFloats = kChannels * kKdaHeadDim;

TensorView view(void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView made;
  made.data = data;
  made.dtype = dtype;
  made.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), made.shape.begin());
  std::int64_t stride = 1;
  for (int i = made.rank - 1; i >= 0; --i) {
    made.stride[static_cast<std::size_t>(i)] = stride;
    stride *= made.shape[static_cast<std::size_t>(i)];
  }
  return made;
}

// Values of both signs below `limit`, in an order that does not matter here.
float value(std::size_t i, float limit) { return limit * (static_cast<float>(i * 2654435761u % 97) - 48) / 48; }

struct alignas(64) Line {
  std::byte bytes[64];
};

class Floats {
 public:
  Floats(std::int64_t count, float limit) : memory_(static_cast<std::size_t>(count + 15) / 16) {
    for (std::int64_t i = 0; i < count; ++i) data()[i] = value(static_cast<std::size_t>(i), limit);
  }
  float* data() { return reinterpret_cast<float*>(memory_.data()); }

 private:
  std::vector<Line> memory_;
};

class Halves {
 public:
  Halves(std::int64_t count, float limit) : memory_(static_cast<std::size_t>(count + 31) / 32) {
    for (std::int64_t i = 0; i < count; ++i) data()[i] = float_to_bf16(value(static_cast<std::size_t>(i), limit));
  }
  std::uint16_t* data() { return reinterpret_cast<std::uint16_t*>(memory_.data()); }

 private:
  std::vector<Line> memory_;
};

// What all cases share.
struct Layer {
  Floats conv_weight{12 * kChannels, 0.5f}, a_log{kHeads, 0.5f}, dt_bias{kChannels, 1}, norm_weight{kKdaHeadDim, 1};
  Halves f_b{kChannels * kKdaHeadDim, 0.1f};
  Halves conv{(1 + kSlots) * kConvLen * 3 * kChannels, 1};
  Floats state{(1 + kSlots) * kStateFloats, 0.1f};
};
Layer& layer() {
  static Layer made;
  return made;
}

// Bytes read and written per second by a copy of one half of the states onto the other.
double copy_rate() {
  constexpr std::int64_t kHalf = kSlots / 2 * kStateFloats;
  float* from = layer().state.data();
  const Summary time = time_host(1, 5, [&] {
#pragma omp parallel
    {
      const std::int64_t part = kHalf / omp_get_num_threads();
      const std::int64_t begin = part * omp_get_thread_num();
      std::memcpy(from + kHalf + begin, from + begin, static_cast<std::size_t>(part) * 4);
    }
  });
  return 2.0 * 4 * kHalf / (time.median * 1e-6);
}

void step(benchmark::State& state, const std::string& path, int tokens) {
  const std::int64_t requests = state.range(0);
  Layer& of = layer();
  KdaOptions options;
  options.heads = kHeads;
  options.gate_lower_bound = -5.0f;
  const std::int64_t row_stride = kda_row_stride(kHeads);
  options.policies = {{{requests, tokens}, row_stride, GateSchedule::kInline, {}}};
  const KdaWeights weights{view(of.conv_weight.data(), DType::kF32, {3 * kChannels, 1, kKdaConvWidth}),
                           {},
                           view(of.f_b.data(), DType::kBF16, {kChannels, kKdaHeadDim}),
                           view(of.a_log.data(), DType::kF32, {kHeads}),
                           view(of.dt_bias.data(), DType::kF32, {kChannels}),
                           view(of.norm_weight.data(), DType::kF32, {kKdaHeadDim})};
  KdaTestSwitches switches;
  switches.cpu_path = path.c_str();
  PreparedKda kda = make_prepared_kda(weights, options, switches);

  const std::int64_t rows = requests * tokens;
  Halves projected(rows * row_stride, 1);
  Halves out(rows * kChannels, 0);
  std::vector<std::int32_t> slots(kSlots);
  std::iota(slots.begin(), slots.end(), 1);
  std::vector<std::int32_t> accepted(static_cast<std::size_t>(requests), 1);
  KdaCall call;
  call.projected = view(projected.data(), DType::kBF16, {rows, row_stride});
  call.out = view(out.data(), DType::kBF16, {rows, kChannels});
  call.caches = {view(of.conv.data(), DType::kBF16, {1 + kSlots, kConvLen, 3 * kChannels}),
                 view(of.state.data(), DType::kF32, {1 + kSlots, kHeads, kKdaHeadDim, kKdaHeadDim}),
                 {}};
  if (tokens > 1) call.accepted = view(accepted.data(), DType::kI32, {requests});
  kda.prepare(call.caches);

  const double copy = copy_rate();
  std::int64_t turn = 0;
  for (auto _ : state) {
    call.slots = view(slots.data() + turn++ % (kSlots / rows) * rows, DType::kI32, {requests, tokens});
    kda.run(call);
  }
  const std::int64_t bytes = state.iterations() * requests * (1 + tokens) * kStateFloats * 4;
  state.SetBytesProcessed(bytes);
  state.counters["copy"] = copy;
  state.counters["share"] = benchmark::Counter(static_cast<double>(bytes) / copy, benchmark::Counter::kIsRate);
}

void add_cases() {
  for (const std::string& path : kda_cpu_paths()) {
    if (path.starts_with("reference")) continue;
    for (const int tokens : {1, 4, 8}) {
      const std::string name = (tokens == 1 ? "decode" : "verify q=" + std::to_string(tokens)) + "/" + path;
      benchmark::RegisterBenchmark(name.c_str(), step, path, tokens)
          ->ArgName("requests")
          ->Arg(1)
          ->Arg(8)
          ->Arg(32)
          ->UseRealTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
}

}  // namespace
}  // namespace twostep

int main(int argc, char** argv) {
  twostep::layer();  // written before anything is timed
  twostep::add_cases();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
