#include "gemm_fixture.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>

#include "cuda/launch.h"

namespace twostep::test {
namespace {

constexpr std::int64_t kGuardBytes = 4096;

std::uint64_t mix(std::uint64_t z) {  // splitmix64
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::uint64_t seed_of(int stream) { return mix(test_seed() + static_cast<std::uint64_t>(stream)); }

// As fill_integers does it on the GPU.
int integer_at(std::uint64_t seed, std::int64_t row, std::int64_t col) {
  const std::uint64_t hash = mix(seed ^ (static_cast<std::uint64_t>(row) << 32 | static_cast<std::uint64_t>(col)));
  return static_cast<int>((hash >> 40) * 9 >> 24) - 4;
}

float value_of(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

// One rounding to 8 significant bits, to nearest even, for normal numbers.
std::uint16_t rounded(double value) {
  int exponent = 0;
  std::frexp(value, &exponent);
  const double unit = std::ldexp(1.0, exponent - 8);
  const auto near = static_cast<float>(std::nearbyint(value / unit) * unit);
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(near) >> 16);
}

std::vector<std::int16_t> small_integers(const HostMatrix& matrix) {
  std::vector<std::int16_t> values(matrix.bits.size());
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::int16_t>(value_of(matrix.bits[i]));
  return values;
}

constexpr const char* kKernels = R"(#include "common/ptx.cuh"

using namespace twostep;

__device__ u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
__device__ void pause(u64 ns) {
  for (const u64 start = now(); now() - start < ns;) {
  }
}
__device__ u64 mix(u64 z) {
  z += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

extern "C" __global__ void write_late(u16* to, const u16* from, i64 elements, u64 ns) {
  pdl_launch();
  pdl_wait();
  pause(ns);
  for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += i64(gridDim.x) * blockDim.x)
    to[i] = from[i];
}

extern "C" __global__ void fill_integers(u16* to, i64 rows, i64 cols, u64 seed) {
  for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * cols; i += i64(gridDim.x) * blockDim.x) {
    const u64 hash = mix(seed ^ (u64(i / cols) << 32 | u64(i % cols)));
    to[i] = u16(pack_bf16(float(int((hash >> 40) * 9 >> 24) - 4), 0.0f));
  }
}

extern "C" __global__ void poison_shared(int words) {
  extern __shared__ u32 shared[];
  volatile u32* memory = shared;
  for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = 0xffffffffu;
}

extern "C" __global__ void host_traffic(volatile u32* host, i64 words, u64 ns) {
  const u64 start = now();
  for (i64 i = threadIdx.x; now() - start < ns; i = (i + blockDim.x) % words) host[i] = host[i] + 1;
}
)";

CUfunction test_kernel(const char* entry, int smem_bytes = 0) {
  return load_kernel({std::string("test-") + entry, entry, kKernels, arch_name(device_facts(kDevice).arch), "1"},
                     smem_bytes)
      ->function;
}

}  // namespace

std::uint64_t test_seed() {
  static const std::uint64_t seed = [] {
    if (const char* text = std::getenv("TWOSTEP_TEST_SEED")) return std::strtoull(text, nullptr, 10);
    return static_cast<unsigned long long>(std::random_device()());
  }();
  return seed;
}

// ---- Data and references, on the host

HostMatrix HostMatrix::row(std::int64_t index) const {
  HostMatrix one(1, cols);
  std::copy_n(bits.begin() + index * cols, cols, one.bits.begin());
  return one;
}

HostMatrix integer_rows(const std::vector<std::int64_t>& rows, std::int64_t cols, int stream) {
  HostMatrix matrix(static_cast<std::int64_t>(rows.size()), cols);
  const std::uint64_t seed = seed_of(stream);
#pragma omp parallel for
  for (std::int64_t i = 0; i < matrix.rows; ++i)
    for (std::int64_t j = 0; j < cols; ++j)
      matrix.at(i, j) = rounded(integer_at(seed, rows[static_cast<std::size_t>(i)], j));
  return matrix;
}

HostMatrix integers(std::int64_t rows, std::int64_t cols, int stream) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(rows));
  for (std::int64_t i = 0; i < rows; ++i) all[static_cast<std::size_t>(i)] = i;
  return integer_rows(all, cols, stream);
}

