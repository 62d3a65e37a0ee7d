// What a draft step must read, and the row that its times become (spec: drafter 9, style 7.4). Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "measure/draft_loop.h"
#include "measure/row.h"

namespace twostep {

bool is_ingest(Stage stage);  // else of draft or, alone, of verify

// One stage of all layers. Microseconds per step.
struct DraftStage {
  Stage stage;
  Summary time;
  std::int64_t bytes = 0;  // that must be read
};
// Of a loop's steps after the first; stages that the model does not have are left out.
std::vector<DraftStage> draft_stages(DraftLoop& loop, const DraftLoopOptions& options);

// The bytes of the stages of draft, or of ingest, by launch that reads them.
std::vector<std::int64_t> draft_pieces(const StepModel& model, bool gate, bool ingest, std::int64_t requests,
                                       std::int64_t keys, int markov_reads);

// A captured step, and the time to only read what it must. Microseconds per replay.
struct DraftGraphs {
  Summary draft, ingest, verify;
  Summary step;  // the three in one graph
  Summary draft_limit, ingest_limit;
  double draft_bytes = 0, ingest_bytes = 0;
  std::size_t launches = 0, programmatic = 0;  // of the graph of the step: its nodes, and its PDL edges
  double over_limit() const { return draft.median / draft_limit.median; }
};

// The most that `draft` of K3.1 with one request of 4096 tokens may take over its read limit, on one rank of eight and
// on one GPU (docs/notes/drafter.md).
inline constexpr double kDraftBar = 1.8, kDraftBarOfOne = 1.2;

struct DraftStepRow {
  std::string model;
  DraftLoopOptions options;
  std::vector<DraftStage> stages;
  DraftGraphs graphs;
  std::string baseline;   // PyTorch over cuBLAS; empty: none
  Summary baseline_time;  // of what `graphs.draft` is of
  std::optional<double> bar() const;
  const char* bar_verdict() const;  // "holds", "misses"; "none" where no bar is named
};
std::string json_line(const DraftStepRow& row, const Machine& machine);

}  // namespace twostep
