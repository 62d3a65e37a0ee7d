#include "gemm/cublas.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <map>

#include "core/check.h"
#include "core/env.h"
#include "core/log.h"

namespace twostep {
namespace {

// Declarations and values as in NVIDIA's cublasLt.h (12 and 13).
constexpr int kCompute32F = 68;
constexpr int kR32F = 0;
constexpr int kR16BF = 14;
constexpr int kDescTransA = 3;
constexpr int kOpT = 1;
constexpr int kNotSupported = 15;
constexpr int kPreferWorkspace = 1;
constexpr int kPreferReductionMask = 3;
constexpr int kPreferAlignment[] = {5, 6, 7, 8};    // A, B, C, D
constexpr std::uint32_t kReductionComputeType = 2;  // sums of parts stay FP32; NONE is always allowed

struct MatrixLayout {  // cublasLtMatrixLayoutOpaque_t
  std::uint64_t opaque[8] = {};
};

struct HeuristicResult {  // cublasLtMatmulHeuristicResult_t
  std::uint64_t algo[8] = {};
  std::size_t workspace = 0;
  int state = 0;
  float waves = 0;
  int reserved[4] = {};
};

#define TWOSTEP_CUBLAS_CALLS(X)                                                                                \
  X(create, "cublasLtCreate", (void** handle))                                                                 \
  X(destroy, "cublasLtDestroy", (void* handle))                                                                \
  X(desc_create, "cublasLtMatmulDescCreate", (void** desc, int compute, int scale))                            \
  X(desc_destroy, "cublasLtMatmulDescDestroy", (void* desc))                                                   \
  X(desc_set, "cublasLtMatmulDescSetAttribute", (void* desc, int attribute, const void*, std::size_t))         \
  X(layout_init, "cublasLtMatrixLayoutInit_internal",                                                          \
    (MatrixLayout*, std::size_t, int dtype, std::uint64_t rows, std::uint64_t cols, std::int64_t ld))          \
  X(preference_create, "cublasLtMatmulPreferenceCreate", (void** preference))                                  \
  X(preference_destroy, "cublasLtMatmulPreferenceDestroy", (void* preference))                                 \
  X(preference_set, "cublasLtMatmulPreferenceSetAttribute", (void* preference, int, const void*, std::size_t)) \
  X(heuristic, "cublasLtMatmulAlgoGetHeuristic",                                                               \
    (void* handle, void* desc, const MatrixLayout* a, const MatrixLayout* b, const MatrixLayout* c,            \
     const MatrixLayout* d, void* preference, int wanted, HeuristicResult* results, int* found))               \
  X(check, "cublasLtMatmulAlgoCheck",                                                                          \
    (void* handle, void* desc, const MatrixLayout* a, const MatrixLayout* b, const MatrixLayout* c,            \
     const MatrixLayout* d, const std::uint64_t* algo, HeuristicResult* result))                               \
  X(matmul, "cublasLtMatmul",                                                                                  \
    (void* handle, void* desc, const void* alpha, const void* a, const MatrixLayout*, const void* b,           \
     const MatrixLayout*, const void* beta, const void* c, const MatrixLayout*, void* d, const MatrixLayout*,  \
     const std::uint64_t* algo, void* workspace, std::size_t workspace_bytes, void* stream))

struct CublasLt {
#define TWOSTEP_DECLARE(member, symbol, parameters) int(*member) parameters = nullptr;
  TWOSTEP_CUBLAS_CALLS(TWOSTEP_DECLARE)
#undef TWOSTEP_DECLARE
  std::size_t (*version)() = nullptr;
  Status status;
};

CublasLt open_library() {
  CublasLt lt;
  std::vector<std::string> names = {environment().cublaslt};
  if (names[0].empty())
    names = {"libcublasLt.so.13", "libcublasLt.so.12", "/usr/local/cuda/lib64/libcublasLt.so.13",
             "/usr/local/cuda/lib64/libcublasLt.so.12"};
  void* library = nullptr;
  std::string tried;
  for (const std::string& name : names) {
    library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
    tried += (tried.empty() ? "" : ", ") + name;
  }
  const auto unavailable = [](std::string value) {
    return refusal(StatusCode::kUnavailable, "gemm.cublas", "cuBLASLt", std::move(value),
                   "libcublasLt.so of CUDA 12 or 13", "install cuBLAS, or name its file in TWOSTEP_CUBLASLT");
  };
  if (library == nullptr) {
    lt.status = unavailable("not found: " + tried);
    return lt;
  }
#define TWOSTEP_LOAD(member, symbol, parameters)                             \
  lt.member = reinterpret_cast<decltype(lt.member)>(dlsym(library, symbol)); \
  if (lt.member == nullptr) {                                                \
    lt.status = unavailable("no entry point " symbol);                       \
    return lt;                                                               \
  }
  TWOSTEP_CUBLAS_CALLS(TWOSTEP_LOAD)
#undef TWOSTEP_LOAD
  lt.version = reinterpret_cast<decltype(lt.version)>(dlsym(library, "cublasLtGetVersion"));
  return lt;
}

// Never destroyed: plans may outlive static objects.
const CublasLt& library() {
  static const CublasLt& lt = *new CublasLt(open_library());
  return lt;
}

const CublasLt& cublas() {
  const CublasLt& lt = library();
  if (!lt.status.ok()) fail(lt.status);
  return lt;
}

void check(int result, const char* call) {
  if (result == 0) return;
  fail(result == 3 ? StatusCode::kOutOfMemory : StatusCode::kDeviceError, "gemm.cublas", call,
       fmt::format("cublasStatus {}", result), "0");
}

struct Layouts {
  MatrixLayout a, b, d;  // column-major: weight as K x N (or N x K), x as K x M, out as N x M
};

Layouts layouts(std::int64_t m, std::int64_t n, std::int64_t k, bool transposed, std::int64_t w_stride,
                std::int64_t x_stride, std::int64_t out_stride) {
  Layouts l;
  const auto init = [](MatrixLayout& layout, std::int64_t rows, std::int64_t cols, std::int64_t ld) {
    check(cublas().layout_init(&layout, sizeof layout, kR16BF, static_cast<std::uint64_t>(rows),
                               static_cast<std::uint64_t>(cols), ld),
          "cublasLtMatrixLayoutInit");
  };
  if (transposed) init(l.a, n, k, w_stride);
  else init(l.a, k, n, w_stride);
  init(l.b, k, m, x_stride);
  init(l.d, n, m, out_stride);
  return l;
}

std::int64_t weight_stride(const Weight& w) {
  // A single row has no stride, but cuBLAS wants a leading dimension.
  return std::max(w.row_stride, w.transposed ? w.n : w.k);
}

// CU_STREAM_PER_THREAD: one handle, a stream for each thread.
void* const kPerThreadStream = reinterpret_cast<void*>(0x2);

unsigned long long stream_id(Stream stream) {
  unsigned long long id = 0;
  TWOSTEP_CUDA_CHECK(cuStreamGetId(static_cast<CUstream>(stream.handle), &id), "gemm.cublas");
  return id;
}

void* make_desc(bool transposed) {
  void* desc = nullptr;
  check(cublas().desc_create(&desc, kCompute32F, kR32F), "cublasLtMatmulDescCreate");
  if (!transposed) check(cublas().desc_set(desc, kDescTransA, &kOpT, sizeof kOpT), "cublasLtMatmulDescSetAttribute");
  return desc;
}

bool aligned16(const void* data, std::int64_t rows, std::int64_t row_stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && (rows <= 1 || row_stride % 8 == 0);
}

}  // namespace

Status cublas_status() { return library().status; }

std::string cublas_version() {
  if (!library().status.ok() || library().version == nullptr) return {};
  const std::size_t v = library().version();  // 130002 is 13.0.2
  return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
}

// ---- CublasDevice

std::shared_ptr<CublasDevice> CublasDevice::of(int ordinal) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<CublasDevice>> devices;
  const std::lock_guard lock(mutex);
  auto device = devices[ordinal].lock();
  if (!device) devices[ordinal] = device = std::make_shared<CublasDevice>(ordinal);
  return device;
}

