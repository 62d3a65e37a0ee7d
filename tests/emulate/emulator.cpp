#include "tests/emulate/emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstring>
#include <list>
#include <memory>
#include <random>
#include <stdexcept>

namespace twostep::emulate {
namespace {

constexpr std::size_t kStack = 128 << 10;
constexpr unsigned kWarp = 32;
constexpr std::size_t kSlot = 64;               // bytes that a lane can publish
constexpr std::uint64_t kPatience = 4'000'000;  // turns without an end of a CTA

enum class State { kRuns, kAtCta, kAtWarp, kDone };

struct Fiber {
  ucontext_t first;  // starts it; later switches need no system call
  jmp_buf here;
  bool started = false;
  State state = State::kRuns;
  std::unique_ptr<std::byte[]> stack;
  alignas(16) std::byte slot[kSlot];
};

std::vector<std::unique_ptr<Fiber>> idle;  // with their stacks, to be used again

struct UnderWay;

struct Cta {
  Cta(Dim of_grid, Dim of_block, unsigned threads, const std::function<void()>* kernel, std::size_t bytes,
      UnderWay* of = nullptr)
      : grid(of_grid), block(of_block), body(kernel), launch(of), memory((bytes + sizeof(Line) - 1) / sizeof(Line)) {
    std::memset(memory.data(), 0xff, memory.size() * sizeof(Line));
    for (unsigned i = 0; i < threads; ++i) {
      if (idle.empty()) {
        idle.push_back(std::make_unique<Fiber>());
        idle.back()->stack.reset(new std::byte[kStack]);  // its pages are taken when they are used
      }
      fibers.push_back(std::move(idle.back()));
      idle.pop_back();
    }
  }
  ~Cta() {
    for (auto& fiber : fibers) idle.push_back(std::move(fiber));
  }
  Cta(const Cta&) = delete;

  const Dim grid, block;
  const std::function<void()>* const body;
  UnderWay* const launch;  // null: on no stream
  std::vector<std::unique_ptr<Fiber>> fibers;
  struct alignas(1024) Line {  // as swizzled operands of matrix instructions want it
    std::byte bytes[1024];
  };
  std::vector<Line> memory;
  bool lets_successor_start = false;
  bool done = false;
};

// A launch of a stream: the CTAs that have not ended.
struct UnderWay {
  std::list<Cta> ctas;
  bool is_first = false;  // all launches before have ended
};

ucontext_t first_scheduler;
jmp_buf scheduler;
Cta* running = nullptr;
unsigned current = 0;
std::mt19937_64 order;
std::uint64_t turns = 0;

void enter() {
  (*running->body)();
  running->fibers[current]->state = State::kDone;
  _longjmp(scheduler, 1);
}

void wait(State state) {
  Fiber& fiber = *running->fibers[current];
  fiber.state = state;
  if (_setjmp(fiber.here) == 0) _longjmp(scheduler, 1);
}

void resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.here, 1);
  fiber.started = true;
  swapcontext(&first_scheduler, &fiber.first);
}

// Lets those go on that wait for each other and are all there.
bool release(Cta& cta, std::size_t first, std::size_t last, State waiting) {
  bool any = false;
  for (std::size_t i = first; i < last; ++i) {
    const State state = cta.fibers[i]->state;
    if (state != waiting && state != State::kDone) return false;
    any |= state == waiting;
  }
  for (std::size_t i = first; i < last; ++i)
    if (cta.fibers[i]->state == waiting) cta.fibers[i]->state = State::kRuns;
  return any;
}

void start(Cta& cta) {
  for (auto& fiber : cta.fibers) {
    getcontext(&fiber->first);
    fiber->first.uc_stack.ss_sp = fiber->stack.get();
    fiber->first.uc_stack.ss_size = kStack;
    fiber->first.uc_link = nullptr;
    makecontext(&fiber->first, enter, 0);
    fiber->started = false;
    fiber->state = State::kRuns;
  }
}

