// DraftGemm: the drafter's BF16 linears for few rows (spec: draft-gemm 1-8).
//
//   out[i, j] = bf16( sum over k of x[i, k] * weight[j, k] )     x [M, K], weight [N, K], out [M, N]
//
// BF16 operands, FP32 sums, one rounding to nearest even. A weight on a GPU is served by a kernel compiled
// for its shape and row bucket (rows 1..64), by cuBLASLt for the rest; a weight on the CPU by the CPU backend.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "twostep/status.h"
#include "twostep/tensor.h"

namespace twostep {

inline constexpr int kMaxWarpRows = 64;  // the warp kernel serves rows 1..64
inline constexpr int kRowBucket = 8;     // rows 8*i+1 .. 8*i+8 share one compiled kernel

// ---- Tactics: which kernel, with which numbers (4.1 - 4.4). Pure: no driver call, no GPU needed.

// The matrix instruction, and with it the kernel. kMmaSync: warps of one CTA share K (warp_split_k.cuh). kWgmma: CTAs
// of one cluster share K, 64 rows of weight per warpgroup (sm90_wgmma.cuh); sm_90 alone.
enum class Mma : std::uint8_t { kMmaSync, kWgmma };
enum class WeightOrder : std::uint8_t { kRowMajor, kPacked };
enum class WeightLoad : std::uint8_t { kRows, kTiles };  // 1-D bulk copy per row; 2-D TMA tile of 64 columns
enum class XMode : std::uint8_t { kStreamed, kResident };

// One runnable choice of a kernel. K is divided among the warps of one CTA (warp split-K, which is sliced-K), or among
// the CTAs of a cluster; the parts are added in a fixed order in shared memory. The order of summation, and so the
// bits, depends on mma, k_slices and cluster_k alone.
struct Tactic {
  Mma mma = Mma::kMmaSync;
  WeightOrder weight_order = WeightOrder::kRowMajor;
  WeightLoad weight_load = WeightLoad::kRows;
  XMode x_mode = XMode::kStreamed;
  int tile_n = 16;      // rows of weight per CTA; of a cluster where it shares K
  int tile_k = 256;     // columns of weight per stage
  int stages = 4;       // places in the asynchronous copy ring
  int k_slices = 4;     // groups of warps that share K
  int cluster_k = 1;    // CTAs of one cluster that share K; 1 with mma_sync
  int cluster_n = 1;    // CTAs of one cluster that share x by multicast; 1 with wgmma
  int warps = 4;        // warps that multiply; one more loads
  int smem_bytes = 0;   // dynamic shared memory of one CTA
  int ctas_per_sm = 1;  // co-resident CTAs that the shared memory allows
  int weight_align = 16;
  friend bool operator==(const Tactic&, const Tactic&) = default;
};
std::string to_string(const Tactic& tactic);

// True exactly when the warp kernel is defined for the shape: n > 0, k > 0, n % 16 == 0, k % 64 == 0.
bool warp_eligible(std::int64_t n, std::int64_t k);

// The tactic that serves the row bucket of m (1..64). Equal inputs give equal tactics. `strict` picks one
// family (order of summation) for every bucket. Throws kUnsupported where no tactic is valid.
Tactic warp_tactic(int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts, bool strict = false);

// The only place that decides validity: kOk, or kUnsupported with the rule that is broken.
Status tactic_valid(const Tactic& tactic, int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts);

// ---- Kinds, reasons, counters

enum class Kind : std::uint8_t { kWarp, kCublas, kCpu };
const char* kind_name(Kind kind);  // "warp", "cublas", "cpu"

// Why an m, or a pair of operands, is not on the warp kernel. The word is the same in C++ and Python.
enum class WhyCode : std::uint8_t {
  kNone,
  kNotPrepared,
  kRowsAbove64,
  kNNotMultipleOf16,
  kKNotMultipleOf64,
  kWeightLayout,
  kWeightAlignment,
  kXLayout,
  kOutLayout,
  kArchitecture,
  kSharedMemory,
  kCompileFailed,
  kLoadFailed,
  kCompilingOff,
  kSealed,
  kPinned,
  kDisabled,
  kCublasFaster,
};
inline constexpr int kNumWhyCodes = 18;
std::string_view why_name(WhyCode code);  // "n_not_multiple_of_16"; "" for kNone

// All that makes two builds of a kernel differ, as a name to read and a hash to compare.
struct CompileKey {
  std::string name;  // "gemm-n2304-k1536-m8-sm_90a"
  std::string hash;  // 32 hexadecimal digits over text, options, NVRTC version, architecture, shape, tactic, rules
  friend bool operator==(const CompileKey&, const CompileKey&) = default;
  friend auto operator<=>(const CompileKey&, const CompileKey&) = default;
};

struct Address {
  std::uintptr_t value = 0;
  friend bool operator==(const Address&, const Address&) = default;
};

struct Stats {
  std::uint64_t warp_runs = 0;
  std::uint64_t cublas_runs = 0;
  std::uint64_t cpu_runs = 0;
  std::array<std::uint64_t, kNumWhyCodes> fallback_by_code{};  // indexed by WhyCode; runs not on the warp kernel
  std::uint64_t capture_misses = 0;                            // runs under capture of an m that was not prepared
  std::uint64_t workspace_misses = 0;                          // cuBLAS runs on a stream that has no workspace
  std::uint64_t compiles = 0;
  std::uint64_t late_compiles = 0;  // compiles caused by run
  std::uint64_t cache_hits = 0;     // kernels found in memory or on disk
  std::uint64_t rebinds = 0;        // weight found at a new address
  std::uint64_t fallbacks(WhyCode code) const { return fallback_by_code[static_cast<std::size_t>(code)]; }
};

enum class Pdl : std::uint8_t {
  kAuto,    // early weight loads under capture only, after a kernel of this library
  kOff,     // ordinary launches
  kAlways,  // eager too: the caller promises that no unfinished work on the stream writes the weight
};
enum class OnMiss : std::uint8_t { kCublas, kRefuse };

struct Options {
  bool strict = false;  // one family for rows 1..64: a row's bits do not depend on M
  Pdl pdl = Pdl::kAuto;
  OnMiss on_miss = OnMiss::kCublas;         // an unprepared m under capture: cuBLAS, or throw kNotPrepared
  bool jit = true;                          // false: only kernels found in the caches
  std::int64_t workspace_limit = 32 << 20;  // bytes per (device, stream) for cuBLAS, at most 32 MiB; 0: none
  bool warp = true;                         // false: cuBLAS only
};

// ---- Packed weights (3.7)

// A second copy of a weight, N*K*2 bytes, in the order in which kernels of one tactic read it: each stage is
// one contiguous piece. Owned by the caller; keeps a view of its source. Both must outlive every plan on it.
class PackedWeight {
 public:
  PackedWeight(PackedWeight&&) noexcept;
  PackedWeight& operator=(PackedWeight&&) noexcept;
  ~PackedWeight();
  const TensorView& source() const;
  const Tactic& tactic() const;  // weight_order is kPacked
  std::int64_t bytes() const;

