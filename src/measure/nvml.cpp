#include "measure/nvml.h"

#include <dlfcn.h>

namespace twostep {
namespace {

using NvmlDevice = void*;

struct Nvml {
  int (*init)() = nullptr;
  int (*handle)(unsigned index, NvmlDevice*) = nullptr;
  int (*clock)(NvmlDevice, int type, unsigned* mhz) = nullptr;
  int (*power_limit)(NvmlDevice, unsigned* milliwatts) = nullptr;
  int (*driver_version)(char* text, unsigned length) = nullptr;
  int (*p2p_status)(NvmlDevice, NvmlDevice, int capability, int* status) = nullptr;  // may be absent
  bool ready = false;
};

Nvml open() {
  Nvml nvml;
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nvml;
  const auto find = [&](auto& call, const char* symbol) {
    call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(dlsym(library, symbol));
    return call != nullptr;
  };
  nvml.ready = find(nvml.init, "nvmlInit_v2") && find(nvml.handle, "nvmlDeviceGetHandleByIndex_v2") &&
               find(nvml.clock, "nvmlDeviceGetClockInfo") &&
               find(nvml.power_limit, "nvmlDeviceGetPowerManagementLimit") &&
               find(nvml.driver_version, "nvmlSystemGetDriverVersion") && nvml.init() == 0;
  find(nvml.p2p_status, "nvmlDeviceGetP2PStatus");
  return nvml;
}

const Nvml& opened() {
  static const Nvml nvml = open();
  return nvml;
}

}  // namespace

std::optional<bool> joined_by_nvlink(int ordinal, int other) {
  const Nvml& nvml = opened();
  constexpr int kNvlink = 2, kOk = 0;
  NvmlDevice a = nullptr, b = nullptr;
  int status = 0;
  if (!nvml.ready || nvml.p2p_status == nullptr || nvml.handle(static_cast<unsigned>(ordinal), &a) != 0 ||
      nvml.handle(static_cast<unsigned>(other), &b) != 0 || nvml.p2p_status(a, b, kNvlink, &status) != 0)
    return std::nullopt;
  return status == kOk;
}

GpuState gpu_state(int ordinal) {
  const Nvml& nvml = opened();
  GpuState state;
  NvmlDevice device = nullptr;
  if (!nvml.ready || nvml.handle(static_cast<unsigned>(ordinal), &device) != 0) return state;
  constexpr int kClockSm = 1, kClockMemory = 2;
  unsigned value = 0;
  if (nvml.clock(device, kClockSm, &value) == 0) state.sm_clock_mhz = static_cast<int>(value);
  if (nvml.clock(device, kClockMemory, &value) == 0) state.memory_clock_mhz = static_cast<int>(value);
  if (nvml.power_limit(device, &value) == 0) state.power_limit_w = value / 1000.0;
  char text[96] = {};
  if (nvml.driver_version(text, sizeof text) == 0) state.driver = text;
  return state;
}

}  // namespace twostep
