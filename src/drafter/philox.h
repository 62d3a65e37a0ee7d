// Random words of a request, and the noise that is made of them (spec: drafter 7).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace twostep {

// What a word is drawn for. Draws for different purposes must not share a word; streams from 16 on are the caller's.
enum RandomStream : std::uint32_t { kDraftStream = 1, kAcceptStream = 2, kResampleStream = 3 };

// What the draws of a request depend on beside stream and index, and all that they depend on: neither place in the
// batch nor neighbours.
struct DrawKey {
  std::uint64_t seed = 0;
  std::uint32_t position = 0;  // s_j of row j
  std::uint32_t step = 0;      // never the same twice for one seed
};

// Philox4x32-10 (Salmon et al., SC 2011): the words of the indices 4 * quad to 4 * quad + 3.
inline std::array<std::uint32_t, 4> philox(std::uint64_t seed, std::uint32_t quad, std::uint32_t position,
                                           std::uint32_t step, std::uint32_t stream) {
  std::array<std::uint32_t, 4> c = {quad, position, step, stream};
  auto low = static_cast<std::uint32_t>(seed), high = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xd2511f53u} * c[0], b = std::uint64_t{0xcd9e8d57u} * c[2];
    c = {static_cast<std::uint32_t>(b >> 32) ^ c[1] ^ low, static_cast<std::uint32_t>(b),
         static_cast<std::uint32_t>(a >> 32) ^ c[3] ^ high, static_cast<std::uint32_t>(a)};
    low += 0x9e3779b9u;
    high += 0xbb67ae85u;
  }
  return c;
}

// min(fl32(fl32(w) * 2^-32 + 2^-33), 1 - 2^-24): inside (0, 1).
inline float uniform(std::uint32_t word) {
  return std::min(static_cast<float>(word) * 0x1p-32f + 0x1p-33f, 1 - 0x1p-24f);
}

// -log(-log1p(-u)) in FP32.
inline float gumbel(std::uint32_t word) { return -std::log(-std::log1p(-uniform(word))); }

// At least gumbel(word), without a logarithm: -log1p(-u) >= u >= 2^-(1 + leading zeros). Log 2, 0.693147, is rounded up
// by far more than the errors of the two logarithms. A token that loses with this noise loses with its own, and at
// V = 512 that is all but a few per cent of them.
inline float gumbel_ceiling(std::uint32_t word) { return 0.6932f * static_cast<float>(1 + std::countl_zero(word)); }

}  // namespace twostep
