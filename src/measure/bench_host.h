// DraftGemm on the CPU against the machine's read bandwidth. Pure.
#pragma once

#include "measure/row.h"

namespace twostep {

// Bytes per microsecond of a streaming read by all threads, of a buffer much larger than the last cache.
double host_read_rate();

// One shape and row count over rotating weights; the chain is "host", its limit is the bytes over `read_rate`.
BenchRow bench_host(std::int64_t n, std::int64_t k, int rows, double read_rate);

}  // namespace twostep
