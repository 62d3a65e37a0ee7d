// Clocks and limits of a GPU, through NVML opened at run time.
#pragma once

#include <optional>
#include <string>

namespace twostep {

struct GpuState {  // zero or empty where NVML is missing or does not say
  int sm_clock_mhz = 0;
  int memory_clock_mhz = 0;
  double power_limit_w = 0;
  std::string driver;  // "580.65.06"
};
// Of the ordinal in NVML's order, which is CUDA's unless CUDA_VISIBLE_DEVICES changes it.
GpuState gpu_state(int ordinal);

// Whether NVLink joins two GPUs, directly or through switches. None where NVML does not say.
std::optional<bool> joined_by_nvlink(int ordinal, int other);

}  // namespace twostep
