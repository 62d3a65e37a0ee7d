// DraftGemm on a GPU: prepare fixes a kernel or an algorithm per row count, run launches it.
#include <fmt/format.h>

#include <mutex>

#include "core/check.h"
#include "core/env.h"
#include "core/log.h"
#include "gemm/cublas.h"
#include "gemm/packed.h"
#include "gemm/warp.h"

namespace twostep {
namespace {

// A weight at its address, the loaded kernels and their descriptors of it.
struct BoundKernels {
  Weight weight;
  std::array<std::shared_ptr<const WarpKernel>, kNumBuckets> kernels;
  std::array<TensorMap, kNumBuckets> maps;

  void describe_weight() {
    for (std::size_t b = 0; b < kernels.size(); ++b)
      if (kernels[b]) maps[b] = warp_tensor_map(weight, kernels[b]->tactic);
  }
  std::vector<CompileKey> loaded_keys() const {
    std::vector<CompileKey> all;
    for (const auto& kernel : kernels)
      if (kernel) all.push_back(kernel->compiled->key);
    return all;
  }
};

// All that a run reads, published by one pointer and never changed. A run that has started keeps the snapshot that it
// began with.
struct Snapshot : BoundKernels {
  FallbackReason weight_reason;               // why this weight, as it lies, is not on the warp kernel
  CublasGemm* cublas = nullptr;               // of this weight's orientation; null where cuBLASLt is missing
  mutable std::atomic<bool> captured{false};  // a graph recorded this address
};

struct Route {
  Kind kind = Kind::kCublas;
  WhyCode code = WhyCode::kNone;
};

// A route of some m, for operands that check_operands took.
Route for_operands(Route route, const TensorView& x, const TensorView& out) {
  if (route.kind != Kind::kWarp) return route;
  const WhyCode code = warp_takes_operands(x, out);
  return code == WhyCode::kNone ? route : Route{Kind::kCublas, code};
}

// One launch of the kernel of x's bucket, as a link of the stream's chain. `w` is what its tactic reads.
void launch_link(const BoundKernels& bound, const void* w, const TensorView& x, const TensorView& out, Pdl pdl,
                 CUcontext context, Stream stream, bool capturing) {
  const auto bucket = static_cast<std::size_t>(bucket_index(static_cast<int>(x.shape[0])));
  const bool early = pdl != Pdl::kOff && PdlChain::follows_own_kernel(context, stream, capturing, pdl == Pdl::kAlways);
  launch_warp(*bound.kernels[bucket], bound.maps[bucket], w, bound.weight, matrix_of(x), matrix_of(out), early, stream);
  PdlChain::record(context, stream, capturing);
}

enum class Pin : std::uint8_t { kNone, kWarp, kCublas };

bool permanent(WhyCode code) {
  switch (code) {
    case WhyCode::kCompileFailed:
    case WhyCode::kLoadFailed:
    case WhyCode::kCompilingOff:
    case WhyCode::kNotPrepared:
    case WhyCode::kSealed: return false;
    default: return true;
  }
}

class CudaPlan final : public Plan {
 public:
  CudaPlan(const TensorView& view, const Options& options, std::shared_ptr<PackedWeight::Impl> packed);

  ~CudaPlan() override;

  Kind prepare(int m, Stream stream) override;
  void run(const TensorView* weight, const TensorView& x, const TensorView& out, Stream stream) override;
  void bind(const TensorView& weight) override;
  void weights_updated(Stream stream) override;
  void seal() override { sealed_.store(true, std::memory_order_release); }
  void pin(int m, Kind kind) override;
  Kind kind(int m) const override { return route(*snapshot(), m).kind; }
  Kind kind(const TensorView& x, const TensorView& out) const override;
  WhyCode why_code(int m) const override { return route(*snapshot(), m).code; }
  std::string why(int m) const override { return sentence(*snapshot(), m, route(*snapshot(), m).code); }
  std::string why(const TensorView& x, const TensorView& out) const override;
  Status accepts(const TensorView& x, const TensorView& out) const override;
  Tactic tactic(int m) const override;
  Stats stats() const override { return counters_.read(); }
  std::vector<CompileKey> keys() const override;
  std::vector<Address> captured_addresses() const override;
  const Weight& weight() const override { return snapshot()->weight; }

