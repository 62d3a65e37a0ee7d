// Seeds of synth, draft and check: digits only, below 2^64. CLI11's own conversion takes -1 and wraps what is too
// large.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>

#include "core/check.h"

namespace twostep::cli {

inline std::uint64_t parse_seed(const std::string& place, const std::string& text, const char* option = "--seed") {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) return value;
  fail(StatusCode::kInvalidArgument, place, option, text, "whole numbers from 0 to 2^64 - 1");
}

}  // namespace twostep::cli
