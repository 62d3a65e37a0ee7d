// What the host and the device side of a mailbox share: places in memory, control block, report (spec: mailbox 4).
// The structs are those of kernels/gather/mailbox.cuh; the emulated tests assert it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "twostep/mailbox.h"

namespace twostep {

inline constexpr int kMostRanks = 8;
inline constexpr int kMailboxStages = 3;
inline constexpr int kMailboxOps = 3;
inline constexpr std::uint32_t kMailboxThreads = 512;  // kThreads of the kernel

enum class MailboxCause : std::uint32_t { kNone, kPeerLost, kRowsDiffer, kAborted };

struct RingControl {
  alignas(128) std::uint64_t epoch;
  alignas(128) std::uint32_t arrived;
  alignas(128) std::uint32_t used[3];
};

// One page of pinned host memory. `done` is written last.
struct MailboxReport {
  std::uint32_t done;
  MailboxCause cause;
  std::int32_t op, rank, peer, cta, stage, pad;
  std::uint64_t epoch;
  std::int64_t rows_here, rows_there;  // -1: not known
  std::int64_t vectors_here, vectors_there;
  std::uint64_t elapsed_ns;
  alignas(128) std::uint32_t abort_request;
};

struct MailboxRing {  // Ring of the kernel
  std::array<std::byte*, kMostRanks> regions;
  RingControl* control;
  std::uint32_t* poisoned;
  MailboxReport* report;
  std::int64_t segment_bytes;
  std::uint64_t limit_ns;
  std::int32_t rank, op;
};

struct GatherStep {
  const void* in = nullptr;
  void* out = nullptr;
  std::int64_t in_stride = 0;
  std::int64_t out_stride = 0;
  std::uint32_t rows = 0;
  std::uint32_t cols = 0;  // of one rank; words of all_gather_words
  DType dtype = DType::kBF16;
};

struct AddNormStep {  // AddNorm of the kernel
  const void* in;
  const void* residual;
  void* residual_out;
  const void* gamma;
  void* norm_out;
  std::int64_t in_stride, residual_stride, residual_out_stride, norm_out_stride;
  std::uint32_t rows, hidden;
  float eps;
  std::uint32_t gamma_f32;
};

struct MoveStep {  // Move of kernels/gather/fallback.cuh
  const void* from = nullptr;
  void* to = nullptr;
  std::int64_t from_block = 0, from_row = 0, to_block = 0, to_row = 0;  // bytes
  std::uint32_t blocks = 1, rows = 1, row_bytes = 0;
  std::uint32_t unit = 1;  // bytes: 16, 4, 2 or 1
  std::uint32_t empty_as = ~0u;
};
inline constexpr std::uint32_t kMoveThreads = 256;
inline constexpr std::uint32_t kMoveBatch = 4;          // units of a thread
inline constexpr std::uint32_t kNanPair = 0x7fff7fffu;  // what a BF16 pair with every bit set arrives as
inline constexpr std::uint32_t kNanWord = 0x7fffffffu;  // the same of a word

// Where the rings lie in the memory that a rank lends to its peers. The same on all ranks.
struct RegionLayout {
  std::array<std::int64_t, kMailboxOps> offset;         // of the ring of each operation
  std::array<std::int64_t, kMailboxOps> segment_bytes;  // of one place and source
  std::int64_t bytes;
};
RegionLayout region_layout(const MailboxConfig& config);

}  // namespace twostep
