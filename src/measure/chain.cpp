#include "measure/chain.h"

#include <cmath>
#include <deque>

namespace twostep {
namespace {

Summary per_launch(Summary whole, int launches, double other_us) {
  for (double* us : {&whole.median, &whole.p10, &whole.p90}) *us = *us / launches - other_us;
  return whole;
}

template <class Measure>
Summary fastest(const MeasureDevice& device, Measure&& measure) {
  Summary best;
  for (const Reader& reader : kReaders) {
    if (!device.fits(reader)) continue;
    const Summary summary = measure(reader);
    if (best.kept == 0 || summary.median < best.median) best = summary;
  }
  return best;
}

const Piece& piece_of(const std::vector<Piece>& pieces, int launch) {
  return pieces[static_cast<std::size_t>(launch) % pieces.size()];
}

}  // namespace

Summary ChainTimer::early(const Enqueue& enqueue, Replays replays) const {
  const Graph graph(device_.stream(), [&] {
    for (int i = 0; i < launches_; ++i) enqueue(i);
  });
  int warmup = replays.warmup;
  if (std::isfinite(replays.hopeless)) {
    const Summary first = per_launch(time_graph(graph, device_.stream(), warmup, 1), launches_, 0);
    if (first.median > replays.hopeless) return first;
    warmup = 0;
  }
  return per_launch(time_graph(graph, device_.stream(), warmup, replays.kept), launches_, 0);
}

Summary ChainTimer::isolated(const Enqueue& enqueue, Replays replays) {
  if (plain_us_ == 0) plain_us_ = early([&](int) { device_.plain(); }).median;
  const Summary both = early(
      [&](int i) {
        device_.plain();
        enqueue(i);
      },
      replays);
  return per_launch(both, 1, plain_us_);
}

std::vector<Summary> time_in_turn(const MeasureDevice& device, const std::vector<std::function<void()>>& enqueues,
                                  Replays replays) {
  std::deque<Graph> graphs;
  for (const auto& enqueue : enqueues) graphs.emplace_back(device.stream(), enqueue);
  std::vector<std::vector<double>> samples(graphs.size());
  for (int i = 0; i < replays.warmup + replays.kept; ++i)
    for (std::size_t g = 0; g < graphs.size(); ++g) {
      graphs.back().launch(device.stream());
      samples[g].push_back(time_graph(graphs[g], device.stream(), 0, 1).median);
    }
  std::vector<Summary> times;
  for (std::vector<double>& of_graph : samples) times.push_back(summarize(std::move(of_graph), replays.warmup));
  return times;
}

Summary early_read_limit(ChainTimer& timer, const std::vector<Piece>& pieces, Replays replays) {
  return fastest(timer.device(), [&](const Reader& reader) {
    return timer.early(
        [&](int i) {
          const Piece& piece = piece_of(pieces, i);
          timer.device().read(reader, true, i > 0, piece.data, piece.bytes);
        },
        replays);
  });
}

Summary isolated_read_limit(ChainTimer& timer, const std::vector<Piece>& pieces, Replays replays) {
  return fastest(timer.device(), [&](const Reader& reader) {
    return timer.isolated(
        [&](int i) {
          const Piece& piece = piece_of(pieces, i);
          timer.device().read(reader, false, false, piece.data, piece.bytes);
        },
        replays);
  });
}

}  // namespace twostep
