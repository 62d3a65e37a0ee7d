#include "io/json.h"

#include <set>
#include <vector>

#include "core/check.h"

namespace twostep {

std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 120;
  std::string out(text.substr(0, kLongest));
  for (char& c : out)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return text.size() > kLongest ? out + "..." : out;
}

nlohmann::json parse_json(std::string_view text, const std::string& place, const std::string& file) {
  using Event = nlohmann::json::parse_event_t;
  constexpr int kDeepest = 16;
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int depth, Event event, nlohmann::json& value) {
    if (event == Event::object_start || event == Event::array_start) {
      if (depth >= kDeepest)
        fail(StatusCode::kDataError, place, file, "nested deeper than " + std::to_string(kDeepest), "flat JSON");
    }
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(value.get<std::string>()).second)
      fail(StatusCode::kDataError, place, file + " " + printable(value.get<std::string>()), "twice in one object",
           "each key once");
    return true;
  };
  try {
    return nlohmann::json::parse(text, watch);
  } catch (const nlohmann::json::exception& error) {
    fail(StatusCode::kDataError, place, file, printable(error.what()), "valid JSON");
  }
}

}  // namespace twostep