CublasDevice::CublasDevice(int) { check(cublas().create(&handle_), "cublasLtCreate"); }

CublasDevice::~CublasDevice() {
  if (handle_ != nullptr) library().destroy(handle_);
}

const CublasDevice::Place* CublasDevice::find(unsigned long long id) const {
  const int used = used_.load(std::memory_order_acquire);
  for (int i = 0; i < used; ++i)
    if (places_[static_cast<std::size_t>(i)].id == id) return &places_[static_cast<std::size_t>(i)];
  return nullptr;
}

void* CublasDevice::workspace(Stream stream, bool capturing) const {
  if (!capturing) {
    const Place* place = find(stream_id(stream));
    return place ? place->memory.load(std::memory_order_acquire) : nullptr;
  }
  if (stream.handle == kPerThreadStream) return nullptr;
  for (int i = used_.load(std::memory_order_acquire) - 1; i >= 0; --i) {  // the newest stream of this handle
    const Place& place = places_[static_cast<std::size_t>(i)];
    if (place.handle == stream.handle) return place.memory.load(std::memory_order_acquire);
  }
  return nullptr;
}

void* CublasDevice::make_workspace(Stream stream, bool retry) {
  const unsigned long long id = stream_id(stream);
  const auto settled = [&](const Place* place) {
    return place != nullptr && (!retry || place->memory.load(std::memory_order_acquire) != nullptr);
  };
  if (const Place* place = find(id); settled(place)) return place->memory.load(std::memory_order_acquire);
  const std::lock_guard lock(mutex_);
  auto* place = const_cast<Place*>(find(id));
  if (settled(place)) return place->memory.load(std::memory_order_acquire);
  const int used = used_.load(std::memory_order_relaxed);
  if (place == nullptr && used == kPlaces) return nullptr;
  void* memory = nullptr;
  try {
    workspaces_.emplace_back(kWorkspaceBytes);
    memory = workspaces_.back().data();
  } catch (const Error& error) {
    log_warn(std::string("no cuBLAS workspace for a stream: ") + error.what());
  }
  if (place == nullptr) {
    place = &places_[static_cast<std::size_t>(used)];
    place->id = id;
    place->handle = stream.handle;
    used_.store(used + 1, std::memory_order_release);
  }
  place->memory.store(memory, std::memory_order_release);
  return memory;
}

