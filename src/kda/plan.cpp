// PreparedKda on a GPU: prepare loads a kernel per key, run launches it.
#include "kda/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "core/check.h"
#include "cuda/launch.h"
#include "cuda/memory.h"
#include "jit/kernel_cache.h"

namespace twostep {
namespace {

struct Params {  // twostep::kda::Params of kernels/kda/kda_step.cuh
  const std::uint16_t* projected;
  std::uint16_t* out;
  std::uint16_t* conv;
  float* state;
  const std::int32_t* slots;
  const std::int32_t* accepted;
  const std::int32_t* lengths;
  KdaCounters* counters;
  std::uint16_t* rounded;
  const void* owned;
  const void* f_b;
  const void* a_log;
  const void* dt_bias;
  long long out_stride;
  long long conv_stride;
  long long state_stride;
  long long slots_stride;
  long long num_slots;
  long long first_live_slot;
  int window;
  float scale;
  float norm_eps;
  float lower_bound;
  std::uint8_t* records;
  long long record_stride;
  int requests;
};

struct FoldParams {  // twostep::kda::FoldParams of kernels/kda/records.cuh
  Params step;
  const std::int32_t* dst_slots;
  long long dst_stride;
};

// The kernel of one key, ready to launch.
struct Loaded {
  std::shared_ptr<const CompiledKernel> compiled;
  KdaTactic tactic;
  std::uint32_t smem_bytes = 0;
};

std::string check_arch(int arch) {
  std::string name = arch_name(arch);
  if (name.empty())
    fail(StatusCode::kUnsupported, "kda.prepare", "architecture", fmt::format("sm_{}", arch),
         "sm_90a, sm_100a, sm_103a, sm_120a", "run the layer on the CPU, or on another GPU");
  return name;
}

std::size_t bytes_of(const TensorView& view) {
  std::size_t count = dtype_size(view.dtype);
  for (int i = 0; i < view.rank; ++i) count *= static_cast<std::size_t>(view.shape[static_cast<std::size_t>(i)]);
  return count;
}

// A copy on the host; `view` then points at it.
std::vector<std::byte> fetch(TensorView& view, Stream stream) {
  std::vector<std::byte> host(bytes_of(view));
  copy_to_host(host.data(), view.data, host.size(), stream);
  view.data = host.data();
  return host;
}

class CudaKda final : public KdaPlan {
 public:
  CudaKda(const KdaModel& model, const KdaTestSwitches& test)
      : model_(model),
        test_(test),
        context_(primary_context(model.device.index)),
        facts_(device_facts(model.device.index)) {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    owned_ = DeviceBuffer(static_cast<std::size_t>(KdaOwned::floats(model.channels())) * sizeof(float));
    const OwnedStream stream;  // the default stream may take part in another thread's capture
    copy_owned(model.weights, stream.view());
  }

  void prepare(const KdaLayout& layout) override {
    const ContextGuard context(context_);
    const RelaxedCapture relaxed;
    check_arch(facts_.arch);
    std::vector<Loaded> keys;
    std::map<std::string, Loaded> built;  // by text: keys that need the same kernel share it
    for (const KdaPolicy& policy : model_.options.policies) {
      const KdaBuild build = kda_build(model_, layout, policy, facts_);
      throw_if_error(kda_tactic_valid(build.tactic, build.tokens, facts_, kda_folded(build)));
      const KdaKernelText text = kda_kernel_text(build, test_);
      auto [place, is_new] = built.try_emplace(text.text);
      const int smem_bytes = kda_smem_bytes(build.tokens, build.tactic, kda_folded(build));
      if (is_new) place->second = {load(text, smem_bytes), build.tactic, static_cast<std::uint32_t>(smem_bytes)};
      keys.push_back(place->second);
    }
    if (model_.records()) fold_ = load(kda_fold_text(model_, layout), 0);
    keys_ = std::move(keys);
    layout_ = layout;
  }

  void run(const KdaStep& step, KdaCounters* counters, Stream stream) override {
    const Loaded& loaded = keys_[step.key];
    Params params = common_params(counters);
    params.projected = step.projected;
    params.out = step.out;
    params.conv = step.conv;
    params.state = step.state;
    params.slots = step.slots;
    params.accepted = step.accepted;
    params.lengths = step.lengths;
    params.rounded = test_.rounded;
    params.out_stride = step.out_stride;
    params.slots_stride = step.slots_stride;
    params.window = static_cast<int>(step.window);
    params.records = step.records;
    params.requests = static_cast<int>(step.requests);
    void* arguments[] = {&params};
    const ContextGuard context(context_);
    const bool capturing = is_capturing(stream);
    const bool ordinary = ordinary_next_.load(std::memory_order_acquire);
    Launch what;
    what.function = loaded.compiled->function;
    what.grid_x = kda_grid(model_.heads, step.requests, loaded.tactic, facts_);
    what.block = static_cast<std::uint32_t>(kda_threads(loaded.tactic));
    what.cluster_x = static_cast<std::uint32_t>(loaded.tactic.split);
    what.smem_bytes = loaded.smem_bytes;
    what.programmatic = !ordinary && PdlChain::follows_own_kernel(context_, stream, capturing, false);
    launch(what, stream, arguments);
    if (ordinary) ordinary_next_.store(false, std::memory_order_release);  // not before the launch has succeeded
    PdlChain::record(context_, stream, capturing);
  }

