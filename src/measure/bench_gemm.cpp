#include "measure/bench_gemm.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "core/check.h"
#include "gemm/cublas.h"
#include "gemm/warp.h"
#include "measure/table_file.h"

namespace twostep {
namespace {

constexpr std::uint64_t kSeed = 1;

// Fills the disk and memory cache of the jit room. A failure shows again, with its sentence, when the kernel is
// loaded.
void compile_all(const std::vector<Candidate>& candidates, int m, std::int64_t n, std::int64_t k, int arch) {
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < candidates.size(); i = next++) {
      try {
        (void)build_cubin(compile_request(warp_kernel_text(m, n, k, candidates[i].tactic), arch));
      } catch (const Error&) {
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1u, std::thread::hardware_concurrency()); ++t) threads.emplace_back(work);
  for (auto& thread : threads) thread.join();
}

}  // namespace

GemmBench::GemmBench(const MeasureDevice& device, std::int64_t n, std::int64_t k, int max_rows, const Options& options)
    : device_(device),
      n_(n),
      k_(k),
      max_rows_(max_rows),
      options_(options),
      ring_(plan_ring(2 * n * k)),
      values_(device, n, k, max_rows),
      more_weights_(static_cast<std::size_t>(ring_.weights - 1) * static_cast<std::size_t>(n * k) * 2),
      x_(static_cast<std::size_t>(ring_.weights * max_rows * k) * 2),
      out_(static_cast<std::size_t>(ring_.weights * max_rows * n) * 2),
      timer_(device, ring_.launches) {
  if (n % 8 != 0 || k % 8 != 0)
    fail(StatusCode::kUnsupported, "measure.bench_gemm", "shape", fmt::format("({}, {})", n, k), "multiples of 8",
         "such shapes are served by cuBLAS alone");
  values_.set_data(Data::kNormal, kSeed);
  weights_.push_back(values_.weight());
  for (int i = 1; i < ring_.weights; ++i) {
    auto* data = static_cast<std::uint16_t*>(more_weights_.data()) + (i - 1) * n * k;
    device.fill(data, n, k, k, operand_base("weight", kSeed + static_cast<std::uint64_t>(i)), Data::kNormal,
                weight_scale(k));
    weights_.push_back(TensorView::matrix(data, n, k, device.device()));
  }
  device.fill(x_.data(), ring_.weights * max_rows, k, k, operand_base("x", kSeed), Data::kNormal, x_scale());
  device.synchronize();
  for (const TensorView& weight : weights_) pieces_.push_back({weight.data, 2 * n * k});
}

// A plan for each weight: one plan that rotates would count rebinds, and its launches would not load early.
void GemmBench::prepare(std::vector<DraftGemm>& plans, int rows, const Options& options) const {
  if (plans.empty())
    for (const TensorView& weight : weights_) plans.emplace_back(weight, options);
  for (DraftGemm& plan : plans) plan.prepare(rows, device_.stream());
}

template <class Product>
ChainTimer::Enqueue GemmBench::rotate(int rows, Product product) const {
  return [this, rows, product](int launch) {
    const int i = launch % ring_.weights;
    const auto x =
        TensorView::matrix(static_cast<std::uint16_t*>(x_.data()) + i * max_rows_ * k_, rows, k_, device_.device());
    const auto out =
        TensorView::matrix(static_cast<std::uint16_t*>(out_.data()) + i * max_rows_ * n_, rows, n_, device_.device());
    product(static_cast<std::size_t>(i), x, out, device_.stream());
  };
}

