// ValueCase on a GPU: operands, reference and judgement stay in device memory.
#pragma once

#include <functional>

#include "measure/device.h"

namespace twostep {

class CudaCase final : public ValueCase {
 public:
  // `device` must outlive the case. Throws kOutOfMemory.
  CudaCase(const MeasureDevice& device, std::int64_t n, std::int64_t k, int max_rows);

  void set_data(Data data, std::uint64_t seed) override;
  const TensorView& weight() const override { return weight_; }
  CaseRun run(DraftGemm& plan, int m, const Placement& placement) override;

  // The same for anything that computes the product of x and the weight.
  using Product = std::function<void(const TensorView& x, const TensorView& out, Stream stream)>;
  ValueErrors judge(const Product& product, int m, const Placement& placement);

 private:
  const MeasureDevice& device_;
  std::int64_t n_, k_;
  int max_rows_;
  Data data_ = Data::kNormal;
  std::uint64_t x_base_ = 0;
  DeviceBuffer weight_memory_, x_, out_;  // x_ and out_ grow as placements ask
  DeviceBuffer sum_, magnitude_;          // [max_rows, n] FP64
  TensorView weight_;
};

}  // namespace twostep