  // No dependent launch: a step with early_caches would read what is still being written.
  void fold(const KdaFold& fold, KdaCounters* counters, Stream stream) override {
    FoldParams params{common_params(counters), fold.dst_slots, fold.dst_stride};
    params.step.conv = fold.conv;
    params.step.state = fold.state;
    params.step.slots = fold.slots;
    params.step.accepted = fold.accepted;
    params.step.slots_stride = fold.slots_stride;
    params.step.records = fold.records;
    void* arguments[] = {&params};
    const ContextGuard context(context_);
    Launch what;
    what.function = fold_->function;
    what.grid_x = static_cast<std::uint32_t>(fold.requests * model_.heads);
    what.block = kKdaFoldThreads;
    PdlChain::forget();
    launch(what, stream, arguments);
  }

  void reload(const KdaWeights& weights, Stream stream) override {
    const ContextGuard context(context_);
    if (is_capturing(stream))
      fail(StatusCode::kCapturing, "kda.reload", "stream", "capturing", "a stream that does not capture",
           "reload before the capture or between replays");
    const RelaxedCapture relaxed;
    copy_owned(weights, stream);
    ordinary_next_.store(true, std::memory_order_release);
    PdlChain::forget();
  }

  KdaTactic tactic(std::size_t key) const override { return keys_[key].tactic; }
  std::string kernel(std::size_t key) const override {
    const CompileKey& compiled = keys_[key].compiled->key;
    return compiled.name + " " + compiled.hash;
  }
  KdaStats stats() const override { return stats_; }

 private:
  void copy_owned(KdaWeights weights, Stream stream) {
    const auto conv = fetch(weights.conv_weight, stream);
    const auto norm = fetch(weights.norm_weight, stream);
    std::vector<std::byte> bias;
    if (weights.conv_bias) bias = fetch(*weights.conv_bias, stream);
    std::vector<float> owned(static_cast<std::size_t>(KdaOwned::floats(model_.channels())));
    fill_owned(weights, model_.channels(), owned.data());
    copy_to_device(owned_.data(), owned.data(), owned.size() * sizeof(float), stream);
  }

  // What no call changes.
  Params common_params(KdaCounters* counters) const {
    const KdaOptions& options = model_.options;
    Params params{};
    params.counters = counters;
    params.owned = owned_.data();
    params.f_b = model_.weights.f_b.data;
    params.a_log = model_.weights.a_log.data;
    params.dt_bias = model_.weights.dt_bias.data;
    params.conv_stride = layout_.conv_stride;
    params.state_stride = layout_.state_stride;
    params.record_stride = layout_.record_stride;
    params.num_slots = layout_.num_slots;
    params.first_live_slot = options.first_live_slot;
    params.scale = options.scale;
    params.norm_eps = options.norm_eps;
    params.lower_bound = options.gate_lower_bound.value_or(0.0f);
    return params;
  }

  std::shared_ptr<const CompiledKernel> load(const KdaKernelText& text, int smem_bytes) {
    BuildOptions options;
    options.allow_compile = model_.options.jit;
    LoadReport report;
    auto compiled = load_kernel(kda_compile_request(text, facts_.arch), smem_bytes, options, &report);
    if (report.from == BuiltFrom::kCompiled) ++stats_.compiles;
    else ++stats_.cache_hits;
    return compiled;
  }

  const KdaModel model_;
  const KdaTestSwitches test_;
  const CUcontext context_;
  const DeviceFacts facts_;
  DeviceBuffer owned_;
  KdaLayout layout_;
  std::vector<Loaded> keys_;                    // by index of the policy
  std::shared_ptr<const CompiledKernel> fold_;  // with records
  std::atomic<bool> ordinary_next_{false};      // the weights were written: the next launch has no early loads
  KdaStats stats_;
};

}  // namespace

CompileRequest kda_compile_request(const KdaKernelText& text, int arch) {
  const std::string name = check_arch(arch);
  return {text.name + "-" + name, text.entry, text.text, name, text.rules};
}

std::unique_ptr<KdaPlan> make_cuda_kda(const KdaModel& model, const KdaTestSwitches& test) {
  throw_if_error(driver_status());
  return std::make_unique<CudaKda>(model, test);
}

void cuda_decode_conv_weight(const TensorView& conv_weight, const TensorView& out, Stream stream) {
  throw_if_error(driver_status());
  const ContextGuard context(conv_weight.device.index);
  if (is_capturing(stream))
    fail(StatusCode::kCapturing, "kda.decode_conv_weight", "stream", "capturing", "a stream that does not capture",
         "decode before the capture begins");
  const RelaxedCapture relaxed;
  PdlChain::forget();
  TensorView source = conv_weight;
  const auto host = fetch(source, stream);
  const std::int64_t channels = conv_weight.shape[0] / 3;
  std::vector<float> values(static_cast<std::size_t>(12 * channels));
  transpose_conv_weight(source, channels, values.data());
  copy_to_device(out.data, values.data(), values.size() * sizeof(float), stream);
}

}  // namespace twostep
