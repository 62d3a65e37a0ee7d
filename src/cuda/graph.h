// Captured graphs and event timing.
#pragma once

#include <functional>
#include <vector>

#include "core/timer.h"
#include "cuda/driver.h"

namespace twostep {

// A timing event. Owned.
class Event {
 public:
  Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event();
  void record(Stream stream) const;
  double since(const Event& start) const;  // microseconds between two recorded events; waits for this one

 private:
  CUevent handle_ = nullptr;
};

// A captured, instantiated graph, on its way to the GPU in stream order. Owned.
class Graph {
 public:
  // Captures what `enqueue` puts on the stream (capture mode: thread local). Throws what enqueue throws, with
  // the capture ended.
  Graph(Stream stream, const std::function<void()>& enqueue);
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();
  void launch(Stream stream) const;
  std::size_t num_nodes() const;
  std::size_t num_programmatic_edges() const;

 private:
  CUgraph graph_ = nullptr;
  CUgraphExec exec_ = nullptr;
};

// Replays `graph` warmup + replays times, each timed by events; microseconds per replay.
Summary time_graph(const Graph& graph, Stream stream, int warmup, int replays);

// The same without a wait in between, so that a host that is late shows in no replay but the first: microseconds of
// each of the last `replays`. For graphs that wait for each other on several GPUs.
std::vector<double> time_back_to_back(const Graph& graph, Stream stream, int warmup, int replays);

}  // namespace twostep
