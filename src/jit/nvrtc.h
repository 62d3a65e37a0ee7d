// NVRTC, opened at run time through our own declarations: neither built against nor needed by a machine whose
// kernels are all in the cache.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "jit/compile.h"

namespace twostep {

// The libraries that are tried, in order: `chosen` alone, or the newest name in every folder before the next name.
std::vector<std::string> nvrtc_paths(const std::string& chosen);

// Empty, or why an NVRTC of this version is refused.
std::string nvrtc_refusal(const std::string& path, int major, int minor);

class Nvrtc {
 public:
  // The process's NVRTC, looked for at first use: the file TWOSTEP_NVRTC if it is set, and no other; else the
  // newest that the loader or /usr/local/cuda has. Null if there is none: status() says what was tried.
  static const Nvrtc* get();
  static const Status& status();

  // Compiles for an architecture; no GPU is needed. The embedded files are offered as headers, and nothing else
  // can be included. Thread-safe. Throws kUnsupported (this NVRTC is older than the architecture) or
  // kCompileFailed with NVRTC's log as the value.
  Cubin compile(const CompileRequest& request) const;

  const std::string& version() const { return version_; }  // "13.0"
  const std::string& path() const { return path_; }

 private:
  using Program = struct Program_st*;
  struct Calls {
    int (*version)(int* major, int* minor) = nullptr;
    int (*num_archs)(int* count) = nullptr;
    int (*archs)(int* archs) = nullptr;
    int (*create)(Program*, const char* text, const char* name, int num_headers, const char* const* headers,
                  const char* const* header_names) = nullptr;
    int (*destroy)(Program*) = nullptr;
    int (*compile)(Program, int num_options, const char* const* options) = nullptr;
    int (*log_size)(Program, std::size_t*) = nullptr;
    int (*log)(Program, char*) = nullptr;
    int (*cubin_size)(Program, std::size_t*) = nullptr;
    int (*cubin)(Program, char*) = nullptr;
    const char* (*error_string)(int) = nullptr;
  };
  struct Opened {
    std::unique_ptr<const Nvrtc> nvrtc;
    Status status;
  };
  static const Opened& opened();
  static Opened open();
  // Empty, or why the library at `path` cannot be used.
  std::string load(const std::string& path);

  Calls calls_;
  std::vector<int> archs_;  // 90, 100, ...
  std::string version_;
  std::string path_;
};

}  // namespace twostep
