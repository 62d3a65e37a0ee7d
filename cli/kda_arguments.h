// What the commands about PreparedKda read the same way.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "twostep/kda.h"

namespace twostep::cli {

// bench/cases/kda.json. Throws kDataError where the file is malformed.
struct KdaCases {
  std::vector<int> heads;
  std::vector<std::int64_t> requests;
  std::vector<int> tokens;
};
KdaCases kda_cases();

// "2,8,1": split, warps, pass_rows; "1,16,4,stream". Throws kInvalidArgument.
KdaTactic parse_tactic(const std::string& place, const std::string& text);

// What is given before a subcommand is for the command without one: refused, since nothing would read it.
inline void refuse_options_of(const CLI::App& parent) {
  for (const CLI::Option* option : parent.get_options())
    if (option->count() > 0) throw CLI::ExcludesError(option->get_name(), "kda");
}

// A list with commas, each number in this range.
template <class T>
CLI::Option* add_list(CLI::App& app, const std::string& name, std::vector<T>& values, const std::string& help, int low,
                      int high) {
  return app.add_option(name, values, help)->delimiter(',')->check(CLI::Range(low, high))->capture_default_str();
}

}  // namespace twostep::cli
