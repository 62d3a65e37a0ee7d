// BF16 on the host: the upper half of an FP32.
#pragma once

#include <bit>
#include <cstdint>

namespace twostep {

inline float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

// Round to nearest, ties to even. NaN stays NaN (quiet), overflow becomes Inf.
inline std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// One rounding from FP64: through round-to-odd FP32, so that no double rounding occurs.
inline std::uint16_t double_to_bf16(double value) {
  auto near = static_cast<float>(value);
  auto bits = std::bit_cast<std::uint32_t>(near);
  if (static_cast<double>(near) != value && value == value && (bits & 0x7f800000u) != 0x7f800000u) {
    const bool away = (near > value) == (value > 0);       // |near| > |value|
    if (near != 0 && away && (bits & 1u) == 0) bits -= 1;  // odd neighbour towards zero
    else if (near != 0 && !away) bits |= 1u;
    near = std::bit_cast<float>(bits);
  }
  return float_to_bf16(near);
}

}  // namespace twostep
