// Requests for the kernels of kernels/measure, for the jit room. Pure.
#pragma once

#include <string>
#include <vector>

#include "jit/compile.h"

namespace twostep {

// A shape of the read-limit kernel: ring places and CTAs per SM. Which is fastest depends on the bytes.
struct Reader {
  int stages;
  int ctas_per_sm;
};
inline constexpr Reader kReaders[] = {{8, 1}, {4, 1}, {4, 2}, {4, 3}};
inline constexpr int kReaderPiece = 16384;  // bytes; kPiece of read_limit.cuh, kMixPiece of mix_limit.cuh
// Of the mix-limit kernel; no stages: by vector loads, one CTA per piece.
inline constexpr Reader kMixers[] = {{12, 1}, {8, 1}, {6, 2}, {4, 2}, {4, 3}, {0, 0}};
inline constexpr int kMixVectorThreads = 256;  // kMixThreads of mix_limit.cuh

CompileRequest fill_request(const std::string& arch);
CompileRequest reference_request(const std::string& arch);
CompileRequest compare_request(const std::string& arch);
CompileRequest plain_request(const std::string& arch);
CompileRequest read_limit_request(const std::string& arch, int stages, bool early);
CompileRequest mix_limit_request(const std::string& arch, int stages);

// All of them for one architecture ("sm_90a"), to compile ahead or in CI.
std::vector<CompileRequest> measure_requests(const std::string& arch);

}  // namespace twostep
