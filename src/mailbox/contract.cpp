#include "mailbox/contract.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/env.h"

namespace twostep {
namespace {

constexpr std::int64_t kMostRows = 256;
constexpr std::int64_t kMostHidden = 16384;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 34;  // of a region
constexpr std::int64_t kMostLimit = 3600;                   // seconds
constexpr int kMostNcclRanks = 4096;
constexpr std::int64_t kMostNcclCols = 1 << 30;
constexpr std::int64_t kMostNcclRows = 1 << 16;
constexpr std::int64_t kMostNcclHidden = 1 << 20;

std::int64_t rounded_up(std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; }

std::string place_of(Carrier by, MailboxOp op) {
  return std::string(by == Carrier::kNccl ? "nccl." : "mailbox.") + mailbox_op_name(op);
}

// A matrix [rows, cols] as every call takes it: in vectors of 16 bytes, but for NCCL's all_gather.
Status check_matrix(Carrier by, MailboxOp op, const char* name, const TensorView& view, DType dtype, std::int64_t rows,
                    std::int64_t cols, Device device) {
  const auto size = static_cast<std::int64_t>(dtype_size(dtype));
  const std::int64_t align = by == Carrier::kNccl && op == MailboxOp::kAllGather ? size : 16;  // bytes
  const auto refuse = [&](StatusCode code, const char* field, std::string value, std::string accepted,
                          const char* remedy = "") {
    return refusal(code, place_of(by, op), std::string(name) + field, std::move(value), std::move(accepted), remedy);
  };
  if (view.dtype != dtype) return refuse(StatusCode::kUnsupported, ".dtype", dtype_name(view.dtype), dtype_name(dtype));
  if (view.rank != 2 || view.shape[0] != rows || view.shape[1] != cols)
    return refuse(StatusCode::kInvalidArgument, ".shape", to_string(view), fmt::format("[{}, {}]", rows, cols));
  if (view.device != device)
    return refuse(StatusCode::kWrongDevice, ".device", to_string(view.device), to_string(device),
                  "a group moves memory of the device that it was created on");
  if (rows == 0) return {};
  if (view.data == nullptr) return refuse(StatusCode::kInvalidArgument, ".data", "null", "memory of the view");
  if (reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(align) != 0)
    return refuse(StatusCode::kBadLayout, ".data", fmt::format("{}", view.data),
                  fmt::format("addresses of {} bytes", align));
  if (cols > 1 && view.stride[1] != 1)
    return refuse(StatusCode::kBadLayout, " column stride", std::to_string(view.stride[1]), "1");
  if (rows > 1 &&
      (view.stride[0] < cols || view.stride[0] * size % align != 0 || view.stride[0] > std::int64_t{1} << 40))
    return refuse(StatusCode::kBadLayout, " row stride", std::to_string(view.stride[0]),
                  fmt::format("multiples of {} from {}", align / size, cols));
  return {};
}

std::int64_t row_stride(const TensorView& view) { return view.shape[0] > 1 ? view.stride[0] : view.shape[1]; }

struct Range {
  const std::byte* begin;
  const std::byte* end;
};
Range range_of(const TensorView& view) {
  const auto* begin = static_cast<const std::byte*>(view.data);
  const std::int64_t elements = view.rank == 1       ? view.shape[0]
                                : view.shape[0] == 0 ? 0
                                                     : (view.shape[0] - 1) * row_stride(view) + view.shape[1];
  return {begin, begin + elements * static_cast<std::int64_t>(dtype_size(view.dtype))};
}
bool meet(const TensorView& a, const TensorView& b) {
  const Range x = range_of(a), y = range_of(b);
  return x.begin < y.end && y.begin < x.end;
}
// The same rows at the same places.
bool same(const TensorView& a, const TensorView& b) {
  return a.data == b.data && (a.shape[0] <= 1 || a.stride[0] == b.stride[0]);
}
Status overlap(Carrier by, MailboxOp op, const char* out, const char* with, const char* accepted) {
  return refusal(StatusCode::kOverlap, place_of(by, op), out, fmt::format("meets {}", with), accepted,
                 "give it memory of its own");
}

}  // namespace

const char* transport_name(PeerTransport transport) {
  switch (transport) {
    case PeerTransport::kAuto: return "auto";
    case PeerTransport::kSameProcess: return "same_process";
    case PeerTransport::kVmmFd: return "vmm_fd";
    case PeerTransport::kCudaIpc: return "cuda_ipc";
  }
  return "?";
}

const char* mailbox_op_name(MailboxOp op) {
  switch (op) {
    case MailboxOp::kAllGather: return "all_gather";
    case MailboxOp::kAllGatherWords: return "all_gather_words";
    case MailboxOp::kAllReduceAddNorm: return "all_reduce_add_norm";
  }
  return "?";
}

namespace {

template <class T>
Status refuse_config(Carrier by, const char* argument, T value, std::string accepted, const char* remedy = "") {
  return refusal(StatusCode::kInvalidArgument, by == Carrier::kNccl ? "nccl.create" : "mailbox.create", argument,
                 fmt::format("{}", value), std::move(accepted), remedy);
}

}  // namespace

Status check_mailbox_config(MailboxConfig* config, int size_of_group, Carrier by) {
  MailboxConfig& c = *config;
  const bool nccl = by == Carrier::kNccl;
  const auto refuse = [by](const char* argument, auto value, std::string accepted, const char* remedy = "") {
    return refuse_config(by, argument, value, std::move(accepted), remedy);
  };
  const int most_ranks = nccl ? kMostNcclRanks : kMostRanks;
  if (c.size < 2 || c.size > most_ranks)
    return refuse("size", c.size, fmt::format("2 to {}", most_ranks),
                  nccl ? "" : "use NCCL (NcclGroup) for this group");
  if (c.size != size_of_group)
    return refuse("size", c.size, fmt::format("{}, the size of the bootstrap's group", size_of_group));
  if (c.rank < 0 || c.rank >= c.size) return refuse("rank", c.rank, fmt::format("0 to {}", c.size - 1));
  const std::int64_t most_rows = nccl ? kMostNcclRows : kMostRows;
  if (c.max_rows < 1 || c.max_rows > most_rows)
    return refuse("max_rows", c.max_rows, fmt::format("1 to {}", most_rows));
  if (nccl ? c.max_cols < 1 || c.max_cols > kMostNcclCols : c.max_cols < 8 || c.max_cols % 8 != 0)
    return refuse("max_cols", c.max_cols, nccl ? fmt::format("1 to {}", kMostNcclCols) : "multiples of 8 from 8");
  const std::int64_t most_hidden = nccl ? kMostNcclHidden : kMostHidden;
  if (c.max_hidden < 8 || c.max_hidden % 8 != 0 || c.max_hidden > most_hidden)
    return refuse("max_hidden", c.max_hidden, fmt::format("multiples of 8 from 8 to {}", most_hidden));
  if (c.max_words < 1 || c.max_words > 1 << 20) return refuse("max_words", c.max_words, "1 to 1048576");
  if (c.max_ctas < 0 || c.max_ctas > 1024) return refuse("max_ctas", c.max_ctas, "0 (chosen) to 1024");
  if (c.peer_limit_s == 0) c.peer_limit_s = environment().peer_limit_s;
  if (!(c.peer_limit_s >= 1e-3) || c.peer_limit_s > static_cast<double>(kMostLimit))
    return refuse("peer_limit_s", c.peer_limit_s, fmt::format("0.001 to {} seconds", kMostLimit),
                  "a wait without a limit would hang in silence");
  if (c.max_cols > kMostBytes / (c.max_rows * c.size * 2 * (nccl ? 1 : kMailboxStages)))
    return refuse("max_cols", c.max_cols, fmt::format("regions up to {} bytes", kMostBytes),
                  "lower max_rows or max_cols");
  return {};
}

RegionLayout region_layout(const MailboxConfig& config) {
  RegionLayout layout{};
  const std::int64_t rows[kMailboxOps] = {config.max_rows, 1, config.max_rows};
  const std::int64_t row_bytes[kMailboxOps] = {2 * config.max_cols, 4 * config.max_words, 2 * config.max_hidden};
  for (std::size_t op = 0; op < kMailboxOps; ++op) {
    layout.segment_bytes[op] = rows[op] * rounded_up(row_bytes[op], 16);
    layout.offset[op] = layout.bytes;
    const std::int64_t segments = std::int64_t{kMailboxStages} * config.size;
    layout.bytes += rounded_up(segments * (16 + layout.segment_bytes[op]), 256);
  }
  return layout;
}

Status mailbox_accepts(const MailboxConfig& config, MailboxOp op, std::int64_t rows, std::int64_t cols, DType dtype,
                       Carrier by) {
  const bool words = op == MailboxOp::kAllGatherWords;
  const bool any = by == Carrier::kNccl && op == MailboxOp::kAllGather;  // dtype and width
  const auto refuse = [&](StatusCode code, const char* argument, std::string value, std::string accepted) {
    return refusal(code, place_of(by, op), argument, std::move(value), std::move(accepted),
                   by == Carrier::kNccl
                       ? "create the group with other limits"
                       : "this call goes through NCCL (NcclGroup), or create the mailbox with other limits");
  };
  const bool taken = words ? dtype == DType::kI32 || dtype == DType::kF32 : any || dtype == DType::kBF16;
  if (!taken) return refuse(StatusCode::kUnsupported, "dtype", dtype_name(dtype), words ? "I32, F32" : "BF16");
  const std::int64_t most_rows = words ? 1 : config.max_rows;
  if (rows < (words ? 1 : 0) || rows > most_rows)
    return refuse(StatusCode::kUnsupported, "rows", std::to_string(rows), fmt::format("up to {}", most_rows));
  const std::int64_t most = words ? config.max_words
                            : any ? config.max_cols * 2 / static_cast<std::int64_t>(dtype_size(dtype))
                            : op == MailboxOp::kAllGather ? config.max_cols
                                                          : config.max_hidden;
  if (cols < 1 || cols > most || (!words && !any && cols % 8 != 0))
    return refuse(StatusCode::kUnsupported, words ? "words" : "cols", std::to_string(cols),
                  fmt::format("{} to {}", words || any ? "1" : "multiples of 8 up", most));
  return {};
}

Status check_all_gather(const MailboxConfig& config, Device device, const TensorView& in, const TensorView& out,
                        GatherStep* step, Carrier by) {
  constexpr MailboxOp kOp = MailboxOp::kAllGather;
  if (in.rank != 2)
    return refusal(StatusCode::kInvalidArgument, place_of(by, kOp), "in.rank", std::to_string(in.rank), "2");
  const std::int64_t rows = in.shape[0], cols = in.shape[1];
  if (auto status = mailbox_accepts(config, kOp, rows, cols, in.dtype, by); !status.ok()) return status;
  if (auto status = check_matrix(by, kOp, "in", in, in.dtype, rows, cols, device); !status.ok()) return status;
  if (auto status = check_matrix(by, kOp, "out", out, in.dtype, rows, config.size * cols, device); !status.ok())
    return status;
  const std::int64_t out_stride = row_stride(out), in_stride = rows > 1 ? in.stride[0] : out_stride;
  const auto* own =
      static_cast<const std::byte*>(out.data) + config.rank * cols * static_cast<std::int64_t>(dtype_size(in.dtype));
  const bool in_place = in.data == own && in_stride == out_stride;
  if (rows > 0 && !in_place && meet(in, out))
    return overlap(by, kOp, "out", "in", "memory of its own, or in as the rank's own columns of out");
  *step = {in.data, out.data, in_stride, out_stride, static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(cols),
           in.dtype};
  return {};
}

Status check_all_gather_words(const MailboxConfig& config, Device device, const TensorView& in, const TensorView& out,
                              GatherStep* step, Carrier by) {
  constexpr MailboxOp kOp = MailboxOp::kAllGatherWords;
  const auto refuse = [&](StatusCode code, const char* argument, std::string value, std::string accepted) {
    return refusal(code, place_of(by, kOp), argument, std::move(value), std::move(accepted));
  };
  if (in.rank != 1) return refuse(StatusCode::kInvalidArgument, "in.rank", std::to_string(in.rank), "1");
  const std::int64_t words = in.shape[0];
  if (auto status = mailbox_accepts(config, kOp, 1, words, in.dtype, by); !status.ok()) return status;
  if (out.dtype != in.dtype)
    return refuse(StatusCode::kUnsupported, "out.dtype", dtype_name(out.dtype), dtype_name(in.dtype));
  if (out.rank != 2 || out.shape[0] != config.size || out.shape[1] != words)
    return refuse(StatusCode::kInvalidArgument, "out.shape", to_string(out),
                  fmt::format("[{}, {}]", config.size, words));
  if ((words > 1 && (in.stride[0] != 1 || out.stride[1] != 1)) || out.stride[0] != words)
    return refuse(StatusCode::kBadLayout, "strides", to_string(in) + ", " + to_string(out), "dense vectors");
  for (const TensorView* view : {&in, &out}) {
    const char* name = view == &in ? "in" : "out";
    if (view->device != device)
      return refuse(StatusCode::kWrongDevice, name, to_string(view->device), to_string(device));
    if (view->data == nullptr) return refuse(StatusCode::kInvalidArgument, name, "null", "memory of the view");
    const std::uintptr_t align = by == Carrier::kNccl ? 4 : 16;
    if (reinterpret_cast<std::uintptr_t>(view->data) % align != 0)
      return refuse(StatusCode::kBadLayout, name, fmt::format("{}", view->data),
                    fmt::format("addresses of {} bytes", align));
  }
  const auto* own = static_cast<const std::uint32_t*>(out.data) + config.rank * words;
  if (in.data != own && meet(in, out))
    return overlap(by, kOp, "out", "in", "memory of its own, or in as the rank's own row of out");
  *step = {in.data, out.data, words, words, 1, static_cast<std::uint32_t>(words), in.dtype};
  return {};
}

Status check_add_norm(const MailboxConfig& config, Device device, const TensorView& in,
                      const std::optional<TensorView>& residual, const TensorView& residual_out,
                      const std::optional<TensorView>& gamma, float eps, const std::optional<TensorView>& norm_out,
                      AddNormStep* step, Carrier by) {
  constexpr MailboxOp kOp = MailboxOp::kAllReduceAddNorm;
  const auto refuse = [&](StatusCode code, const char* argument, std::string value, std::string accepted) {
    return refusal(code, place_of(by, kOp), argument, std::move(value), std::move(accepted));
  };
  if (in.rank != 2) return refuse(StatusCode::kInvalidArgument, "in.rank", std::to_string(in.rank), "2");
  const std::int64_t rows = in.shape[0], hidden = in.shape[1];
  if (auto status = mailbox_accepts(config, kOp, rows, hidden, in.dtype, by); !status.ok()) return status;
  if (gamma.has_value() != norm_out.has_value())
    return refuse(StatusCode::kInvalidArgument, gamma ? "norm_out" : "gamma", "absent",
                  "both gamma and norm_out, or none");
  const std::pair<const char*, const TensorView*> matrices[] = {{"in", &in},
                                                                {"residual", residual ? &*residual : nullptr},
                                                                {"residual_out", &residual_out},
                                                                {"norm_out", norm_out ? &*norm_out : nullptr}};
  for (const auto& [name, view] : matrices)
    if (view)
      if (auto status = check_matrix(by, kOp, name, *view, DType::kBF16, rows, hidden, device); !status.ok())
        return status;
  if (gamma) {
    if (gamma->dtype != DType::kBF16 && gamma->dtype != DType::kF32)
      return refuse(StatusCode::kUnsupported, "gamma.dtype", dtype_name(gamma->dtype), "BF16, F32");
    if (gamma->rank != 1 || gamma->shape[0] != hidden || (hidden > 1 && gamma->stride[0] != 1))
      return refuse(StatusCode::kInvalidArgument, "gamma.shape", to_string(*gamma), fmt::format("[{}] dense", hidden));
    if (gamma->device != device)
      return refuse(StatusCode::kWrongDevice, "gamma.device", to_string(gamma->device), to_string(device));
    if (gamma->data == nullptr || reinterpret_cast<std::uintptr_t>(gamma->data) % dtype_size(gamma->dtype) != 0)
      return refuse(StatusCode::kBadLayout, "gamma.data", fmt::format("{}", gamma->data), "aligned memory");
    if (!std::isfinite(eps) || eps < 0)
      return refuse(StatusCode::kInvalidArgument, "eps", fmt::format("{}", eps), "finite values from 0");
  }
  if (rows > 0) {
    if (meet(residual_out, in)) return overlap(by, kOp, "residual_out", "in", "memory of its own, or residual");
    if (residual && !same(residual_out, *residual) && meet(residual_out, *residual))
      return overlap(by, kOp, "residual_out", "residual", "memory of its own, or residual itself");
    if (gamma && meet(residual_out, *gamma)) return overlap(by, kOp, "residual_out", "gamma", "memory of its own");
    if (norm_out) {
      if (!same(*norm_out, in) && meet(*norm_out, in))
        return overlap(by, kOp, "norm_out", "in", "memory of its own, or in itself");
      if (meet(*norm_out, residual_out))
        return overlap(by, kOp, "norm_out", "residual_out", "memory of its own, or in");
      if (residual && meet(*norm_out, *residual))
        return overlap(by, kOp, "norm_out", "residual", "memory of its own, or in");
      if (meet(*norm_out, *gamma)) return overlap(by, kOp, "norm_out", "gamma", "memory of its own, or in");
    }
  }
  const auto stride = [](const std::optional<TensorView>& view) { return view ? row_stride(*view) : 0; };
  *step = {in.data,
           residual ? residual->data : nullptr,
           residual_out.data,
           gamma ? gamma->data : nullptr,
           norm_out ? norm_out->data : nullptr,
           row_stride(in),
           stride(residual),
           row_stride(residual_out),
           stride(norm_out),
           static_cast<std::uint32_t>(rows),
           static_cast<std::uint32_t>(hidden),
           eps,
           gamma && gamma->dtype == DType::kF32 ? 1u : 0u};
  return {};
}

namespace {

std::uint32_t widest_unit(const MoveStep& move) {
  const auto all = reinterpret_cast<std::uintptr_t>(move.from) | reinterpret_cast<std::uintptr_t>(move.to) |
                   static_cast<std::uintptr_t>(move.from_block | move.from_row | move.to_block | move.to_row) |
                   move.row_bytes;
  return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : all % 2 == 0 ? 2 : 1;
}

}  // namespace

MoveStep pack_step(const void* in, std::int64_t in_stride, std::int64_t rows, std::int64_t cols, DType dtype,
                   void* to) {
  const auto size = static_cast<std::int64_t>(dtype_size(dtype));
  MoveStep move;
  move.from = in;
  move.to = to;
  move.from_row = in_stride * size;
  move.to_row = cols * size;
  move.rows = static_cast<std::uint32_t>(rows);
  move.row_bytes = static_cast<std::uint32_t>(cols * size);
  move.unit = widest_unit(move);
  return move;
}

MoveStep permute_step(const GatherStep& step, int ranks, const void* gathered) {
  const auto size = static_cast<std::int64_t>(dtype_size(step.dtype));
  const std::int64_t row = step.cols * size;
  MoveStep move;
  move.from = gathered;
  move.to = step.out;
  move.from_block = step.rows * row;
  move.from_row = move.to_block = row;
  move.to_row = step.out_stride * size;
  move.blocks = static_cast<std::uint32_t>(ranks);
  move.rows = step.rows;
  move.row_bytes = static_cast<std::uint32_t>(row);
  move.unit = widest_unit(move);
  if (step.dtype == DType::kBF16) move.empty_as = kNanPair;
  return move;
}

MoveStep words_step(const GatherStep& step, int ranks) {
  MoveStep move;
  move.from = move.to = step.out;
  move.row_bytes = 4 * step.cols;
  move.from_row = move.to_row = move.row_bytes;
  move.rows = static_cast<std::uint32_t>(ranks);
  move.unit = widest_unit(move);
  move.empty_as = kNanWord;
  return move;
}

// A vector per thread while CTAs last; the norm wants its row in one CTA.
std::uint32_t mailbox_grid(MailboxOp op, std::int64_t rows, std::int64_t vectors, int most) {
  const std::int64_t wanted =
      op == MailboxOp::kAllReduceAddNorm ? rows : (vectors + kMailboxThreads - 1) / kMailboxThreads;
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(wanted, 1, most));
}

