// Times launches in a captured graph, in the two chains of draft-gemm 7.5, and the read limit of each.
#pragma once

#include <functional>
#include <limits>
#include <vector>

#include "cuda/graph.h"
#include "measure/device.h"

namespace twostep {

struct Replays {
  int warmup = 3;
  int kept = 15;
  // Microseconds per launch: where the first replay after the warm-up is slower, it is all that is measured.
  double hopeless = std::numeric_limits<double>::infinity();
};

class ChainTimer {
 public:
  // `launches` of one graph. Measures the ordinary kernel of the isolated chain alone when that is first used.
  ChainTimer(const MeasureDevice& device, int launches) : device_(device), launches_(launches) {}

  using Enqueue = std::function<void(int launch)>;  // enqueues launch 0, 1, .. on device.stream()
  // Back to back: early weight loads where the kernels' own rule allows them. Microseconds per launch.
  Summary early(const Enqueue& enqueue, Replays replays = {}) const;
  // Each launch after an ordinary small kernel, whose own time is subtracted.
  Summary isolated(const Enqueue& enqueue, Replays replays = {});

  int launches() const { return launches_; }
  const MeasureDevice& device() const { return device_; }

 private:
  const MeasureDevice& device_;
  int launches_;
  double plain_us_ = 0;
};

// Times graphs in turn, so that the clocks of one moment are those of all. Each sample follows a replay of the last
// graph: the GPU is busy while the host enqueues, and every graph finds the same L2. Microseconds per replay.
std::vector<Summary> time_in_turn(const MeasureDevice& device, const std::vector<std::function<void()>>& enqueues,
                                  Replays replays);

struct Piece {
  const void* data;
  std::int64_t bytes;
};
// Launch i of the chain reads pieces[i % size]. The fastest of kReaders, for each chain on its own.
Summary early_read_limit(ChainTimer& timer, const std::vector<Piece>& pieces, Replays replays = {});
Summary isolated_read_limit(ChainTimer& timer, const std::vector<Piece>& pieces, Replays replays = {});

}  // namespace twostep
