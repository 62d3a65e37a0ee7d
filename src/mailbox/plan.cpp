// A mailbox on a GPU: create loads a kernel per operation, a call launches it.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "core/bf16.h"
#include "core/check.h"
#include "cuda/launch.h"
#include "cuda/memory.h"
#include "jit/kernel_cache.h"
#include "mailbox/contract.h"
#include "mailbox/kernels.h"
#include "mailbox/peer_memory.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "mailbox.create";
// 64 do for calls of up to 8 rows of a vocabulary; with 128 those of 16 to 64 rows take 6 to 8 % less
// (docs/mailbox.md).
constexpr int kChosenCtas = 128;
constexpr int kVirtualCtas = 32;
constexpr std::int64_t kTestWidth = 64;

// Pinned host memory that the GPU writes too.
class ReportPage {
 public:
  ReportPage() {
    TWOSTEP_CUDA_CHECK(cuMemAllocHost(&memory_, sizeof(MailboxReport)), kPlace);
    std::memset(memory_, 0, sizeof(MailboxReport));
  }
  ~ReportPage() { driver().cuMemFreeHost(memory_); }
  ReportPage(const ReportPage&) = delete;
  ReportPage& operator=(const ReportPage&) = delete;
  MailboxReport& get() const { return *static_cast<MailboxReport*>(memory_); }

 private:
  void* memory_ = nullptr;
};

class CudaMailbox final : public MailboxPlan {
 public:
  CudaMailbox(Device device, const MailboxConfig& config)
      : config_(config), device_(device.index), context_(primary_context(device.index)) {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    const DeviceFacts facts = device_facts(device_);
    const std::string arch = arch_name(facts.arch);
    if (arch.empty())
      fail(StatusCode::kUnsupported, kPlace, "architecture", fmt::format("sm_{}", facts.arch),
           "sm_90a, sm_100a, sm_103a, sm_120a", "use NCCL for this group");
    most_ctas_ = config.max_ctas > 0 ? config.max_ctas : kChosenCtas;
    for (std::size_t op = 0; op < kMailboxOps; ++op) {
      kernels_[op] =
          load_kernel(mailbox_request(static_cast<MailboxOp>(op), config.size, config.strict_fence, arch), 0);
      int per_sm = 0;
      TWOSTEP_CUDA_CHECK(cuOccupancy(&per_sm, kernels_[op]->function, kMailboxThreads, 0), kPlace);
      if (per_sm == 0)
        fail(StatusCode::kUnsupported, kPlace, "occupancy", "0 CTAs per SM", "1 or more", "use NCCL for this group");
      resident_ctas_ = std::min(resident_ctas_, per_sm * facts.sm_count);
    }
    most_ctas_ = std::min(most_ctas_, resident_ctas_);
    local_ = DeviceBuffer(kMailboxOps * sizeof(RingControl) + sizeof(std::uint32_t));
    report_.emplace();
    stream_.emplace();
    TWOSTEP_CUDA_CHECK(cuMemsetD8Async(local_.address(), 0, local_.bytes(), stream_->get()), kPlace);
    stream_->synchronize();
    transports_ = possible_transports(device_);
    uuid_ = uuid_of(device_);
  }
  ~CudaMailbox() override {
    quietly(context_, [&] {
      stream_.reset();
      report_.reset();
    });
  }

