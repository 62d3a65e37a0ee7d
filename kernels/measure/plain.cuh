// An ordinary small kernel, as a framework puts between two linears: reads and writes a few KB, triggers nothing
// early. Launched without the programmatic attribute, so that the linear after it is isolated.
//   data  [gridDim.x * blockDim.x] 32-bit words
#pragma once

namespace twostep::measure {

__device__ inline void plain(unsigned* data) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  data[i] = data[i] * 1664525u + 1013904223u;
}

}  // namespace twostep::measure
