// The linears of a draft layer, on each other's results, and its logits: in C++ a tree is what you make of DraftGemm
// and DraftLogits. In Python install does it (module_tree.py).
#include <cstdint>
#include <cstdio>
#include <vector>

#include "twostep/logits.h"

using twostep::TensorView;

int main() try {
  const std::int64_t m = 8, hidden = 512, inner = 2048, vocab = 1000;
  std::vector<std::uint16_t> up(inner * hidden, 0x3a80), down(hidden * inner, 0x3a80), head(1024 * hidden, 0x3a80);
  std::vector<std::uint16_t> x(m * hidden, 0x3f80), y(m * inner), logits(m * vocab);  // BF16; 0x3f80 is 1, 0x3a80 2^-10

  twostep::DraftGemm first(TensorView::matrix(up.data(), inner, hidden));
  twostep::DraftGemm second(TensorView::matrix(down.data(), hidden, inner));
  twostep::DraftLogits last(TensorView::matrix(head.data(), 1024, hidden), {.vocab = vocab, .soft_cap = 30.0f});
  first.prepare(m), second.prepare(m), last.prepare(m);
  const TensorView rows = TensorView::matrix(x.data(), m, hidden), wide = TensorView::matrix(y.data(), m, inner);
  first.run(rows, wide);   // 0.5
  second.run(wide, rows);  // 1
  last.run(rows, TensorView::matrix(logits.data(), m, vocab));

  std::printf("%s, logits[0] = 0x%04x\n", twostep::kind_name(last.gemm().kind(m)), logits[0]);
  return logits.front() == 0x3f00 && logits.back() == 0x3f00 ? 0 : 1;  // 30 tanh(0.5 / 30) is 0.49995: 0.5 in BF16
} catch (const twostep::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
