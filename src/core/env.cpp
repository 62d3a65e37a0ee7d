#include "core/env.h"

#include <cstdlib>

#include "core/log.h"

namespace twostep {
namespace {

std::string text_of(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

bool flag_of(const char* name) { return text_of(name) != "0"; }

std::string default_cache_dir() {
  if (auto xdg = text_of("XDG_CACHE_HOME"); !xdg.empty()) return xdg + "/twostep";
  if (auto home = text_of("HOME"); !home.empty()) return home + "/.cache/twostep";
  return {};
}

Environment read() {
  Environment env;
  env.cache_dir = text_of("TWOSTEP_CACHE_DIR");
  if (env.cache_dir.empty()) env.cache_dir = default_cache_dir();
  env.cache = flag_of("TWOSTEP_CACHE");
  env.jit = flag_of("TWOSTEP_JIT");
  env.warp = flag_of("TWOSTEP_WARP");
  env.nvrtc = text_of("TWOSTEP_NVRTC");
  env.cublaslt = text_of("TWOSTEP_CUBLASLT");
  env.log_level = text_of("TWOSTEP_LOG");
  env.threads = std::atoi(text_of("TWOSTEP_THREADS").c_str());
  if (env.threads < 0) env.threads = 0;
  return env;
}

}  // namespace

const Environment& environment() {
  static const Environment env = [] {
    Environment e = read();
    set_log_level(e.log_level);
    for (const char* name : {"TWOSTEP_CACHE_DIR", "TWOSTEP_CACHE", "TWOSTEP_JIT", "TWOSTEP_WARP", "TWOSTEP_NVRTC",
                             "TWOSTEP_CUBLASLT", "TWOSTEP_LOG", "TWOSTEP_THREADS"}) {
      if (auto value = text_of(name); !value.empty()) log_info(std::string(name) + "=" + value);
    }
    return e;
  }();
  return env;
}

}  // namespace twostep