 private:
  const Snapshot* snapshot() const { return current_.load(std::memory_order_acquire); }
  const Snapshot* follow(const TensorView& weight);
  const Snapshot* publish(std::unique_ptr<Snapshot> next);
  std::unique_ptr<Snapshot> copy_of(const Snapshot& s, const Weight& weight) const;

  // Which kind serves m, and why not warp. Pure reads; formats nothing.
  Route route(const Snapshot& s, int m) const;
  Route route(const Snapshot& s, const TensorView& x, const TensorView& out) const {
    return for_operands(route(s, static_cast<int>(x.shape[0])), x, out);
  }
  WhyCode shape_reason(const Snapshot& s, int m) const;  // all but "is the kernel loaded"
  std::string sentence(const Snapshot& s, int m, WhyCode code) const;
  void prepare_rows(int m, Stream stream, bool late);
  void load_bucket(int m, bool late);
  Tactic choose_tactic(int m) const;
  Status strict_refusal(const Snapshot& s, int m, WhyCode code) const;
  Status strict_refusal(const Snapshot& s, const TensorView& x, const TensorView& out, WhyCode code) const;
  CublasGemm* cublas_for(const Weight& weight);
  bool first_of(WhyCode code) const;  // of this plan: its reason is logged once
  void fill_zero(const MatrixView& out, Stream stream) const;

  const Options options_;
  const int device_;
  const CUcontext context_;
  const DeviceFacts facts_;
  const std::shared_ptr<PackedWeight::Impl> packed_;
  std::string no_tactic_;                               // why no tactic is valid on this GPU; empty: some are
  std::array<bool, kMaxWarpRows + 1> cublas_faster_{};  // by the table

  std::atomic<const Snapshot*> current_{nullptr};
  std::atomic<bool> sealed_{false};
  std::atomic<bool> ordinary_next_{false};  // the weight was written or moved: the next launch has no early loads
  std::array<std::atomic<bool>, kMaxWarpRows + 1> prepared_{};
  std::array<std::atomic<Pin>, kMaxWarpRows + 1> pins_{};
  std::array<std::atomic<WhyCode>, kNumBuckets> failed_{};  // last transient failure of a bucket
  std::array<std::atomic<bool>, kNumBuckets + 1> warned_miss_{};
  mutable std::atomic<std::uint32_t> logged_{0};  // reasons, one bit each
  mutable Counters counters_;

