#include "gemm/contract.h"

#include <fmt/format.h>

#include "core/check.h"

namespace twostep {
namespace {

constexpr std::int64_t kMostStride = std::int64_t{1} << 40;  // elements: no real view is wider
constexpr std::int64_t kWarpAlign = 16;                      // bytes: bulk copies and vector stores move 16 at a time
constexpr std::int64_t kTmaStride = std::int64_t{1} << 39;   // elements: a TMA pitch is below 2^40 bytes

std::uintptr_t address(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

bool tma_stride(std::int64_t row_stride) { return row_stride % 8 == 0 && row_stride < kTmaStride; }

// One past the last byte that a matrix touches.
std::uintptr_t end_of(const MatrixView& v, std::int64_t row_pitch) {
  return address(v.data) + static_cast<std::uintptr_t>((v.rows - 1) * row_pitch + v.cols * 2);
}

// 3.4. Exact for equal pitches: two column windows of one buffer that do not meet are apart.
bool overlap(const MatrixView& a, const MatrixView& b) {
  if (!a.rows || !a.cols || !b.rows || !b.cols) return false;
  const std::int64_t pa = a.row_stride * 2;
  const std::int64_t pb = b.row_stride * 2;
  if (end_of(a, pa) <= address(b.data) || end_of(b, pb) <= address(a.data)) return false;
  if (a.rows == 1 && b.rows == 1) return true;
  // A single row has any pitch: give it the other's, which keeps its one row in place.
  const std::int64_t pitch = a.rows == 1 ? pb : pa;
  if (pitch <= 0 || (a.rows > 1 && b.rows > 1 && pa != pb)) return true;
  // A single row as long as the pitch of the other leaves room for no gap.
  if (a.cols * 2 >= pitch && a.rows == 1) return true;
  if (b.cols * 2 >= pitch && b.rows == 1) return true;
  // Rows of a start at a0 + i*pitch, rows of b at b0 + j*pitch. Only the difference modulo pitch counts, for
  // the row numbers that exist.
  const std::int64_t diff = static_cast<std::int64_t>(address(b.data)) - static_cast<std::int64_t>(address(a.data));
  const std::int64_t floor_rows = diff >= 0 ? diff / pitch : -((-diff + pitch - 1) / pitch);
  for (std::int64_t shift : {floor_rows, floor_rows + 1}) {
    const std::int64_t offset = diff - shift * pitch;  // of a row j of b against row j + shift of a
    const bool meets = offset < a.cols * 2 && -offset < b.cols * 2;
    const bool rows_exist = shift < a.rows && -shift < b.rows;  // some j in [0, b.rows) with j + shift in [0, a.rows)
    if (meets && rows_exist) return true;
  }
  return false;
}

Status check_matrix(const char* name, const TensorView& view, const Weight& weight) {
  const char* place = "gemm.run";
  if (view.rank != 2)
    return refusal(StatusCode::kInvalidArgument, place, fmt::format("{}.rank", name), std::to_string(view.rank), "2",
                   "pass a [rows, columns] view");
  if (view.dtype != DType::kBF16)
    return refusal(StatusCode::kUnsupported, place, fmt::format("{}.dtype", name), dtype_name(view.dtype), "BF16",
                   "convert it, or keep this layer on its own method");
  if (view.shape[0] < 0 || view.shape[1] < 0)
    return refusal(StatusCode::kInvalidArgument, place, fmt::format("{}.shape", name), to_string(view), "sizes >= 0");
  if (view.device != weight.view.device)
    return refusal(StatusCode::kWrongDevice, place, fmt::format("{}.device", name), to_string(view.device),
                   to_string(weight.view.device), "move it to the weight's device");
  return {};
}

Status check_layout(const char* name, const TensorView& view, const MatrixView& m) {
  const char* place = "gemm.run";
  if (m.col_stride != 1)
    return refusal(StatusCode::kBadLayout, place, fmt::format("{} column stride", name), std::to_string(m.col_stride),
                   "1", "make the columns contiguous");
  if (m.rows > 1 && m.row_stride < m.cols)
    return refusal(StatusCode::kBadLayout, place, fmt::format("{} row stride", name), std::to_string(m.row_stride),
                   fmt::format("{} (its columns) and more", m.cols), "pass a view whose rows do not meet");
  if (m.rows > 1 && m.row_stride > kMostStride)
    return refusal(StatusCode::kBadLayout, place, fmt::format("{} row stride", name), std::to_string(m.row_stride),
                   "strides up to 2^40 elements");
  if (address(view.data) % 2 != 0)
    return refusal(StatusCode::kBadLayout, place, fmt::format("{}.data", name),
                   fmt::format("{:#x}", address(view.data)), "addresses that are multiples of 2 bytes");
  if (m.rows > 0 && m.cols > 0 && view.data == nullptr)
    return refusal(StatusCode::kInvalidArgument, place, fmt::format("{}.data", name), "null", "memory of the view");
  return {};
}

}  // namespace

MatrixView matrix_of(const TensorView& view) {
  MatrixView m;
  m.data = view.data;
  m.rows = view.shape[0];
  m.cols = view.shape[1];
  m.row_stride = m.rows > 1 ? view.stride[0] : m.cols;
  m.col_stride = m.cols > 1 ? view.stride[1] : 1;
  return m;
}

Weight check_weight(const TensorView& view, const char* place) {
  if (view.rank != 2)
    fail(StatusCode::kInvalidArgument, place, "weight.rank", std::to_string(view.rank), "2", "pass a [N, K] view");
  if (view.dtype != DType::kBF16)
    fail(StatusCode::kUnsupported, place, "weight.dtype", dtype_name(view.dtype), "BF16", "keep it on its own method");
  const auto m = matrix_of(view);
  if (m.rows < 0 || m.cols < 0)
    fail(StatusCode::kInvalidArgument, place, "weight.shape", to_string(view), "sizes >= 0");
  Weight weight{view, m.rows, m.cols, m.row_stride, false};
  if (m.rows == 0 || m.cols == 0) return weight;
  if (view.data == nullptr)
    fail(StatusCode::kInvalidArgument, place, "weight.data", "null", "memory of N*K values", "load the weight first");
  if (address(view.data) % 2 != 0)
    fail(StatusCode::kBadLayout, place, "weight.data", fmt::format("{:#x}", address(view.data)),
         "addresses that are multiples of 2 bytes");
  if (m.col_stride == 1 && m.row_stride >= m.cols) return weight;
  // The transposed view: column stride >= N, row stride 1 (a single row has none).
  if ((m.rows == 1 || m.row_stride == 1) && m.cols > 1 && m.col_stride >= m.rows) {
    weight.transposed = true;
    weight.row_stride = m.col_stride;
    return weight;
  }
  fail(StatusCode::kBadLayout, place, "weight strides", fmt::format("({}, {})", view.stride[0], view.stride[1]),
       fmt::format("(>= {}, 1), or the transposed view (1, >= {})", m.cols, m.rows), "make the weight contiguous");
}

Status same_weight(const Weight& bound, const TensorView& now) {
  const auto changed = [&](const char* what) {
    return refusal(StatusCode::kWeightChanged, "gemm.run", what, describe(now), describe(bound.view),
                   "build a new plan for this weight");
  };
  if (now.rank != 2 || now.shape[0] != bound.n || now.shape[1] != bound.k) return changed("weight.shape");
  if (now.dtype != bound.view.dtype) return changed("weight.dtype");
  if (now.device != bound.view.device) return changed("weight.device");
  if (now.data == nullptr && bound.n && bound.k) return changed("weight.data");
  return {};
}

Status check_operands(const Weight& weight, const TensorView& x, const TensorView& out, std::int64_t* rows) {
  if (auto status = check_matrix("x", x, weight); !status.ok()) return status;
  if (auto status = check_matrix("out", out, weight); !status.ok()) return status;
  if (x.shape[1] != weight.k)
    return refusal(StatusCode::kInvalidArgument, "gemm.run", "x.shape[1]", std::to_string(x.shape[1]),
                   std::to_string(weight.k), "x has as many columns as the weight");
  if (out.shape[0] != x.shape[0] || out.shape[1] != weight.n)
    return refusal(StatusCode::kInvalidArgument, "gemm.run", "out.shape",
                   fmt::format("[{}, {}]", out.shape[0], out.shape[1]), fmt::format("[{}, {}]", x.shape[0], weight.n));
  if (x.shape[0] > INT32_MAX)
    return refusal(StatusCode::kInvalidArgument, "gemm.run", "x.shape[0]", std::to_string(x.shape[0]),
                   "rows up to 2^31 - 1", "run it in parts");
  *rows = x.shape[0];
  if (*rows == 0 || weight.n == 0) return {};
  const auto xm = matrix_of(x);
  const auto om = matrix_of(out);
  if (weight.k > 0)
    if (auto status = check_layout("x", x, xm); !status.ok()) return status;
  if (auto status = check_layout("out", out, om); !status.ok()) return status;
  MatrixView wm{weight.view.data, weight.n, weight.k, weight.row_stride, 1};
  if (weight.transposed) wm = {weight.view.data, weight.k, weight.n, weight.row_stride, 1};
  for (const auto& [name, other] : {std::pair<const char*, MatrixView>{"x", xm}, {"weight", wm}}) {
    if (overlap(om, other))
      return refusal(StatusCode::kOverlap, "gemm.run", "out", describe(out),
                     fmt::format("memory that does not meet {} at {:#x}", name, address(other.data)),
                     "give out its own memory");
  }
  return {};
}

WhyCode warp_takes_operands(const TensorView& x, const TensorView& out) {
  const auto xm = matrix_of(x);
  if (address(xm.data) % kWarpAlign != 0 || (xm.rows > 1 && !tma_stride(xm.row_stride))) return WhyCode::kXLayout;
  const auto om = matrix_of(out);
  if (address(om.data) % kWarpAlign != 0 || (om.rows > 1 && om.row_stride % 8 != 0)) return WhyCode::kOutLayout;
  return WhyCode::kNone;
}

FallbackReason warp_takes_weight(const Weight& weight, int weight_align) {
  if (weight.n % 16 != 0)
    return {WhyCode::kNNotMultipleOf16,
            fmt::format("N = {} is not a multiple of 16; the warp kernel takes 16 rows of weight at a time; pad the "
                        "weight with zero rows",
                        weight.n)};
  if (weight.k % 64 != 0)
    return {WhyCode::kKNotMultipleOf64,
            fmt::format("K = {} is not a multiple of 64; the warp kernel takes 64 columns at a time; pad x and weight "
                        "with zero columns",
                        weight.k)};
  if (weight.transposed || (weight.n > 1 && !tma_stride(weight.row_stride)))
    return {WhyCode::kWeightLayout,
            fmt::format("weight strides ({}, {}); the warp kernel takes rows of contiguous columns, a multiple of 8 "
                        "and less than 2^39 apart; make the weight contiguous",
                        weight.view.stride[0], weight.view.stride[1])};
  if (address(weight.view.data) % weight_align != 0)
    return {WhyCode::kWeightAlignment,
            fmt::format("weight address {:#x} is not a multiple of {} bytes; the warp kernel loads that much at a "
                        "time; allocate the weight aligned",
                        address(weight.view.data), weight_align)};
  return {};
}

std::string sentence_of(WhyCode code, const TensorView& x, const TensorView& out) {
  const bool is_x = code == WhyCode::kXLayout;
  const TensorView& view = is_x ? x : out;
  return fmt::format(
      "{0} at {1:#x} with row stride {2}; the warp kernel takes 16-byte aligned rows a multiple of 8 "
      "{3}apart; align {0}",
      is_x ? "x" : "out", address(view.data), view.stride[0], is_x ? "and less than 2^39 " : "");
}

std::string rows_sentence(int m) {
  return fmt::format("M = {}; the warp kernel takes 1 to {} rows; run fewer rows at a time, or stay on cuBLAS", m,
                     kMaxWarpRows);
}

std::string faster_sentence(const std::string& gpu, int measured_rows, double cublas_us, double warp_us) {
  return fmt::format("measured on {}: cuBLAS {:.2f} us, warp {:.2f} us at M = {}; pin(m, warp) forces the warp kernel",
                     gpu, cublas_us, warp_us, measured_rows);
}

std::string describe(const TensorView& view) { return fmt::format("{} at {:#x}", to_string(view), address(view.data)); }

bool same_place(const Weight& a, const Weight& b) {
  return a.view.data == b.view.data && a.row_stride == b.row_stride && a.transposed == b.transposed;
}

Stats Counters::read() const {
  const auto get = [](const std::atomic<std::uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  Stats stats;
  stats.warp_runs = get(warp_runs);
  stats.cublas_runs = get(cublas_runs);
  stats.cpu_runs = get(cpu_runs);
  stats.capture_misses = get(capture_misses);
  stats.workspace_misses = get(workspace_misses);
  stats.compiles = get(compiles);
  stats.late_compiles = get(late_compiles);
  stats.cache_hits = get(cache_hits);
  stats.rebinds = get(rebinds);
  for (std::size_t i = 0; i < stats.fallback_by_code.size(); ++i) stats.fallback_by_code[i] = get(fallback_by_code[i]);
  return stats;
}

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kWarp: return "warp";
    case Kind::kCublas: return "cublas";
    case Kind::kCpu: return "cpu";
  }
  return "unknown";
}

std::string_view why_name(WhyCode code) {
  switch (code) {
    case WhyCode::kNone: return "";
    case WhyCode::kNotPrepared: return "not_prepared";
    case WhyCode::kRowsAbove64: return "rows_above_64";
    case WhyCode::kNNotMultipleOf16: return "n_not_multiple_of_16";
    case WhyCode::kKNotMultipleOf64: return "k_not_multiple_of_64";
    case WhyCode::kWeightLayout: return "weight_layout";
    case WhyCode::kWeightAlignment: return "weight_alignment";
    case WhyCode::kXLayout: return "x_layout";
    case WhyCode::kOutLayout: return "out_layout";
    case WhyCode::kArchitecture: return "architecture";
    case WhyCode::kSharedMemory: return "shared_memory";
    case WhyCode::kCompileFailed: return "compile_failed";
    case WhyCode::kLoadFailed: return "load_failed";
    case WhyCode::kCompilingOff: return "compiling_off";
    case WhyCode::kSealed: return "sealed";
    case WhyCode::kPinned: return "pinned";
    case WhyCode::kDisabled: return "disabled";
    case WhyCode::kCublasFaster: return "cublas_faster";
  }
  return "unknown";
}

}  // namespace twostep
