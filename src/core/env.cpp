#include "core/env.h"

#include <charconv>
#include <cstdlib>

#include "core/log.h"

namespace twostep {
namespace {

std::string text_of(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// Not silent: a value that is not taken is named once, at the read.
void refuse(const char* name, const std::string& value, const char* accepted) {
  log_warn(std::string(name) + "=" + value + " is ignored; accepted: " + accepted);
}

bool flag_of(const char* name) {
  const std::string value = text_of(name);
  if (value.empty() || value == "1") return true;
  if (value != "0") refuse(name, value, "0, 1");
  return value != "0";
}

int count_of(const char* name) {
  constexpr int kMost = 4096;
  const std::string value = text_of(name);
  if (value.empty()) return 0;
  int count = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), count);
  if (error == std::errc() && end == value.data() + value.size() && count >= 0 && count <= kMost) return count;
  refuse(name, value, "0 to 4096");
  return 0;
}

double seconds_of(const char* name, double otherwise) {
  const std::string value = text_of(name);
  if (value.empty()) return otherwise;
  double seconds = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), seconds);
  if (error == std::errc() && end == value.data() + value.size() && seconds >= 1e-3 && seconds <= 3600) return seconds;
  refuse(name, value, "0.001 to 3600 seconds");
  return otherwise;
}

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
  env.nccl = text_of("TWOSTEP_NCCL");
  env.log_level = text_of("TWOSTEP_LOG");
  env.threads = count_of("TWOSTEP_THREADS");
  env.peer_limit_s = seconds_of("TWOSTEP_PEER_LIMIT_S", env.peer_limit_s);
  for (const char* name :
       {"TWOSTEP_CACHE_DIR", "TWOSTEP_CACHE", "TWOSTEP_JIT", "TWOSTEP_WARP", "TWOSTEP_NVRTC", "TWOSTEP_CUBLASLT",
        "TWOSTEP_NCCL", "TWOSTEP_LOG", "TWOSTEP_THREADS", "TWOSTEP_PEER_LIMIT_S"})
    if (const char* value = std::getenv(name)) env.set.emplace_back(name, value);
  return env;
}

}  // namespace

const Environment& environment() {
  static const Environment env = [] {
    Environment e = read();
    for (const auto& [name, value] : e.set) log_info(name + "=" + value);
    return e;
  }();
  return env;
}

}  // namespace twostep