// ---- CublasGemm

CublasGemm::CublasGemm(int ordinal, const Weight& weight, std::int64_t workspace_limit)
    : device_(CublasDevice::of(ordinal)),
      n_(weight.n),
      k_(weight.k),
      transposed_(weight.transposed),
      workspace_limit_(std::min<std::size_t>(static_cast<std::size_t>(std::max<std::int64_t>(workspace_limit, 0)),
                                             CublasDevice::kWorkspaceBytes)),
      desc_(make_desc(weight.transposed), cublas().desc_destroy) {
  for (int m = 1; m <= kMaxWarpRows; ++m) safe_[static_cast<std::size_t>(m)] = choose_safe(m, weight);
  if (workspace_limit_ > 0) device_->make_workspace({}, true);
}

std::vector<CublasAlgo> CublasGemm::choose(int m, int alignment, std::size_t workspace, std::int64_t pad) const {
  const CublasLt& lt = cublas();
  void* preference = nullptr;
  check(lt.preference_create(&preference), "cublasLtMatmulPreferenceCreate");
  const std::shared_ptr<void> owned(preference, [&](void* p) { lt.preference_destroy(p); });
  const std::uint64_t limit = workspace;
  const auto align = static_cast<std::uint32_t>(alignment);
  check(lt.preference_set(preference, kPreferWorkspace, &limit, sizeof limit), "cublasLtMatmulPreferenceSetAttribute");
  check(lt.preference_set(preference, kPreferReductionMask, &kReductionComputeType, sizeof kReductionComputeType),
        "cublasLtMatmulPreferenceSetAttribute");
  for (int attribute : kPreferAlignment)
    check(lt.preference_set(preference, attribute, &align, sizeof align), "cublasLtMatmulPreferenceSetAttribute");
  const Layouts l = layouts(m, n_, k_, transposed_, (transposed_ ? n_ : k_) + pad, k_ + pad, n_ + pad);
  std::array<HeuristicResult, 8> results;
  int found = 0;
  const int code = lt.heuristic(device_->handle(), desc_.get(), &l.a, &l.b, &l.d, &l.d, preference,
                                static_cast<int>(results.size()), results.data(), &found);
  std::vector<CublasAlgo> algos;
  if (code != 0) return algos;  // cuBLAS has none for the shape
  for (int i = 0; i < found; ++i) {
    const HeuristicResult& result = results[static_cast<std::size_t>(i)];
    if (result.state != 0) continue;
    CublasAlgo& algo = algos.emplace_back();
    std::copy(std::begin(result.algo), std::end(result.algo), algo.opaque.begin());
    algo.workspace = result.workspace;
  }
  return algos;
}

