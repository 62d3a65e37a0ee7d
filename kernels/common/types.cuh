// Short names of the integers.
#pragma once

namespace twostep {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

}  // namespace twostep
