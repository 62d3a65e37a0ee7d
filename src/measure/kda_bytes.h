// What one layer call of PreparedKda must move, and how fast it is asked to be (spec: kda 15, 16.3). Pure.
#pragma once

#include <cstdint>
#include <optional>

namespace twostep {

struct KdaShape {
  int heads = 0;
  std::int64_t requests = 1;
  int tokens = 1;
  int conv_len = 3;
  bool dim_first = false;
  bool records = false;  // state mode; a verify step then folds q / 2 tokens, a decode step none
  int pending() const { return records && tokens > 1 ? tokens / 2 : 0; }
};
// 3 for decode, 2 + q for verify. With records decode has the line of a verify of eight tokens, which they are there
// for.
int least_conv_len(int tokens, bool records = false);

std::int64_t kda_weight_bytes(int heads);
std::int64_t kda_request_bytes(const KdaShape& shape);
std::int64_t kda_step_bytes(const KdaShape& shape);   // of the call, with L2 cold
std::int64_t kda_state_bytes(const KdaShape& shape);  // of it, the states alone: read and written
double kda_writes_per_read(const KdaShape& shape);  // of the mix that the floor is stated in: 1, q, or that of records

// Microseconds that one call may take on the H200, for a floor of 15.2: in decode 1.12 f + 4, or 3 with early caches;
// at q = 4 and 8 1.12 f + 5 with slots and 1.2 f + 5 with records.
std::optional<double> kda_bar_us(const KdaShape& shape, double floor_us, bool early_caches);
// And on a CPU: decode moves its states at 60 % of the copy rate (bytes per microsecond).
std::optional<double> kda_cpu_bar_us(const KdaShape& shape, double copy_rate);

// Rotating operands of a chain of calls. Call i runs layer i % layers on slot set i % sets.
struct KdaRing {
  int layers = 1;    // weights of their own; a model has 69
  int sets = 1;      // of slots, projections and outputs; a multiple of layers
  int launches = 1;  // of one graph; a multiple of sets
};
// So many that four times `cache_bytes` of states pass between two uses of one.
KdaRing plan_kda_ring(const KdaShape& shape, std::int64_t cache_bytes);
// Launches of a shorter graph: whole turns over the sets, at most the ring's launches, until `bytes` have moved.
int kda_launches(const KdaShape& shape, const KdaRing& ring, std::int64_t bytes);

}  // namespace twostep
