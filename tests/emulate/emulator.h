// Runs device text on the host: every thread is a fiber, and barriers, shuffles and matrix instructions switch between
// them. For values and for who waits for whom; not for time, nor for what two warps do at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace twostep::emulate {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// Of the fiber that runs.
inline Dim thread, block, grid;

// Calls `kernel` as every thread of every CTA, one CTA after the other. Throws std::logic_error where threads wait for
// each other in vain: a barrier that not all of them reach.
inline constexpr std::size_t kCtaMemory = 4096;
void run(Dim grid, unsigned threads, const std::function<void()>& kernel, std::size_t memory = kCtaMemory);

struct Launch {
  Dim grid;
  unsigned threads = 1;
  std::function<void()> kernel;
  bool programmatic = false;  // starts when every CTA of the launch before has ended or called let_successor_start()
  std::size_t memory = kCtaMemory;
};
// Runs streams at the same time, of each the launches one after the other. The CTAs of all launches under way take
// turns in an order that `seed` draws, some of them far ahead of others; a thread gives way in give_way(). Throws
// std::logic_error as run() does, and where nobody has come to an end for long.
void run_streams(const std::vector<std::vector<Launch>>& streams, std::uint64_t seed);
void give_way();
void let_successor_start();
void wait_for_predecessors();              // until all launches before on the stream have ended
inline bool pdl_wait_is_skipped = false;   // by device text: a rule to break
std::uint64_t drawn(std::uint64_t below);  // a number of the order's
std::uint64_t clock_ns();                  // grows with the turns taken
void* cta_memory();                        // of the CTA that runs, 0xff at first

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
