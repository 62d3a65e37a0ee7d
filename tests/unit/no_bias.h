// A Markov head of no bias: the logits of a pick are its base row.
#pragma once

#include <cstdint>
#include <vector>

#include "drafter/sampling.h"

namespace twostep::test {

struct NoBias {
  explicit NoBias(std::int64_t vocab_size) : vocab(vocab_size), w2(static_cast<std::size_t>(vocab * 8)), e(8) {}

  Pick pick(RowView base, float temperature = 0, const DrawKey& key = {}, OutRow out = {}) const {
    return pick_draft({w2.data(), vocab, 8}, e.data(), base, temperature, key, out);
  }

  std::int64_t vocab;
  std::vector<std::uint16_t> w2, e;
};

}  // namespace twostep::test
