#include "measure/kernels.h"

#include <fmt/format.h>

#include <set>

namespace twostep {
namespace {

constexpr const char* kRules = "measure-1";

CompileRequest request(const std::string& name, const std::string& arch, std::string text) {
  return {fmt::format("measure-{}-{}", name, arch), "kernel", std::move(text), arch, kRules};
}

}  // namespace

CompileRequest fill_request(const std::string& arch) {
  return request("fill", arch, R"(#include "measure/fill.cuh"

extern "C" __global__ void __launch_bounds__(256) kernel(twostep::u16* out, twostep::i64 rows, twostep::i64 cols,
                                                         twostep::i64 stride, twostep::u64 base, int data,
                                                         float scale) {
  twostep::measure::fill(out, rows, cols, stride, base, twostep::measure::Data(data), scale);
}
)");
}

CompileRequest reference_request(const std::string& arch) {
  return request("reference", arch, R"(#include "measure/reference.cuh"

extern "C" __global__ void __launch_bounds__(256) kernel(const unsigned short* x, long long x_stride,
                                                         const unsigned short* w, long long w_stride, long long m,
                                                         long long n, long long k, double* sum, double* magnitude) {
  twostep::measure::reference(x, x_stride, w, w_stride, m, n, k, sum, magnitude);
}
)");
}

CompileRequest compare_request(const std::string& arch) {
  return request("compare", arch, R"(#include "measure/compare.cuh"

extern "C" __global__ void __launch_bounds__(256) kernel(const unsigned short* buffer, long long total,
                                                         long long offset, long long stride, long long m, long long n,
                                                         long long k, const double* sum, const double* magnitude,
                                                         twostep::measure::Found* found) {
  twostep::measure::compare(buffer, total, offset, stride, m, n, k, sum, magnitude, found);
}
)");
}

CompileRequest plain_request(const std::string& arch) {
  return request("plain", arch, R"(#include "measure/plain.cuh"

extern "C" __global__ void __launch_bounds__(256) kernel(unsigned* data) { twostep::measure::plain(data); }
)");
}

CompileRequest read_limit_request(const std::string& arch, int stages, bool early) {
  return request(fmt::format("read-{}-s{}", early ? "early" : "isolated", stages), arch,
                 fmt::format(R"(#include "measure/read_limit.cuh"

extern "C" __global__ void __launch_bounds__(128) kernel(const twostep::u8* p, twostep::i64 bytes, twostep::u32* sink) {{
  twostep::measure::read_limit<{}, {}>(p, bytes, sink);
}}
)",
                             stages, early));
}

CompileRequest mix_limit_request(const std::string& arch, int stages) {
  return request(fmt::format("mix-s{}", stages), arch,
                 fmt::format(R"(#include "measure/mix_limit.cuh"

extern "C" __global__ void __launch_bounds__({}) kernel(const twostep::u8* from, twostep::i64 bytes, twostep::u8* to,
                                                        int writes, twostep::i64 more) {{
  twostep::measure::{}(from, bytes, to, writes, more);
}}
)",
                             stages == 0 ? kMixVectorThreads : 32,
                             stages == 0 ? std::string("mix_limit_vector") : fmt::format("mix_limit<{}>", stages)));
}

std::vector<CompileRequest> measure_requests(const std::string& arch) {
  std::vector<CompileRequest> all = {fill_request(arch), reference_request(arch), compare_request(arch),
                                     plain_request(arch)};
  for (const int stages : {4, 8})
    for (const bool early : {true, false}) all.push_back(read_limit_request(arch, stages, early));
  std::set<int> rings;
  for (const Reader& mixer : kMixers)
    if (rings.insert(mixer.stages).second) all.push_back(mix_limit_request(arch, mixer.stages));
  return all;
}

}  // namespace twostep
