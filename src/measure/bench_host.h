// DraftGemm on the CPU against the machine's read bandwidth. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "measure/row.h"

namespace twostep {

// Memory much larger than the last cache. Reading it empties the caches of all else, and takes as long as the memory
// lets it.
class HostStream {
 public:
  HostStream();
  void read() const;    // by all threads
  double rate() const;  // bytes per microsecond of read()

 private:
  std::vector<std::uint64_t> words_;
};

// One shape and row count over rotating weights. Values that break draft-gemm 1.4 are kInternal. The chain is "host",
// its limit is the bytes over `read_rate`.
BenchRow bench_host(std::int64_t n, std::int64_t k, int rows, double read_rate);

}  // namespace twostep
