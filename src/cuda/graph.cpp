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

}  // namespace twostep
