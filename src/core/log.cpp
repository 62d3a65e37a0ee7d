#include "core/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <optional>

namespace twostep {
namespace {

std::optional<spdlog::level::level_enum> level_of(const std::string& name) {
  if (name == "debug") return spdlog::level::debug;
  if (name == "info") return spdlog::level::info;
  if (name == "warn") return spdlog::level::warn;
  if (name == "error") return spdlog::level::err;
  if (name == "off") return spdlog::level::off;
  return std::nullopt;
}

spdlog::logger& logger() {
  static spdlog::logger instance = [] {
    spdlog::logger made("twostep", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made.set_pattern("twostep %l: %v");
    made.flush_on(spdlog::level::trace);
    const char* name = std::getenv("TWOSTEP_LOG");  // not of environment(), which logs what is set
    const auto level = level_of(name ? name : "");
    made.set_level(level.value_or(spdlog::level::warn));
    if (name && *name && !level) made.warn("TWOSTEP_LOG={} is ignored; accepted: debug, info, warn, error, off", name);
    return made;
  }();
  return instance;
}

}  // namespace

void log_debug(const std::string& text) { logger().debug(text); }
void log_info(const std::string& text) { logger().info(text); }
void log_warn(const std::string& text) { logger().warn(text); }
void log_error(const std::string& text) { logger().error(text); }

void set_log_level(const std::string& level) { logger().set_level(level_of(level).value_or(spdlog::level::warn)); }

}  // namespace twostep
