#include "measure/table_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "core/check.h"

namespace twostep {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kPlace = "measure.merge_table";

// The word, null where there is none, then the numbers: null is before every word.
Json key_of(const TableList& list, const Json& entry) {
  Json key = Json::array({nullptr});
  if (entry.contains(list.word)) key[0] = entry.at(list.word).get<std::string>();
  for (const char* number : list.numbers) key.push_back(entry.at(number).get<std::int64_t>());
  return key;
}

Json entries_of(const Json& table, const TableList& list) { return table.value(list.name, Json::array()); }

// An existing table, or an empty one. What is there and cannot be read must not be taken for empty and written over.
Json read_table(const std::string& path, const std::string& gpu) {
  std::error_code failed;
  const bool there = std::filesystem::exists(path, failed);
  if (!there && !failed) return {{"gpu", gpu}, {"entries", Json::array()}};
  std::ifstream file(path);
  std::string text;
  std::getline(file, text, '\0');
  if (failed || !file.is_open() || file.bad())
    fail(StatusCode::kUnavailable, kPlace, path, failed ? failed.message() : "not readable", "a file that can be read");
  try {
    Json json = Json::parse(text);
    if (json.at("gpu") != gpu)
      fail(StatusCode::kDataError, kPlace, path, json.at("gpu").get<std::string>(), gpu,
           "write each GPU model to a file of its own");
    (void)json.at(kGemmList.name);
    for (const TableList& list : {kGemmList, kKdaList})
      for (const Json& entry : entries_of(json, list)) (void)key_of(list, entry);
    return json;
  } catch (const nlohmann::json::exception& error) {
    fail(StatusCode::kDataError, kPlace, path, error.what(), "a table of tactics");
  }
}

// One entry a line: a changed choice is one changed line.
std::string lines_of(const Json& entries) {
  std::string text = "[";
  const char* separator = "\n";
  for (const Json& entry : entries) {
    text += separator + entry.dump();
    separator = ",\n";
  }
  return text + "\n]";
}

}  // namespace

double hundredths(double us) { return static_cast<double>(static_cast<std::int64_t>(us * 100 + 0.5)) / 100; }

std::string table_key(const TableList& list, const Json& entry) {
  Json key = Json::object();
  if (entry.contains(list.word)) key[list.word] = entry.at(list.word).get<std::string>();
  for (const char* number : list.numbers) key[number] = entry.at(number).get<std::int64_t>();
  return key.dump();
}

std::set<std::string> table_keys(const std::string& path, const std::string& gpu, const TableList& list) {
  std::set<std::string> keys;
  const Json table = read_table(path, gpu);
  for (const Json& entry : entries_of(table, list)) keys.insert(table_key(list, entry));
  return keys;
}

std::string real_path(const std::string& path) {
  std::error_code error;
  const auto real = std::filesystem::weakly_canonical(path, error);
  return error ? path : real.string();  // what cannot be followed cannot be read, which says why
}

void merge_table(const std::string& link, const Machine& machine, const TableList& list,
                 const std::vector<Json>& measured) {
  const std::string path = real_path(link);
  Json table = read_table(path, machine.device);
  std::map<Json, Json> entries;
  for (const Json& entry : entries_of(table, list)) entries.emplace(key_of(list, entry), entry);
  for (Json entry : measured) {
    entry["measured"] = {
        {"date", machine.date}, {"commit", machine.commit}, {"driver", machine.driver}, {"nvrtc", machine.nvrtc}};
    const Json key = key_of(list, entry);
    entries[key] = std::move(entry);
  }
  Json& merged = table[list.name] = Json::array();
  for (auto& [key, entry] : entries) merged.push_back(std::move(entry));
  std::string text = "{";
  const char* separator = "";
  for (const auto& [name, value] : table.items()) {
    text += separator + Json(name).dump() + ": " + (value.is_array() ? lines_of(value) : value.dump());
    separator = ", ";
  }
  text += "}\n";
  const std::string temporary = fmt::format("{}.{}.tmp", path, ::getpid());
  std::ofstream(temporary) << text << std::flush;
  std::error_code error;
  if (std::filesystem::file_size(temporary, error) == text.size()) std::filesystem::rename(temporary, path, error);
  else if (!error) error = std::make_error_code(std::errc::io_error);
  if (error) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    fail(StatusCode::kUnavailable, kPlace, path, error.message(), "a file that can be written");
  }
}

}  // namespace twostep
