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
  return nvml;
}

}  // namespace

GpuState gpu_state(int ordinal) {
  static const Nvml nvml = open();
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
