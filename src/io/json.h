// JSON from files that nobody vouches for.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace twostep {

// Parses `text` of `file`. Refused with kDataError: bad syntax or UTF-8, a key twice in one object (the second
// would silently win), nesting deeper than 16.
nlohmann::json parse_json(std::string_view text, const std::string& place, const std::string& file);

// A name or a value from a file, fit for a one-line message: no control characters, at most 120 bytes.
std::string printable(std::string_view text);

}  // namespace twostep