  std::uint32_t transports() const override { return transports_; }
  std::array<std::uint8_t, 16> device_uuid() const override { return uuid_; }
  void require_access(const std::array<std::uint8_t, 16>& peer, PeerTransport transport) override {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    require_peer_access(device_, peer, transport);
  }
  // Virtual ranks wait for each other: all their grids must be resident together.
  void share_device(int ranks) override {
    if (ranks > 1) most_ctas_ = std::max(1, std::min({most_ctas_, kVirtualCtas, resident_ctas_ / ranks}));
  }
  void allocate(PeerTransport transport, std::int64_t bytes) override {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    region_.allocate(device_, transport, static_cast<std::size_t>(bytes));
    const auto address = reinterpret_cast<CUdeviceptr>(region_.data());
    TWOSTEP_CUDA_CHECK(cuMemsetD8Async(address, 0xff, region_.bytes(), stream_->get()), kPlace);
    stream_->synchronize();
  }
  MemoryHandle handle() override {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    return region_.handle();
  }
  void map(std::span<MemoryHandle> handles) override {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    region_.map(handles, config_.rank);
    // Not in the self-test: an allocation may wait for the GPU, where another rank may wait for us already.
    test_in_ = DeviceBuffer(4 * kTestWidth);
    test_out_ = DeviceBuffer(4 * kTestWidth * kMostRanks);
    const RegionLayout layout = region_layout(config_);
    auto* control = static_cast<RingControl*>(local_.data());
    for (std::size_t op = 0; op < kMailboxOps; ++op) {
      MailboxRing& ring = rings_[op];
      ring = {};
      for (std::size_t rank = 0; rank < handles.size(); ++rank)
        ring.regions[rank] = region_.regions()[rank] + layout.offset[op];
      ring.control = control + op;
      ring.poisoned = poisoned();
      ring.report = &report_->get();
      ring.segment_bytes = layout.segment_bytes[op];
      ring.limit_ns = static_cast<std::uint64_t>(config_.peer_limit_s * 1e9);
      ring.rank = config_.rank;
      ring.op = static_cast<std::int32_t>(op);
    }
  }
  void self_test() override;
  void stop() override {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    TWOSTEP_CUDA_CHECK(cuCtxSynchronize(), "mailbox.close");
    poison("mailbox.close");
  }
  void unmap() noexcept override {
    quietly(context_, [&] { region_.unmap(); });
  }
  void release() noexcept override {
    quietly(context_, [&] { region_.release(); });
  }

  void all_gather(const GatherStep& step, Stream stream) override {
    GatherStep s = step;
    void* arguments[] = {&rings_[0], &s.in, &s.in_stride, &s.out, &s.out_stride, &s.rows, &s.cols};
    launch_op(MailboxOp::kAllGather, s.rows, std::int64_t{s.rows} * s.cols / 8, stream, arguments);
  }
  void all_gather_words(const GatherStep& step, Stream stream) override {
    GatherStep s = step;
    void* arguments[] = {&rings_[1], &s.in, &s.out, &s.cols};
    launch_op(MailboxOp::kAllGatherWords, 1, (s.cols + 3) / 4, stream, arguments);
  }
  void all_reduce_add_norm(const AddNormStep& step, Stream stream) override {
    AddNormStep s = step;
    void* arguments[] = {&rings_[2], &s};
    launch_op(MailboxOp::kAllReduceAddNorm, s.rows, std::int64_t{s.rows} * s.hidden / 8, stream, arguments);
  }
  bool is_capturing(Stream stream) const override { return twostep::is_capturing(stream); }
  const MailboxReport& report() const override { return report_->get(); }
  int most_ctas() const override { return most_ctas_; }

  // The page, for calls that wait, which then report it; the word, for launches to come.
  void abort() override {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    __atomic_store_n(&report_->get().abort_request, 1u, __ATOMIC_RELEASE);
    poison("mailbox.abort");
  }

 private:
  std::uint32_t* poisoned() const {
    return reinterpret_cast<std::uint32_t*>(static_cast<RingControl*>(local_.data()) + kMailboxOps);
  }

  void poison(const char* place) {
    const OwnedStream stream;
    TWOSTEP_CUDA_CHECK(cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(poisoned()), 1, 1, stream.get()), place);
    stream.synchronize();
  }

  void launch_op(MailboxOp op, std::int64_t rows, std::int64_t vectors, Stream stream, void** arguments) {
    const ContextGuard context(context_);
    const bool capturing = twostep::is_capturing(stream);
    Launch what;
    what.function = kernels_[static_cast<std::size_t>(op)]->function;
    what.grid_x = mailbox_grid(op, rows, vectors, most_ctas_);
    what.block = kMailboxThreads;
    what.programmatic = PdlChain::follows_own_kernel(context_, stream, capturing, false);
    launch(what, stream, arguments);
    PdlChain::record(context_, stream, capturing);
  }

  const MailboxConfig config_;
  const int device_;
  const CUcontext context_;
  int resident_ctas_ = std::numeric_limits<int>::max();  // of every operation
  int most_ctas_ = 0;
  std::uint32_t transports_ = 0;
  std::array<std::uint8_t, 16> uuid_{};
  std::array<std::shared_ptr<const CompiledKernel>, kMailboxOps> kernels_;
  DeviceBuffer local_;  // a RingControl per operation, then the word of a poisoned mailbox
  std::optional<ReportPage> report_;
  std::optional<OwnedStream> stream_;  // of the set-up
  SharedRegion region_;
  std::array<MailboxRing, kMailboxOps> rings_{};
  DeviceBuffer test_in_, test_out_;
};