// Leading dimensions that are no multiple of 8 are asked for, since the safe algorithm must take such ones. The
// heuristic names some that refuse an odd address all the same: only a run tells. Empty if none will do; run asks
// again.
CublasAlgo CublasGemm::choose_safe(int m, const Weight& weight) {
  for (const CublasAlgo& algo : choose(m, 2, 0, 1)) {
    const bool known = m > 1 && m <= kMaxWarpRows && algo == safe_[static_cast<std::size_t>(m) - 1];
    if (known || warm_up(algo, m, weight, 2)) return algo;
  }
  return {};
}

bool CublasGemm::warm_up(const CublasAlgo& algo, int m, const Weight& weight, int offset) {
  // Loading the kernel is the point: more rows than fit here would load the same one.
  constexpr std::int64_t kMostBytes = 256 << 20;
  const std::int64_t rows = std::clamp<std::int64_t>(kMostBytes / (2 * (n_ + k_)), 1, m);
  const auto x_bytes = static_cast<std::size_t>(rows * k_ * 2 + offset + 255) / 256 * 256;
  const auto out_bytes = static_cast<std::size_t>(rows * n_ * 2 + offset + 255) / 256 * 256;
  bool ran = false;
  try {
    device_->with_scratch(x_bytes + out_bytes + algo.workspace, [&](void* memory, Stream stream) {
      auto* bytes = static_cast<char*>(memory);
      const MatrixView x{bytes + offset, rows, k_, k_, 1};
      const MatrixView out{bytes + x_bytes + offset, rows, n_, n_, 1};
      ran = multiply(algo, weight, x, out, algo.workspace ? bytes + x_bytes + out_bytes : nullptr, stream);
    });
  } catch (const Error& error) {
    if (error.code() != StatusCode::kOutOfMemory) throw;
    log_warn(fmt::format("cuBLAS {} x {}: M = {} is not warmed up: {}", n_, k_, m, error.what()));
  }
  return ran;
}

const CublasGemm::Fixed* CublasGemm::find(int m) const {
  if (m <= kMaxWarpRows) return rows_[static_cast<std::size_t>(m)].load(std::memory_order_acquire);
  for (std::size_t i = 0; i < kFixedAbove; ++i) {
    const Fixed* fixed = above_[(static_cast<std::size_t>(m) + i) % kFixedAbove].load(std::memory_order_acquire);
    if (fixed == nullptr || fixed->m == m) return fixed;
  }
  return nullptr;
}

void CublasGemm::prepare(int m, const Weight& weight) {
  if (find(m) != nullptr) return;
  const std::lock_guard lock(mutex_);
  if (find(m) != nullptr || owned_.size() == kFixedAbove) return;
  auto fixed = std::make_unique<Fixed>();
  fixed->m = m;
  fixed->safe = m > kMaxWarpRows ? choose_safe(m, weight) : safe_[static_cast<std::size_t>(m)];
  fixed->fast = fixed->safe;
  if (aligned16(weight.view.data, 1, 0))
    for (const CublasAlgo& algo : choose(m, 16, workspace_limit_, 0))
      if (warm_up(algo, m, weight, 0)) {
        fixed->fast = algo;
        break;
      }
  const Fixed* published = owned_.emplace_back(std::move(fixed)).get();
  if (m <= kMaxWarpRows) {
    rows_[static_cast<std::size_t>(m)].store(published, std::memory_order_release);
    return;
  }
  std::size_t at = static_cast<std::size_t>(m) % kFixedAbove;
  while (above_[at].load(std::memory_order_relaxed) != nullptr) at = (at + 1) % kFixedAbove;
  above_[at].store(published, std::memory_order_release);
}

