// TensorView: a view of memory, which owns nothing; and the device that the memory is on.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace twostep {

enum class DType : std::uint8_t { kBF16, kF16, kF32, kF64, kI32, kI64, kU8 };

std::size_t dtype_size(DType dtype);  // bytes per element
const char* dtype_name(DType dtype);  // "BF16", as safetensors spells it

struct Device {
  enum class Type : std::uint8_t { kCpu, kCuda };
  Type type = Type::kCpu;
  int index = 0;  // CUDA ordinal; 0 on the CPU

  static Device cpu() { return {}; }
  static Device cuda(int index) { return {Type::kCuda, index}; }
  bool is_cuda() const { return type == Type::kCuda; }
  friend bool operator==(const Device&, const Device&) = default;
};
std::string to_string(Device device);  // "cpu", "cuda:0"

// A CUstream / cudaStream_t of the operands' device; null is the legacy default stream. Ignored on the CPU.
struct Stream {
  void* handle = nullptr;
};

// A view of at most four dimensions. Strides are in elements, 64-bit, and may be any value; each function
// says which it takes. The stride of a dimension of size 1 is ignored everywhere. The memory is the caller's
// and must outlive the work that was given the view.
struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kBF16;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};
  Device device{};

  // [rows, cols], columns contiguous, rows `row_stride` elements apart (0: packed, row_stride = cols).
  static TensorView matrix(void* data, std::int64_t rows, std::int64_t cols, Device device = {},
                           std::int64_t row_stride = 0, DType dtype = DType::kBF16) {
    TensorView v;
    v.data = data;
    v.dtype = dtype;
    v.rank = 2;
    v.shape = {rows, cols, 0, 0};
    v.stride = {row_stride ? row_stride : cols, 1, 0, 0};
    v.device = device;
    return v;
  }

  // Dense, the last dimension contiguous; at most kMaxRank sizes.
  static TensorView dense(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {}) {
    TensorView v;
    v.data = data;
    v.dtype = dtype;
    v.device = device;
    for (const std::int64_t size : shape) v.shape[static_cast<std::size_t>(v.rank++)] = size;
    std::int64_t stride = 1;
    for (int i = v.rank; i-- > 0; stride *= v.shape[static_cast<std::size_t>(i)])
      v.stride[static_cast<std::size_t>(i)] = stride;
    return v;
  }
};
std::string to_string(const TensorView& view);  // "BF16[8, 7168] strides (7168, 1) on cuda:0"

// What a choice of kernel needs to know of a GPU. Plain data: choosers never call the driver.
struct DeviceFacts {
  int arch = 0;  // 10 * major + minor: 90 is H100 and H200
  int sm_count = 0;
  int smem_per_block = 0;  // bytes one CTA may ask for (opt-in limit)
  int smem_per_sm = 0;     // bytes of one SM
  std::string name;        // "NVIDIA H200"; picks the tactics table
  friend bool operator==(const DeviceFacts&, const DeviceFacts&) = default;
};

}  // namespace twostep
