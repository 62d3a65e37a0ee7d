// What is compiled, and what makes two builds differ. Pure: no NVRTC, no CUDA.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/embedded.h"
#include "twostep/gemm.h"

namespace twostep {

// One kernel to build: a short text that includes embedded files ("gemm/warp_split_k.cuh") and instantiates
// them for one shape and tactic.
struct CompileRequest {
  std::string name;   // "gemm-n2304-k1536-m8-sm_90a": for people
  std::string entry;  // extern "C" name of the kernel
  std::string text;
  std::string arch;   // "sm_90a"
  std::string rules;  // version of the host's validity rules
};

// What ptxas says of a kernel, functions that were not inlined included. Bytes per thread, but for shared memory.
struct KernelResources {
  int registers = 0;  // 0: not known
  int spill_store_bytes = 0;
  int spill_load_bytes = 0;
  int stack_bytes = 0;
  int static_smem_bytes = 0;  // per CTA
  bool spills() const { return spill_store_bytes > 0 || spill_load_bytes > 0; }
  friend bool operator==(const KernelResources&, const KernelResources&) = default;
};

// A finished build.
struct Cubin {
  std::string bytes;
  KernelResources resources;
};

std::vector<std::string> compile_options(const CompileRequest& request);

// Hash over text, every embedded file, options, architecture, entry and rules: all but the NVRTC version, which
// a machine without NVRTC cannot know.
std::string source_hash(const CompileRequest& request, std::span<const EmbeddedText> files = embedded_kernels());

// The hash of CompileKey, from a source hash and an NVRTC version ("13.0").
std::string key_hash(const std::string& source, const std::string& nvrtc_version);

CompileKey compile_key(const CompileRequest& request, const std::string& nvrtc_version);

// The numbers in the log that --ptxas-options=-v gives.
KernelResources parse_ptxas_log(std::string_view log);

}  // namespace twostep
