#include "twostep/tensor.h"

#include <fmt/format.h>

namespace twostep {

std::size_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kU8: return 1;
    case DType::kBF16:
    case DType::kF16: return 2;
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kF64:
    case DType::kI64: return 8;
  }
  return 0;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return "BF16";
    case DType::kF16: return "F16";
    case DType::kF32: return "F32";
    case DType::kF64: return "F64";
    case DType::kI32: return "I32";
    case DType::kI64: return "I64";
    case DType::kU8: return "U8";
  }
  return "unknown";
}

std::string to_string(Device device) { return device.is_cuda() ? fmt::format("cuda:{}", device.index) : "cpu"; }

std::string to_string(const TensorView& view) {
  std::string shape;
  std::string stride;
  for (int d = 0; d < view.rank && d < TensorView::kMaxRank; ++d) {
    const auto i = static_cast<std::size_t>(d);
    shape.append(d ? ", " : "").append(std::to_string(view.shape[i]));
    stride.append(d ? ", " : "").append(std::to_string(view.stride[i]));
  }
  return fmt::format("{}[{}] strides ({}) on {}", dtype_name(view.dtype), shape, stride, to_string(view.device));
}

}  // namespace twostep
