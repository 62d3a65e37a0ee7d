// For tests that say that a call allocates nothing.
#pragma once

#include <cstdint>

namespace twostep::test {

std::uint64_t allocations();  // by operator new, of the calling thread

}  // namespace twostep::test