bool CublasGemm::has_workspace(Stream stream, bool capturing) const {
  return workspace_limit_ == 0 || device_->workspace(stream, capturing) != nullptr;
}

void CublasGemm::make_workspace(Stream stream) {
  if (workspace_limit_ > 0) device_->make_workspace(stream, true);
}

bool CublasGemm::supports(const CublasAlgo& algo, const Weight& weight, const MatrixView& x,
                          const MatrixView& out) const {
  const Layouts l = layouts(x.rows, n_, k_, transposed_, weight_stride(weight), x.row_stride, out.row_stride);
  HeuristicResult result;
  return cublas().check(device_->handle(), desc_.get(), &l.a, &l.b, &l.d, &l.d, algo.opaque.data(), &result) == 0 &&
         result.workspace <= algo.workspace;
}

bool CublasGemm::multiply(const CublasAlgo& algo, const Weight& weight, const MatrixView& x, const MatrixView& out,
                          void* workspace, Stream stream) const {
  if (algo == CublasAlgo{}) return false;
  const Layouts l = layouts(x.rows, n_, k_, transposed_, weight_stride(weight), x.row_stride, out.row_stride);
  const float alpha = 1, beta = 0;
  auto* d = const_cast<void*>(out.data);
  const int result =
      cublas().matmul(device_->handle(), desc_.get(), &alpha, weight.view.data, &l.a, x.data, &l.b, &beta, d, &l.d, d,
                      &l.d, algo.opaque.data(), workspace, algo.workspace, stream.handle);
  if (result == kNotSupported) return false;
  check(result, "cublasLtMatmul");
  return true;
}

void CublasGemm::run(const Weight& weight, const TensorView& x_view, const TensorView& out_view, Stream stream,
                     bool fixed, bool capturing, Counters& counters) {
  const MatrixView x = matrix_of(x_view);
  const MatrixView out = matrix_of(out_view);
  const int m = static_cast<int>(x.rows);
  const Fixed* known = find(m);
  const bool aligned = aligned16(x.data, x.rows, x.row_stride) && aligned16(out.data, out.rows, out.row_stride) &&
                       aligned16(weight.view.data, 2, weight_stride(weight)) && n_ % 8 == 0 && k_ % 8 == 0;
  const bool packed = x.row_stride == k_ && out.row_stride == n_ && weight_stride(weight) == (transposed_ ? n_ : k_);
  if (fixed && known != nullptr &&
      (aligned ||
       (packed && aligned16(x.data, 1, 0) && aligned16(out.data, 1, 0) && aligned16(weight.view.data, 1, 0)))) {
    void* workspace = nullptr;
    bool usable = packed || supports(known->fast, weight, x, out);
    if (usable && known->fast.workspace > 0) {
      workspace = capturing ? device_->workspace(stream, true) : device_->make_workspace(stream, false);
      if (workspace == nullptr) {
        if (counters.workspace_misses.fetch_add(1, std::memory_order_relaxed) == 0)
          log_warn(
              "a cuBLAS product runs without workspace: its stream was first seen under capture, or no memory is "
              "left; prepare on that stream before the capture");
        usable = false;
      }
    }
    if (usable && multiply(known->fast, weight, x, out, workspace, stream)) return;
  }
  const CublasAlgo safe = m <= kMaxWarpRows ? safe_[static_cast<std::size_t>(m)] : known ? known->safe : CublasAlgo{};
  if (multiply(safe, weight, x, out, nullptr, stream)) return;
  for (const CublasAlgo& algo : choose(m, 2, 0, 1))  // host work alone
    if (multiply(algo, weight, x, out, nullptr, stream)) return;
  fail(StatusCode::kUnsupported, "gemm.cublas", "operands", to_string(x_view), "a layout that cuBLASLt takes",
       "make the operands contiguous and 16-byte aligned");
}

}  // namespace twostep