HostMatrix normals(std::int64_t rows, std::int64_t cols, int stream) {
  HostMatrix matrix(rows, cols);
#pragma omp parallel for
  for (std::int64_t i = 0; i < rows; ++i) {
    std::mt19937_64 random(seed_of(stream) + static_cast<std::uint64_t>(i));
    std::normal_distribution<double> normal;
    for (std::int64_t j = 0; j < cols; ++j) matrix.at(i, j) = rounded(normal(random));
  }
  return matrix;
}

HostMatrix exact_product(const HostMatrix& x, const HostMatrix& weight) {
  const std::vector<std::int16_t> xs = small_integers(x);
  const std::vector<std::int16_t> ws = small_integers(weight);
  const std::int64_t k = x.cols;
  HostMatrix out(x.rows, weight.rows);
#pragma omp parallel for
  for (std::int64_t j = 0; j < weight.rows; ++j) {
    const std::int16_t* w = ws.data() + j * k;
    for (std::int64_t i = 0; i < x.rows; ++i) {
      const std::int16_t* row = xs.data() + i * k;
      std::int32_t sum = 0;  // below 16 * 2^20
      for (std::int64_t c = 0; c < k; ++c) sum += row[c] * w[c];
      out.at(i, j) = rounded(sum);
    }
  }
  return out;
}

void expect_exact(const HostMatrix& out, const HostMatrix& expected) {
  ASSERT_EQ(out.rows, expected.rows);
  ASSERT_EQ(out.cols, expected.cols);
  std::int64_t wrong = 0;
  std::string first;
  for (std::int64_t i = 0; i < out.rows; ++i)
    for (std::int64_t j = 0; j < out.cols; ++j) {
      const float got = value_of(out.at(i, j));
      const float want = value_of(expected.at(i, j));
      if (got == want || (std::isnan(got) && std::isnan(want))) continue;
      if (wrong++ == 0)
        first = "[" + std::to_string(i) + ", " + std::to_string(j) + "] = " + std::to_string(got) + ", not " +
                std::to_string(want);
    }
  EXPECT_EQ(wrong, 0) << "differs from the exact product, first at " << first << "; TWOSTEP_TEST_SEED=" << test_seed();
}

void expect_close(const HostMatrix& out, const HostMatrix& x, const HostMatrix& weight) {
  ASSERT_EQ(out.rows, x.rows);
  ASSERT_EQ(out.cols, weight.rows);
  const std::int64_t k = x.cols;
  const double sum_bound = std::ldexp(static_cast<double>(k) / 8 + 64, -23);
  double error2 = 0, norm2 = 0;
  std::int64_t wrong = 0;
#pragma omp parallel for reduction(+ : error2, norm2, wrong)
  for (std::int64_t j = 0; j < out.cols; ++j)
    for (std::int64_t i = 0; i < out.rows; ++i) {
      double sum = 0, magnitude = 0;
      for (std::int64_t c = 0; c < k; ++c) {
        const double product = static_cast<double>(value_of(x.at(i, c))) * value_of(weight.at(j, c));
        sum += product;
        magnitude += std::fabs(product);
      }
      const double error = std::fabs(value_of(out.at(i, j)) - sum);
      if (!(error <= std::ldexp(std::fabs(sum), -8) + sum_bound * magnitude)) ++wrong;  // NaN is wrong, too
      error2 += error * error;
      norm2 += sum * sum;
    }
  EXPECT_EQ(wrong, 0) << "elements beyond the bound of 1.4 (a); TWOSTEP_TEST_SEED=" << test_seed();
  EXPECT_LE(std::sqrt(error2 / norm2), 2.0e-3) << "1.4 (b); TWOSTEP_TEST_SEED=" << test_seed();
}

// ---- Matrices on the GPU

Matrix::Matrix(std::int64_t rows, std::int64_t cols, Layout layout)
    : rows_(rows),
      cols_(cols),
      pitch_(layout.pitch > 0 ? layout.pitch : cols),
      start_(kGuardBytes + layout.offset),
      memory_(static_cast<std::size_t>(start_ + 2 * rows * pitch_ + kGuardBytes)) {
  poison();
}

