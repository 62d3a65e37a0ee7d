// The one timer: repeats, drops nothing silently, reports median and spread. Events feed it in src/cuda.
#pragma once

#include <chrono>
#include <vector>

namespace twostep {

struct Summary {
  double median = 0;  // microseconds
  double p10 = 0;
  double p90 = 0;
  int kept = 0;
  int dropped = 0;  // leading warm-up samples
  double spread() const { return p90 - p10; }
};

// Percentiles of the samples (microseconds) after the first `warmup` ones.
Summary summarize(std::vector<double> samples, int warmup = 0);

// Calls `work` warmup + repeats times and times each call on the host clock.
template <class Work>
Summary time_host(int warmup, int repeats, Work&& work) {
  std::vector<double> samples;
  for (int i = 0; i < warmup + repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work();
    samples.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  return summarize(std::move(samples), warmup);
}

}  // namespace twostep
