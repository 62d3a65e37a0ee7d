#include "cli/kda_arguments.h"

#include "cli/arguments.h"
#include "core/embedded.h"
#include "io/json.h"

namespace twostep::cli {

KdaCases kda_cases() {
  constexpr const char* kPlace = "cases.read";
  constexpr const char* kFile = "kda.json";
  for (const EmbeddedText& file : embedded_cases()) {
    if (file.name != kFile) continue;
    const nlohmann::json document = parse_json(file.text, kPlace, kFile);
    try {
      KdaCases cases;
      for (const auto& rank : document.at("ranks")) cases.heads.push_back(rank.at("heads"));
      document.at("requests").get_to(cases.requests);
      document.at("tokens").get_to(cases.tokens);
      return cases;
    } catch (const nlohmann::json::exception& error) {
      fail(StatusCode::kDataError, kPlace, kFile, printable(error.what()), "ranks with heads, requests, tokens");
    }
  }
  fail(StatusCode::kInternal, kPlace, kFile, "missing", "embedded at build time");
}

KdaTactic parse_tactic(const std::string& place, const std::string& text) {
  constexpr std::string_view kStream = ",stream";
  const bool streams = text.ends_with(kStream);
  const std::string_view list = std::string_view(text).substr(0, text.size() - (streams ? kStream.size() : 0));
  std::vector<int> numbers;
  for (std::size_t at = 0; at <= list.size();) {
    const std::size_t end = std::min(list.find(',', at), list.size());
    const auto number = parse_number(list.substr(at, end - at), 1);
    numbers.push_back(number && *number <= 16 ? static_cast<int>(*number) : 0);
    at = end + 1;
  }
  if (numbers.size() == 3 && numbers[0] > 0 && numbers[1] > 0 && numbers[2] > 0)
    return {numbers[0], numbers[1], numbers[2], streams};
  fail(StatusCode::kInvalidArgument, place, "--tactic", text,
       "split,warps,pass_rows: 1, 2, 4 or 8, then 4, 8 or 16, then 1, 2 or 4; or 1,16,4,stream");
}

}  // namespace twostep::cli