Matrix::Matrix(const HostMatrix& values, Layout layout) : Matrix(values.rows, values.cols, layout) { set(values); }

Matrix Matrix::of_integers(std::int64_t rows, std::int64_t cols, int stream) {
  Matrix matrix(rows, cols);
  void* data = matrix.data();
  std::uint64_t seed = seed_of(stream);
  void* arguments[] = {&data, &rows, &cols, &seed};
  Launch what;
  what.function = test_kernel("fill_integers");
  what.grid_x = 2048;
  what.block = 256;
  launch(what, {}, arguments);
  synchronize();
  return matrix;
}

void Matrix::poison() {
  TWOSTEP_CUDA_CHECK(cuMemsetD8Async(memory_.address(), 0xff, memory_.bytes(), nullptr), "test.Matrix");
  synchronize();
}

void Matrix::set(const HostMatrix& values) {
  std::vector<unsigned char> image(memory_.bytes(), 0xff);
  for (std::int64_t i = 0; i < values.rows && cols_ > 0; ++i)
    std::memcpy(image.data() + start_ + 2 * i * pitch_, values.bits.data() + i * cols_,
                static_cast<std::size_t>(2 * cols_));
  copy_to_device(memory_.data(), image.data(), image.size());
}

HostMatrix Matrix::get() const {
  synchronize();
  std::vector<unsigned char> image(memory_.bytes());
  copy_to_host(image.data(), memory_.data(), image.size());
  HostMatrix values(rows_, cols_);
  for (std::int64_t i = 0; i < rows_ && cols_ > 0; ++i) {
    unsigned char* row = image.data() + start_ + 2 * i * pitch_;
    std::memcpy(values.bits.data() + i * cols_, row, static_cast<std::size_t>(2 * cols_));
    std::memset(row, 0xff, static_cast<std::size_t>(2 * cols_));
  }
  const auto written = std::find_if(image.begin(), image.end(), [](unsigned char byte) { return byte != 0xff; });
  EXPECT_TRUE(written == image.end()) << "byte " << written - image.begin() - start_
                                      << " from the first element, outside the rows, was written";
  return values;
}

HostMatrix Matrix::columns(std::int64_t first, std::int64_t count) const {
  const HostMatrix all = get();
  HostMatrix some(rows_, count);
  for (std::int64_t i = 0; i < rows_; ++i)
    std::copy_n(all.bits.begin() + i * cols_ + first, count, some.bits.begin() + i * count);
  return some;
}

TensorView Matrix::view(std::int64_t rows) const {
  return TensorView::matrix(data(), rows, cols_, Device::cuda(kDevice), pitch_);
}

void* Matrix::data() const { return static_cast<unsigned char*>(memory_.data()) + start_; }

void synchronize() { TWOSTEP_CUDA_CHECK(cuCtxSynchronize(), "test.synchronize"); }

bool has_free_memory(std::size_t bytes) {
  std::size_t free = 0, total = 0;
  TWOSTEP_CUDA_CHECK(cuMemGetInfo(&free, &total), "test.has_free_memory");
  return free >= bytes;
}

// ---- Plans

void GpuTest::SetUp() {
  if (const Status status = driver_status(); !status.ok()) GTEST_SKIP() << status.message();
  context_.emplace(kDevice);
  stream_.emplace();
}

void prepare_on(DraftGemm& gemm, int m, Kind kind, Stream stream) {
  gemm.pin(m, kind);
  ASSERT_EQ(gemm.prepare(m, stream), kind) << gemm.why(m);
}

void expect_exact_run(DraftGemm& gemm, const Linear& linear, int m, Kind kind, Stream stream, Layout x_layout,
                      Layout out_layout) {
  SCOPED_TRACE(testing::Message() << "N = " << linear.host.rows << ", K = " << linear.host.cols << ", M = " << m);
  const HostMatrix values = integers(m, linear.host.cols, 2);
  const Matrix x(values, x_layout);
  const Matrix out(m, linear.host.rows, out_layout);
  const Stats before = gemm.stats();
  ASSERT_NO_THROW(gemm.prepare(m, stream));
  EXPECT_EQ(gemm.kind(x.view(), out.view()), kind) << gemm.why(x.view(), out.view());
  ASSERT_NO_THROW(gemm.run(x.view(), out.view(), stream));
  EXPECT_EQ(gemm.stats().warp_runs - before.warp_runs, kind == Kind::kWarp ? 1u : 0u);
  EXPECT_EQ(gemm.stats().cublas_runs - before.cublas_runs, kind == Kind::kCublas ? 1u : 0u);
  expect_exact(out.get(), exact_product(values, linear.host));
}