// Small integers, whose sums BF16 holds exactly.
void CudaMailbox::self_test() {
  constexpr std::int64_t kRows = 1;
  const std::int64_t cols = std::min(config_.max_cols, kTestWidth);
  const std::int64_t hidden = std::min(config_.max_hidden, kTestWidth);
  const std::int64_t words = std::min<std::int64_t>(config_.max_words, 5);
  const auto size = static_cast<std::int64_t>(config_.size);
  const auto value = [](std::int64_t rank, std::int64_t i) { return static_cast<float>((rank * 5 + i) % 16); };
  const ContextGuard context(context_);
  const RelaxedCapture relaxed;
  const DeviceBuffer &in = test_in_, &out = test_out_;
  const auto send = [&](auto host) {
    copy_to_device(in.data(), host.data(), host.size() * sizeof host[0], stream_->view());
  };
  const auto receive = [&](auto& host) {
    copy_to_host(host.data(), out.data(), host.size() * sizeof host[0], stream_->view());
  };
  // Not before the last call: peers wait in theirs for all of ours.
  Status wrong;
  const auto require = [&](bool good, MailboxOp op) {
    if (!good && wrong.ok())
      wrong = refusal(StatusCode::kDeviceError, kPlace, fmt::format("self-test of {}", mailbox_op_name(op)),
                      "other values", "those that were sent", "check the link between the GPUs, or use NCCL");
  };

  std::vector<std::uint16_t> halves(static_cast<std::size_t>(cols));
  for (std::int64_t i = 0; i < cols; ++i) halves[static_cast<std::size_t>(i)] = float_to_bf16(value(config_.rank, i));
  send(halves);
  all_gather({in.data(), out.data(), cols, size * cols, kRows, static_cast<std::uint32_t>(cols)}, stream_->view());
  halves.resize(static_cast<std::size_t>(size * cols));
  receive(halves);
  for (std::int64_t i = 0; i < size * cols; ++i)
    require(bf16_to_float(halves[static_cast<std::size_t>(i)]) == value(i / cols, i % cols), MailboxOp::kAllGather);

  std::vector<std::int32_t> numbers(static_cast<std::size_t>(words));
  for (std::int64_t i = 0; i < words; ++i)
    numbers[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(100 * config_.rank + i);
  send(numbers);
  all_gather_words({in.data(), out.data(), words, words, 1, static_cast<std::uint32_t>(words)}, stream_->view());
  numbers.resize(static_cast<std::size_t>(size * words));
  receive(numbers);
  for (std::int64_t i = 0; i < size * words; ++i)
    require(numbers[static_cast<std::size_t>(i)] == 100 * (i / words) + i % words, MailboxOp::kAllGatherWords);

  std::vector<std::uint16_t> sums(static_cast<std::size_t>(hidden));
  for (std::int64_t i = 0; i < hidden; ++i) sums[static_cast<std::size_t>(i)] = float_to_bf16(value(config_.rank, i));
  send(sums);
  AddNormStep step{};
  step.in = in.data();
  step.residual_out = out.data();
  step.in_stride = step.residual_out_stride = hidden;
  step.rows = kRows;
  step.hidden = static_cast<std::uint32_t>(hidden);
  all_reduce_add_norm(step, stream_->view());
  receive(sums);
  for (std::int64_t i = 0; i < hidden; ++i) {
    float sum = 0;
    for (std::int64_t rank = 0; rank < size; ++rank) sum += value(rank, i);
    require(bf16_to_float(sums[static_cast<std::size_t>(i)]) == sum, MailboxOp::kAllReduceAddNorm);
  }
  throw_if_error(status_of(report(), config_.peer_limit_s));
  throw_if_error(wrong);
}

}  // namespace

std::unique_ptr<MailboxPlan> make_cuda_mailbox(Device device, const MailboxConfig& config) {
  throw_if_error(driver_status());
  return std::make_unique<CudaMailbox>(device, config);
}

}  // namespace twostep
