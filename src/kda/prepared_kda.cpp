// PreparedKda: checks, then the plan of the weights' device.
#include <fmt/format.h>

#include "core/check.h"
#include "kda/contract.h"

namespace twostep {

#if !TWOSTEP_CUDA
std::unique_ptr<KdaPlan> make_cuda_kda(const KdaModel& model, const KdaTestSwitches&) {
  fail(StatusCode::kUnavailable, "kda.PreparedKda", "weights.device", to_string(model.device), "cpu",
       "this build has no GPU rooms: build with TWOSTEP_CUDA=ON");
}
void cuda_decode_conv_weight(const TensorView& conv_weight, const TensorView&, Stream) {
  fail(StatusCode::kUnavailable, "kda.decode_conv_weight", "conv_weight.device", to_string(conv_weight.device), "cpu",
       "this build has no GPU rooms: build with TWOSTEP_CUDA=ON");
}
#endif

struct PreparedKda::Impl {
  Impl(const KdaWeights& weights, const KdaOptions& options, const KdaTestSwitches& test)
      : model(check_kda(weights, options)),
        plan(model.device.is_cuda() ? make_cuda_kda(model, test) : make_cpu_kda(model, test)) {}

  std::size_t index_of(KdaKey key, const char* place) const {
    std::size_t index = 0;
    throw_if_error(find_key(model, layout.has_value(), key, place, &index));
    return index;
  }

  // Of all layers, or of none: what fails is found before the first launch.
  static void fold(std::span<const KdaLayerCaches> layers, const TensorView& slots, const TensorView* accepted,
                   const std::optional<TensorView>& dst_slots, Stream stream) {
    for (const bool launches : {false, true})
      for (const auto& [layer, caches] : layers) {
        if (layer == nullptr)
          fail(StatusCode::kInvalidArgument, accepted ? "kda.fold_records" : "kda.reset_records", "layer", "null",
               "prepared objects");
        const Impl& impl = *layer->impl_;
        KdaFold fold;
        throw_if_error(
            check_fold(impl.model, impl.layout ? &*impl.layout : nullptr, caches, slots, accepted, dst_slots, &fold));
        if (launches) impl.plan->fold(fold, impl.counters, stream);
      }
  }

  const KdaModel model;  // the plan may refer to it
  std::unique_ptr<KdaPlan> plan;
  std::optional<KdaLayout> layout;  // of the last prepare that succeeded
  KdaCounters* counters = nullptr;
  std::atomic<std::uint64_t> runs{0};  // one object may run on several streams
};

PreparedKda::PreparedKda(const KdaWeights& weights, const KdaOptions& options)
    : PreparedKda(std::make_unique<Impl>(weights, options, KdaTestSwitches{})) {}
PreparedKda::PreparedKda(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PreparedKda::PreparedKda(PreparedKda&&) noexcept = default;
PreparedKda& PreparedKda::operator=(PreparedKda&&) noexcept = default;
PreparedKda::~PreparedKda() = default;

void PreparedKda::prepare(const KdaCaches& layouts) {
  const KdaLayout layout = check_layouts(impl_->model, layouts);
  impl_->plan->prepare(layout);
  impl_->layout = layout;
}

void PreparedKda::run(const KdaCall& call, Stream stream) {
  KdaStep step;
  throw_if_error(check_call(impl_->model, impl_->layout ? &*impl_->layout : nullptr, call, &step));
  impl_->plan->run(step, impl_->counters, stream);
  impl_->runs.fetch_add(1, std::memory_order_relaxed);
}

void PreparedKda::reset_records(const KdaCaches& caches, const TensorView& slots, Stream stream) {
  const KdaLayerCaches one{this, caches};
  reset_records({&one, 1}, slots, stream);
}
void PreparedKda::reset_records(std::span<const KdaLayerCaches> layers, const TensorView& slots, Stream stream) {
  Impl::fold(layers, slots, nullptr, {}, stream);
}
void PreparedKda::fold_records(const KdaCaches& caches, const TensorView& slots, const TensorView& accepted,
                               const std::optional<TensorView>& dst_slots, Stream stream) {
  const KdaLayerCaches one{this, caches};
  fold_records({&one, 1}, slots, accepted, dst_slots, stream);
}
void PreparedKda::fold_records(std::span<const KdaLayerCaches> layers, const TensorView& slots,
                               const TensorView& accepted, const std::optional<TensorView>& dst_slots, Stream stream) {
  Impl::fold(layers, slots, &accepted, dst_slots, stream);
}

void PreparedKda::reload(const KdaWeights& weights, Stream stream) {
  throw_if_error(same_kda_weights(impl_->model, weights));
  impl_->plan->reload(weights, stream);
}

void PreparedKda::set_counters(KdaCounters* counters) { impl_->counters = counters; }

std::vector<KdaKey> PreparedKda::keys() const {
  std::vector<KdaKey> keys;
  if (impl_->layout)
    for (const KdaPolicy& policy : impl_->model.options.policies) keys.push_back(policy.key);
  return keys;
}
KdaTactic PreparedKda::tactic(KdaKey key) const { return impl_->plan->tactic(impl_->index_of(key, "kda.tactic")); }
std::string PreparedKda::kernel(KdaKey key) const { return impl_->plan->kernel(impl_->index_of(key, "kda.kernel")); }
KdaStats PreparedKda::stats() const {
  KdaStats stats = impl_->plan->stats();
  stats.runs = impl_->runs.load(std::memory_order_relaxed);
  return stats;
}

PreparedKda make_prepared_kda(const KdaWeights& weights, const KdaOptions& options, const KdaTestSwitches& test) {
  return PreparedKda(std::make_unique<PreparedKda::Impl>(weights, options, test));
}

void decode_conv_weight(const TensorView& conv_weight, const TensorView& out, Stream stream) {
  throw_if_error(check_decode_conv(conv_weight, out));
  if (conv_weight.device.is_cuda()) return cuda_decode_conv_weight(conv_weight, out, stream);
  transpose_conv_weight(conv_weight, out.shape[2], static_cast<float*>(out.data));
}

}  // namespace twostep
