#include "measure/bench_gemm.h"

#include <fmt/format.h>

#include "core/check.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "measure.bench_gemm";
constexpr std::uint64_t kSeed = 1;

void refuse_wrong(const ValueErrors& errors, const std::string& what) {
  if (auto rule = broken_rule(errors, Data::kNormal); !rule.empty())
    fail(StatusCode::kInternal, kPlace, what, rule, "values within 1.4", "run twostep check gemm");
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
      x_(static_cast<std::size_t>(max_rows * k) * 2),
      out_(static_cast<std::size_t>(ring_.weights * max_rows * n) * 2),
      timer_(device, ring_.launches) {
  if (n % 8 != 0 || k % 8 != 0)
    fail(StatusCode::kUnsupported, kPlace, "shape", fmt::format("({}, {})", n, k), "multiples of 8",
         "such shapes are served by cuBLAS alone");
  values_.set_data(Data::kNormal, kSeed);
  weights_.push_back(check_weight(values_.weight(), kPlace));
  for (int i = 1; i < ring_.weights; ++i) {
    auto* data = static_cast<std::uint16_t*>(more_weights_.data()) + (i - 1) * n * k;
    device.fill(data, n, k, k, operand_base("weight", kSeed + static_cast<std::uint64_t>(i)), Data::kNormal,
                weight_scale(k));
    weights_.push_back(check_weight(TensorView::matrix(data, n, k, device.device()), kPlace));
  }
  device.fill(x_.data(), max_rows, k, k, operand_base("x", kSeed), Data::kNormal, x_scale());
  device.synchronize();
  for (const Weight& weight : weights_) pieces_.push_back({weight.view.data, 2 * n * k});
}

template <class Product>
ChainTimer::Enqueue GemmBench::rotate(int rows, Product product) const {
  return [this, rows, product](int launch) {
    const int i = launch % ring_.weights;
    const auto x = TensorView::matrix(x_.data(), rows, k_, device_.device());
    const auto out =
        TensorView::matrix(static_cast<std::uint16_t*>(out_.data()) + i * max_rows_ * n_, rows, n_, device_.device());
    product(static_cast<std::size_t>(i), x, out, device_.stream());
  };
}

ChainTimer::Enqueue GemmBench::rotate_cublas(int rows) {
  const Weight& first = weights_.front();
  if (!cublas_) cublas_.emplace(device_.ordinal(), first, Options{}.workspace_limit);
  cublas_->prepare(rows, first);
  cublas_->make_workspace(device_.stream());
  if (!cublas_->has_workspace(device_.stream(), true))
    fail(StatusCode::kOutOfMemory, kPlace, "workspace", "none", "memory for cuBLAS as a plan has it");
  return rotate(rows, [this](std::size_t i, const TensorView& x, const TensorView& out, Stream stream) {
    cublas_->run(weights_[i], x, out, stream, true, true, counters_);
  });
}

Summary GemmBench::tactic(const Tactic& tactic, int rows, Replays replays) {
  // A plan for each weight: a plan that is rebound does not load early.
  std::vector<PreparedWarpSplitK> plans;
  for (const Weight& weight : weights_) plans.emplace_back(weight.view, std::map<int, Tactic>{{rows, tactic}});
  const auto product = [&](const TensorView& x, const TensorView& out, Stream stream) {
    plans.front().run(x, out, stream);
  };
  refuse_wrong(values_.judge(product, rows, packed_placement(n_, k_)), to_string(tactic));
  return timer_.early(rotate(rows, [&](std::size_t i, const TensorView& x, const TensorView& out,
                                       Stream stream) { plans[i].run(x, out, stream); }),
                      replays);
}

Summary GemmBench::cublas(int rows, Replays replays) { return timer_.early(rotate_cublas(rows), replays); }

Summary GemmBench::limit(Replays replays) {
  if (early_limit_.kept == 0) early_limit_ = early_read_limit(timer_, pieces_, replays);
  return early_limit_;
}

BenchRow GemmBench::measure(int rows, bool isolated, Replays replays) {
  if (ours_.empty())
    for (const Weight& weight : weights_) ours_.emplace_back(weight.view, options_);
  for (DraftGemm& plan : ours_) plan.prepare(rows, device_.stream());
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
  refuse_wrong(row.values, to_string(weights_.front().view));

  const ChainTimer::Enqueue ours = rotate(rows, [this](std::size_t i, const TensorView& x, const TensorView& out,
                                                       Stream stream) { ours_[i].run(x, out, stream); });
  ChainTimer::Enqueue baseline;  // none without cuBLAS
  if (cublas_status().ok()) {
    row.baseline = "cuBLASLt " + cublas_version();
    baseline = rotate_cublas(rows);
  }
  const Summary early_limit = limit(replays);
  Chain early{"early", timer_.early(ours, replays), {}, early_limit};
  if (baseline) early.baseline = timer_.early(baseline, replays);
  row.chains.push_back(early);
  if (!isolated) return row;
  if (isolated_limit_.kept == 0) isolated_limit_ = isolated_read_limit(timer_, pieces_, replays);
  Chain alone{"isolated", timer_.isolated(ours, replays), {}, isolated_limit_};
  if (baseline) alone.baseline = timer_.isolated(baseline, replays);
  row.chains.push_back(alone);
  return row;
}

void GemmBench::describe_under_load(Machine& machine) const {
  constexpr int kPasses = 20;
  for (int pass = 0; pass < kPasses; ++pass)
    for (const Piece& piece : pieces_) device_.read(kReaders[1], false, false, piece.data, piece.bytes);
  device_.describe(machine);
  device_.synchronize();
}

}  // namespace twostep
