// PreparedKda on the CPU against the rates of the machine's memory. Pure.
#pragma once

#include "measure/kda_layers.h"

namespace twostep {

// Bytes read and written per microsecond by all threads, over memory much larger than the last cache. Sampled in
// pieces as long as a call; the fast tenth counts, for a limit must not sink because the machine was busy.
struct HostRates {
  double copy = 0;      // the faster of memcpy and streaming stores: cached stores also read what they overwrite
  double in_place = 0;  // each element read, changed and written back, as a decode step treats its states
  double best() const { return copy > in_place ? copy : in_place; }
};
HostRates host_rates();

// One request count over rotating caches; each call is timed alone.
KdaRow bench_kda_host(const KdaBenchOptions& options, std::int64_t requests, const HostRates& rates);

}  // namespace twostep
