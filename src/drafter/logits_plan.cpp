// The last stage of the logits on a GPU: the constructor loads its kernel, run launches it.
#include "drafter/logits_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/check.h"
#include "cuda/launch.h"
#include "cuda/memory.h"
#include "drafter/logits.h"
#include "jit/kernel_cache.h"

namespace twostep {
namespace {

constexpr std::uint32_t kThreads = 256;        // kThreads of kernels/draft/logits.cuh
constexpr std::int64_t kPiece = 8 * kThreads;  // kPiece
constexpr std::int64_t kCtasPerSm = 8;         // 2048 threads of one SM

class CudaLogits final : public LogitsPlan {
 public:
  CudaLogits(Device device, const CapAndScale& what)
      : what_(what), context_(primary_context(device.index)), sms_(device_facts(device.index).sm_count) {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    kernel_ = load_kernel(logits_request(device_facts(device.index).arch, what.soft_cap.has_value()), 0);
  }

  void run(const LogitsStep& step, Stream stream) override {
    LogitsStep s = step;
    float cap = what_.soft_cap.value_or(1.0f), scale = what_.scale;
    void* arguments[] = {&s.logits, &s.logits_stride, &s.out, &s.out_stride, &s.rows, &s.cols, &cap, &scale};
    const ContextGuard context(context_);
    const bool capturing = is_capturing(stream);
    Launch what;
    what.function = kernel_->function;
    what.grid_x = static_cast<std::uint32_t>(
        std::min(s.rows * ((s.cols + kPiece - 1) / kPiece), static_cast<std::int64_t>(sms_) * kCtasPerSm));
    what.block = kThreads;
    what.programmatic = PdlChain::follows_own_kernel(context_, stream, capturing, false);
    launch(what, stream, arguments);
    PdlChain::record(context_, stream, capturing);
  }

 private:
  const CapAndScale what_;
  const CUcontext context_;
  const int sms_;
  std::shared_ptr<const CompiledKernel> kernel_;
};

}  // namespace

CompileRequest logits_request(int arch, bool cap) {
  const std::string name = arch_name(arch);
  if (name.empty())
    fail(StatusCode::kUnsupported, "logits.LogitsStage", "architecture", fmt::format("sm_{}", arch),
         "sm_90a, sm_100a, sm_103a, sm_120a", "cap and scale by the framework, or on the CPU");
  return {fmt::format("logits-{}-{}", cap ? "cap" : "scale", name), "kernel",
          fmt::format(R"(#include "draft/logits.cuh"

extern "C" __global__ void __launch_bounds__(twostep::draft::kThreads)
    kernel(const twostep::u16* l, twostep::i64 l_stride, twostep::u16* out, twostep::i64 out_stride, twostep::i64 rows,
           twostep::i64 cols, float soft_cap, float scale) {{
  static_assert(twostep::draft::kThreads == {} && twostep::draft::kPiece == {});
  twostep::draft::cap_and_scale<{}>(l, l_stride, out, out_stride, rows, cols, soft_cap, scale);
}}
)",
                      kThreads, kPiece, cap),
          name, "logits-1"};
}

std::shared_ptr<void> make_cuda_logits_memory(Device device, std::size_t bytes) {
  const ContextGuard context(device.index);
  const auto buffer = std::make_shared<DeviceBuffer>(bytes);
  return {buffer, buffer->data()};
}

std::unique_ptr<LogitsPlan> make_cuda_logits(Device device, const CapAndScale& what) {
  throw_if_error(driver_status());
  return std::make_unique<CudaLogits>(device, what);
}

}  // namespace twostep
