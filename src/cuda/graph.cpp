#include "cuda/graph.h"

namespace twostep {

Event::Event() { TWOSTEP_CUDA_CHECK(cuEventCreate(&handle_, 0), "cuda.Event"); }
Event::~Event() { driver().cuEventDestroy(handle_); }
void Event::record(Stream stream) const {
  TWOSTEP_CUDA_CHECK(cuEventRecord(handle_, static_cast<CUstream>(stream.handle)), "cuda.Event");
}
double Event::since(const Event& start) const {
  float milliseconds = 0;
  TWOSTEP_CUDA_CHECK(cuEventSynchronize(handle_), "cuda.Event");
  TWOSTEP_CUDA_CHECK(cuEventElapsedTime(&milliseconds, start.handle_, handle_), "cuda.Event");
  return 1000.0 * milliseconds;
}

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
    TWOSTEP_CUDA_CHECK(cuGraphUpload(exec_, handle), "cuda.Graph");
  } catch (...) {
    if (exec_ != nullptr) driver().cuGraphExecDestroy(exec_);
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
  const Event start, end;
  std::vector<double> samples;
  for (int i = 0; i < warmup + replays; ++i) {
    start.record(stream);
    graph.launch(stream);
    end.record(stream);
    samples.push_back(end.since(start));
  }
  return summarize(std::move(samples), warmup);
}

std::vector<double> time_back_to_back(const Graph& graph, Stream stream, int warmup, int replays) {
  for (int i = 0; i < warmup; ++i) graph.launch(stream);
  const std::vector<Event> events(static_cast<std::size_t>(replays) + 1);
  events[0].record(stream);
  for (std::size_t i = 1; i < events.size(); ++i) {
    graph.launch(stream);
    events[i].record(stream);
  }
  std::vector<double> samples;
  for (std::size_t i = 1; i < events.size(); ++i) samples.push_back(events[i].since(events[i - 1]));
  return samples;
}

}  // namespace twostep
