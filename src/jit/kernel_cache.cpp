#include "jit/kernel_cache.h"

#include <chrono>
#include <map>
#include <mutex>
#include <utility>

#include "core/log.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "jit.load";
constexpr int kAttributeStaticSmem = 1;
constexpr int kAttributeLocalBytes = 3;
constexpr int kAttributeRegisters = 4;
constexpr int kAttributeMaxDynamicSmem = 8;

struct Table {
  std::mutex mutex;
  std::map<std::pair<CUcontext, std::string>, std::shared_ptr<const CompiledKernel>> kernels;  // by source hash
};

Table& table() {
  static auto* const instance = new Table;
  return *instance;
}

CompiledKernel load(const CompileRequest& request, const Built& built, int smem_bytes, CUmodule* module,
                    bool* refused) {
  const auto check = [&](CUresult result, const char* call) {
    *refused = refuses_image(result);
    check_cuda(result, call, kPlace);
  };
  const Driver& api = driver();
  CompiledKernel kernel;
  kernel.key = built.key;
  check(api.cuModuleLoadDataEx(module, built.cubin->bytes.data(), 0, nullptr, nullptr), "cuModuleLoadDataEx");
  try {
    check(api.cuModuleGetFunction(&kernel.function, *module, request.entry.c_str()), "cuModuleGetFunction");
    // With lazy loading, asking for attributes is what loads the code.
    const auto attribute = [&](int id) {
      int value = 0;
      check(api.cuFuncGetAttribute(&value, id, kernel.function), "cuFuncGetAttribute");
      return value;
    };
    kernel.registers = attribute(kAttributeRegisters);
    kernel.local_bytes = attribute(kAttributeLocalBytes);
    kernel.static_smem_bytes = attribute(kAttributeStaticSmem);
    check(api.cuFuncSetAttribute(kernel.function, kAttributeMaxDynamicSmem, smem_bytes), "cuFuncSetAttribute");
  } catch (...) {
    api.cuModuleUnload(*module);
    throw;
  }
  return kernel;
}

}  // namespace

bool refuses_image(CUresult result) {
  switch (result) {
    case 200:  // INVALID_IMAGE
    case 209:  // NO_BINARY_FOR_GPU
    case 218:  // INVALID_PTX
    case 222:  // UNSUPPORTED_PTX_VERSION
    case 500:  // NOT_FOUND
      return true;
    default: return false;
  }
}

std::shared_ptr<const CompiledKernel> load_kernel(const CompileRequest& request, int smem_bytes,
                                                  const BuildOptions& options, LoadReport* report) {
  const auto start = std::chrono::steady_clock::now();
  CUcontext context = nullptr;
  TWOSTEP_CUDA_CHECK(cuCtxGetCurrent(&context), kPlace);
  const std::pair slot{context, source_hash(request)};
  LoadReport local;
  LoadReport& said = report ? *report : local;
  said = {};
  {
    const std::lock_guard guard(table().mutex);
    if (auto it = table().kernels.find(slot); it != table().kernels.end()) return it->second;
  }
  Built built = build_cubin(request, options);
  said.from = built.from;
  const RelaxedCapture relaxed;
  CUmodule module = nullptr;
  bool refused = false;
  std::shared_ptr<const CompiledKernel> kernel;
  try {
    kernel = std::make_shared<const CompiledKernel>(load(request, built, smem_bytes, &module, &refused));
  } catch (const Error& error) {
    if (!refused || built.from == BuiltFrom::kCompiled) throw;
    log_warn(std::string("jit.load: cached build refused, built anew: ") + error.what());
    discard_build(request, built, options);
    built = build_cubin(request, options);
    said.from = built.from;
    kernel = std::make_shared<const CompiledKernel>(load(request, built, smem_bytes, &module, &refused));
  }
  said.milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  bool first = false;
  {
    const std::lock_guard guard(table().mutex);
    const auto [it, inserted] = table().kernels.emplace(slot, kernel);
    first = inserted;
    kernel = it->second;
  }
  if (!first) driver().cuModuleUnload(module);  // another thread was faster: its kernel is the one that runs
  return kernel;
}

}  // namespace twostep
