#include "core/timer.h"

#include <algorithm>

namespace twostep {

Summary summarize(std::vector<double> samples, int warmup) {
  Summary summary;
  summary.dropped = std::min<int>(warmup, static_cast<int>(samples.size()));
  samples.erase(samples.begin(), samples.begin() + summary.dropped);
  summary.kept = static_cast<int>(samples.size());
  if (samples.empty()) return summary;
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double q) {
    return samples[static_cast<std::size_t>(q * static_cast<double>(samples.size() - 1) + 0.5)];
  };
  summary.median = at(0.5);
  summary.p10 = at(0.1);
  summary.p90 = at(0.9);
  return summary;
}

}  // namespace twostep
