// Runs device text on the host, one CTA after the other: every thread of a CTA is a fiber, and barriers, shuffles and
// matrix instructions switch between them. For values and for who waits for whom; not for time, nor for what two warps
// do at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace twostep::emulate {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// Of the fiber that runs.
inline Dim thread, block, grid;

// Calls `kernel` as every thread of every CTA. Throws std::logic_error where threads wait for each other in vain: a
// barrier that not all of them reach.
void run(Dim grid, unsigned threads, const std::function<void()>& kernel);

void cta_barrier();
void warp_barrier();

// `bytes` of each lane of the warp, between two warp barriers: publish, then read any lane's.
void publish(const void* value, std::size_t bytes);
const void* published(unsigned lane);

template <class T>
T exchange(T value, unsigned lane) {
  publish(&value, sizeof(T));
  warp_barrier();
  T other = *static_cast<const T*>(published(lane));
  warp_barrier();
  return other;
}

}  // namespace twostep::emulate
