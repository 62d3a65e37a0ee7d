// The log: standard error, through spdlog. Warnings and errors by default; TWOSTEP_LOG changes it.
#pragma once

#include <string>

namespace twostep {

void log_debug(const std::string& text);
void log_info(const std::string& text);
void log_warn(const std::string& text);
void log_error(const std::string& text);
void set_log_level(const std::string& level);  // debug | info | warn | error | off; anything else: warn

}  // namespace twostep
