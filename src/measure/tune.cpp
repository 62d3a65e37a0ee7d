#include "measure/tune.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/check.h"
#include "gemm/contract.h"

namespace twostep {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kPlace = "measure.tune";
constexpr std::size_t kFinalists = 6;

Json task_json(const TuneTask& task) { return {{"n", task.n}, {"k", task.k}, {"rows", task.rows}}; }

template <class AnyJson>
TuneTask task_from(const AnyJson& json) {
  return {json.at("n").template get<std::int64_t>(), json.at("k").template get<std::int64_t>(),
          json.at("rows").template get<int>()};
}

}  // namespace

std::vector<TuneTask> tune_tasks(const std::vector<std::pair<std::int64_t, std::int64_t>>& shapes,
                                 const std::vector<int>& rows) {
  std::vector<TuneTask> tasks;
  std::set<TuneTask> seen;
  for (const auto& [n, k] : shapes) {
    if (!warp_eligible(n, k))
      fail(StatusCode::kInvalidArgument, kPlace, "shape", fmt::format("{},{}", n, k),
           "N a multiple of 16 and K a multiple of 64", "others are served by cuBLAS and have no tactics");
    for (const int m : rows) {
      if (m < 1 || m > kMaxWarpRows)
        fail(StatusCode::kInvalidArgument, kPlace, "rows", std::to_string(m), fmt::format("1 to {}", kMaxWarpRows),
             "more rows are served by cuBLAS and have no tactics");
      const TuneTask task{n, k, bucket_of(m)};
      if (seen.insert(task).second) tasks.push_back(task);
    }
  }
  return tasks;
}

std::map<std::string, Tactic> tune_candidates(const TuneTask& task, const DeviceFacts& facts, int count) {
  std::map<std::string, Tactic> named;
  for (const Tactic& tactic : sweep_candidates(task.rows, task.n, task.k, facts, count))
    named.emplace(to_string(tactic), tactic);
  return named;
}

// ---- The worker, as the run sees it

std::string to_line(const TuneRequest& request) {
  Json json = {{"id", request.id}};
  json.update(task_json(request.task));
  if (!request.time.empty()) json["time"] = request.time, json["full"] = request.full;
  if (!request.compile.empty()) json["compile"] = request.compile;
  return json.dump();
}

TuneRequest tune_request(const std::string& line) {
  try {
    const auto json = nlohmann::json::parse(line);
    TuneRequest request;
    json.at("id").get_to(request.id);
    request.task = task_from(json);
    request.time = json.value("time", "");
    request.full = json.value("full", false);
    request.compile = json.value("compile", std::vector<std::string>{});
    return request;
  } catch (const nlohmann::json::exception& error) {
    fail(StatusCode::kDataError, kPlace, "request", error.what(), "a line of twostep tune");
  }
}

nlohmann::json TuneClient::ask(TuneRequest request, std::string* failure) {
  request.id = next_id_++;
  const LineWorker::Reply reply = worker_.ask(to_line(request));
  if (!reply.lost.empty()) {
    *failure = "the worker was lost: " + reply.lost;
    return {};
  }
  // Only what is complete and of this request counts: an answer to an earlier one would time the wrong kernel.
  auto json = nlohmann::json::parse(reply.line, nullptr, false);
  if (!json.is_object() || json.value("id", nlohmann::json()) != request.id) {
    worker_.stop();
    constexpr std::size_t kShown = 80;
    *failure =
        "the worker answered what is no answer: " +
        nlohmann::json(reply.line.substr(0, kShown)).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    return {};
  }
  if (const auto said = json.find("failure"); said != json.end())
    *failure = said->is_string() ? said->get<std::string>() : said->dump();
  if (json.contains("lost")) worker_.stop();  // it said that its GPU context is lost
  return json;
}

DeviceFacts TuneClient::describe(Machine& machine) {
  std::string failure;
  const nlohmann::json json = ask({}, &failure);
  DeviceFacts facts;
  try {
    if (failure.empty()) {
      json.at("arch").get_to(facts.arch);
      json.at("sm_count").get_to(facts.sm_count);
      json.at("smem_per_block").get_to(facts.smem_per_block);
      json.at("smem_per_sm").get_to(facts.smem_per_sm);
      json.at("device").get_to(facts.name);
      json.at("driver").get_to(machine.driver);
      json.at("nvrtc").get_to(machine.nvrtc);
      machine.device = facts.name;
    }
  } catch (const nlohmann::json::exception& error) {
    failure = error.what();
  }
  if (!failure.empty()) fail(StatusCode::kUnavailable, kPlace, "worker", failure, "a GPU, NVRTC and cuBLASLt");
  return facts;
}

Timed TuneClient::time(const TuneTask& task, const std::string& what, bool full) {
  Timed timed;
  TuneRequest request;
  request.task = task;
  request.time = what;
  request.full = full;
  const nlohmann::json json = ask(request, &timed.failure);
  if (!timed.failure.empty()) return timed;
  try {
    json.at("median_us").get_to(timed.time.median);
    json.at("p10_us").get_to(timed.time.p10);
    json.at("p90_us").get_to(timed.time.p90);
    json.at("kept").get_to(timed.time.kept);
    if (!(timed.time.median > 0) || timed.time.kept < 1) timed.failure = "the worker gave no time: " + json.dump();
  } catch (const nlohmann::json::exception& error) {
    timed.failure = error.what();
  }
  return timed;
}

void TuneClient::compile(const TuneTask& task, const std::vector<std::string>& names) {
  TuneRequest request;
  request.task = task;
  request.compile = names;
  std::string ignored;  // a kernel that was not compiled ahead is compiled when it is timed, and fails there
  if (!names.empty()) (void)ask(request, &ignored);
}

// ---- One task

