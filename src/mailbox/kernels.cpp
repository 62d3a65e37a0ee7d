#include "mailbox/kernels.h"

#include <fmt/format.h>

#include "mailbox/contract.h"

namespace twostep {
namespace {

struct KernelText {
  const char* parameters;
  const char* call;
};

KernelText text_of(MailboxOp op) {
  switch (op) {
    case MailboxOp::kAllGather:
      return {"const u16* in, i64 in_stride, u16* out, i64 out_stride, u32 rows, u32 cols",
              "all_gather<Rules>(ring, in, in_stride, out, out_stride, rows, cols, shared)"};
    case MailboxOp::kAllGatherWords:
      return {"const u32* in, u32* out, u32 words", "all_gather_words<Rules>(ring, in, out, words, shared)"};
    case MailboxOp::kAllReduceAddNorm:
      return {"const __grid_constant__ AddNorm step", "all_reduce_add_norm<Rules>(ring, step, shared)"};
  }
  return {};
}

}  // namespace

CompileRequest mailbox_request(MailboxOp op, int ranks, bool strict_fence, const std::string& arch) {
  const auto [parameters, call] = text_of(op);
  return {fmt::format("mailbox-{}-p{}{}-{}", mailbox_op_name(op), ranks, strict_fence ? "-strict" : "", arch), "kernel",
          fmt::format(R"(#include "gather/mailbox.cuh"

namespace twostep::gather {{

struct Rules : Protocol {{
  static constexpr int kRanks = {};
  static constexpr bool kStrictFence = {};
}};
static_assert(Rules::kThreads == {} && Rules::kStages == {});
static_assert(sizeof(Ring) == {} && sizeof(Control) == {} && sizeof(Report) == {} && sizeof(AddNorm) == {});

extern "C" __global__ void __launch_bounds__(Rules::kThreads, 1) kernel(const __grid_constant__ Ring ring, {}) {{
  __shared__ Shared shared;
  {};
}}

}}  // namespace twostep::gather
)",
                      ranks, strict_fence, kMailboxThreads, kMailboxStages, sizeof(MailboxRing), sizeof(RingControl),
                      sizeof(MailboxReport), sizeof(AddNormStep), parameters, call),
          arch, "mailbox-1"};
}

CompileRequest move_request(const std::string& arch) {
  return {fmt::format("nccl-move-{}", arch), "kernel",
          fmt::format(R"(#include "gather/fallback.cuh"

namespace twostep::gather {{

static_assert(sizeof(Move) == {} && kMoveThreads == {} && kBatch == {} && kNanPair == {} && kNanWord == {});

extern "C" __global__ void __launch_bounds__(kMoveThreads) kernel(const __grid_constant__ Move move) {{ move_rows(move); }}

}}  // namespace twostep::gather
)",
                      sizeof(MoveStep), kMoveThreads, kMoveBatch, kNanPair, kNanWord),
          arch, "mailbox-1"};
}

CompileRequest add_norm_request(const std::string& arch) {
  return {fmt::format("nccl-add-norm-{}", arch), "kernel",
          fmt::format(R"(#include "gather/fallback.cuh"

namespace twostep::gather {{

static_assert(sizeof(AddNorm) == {});

extern "C" __global__ void __launch_bounds__({}) kernel(const __grid_constant__ AddNorm step) {{
  __shared__ float parts[32];
  add_norm<{}>(step, parts);
}}

}}  // namespace twostep::gather
)",
                      sizeof(AddNormStep), kMailboxThreads, kMailboxThreads),
          arch, "mailbox-1"};
}

}  // namespace twostep
