// The memory behind PackedWeight.
#pragma once

#include "cuda/memory.h"
#include "gemm/contract.h"
#include "jit/kernel_cache.h"

namespace twostep {

struct PackedWeight::Impl {
  Weight source;
  Tactic tactic;
  DeviceBuffer memory;
  std::shared_ptr<const CompiledKernel> kernel;

  void pack(Stream stream) const;  // source to memory, in stream order
};

}  // namespace twostep
