#include "measure/values.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/bf16.h"
#include "core/hash.h"

namespace twostep {
namespace {

float value_of(Data data, std::uint64_t bits, float scale) {
  if (data == Data::kIntegers) return static_cast<float>(static_cast<int>((bits >> 32) % 9) - 4);
  const int sum = static_cast<int>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
  return static_cast<float>(sum - 131070) * (1.0f / 37837.23f) * scale;
}

class HostCase final : public ValueCase {
 public:
  HostCase(std::int64_t n, std::int64_t k, int max_rows) : n_(n), k_(k), max_rows_(max_rows) {
    weight_bits_.resize(static_cast<std::size_t>(n * k));
    weight_ = TensorView::matrix(weight_bits_.data(), n, k);
    constexpr double kMostProducts = 4e9;  // about two seconds of one core
    const double per_column = static_cast<double>(k) * max_rows;
    const auto affordable = static_cast<std::int64_t>(std::max(64.0, kMostProducts / per_column));
    const std::int64_t count = std::min(n, affordable);
    for (std::int64_t c = 0; c < count; ++c) columns_.push_back(count == 1 ? 0 : c * (n - 1) / (count - 1));
  }

  void set_data(Data data, std::uint64_t seed) override {
    data_ = data;
    x_base_ = operand_base("x", seed);
    fill_host(weight_bits_.data(), n_, k_, k_, operand_base("weight", seed), data, weight_scale(k_));
    std::vector<std::uint16_t> x(static_cast<std::size_t>(max_rows_ * k_));
    fill_host(x.data(), max_rows_, k_, k_, x_base_, data, x_scale());
    std::vector<double> wide(x.size());
    std::transform(x.begin(), x.end(), wide.begin(), [](std::uint16_t bits) { return double{bf16_to_float(bits)}; });
    sum_.assign(columns_.size() * static_cast<std::size_t>(max_rows_), 0.0);
    magnitude_.assign(sum_.size(), 0.0);
    const auto count = static_cast<std::int64_t>(columns_.size());
#pragma omp parallel for schedule(static)
    for (std::int64_t c = 0; c < count; ++c) {
      const std::uint16_t* row = weight_bits_.data() + columns_[static_cast<std::size_t>(c)] * k_;
      for (int i = 0; i < max_rows_; ++i) {
        double sum = 0, magnitude = 0;
        for (std::int64_t j = 0; j < k_; ++j) {
          const double product = double{bf16_to_float(row[j])} * wide[static_cast<std::size_t>(i * k_ + j)];
          sum += product;
          magnitude += std::fabs(product);
        }
        sum_[static_cast<std::size_t>(c * max_rows_ + i)] = sum;
        magnitude_[static_cast<std::size_t>(c * max_rows_ + i)] = magnitude;
      }
    }
  }

  const TensorView& weight() const override { return weight_; }

  CaseRun run(DraftGemm& plan, int m, const Placement& at) override {
    std::vector<std::uint16_t> x(static_cast<std::size_t>(at.x_elements(m)), kPoison);
    std::vector<std::uint16_t> out(static_cast<std::size_t>(at.out_elements(m)), kPoison);
    fill_host(x.data() + at.x_offset, m, k_, at.x_stride, x_base_, data_, x_scale());
    const auto x_view = TensorView::matrix(x.data() + at.x_offset, m, k_, {}, at.x_stride);
    const auto out_view = TensorView::matrix(out.data() + at.out_offset, m, n_, {}, at.out_stride);
    CaseRun result;
    result.said = plan.kind(x_view, out_view);
    const auto before = plan.stats().cpu_runs;
    plan.run(x_view, out_view);
    result.ran = plan.stats().cpu_runs == before + 1 ? Kind::kCpu : Kind::kCublas;
    result.errors = judge(out, m, at);
    return result;
  }

