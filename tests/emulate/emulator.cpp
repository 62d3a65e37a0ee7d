#include "tests/emulate/emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstring>
#include <stdexcept>
#include <vector>

namespace twostep::emulate {
namespace {

constexpr std::size_t kStack = 128 << 10;
constexpr unsigned kWarp = 32;
constexpr std::size_t kSlot = 64;  // bytes that a lane can publish

enum class State { kRuns, kAtCta, kAtWarp, kDone };

struct Fiber {
  ucontext_t first;  // starts it; later switches need no system call
  jmp_buf here;
  bool started = false;
  State state = State::kRuns;
  std::vector<std::byte> stack = std::vector<std::byte>(kStack);
  alignas(16) std::byte slot[kSlot];
};

std::vector<Fiber> fibers;
ucontext_t first_scheduler;
jmp_buf scheduler;
unsigned current = 0, count = 0;
const std::function<void()>* body = nullptr;

void enter() {
  (*body)();
  fibers[current].state = State::kDone;
  _longjmp(scheduler, 1);
}

void wait(State state) {
  fibers[current].state = state;
  if (_setjmp(fibers[current].here) == 0) _longjmp(scheduler, 1);
}

void resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.here, 1);
  fiber.started = true;
  swapcontext(&first_scheduler, &fiber.first);
}

// Lets those go on that wait for each other and are all there.
bool release(unsigned first, unsigned last, State waiting) {
  bool any = false;
  for (unsigned i = first; i < last; ++i) {
    if (fibers[i].state != waiting && fibers[i].state != State::kDone) return false;
    any |= fibers[i].state == waiting;
  }
  for (unsigned i = first; i < last; ++i)
    if (fibers[i].state == waiting) fibers[i].state = State::kRuns;
  return any;
}

// A barrier that is missing shows where a thread reads what one behind it has yet to write: `descending` finds the
// other half.
void run_cta(bool descending) {
  for (unsigned i = 0; i < count; ++i) {
    Fiber& fiber = fibers[i];
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = fiber.stack.data();
    fiber.first.uc_stack.ss_size = kStack;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, enter, 0);
    fiber.started = false;
    fiber.state = State::kRuns;
  }
  for (;;) {
    bool progress = false, all_done = true;
    for (unsigned i = 0; i < count; ++i) {
      current = descending ? count - 1 - i : i;
      if (fibers[current].state == State::kRuns) {
        thread = {current, 0, 0};
        resume(fibers[current]);
        progress = true;
      }
      all_done &= fibers[current].state == State::kDone;
    }
    if (all_done) return;
    for (unsigned warp = 0; warp < count; warp += kWarp) progress |= release(warp, warp + kWarp, State::kAtWarp);
    progress |= release(0, count, State::kAtCta);
    if (!progress) throw std::logic_error("threads of a CTA wait at a barrier that not all of them reach");
  }
}

}  // namespace

void run(Dim of_grid, unsigned threads, const std::function<void()>& kernel) {
  if (fibers.size() < threads) fibers = std::vector<Fiber>(threads);
  body = &kernel;
  count = threads;
  grid = of_grid;
  static bool descending = false;
  for (block.z = 0; block.z < grid.z; ++block.z)
    for (block.y = 0; block.y < grid.y; ++block.y)
      for (block.x = 0; block.x < grid.x; ++block.x) run_cta(descending = !descending);
}

void cta_barrier() { wait(State::kAtCta); }
void warp_barrier() { wait(State::kAtWarp); }

void publish(const void* value, std::size_t bytes) {
  if (bytes > kSlot) throw std::logic_error("a lane publishes too much");
  std::memcpy(fibers[current].slot, value, bytes);
}
const void* published(unsigned lane) { return fibers[current / kWarp * kWarp + lane].slot; }

}  // namespace twostep::emulate
