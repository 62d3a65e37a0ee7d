// PreparedKda on a GPU against the mix of reads and writes that its memory allows, by the protocol of kda 15, 16.3; and
// the search for a tactic.
#pragma once

#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "measure/chain.h"
#include "measure/kda_case_cuda.h"
#include "measure/kda_layers.h"

namespace twostep {

// Bytes read and written per microsecond by a kernel that writes each byte it reads `writes` times, a part of them once
// more where that is no whole number, all elsewhere or once in place. The fastest of both over kMixers, on memory far
// beyond L2. Describes the GPU while it is busy.
double kda_mix_rate(const MeasureDevice& device, double writes, Machine& machine);

struct KdaFailure {
  KdaTactic tactic;
  std::string sentence;  // compile, load or values
};
struct KdaSweep {
  std::map<std::int64_t, std::vector<KdaRow>> ranking;  // by requests, best first; finalists timed in full
  std::vector<KdaFailure> failures;
};

// One (H, q) with several request counts.
class KdaBench {
 public:
  // `device` must outlive the bench. `rate` is that of the mix; without it rows have no floor. Throws kOutOfMemory.
  KdaBench(const MeasureDevice& device, const KdaBenchOptions& options, std::vector<std::int64_t> requests,
           double rate = 0, std::shared_ptr<const KdaJudge> judge = nullptr);

  // Checks the values of many tactics side by side: most of it is the host's work. What is wrong shows in prepare.
  void check(const std::vector<KdaTactic>& tactics);
  // Makes the layers ready, with one tactic for all keys or with the choice of each; with `requests`, for that count
  // alone. Checks values: kInternal where they are wrong.
  void prepare(const std::optional<KdaTactic>& tactic = {}, std::optional<std::int64_t> requests = {});
  // Graphs of the ring's launches, or of fewer once `bytes` have moved.
  KdaRow measure(std::int64_t requests, Replays replays = {},
                 std::int64_t bytes = std::numeric_limits<std::int64_t>::max());
  KdaRow screen(std::int64_t requests) { return measure(requests, {1, 5}, 2'000'000'000); }

  // Tries every valid tactic for every request count, and times the best `finalists` of each in full.
  KdaSweep sweep(int finalists);

 private:
  const MeasureDevice& device_;
  KdaBenchOptions options_;
  std::vector<std::int64_t> requests_;
  double rate_;
  KdaCudaMemory memory_;
  KdaLayers layers_;
  bool forced_ = false;
};

}  // namespace twostep
