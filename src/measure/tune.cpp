#include "measure/tune.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/check.h"
#include "core/embedded.h"
#include "core/hash.h"
#include "kda/tactics.h"

namespace twostep {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kPlace = "measure.tune";

}  // namespace

// ---- The worker, as the run sees it

std::string to_line(const TuneRequest& request) {
  Json json = {{"id", request.id}, {"task", request.key.empty() ? Json() : Json::parse(request.key)}};
  if (!request.time.empty()) json["time"] = request.time, json["full"] = request.full;
  if (!request.compile.empty()) json["compile"] = request.compile;
  if (!request.check.empty()) json["check"] = request.check;
  return json.dump();
}

TuneRequest tune_request(const std::string& line) {
  try {
    const auto json = Json::parse(line);
    TuneRequest request;
    json.at("id").get_to(request.id);
    request.key = json.at("task").dump();
    request.time = json.value("time", "");
    request.full = json.value("full", false);
    request.compile = json.value("compile", std::vector<std::string>{});
    request.check = json.value("check", std::vector<std::string>{});
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
  request.key = task.key;
  request.time = what;
  request.full = full;
  const nlohmann::json json = ask(request, &timed.failure);
  if (!timed.failure.empty()) {
    if (const auto code = json.find("code"); code != json.end() && code->is_string()) timed.code = *code;
    return timed;
  }
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
  request.key = task.key;
  request.compile = names;
  std::string ignored;  // a kernel that was not compiled ahead is compiled when it is timed, and fails there
  if (!names.empty()) (void)ask(request, &ignored);
}

std::string TuneClient::check(const TuneTask& task, const std::vector<std::string>& names) {
  TuneRequest request;
  request.key = task.key;
  request.check = names;
  std::string failure;
  if (!names.empty()) (void)ask(request, &failure);
  return failure;
}

// ---- One task

void rank(std::vector<Finalist>& finalists) {
  const auto key = [](const Finalist& f) { return std::pair(std::llround(f.time.median * 100), f.smem_bytes); };
  std::stable_sort(finalists.begin(), finalists.end(),
                   [&](const Finalist& a, const Finalist& b) { return key(a) < key(b); });
}

std::optional<TuneResult> tune(const TuneTask& task, const TunePlan& plan, const TimeOne& time, TuneState& state,
                               const std::function<bool()>& out_of_time) {
  TuneResult result;
  result.task = task;
  std::vector<std::pair<std::string, std::string>> held;  // failed tactics and why, since something last ran
  const auto keep_failures = [&] {
    for (const auto& [name, reason] : held) state.add_failure(task, name, reason);
    held.clear();
  };
  bool ran = false;
  std::string last_failure;
  const auto time_tactic = [&](const std::string& name, bool full) -> std::optional<Summary> {
    const Timed timed = time(task, name, full);
    const bool right = timed.failure.empty();
    if (!right) {
      ++result.failed;
      last_failure = timed.failure;
      if (timed.code != code_name(StatusCode::kOutOfMemory)) held.emplace_back(name, timed.failure);
    }
    if (right || timed.code == code_name(StatusCode::kInternal)) {  // a kernel of wrong values has run, too
      ran = true;
      keep_failures();
    }
    return right ? std::optional(timed.time) : std::nullopt;
  };
  std::vector<std::pair<double, std::string>> screened;
  for (const auto& [name, smem_bytes] : plan.candidates) {
    if (state.failed(task, name)) continue;
    if (out_of_time()) return std::nullopt;
    ++result.tried;
    if (const auto summary = time_tactic(name, false)) screened.emplace_back(summary->median, name);
  }
  std::sort(screened.begin(), screened.end());
  for (const auto& [us, name] : screened) {
    constexpr std::size_t kAlways = 2;  // the best and its runner-up
    if (result.finalists.size() == plan.finalists) break;
    if (result.finalists.size() >= kAlways && us > plan.close * screened.front().first) break;
    if (out_of_time()) return std::nullopt;
    if (const auto summary = time_tactic(name, true))
      result.finalists.push_back({name, plan.candidates.at(name), *summary});
  }
  rank(result.finalists);
  if (!ran && result.failed > 0)
    fail(StatusCode::kUnavailable, kPlace, task.name, last_failure, "a GPU on which one tactic runs",
         "go on with --resume when it is back");
  if (result.finalists.empty()) {
    result.failure = "no tactic ran with right values";
    return result;
  }
  for (const std::string& what : plan.references) {
    if (out_of_time()) return std::nullopt;
    const Timed timed = time(task, what, true);
    if (!timed.failure.empty()) {
      result.failure = fmt::format("{}: {}", what, timed.failure);
      return result;
    }
    result.references[what] = timed.time;
  }
  keep_failures();
  return result;
}

// ---- What a stopped run leaves

namespace {

// Of all device text: a number is that of the kernels it was measured with, whatever else was committed since.
std::string kernels_hash() {
  std::string all;
  for (const EmbeddedText& file : embedded_kernels())
    for (const std::string_view part : {file.name, file.text}) all.append(part) += '\0';
  return hash128(all);
}

std::set<std::string> keys_of(const std::vector<TuneTask>& tasks) {
  std::set<std::string> keys;
  for (const TuneTask& task : tasks) keys.insert(task.key);
  return keys;
}

}  // namespace

TuneState::TuneState(std::string path, const Machine& machine, TuneStart start, const std::vector<TuneTask>& tasks)
    : path_(std::move(path)),
      header_(Json{{"gpu", machine.device},
                   {"driver", machine.driver},
                   {"nvrtc", machine.nvrtc},
                   {"kernels", kernels_hash()},
                   {"rules", fmt::format("{}, {}", kTacticRules, kKdaRules)}}
                  .dump()) {
  open_locked();
  std::string text = whole_lines();
  if (start == TuneStart::kNew && !text.empty())
    fail(StatusCode::kInvalidArgument, kPlace, "state", path_ + " of an earlier run", "no such file",
         "go on with --resume, or measure all again with --fresh");
  if (start == TuneStart::kFresh) {
    try {
      text = read(text, keys_of(tasks));
    } catch (const Error&) {  // of another origin, or broken: nothing of it is worth keeping
      text.clear();
      finished_.clear();
      failed_.clear();
    }
    truncate(0);
    write(text);
  } else {
    read(text, {});
    truncate(text.size());  // what was torn is cut off, so that the next line starts on its own
  }
  empty_ = text.empty();
}

TuneState::File::~File() {
  if (descriptor >= 0) ::close(descriptor);
}

TuneState::~TuneState() {
  if (empty_) ::unlink(path_.c_str());  // while it is locked: no other run's
}

void TuneState::refuse(const std::string& why) const {
  fail(StatusCode::kUnavailable, kPlace, "state", fmt::format("{}: {}", path_, why),
       "a file that can be written, for one run at a time");
}

void TuneState::open_locked() {
  file_.descriptor = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file_.descriptor < 0) refuse(std::strerror(errno));
  struct stat now {};
  const bool locked = ::flock(file_.descriptor, LOCK_EX | LOCK_NB) == 0;
  if (!locked && errno != EWOULDBLOCK) refuse(std::strerror(errno));
  // A run that ends may remove the file between our open and our lock.
  if (!locked || ::fstat(file_.descriptor, &now) != 0 || now.st_nlink == 0) refuse("another run holds it");
}

