// A linear for few rows, prepared once and run each step.
#include "twostep/gemm.h"

#include <cstdint>
#include <cstdio>
#include <vector>

using twostep::TensorView;

int main() try {
  const std::int64_t m = 8, n = 7168, k = 1536;
  std::vector<std::uint16_t> weight(n * k, 0x3f80), x(m * k, 0x3f80), out(m * n);  // BF16; 0x3f80 is 1.0

  twostep::DraftGemm gemm(TensorView::matrix(weight.data(), n, k));
  gemm.prepare(m);  // all that can fail or be slow happens here
  gemm.run(TensorView::matrix(x.data(), m, k), TensorView::matrix(out.data(), m, n));

  // On a GPU the views name their device, TensorView::matrix(address, n, k, Device::cuda(0)), and run takes a stream.
  std::printf("kind %s, out[0] = 0x%04x\n", twostep::kind_name(gemm.kind(m)), out[0]);
  return out.front() == 0x44c0 && out.back() == 0x44c0 ? 0 : 1;  // 1536 = 1.5 * 2^10
} catch (const twostep::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