Status status_of(const MailboxReport& r, double peer_limit_s) {
  const std::string place = place_of(Carrier::kMailbox, static_cast<MailboxOp>(r.op));
  const std::string where = fmt::format("rank {}, epoch {}", r.rank, r.epoch);
  switch (r.cause) {
    case MailboxCause::kNone: return {};
    case MailboxCause::kPeerLost:
      return refusal(StatusCode::kPeerLost, place, "peer",
                     fmt::format("{}, which did not come to epoch {} in {:.3f} s (rank {}, {} rows)", r.peer, r.epoch,
                                 static_cast<double>(r.elapsed_ns) * 1e-9, r.rank, r.rows_here),
                     fmt::format("TWOSTEP_PEER_LIMIT_S = {}", peer_limit_s),
                     "look at that rank, then close and create the mailbox on all ranks");
    case MailboxCause::kRowsDiffer:
      if (r.rows_here != r.rows_there)
        return refusal(StatusCode::kInvalidArgument, place, "rows",
                       fmt::format("{} here ({}), {} on rank {}", r.rows_here, where, r.rows_there, r.peer),
                       "the same call on all ranks", "close and create the mailbox on all ranks");
      return refusal(
          StatusCode::kInvalidArgument, place, "bytes of a rank",
          fmt::format("{} here ({}), {} on rank {}", 16 * r.vectors_here, where, 16 * r.vectors_there, r.peer),
          "the same call on all ranks", "close and create the mailbox on all ranks");
    case MailboxCause::kAborted:
      return refusal(StatusCode::kUnavailable, place, "the wait",
                     fmt::format("aborted while it waited for rank {} ({})", r.peer, where), "no abort",
                     "close and create the mailbox on all ranks");
  }
  return refusal(StatusCode::kInternal, place, "report", std::to_string(static_cast<unsigned>(r.cause)), "1 to 3");
}

void BoundStream::require(const std::string& place, Stream stream, bool capturing) const {
  if (!capturing && handle_ && *handle_ != stream.handle)
    fail(StatusCode::kInvalidArgument, place, "stream", fmt::format("{}", stream.handle),
         "the stream of the first call, or one that captures", "call rebind_stream after a synchronisation");
}

}  // namespace twostep