// An unfinished last line is none.
std::string TuneState::whole_lines() const {
  std::string text;
  std::array<char, 4096> buffer;
  for (;;) {
    const ssize_t count = ::read(file_.descriptor, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse(std::strerror(errno));
    if (count == 0) break;
    text.append(buffer.data(), static_cast<std::size_t>(count));
  }
  text.resize(text.rfind('\n') + 1);  // npos + 1 is 0
  return text;
}

std::string TuneState::read(const std::string& text, const std::set<std::string>& dropped) {
  std::istringstream lines(text);
  std::string kept;
  std::size_t number = 0;
  try {
    for (std::string line; std::getline(lines, line);) {
      const Json json = Json::parse(line);
      if (number++ == 0) {
        if (line != header_)
          fail(StatusCode::kDataError, kPlace, path_, line, header_, "measure all again with --fresh");
        continue;
      }
      const std::string key = table_key(json.contains(kKdaList.numbers[0]) ? kKdaList : kGemmList, json);
      if (dropped.contains(key)) continue;
      if (json.contains("failure")) {
        failed_.emplace(key, json.at("tactic").get<std::string>());
      } else {
        json.at("finalists").at(0).at("tactic").get_ref<const std::string&>();
        finished_.insert(key);
      }
      kept += line + "\n";
    }
  } catch (const nlohmann::json::exception& error) {
    fail(StatusCode::kDataError, kPlace, fmt::format("{} line {}", path_, number), error.what(),
         "lines of twostep tune", "measure all again with --fresh");
  }
  return kept.empty() ? kept : header_ + "\n" + kept;
}

void TuneState::truncate(std::size_t size) const {
  if (::ftruncate(file_.descriptor, static_cast<off_t>(size)) != 0) refuse(std::strerror(errno));
}

void TuneState::write(const std::string& text) const {
  for (std::size_t written = 0; written < text.size();) {
    const ssize_t count = ::write(file_.descriptor, text.data() + written, text.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) refuse(std::strerror(errno));
    written += static_cast<std::size_t>(count);
  }
}

void TuneState::append(const Json& json) {
  const std::string line = json.dump(-1, ' ', true, Json::error_handler_t::replace) + "\n";
  write(empty_ ? header_ + "\n" + line : line);
  empty_ = false;
}

bool TuneState::close(const std::vector<TuneTask>& tasks) {
  const std::set<std::string> own = keys_of(tasks);
  for (const std::string& key : finished_)
    if (!own.contains(key)) return false;
  for (const auto& [key, tactic] : failed_)
    if (!own.contains(key)) return false;
  empty_ = true;
  return true;
}

std::vector<TuneTask> open_tasks(std::vector<TuneTask> tasks, const TuneState& state,
                                 const std::set<std::string>& table) {
  std::erase_if(tasks, [&](const TuneTask& task) { return state.finished(task) && table.contains(task.key); });
  return tasks;
}

void TuneState::add(const TuneResult& result) {
  Json json = Json::parse(result.task.key);
  Json finalists = Json::array();
  for (const Finalist& f : result.finalists)
    finalists.push_back({{"tactic", f.tactic}, {"us", f.time.median}, {"spread_us", f.time.spread()}});
  json["finalists"] = finalists;
  for (const auto& [what, time] : result.references) json[what + "_us"] = time.median;
  append(json);
  finished_.insert(result.task.key);
}

void TuneState::add_failure(const TuneTask& task, const std::string& tactic, const std::string& reason) {
  Json json = Json::parse(task.key);
  json["tactic"] = tactic;
  json["failure"] = reason;
  append(json);
  failed_.emplace(task.key, tactic);
}

}  // namespace twostep
