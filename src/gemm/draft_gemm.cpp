// DraftGemm: picks the plan of the weight's device and forwards.
#include "core/check.h"
#include "gemm/contract.h"

namespace twostep {
namespace {

std::shared_ptr<Plan> make_plan(const TensorView& weight, const Options& options) {
  if (!weight.device.is_cuda()) return make_cpu_plan(weight, options);
#if TWOSTEP_CUDA
  return make_cuda_plan(weight, options);
#else
  fail(StatusCode::kUnavailable, "gemm.DraftGemm", "weight.device", to_string(weight.device), "cpu",
       "this build has no GPU rooms: build with TWOSTEP_CUDA=ON");
#endif
}

}  // namespace

DraftGemm::DraftGemm(const TensorView& weight, Options options) : plan_(make_plan(weight, options)) {}
DraftGemm::DraftGemm(DraftGemm&&) noexcept = default;
DraftGemm& DraftGemm::operator=(DraftGemm&&) noexcept = default;
DraftGemm::~DraftGemm() = default;

Kind DraftGemm::prepare(int m, Stream stream) { return plan_->prepare(m, stream); }
void DraftGemm::run(const TensorView& x, const TensorView& out, Stream stream) { plan_->run(nullptr, x, out, stream); }
void DraftGemm::run(const TensorView& weight, const TensorView& x, const TensorView& out, Stream stream) {
  plan_->run(&weight, x, out, stream);
}
void DraftGemm::bind(const TensorView& weight) { plan_->bind(weight); }
void DraftGemm::weights_updated(Stream stream) { plan_->weights_updated(stream); }
void DraftGemm::seal() { plan_->seal(); }
void DraftGemm::pin(int m, Kind kind) { plan_->pin(m, kind); }
Kind DraftGemm::kind(int m) const { return plan_->kind(m); }
Kind DraftGemm::kind(const TensorView& x, const TensorView& out) const { return plan_->kind(x, out); }
std::string DraftGemm::why(int m) const { return plan_->why(m); }
std::string DraftGemm::why(const TensorView& x, const TensorView& out) const { return plan_->why(x, out); }
WhyCode DraftGemm::why_code(int m) const { return plan_->why_code(m); }
Status DraftGemm::accepts(const TensorView& x, const TensorView& out) const { return plan_->accepts(x, out); }
Tactic DraftGemm::tactic(int m) const { return plan_->tactic(m); }
Stats DraftGemm::stats() const { return plan_->stats(); }
std::vector<CompileKey> DraftGemm::keys() const { return plan_->keys(); }
std::vector<Address> DraftGemm::captured_addresses() const { return plan_->captured_addresses(); }
std::int64_t DraftGemm::n() const { return plan_->weight().n; }
std::int64_t DraftGemm::k() const { return plan_->weight().k; }

#if TWOSTEP_CUDA
DraftGemm::DraftGemm(const PackedWeight& weight, Options options) : plan_(make_cuda_plan(weight, options)) {}
#else
// Without the GPU rooms nothing can be packed, and nothing packed can exist.
struct PackedWeight::Impl {};
struct PreparedWarpSplitK::Impl {};

PackedWeight pack_weight(const TensorView& weight, const Tactic&, Stream) {
  fail(StatusCode::kUnavailable, "gemm.pack_weight", "weight.device", to_string(weight.device), "a GPU",
       "this build has no GPU rooms: build with TWOSTEP_CUDA=ON");
}
PreparedWarpSplitK::PreparedWarpSplitK(const TensorView& weight, const std::map<int, Tactic>&) {
  fail(StatusCode::kUnavailable, "gemm.PreparedWarpSplitK", "weight.device", to_string(weight.device), "a GPU",
       "this build has no GPU rooms: build with TWOSTEP_CUDA=ON");
}
PreparedWarpSplitK::PreparedWarpSplitK(PreparedWarpSplitK&&) noexcept = default;
PreparedWarpSplitK::~PreparedWarpSplitK() = default;
DraftGemm::DraftGemm(const PackedWeight&, Options) {
  fail(StatusCode::kUnavailable, "gemm.DraftGemm", "weight", "packed", "row-major",
       "this build has no GPU rooms: build with TWOSTEP_CUDA=ON");
}
#endif

}  // namespace twostep
