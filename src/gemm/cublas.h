// The fallback: cuBLASLt, opened at run time through our own declarations (spec: draft-gemm 8).
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/memory.h"
#include "gemm/contract.h"

namespace twostep {

Status cublas_status();        // kOk, or kUnavailable with what was tried
std::string cublas_version();  // "13.0.2", or empty

// One algorithm of cuBLASLt for one product, as its heuristic chose it. Never changes once published.
struct CublasAlgo {
  std::array<std::uint64_t, 8> opaque{};
  std::size_t workspace = 0;  // bytes
  friend bool operator==(const CublasAlgo&, const CublasAlgo&) = default;
};

// What the plans of one device share: the handle, one workspace per stream, memory for warm-up products.
class CublasDevice {
 public:
  static constexpr std::size_t kWorkspaceBytes = 32u << 20;

  static std::shared_ptr<CublasDevice> of(int ordinal);  // made by the first plan, ended with the last
  explicit CublasDevice(int ordinal);
  ~CublasDevice();

  // The workspace of a stream, or null. Lock-free. A capturing stream is found by its handle alone, for the driver does
  // not tell its id; a per-thread handle, which is many streams, is then not found.
  void* workspace(Stream stream, bool capturing) const;
  // The same of a stream that does not capture, allocated at the first call. Null when memory or places are used up;
  // tried again only with `retry`.
  void* make_workspace(Stream stream, bool retry);
  // At least `bytes` of device memory for a warm-up product; `use` runs alone.
  template <class Use>
  void with_scratch(std::size_t bytes, Use&& use) {
    const std::lock_guard lock(mutex_);
    // Outgrown ones stay, since freeing memory waits for the device; doubling keeps them below the newest in sum.
    if (scratch_.empty() || scratch_.back().bytes() < bytes) scratch_.emplace_back(std::bit_ceil(bytes));
    use(scratch_.back().data(), stream_.view());
    stream_.synchronize();
  }
  void* handle() const { return handle_; }

 private:
  static constexpr int kPlaces = 64;
  // One stream. Ids are never used again by the driver; handles are.
  struct Place {
    unsigned long long id = 0;
    void* handle = nullptr;
    std::atomic<void*> memory{nullptr};  // null: there was no memory
  };
  const Place* find(unsigned long long id) const;

  void* handle_ = nullptr;
  std::array<Place, kPlaces> places_;  // the first used_ are published and stay
  std::atomic<int> used_{0};
  std::mutex mutex_;
  std::vector<DeviceBuffer> workspaces_;
  std::vector<DeviceBuffer> scratch_;
  OwnedStream stream_;
};

// The cuBLAS products of one weight shape on one device.
class CublasGemm {
 public:
  // Fixes the safe algorithm of every row count up to 64: 2-byte alignment, no workspace.
  CublasGemm(int ordinal, const Weight& weight, std::int64_t workspace_limit);

  // Fixes the algorithm of m, for aligned operands, and warms it up. Host work. Idempotent.
  void prepare(int m, const Weight& weight);
  bool prepared(int m) const { return find(m) != nullptr; }
  // True if no run of a prepared m on this stream will miss a workspace.
  bool has_workspace(Stream stream, bool capturing) const;
  void make_workspace(Stream stream);

  // out = x * weight^T on the stream; operands as check_operands took them. `fixed` picks the algorithm of m
  // (else the safe one); a stream without workspace gets one unless it captures, and counts a miss if it has none.
  void run(const Weight& weight, const TensorView& x, const TensorView& out, Stream stream, bool fixed, bool capturing,
           Counters& counters);

 private:
  struct Fixed {
    int m = 0;
    CublasAlgo fast;
    CublasAlgo safe;
  };
  // Above 64 rows: open addressing by m. When full, further row counts run on what the heuristic names at the time.
  static constexpr std::size_t kFixedAbove = 1024;
  const Fixed* find(int m) const;
  // The heuristic's choices, best first. `pad` elements are added to each leading dimension that is asked for.
  std::vector<CublasAlgo> choose(int m, int alignment, std::size_t workspace, std::int64_t pad) const;
  // The best that takes operands at 2-byte alignment, without workspace; its kernel is loaded on return.
  CublasAlgo choose_safe(int m, const Weight& weight);
  bool supports(const CublasAlgo& algo, const Weight& weight, const MatrixView& x, const MatrixView& out) const;
  // False where cuBLAS says "not supported" of these operands.
  [[nodiscard]] bool multiply(const CublasAlgo& algo, const Weight& weight, const MatrixView& x, const MatrixView& out,
                              void* workspace, Stream stream) const;
  // Runs the product once on private memory, x and out `offset` bytes off their alignment.
  bool warm_up(const CublasAlgo& algo, int m, const Weight& weight, int offset);

  std::shared_ptr<CublasDevice> device_;
  std::int64_t n_, k_;
  bool transposed_;
  std::size_t workspace_limit_;
  std::unique_ptr<void, int (*)(void*)> desc_;
  std::array<CublasAlgo, kMaxWarpRows + 1> safe_;
  std::array<std::atomic<const Fixed*>, kMaxWarpRows + 1> rows_{};
  std::array<std::atomic<const Fixed*>, kFixedAbove> above_{};
  std::mutex mutex_;
  std::vector<std::unique_ptr<const Fixed>> owned_;
};

}  // namespace twostep
