// The KDA core as an unfused chain of public kernels, which a Python of the user's runs: bench/kda_chain.py. Pure.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/timer.h"
#include "measure/kda_bytes.h"
#include "measure/line_worker.h"

namespace twostep {

class KdaChain {
 public:
  // Throws kUnavailable with the reason where `python` does not run the chain on this GPU.
  KdaChain(const std::string& python, int ordinal);
  // A command in its place: for tests.
  explicit KdaChain(std::vector<std::string> command);

  // Microseconds per call of the same shape, states stored after each token, over as many layers, sets and launches.
  Summary time(const KdaShape& shape, const KdaRing& ring);
  const std::string& what() const { return what_; }  // libraries, their versions, and the launches

 private:
  nlohmann::json ask(const nlohmann::json& request);
  [[noreturn]] void refuse(const std::string& why) const;

  std::string name_;
  LineWorker worker_;
  std::string what_;
};

}  // namespace twostep