HostMatrix run(DraftGemm& gemm, const Matrix& x, std::int64_t n, Stream stream) {
  const Matrix out(x.rows(), n);
  gemm.run(x.view(), out.view(), stream);
  return out.get();
}

// ---- Kernels

RawKernel::RawKernel(const TensorView& weight, int m, const Tactic& tactic, const TestSwitches& switches)
    : weight_(check_weight(weight, "test.RawKernel")), map_(warp_tensor_map(weight_, tactic)) {
  const auto text = warp_kernel_text(m, weight_.n, weight_.k, tactic, switches);
  kernel_.tactic = tactic;
  kernel_.compiled = load_kernel(compile_request(text, device_facts(kDevice).arch), tactic.smem_bytes);
  kernel_.grid = warp_grid(tactic, weight_.n);
  kernel_.threads = warp_threads(tactic);
}

void RawKernel::launch(const TensorView& x, const TensorView& out, Stream stream, bool programmatic) const {
  launch_warp(kernel_, map_, weight_.view.data, weight_, matrix_of(x), matrix_of(out), programmatic, stream);
}

Tactic slow_reader(int m, int cluster_n) {
  Tactic tactic;
  tactic.tile_n = 128;
  tactic.tile_k = 256;
  tactic.stages = 2;
  tactic.k_slices = 1;
  tactic.warps = 4;
  tactic.cluster_n = cluster_n;
  return complete(tactic, m, device_facts(kDevice));
}

Tactic wgmma_tactic(int m, int tile_n, int cluster_k, int stages) {
  Tactic tactic;
  tactic.mma = Mma::kWgmma;
  tactic.weight_load = WeightLoad::kTiles;
  tactic.tile_n = tile_n;
  tactic.tile_k = 64;
  tactic.stages = stages;
  tactic.k_slices = 1;
  tactic.cluster_k = cluster_k;
  tactic.warps = tile_n / 16;
  return complete(tactic, m, device_facts(kDevice));
}

void write_late(const Matrix& to, const Matrix& from, std::int64_t elements, int microseconds, Stream stream,
                bool programmatic, bool cooperative) {
  void* to_data = to.data();
  void* from_data = from.data();
  std::uint64_t ns = 1000u * static_cast<std::uint64_t>(microseconds);
  void* arguments[] = {&to_data, &from_data, &elements, &ns};
  Launch what;
  what.function = test_kernel("write_late");
  what.block = 256;
  what.programmatic = programmatic;
  what.cooperative = cooperative;
  launch(what, stream, arguments);
}

void sleep(int microseconds, Stream stream) {
  void* none = nullptr;
  std::int64_t elements = 0;
  std::uint64_t ns = 1000u * static_cast<std::uint64_t>(microseconds);
  void* arguments[] = {&none, &none, &elements, &ns};
  Launch what;
  what.function = test_kernel("write_late");
  launch(what, stream, arguments);
}

void poison_shared_memory(Stream stream) {
  const DeviceFacts facts = device_facts(kDevice);
  int words = facts.smem_per_block / 4;
  void* arguments[] = {&words};
  Launch what;
  what.function = test_kernel("poison_shared", facts.smem_per_block);
  what.grid_x = static_cast<std::uint32_t>(facts.sm_count);
  what.block = 256;
  what.smem_bytes = static_cast<std::uint32_t>(facts.smem_per_block);
  launch(what, stream, arguments);
}

void host_traffic(void* pinned, std::int64_t bytes, int microseconds, Stream stream) {
  std::int64_t words = bytes / 4;
  std::uint64_t ns = 1000u * static_cast<std::uint64_t>(microseconds);
  void* arguments[] = {&pinned, &words, &ns};
  Launch what;
  what.function = test_kernel("host_traffic");
  what.block = 256;
  launch(what, stream, arguments);
}

}  // namespace twostep::test
