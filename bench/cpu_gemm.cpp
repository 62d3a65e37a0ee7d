// The CPU backend: each path, oneDNN, and the read bandwidth of this machine, on shapes of the drafter.
// Weights are rotated through more memory than the last-level cache holds. `read` streams the bytes of the weight
// and multiplies nothing: its bytes_per_second is what the others are a share of.
//   twostep_bench_cpu --benchmark_filter=7168x7168 --benchmark_repetitions=5
#include <benchmark/benchmark.h>
#include <omp.h>

#include <memory>
#include <string>
#include <vector>

#include "gemm/cpu_kernels.h"
#if TWOSTEP_ONEDNN
#include <dnnl.hpp>
#endif

namespace twostep {
namespace {

constexpr std::int64_t kRotated = std::int64_t{1} << 30;  // bytes of weights in turn

struct Shape {
  std::int64_t n, k;
};
constexpr Shape kShapes[] = {{2304, 1536}, {2112, 7168}, {7168, 1792}, {7168, 7168}, {7168, 35840}};
constexpr std::int64_t kRows[] = {1, 7, 8, 16, 32, 64};

// One buffer for all cases: two weights at least, and never a zero, which a page of the kernel's could stand for.
std::vector<std::uint16_t>& weights() {
  static std::vector<std::uint16_t> values = [] {
    std::vector<std::uint16_t> made(static_cast<std::size_t>(kRotated / 2));
    for (std::size_t i = 0; i < made.size(); ++i) made[i] = static_cast<std::uint16_t>(0x3f80 + i * 2654435761u % 97);
    return made;
  }();
  return values;
}

struct Case {
  std::int64_t m, n, k;
  std::vector<std::uint16_t> x, out;
  std::int64_t turn = 0;

  Case(const benchmark::State& state, Shape shape)
      : m(state.range(0)),
        n(shape.n),
        k(shape.k),
        x(static_cast<std::size_t>(m * k), 0x3f80),
        out(static_cast<std::size_t>(m * n)) {}
  std::uint16_t* next_weight() { return weights().data() + turn++ % (kRotated / (2 * n * k)) * n * k; }
  void report(benchmark::State& state) const { state.SetBytesProcessed(state.iterations() * 2 * n * k); }
};

void read_bytes(benchmark::State& state, Shape shape) {
  Case c(state, shape);
  for (auto _ : state) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(c.next_weight());
    std::uint64_t sum = 0;
#pragma omp parallel for simd reduction(+ : sum) schedule(static)
    for (std::int64_t i = 0; i < c.n * c.k / 4; ++i) sum += words[i];
    benchmark::DoNotOptimize(sum);
  }
  c.report(state);
}

void multiply(benchmark::State& state, const CpuPath* path, Shape shape) {
  Case c(state, shape);
  for (auto _ : state)
    cpu_gemm(*path, {c.x.data(), c.k, c.next_weight(), c.k, false, c.out.data(), c.n, c.m, c.n, c.k},
             omp_get_num_procs());
  c.report(state);
}

#if TWOSTEP_ONEDNN
void multiply_onednn(benchmark::State& state, Shape shape) {
  using dnnl::memory;
  Case c(state, shape);
  const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(cpu);
  const memory::desc x({c.m, c.k}, memory::data_type::bf16, memory::format_tag::ab);
  const memory::desc w({c.k, c.n}, memory::data_type::bf16, memory::format_tag::ba);
  const memory::desc out({c.m, c.n}, memory::data_type::bf16, memory::format_tag::ab);
  const dnnl::matmul matmul({{x, w, out}, cpu});
  memory weight(w, cpu, nullptr);
  const memory from(x, cpu, c.x.data()), to(out, cpu, c.out.data());
  for (auto _ : state) {
    weight.set_data_handle(c.next_weight());
    matmul.execute(stream, {{DNNL_ARG_SRC, from}, {DNNL_ARG_WEIGHTS, weight}, {DNNL_ARG_DST, to}});
    stream.wait();
  }
  c.report(state);
}
#endif

void add_cases() {
  for (const Shape shape : kShapes) {
    const std::string name = std::to_string(shape.n) + "x" + std::to_string(shape.k);
    const auto timed = [](benchmark::internal::Benchmark* made) {
      made->ArgName("m")->UseRealTime()->Unit(benchmark::kMicrosecond);
      return made;
    };
    timed(benchmark::RegisterBenchmark(("read/" + name).c_str(), read_bytes, shape))->Arg(1);
    for (const std::int64_t m : kRows) {
      for (const CpuPath& path : cpu_paths()) {
        if (path.serves_transposed && m > 1) continue;  // the plain path: once is enough to wait for
        timed(benchmark::RegisterBenchmark((path.name + ("/" + name)).c_str(), multiply, &path, shape))->Arg(m);
      }
#if TWOSTEP_ONEDNN
      timed(benchmark::RegisterBenchmark(("oneDNN/" + name).c_str(), multiply_onednn, shape))->Arg(m);
#endif
    }
  }
}

}  // namespace
}  // namespace twostep

int main(int argc, char** argv) {
  twostep::weights();  // written before anything is timed
  twostep::add_cases();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