// A turn of a CTA: every thread that can goes on until it waits, gives way or ends. A barrier that is missing shows
// where a thread reads what one behind it has yet to write: `descending` finds the other half.
void turn(Cta& cta, bool descending) {
  running = &cta;
  grid = cta.grid;
  block = cta.block;
  bool progress = false, all_done = true;
  const std::size_t count = cta.fibers.size();
  for (std::size_t i = 0; i < count; ++i) {
    current = static_cast<unsigned>(descending ? count - 1 - i : i);
    Fiber& fiber = *cta.fibers[current];
    if (fiber.state == State::kRuns) {
      thread = {current, 0, 0};
      resume(fiber);
      progress = true;
    }
    all_done &= fiber.state == State::kDone;
  }
  cta.done = all_done;
  if (all_done) return;
  for (std::size_t warp = 0; warp < count; warp += kWarp)
    progress |= release(cta, warp, std::min(warp + kWarp, count), State::kAtWarp);
  progress |= release(cta, 0, count, State::kAtCta);
  if (!progress) throw std::logic_error("threads of a CTA wait at a barrier that not all of them reach");
}

template <class Visit>
void for_each_block(Dim of, Visit visit) {
  for (unsigned z = 0; z < of.z; ++z)
    for (unsigned y = 0; y < of.y; ++y)
      for (unsigned x = 0; x < of.x; ++x) visit(Dim{x, y, z});
}

struct Stream {
  const std::vector<Launch>& launches;
  std::size_t next = 0;
  std::list<UnderWay> under_way;

  // What can start starts. False: all done.
  bool begin() {
    const auto may_start = [&] {
      if (under_way.empty()) return true;
      if (!launches[next].programmatic) return false;
      for (const Cta& cta : under_way.back().ctas)
        if (!cta.lets_successor_start) return false;
      return true;
    };
    while (next < launches.size() && may_start()) {
      const Launch& launch = launches[next++];
      UnderWay& one = under_way.emplace_back();
      for_each_block(launch.grid, [&](Dim at) {
        start(one.ctas.emplace_back(launch.grid, at, launch.threads, &launch.kernel, launch.memory, &one));
      });
    }
    if (under_way.empty()) return false;
    under_way.front().is_first = true;
    return true;
  }
};

}  // namespace

void run(Dim of_grid, unsigned threads, const std::function<void()>& kernel, std::size_t memory) {
  static bool descending = false;
  for_each_block(of_grid, [&](Dim at) {
    Cta cta(of_grid, at, threads, &kernel, memory);
    start(cta);
    descending = !descending;
    while (!cta.done) turn(cta, descending);
  });
}

void run_streams(const std::vector<std::vector<Launch>>& of, std::uint64_t seed) {
  order.seed(seed);
  std::list<Stream> streams;
  for (const auto& launches : of) {
    streams.emplace_back(Stream{launches, 0, {}});
    if (!streams.back().begin()) streams.pop_back();
  }
  for (std::uint64_t since = turns; !streams.empty();) {
    auto stream = std::next(streams.begin(), static_cast<std::ptrdiff_t>(drawn(streams.size())));
    const std::uint64_t burst = std::uint64_t{1} << drawn(8);
    for (std::uint64_t i = 0; i < burst && stream != streams.end(); ++i) {
      auto launch = std::next(stream->under_way.begin(), static_cast<std::ptrdiff_t>(drawn(stream->under_way.size())));
      auto cta = std::next(launch->ctas.begin(), static_cast<std::ptrdiff_t>(drawn(launch->ctas.size())));
      turn(*cta, drawn(2) != 0);
      if (++turns - since > kPatience) throw std::logic_error("no CTA has come to an end for long");
      if (cta->done) {
        since = turns;
        launch->ctas.erase(cta);
        if (launch->ctas.empty()) stream->under_way.erase(launch);
      }
      if (!stream->begin()) stream = streams.erase(stream), i = burst;
    }
  }
}

void give_way() { wait(State::kRuns); }
void let_successor_start() { running->lets_successor_start = true; }
void wait_for_predecessors() {
  while (running->launch != nullptr && !running->launch->is_first) give_way();
}
std::uint64_t drawn(std::uint64_t below) { return order() % below; }
std::uint64_t clock_ns() { return 1000 * (turns + 1); }
void* cta_memory() { return running->memory.data(); }

void cta_barrier() { wait(State::kAtCta); }
void warp_barrier() { wait(State::kAtWarp); }

void publish(const void* value, std::size_t bytes) {
  if (bytes > kSlot) throw std::logic_error("a lane publishes too much");
  std::memcpy(running->fibers[current]->slot, value, bytes);
}
const void* published(unsigned lane) { return running->fibers[current / kWarp * kWarp + lane]->slot; }

}  // namespace twostep::emulate
