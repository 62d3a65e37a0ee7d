// In a file of its own: where operator new and delete could be inlined, g++ takes them for a mismatched pair.
#include "tests/common/allocations.h"

#include <cstdlib>
#include <new>

namespace {
thread_local std::uint64_t allocations_of_thread = 0;
}  // namespace

namespace twostep::test {
std::uint64_t allocations() { return allocations_of_thread; }
}  // namespace twostep::test

void* operator new(std::size_t bytes) {
  ++allocations_of_thread;
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void* operator new[](std::size_t bytes) { return operator new(bytes); }
// std::stable_sort asks by these; all forms must be of one family.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations_of_thread;
  return std::malloc(bytes > 0 ? bytes : 1);
}
void* operator new[](std::size_t bytes, const std::nothrow_t& tag) noexcept { return operator new(bytes, tag); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
