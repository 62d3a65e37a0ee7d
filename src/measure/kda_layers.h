// The layers, caches and rows that a benchmark of PreparedKda rotates over, on any device (spec: kda 16.3).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "measure/check_kda.h"
#include "measure/kda_bytes.h"
#include "measure/kda_row.h"

namespace twostep {

struct KdaBenchOptions {
  int heads = 12;
  int tokens = 1;
  int conv_len = 3;
  bool dim_first = false;
  bool early_caches = false;
  bool records = false;
  StateMode mode() const { return records ? StateMode::kRecords : StateMode::kSlots; }
  KdaShape shape(std::int64_t requests) const { return {heads, requests, tokens, conv_len, dim_first, records}; }
};
KdaProblem problem_of(const KdaBenchOptions& options);
KdaProblem judged_problem(const KdaBenchOptions& options);  // small, by which the values of a tactic are judged

// One (H, q) with several request counts. K3's form: lower-bound gate, no bias, FP32 owned weights, natural strides.
class KdaLayers {
 public:
  // `memory` must outlive this; `cache_bytes` is what has to be passed; `judge` is that of judged_problem, if there is
  // one already. Throws kOutOfMemory, std::bad_alloc.
  KdaLayers(KdaMemory& memory, const KdaBenchOptions& options, std::vector<std::int64_t> requests,
            std::int64_t cache_bytes, std::shared_ptr<const KdaJudge> judge = nullptr);

  // Makes the layers and prepares them, once for each tactic; without one each key has its own choice. With `requests`
  // those of its ring alone: large steps rotate over few. Checks the values of each tactic on one small problem of the
  // same key first: kInternal, for a wrong kernel has no speed.
  void prepare(const std::optional<KdaTactic>& tactic = {}, std::optional<std::int64_t> requests = {});
  // Call `launch` of the chain of one request count.
  void run(std::int64_t requests, int launch);

  const KdaRing& ring(std::int64_t requests) const { return plans_.at(requests).ring; }
  const KdaJudge& judge() const { return *judge_; }
  bool judged(const KdaTactic& tactic) const;
  // What the judge found elsewhere: prepare does not ask it again.
  void add_values(const KdaTactic& tactic, const KdaErrors& errors);
  // A row with all but its times.
  KdaRow row(std::int64_t requests) const;

 private:
  struct Plan {
    KdaRing ring;
    std::int32_t* slots = nullptr;  // [sets, B, q], with records [sets, B]
  };
  KdaWeights weights(int layer) const;
  void make_records();
  void make_layers(const std::optional<KdaTactic>& tactic, int count, std::vector<PreparedKda>& layers) const;
  void check_values(const KdaTactic& tactic);

  KdaMemory& memory_;
  KdaBenchOptions options_;
  std::map<std::int64_t, Plan> plans_;  // by requests
  std::int64_t channels_ = 0;
  std::int64_t num_slots_ = 1;
  int columns_ = 1;  // of the slots of a request
  int num_layers_ = 0;
  KdaCaches caches_;
  std::uint16_t* projected_ = nullptr;
  std::uint16_t* out_ = nullptr;
  std::int32_t* accepted_ = nullptr;
  std::byte* weights_ = nullptr;                          // of all layers
  std::map<std::string, std::vector<PreparedKda>> made_;  // by the tactic's name; empty: no tactic was given
  std::vector<PreparedKda>* layers_ = nullptr;            // of made_: those that run
  std::shared_ptr<const KdaJudge> judge_;
  std::vector<std::pair<KdaTactic, KdaErrors>> values_;  // right or wrong
};

}  // namespace twostep
