#include "cuda/graph.h"

namespace twostep {
namespace {

// A timing event. Owned.
class Event {
 public:
  Event() { TWOSTEP_CUDA_CHECK(cuEventCreate(&handle_, 0), "cuda.Event"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { driver().cuEventDestroy(handle_); }
  operator CUevent() const { return handle_; }

 private:
  CUevent handle_ = nullptr;
};

}  // namespace

Graph::Graph(Stream stream, const std::function<void()>& enqueue) {
  const auto handle = static_cast<CUstream>(stream.handle);
  TWOSTEP_CUDA_CHECK(cuStreamBeginCapture(handle, CaptureMode::kThreadLocal), "cuda.Graph");
  try {
    enqueue();
  } catch (...) {
    driver().cuStreamEndCapture(handle, &graph_);
    if (graph_ != nullptr) driver().cuGraphDestroy(graph_);
    throw;
  }
  try {
    TWOSTEP_CUDA_CHECK(cuStreamEndCapture(handle, &graph_), "cuda.Graph");
    TWOSTEP_CUDA_CHECK(cuGraphInstantiate(&exec_, graph_, 0), "cuda.Graph");
  } catch (...) {
    if (graph_ != nullptr) driver().cuGraphDestroy(graph_);
    throw;
  }
}

Graph::~Graph() {
  if (exec_ != nullptr) driver().cuGraphExecDestroy(exec_);
  if (graph_ != nullptr) driver().cuGraphDestroy(graph_);
}

void Graph::launch(Stream stream) const {
  TWOSTEP_CUDA_CHECK(cuGraphLaunch(exec_, static_cast<CUstream>(stream.handle)), "cuda.Graph");
}

std::size_t Graph::num_nodes() const {
  std::size_t count = 0;
  TWOSTEP_CUDA_CHECK(cuGraphGetNodes(graph_, nullptr, &count), "cuda.Graph");
  return count;
}

std::size_t Graph::num_programmatic_edges() const {
  std::size_t count = 0;
  TWOSTEP_CUDA_CHECK(cuGraphGetEdges(graph_, nullptr, nullptr, nullptr, &count), "cuda.Graph");
  std::vector<CUgraphNode> from(count), to(count);
  std::vector<GraphEdgeData> edges(count);
  TWOSTEP_CUDA_CHECK(cuGraphGetEdges(graph_, from.data(), to.data(), edges.data(), &count), "cuda.Graph");
  std::size_t programmatic = 0;
  for (const GraphEdgeData& edge : edges) programmatic += edge.type == 1;
  return programmatic;
}

Summary time_graph(const Graph& graph, Stream stream, int warmup, int replays) {
  const auto handle = static_cast<CUstream>(stream.handle);
  const Event start, end;
  std::vector<double> samples;
  for (int i = 0; i < warmup + replays; ++i) {
    TWOSTEP_CUDA_CHECK(cuEventRecord(start, handle), "cuda.time_graph");
    graph.launch(stream);
    TWOSTEP_CUDA_CHECK(cuEventRecord(end, handle), "cuda.time_graph");
    TWOSTEP_CUDA_CHECK(cuEventSynchronize(end), "cuda.time_graph");
    float milliseconds = 0;
    TWOSTEP_CUDA_CHECK(cuEventElapsedTime(&milliseconds, start, end), "cuda.time_graph");
    samples.push_back(1000.0 * milliseconds);
  }
  return summarize(std::move(samples), warmup);
}

std::vector<double> time_back_to_back(const Graph& graph, Stream stream, int warmup, int replays) {
  const auto handle = static_cast<CUstream>(stream.handle);
  for (int i = 0; i < warmup; ++i) graph.launch(stream);
  const std::vector<Event> events(static_cast<std::size_t>(replays) + 1);
  TWOSTEP_CUDA_CHECK(cuEventRecord(events[0], handle), "cuda.time_back_to_back");
  for (std::size_t i = 1; i < events.size(); ++i) {
    graph.launch(stream);
    TWOSTEP_CUDA_CHECK(cuEventRecord(events[i], handle), "cuda.time_back_to_back");
  }
  TWOSTEP_CUDA_CHECK(cuEventSynchronize(events.back()), "cuda.time_back_to_back");
  std::vector<double> samples;
  for (std::size_t i = 1; i < events.size(); ++i) {
    float milliseconds = 0;
    TWOSTEP_CUDA_CHECK(cuEventElapsedTime(&milliseconds, events[i - 1], events[i]), "cuda.time_back_to_back");
    samples.push_back(1000.0 * milliseconds);
  }
  return samples;
}

}  // namespace twostep
