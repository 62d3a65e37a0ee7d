// A GPU made ready for measuring: its context is current while this lives, and the kernels of kernels/measure are
// loaded. Everything is enqueued on one stream.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "cuda/launch.h"
#include "cuda/memory.h"
#include "jit/kernel_cache.h"
#include "measure/kernels.h"
#include "measure/row.h"

namespace twostep {

// GPU name, driver, NVRTC, and the clocks of this moment.
void describe_gpu(int ordinal, Machine& machine);

class MeasureDevice {
 public:
  // Throws kUnavailable, kWrongDevice, kUnsupported (an architecture without kernels of ours), kCompileFailed.
  explicit MeasureDevice(int ordinal);

  const DeviceFacts& facts() const { return facts_; }
  int ordinal() const { return ordinal_; }
  Device device() const { return Device::cuda(ordinal_); }
  Stream stream() const { return stream_.view(); }
  void synchronize() const { stream_.synchronize(); }

  // As fill_host, on device memory.
  void fill(void* out, std::int64_t rows, std::int64_t cols, std::int64_t stride, std::uint64_t base, Data data,
            float scale) const;
  // FP64 sums and sums of magnitudes [m, n], packed. Strides in elements.
  void reference(const void* x, std::int64_t x_stride, const void* weight, std::int64_t weight_stride, std::int64_t m,
                 std::int64_t n, std::int64_t k, double* sum, double* magnitude) const;
  // Judges `total` elements at `buffer`, as kernels/measure/compare.cuh says. Waits for the stream.
  ValueErrors compare(const void* buffer, std::int64_t total, std::int64_t offset, std::int64_t stride, std::int64_t m,
                      std::int64_t n, std::int64_t k, const double* sum, const double* magnitude) const;
  // An ordinary small kernel of others.
  void plain() const;
  // Streams bytes once. `early` readers after the first of a chain are launched `programmatic`.
  void read(const Reader& reader, bool early, bool programmatic, const void* data, std::int64_t bytes) const;
  bool fits(const Reader& reader) const { return reader.stages * kReaderPiece + 1024 <= facts_.smem_per_block; }

  void describe(Machine& machine) const { describe_gpu(ordinal_, machine); }

 private:
  using Kernel = std::shared_ptr<const CompiledKernel>;

  ContextGuard guard_;
  int ordinal_;
  DeviceFacts facts_;
  OwnedStream stream_;
  DeviceBuffer scratch_;  // of plain, the readers' sink, and what compare found
  Kernel fill_, reference_, compare_, plain_;
  std::map<std::pair<int, bool>, Kernel> readers_;  // by stages and early
};

}  // namespace twostep