  struct Impl;
  explicit PackedWeight(std::shared_ptr<Impl> impl);
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

// Packs `weight` [N, K] (BF16, row-major, on a GPU) for kernels of `tactic`, in stream order. Allocates.
// Throws kUnsupported where the tactic cannot serve the shape packed, or the weight is on the CPU.
PackedWeight pack_weight(const TensorView& weight, const Tactic& tactic, Stream stream = {});

// ---- PreparedWarpSplitK: one weight made ready for the warp kernel (4.5)

class PreparedWarpSplitK {
 public:
  // Compiles and loads the kernel of each m's bucket with the given tactic. Host work only. Throws
  // kUnsupported (tactic, shape, architecture), kBadLayout, kCompileFailed, kUnavailable.
  PreparedWarpSplitK(const TensorView& weight, const std::map<int, Tactic>& tactics);
  PreparedWarpSplitK(PreparedWarpSplitK&&) noexcept;
  ~PreparedWarpSplitK();

  // Launches one kernel on `stream`, or throws kNotPrepared (bucket of m), kBadLayout, kOverlap,
  // kInvalidArgument, kWrongDevice. No fallback, no lazy work. May be captured; re-entrant.
  void run(const TensorView& x, const TensorView& out, Stream stream);
  // Another weight of the same shape, dtype, strides and device. Not concurrently with run.
  void rebind(const TensorView& weight);
  std::vector<CompileKey> keys() const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

// ---- DraftGemm

class Plan;  // private

class DraftGemm {
 public:
  // A plan for one weight [N, K] on one device. Takes every 2-D BF16 weight that some kind serves; never fails
  // for a capability reason. Does not copy the weight: values changed in place are seen by the next run.
  // Does no harm to a capture that any thread has under way.
  // Throws kInvalidArgument (null, rank), kUnsupported (dtype), kBadLayout (strides, alignment), kUnavailable (weight
  // on a GPU and no driver), kOutOfMemory, kDeviceError.
  explicit DraftGemm(const TensorView& weight, Options options = {});
  explicit DraftGemm(const PackedWeight& weight, Options options = {});
  DraftGemm(DraftGemm&&) noexcept;  // what was moved from may only be assigned or destroyed
  DraftGemm& operator=(DraftGemm&&) noexcept;
  ~DraftGemm();

