// What DraftGemm accepts and, if not, why not. Pure: no driver call.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "twostep/gemm.h"

namespace twostep {

// The strides that count: those of dimensions larger than 1 (3.1). rows <= 1 has no row stride.
struct MatrixView {
  const void* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;  // elements; = cols when rows <= 1
  std::int64_t col_stride = 1;  // 1 when cols <= 1
};

// A weight as a plan holds it.
struct Weight {
  TensorView view;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t row_stride = 0;  // elements between rows of weight; of columns when transposed
  bool transposed = false;      // a [K, N] row-major matrix seen as [N, K]: strides (1, >= N)
};

// What the warp kernel says to a pair of operands or a weight: kNone, or the code and its sentence.
struct FallbackReason {
  WhyCode code = WhyCode::kNone;
  std::string sentence;   // value, rule, remedy
  bool permanent = true;  // shape and architecture cannot change; compiler, memory, disk may be tried again
  explicit operator bool() const { return code != WhyCode::kNone; }
};

// 2.2: rank, dtype, layout of a weight, for either kind. Throws kInvalidArgument, kUnsupported, kBadLayout.
Weight check_weight(const TensorView& weight, const char* place);

// 3.6: may `now` stand in for `bound`? kOk also when only the address differs; kWeightChanged else.
Status same_weight(const Weight& bound, const TensorView& now);

// True where both lie at one address with the same strides: nothing to rebind.
bool same_place(const Weight& a, const Weight& b);

// All that run would throw for these operands (2.10, 3.2, 3.4), with m = rows of x in *m when kOk.
// Order: rank and dtype, device, shape, layout, overlap. Formats text only when it refuses.
Status check_operands(const Weight& weight, const TensorView& x, const TensorView& out, std::int64_t* m);

// The warp column of 3.2, for operands that check_operands took. Never formats: call `sentence_of` to print.
WhyCode warp_takes_operands(const TensorView& x, const TensorView& out);
inline bool is_operand_code(WhyCode code) { return code == WhyCode::kXLayout || code == WhyCode::kOutLayout; }
// The shape, layout and alignment of the weight itself, with the sentence.
FallbackReason warp_takes_weight(const Weight& weight, int weight_align);
std::string sentence_of(WhyCode code, const TensorView& x, const TensorView& out);  // of an operand code
std::string rows_sentence(int m);                                                   // of kRowsAbove64
std::string faster_sentence(const std::string& gpu, int measured_rows, double cublas_us, double warp_us);
std::string describe(const TensorView& view);  // with its address: "BF16[8, 64] strides (64, 1) on cpu at 0x7f.."

MatrixView matrix_of(const TensorView& view);

inline int bucket_of(int m) { return (m + kRowBucket - 1) / kRowBucket * kRowBucket; }
inline constexpr int kNumBuckets = kMaxWarpRows / kRowBucket;
inline int bucket_index(int m) { return (m - 1) / kRowBucket; }

// Counters of a plan: relaxed, one writer is not assumed.
struct Counters {
  std::atomic<std::uint64_t> warp_runs{0}, cublas_runs{0}, cpu_runs{0}, capture_misses{0}, workspace_misses{0},
      compiles{0}, late_compiles{0}, cache_hits{0}, rebinds{0};
  std::array<std::atomic<std::uint64_t>, kNumWhyCodes> fallback_by_code{};
  Stats read() const;
};
inline void count(std::atomic<std::uint64_t>& counter) { counter.fetch_add(1, std::memory_order_relaxed); }

// The plan behind DraftGemm: one implementation per device type. Functions as documented in twostep/gemm.h.
class Plan {
 public:
  virtual ~Plan() = default;
  virtual Kind prepare(int m, Stream stream) = 0;
  virtual void run(const TensorView* weight, const TensorView& x, const TensorView& out, Stream stream) = 0;
  virtual void bind(const TensorView& weight) = 0;
  virtual void weights_updated(Stream stream) = 0;
  virtual void seal() = 0;
  virtual void pin(int m, Kind kind) = 0;
  virtual Kind kind(int m) const = 0;
  virtual Kind kind(const TensorView& x, const TensorView& out) const = 0;
  virtual WhyCode why_code(int m) const = 0;
  virtual std::string why(int m) const = 0;
  virtual std::string why(const TensorView& x, const TensorView& out) const = 0;
  virtual Status accepts(const TensorView& x, const TensorView& out) const = 0;
  virtual Tactic tactic(int m) const = 0;
  virtual Stats stats() const = 0;
  virtual std::vector<CompileKey> keys() const = 0;
  virtual std::vector<Address> captured_addresses() const = 0;
  virtual const Weight& weight() const = 0;
};

std::shared_ptr<Plan> make_cpu_plan(const TensorView& weight, const Options& options);   // cpu.cpp
std::shared_ptr<Plan> make_cuda_plan(const TensorView& weight, const Options& options);  // plan.cpp
std::shared_ptr<Plan> make_cuda_plan(const PackedWeight& weight, const Options& options);

}  // namespace twostep
