#include "measure/bench_kda_host.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "core/env.h"

namespace twostep {

namespace {

void stream_copy(float* to, const float* from, std::int64_t count) {
#ifdef __SSE2__
  for (std::int64_t i = 0; i < count; i += 4) _mm_stream_ps(to + i, _mm_load_ps(from + i));
  _mm_sfence();
#else
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
#endif
}

}  // namespace

HostRates host_rates() {
  constexpr std::int64_t kPiece = 3 << 18;  // floats of one thread and sample: 3 MB
  constexpr int kSamples = 100;
  const int threads = environment().threads > 0 ? environment().threads : omp_get_max_threads();
  const std::int64_t sample = kPiece * threads;
  const std::int64_t past = std::max<std::int64_t>(256 << 20, 4 * last_cache_bytes()) / 4;
  const std::int64_t samples = (past + sample - 1) / sample;
  const auto bytes = static_cast<std::size_t>(samples * sample) * sizeof(float);
  const std::unique_ptr<KdaMemory> memory = make_host_memory();
  auto* const a = static_cast<float*>(memory->allocate(bytes));
  auto* const b = static_cast<float*>(memory->allocate(bytes));
  std::memset(a, 0, bytes);
  std::memset(b, 0, bytes);
  const auto rate = [&](auto&& work) {
    std::int64_t next = 0;
    const auto once = [&] {
      const std::int64_t at = next++ % samples * sample;
#pragma omp parallel for schedule(static) num_threads(threads)
      for (int t = 0; t < threads; ++t) work(a + at + t * kPiece, b + at + t * kPiece);
    };
    return 2 * static_cast<double>(sample) * sizeof(float) / time_host(3, kSamples, once).p10;
  };
  HostRates rates;
  rates.copy = std::max(rate([](float* to, const float* from) { std::memcpy(to, from, kPiece * sizeof(float)); }),
                        rate([](float* to, const float* from) { stream_copy(to, from, kPiece); }));
  rates.in_place = rate([](float* x, const float*) {
    for (std::int64_t i = 0; i < kPiece; ++i) x[i] = x[i] * 0.5f + 1.0f;
  });
  return rates;
}

KdaRow bench_kda_host(const KdaBenchOptions& options, std::int64_t requests, const HostRates& rates) {
  const std::unique_ptr<KdaMemory> memory = make_host_memory();
  KdaLayers layers(*memory, options, {requests}, last_cache_bytes());
  layers.prepare();
  KdaRow row = layers.row(requests);
  int launch = 0;
  row.time = time_host(3, std::max(30, row.ring.sets), [&] { layers.run(requests, launch++); });
  row.rate = rates.best();
  row.copy_rate = rates.copy;
  return row;
}

}  // namespace twostep
