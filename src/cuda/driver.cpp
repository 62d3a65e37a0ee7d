#include "cuda/driver.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <mutex>
#include <vector>

#include "core/check.h"
#include "core/log.h"

namespace twostep {
namespace {

constexpr int kAttributeSmCount = 16;
constexpr int kAttributeMajor = 75;
constexpr int kAttributeMinor = 76;
constexpr int kAttributeSmemPerSm = 81;
constexpr int kAttributeSmemPerBlockOptin = 97;

struct Loaded {
  Driver table;
  Status status;
  int devices = 0;
};

Status unavailable(std::string value, std::string remedy) {
  return refusal(StatusCode::kUnavailable, "cuda.driver", "libcuda", std::move(value),
                 "libcuda.so.1 of a driver for CUDA 12.3 or newer, and a GPU", std::move(remedy));
}

Loaded load() {
  Loaded loaded;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* text = dlerror();
    loaded.status = unavailable(text ? text : "not found", "install the NVIDIA driver, or use the CPU backend");
    return loaded;
  }
#define TWOSTEP_LOAD(member, symbol, parameters)                                                 \
  loaded.table.member = reinterpret_cast<decltype(loaded.table.member)>(dlsym(library, symbol)); \
  if (loaded.table.member == nullptr) {                                                          \
    loaded.status = unavailable("no entry point " symbol, "update the NVIDIA driver");           \
    return loaded;                                                                               \
  }
  TWOSTEP_DRIVER_CALLS(TWOSTEP_LOAD)
#undef TWOSTEP_LOAD
  const CUresult result = loaded.table.cuInit(0);
  if (result == kCudaSuccess) loaded.table.cuDeviceGetCount(&loaded.devices);
  if (result != kCudaSuccess || loaded.devices == 0) {
    const char* name = "no device";
    if (result != kCudaSuccess) loaded.table.cuGetErrorName(result, &name);
    loaded.status =
        unavailable(fmt::format("cuInit: {}", name ? name : "unknown"), "check nvidia-smi, or use the CPU backend");
    return loaded;
  }
  loaded.table.cuDriverGetVersion(&loaded.table.version);
  return loaded;
}

// Never destroyed: plans and buffers may outlive static objects.
const Loaded& loaded_driver() {
  static const Loaded& loaded = *new Loaded(load());
  return loaded;
}

}  // namespace

Status driver_status() { return loaded_driver().status; }

const Driver& driver() {
  const Loaded& loaded = loaded_driver();
  if (!loaded.status.ok()) fail(loaded.status);
  return loaded.table;
}

int device_count() { return loaded_driver().status.ok() ? loaded_driver().devices : 0; }

void check_cuda(CUresult result, const char* call, const char* place) {
  if (result == kCudaSuccess) return;
  const char* name = nullptr;
  const char* text = nullptr;
  driver().cuGetErrorName(result, &name);
  driver().cuGetErrorString(result, &text);
  const std::string what = fmt::format("{} ({}): {}", name ? name : "unknown", result, text ? text : "");
  const std::string where = std::string(call).substr(0, std::string(call).find('('));
  if (result == kCudaOutOfMemory)
    fail(StatusCode::kOutOfMemory, place, where, what, "free device memory", "free memory, or use a smaller problem");
  fail(StatusCode::kDeviceError, place, where, what, "success");
}

DeviceFacts device_facts(int ordinal) {
  throw_if_error(driver_status());
  static std::mutex mutex;
  static std::vector<DeviceFacts> known(static_cast<std::size_t>(device_count()));
  if (ordinal < 0 || ordinal >= device_count())
    fail(StatusCode::kWrongDevice, "cuda.device_facts", "device", fmt::format("cuda:{}", ordinal),
         fmt::format("cuda:0 to cuda:{}", device_count() - 1));
  const std::lock_guard lock(mutex);
  DeviceFacts& facts = known[static_cast<std::size_t>(ordinal)];
  if (facts.arch != 0) return facts;
  CUdevice device = 0;
  TWOSTEP_CUDA_CHECK(cuDeviceGet(&device, ordinal), "cuda.device_facts");
  const auto attribute = [&](int id) {
    int value = 0;
    TWOSTEP_CUDA_CHECK(cuDeviceGetAttribute(&value, id, device), "cuda.device_facts");
    return value;
  };
  char name[256] = {};
  TWOSTEP_CUDA_CHECK(cuDeviceGetName(name, sizeof name, device), "cuda.device_facts");
  facts.name = name;
  facts.sm_count = attribute(kAttributeSmCount);
  facts.smem_per_sm = attribute(kAttributeSmemPerSm);
  facts.smem_per_block = attribute(kAttributeSmemPerBlockOptin);
  facts.arch = 10 * attribute(kAttributeMajor) + attribute(kAttributeMinor);
  return facts;
}

std::string arch_name(int arch) {
  switch (arch) {
    case 90: return "sm_90a";
    case 100: return "sm_100a";
    case 103: return "sm_103a";
    case 120: return "sm_120a";
    default: return {};
  }
}

CUcontext primary_context(int ordinal) {
  static std::mutex mutex;
  static std::vector<CUcontext> contexts(static_cast<std::size_t>(device_count()), nullptr);
  device_facts(ordinal);  // refuses an ordinal that does not exist
  const std::lock_guard lock(mutex);
  CUcontext& context = contexts[static_cast<std::size_t>(ordinal)];
  if (context == nullptr) {
    CUdevice device = 0;
    TWOSTEP_CUDA_CHECK(cuDeviceGet(&device, ordinal), "cuda.primary_context");
    TWOSTEP_CUDA_CHECK(cuDevicePrimaryCtxRetain(&context, device), "cuda.primary_context");
  }
  return context;
}

ContextGuard::ContextGuard(CUcontext wanted) {
  TWOSTEP_CUDA_CHECK(cuCtxGetCurrent(&previous_), "cuda.ContextGuard");
  if (previous_ == wanted) return;
  TWOSTEP_CUDA_CHECK(cuCtxSetCurrent(wanted), "cuda.ContextGuard");
  changed_ = true;
}

ContextGuard::~ContextGuard() {
  if (changed_) driver().cuCtxSetCurrent(previous_);
}

RelaxedCapture::RelaxedCapture() {
  TWOSTEP_CUDA_CHECK(cuThreadExchangeStreamCaptureMode(&mode_), "cuda.RelaxedCapture");
}

RelaxedCapture::~RelaxedCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }

void quietly(CUcontext context, const std::function<void()>& work) noexcept {
  try {
    const ContextGuard current(context);
    const RelaxedCapture relaxed;
    work();
  } catch (const std::exception& error) {
    log_warn(error.what());
  }
}

bool is_capturing(Stream stream) {
  CaptureStatus status = CaptureStatus::kNone;
  // The legacy default stream (null, or CU_STREAM_LEGACY) cannot capture, and asking it while another stream captures
  // is an error.
  if (reinterpret_cast<std::uintptr_t>(stream.handle) <= 1) return false;
  TWOSTEP_CUDA_CHECK(cuStreamIsCapturing(static_cast<CUstream>(stream.handle), &status), "cuda.is_capturing");
  return status != CaptureStatus::kNone;
}

}  // namespace twostep
