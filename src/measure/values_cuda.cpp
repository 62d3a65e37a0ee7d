#include "measure/values_cuda.h"

namespace twostep {
namespace {

void grow(DeviceBuffer& buffer, std::int64_t elements) {
  const auto bytes = static_cast<std::size_t>(elements) * 2;
  if (buffer.bytes() < bytes) buffer = DeviceBuffer(bytes);
}

void poison(const DeviceBuffer& buffer, std::int64_t elements, Stream stream) {
  static_assert(kPoison == 0xffff);
  TWOSTEP_CUDA_CHECK(cuMemsetD8Async(buffer.address(), 0xff, static_cast<std::size_t>(elements) * 2,
                                     static_cast<CUstream>(stream.handle)),
                     "measure.poison");
}

}  // namespace

CudaCase::CudaCase(const MeasureDevice& device, std::int64_t n, std::int64_t k, int max_rows)
    : device_(device),
      n_(n),
      k_(k),
      max_rows_(max_rows),
      weight_memory_(static_cast<std::size_t>(n * k) * 2),
      sum_(static_cast<std::size_t>(max_rows * n) * sizeof(double)),
      magnitude_(sum_.bytes()),
      weight_(TensorView::matrix(weight_memory_.data(), n, k, device.device())) {}

void CudaCase::set_data(Data data, std::uint64_t seed) {
  data_ = data;
  x_base_ = operand_base("x", seed);
  device_.fill(weight_.data, n_, k_, k_, operand_base("weight", seed), data, weight_scale(k_));
  grow(x_, max_rows_ * k_);
  device_.fill(x_.data(), max_rows_, k_, k_, x_base_, data, x_scale());
  device_.reference(x_.data(), k_, weight_.data, k_, max_rows_, n_, k_, static_cast<double*>(sum_.data()),
                    static_cast<double*>(magnitude_.data()));
  device_.synchronize();
}

CaseRun CudaCase::run(DraftGemm& plan, int m, const Placement& placement) {
  CaseRun result;
  const Stats before = plan.stats();
  result.errors = judge(
      [&](const TensorView& x, const TensorView& out, Stream stream) {
        result.said = plan.kind(x, out);
        plan.run(x, out, stream);
      },
      m, placement);
  result.ran = plan.stats().warp_runs == before.warp_runs + 1 ? Kind::kWarp : Kind::kCublas;
  return result;
}

ValueErrors CudaCase::judge(const Product& product, int m, const Placement& at) {
  grow(x_, at.x_elements(m));
  grow(out_, at.out_elements(m));
  const Stream stream = device_.stream();
  poison(x_, at.x_elements(m), stream);
  poison(out_, at.out_elements(m), stream);
  auto* x = static_cast<std::uint16_t*>(x_.data()) + at.x_offset;
  auto* out = static_cast<std::uint16_t*>(out_.data()) + at.out_offset;
  device_.fill(x, m, k_, at.x_stride, x_base_, data_, x_scale());
  product(TensorView::matrix(x, m, k_, device_.device(), at.x_stride),
          TensorView::matrix(out, m, n_, device_.device(), at.out_stride), stream);
  return device_.compare(out_.data(), at.out_elements(m), at.out_offset, at.out_stride, m, n_, k_,
                         static_cast<const double*>(sum_.data()), static_cast<const double*>(magnitude_.data()));
}

}  // namespace twostep
