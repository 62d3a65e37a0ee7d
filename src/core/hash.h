// Content hashes: XXH3, 128 bits. For identity and damage, not against an adversary.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace twostep {

std::string hash128(std::string_view bytes);  // 32 hexadecimal digits
std::uint64_t hash64(std::string_view bytes);

// The two that synthetic values are made of (spec: drafter 11.3); kernels/measure/fill.cuh has the same mix64.
inline std::uint64_t mix64(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
inline std::uint64_t fnv1a64(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

}  // namespace twostep
