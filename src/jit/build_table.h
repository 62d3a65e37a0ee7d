// One build per key and process: memory first, then disk, then the compiler (spec: draft-gemm 6.4, 6.5). Pure:
// the compiler is given.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "jit/compile.h"
#include "jit/disk_cache.h"

namespace twostep {

enum class BuiltFrom { kMemory, kDisk, kCompiled };

struct Built {
  std::shared_ptr<const Cubin> cubin;
  CompileKey key;
  std::string nvrtc_version;  // that built it
  BuiltFrom from = BuiltFrom::kMemory;
  double milliseconds = 0;  // of this call, waits included
};

// What turns a request into a cubin. Without `compile` only the caches serve, entries of any NVRTC version.
struct Compiler {
  std::string version;
  std::function<Cubin(const CompileRequest&)> compile;  // throws Error; called by several threads at once
  Status why_none;                                      // thrown when `compile` is missed
};

class BuildTable {
 public:
  explicit BuildTable(std::chrono::milliseconds lock_wait = std::chrono::seconds(120)) : lock_wait_(lock_wait) {}

  // Threads that ask for one key share one build and its failure; other keys build at the same time. A failure
  // is not remembered: the next call tries again. Throws what the compiler throws, or compiler.why_none.
  Built build(const CompileRequest& request, const Compiler& compiler, const DiskCache& cache);

  // The driver refused this build: forgets it, deletes its entry, and keeps the disk out of the next build, for
  // a folder that cannot be written. Nothing if another thread has already replaced it.
  void discard(const CompileRequest& request, const Built& refused, const DiskCache& cache);

 private:
  Built fetch(const CompileRequest& request, const std::string& source, const Compiler& compiler,
              const DiskCache& cache);

  using Flight = std::pair<std::string, bool>;  // source hash, may compile: only equals share a failure

  const std::chrono::milliseconds lock_wait_;
  std::mutex mutex_;  // of the rest; never held during a build
  std::map<std::string, Built> done_;
  std::map<Flight, std::shared_future<Built>> flights_;
  std::set<std::string> refused_;
};

}  // namespace twostep
