#include "measure/device.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/check.h"
#include "jit/nvrtc.h"
#include "measure/nvml.h"

namespace twostep {
namespace {

constexpr std::uint32_t kBlock = 256;
constexpr std::uint32_t kPlainBlocks = 8;  // 8 KB
constexpr std::size_t kSinkOffset = kPlainBlocks * kBlock * 4;
constexpr std::size_t kFoundOffset = kSinkOffset + 256;

struct Found {  // of kernels/measure/compare.cuh
  std::uint64_t worst;
  double difference;
  double norm;
  std::uint64_t wrong;
  std::uint64_t nans;
  std::uint64_t outside;
};

template <class... Arguments>
void enqueue(const Launch& what, Stream stream, Arguments... arguments) {
  void* addresses[] = {&arguments...};
  launch(what, stream, addresses);
}

std::string arch_of(const DeviceFacts& facts) {
  std::string arch = arch_name(facts.arch);
  if (arch.empty())
    fail(StatusCode::kUnsupported, "measure.device", "architecture", std::to_string(facts.arch), "90, 100, 103, 120",
         "measure on one of these, or with --device cpu");
  return arch;
}

}  // namespace

MeasureDevice::MeasureDevice(int ordinal)
    : guard_(ordinal), ordinal_(ordinal), facts_(device_facts(ordinal)), scratch_(kFoundOffset + sizeof(Found)) {
  const std::string arch = arch_of(facts_);
  fill_ = load_kernel(fill_request(arch), 0);
  reference_ = load_kernel(reference_request(arch), 0);
  compare_ = load_kernel(compare_request(arch), 0);
  plain_ = load_kernel(plain_request(arch), 0);
  for (const Reader& reader : kReaders)
    for (const bool early : {true, false})
      if (fits(reader))
        readers_[{reader.stages, early}] =
            load_kernel(read_limit_request(arch, reader.stages, early), reader.stages * kReaderPiece);
}

void MeasureDevice::fill(void* out, std::int64_t rows, std::int64_t cols, std::int64_t stride, std::uint64_t base,
                         Data data, float scale) const {
  if (rows == 0 || cols == 0) return;
  Launch what;
  what.function = fill_->function;
  what.grid_x = static_cast<std::uint32_t>(std::min<std::int64_t>(rows, 1 << 20));
  what.block = kBlock;
  enqueue(what, stream(), out, rows, cols, stride, base, static_cast<int>(data), scale);
}

void MeasureDevice::reference(const void* x, std::int64_t x_stride, const void* weight, std::int64_t weight_stride,
                              std::int64_t m, std::int64_t n, std::int64_t k, double* sum, double* magnitude) const {
  constexpr std::int64_t kWarps = 8, kRows = 8;  // kReferenceWarps, kReferenceRows
  Launch what;
  what.function = reference_->function;
  what.grid_x = static_cast<std::uint32_t>((n + kWarps - 1) / kWarps);
  what.grid_y = static_cast<std::uint32_t>((m + kRows - 1) / kRows);
  what.block = kWarps * 32;
  enqueue(what, stream(), x, x_stride, weight, weight_stride, m, n, k, sum, magnitude);
}

ValueErrors MeasureDevice::compare(const void* buffer, std::int64_t total, std::int64_t offset, std::int64_t stride,
                                   std::int64_t m, std::int64_t n, std::int64_t k, const double* sum,
                                   const double* magnitude) const {
  const CUdeviceptr found_at = scratch_.address() + kFoundOffset;
  const auto handle = static_cast<CUstream>(stream().handle);
  TWOSTEP_CUDA_CHECK(cuMemsetD8Async(found_at, 0, sizeof(Found), handle), "measure.compare");
  Launch what;
  what.function = compare_->function;
  what.grid_x = static_cast<std::uint32_t>(std::min<std::int64_t>((total + kBlock - 1) / kBlock, 8 * facts_.sm_count));
  what.block = kBlock;
  enqueue(what, stream(), buffer, total, offset, stride, m, n, k, sum, magnitude, found_at);
  Found found{};
  copy_to_host(&found, reinterpret_cast<const void*>(found_at), sizeof found, stream());
  ValueErrors errors;
  errors.worst = std::bit_cast<double>(found.worst);
  errors.norm = std::sqrt(found.norm > 0 ? found.difference / found.norm : found.difference);
  errors.elements = static_cast<std::uint64_t>(m * n);
  errors.wrong_bits = found.wrong;
  errors.nans = found.nans;
  errors.outside = found.outside;
  return errors;
}

void MeasureDevice::plain() const {
  Launch what;
  what.function = plain_->function;
  what.grid_x = kPlainBlocks;
  what.block = kBlock;
  enqueue(what, stream(), scratch_.data());
}

void MeasureDevice::read(const Reader& reader, bool early, bool programmatic, const void* data,
                         std::int64_t bytes) const {
  Launch what;
  what.function = readers_.at({reader.stages, early})->function;
  what.grid_x = static_cast<std::uint32_t>(reader.ctas_per_sm * facts_.sm_count);
  what.block = 128;  // kReadThreads
  what.smem_bytes = static_cast<std::uint32_t>(reader.stages * kReaderPiece);
  what.programmatic = programmatic;
  enqueue(what, stream(), data, bytes, scratch_.address() + kSinkOffset);
}

void describe_gpu(int ordinal, Machine& machine) {
  const GpuState state = gpu_state(ordinal);
  const int version = driver().version;
  machine.device = device_facts(ordinal).name;
  machine.driver =
      fmt::format("{}CUDA {}.{}", state.driver.empty() ? "" : state.driver + ", ", version / 1000, version % 1000 / 10);
  const Nvrtc* nvrtc = Nvrtc::get();
  machine.nvrtc = nvrtc ? nvrtc->version() : "";
  machine.sm_clock_mhz = state.sm_clock_mhz;
  machine.memory_clock_mhz = state.memory_clock_mhz;
  machine.power_limit_w = state.power_limit_w;
}

}  // namespace twostep
