// tactics/<gpu>.json: the measured choices that the rooms read, a list for each. Pure.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "measure/row.h"

namespace twostep {

// A list of the file. What names an entry, and gives its place: a word, which most entries lack, then three numbers.
struct TableList {
  const char* name;
  const char* word;  // empty: no entry has one
  const char* numbers[3];
};
inline constexpr TableList kGemmList{"entries", "", {"n", "k", "rows"}};
inline constexpr TableList kKdaList{"kda", "state_mode", {"tokens", "heads", "requests"}};

// The fields that name this entry, as JSON: {"n":2304,"k":1536,"rows":8}. Throws nlohmann::json::exception where one is
// missing.
std::string table_key(const TableList& list, const nlohmann::ordered_json& entry);

// The entries of a list; a missing file has none. Throws kDataError where it is another GPU's or no table, kUnavailable
// where it cannot be read.
std::set<std::string> table_keys(const std::string& path, const std::string& gpu, const TableList& list);

// `path` with its links followed: where a table is written, so that a link stays one.
std::string real_path(const std::string& path);

// Writes `path`, keeping the other lists and the entries of other keys. Throws as table_keys does, and kUnavailable
// where it cannot be written. Each entry says when and of which commit.
void merge_table(const std::string& path, const Machine& machine, const TableList& list,
                 const std::vector<nlohmann::ordered_json>& entries);

double hundredths(double us);  // as tables hold times

}  // namespace twostep