  // Compiles or fetches the kernel of m's bucket, loads it, fixes the algorithm of an m for cuBLAS and the
  // workspace of `stream`. Host work; idempotent; thread-safe. Returns the kind that serves m; a fallback is
  // no error. Throws kInvalidArgument (m < 0), kCapturing (work is left to do and stream captures; a capture under
  // way on another stream is not disturbed).
  Kind prepare(int m, Stream stream = {});

  // out[M, N] = x[M, K] * weight^T on `stream`. Operands as in 3.2: column stride 1, rows any pitch >= width.
  // May be captured after prepare. Allocates, locks and compiles nothing for a prepared m. Throws kBadLayout,
  // kOverlap, kInvalidArgument, kUnsupported, kWrongDevice, before any launch, with out untouched.
  void run(const TensorView& x, const TensorView& out, Stream stream = {});
  // The same with the weight as it is now: a new address is rebound, another shape is kWeightChanged (3.6).
  void run(const TensorView& weight, const TensorView& x, const TensorView& out, Stream stream = {});

  void bind(const TensorView& weight);       // as the check of run; counts in rebinds
  void weights_updated(Stream stream = {});  // the weight was written: next launch has no early loads (7.4)
  void seal();                               // from now on nothing is compiled
  void pin(int m, Kind kind);                // force an m; kUnsupported if that kind cannot serve it

  Kind kind(int m) const;                                       // which kind serves m now
  Kind kind(const TensorView& x, const TensorView& out) const;  // the same for real operands
  std::string why(int m) const;                                 // one sentence; empty for 'warp'
  std::string why(const TensorView& x, const TensorView& out) const;
  WhyCode why_code(int m) const;
  Status accepts(const TensorView& x, const TensorView& out) const;  // what run would throw for them
  Tactic tactic(int m) const;  // of the loaded kernel of m's bucket; throws kNotPrepared
  Stats stats() const;
  std::vector<CompileKey> keys() const;             // of the loaded kernels
  std::vector<Address> captured_addresses() const;  // weight addresses that graphs recorded
  std::int64_t n() const;
  std::int64_t k() const;

 private:
  std::shared_ptr<Plan> plan_;
};

}  // namespace twostep