BenchRow GemmBench::measure(int rows, bool isolated, Replays replays) {
  prepare(ours_, rows, options_);
  DraftGemm& first = ours_.front();
  BenchRow row;
  row.n = n_;
  row.k = k_;
  row.rows = rows;
  row.ring = ring_;
  row.strict = options_.strict;
  row.kind = first.kind(rows);
  row.why_code = why_name(first.why_code(rows));
  row.why = first.why(rows);
  if (row.kind == Kind::kWarp) {
    row.tactic = to_string(first.tactic(rows));
    const std::string bucket = fmt::format("-m{}-", bucket_of(rows));
    for (const CompileKey& key : first.keys())
      if (key.name.find(bucket) != std::string::npos) row.key = key.hash;
  }
  row.values = values_.run(first, rows, packed_placement(n_, k_)).errors;
  if (auto rule = broken_rule(row.values, Data::kNormal); !rule.empty())
    fail(StatusCode::kInternal, "measure.bench_gemm", to_string(weights_.front()), rule, "values within 1.4",
         "run twostep check gemm");

  if (cublas_status().ok()) {
    Options fallback;
    fallback.warp = false;
    prepare(cublas_, rows, fallback);
    row.baseline = "cuBLASLt " + cublas_version();
  }
  const auto on = [&](std::vector<DraftGemm>& plans) {
    return rotate(rows, [&plans](std::size_t i, const TensorView& x, const TensorView& out, Stream stream) {
      plans[i].run(x, out, stream);
    });
  };
  if (early_limit_.kept == 0) early_limit_ = early_read_limit(timer_, pieces_, replays);
  Chain early{"early", timer_.early(on(ours_), replays), {}, early_limit_};
  if (!cublas_.empty()) early.baseline = timer_.early(on(cublas_), replays);
  row.chains.push_back(early);
  if (!isolated) return row;
  if (isolated_limit_.kept == 0) isolated_limit_ = isolated_read_limit(timer_, pieces_, replays);
  Chain alone{"isolated", timer_.isolated(on(ours_), replays), {}, isolated_limit_};
  if (!cublas_.empty()) alone.baseline = timer_.isolated(on(cublas_), replays);
  row.chains.push_back(alone);
  return row;
}

std::vector<Candidate> GemmBench::sweep(int rows, int count, int finalists) {
  constexpr Replays kScreening{1, 5};
  std::vector<Candidate> all;
  for (const Tactic& tactic : sweep_candidates(rows, n_, k_, device_.facts(), count)) {
    Candidate candidate;
    candidate.tactic = tactic;
    candidate.model_us = model_us(tactic, rows, n_, k_, device_.facts());
    all.push_back(candidate);
  }
  compile_all(all, rows, n_, k_, device_.facts().arch);

  const auto time = [&](const Tactic& tactic, Replays replays) {
    std::vector<PreparedWarpSplitK> plans;
    for (const TensorView& weight : weights_) plans.emplace_back(weight, std::map<int, Tactic>{{rows, tactic}});
    const ValueErrors errors = values_.judge(
        [&](const TensorView& x, const TensorView& out, Stream stream) { plans.front().run(x, out, stream); }, rows,
        packed_placement(n_, k_));
    if (auto rule = broken_rule(errors, Data::kNormal); !rule.empty())
      fail(StatusCode::kInternal, "measure.sweep", "values", rule, "values within 1.4");
    return timer_.early(rotate(rows, [&plans](std::size_t i, const TensorView& x, const TensorView& out,
                                              Stream stream) { plans[i].run(x, out, stream); }),
                        replays);
  };
  for (Candidate& candidate : all) {
    try {
      candidate.screening = time(candidate.tactic, kScreening);
    } catch (const Error& error) {
      device_.synchronize();  // throws where the context is lost: no later time would be true
      candidate.failure = error.what();
    }
  }
  const auto rank = [](const Candidate& a, const Candidate& b) {
    if (a.failure.empty() != b.failure.empty()) return a.failure.empty();
    if ((a.full.kept > 0) != (b.full.kept > 0)) return a.full.kept > 0;
    return a.full.kept > 0 ? a.full.median < b.full.median : a.screening.median < b.screening.median;
  };
  std::stable_sort(all.begin(), all.end(), rank);
  for (int i = 0; i < finalists && i < static_cast<int>(all.size()); ++i) {
    Candidate& candidate = all[static_cast<std::size_t>(i)];
    if (candidate.failure.empty()) candidate.full = time(candidate.tactic, {});
  }
  std::stable_sort(all.begin(), all.end(), rank);
  return all;
}

void GemmBench::describe_under_load(Machine& machine) const {
  constexpr int kPasses = 20;
  for (int pass = 0; pass < kPasses; ++pass)
    for (const Piece& piece : pieces_) device_.read(kReaders[1], false, false, piece.data, piece.bytes);
  device_.describe(machine);
  device_.synchronize();
}

}  // namespace twostep