 private:
  ValueErrors judge(const std::vector<std::uint16_t>& out, int m, const Placement& at) const {
    ValueErrors errors;
    for (std::int64_t e = 0; e < static_cast<std::int64_t>(out.size()); ++e) {
      const std::int64_t in = e - at.out_offset;
      const bool inside = in >= 0 && in / at.out_stride < m && in % at.out_stride < n_;
      const std::uint16_t bits = out[static_cast<std::size_t>(e)];
      if (!inside) errors.outside += bits != kPoison;
      else errors.nans += std::isnan(bf16_to_float(bits));
    }
    const double slack = (static_cast<double>(k_) / 8 + 64) * 0x1p-23;
    double difference = 0, norm = 0;
    for (std::size_t c = 0; c < columns_.size(); ++c)
      for (int i = 0; i < m; ++i) {
        const std::size_t ref = c * static_cast<std::size_t>(max_rows_) + static_cast<std::size_t>(i);
        const std::uint16_t bits = out[static_cast<std::size_t>(at.out_offset + i * at.out_stride + columns_[c])];
        const double r = sum_[ref];
        const double value = bf16_to_float(bits);
        errors.wrong_bits += bits != double_to_bf16(r) && !(value == 0 && r == 0);
        ++errors.elements;
        norm += r * r;
        if (std::isnan(value)) continue;  // counted above
        const double gap = std::fabs(value - r);
        difference += gap * gap;
        if (gap > 0) errors.worst = std::max(errors.worst, gap / (0x1p-8 * std::fabs(r) + slack * magnitude_[ref]));
      }
    errors.norm = norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
    return errors;
  }

  std::int64_t n_, k_;
  int max_rows_;
  Data data_ = Data::kNormal;
  std::uint64_t x_base_ = 0;
  std::vector<std::uint16_t> weight_bits_;
  TensorView weight_;
  std::vector<std::int64_t> columns_;    // compared
  std::vector<double> sum_, magnitude_;  // [columns, max_rows]
};

}  // namespace

const char* data_name(Data data) {
  switch (data) {
    case Data::kNormal: return "normal";
    case Data::kIntegers: return "integers";
  }
  return "unknown";
}

std::uint64_t operand_base(const char* operand, std::uint64_t seed) {
  return fnv1a64(operand) + seed * 0xd1342543de82ef95ull;
}

float weight_scale(std::int64_t k) { return 1.0f / std::sqrt(static_cast<float>(std::max<std::int64_t>(k, 1))); }

void fill_host(std::uint16_t* out, std::int64_t rows, std::int64_t cols, std::int64_t stride, std::uint64_t base,
               Data data, float scale) {
// A row alone is not worth a team: records are thousands of short ones.
#pragma omp parallel for schedule(static) if (rows > 1)
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < cols; ++c) {
      const auto i = static_cast<std::uint64_t>(r * cols + c + 1);
      out[r * stride + c] = float_to_bf16(value_of(data, mix64(base + i * 0x9e3779b97f4a7c15ull), scale));
    }
}

std::string broken_rule(const ValueErrors& e, Data data) {
  // With few outputs the norm is one rounding's luck: 2.0e-3 is a statement about many.
  constexpr std::uint64_t kEnoughForNorm = 2048;
  if (e.outside > 0) return fmt::format("{} elements beside the result were written", e.outside);
  if (e.nans > 0) return fmt::format("{} NaN in the result", e.nans);
  if (data == Data::kIntegers)
    return e.wrong_bits > 0 ? fmt::format("1.4 (c): {} of {} integers are not exact", e.wrong_bits, e.elements) : "";
  if (!(e.worst <= 1.0)) return fmt::format("1.4 (a): {:.3g} times the bound of an element", e.worst);
  if (e.elements >= kEnoughForNorm && !(e.norm <= 2.0e-3))
    return fmt::format("1.4 (b): relative norm {:.3g} above 2.0e-3", e.norm);
  return {};
}

Placement packed_placement(std::int64_t n, std::int64_t k) { return {k, 0, n, 0}; }

std::unique_ptr<ValueCase> make_host_case(std::int64_t n, std::int64_t k, int max_rows) {
  return std::make_unique<HostCase>(n, k, max_rows);
}

}  // namespace twostep
