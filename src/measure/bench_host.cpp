#include "measure/bench_host.h"

#include <algorithm>
#include <cstddef>

#include "core/check.h"

namespace twostep {

HostStream::HostStream() {
  words_.assign(static_cast<std::size_t>(std::max<std::int64_t>(512 << 20, 4 * last_cache_bytes())) / 8, 1);
}

void HostStream::read() const {
  std::uint64_t sum = 0;
  const std::uint64_t* words = words_.data();
  const std::size_t count = words_.size();
#pragma omp parallel for simd reduction(+ : sum) schedule(static)
  for (std::size_t i = 0; i < count; ++i) sum += words[i];
  if (sum != count)
    fail(StatusCode::kInternal, "measure.HostStream", "sum", std::to_string(sum), std::to_string(count));
}

double HostStream::rate() const {
  return static_cast<double>(words_.size() * 8) / time_host(1, 7, [&] { read(); }).median;
}

BenchRow bench_host(std::int64_t n, std::int64_t k, int rows, double read_rate) {
  const auto values = make_host_case(n, k, rows);
  values->set_data(Data::kNormal, 1);
  Ring ring = plan_ring(2 * n * k);
  // Copies beside the case's own weight: one plan each, as on a GPU.
  const auto elements = static_cast<std::size_t>(n * k);
  std::vector<std::vector<std::uint16_t>> copies;
  std::vector<DraftGemm> plans;
  for (int i = 0; i < ring.weights; ++i) {
    const auto* from = static_cast<const std::uint16_t*>(values->weight().data);
    copies.emplace_back(from, from + elements);
    plans.emplace_back(TensorView::matrix(copies.back().data(), n, k));
    plans.back().prepare(rows);
  }
  BenchRow row;
  row.n = n;
  row.k = k;
  row.rows = rows;
  row.kind = plans.front().kind(rows);
  row.why = plans.front().why(rows);
  row.why_code = why_name(plans.front().why_code(rows));
  row.values = values->run(plans.front(), rows, packed_placement(n, k)).errors;
  if (auto rule = broken_rule(row.values, Data::kNormal); !rule.empty())
    fail(StatusCode::kInternal, "measure.bench_host", to_string(values->weight()), rule, "values within 1.4",
         "run twostep check gemm");

  std::vector<std::uint16_t> x(static_cast<std::size_t>(rows * k));
  std::vector<std::uint16_t> out(static_cast<std::size_t>(rows * n));
  fill_host(x.data(), rows, k, k, operand_base("x", 1), Data::kNormal, x_scale());
  const auto x_view = TensorView::matrix(x.data(), rows, k);
  const auto out_view = TensorView::matrix(out.data(), rows, n);
  ring.launches = 1;  // each run is timed alone
  row.ring = ring;
  std::size_t next = 0;
  Chain chain;
  chain.name = "host";
  chain.ours = time_host(3, std::max(15, static_cast<int>(plans.size())), [&] {
    plans[next].run(x_view, out_view);
    next = (next + 1) % plans.size();
  });
  chain.limit.median = chain.limit.p10 = chain.limit.p90 = row.bytes() / read_rate;
  chain.limit.kept = 1;
  row.chains.push_back(chain);
  return row;
}

}  // namespace twostep
