#include "gemm/warp.h"

#include <fmt/format.h>

#include "core/check.h"
#include "gemm/packed.h"

namespace twostep {
namespace {

struct Params {  // twostep::gemm::Params of kernels/gemm/warp_split_k.cuh
  const void* x;
  const void* w;
  void* out;
  long long x_pitch;
  long long w_pitch;
  long long out_pitch;
  int m;
};

struct WgmmaParams {  // twostep::gemm::Params of kernels/gemm/sm90_wgmma.cuh
  void* out;
  long long out_pitch;
  int m;
};

}  // namespace

CompileRequest compile_request(const KernelText& text, int arch) {
  const std::string name = arch_name(arch);
  if (name.empty())
    fail(StatusCode::kUnsupported, "gemm.compile", "architecture", std::to_string(arch), "90, 100, 103, 120",
         "this GPU is served by cuBLAS");
  return {text.name + "-" + name, text.entry, text.text, name, text.rules};
}

WarpKernel load_warp_kernel(int m, const Weight& weight, const Tactic& tactic, int arch, bool allow_compile,
                            LoadReport* report) {
  BuildOptions options;
  options.allow_compile = allow_compile;
  WarpKernel kernel;
  kernel.tactic = tactic;
  kernel.compiled = load_kernel(compile_request(warp_kernel_text(m, weight.n, weight.k, tactic), arch),
                                tactic.smem_bytes, options, report);
  kernel.grid = warp_grid(tactic, weight.n);
  kernel.threads = warp_threads(tactic);
  return kernel;
}

TensorMap warp_tensor_map(const Weight& weight, const Tactic& tactic) {
  if (tactic.weight_order == WeightOrder::kPacked || tactic.weight_load != WeightLoad::kTiles) return {};
  const std::int64_t pitch = std::max(weight.row_stride, weight.k) * 2;
  return bf16_tensor_map(weight.view.data, weight.n, weight.k, pitch, tactic.tile_n);
}

void launch_warp(const WarpKernel& kernel, const TensorMap& map, const void* w, const Weight& weight,
                 const MatrixView& x, const MatrixView& out, bool programmatic, Stream stream) {
  const Tactic& tactic = kernel.tactic;
  Launch what;
  what.function = kernel.compiled->function;
  what.grid_x = static_cast<std::uint32_t>(kernel.grid);
  what.block = static_cast<std::uint32_t>(kernel.threads);
  what.cluster_x = static_cast<std::uint32_t>(tactic.cluster_n * tactic.cluster_k);  // one of them is 1
  what.smem_bytes = static_cast<std::uint32_t>(tactic.smem_bytes);
  what.programmatic = programmatic;
  const int m = static_cast<int>(x.rows);
  void* const to = const_cast<void*>(out.data);
  if (tactic.mma == Mma::kWgmma) {
    WgmmaParams params{to, out.row_stride * 2, m};
    TensorMap x_map = bf16_tensor_map(x.data, x.rows, x.cols, x.row_stride * 2, wgmma_rows(m));
    void* arguments[] = {&params, const_cast<TensorMap*>(&map), &x_map};
    return launch(what, stream, arguments);
  }
  Params params{x.data, w, to, x.row_stride * 2, weight.row_stride * 2, out.row_stride * 2, m};
  void* arguments[] = {&params, const_cast<TensorMap*>(&map)};
  launch(what, stream, arguments);
}

// ---- Packed weights

PackedWeight::PackedWeight(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
PackedWeight::PackedWeight(PackedWeight&&) noexcept = default;
PackedWeight& PackedWeight::operator=(PackedWeight&&) noexcept = default;
PackedWeight::~PackedWeight() = default;
const TensorView& PackedWeight::source() const { return impl_->source.view; }
const Tactic& PackedWeight::tactic() const { return impl_->tactic; }
std::int64_t PackedWeight::bytes() const { return static_cast<std::int64_t>(impl_->memory.bytes()); }

void PackedWeight::Impl::pack(Stream stream) const {
  const ContextGuard context(source.view.device.index);
  const void* w = source.view.data;
  long long pitch = std::max(source.row_stride, source.k) * 2;
  void* packed = memory.data();
  void* arguments[] = {&w, &pitch, &packed};
  Launch what;
  what.function = kernel->function;
  what.grid_x = static_cast<std::uint32_t>((source.n * source.k / 8 + 255) / 256);
  what.block = 256;
  launch(what, stream, arguments);
  PdlChain::forget();  // the next launch of this thread is ordinary: it must see the packed weight
}

PackedWeight pack_weight(const TensorView& view, const Tactic& wanted, Stream stream) {
  const char* place = "gemm.pack_weight";
  const Weight weight = check_weight(view, place);
  if (!view.device.is_cuda())
    fail(StatusCode::kUnsupported, place, "weight.device", to_string(view.device), "a GPU",
         "the CPU backend reads row-major weights");
  if (is_capturing(stream))
    fail(StatusCode::kCapturing, place, "stream", "capturing", "a stream that does not capture",
         "pack before the capture");
  if (const auto reason = warp_takes_weight(weight, wanted.weight_align))
    fail(reason.code == WhyCode::kWeightLayout || reason.code == WhyCode::kWeightAlignment ? StatusCode::kBadLayout
                                                                                           : StatusCode::kUnsupported,
         place, "weight", reason.sentence, "a weight that the warp kernel takes");
  const ContextGuard context(view.device.index);
  const RelaxedCapture relaxed;
  const DeviceFacts facts = device_facts(view.device.index);
  auto impl = std::make_shared<PackedWeight::Impl>();
  impl->source = weight;
  impl->tactic = wanted;
  impl->tactic.weight_order = WeightOrder::kPacked;
  impl->tactic = complete(impl->tactic, kRowBucket, facts);
  throw_if_error(tactic_valid(impl->tactic, kRowBucket, weight.n, weight.k, facts));
  impl->kernel = load_kernel(compile_request(pack_kernel_text(weight.n, weight.k, impl->tactic), facts.arch), 0);
  impl->memory = DeviceBuffer(static_cast<std::size_t>(weight.n * weight.k) * 2);
  impl->pack(stream);
  return PackedWeight(std::move(impl));
}

}  // namespace twostep
