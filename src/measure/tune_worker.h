// The worker of twostep tune: it alone touches the GPU.
//
// One JSON object a line, one answer for each request (tune.h), with the request's id and
//   nothing to do    device, driver, nvrtc, cublas, and the facts of the GPU
//   "compile"        nothing more: host threads go on compiling beside what is timed next
//   "time"           median_us, p10_us, p90_us, kept, dropped
//   on failure       failure: one sentence; lost: true where the GPU context is lost with it, and the worker ends
#pragma once

#include <iosfwd>

namespace twostep {

// Answers until `in` ends. Operands of a shape are made at its first timing. False where the context was lost.
bool serve_tuning(int ordinal, int candidates, std::istream& in, std::ostream& out);

}  // namespace twostep