MeasuredEntry TuneResult::entry() const {
  const Finalist& best = finalists.front();
  MeasuredEntry measured;
  measured.entry = {task.n, task.k, task.rows, best.tactic, best.time.median, cublas.median};
  measured.warp_spread_us = best.time.spread();
  measured.cublas_spread_us = cublas.spread();
  measured.limit_us = limit.median;
  measured.runner_up_us = finalists.size() > 1 ? finalists[1].time.median : 0;
  return measured;
}

Chain TuneResult::chain() const {
  return {"early", finalists.empty() ? Summary{} : finalists.front().time, cublas, limit};
}

void rank(std::vector<Finalist>& finalists) {
  const auto key = [](const Finalist& f) { return std::pair(std::llround(f.time.median * 100), f.tactic.smem_bytes); };
  std::stable_sort(finalists.begin(), finalists.end(),
                   [&](const Finalist& a, const Finalist& b) { return key(a) < key(b); });
}

std::optional<TuneResult> tune(const TuneTask& task, const std::map<std::string, Tactic>& candidates,
                               const TimeOne& time, TuneState& state, const std::function<bool()>& out_of_time) {
  TuneResult result;
  result.task = task;
  const auto time_tactic = [&](const std::string& name, bool full) -> std::optional<Summary> {
    const Timed timed = time(task, name, full);
    if (timed.failure.empty()) return timed.time;
    state.add_failure(task, name, timed.failure);
    ++result.failed;
    return std::nullopt;
  };
  std::vector<std::pair<double, std::string>> screened;
  for (const auto& [name, tactic] : candidates) {
    if (state.failed(task, name)) continue;
    if (out_of_time()) return std::nullopt;
    ++result.tried;
    if (const auto summary = time_tactic(name, false)) screened.emplace_back(summary->median, name);
  }
  std::sort(screened.begin(), screened.end());
  for (const auto& [us, name] : screened) {
    if (result.finalists.size() == kFinalists) break;
    if (out_of_time()) return std::nullopt;
    if (const auto summary = time_tactic(name, true)) result.finalists.push_back({candidates.at(name), *summary});
  }
  rank(result.finalists);
  if (result.finalists.empty()) {
    result.failure = "no tactic ran with right values";
    return result;
  }
  for (const auto& [what, summary] : {std::pair{kTimeCublas, &result.cublas}, {kTimeLimit, &result.limit}}) {
    if (out_of_time()) return std::nullopt;
    const Timed timed = time(task, what, true);
    if (!timed.failure.empty()) {
      result.failure = fmt::format("{}: {}", what, timed.failure);
      return result;
    }
    *summary = timed.time;
  }
  return result;
}

// ---- What a stopped run leaves

TuneState::TuneState(std::string path, const Machine& machine, TuneStart start) : path_(std::move(path)) {
  const Json header = {{"gpu", machine.device}, {"commit", machine.commit}, {"rules", kTacticRules}};
  std::string text;
  if (start != TuneStart::kFresh) {
    std::ostringstream all;
    if (std::ifstream old(path_, std::ios::binary); old.peek() != std::ifstream::traits_type::eof()) all << old.rdbuf();
    text = all.str();
    text.resize(text.rfind('\n') + 1);  // npos + 1 is 0: a torn line is no line
  }
  if (start == TuneStart::kNew && !text.empty())
    fail(StatusCode::kInvalidArgument, kPlace, "state", path_ + " of an earlier run", "no such file",
         "go on with --resume, or measure all again with --fresh");
  read(text, header);
  // What was torn is cut off, so that the next line starts on its own.
  std::error_code error;
  if (!text.empty()) std::filesystem::resize_file(path_, text.size(), error);
  file_.open(path_, text.empty() ? std::ios::trunc : std::ios::app);
  if (error) file_.setstate(std::ios::failbit);
  if (text.empty()) append(header);
  else append({});
}

void TuneState::read(const std::string& text, const Json& header) {
  std::istringstream lines(text);
  std::size_t number = 0;
  try {
    for (std::string line; std::getline(lines, line);) {
      const Json json = Json::parse(line);
      if (number++ == 0) {
        if (json != header)
          fail(StatusCode::kDataError, kPlace, path_, line, header.dump(), "measure all again with --fresh");
      } else if (json.contains("failure")) {
        failed_.emplace(task_from(json), json.at("tactic").get<std::string>());
      } else {
        json.at("finalists").at(0).at("tactic").get_ref<const std::string&>();
        finished_.insert(task_from(json));
      }
    }
  } catch (const nlohmann::json::exception& error) {
    fail(StatusCode::kDataError, kPlace, fmt::format("{} line {}", path_, number), error.what(),
         "lines of twostep tune", "measure all again with --fresh");
  }
}

void TuneState::append(const Json& json) {
  if (!json.is_null()) file_ << json.dump(-1, ' ', true, Json::error_handler_t::replace) << '\n' << std::flush;
  if (!file_) fail(StatusCode::kUnavailable, kPlace, "state", path_, "a file that can be written");
}

void TuneState::add(const TuneResult& result) {
  Json json = task_json(result.task);
  Json finalists = Json::array();
  for (const Finalist& f : result.finalists)
    finalists.push_back({{"tactic", to_string(f.tactic)}, {"us", f.time.median}, {"spread_us", f.time.spread()}});
  json["finalists"] = finalists;
  json["cublas_us"] = result.cublas.median;
  json["limit_us"] = result.limit.median;
  append(json);
  finished_.insert(result.task);
}

void TuneState::add_failure(const TuneTask& task, const std::string& tactic, const std::string& reason) {
  Json json = task_json(task);
  json["tactic"] = tactic;
  json["failure"] = reason;
  append(json);
  failed_.emplace(task, tactic);
}

}  // namespace twostep
