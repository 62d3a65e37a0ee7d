// What PyTorch takes for the same work, in the same run: scripts of bench/ that a Python of the user's runs. Pure.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/timer.h"
#include "measure/draft_loop.h"
#include "measure/kda_bytes.h"
#include "measure/line_worker.h"

namespace twostep {

struct ChainScript {
  const char* file;      // below bench/
  const char* needs;     // of the Python
  const char* packages;  // as pip takes them
};
// The KDA core as an unfused chain of public kernels; the draft step over cuBLAS, in one graph.
inline constexpr ChainScript kKdaChain = {"kda_chain.py", "torch, flash-linear-attention 0.6 or later",
                                          "torch flash-linear-attention"};
inline constexpr ChainScript kDraftChain = {"draft_chain.py", "torch", "torch"};

class TorchChain {
 public:
  // Throws kUnavailable with the reason where `python` does not run the script on this GPU.
  TorchChain(const ChainScript& script, const std::string& python, int ordinal);
  // A command in its place: for tests.
  TorchChain(const ChainScript& script, std::vector<std::string> command);

  // Microseconds per call, or per replay.
  Summary time(const nlohmann::json& request);
  const std::string& what() const { return what_; }  // libraries, their versions, and what the last time was of

 private:
  nlohmann::json ask(const nlohmann::json& request);
  [[noreturn]] void refuse(const std::string& why) const;

  ChainScript script_;
  std::string name_;
  LineWorker worker_;
  std::string what_;
};

// A call of the same shape, states stored after each token, over as many layers, sets and launches.
nlohmann::json chain_request(const KdaShape& shape, const KdaRing& ring);
// `draft` of the same rank. Each request has `context` rows in the cache.
nlohmann::json chain_request(const StepModel& model, const DrafterConfig& config, const DraftLoopOptions& options);

}  // namespace twostep
