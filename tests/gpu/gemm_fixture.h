// Shared by the GPU tests: matrices in allocations of NaN, integer data with an exact reference, kernels that
// provoke, and the warp kernel itself past the plan.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <vector>

#include "cuda/driver.h"
#include "cuda/graph.h"
#include "cuda/memory.h"
#include "gemm/cublas.h"
#include "gemm/tactics.h"
#include "gemm/warp.h"
#include "jit/kernel_cache.h"
#include "tests/common/allocations.h"
#include "twostep/gemm.h"

namespace twostep {

inline void PrintTo(StatusCode code, std::ostream* out) { *out << code_name(code); }
inline void PrintTo(Kind kind, std::ostream* out) { *out << kind_name(kind); }
inline void PrintTo(WhyCode code, std::ostream* out) { *out << '\'' << why_name(code) << '\''; }

namespace test {

inline constexpr int kDevice = 0;

// TWOSTEP_TEST_SEED, else a fresh number.
std::uint64_t test_seed();

// ---- Data and references, on the host

struct HostMatrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<std::uint16_t> bits;  // BF16, packed

  HostMatrix() = default;
  HostMatrix(std::int64_t rows_, std::int64_t cols_)
      : rows(rows_), cols(cols_), bits(static_cast<std::size_t>(rows_ * cols_)) {}
  std::uint16_t& at(std::int64_t row, std::int64_t col) { return bits[static_cast<std::size_t>(row * cols + col)]; }
  std::uint16_t at(std::int64_t row, std::int64_t col) const {
    return bits[static_cast<std::size_t>(row * cols + col)];
  }
  HostMatrix row(std::int64_t index) const;
  friend bool operator==(const HostMatrix&, const HostMatrix&) = default;
};
inline constexpr std::uint16_t kNanBits = 0xffff;

// `stream` tells apart the matrices of a test. Integers are in -4..4, each a function of its place alone.
HostMatrix integers(std::int64_t rows, std::int64_t cols, int stream);
HostMatrix integer_rows(const std::vector<std::int64_t>& rows, std::int64_t cols, int stream);
HostMatrix normals(std::int64_t rows, std::int64_t cols, int stream);

// Of integers: exact sums, one rounding to nearest even. Shares no code with the library.
HostMatrix exact_product(const HostMatrix& x, const HostMatrix& weight);
// Equal values; NaN only where NaN is expected.
void expect_exact(const HostMatrix& out, const HostMatrix& expected);
// The bounds of draft-gemm 1.4 (a) and (b) against FP64 sums.
void expect_close(const HostMatrix& out, const HostMatrix& x, const HostMatrix& weight);

// ---- Matrices on the GPU

struct Layout {
  std::int64_t pitch = 0;   // elements between rows; 0: packed
  std::int64_t offset = 0;  // bytes from a 256-byte boundary
};

// [rows, cols] BF16 in an allocation whose every other byte, before, between and after the rows, is NaN.
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t cols, Layout layout = {});
  explicit Matrix(const HostMatrix& values, Layout layout = {});
  // Integers as integer_rows gives them, written by the GPU: for weights of gigabytes.
  static Matrix of_integers(std::int64_t rows, std::int64_t cols, int stream);

  void poison();                       // all is NaN
  void set(const HostMatrix& values);  // the first rows; all else is NaN
  HostMatrix get() const;              // and a failure, if a byte outside the rows is no longer NaN
  HostMatrix columns(std::int64_t first, std::int64_t count) const;
  TensorView view() const { return view(rows_); }
  TensorView view(std::int64_t rows) const;
  void* data() const;
  std::int64_t rows() const { return rows_; }

 private:
  std::int64_t rows_;
  std::int64_t cols_;
  std::int64_t pitch_;
  std::int64_t start_;  // bytes of NaN in front
  DeviceBuffer memory_;
};

void synchronize();  // the whole device
bool has_free_memory(std::size_t bytes);

// ---- Plans

// Every test of the GPU: device 0 is current, with a stream of its own.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override;
  Stream stream() const { return stream_->view(); }

 private:
  std::optional<ContextGuard> context_;
  std::optional<OwnedStream> stream_;
};

// Products on cuBLAS cannot be tested on a machine without it.
#define TWOSTEP_NEEDS_CUBLAS() \
  if (const ::twostep::Status cublas = ::twostep::cublas_status(); !cublas.ok()) GTEST_SKIP() << cublas.message()

// A weight of integers, on both sides.
struct Linear {
  Linear(std::int64_t n, std::int64_t k, Layout layout = {})
      : host(integers(n, k, 1)), matrix(host, layout), weight(matrix.view()) {}
  HostMatrix host;
  Matrix matrix;
  TensorView weight;
};

// Pins m to a kind, whatever the table prefers, and prepares it there.
void prepare_on(DraftGemm& gemm, int m, Kind kind, Stream stream);

// Runs m rows of integers into NaN. The kind, its counter, every value and every byte around are as they must be.
void expect_exact_run(DraftGemm& gemm, const Linear& linear, int m, Kind kind, Stream stream, Layout x = {},
                      Layout out = {});

// The result of one run on `stream`, downloaded.
HostMatrix run(DraftGemm& gemm, const Matrix& x, std::int64_t n, Stream stream);

template <class Work>
StatusCode code_of(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.code();
  }
  return StatusCode::kOk;
}

// ---- Kernels

// The warp kernel of one tactic, launched past the plan: with a fault, as a chosen tactic, or bare.
class RawKernel {
 public:
  RawKernel(const TensorView& weight, int m, const Tactic& tactic, const TestSwitches& switches = {});
  void launch(const TensorView& x, const TensorView& out, Stream stream, bool programmatic = false) const;

 private:
  Weight weight_;
  WarpKernel kernel_;
  TensorMap map_;
};

// Slow in reading and quick in loading (the weight is small and stays in L2): a stage that is freed too early is
// overwritten while it is read.
Tactic slow_reader(int m, int cluster_n = 1);

// Of wgmma, with a short ring that turns. The GPU has the instruction: facts.arch is 90.
Tactic wgmma_tactic(int m, int tile_n, int cluster_k, int stages = 3);

// Lets its successor start at once, waits for its predecessor, sleeps, then copies: to = from.
void write_late(const Matrix& to, const Matrix& from, std::int64_t elements, int microseconds, Stream stream,
                bool programmatic = false, bool cooperative = false);
void sleep(int microseconds, Stream stream);
void poison_shared_memory(Stream stream);                                              // of every SM
void host_traffic(void* pinned, std::int64_t bytes, int microseconds, Stream stream);  // reads and writes it

}  // namespace test
}  // namespace twostep
