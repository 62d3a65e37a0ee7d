#include "core/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

namespace twostep {
namespace {

spdlog::logger& logger() {
  static spdlog::logger instance = [] {
    spdlog::logger made("twostep", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made.set_pattern("twostep %l: %v");
    made.set_level(spdlog::level::warn);
    made.flush_on(spdlog::level::trace);
    return made;
  }();
  return instance;
}

}  // namespace

void log_debug(const std::string& text) { logger().debug(text); }
void log_info(const std::string& text) { logger().info(text); }
void log_warn(const std::string& text) { logger().warn(text); }
void log_error(const std::string& text) { logger().error(text); }

void set_log_level(const std::string& level) {
  if (level == "debug") logger().set_level(spdlog::level::debug);
  else if (level == "info") logger().set_level(spdlog::level::info);
  else if (level == "error") logger().set_level(spdlog::level::err);
  else if (level == "off") logger().set_level(spdlog::level::off);
  else logger().set_level(spdlog::level::warn);
}

}  // namespace twostep
