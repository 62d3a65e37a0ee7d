// Content hashes: XXH3, 128 bits. For identity and damage, not against an adversary.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace twostep {

std::string hash128(std::string_view bytes);  // 32 hexadecimal digits
std::uint64_t hash64(std::string_view bytes);

}  // namespace twostep
