#include "jit/build.h"

#include "core/check.h"
#include "core/env.h"
#include "jit/nvrtc.h"

namespace twostep {
namespace {

BuildTable& table() {
  static auto* const instance = new BuildTable;  // lives as long as the kernels, which are never unloaded
  return *instance;
}

DiskCache cache_of(const BuildOptions& options) {
  if (!options.cache_dir.empty()) return DiskCache(options.cache_dir);
  return DiskCache(environment().cache ? environment().cache_dir : "");
}

// NVRTC is opened only where it may be used.
Compiler compiler_of(const BuildOptions& options) {
  if (!options.allow_compile || !environment().jit)
    return {{},
            {},
            refusal(StatusCode::kUnavailable, "jit.build", "compiling", "off", "kernels that are in a cache",
                    "fill the cache with twostep compile, or allow compiling (Options::jit, TWOSTEP_JIT)")};
  const Nvrtc* nvrtc = Nvrtc::get();
  if (nvrtc == nullptr) return {{}, {}, Nvrtc::status()};
  return {nvrtc->version(), [nvrtc](const CompileRequest& request) { return nvrtc->compile(request); }, {}};
}

}  // namespace

Built build_cubin(const CompileRequest& request, const BuildOptions& options) {
  return table().build(request, compiler_of(options), cache_of(options));
}

void discard_build(const CompileRequest& request, const Built& refused, const BuildOptions& options) {
  table().discard(request, refused, cache_of(options));
}

}  // namespace twostep