  mutable std::mutex mutex_;                           // of what follows; never held during a build
  std::array<std::unique_ptr<CublasGemm>, 2> cublas_;  // for row-major weights, for transposed ones
  std::vector<std::unique_ptr<const Snapshot>> snapshots_;
  std::array<std::string, kNumBuckets> failure_text_;
};

CudaPlan::CudaPlan(const TensorView& view, const Options& options, std::shared_ptr<PackedWeight::Impl> packed)
    : options_(options),
      device_(view.device.index),
      context_(primary_context(device_)),
      facts_(device_facts(device_)),
      packed_(std::move(packed)) {
  const char* place = "gemm.DraftGemm";
  auto first = std::make_unique<Snapshot>();
  first->weight = check_weight(view, place);
  const Weight& w = first->weight;
  first->weight_reason = warp_takes_weight(w, 16);
  const ContextGuard context(context_);
  const RelaxedCapture relaxed;
  if (w.n > 0 && w.k > 0) {
    first->cublas = cublas_for(w);
    if (warp_eligible(w.n, w.k) && !arch_name(facts_.arch).empty()) {
      for (int m = 1; m <= kMaxWarpRows; ++m)
        if (const auto entry = table_entry(m, w.n, w.k, facts_))
          cublas_faster_[static_cast<std::size_t>(m)] = !entry->warp_wins() && !options.strict;
      try {
        warp_tactic(kMaxWarpRows, w.n, w.k, facts_, options.strict);
      } catch (const Error& error) {
        no_tactic_ = error.what();
      }
    }
  }
  publish(std::move(first));
}

// cuBLAS leaves its context current when its handle ends: the caller's is put back.
CudaPlan::~CudaPlan() {
  quietly(context_, [&] {
    for (auto& cublas : cublas_) cublas.reset();
  });
}

CublasGemm* CudaPlan::cublas_for(const Weight& weight) {
  if (!cublas_status().ok()) return nullptr;
  auto& cublas = cublas_[weight.transposed ? 1 : 0];
  if (!cublas) cublas = std::make_unique<CublasGemm>(device_, weight, options_.workspace_limit);
  return cublas.get();
}

// ---- Snapshots

const Snapshot* CudaPlan::publish(std::unique_ptr<Snapshot> next) {
  const Snapshot* raw = next.get();
  snapshots_.push_back(std::move(next));
  current_.store(raw, std::memory_order_release);
  return raw;
}

std::unique_ptr<Snapshot> CudaPlan::copy_of(const Snapshot& s, const Weight& weight) const {
  auto next = std::make_unique<Snapshot>();
  next->weight = weight;
  next->kernels = s.kernels;
  next->weight_reason = warp_takes_weight(weight, 16);
  next->cublas = s.cublas;
  if (!next->weight_reason) next->describe_weight();
  return next;
}

// 3.6: the weight as it is now. A new place is rebound; another shape, dtype or device is refused.
const Snapshot* CudaPlan::follow(const TensorView& now) {
  const Snapshot* s = snapshot();
  throw_if_error(same_weight(s->weight, now));
  const Weight weight = check_weight(now, "gemm.run");
  if (same_place(s->weight, weight)) return s;
  if (packed_)
    fail(StatusCode::kWeightChanged, "gemm.run", "weight", describe(now), describe(packed_->source.view),
         "pack the new weight and build a new plan");
  const std::lock_guard lock(mutex_);
  s = snapshot();
  if (same_place(s->weight, weight)) return s;  // another thread was first
  count(counters_.rebinds);
  ordinary_next_.store(true, std::memory_order_release);
  PdlChain::forget();
  // Two tensors in turn must not make the list grow: an old snapshot of this weight serves if it has the kernels.
  for (const auto& old : snapshots_)
    if (same_place(old->weight, weight) && old->kernels == s->kernels) {
      current_.store(old.get(), std::memory_order_release);
      return old.get();
    }
  auto next = copy_of(*s, weight);
  if (weight.transposed != s->weight.transposed) {
    const RelaxedCapture relaxed;
    next->cublas = cublas_for(weight);
  }
  return publish(std::move(next));
}

void CudaPlan::bind(const TensorView& weight) {
  const ContextGuard context(context_);
  follow(weight);
}

// ---- Which kind serves m

WhyCode CudaPlan::shape_reason(const Snapshot& s, int m) const {
  if (m > kMaxWarpRows) return WhyCode::kRowsAbove64;
  const Pin pinned = m > 0 ? pins_[static_cast<std::size_t>(m)].load(std::memory_order_relaxed) : Pin::kNone;
  if (pinned == Pin::kCublas) return WhyCode::kPinned;
  if (!options_.warp || !environment().warp) return WhyCode::kDisabled;
  if (s.weight_reason) return s.weight_reason.code;
  if (arch_name(facts_.arch).empty()) return WhyCode::kArchitecture;
  if (!no_tactic_.empty()) return WhyCode::kSharedMemory;
  if (pinned != Pin::kWarp && m > 0 && cublas_faster_[static_cast<std::size_t>(m)]) return WhyCode::kCublasFaster;
  return WhyCode::kNone;
}

Route CudaPlan::route(const Snapshot& s, int m) const {
  if (m <= 0 || s.weight.n == 0 || s.weight.k == 0) return {Kind::kCublas, WhyCode::kNone};  // nothing to multiply
  if (const WhyCode code = shape_reason(s, m); code != WhyCode::kNone) return {Kind::kCublas, code};
  const auto bucket = static_cast<std::size_t>(bucket_index(m));
  if (s.kernels[bucket]) return {Kind::kWarp, WhyCode::kNone};
  const WhyCode failed = failed_[bucket].load(std::memory_order_acquire);
  if (failed != WhyCode::kNone) return {Kind::kCublas, failed};
  return {Kind::kCublas, sealed_.load(std::memory_order_acquire) ? WhyCode::kSealed : WhyCode::kNotPrepared};
}

std::string CudaPlan::sentence(const Snapshot& s, int m, WhyCode code) const {
  switch (code) {
    case WhyCode::kNone: return {};
    case WhyCode::kRowsAbove64: return rows_sentence(m);
    case WhyCode::kPinned: return fmt::format("M = {} is pinned to cuBLAS; pin(m, warp) undoes it", m);
    case WhyCode::kDisabled: return "the warp kernel is off; unset Options.warp = false and TWOSTEP_WARP=0";
    case WhyCode::kArchitecture:
      return fmt::format("{} has compute capability {}; kernels exist for 90, 100, 103 and 120; stay on cuBLAS",
                         facts_.name, facts_.arch);
    case WhyCode::kSharedMemory: return no_tactic_;
    case WhyCode::kCublasFaster: {
      const auto entry = table_entry(m, s.weight.n, s.weight.k, facts_);
      return entry ? faster_sentence(facts_.name, entry->rows, entry->cublas_us, entry->warp_us) : std::string();
    }
    case WhyCode::kNotPrepared: return fmt::format("M = {} is not prepared; call prepare({})", m, m);
    case WhyCode::kSealed:
      return fmt::format("M = {} was not prepared before seal(); prepare it first in a new plan", m);
    case WhyCode::kCompileFailed:
    case WhyCode::kLoadFailed:
    case WhyCode::kCompilingOff: {
      const std::lock_guard lock(mutex_);
      return failure_text_[static_cast<std::size_t>(bucket_index(m))] + "; prepare again to retry";
    }
    default: return s.weight_reason.sentence;
  }
}

Kind CudaPlan::kind(const TensorView& x, const TensorView& out) const {
  const Snapshot* s = snapshot();
  std::int64_t m = 0;
  throw_if_error(check_operands(s->weight, x, out, &m));
  return route(*s, x, out).kind;
}

std::string CudaPlan::why(const TensorView& x, const TensorView& out) const {
  const Snapshot* s = snapshot();
  std::int64_t m = 0;
  if (const Status status = check_operands(s->weight, x, out, &m); !status.ok()) return status.message();
  const WhyCode code = route(*s, x, out).code;
  return is_operand_code(code) ? sentence_of(code, x, out) : sentence(*s, static_cast<int>(m), code);
}

Status CudaPlan::accepts(const TensorView& x, const TensorView& out) const {
  std::int64_t rows = 0;
  const Snapshot* s = snapshot();
  if (Status status = check_operands(s->weight, x, out, &rows); !status.ok()) return status;
  if (rows == 0 || s->weight.n == 0 || s->weight.k == 0) return {};
  Route r = route(*s, x, out);
  if (r.code == WhyCode::kNotPrepared) r = for_operands({Kind::kWarp, WhyCode::kNone}, x, out);  // a run prepares it
  if (r.kind == Kind::kWarp) return {};
  if (options_.strict && rows <= kMaxWarpRows) return strict_refusal(*s, x, out, r.code);
  return s->cublas ? Status{} : cublas_status();
}

// ---- Prepare

Kind CudaPlan::prepare(int m, Stream stream) {
  if (m < 0) fail(StatusCode::kInvalidArgument, "gemm.prepare", "m", std::to_string(m), "0 and more");
  const Weight& w = weight();
  if (m == 0 || w.n == 0 || w.k == 0) return kind(m);
  const ContextGuard context(context_);
  const bool capturing = is_capturing(stream);
  const Snapshot* s = snapshot();
  const Route now = route(*s, m);
  const bool fixed = now.kind == Kind::kWarp || (permanent(now.code) && s->cublas && s->cublas->prepared(m));
  if (fixed && (!s->cublas || s->cublas->has_workspace(stream, capturing))) return now.kind;
  if (capturing)
    fail(StatusCode::kCapturing, "gemm.prepare", "stream", "capturing", "a stream that does not capture",
         "prepare before the capture begins");
  prepare_rows(m, stream, false);
  return kind(m);
}

void CudaPlan::prepare_rows(int m, Stream stream, bool late) {
  const RelaxedCapture relaxed;
  const WhyCode reason = shape_reason(*snapshot(), m);
  if (reason == WhyCode::kNone && !snapshot()->kernels[static_cast<std::size_t>(bucket_index(m))]) load_bucket(m, late);
  const Snapshot& s = *snapshot();
  const Route r = route(s, m);
  if (r.kind != Kind::kWarp) {
    if (options_.strict && m <= kMaxWarpRows) fail(strict_refusal(s, m, r.code));
    if (s.cublas) s.cublas->prepare(m, s.weight);
    if (first_of(r.code)) {
      const std::string text =
          fmt::format("gemm {} x {}: M = {} on cuBLAS: {}", s.weight.n, s.weight.k, m, sentence(s, m, r.code));
      if (permanent(r.code)) log_info(text);
      else log_warn(text);
    }
  }
  if (s.cublas) s.cublas->make_workspace(stream);
  if (m <= kMaxWarpRows) prepared_[static_cast<std::size_t>(m)].store(true, std::memory_order_release);
}

bool CudaPlan::first_of(WhyCode code) const {
  const std::uint32_t bit = 1u << static_cast<unsigned>(code);
  return (logged_.load(std::memory_order_relaxed) & bit) == 0 &&
         (logged_.fetch_or(bit, std::memory_order_relaxed) & bit) == 0;
}

Tactic CudaPlan::choose_tactic(int m) const {
  const Weight& w = weight();
  if (packed_) {
    const Tactic packed = complete(packed_->tactic, m, facts_);
    const bool family = !options_.strict || family_of(packed) == strict_family(w.n, w.k, facts_);
    if (family && tactic_valid(packed, m, w.n, w.k, facts_).ok()) return packed;
  }
  return warp_tactic(m, w.n, w.k, facts_, options_.strict);
}

// Loads the kernel of m's bucket. A failure is the bucket's alone, and is tried again by the next prepare, not by run.
void CudaPlan::load_bucket(int m, bool late) {
  const auto bucket = static_cast<std::size_t>(bucket_index(m));
  if (sealed_.load(std::memory_order_acquire)) return;
  if (late && failed_[bucket].load(std::memory_order_acquire) != WhyCode::kNone) return;
  try {
    LoadReport report;
    auto kernel = std::make_shared<WarpKernel>(
        load_warp_kernel(m, weight(), choose_tactic(m), facts_.arch, options_.jit, &report));
    const bool compiled = report.from == BuiltFrom::kCompiled;
    count(compiled ? counters_.compiles : counters_.cache_hits);
    if (compiled && late) count(counters_.late_compiles);
    const std::lock_guard lock(mutex_);
    const Snapshot* s = snapshot();
    if (s->kernels[bucket]) return;  // another thread was first
    auto next = std::make_unique<Snapshot>();
    static_cast<BoundKernels&>(*next) = *s;
    next->weight_reason = s->weight_reason;
    next->cublas = s->cublas;
    next->captured.store(s->captured.load());
    next->kernels[bucket] = kernel;
    if (!next->weight_reason) next->maps[bucket] = warp_tensor_map(next->weight, kernel->tactic);
    failed_[bucket].store(WhyCode::kNone, std::memory_order_release);
    publish(std::move(next));
  } catch (const Error& error) {
    const WhyCode code = error.code() == StatusCode::kCompileFailed ? WhyCode::kCompileFailed
                         : error.code() == StatusCode::kUnavailable || error.code() == StatusCode::kUnsupported
                             ? WhyCode::kCompilingOff
                             : WhyCode::kLoadFailed;
    {
      const std::lock_guard lock(mutex_);
      failure_text_[bucket] = error.what();
    }
    failed_[bucket].store(code, std::memory_order_release);
  }
}

Status CudaPlan::strict_refusal(const Snapshot& s, int m, WhyCode code) const {
  StatusCode status = StatusCode::kUnsupported;
  if (code == WhyCode::kCompileFailed || code == WhyCode::kLoadFailed || code == WhyCode::kCompilingOff)
    status = StatusCode::kCompileFailed;
  if (code == WhyCode::kNotPrepared || code == WhyCode::kSealed) status = StatusCode::kNotPrepared;
  return refusal(status, "gemm.run", "m", sentence(s, m, code), "with strict: a row count that the warp kernel serves");
}

Status CudaPlan::strict_refusal(const Snapshot& s, const TensorView& x, const TensorView& out, WhyCode code) const {
  if (!is_operand_code(code)) return strict_refusal(s, static_cast<int>(x.shape[0]), code);
  return refusal(StatusCode::kUnsupported, "gemm.run", "operands", sentence_of(code, x, out),
                 "with strict: what the warp kernel takes");
}

void CudaPlan::pin(int m, Kind kind) {
  const char* place = "gemm.pin";
  if (m < 1) fail(StatusCode::kInvalidArgument, place, "m", std::to_string(m), "1 and more");
  if (kind == Kind::kCpu)
    fail(StatusCode::kUnsupported, place, "kind", "cpu", "warp, cublas", "the weight is on a GPU");
  if (kind == Kind::kCublas) {
    if (options_.strict && m <= kMaxWarpRows)
      fail(StatusCode::kUnsupported, place, "kind", "cublas", "warp for rows 1 to 64 with strict");
    throw_if_error(cublas_status());
    if (m > kMaxWarpRows) return;
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    if (const Snapshot* s = snapshot(); s->cublas) s->cublas->prepare(m, s->weight);
    pins_[static_cast<std::size_t>(m)].store(Pin::kCublas, std::memory_order_release);
    return;
  }
  const auto refuse = [&](WhyCode code) {
    fail(StatusCode::kUnsupported, place, "m", sentence(*snapshot(), m, code), "rows that the warp kernel serves");
  };
  if (m > kMaxWarpRows) refuse(WhyCode::kRowsAbove64);
  auto& pin = pins_[static_cast<std::size_t>(m)];
  const Pin before = pin.exchange(Pin::kWarp);
  if (const WhyCode code = shape_reason(*snapshot(), m); code != WhyCode::kNone) {
    pin.store(before);
    refuse(code);
  }
}

void CudaPlan::weights_updated(Stream stream) {
  if (packed_) packed_->pack(stream);
  ordinary_next_.store(true, std::memory_order_release);
  PdlChain::forget();  // of this thread; the flag is for the others
}

// ---- Run

void CudaPlan::run(const TensorView* now, const TensorView& x, const TensorView& out, Stream stream) {
  const ContextGuard context(context_);
  const Snapshot* s = now != nullptr ? follow(*now) : snapshot();
  std::int64_t rows = 0;
  if (const Status status = check_operands(s->weight, x, out, &rows); !status.ok()) fail(status);
  if (rows == 0 || s->weight.n == 0) return;
  if (s->weight.k == 0) return fill_zero(matrix_of(out), stream);
  const bool capturing = is_capturing(stream);
  const int m = static_cast<int>(rows);

  Route r = route(*s, x, out);
  const auto prepared = [&] {
    if (r.kind == Kind::kWarp || is_operand_code(r.code)) return true;
    if (r.code == WhyCode::kNotPrepared) return false;
    return m <= kMaxWarpRows ? prepared_[static_cast<std::size_t>(m)].load(std::memory_order_acquire)
                             : s->cublas && s->cublas->prepared(m);
  };
  if (!prepared()) {
    if (!capturing) {
      try {
        prepare_rows(m, stream, true);  // the first eager run of m prepares it
      } catch (const Error& error) {
        if (options_.strict && m <= kMaxWarpRows) throw;
        log_warn(fmt::format("gemm {} x {}: M = {} runs on the safe cuBLAS algorithm: {}", s->weight.n, s->weight.k, m,
                             error.what()));
      }
      if (now == nullptr) s = snapshot();
      else s = follow(*now);
      r = route(*s, x, out);
    } else {
      count(counters_.capture_misses);
      if (options_.on_miss == OnMiss::kRefuse || (options_.strict && m <= kMaxWarpRows))
        fail(StatusCode::kNotPrepared, "gemm.run", "m", std::to_string(m), "prepared row counts under capture",
             "call prepare before the capture begins");
      const auto bucket = static_cast<std::size_t>(m <= kMaxWarpRows ? bucket_index(m) : kNumBuckets);
      if (!warned_miss_[bucket].exchange(true, std::memory_order_relaxed))
        log_warn(fmt::format("gemm {} x {}: M = {} was not prepared before its capture and is recorded on cuBLAS",
                             s->weight.n, s->weight.k, m));
    }
  }
  if (r.kind == Kind::kWarp) {
    const bool ordinary = ordinary_next_.load(std::memory_order_acquire) && ordinary_next_.exchange(false);
    const Tactic& tactic = s->kernels[static_cast<std::size_t>(bucket_index(m))]->tactic;
    const bool packed = tactic.weight_order == WeightOrder::kPacked;
    launch_link(*s, packed ? packed_->memory.data() : s->weight.view.data, x, out, ordinary ? Pdl::kOff : options_.pdl,
                context_, stream, capturing);
    if (capturing) s->captured.store(true, std::memory_order_relaxed);
    return count(counters_.warp_runs);
  }

  if (options_.strict && m <= kMaxWarpRows) fail(strict_refusal(*s, x, out, r.code));
  const bool operands = is_operand_code(r.code);
  if (!s->cublas) fail(cublas_status());
  if (operands && first_of(r.code))
    log_info(
        fmt::format("gemm {} x {}: M = {} on cuBLAS: {}", s->weight.n, s->weight.k, m, sentence_of(r.code, x, out)));
  s->cublas->run(s->weight, x, out, stream, !operands, capturing, counters_);
  PdlChain::forget();
  if (capturing) s->captured.store(true, std::memory_order_relaxed);
  count(counters_.cublas_runs);
  count(counters_.fallback_by_code[static_cast<std::size_t>(r.code)]);
}

void CudaPlan::fill_zero(const MatrixView& out, Stream stream) const {
  TWOSTEP_CUDA_CHECK(
      cuMemsetD2D8Async(reinterpret_cast<CUdeviceptr>(out.data), static_cast<std::size_t>(out.row_stride * 2), 0,
                        static_cast<std::size_t>(out.cols * 2), static_cast<std::size_t>(out.rows),
                        static_cast<CUstream>(stream.handle)),
      "gemm.run");
  PdlChain::forget();
}

// ---- Questions

Tactic CudaPlan::tactic(int m) const {
  const Snapshot* s = snapshot();
  if (m < 1 || m > kMaxWarpRows || !s->kernels[static_cast<std::size_t>(bucket_index(m))])
    fail(StatusCode::kNotPrepared, "gemm.tactic", "m", std::to_string(m), "rows whose warp kernel is loaded",
         "call prepare first");
  return s->kernels[static_cast<std::size_t>(bucket_index(m))]->tactic;
}

std::vector<CompileKey> CudaPlan::keys() const { return snapshot()->loaded_keys(); }

std::vector<Address> CudaPlan::captured_addresses() const {
  const std::lock_guard lock(mutex_);
  std::vector<Address> all;
  for (const auto& s : snapshots_) {
    const Address address{reinterpret_cast<std::uintptr_t>(s->weight.view.data)};
    if (s->captured.load() && std::find(all.begin(), all.end(), address) == all.end()) all.push_back(address);
  }
  return all;
}

}  // namespace

std::shared_ptr<Plan> make_cuda_plan(const TensorView& weight, const Options& options) {
  throw_if_error(driver_status());
  return std::make_shared<CudaPlan>(weight, options, nullptr);
}

std::shared_ptr<Plan> make_cuda_plan(const PackedWeight& weight, const Options& options) {
  return std::make_shared<CudaPlan>(weight.source(), options, weight.impl());
}

// ---- PreparedWarpSplitK

struct PreparedWarpSplitK::Impl : BoundKernels {
  CUcontext context = nullptr;
  std::atomic<bool> ordinary_next{false};  // after a rebind: no early loads
};

PreparedWarpSplitK::PreparedWarpSplitK(const TensorView& view, const std::map<int, Tactic>& tactics)
    : impl_(std::make_unique<Impl>()) {
  const char* place = "gemm.PreparedWarpSplitK";
  if (!view.device.is_cuda())
    fail(StatusCode::kUnavailable, place, "weight.device", to_string(view.device), "a GPU", "use DraftGemm on the CPU");
  throw_if_error(driver_status());
  impl_->weight = check_weight(view, place);
  impl_->context = primary_context(view.device.index);
  const ContextGuard context(impl_->context);
  const RelaxedCapture relaxed;
  const DeviceFacts facts = device_facts(view.device.index);
  for (const auto& [m, wanted] : tactics) {
    const Tactic tactic = complete(wanted, m, facts);
    throw_if_error(tactic_valid(tactic, m, impl_->weight.n, impl_->weight.k, facts));
    if (tactic.weight_order == WeightOrder::kPacked)
      fail(StatusCode::kUnsupported, place, "weight_order", "packed", "row_major",
           "build a DraftGemm on a PackedWeight");
    if (const auto reason = warp_takes_weight(impl_->weight, tactic.weight_align))
      fail(StatusCode::kBadLayout, place, "weight", reason.sentence, "a weight that the warp kernel takes");
    const auto bucket = static_cast<std::size_t>(bucket_index(m));
    if (impl_->kernels[bucket] && !(impl_->kernels[bucket]->tactic == complete(wanted, bucket_of(m), facts)))
      fail(StatusCode::kInvalidArgument, place, "tactics", fmt::format("two for the bucket of m = {}", m),
           "one tactic for each bucket of 8 rows");
    impl_->kernels[bucket] =
        std::make_shared<WarpKernel>(load_warp_kernel(m, impl_->weight, tactic, facts.arch, true, nullptr));
  }
  impl_->describe_weight();
}

PreparedWarpSplitK::PreparedWarpSplitK(PreparedWarpSplitK&&) noexcept = default;
PreparedWarpSplitK::~PreparedWarpSplitK() = default;

void PreparedWarpSplitK::run(const TensorView& x, const TensorView& out, Stream stream) {
  std::int64_t m = 0;
  if (const Status status = check_operands(impl_->weight, x, out, &m); !status.ok()) fail(status);
  if (m == 0 || impl_->weight.n == 0) return;
  if (m > kMaxWarpRows || !impl_->kernels[static_cast<std::size_t>(bucket_index(static_cast<int>(m)))])
    fail(StatusCode::kNotPrepared, "gemm.run", "m", std::to_string(m), "row counts of the tactics given");
  if (const WhyCode code = warp_takes_operands(x, out); code != WhyCode::kNone)
    fail(StatusCode::kBadLayout, "gemm.run", "operands", sentence_of(code, x, out), "what the warp kernel takes");
  const ContextGuard context(impl_->context);
  const bool capturing = is_capturing(stream);
  const bool ordinary = impl_->ordinary_next.exchange(false, std::memory_order_acq_rel);
  launch_link(*impl_, impl_->weight.view.data, x, out, ordinary ? Pdl::kOff : Pdl::kAuto, impl_->context, stream,
              capturing);
}

void PreparedWarpSplitK::rebind(const TensorView& view) {
  throw_if_error(same_weight(impl_->weight, view));
  const Weight weight = check_weight(view, "gemm.rebind");
  if (const auto reason = warp_takes_weight(weight, 16))
    fail(StatusCode::kBadLayout, "gemm.rebind", "weight", reason.sentence, "a weight that the warp kernel takes");
  const ContextGuard context(impl_->context);
  BoundKernels next = *impl_;
  next.weight = weight;
  next.describe_weight();
  static_cast<BoundKernels&>(*impl_) = next;
  impl_->ordinary_next.store(true, std::memory_order_release);
  PdlChain::forget();
}

std::vector<CompileKey> PreparedWarpSplitK::keys() const { return impl_->loaded_keys(); }

}  // namespace twostep
