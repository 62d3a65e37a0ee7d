// An NcclGroup on a GPU: NCCL moves the bytes, two kernels do what is left.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "core/check.h"
#include "cuda/launch.h"
#include "cuda/memory.h"
#include "jit/kernel_cache.h"
#include "mailbox/contract.h"
#include "mailbox/kernels.h"
#include "mailbox/nccl.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "nccl.create";
constexpr std::uint32_t kMostLines = 65535;  // of a grid's y

const Nccl& require_nccl() {
  throw_if_error(Nccl::status());
  return *Nccl::get();
}

class CudaNccl final : public NcclPlan {
 public:
  CudaNccl(Device device, const MailboxConfig& config)
      : nccl_(require_nccl()), config_(config), context_(primary_context(device.index)) {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    const DeviceFacts facts = device_facts(device.index);
    const std::string arch = arch_name(facts.arch);
    if (arch.empty())
      fail(StatusCode::kUnsupported, kPlace, "architecture", fmt::format("sm_{}", facts.arch),
           "sm_90a, sm_100a, sm_103a, sm_120a", "use the framework's own collectives");
    most_ctas_ = 2 * static_cast<std::uint32_t>(facts.sm_count);
    move_ = load_kernel(move_request(arch), 0);
    add_norm_ = load_kernel(add_norm_request(arch), 0);
    const auto bytes = [](std::int64_t rows, std::int64_t cols) { return static_cast<std::size_t>(2 * rows * cols); };
    gathered_ = DeviceBuffer(bytes(config.size * config.max_rows, config.max_cols));
    sum_ = DeviceBuffer(bytes(config.max_rows, config.max_hidden));
  }
  ~CudaNccl() override {
    quietly(context_, [&] { comm_.reset(); });
  }

  int version() const override { return nccl_.version_code(); }
  NcclId unique_id() const override { return nccl_.unique_id(); }

  // NCCL connects its ranks at the first call of each kind and size class: here, and not in a capture.
  void join(const NcclId& id) override {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    comm_.emplace(nccl_, id, config_.rank, config_.size);
    const OwnedStream stream;
    for (const std::int64_t rows : {std::int64_t{1}, config_.max_rows}) {
      const auto bytes = static_cast<std::size_t>(2 * rows * config_.max_cols);
      comm_->all_gather(own_block(bytes), gathered_.data(), bytes, NcclType::kU8, stream.view());
      comm_->all_reduce_sum(sum_.data(), sum_.data(), static_cast<std::size_t>(rows * config_.max_hidden),
                            NcclType::kBF16, stream.view());
    }
    stream.synchronize();
    throw_if_error(comm_->status());
  }

  void all_gather(const GatherStep& step, Stream stream) override {
    if (step.rows == 0) return;
    const ContextGuard context(context_);
    const std::size_t bytes = std::size_t{step.rows} * step.cols * dtype_size(step.dtype);
    const void* send = packed(step.in, step.in_stride, step.rows, step.cols, step.dtype, own_block(bytes), stream);
    comm_->all_gather(send, gathered_.data(), bytes, NcclType::kU8, stream);
    PdlChain::forget();
    launch_move(permute_step(step, config_.size, gathered_.data()), stream);
  }

  void all_gather_words(const GatherStep& step, Stream stream) override {
    const ContextGuard context(context_);
    comm_->all_gather(step.in, step.out, step.cols, NcclType::kU32, stream);
    PdlChain::forget();
    launch_move(words_step(step, config_.size), stream);
  }

  void all_reduce_add_norm(const AddNormStep& step, Stream stream) override {
    if (step.rows == 0) return;
    const ContextGuard context(context_);
    AddNormStep rest = step;
    const void* send = packed(step.in, step.in_stride, step.rows, step.hidden, DType::kBF16, sum_.data(), stream);
    comm_->all_reduce_sum(send, sum_.data(), std::size_t{step.rows} * step.hidden, NcclType::kBF16, stream);
    PdlChain::forget();
    rest.in = sum_.data();
    rest.in_stride = step.hidden;
    Launch what;
    what.function = add_norm_->function;
    what.grid_x = std::min(step.rows, most_ctas_);
    what.block = kMailboxThreads;
    enqueue(what, stream, &rest);
  }

  bool is_capturing(Stream stream) const override { return twostep::is_capturing(stream); }
  Status status() const override { return comm_->status(); }

  void close() override {
    const ContextGuard context(context_);
    TWOSTEP_CUDA_CHECK(cuCtxSynchronize(), "nccl.close");
    comm_->destroy();
  }

 private:
  std::byte* own_block(std::size_t bytes) const {
    return static_cast<std::byte*>(gathered_.data()) + static_cast<std::size_t>(config_.rank) * bytes;
  }

  // The rows without gaps: where they are, or moved to `to`.
  const void* packed(const void* in, std::int64_t stride, std::int64_t rows, std::int64_t cols, DType dtype, void* to,
                     Stream stream) const {
    if (rows == 1 || stride == cols) return in;
    launch_move(pack_step(in, stride, rows, cols, dtype, to), stream);
    return to;
  }

  void launch_move(MoveStep step, Stream stream) const {
    Launch what;
    what.function = move_->function;
    const std::uint32_t units = step.row_bytes / step.unit, of_cta = kMoveThreads * kMoveBatch;
    what.grid_x = (units + of_cta - 1) / of_cta;
    what.grid_y = std::min(step.blocks * step.rows, kMostLines);
    what.block = kMoveThreads;
    enqueue(what, stream, &step);
  }

  void enqueue(Launch what, Stream stream, void* step) const {
    const bool capturing = twostep::is_capturing(stream);
    what.programmatic = PdlChain::follows_own_kernel(context_, stream, capturing, false);
    void* arguments[] = {step};
    launch(what, stream, arguments);
    PdlChain::record(context_, stream, capturing);
  }

  const Nccl& nccl_;
  const MailboxConfig config_;
  const CUcontext context_;
  std::uint32_t most_ctas_ = 0;
  std::shared_ptr<const CompiledKernel> move_, add_norm_;
  DeviceBuffer gathered_;  // [ranks, rows, cols] of a call
  DeviceBuffer sum_;       // [rows, hidden]
  std::optional<NcclComm> comm_;
};

}  // namespace

std::unique_ptr<NcclPlan> make_cuda_nccl(Device device, const MailboxConfig& config) {
  return std::make_unique<CudaNccl>(device, config);
}

}  // namespace twostep
