// The worker of twostep tune: it alone touches the GPU.
//
// One JSON object a line, one answer for each request (tune.h), with the request's id and
//   nothing to do    device, driver, nvrtc, and the facts of the GPU
//   "compile"        nothing more: host threads go on compiling beside what is timed next
//   "check"          nothing more: wrong values show as the failure of "time"
//   "time"           median_us, p10_us, p90_us, kept, dropped
//   on failure       failure: one sentence; lost: true where the GPU context is lost with it, and the worker ends
#pragma once

#include <cstdint>
#include <iosfwd>
#include <vector>

namespace twostep {

struct TuneWorkerOptions {
  int ordinal = 0;
  int candidates = 0;                  // of the linears
  std::vector<std::int64_t> requests;  // of PreparedKda, all that will be asked for; empty: the linears are tuned
};

// Answers until `in` ends. Operands are made at their first timing. False where the context was lost.
bool serve_tuning(const TuneWorkerOptions& options, std::istream& in, std::ostream& out);

}  // namespace twostep
