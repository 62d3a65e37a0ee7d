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
inline constexpr int kReaderPiece = 16384;  // bytes; kPiece of read_limit.cuh

CompileRequest fill_request(const std::string& arch);
CompileRequest reference_request(const std::string& arch);
CompileRequest compare_request(const std::string& arch);
CompileRequest plain_request(const std::string& arch);
CompileRequest read_limit_request(const std::string& arch, int stages, bool early);

// All of them for one architecture ("sm_90a"), to compile ahead or in CI.
std::vector<CompileRequest> measure_requests(const std::string& arch);

}  // namespace twostep
