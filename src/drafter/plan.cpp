// The draft step on a GPU: kernels loaded, memory owned, launches made.
#include "drafter/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <future>

#include "core/check.h"
#include "cuda/launch.h"
#include "cuda/memory.h"
#include "jit/kernel_cache.h"

namespace twostep {
namespace {

class CudaLauncher final : public StepLauncher {
 public:
  explicit CudaLauncher(Device device) : context_(primary_context(device.index)), facts_(device_facts(device.index)) {
    const ContextGuard context(context_);
    stream_.emplace();  // the default stream may take part in another thread's capture
  }
  ~CudaLauncher() override {
    quietly(context_, [&] {
      memory_.clear();
      stream_.reset();
    });
  }

  StepGpu gpu() const override { return step_gpu(facts_); }

  void* allocate(std::size_t bytes) override {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    const std::size_t size = std::max<std::size_t>(bytes, 1);
    memory_.emplace_back(size);
    TWOSTEP_CUDA_CHECK(cuMemsetD8Async(memory_.back().address(), 0, size, stream_->get()), "drafter.prepare");
    stream_->synchronize();
    return memory_.back().data();
  }

  void upload(void* to, const void* from, std::size_t bytes) override {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    copy_to_device(to, from, bytes, stream_->view());
  }

  // NVRTC compiles several kernels at once.
  void load(const StepKernelModel& model) override {
    const auto requests = step_kernel_requests(model, facts_.arch);
    std::vector<std::future<std::shared_ptr<const CompiledKernel>>> loads;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const auto kernel = static_cast<StepKernel>(i);
      const auto smem = step_kernel_smem(kernel, model.model, gpu());
      loads.emplace_back();
      if (!step_kernel_needed(kernel, model.model, gpu())) continue;
      if (smem > facts_.smem_per_block)
        fail(StatusCode::kUnsupported, "drafter.prepare", "shared memory", fmt::format("{} bytes", smem),
             fmt::format("up to {} bytes on this GPU", facts_.smem_per_block), "run the draft step on the CPU");
      loads.back() = std::async(std::launch::async, [this, &requests, i, smem] {
        const ContextGuard context(context_);
        const RelaxedCapture relaxed;
        return load_kernel(requests[i], static_cast<int>(smem));
      });
      smem_[i] = static_cast<std::uint32_t>(smem);
    }
    for (std::size_t i = 0; i < loads.size(); ++i)
      if (loads[i].valid()) kernels_[i] = loads[i].get();
  }

  void launch(StepKernel kernel, Grid grid, Stream stream, void** arguments) override {
    const auto index = static_cast<std::size_t>(kernel);
    const ContextGuard context(context_);
    const bool capturing = is_capturing(stream);
    Launch what;
    what.function = kernels_[index]->function;
    what.grid_x = static_cast<std::uint32_t>(grid.x);
    what.grid_y = static_cast<std::uint32_t>(grid.y);
    what.grid_z = static_cast<std::uint32_t>(grid.z);
    what.block = step_kernel_threads(kernel);
    what.smem_bytes = smem_[index];
    what.cooperative = step_kernel_cooperative(kernel);
    what.programmatic = PdlChain::follows_own_kernel(context_, stream, capturing, false);
    twostep::launch(what, stream, arguments);
    PdlChain::record(context_, stream, capturing);
  }

 private:
  const CUcontext context_;
  const DeviceFacts facts_;
  std::optional<OwnedStream> stream_;  // of prepare
  std::vector<DeviceBuffer> memory_;
  std::array<std::shared_ptr<const CompiledKernel>, kNumStepKernels> kernels_;
  std::array<std::uint32_t, kNumStepKernels> smem_{};
};

}  // namespace

StepGpu step_gpu(const DeviceFacts& facts) { return {facts.sm_count, facts.smem_per_block, facts.arch == 90}; }

std::vector<CompileRequest> step_kernel_requests(const StepKernelModel& model, int arch) {
  const std::string name = arch_name(arch);
  if (name.empty())
    fail(StatusCode::kUnsupported, "drafter.prepare", "architecture", fmt::format("sm_{}", arch),
         "sm_90a, sm_100a, sm_103a, sm_120a", "run the draft step on the CPU, or on another GPU");
  std::vector<CompileRequest> requests;
  for (int i = 0; i < kNumStepKernels; ++i)
    requests.push_back(step_kernel_request(static_cast<StepKernel>(i), model, name));
  return requests;
}

std::unique_ptr<StepPhases> make_cuda_phases(Device device) {
  throw_if_error(driver_status());
  return make_device_phases(std::make_unique<CudaLauncher>(device));
}

}  // namespace twostep
