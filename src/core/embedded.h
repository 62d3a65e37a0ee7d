// Files that travel inside the binary: device text, tactics, cases.
#pragma once

#include <span>
#include <string_view>

namespace twostep {

struct EmbeddedText {
  std::string_view name;  // path below its folder, "gemm/warp_split_k.cuh"
  std::string_view text;
};

std::span<const EmbeddedText> embedded_kernels();  // kernels/
std::span<const EmbeddedText> embedded_tactics();  // tactics/
std::span<const EmbeddedText> embedded_cases();    // bench/cases/
std::span<const EmbeddedText> embedded_chains();   // bench/*_chain.py

}  // namespace twostep
