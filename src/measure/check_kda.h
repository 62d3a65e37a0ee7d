// PreparedKda on a device against the FP64 reference on the host, over random problems (spec: kda 11.1, 17).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "measure/kda_case.h"

namespace twostep {

// What is checked by default: each of the head counts with 1..8 tokens, twice, every other property drawn from the
// seed; `quick` has two head counts and four token counts.
std::vector<KdaProblem> kda_problems(std::uint64_t seed, bool quick);

// Draws of a problem with their FP64 results, which serve any number of devices and tactics.
class KdaJudge {
 public:
  // As many draws as give 256 live heads, at most 1024. Throws what construction throws.
  explicit KdaJudge(const KdaProblem& problem);

  // All draws on one device, the first one twice. `tactic` in place of the problem's where given.
  KdaErrors judge(KdaMemory& memory, const std::optional<KdaTactic>& tactic = {}) const;
  int draws() const { return static_cast<int>(draws_.size()); }

 private:
  struct Draw {
    KdaArrays before;
    KdaArrays reference;
  };
  KdaProblem problem_;
  std::vector<Draw> draws_;
};

struct KdaReport {
  int draws = 0;
  KdaErrors errors;
  std::string failure;  // the rule that is broken, or what was thrown; empty: right
};
KdaReport check_problem(const KdaMemory& device, const KdaProblem& problem);

}  // namespace twostep
