// DraftGemm on the CPU: the plain product, the vector products, the plan.
#include <omp.h>

#include <algorithm>
#include <array>
#include <deque>
#include <mutex>
#include <new>

#include "core/bf16.h"
#include "core/check.h"
#include "core/env.h"
#include "gemm/cpu_kernels.h"

#if defined(__x86_64__)
// g++ 12 warns of the undefined registers that its own intrinsics start from (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace twostep {
namespace {

// ---- Plain C++: the reference of the other paths, and the path of transposed weights.

namespace plain {

constexpr int kColumns = 32;  // one cache line of a transposed weight
constexpr int kChunk = 64;    // summed on their own: the error grows with K / kChunk + kChunk, not with K

template <bool kTransposed>
void multiply_columns(const CpuGemm& g, std::int64_t begin, std::int64_t end) {
  float sums[kSlabRows][kColumns] = {};
  const auto columns = static_cast<int>(end - begin);
  for (std::int64_t p0 = 0; p0 < g.k; p0 += kChunk) {
    for (std::int64_t i = 0; i < g.m; ++i) {
      float chunk[kColumns] = {};
      for (std::int64_t p = p0; p < std::min(p0 + kChunk, g.k); ++p) {
        const float xi = bf16_to_float(g.x[i * g.x_stride + p]);
        const std::uint16_t* w = kTransposed ? g.w + p * g.w_stride + begin : g.w + begin * g.w_stride + p;
        for (int j = 0; j < columns; ++j) chunk[j] += xi * bf16_to_float(kTransposed ? w[j] : w[j * g.w_stride]);
      }
      for (int j = 0; j < columns; ++j) sums[i][j] += chunk[j];
    }
  }
  for (std::int64_t i = 0; i < g.m; ++i)
    for (int j = 0; j < columns; ++j) g.out[i * g.out_stride + begin + j] = float_to_bf16(sums[i][j]);
}

void multiply(const CpuGemm& g, const void*, std::int64_t begin, std::int64_t end) {
  for (std::int64_t j = begin; j < end; j += kColumns) {
    const std::int64_t stop = std::min(end, j + kColumns);
    if (g.transposed) multiply_columns<true>(g, j, stop);
    else multiply_columns<false>(g, j, stop);
  }
}

constexpr CpuPath kPath{"plain C++", [] { return true; }, true, nullptr, nullptr, multiply};

}  // namespace plain

// ---- Vectors. Products of BF16 are exact in FP32, so that only additions round, with or without FMA.

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512bf16")
namespace avx512_bf16 {

using Sum = __m512;
using Multiplicand = __m512bh;
using Raw = __m512i;
using Element = std::uint16_t;
constexpr int kParts = 1;
// 24 sums, 6 rows of w and one of x fill the 32 registers. 8 x 3 loads more per multiply: 3.9 ms in place of 2.9 ms
// at (7168, 7168), M = 8.
constexpr int kTileX = 4;
constexpr int kTileW = 6;

inline Element widen(std::uint16_t bits) { return bits; }
inline Raw load(const std::uint16_t* from) { return _mm512_loadu_si512(from); }
inline Raw load_first(const std::uint16_t* from, int count) {
  return _mm512_maskz_loadu_epi16((1u << count) - 1, from);
}
template <int kPart>
inline Multiplicand take(Raw raw) {
  return reinterpret_cast<Multiplicand>(raw);
}
inline Multiplicand load_x(const Element* from) { return reinterpret_cast<Multiplicand>(_mm512_load_si512(from)); }
inline Sum multiply_add(Sum sum, Multiplicand a, Multiplicand b) { return _mm512_dpbf16_ps(sum, a, b); }
inline float total(Sum sum) { return _mm512_reduce_add_ps(sum); }
bool available() { return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512bf16"); }

#include "gemm/cpu_tile.h"

constexpr CpuPath kPath{"AVX-512 BF16", available, false, panel_bytes, pack, multiply};

}  // namespace avx512_bf16
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw")
namespace avx512 {

using Sum = __m512;
using Multiplicand = __m512;
using Raw = __m512i;
using Element = float;
constexpr int kParts = 2;  // even and odd columns: a shift or a mask widens them in place
constexpr int kTileX = 4;
constexpr int kTileW = 6;

inline Element widen(std::uint16_t bits) { return bf16_to_float(bits); }
inline Raw load(const std::uint16_t* from) { return _mm512_loadu_si512(from); }
inline Raw load_first(const std::uint16_t* from, int count) {
  return _mm512_maskz_loadu_epi16((1u << count) - 1, from);
}
template <int kPart>
inline Multiplicand take(Raw raw) {
  return _mm512_castsi512_ps(kPart == 0 ? _mm512_slli_epi32(raw, 16)
                                        : _mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
inline Multiplicand load_x(const Element* from) { return _mm512_load_ps(from); }
inline Sum multiply_add(Sum sum, Multiplicand a, Multiplicand b) { return _mm512_fmadd_ps(a, b, sum); }
inline float total(Sum sum) { return _mm512_reduce_add_ps(sum); }
bool available() { return __builtin_cpu_supports("avx512bw"); }

#include "gemm/cpu_tile.h"

constexpr CpuPath kPath{"AVX-512 FMA", available, false, panel_bytes, pack, multiply};

}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {

using Sum = __m256;
using Multiplicand = __m256;
using Raw = __m256i;
using Element = float;
constexpr int kParts = 2;
constexpr int kTileX = 4;
constexpr int kTileW = 3;  // 12 sums, 3 rows of w and one of x fill the 16 registers

inline Element widen(std::uint16_t bits) { return bf16_to_float(bits); }
inline Raw load(const std::uint16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Raw load_first(const std::uint16_t* from, int count) {
  alignas(32) std::uint16_t part[16] = {};
  std::copy(from, from + count, part);
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(part));
}
template <int kPart>
inline Multiplicand take(Raw raw) {
  return _mm256_castsi256_ps(kPart == 0 ? _mm256_slli_epi32(raw, 16)
                                        : _mm256_and_si256(raw, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
inline Multiplicand load_x(const Element* from) { return _mm256_load_ps(from); }
inline Sum multiply_add(Sum sum, Multiplicand a, Multiplicand b) { return _mm256_fmadd_ps(a, b, sum); }
inline float total(Sum sum) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
bool available() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#include "gemm/cpu_tile.h"

constexpr CpuPath kPath{"AVX2 FMA", available, false, panel_bytes, pack, multiply};

}  // namespace avx2
#pragma GCC pop_options

// Fastest first. Milliseconds at (7168, 7168), two threads of a Zen 4 that reads w in 3.2; oneDNN 2.6.3 beside them,
// which is slower at each M and does not promise that the bits of a row are those of any M, so no path is oneDNN's:
//           BF16  AVX-512  AVX2  oneDNN
//   M = 8    3.6    4.6     6.5     6.5
//   M = 64  17.8   35.1    50.0    20.4
constexpr CpuPath kAllPaths[] = {avx512_bf16::kPath, avx512::kPath, avx2::kPath, plain::kPath};
#else
constexpr CpuPath kAllPaths[] = {plain::kPath};
#endif

// ---- Threads and scratch

struct alignas(64) CacheLine {
  std::byte bytes[64];
};

// One panel per calling thread, grown by its first call of a size and kept: x of a slab is at most kSlabRows * K.
void* panel_of(const CpuPath& path, std::int64_t m, std::int64_t k) {
  if (path.panel_bytes == nullptr) return nullptr;
  thread_local std::vector<CacheLine> panel;
  const std::int64_t bytes = path.panel_bytes(std::min<std::int64_t>(m, kSlabRows), k);
  const auto lines = static_cast<std::size_t>(bytes) / sizeof(CacheLine) + 1;
  try {
    if (panel.size() < lines) panel = std::vector<CacheLine>(lines);
  } catch (const std::bad_alloc&) {
    fail(StatusCode::kOutOfMemory, "gemm.prepare", "panel of x", std::to_string(bytes) + " bytes", "memory for it");
  }
  return panel.data();
}

// Below this many products, some 30 us of one core, a second thread costs more than it brings.
constexpr std::int64_t kSerialProducts = 1 << 21;

}  // namespace

std::span<const CpuPath> cpu_paths() {
  static const std::vector<CpuPath> paths = [] {
    std::vector<CpuPath> found;
    for (const CpuPath& path : kAllPaths)
      if (path.available()) found.push_back(path);
    return found;
  }();
  return paths;
}

void cpu_reserve(const CpuPath& path, std::int64_t m, std::int64_t k, int threads) {
  panel_of(path, m, k);
#pragma omp parallel num_threads(threads)
  { asm volatile("" ::: "memory"); }  // the compiler would drop an empty region, and the team with it
}

void cpu_gemm(const CpuPath& path, const CpuGemm& gemm, int threads) {
  void* panel = panel_of(path, gemm.m, gemm.k);
  // Several units per thread, so that a thread that the machine disturbs does not hold up the others; each a
  // multiple of every path's tile.
  constexpr std::int64_t kUnit = 96;
  const std::int64_t units_wanted = 8LL * threads;
  const std::int64_t unit = std::max((gemm.n / units_wanted + kUnit - 1) / kUnit, std::int64_t{1}) * kUnit;
  const std::int64_t units = (gemm.n + unit - 1) / unit;
  for (std::int64_t row = 0; row < gemm.m; row += kSlabRows) {
    CpuGemm slab = gemm;
    slab.x += row * gemm.x_stride;
    slab.out += row * gemm.out_stride;
    slab.m = std::min<std::int64_t>(kSlabRows, gemm.m - row);
    if (path.pack) path.pack(slab, panel);
    const bool serial = threads == 1 || slab.m * gemm.n * gemm.k < kSerialProducts;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (!serial)
    for (std::int64_t u = 0; u < units; ++u) path.multiply(slab, panel, u * unit, std::min(gemm.n, (u + 1) * unit));
  }
}

namespace {

// ---- The plan

class CpuPlan final : public Plan {
 public:
  explicit CpuPlan(const TensorView& weight) {
    bindings_.push_back(check_weight(weight, "gemm.DraftGemm"));
    bound_.store(&bindings_.back(), std::memory_order_release);
  }

  Kind prepare(int m, Stream) override {
    if (m < 0) fail(StatusCode::kInvalidArgument, "gemm.prepare", "m", std::to_string(m), "0 and more");
    const Weight& w = weight();
    if (m > 0 && w.n > 0 && w.k > 0) cpu_reserve(path_of(w), m, w.k, threads());
    return Kind::kCpu;
  }

  void run(const TensorView* now, const TensorView& x, const TensorView& out, Stream) override {
    const Weight& w = now ? rebound(*now) : weight();
    std::int64_t m = 0;
    throw_if_error(check_operands(w, x, out, &m));
    if (m == 0 || w.n == 0) return;
    const auto to = matrix_of(out);
    auto* values = static_cast<std::uint16_t*>(out.data);
    if (w.k == 0) {
      for (std::int64_t i = 0; i < m; ++i) std::fill_n(values + i * to.row_stride, w.n, std::uint16_t{0});
    } else {
      const CpuGemm gemm{static_cast<const std::uint16_t*>(x.data),
                         matrix_of(x).row_stride,
                         static_cast<const std::uint16_t*>(w.view.data),
                         w.row_stride,
                         w.transposed,
                         values,
                         to.row_stride,
                         m,
                         w.n,
                         w.k};
      cpu_gemm(path_of(w), gemm, threads());
    }
    count(counters_.cpu_runs);
  }

  void bind(const TensorView& now) override { rebound(now); }
  void weights_updated(Stream) override {}
  void seal() override {}
  void pin(int m, Kind kind) override {
    if (m < 1) fail(StatusCode::kInvalidArgument, "gemm.pin", "m", std::to_string(m), "1 and more");
    if (kind != Kind::kCpu)
      fail(StatusCode::kUnsupported, "gemm.pin", "kind", kind_name(kind), "cpu", "move the weight to a GPU");
  }

  Kind kind(int) const override { return Kind::kCpu; }
  Kind kind(const TensorView&, const TensorView&) const override { return Kind::kCpu; }
  WhyCode why_code(int) const override { return WhyCode::kNone; }
  std::string why(int) const override {
    const Weight& w = weight();
    return std::string("the weight is on the CPU: ") + path_of(w).name +
           (w.transposed ? " for a transposed weight" : "") + ", threads = " + std::to_string(threads()) +
           "; move it to a GPU for the warp kernel";
  }
  std::string why(const TensorView&, const TensorView&) const override { return why(0); }
  Status accepts(const TensorView& x, const TensorView& out) const override {
    std::int64_t m = 0;
    return check_operands(weight(), x, out, &m);
  }
  Tactic tactic(int m) const override {
    fail(StatusCode::kNotPrepared, "gemm.tactic", "m", std::to_string(m), "a weight on a GPU",
         "a CPU plan has no tactic: ask why(m)");
  }
  Stats stats() const override { return counters_.read(); }
  std::vector<CompileKey> keys() const override { return {}; }
  std::vector<Address> captured_addresses() const override { return {}; }
  const Weight& weight() const override { return *bound_.load(std::memory_order_acquire); }

 private:
  static int threads() {
    static const int threads = environment().threads > 0 ? environment().threads : omp_get_num_procs();
    return threads;
  }

  static const CpuPath& path_of(const Weight& w) { return w.transposed ? cpu_paths().back() : cpu_paths().front(); }

  // 3.6. A run that started keeps its binding, so bindings live as long as the plan; each is kept once.
  const Weight& rebound(const TensorView& now) {
    const Weight& old = weight();
    throw_if_error(same_weight(old, now));
    const Weight found = check_weight(now, "gemm.run");
    if (same_place(old, found)) return old;
    const std::lock_guard lock(mutex_);
    auto place =
        std::find_if(bindings_.begin(), bindings_.end(), [&](const Weight& known) { return same_place(known, found); });
    if (place == bindings_.end()) place = bindings_.insert(bindings_.end(), found);
    bound_.store(&*place, std::memory_order_release);
    count(counters_.rebinds);
    return *place;
  }

  std::mutex mutex_;  // of a rebind; no run that finds its weight in place takes it
  std::deque<Weight> bindings_;
  std::atomic<const Weight*> bound_{nullptr};
  Counters counters_;
};

}  // namespace

std::shared_ptr<Plan> make_cpu_plan(const TensorView& weight, const Options&) {
  return std::make_shared<CpuPlan>(weight);
}

}  // namespace twostep
