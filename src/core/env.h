// The environment, read once at first use (spec: style 6.5). Set variables are logged.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace twostep {

struct Environment {
  std::string cache_dir;     // TWOSTEP_CACHE_DIR, else $XDG_CACHE_HOME/twostep, else ~/.cache/twostep; "" if none
  bool cache = true;         // TWOSTEP_CACHE=0: no disk cache
  bool jit = true;           // TWOSTEP_JIT=0: never compile, only kernels found in the caches
  bool warp = true;          // TWOSTEP_WARP=0: cuBLAS only
  std::string nvrtc;         // TWOSTEP_NVRTC: path of libnvrtc.so; "" searches the usual names
  std::string cublaslt;      // TWOSTEP_CUBLASLT: path of libcublasLt.so
  std::string nccl;          // TWOSTEP_NCCL: path of libnccl.so.2
  std::string log_level;     // TWOSTEP_LOG: debug | info | warn (default) | error | off
  int threads = 0;           // TWOSTEP_THREADS: CPU backend; 0: all cores this process may use
  double peer_limit_s = 60;  // TWOSTEP_PEER_LIMIT_S: how long a rank waits for another, in seconds
  std::vector<std::pair<std::string, std::string>> set;  // name and value of those above that are set
};

const Environment& environment();

}  // namespace twostep
