#include "measure/tune.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <iostream>
#include <memory>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "io/cases.h"
#if TWOSTEP_CUDA
#include "measure/tune_worker.h"
#endif

namespace twostep::cli {
namespace {

constexpr const char* kPlace = "twostep tune";
constexpr const char* kWorker = "tune-worker";

struct TuneOptions {
  std::string what = "gemm";
  std::string table;
  std::vector<std::string> cases;
  std::vector<std::string> only;
  std::string rows = "8,16,24,32,40,48,56,64";
  std::string device = "cuda:0";
  int candidates = 90;
  int time_limit_s = 0;
  bool resume = false;
  bool fresh = false;
};

// By name, layer, or the beginning of a name: "k3.1/tp8/q_b", "q_b", "k3.1/tp8".
bool matches(const GemmCase& item, const std::string& wanted) {
  return wanted == item.layer || wanted == item.name() || item.name().starts_with(wanted + "/");
}

Shape parse_only(const std::string& text) {
  try {
    return parse_shape(kPlace, text);
  } catch (const Error& error) {
    Status status = error.status();
    status.argument = "--only";
    fail(std::move(status));
  }
}

std::vector<std::pair<std::int64_t, std::int64_t>> shapes_of(const TuneOptions& options) {
  std::vector<std::pair<std::int64_t, std::int64_t>> shapes;
  for (const std::string& text : options.only) {
    const Shape shape = parse_only(text);
    shapes.emplace_back(shape.n, shape.k);
  }
  if (!shapes.empty()) return shapes;
  const std::vector<GemmCase> all = gemm_cases();
  if (options.cases.empty())
    for (const GemmCase& item : all) shapes.emplace_back(item.n, item.k);
  for (const std::string& wanted : options.cases) {
    const std::size_t before = shapes.size();
    for (const GemmCase& item : all)
      if (matches(item, wanted)) shapes.emplace_back(item.n, item.k);
    if (shapes.size() == before)
      fail(StatusCode::kInvalidArgument, kPlace, "--cases", wanted, "cases, layers or models: k3.1/tp8/q_b, q_b, k3.1");
  }
  return shapes;
}

void print_result(const TuneResult& result) {
  const TuneTask& task = result.task;
  fmt::print("{}x{} rows {}: ", task.n, task.k, task.rows);
  if (!result.failure.empty()) {
    fmt::print("FAILED: {} ({} tried, {} failed)\n", result.failure, result.tried, result.failed);
  } else {
    const Summary& best = result.finalists.front().time;
    fmt::print("{:.2f} us (spread {:.2f}), runner-up {:.2f}, cuBLAS {:.2f}, limit {:.2f}, {} tried, {} failed; {}\n",
               best.median, best.spread(), result.entry().runner_up_us, result.cublas.median, result.limit.median,
               result.tried, result.failed, to_string(result.finalists.front().tactic));
  }
  std::fflush(stdout);
}

// Kernels of the next task are compiled on the worker's host threads while the GPU times the present one.
class Run {
 public:
  Run(const TuneOptions& options, std::vector<TuneTask> tasks)
      : options_(options),
        table_(real_path(options.table)),
        all_(std::move(tasks)),
        client_(
            {"/proc/self/exe", kWorker, "--device", options.device, "--candidates", std::to_string(options.candidates)},
            kAnswerLimit),
        machine_(this_machine(kPlace)),
        facts_(client_.describe(machine_)),
        in_table_(table_keys(table_, machine_.device)),  // refuses another GPU's file before the state is touched
        state_(table_ + ".state", machine_,
               options.fresh    ? TuneStart::kFresh
               : options.resume ? TuneStart::kResume
                                : TuneStart::kNew,
               all_),
        tasks_(open_tasks(all_, state_, in_table_)) {
    merge_table(table_, machine_, {});  // refuses what cannot be written before anything is measured
  }

  int run() {
    Progress progress("tune");
    Ahead next = ahead(0);
    std::size_t done = 0;
    for (; done < tasks_.size() && !out_of_time(); ++done) {
      progress.update(done, tasks_.size(), left(done));
      const Ahead now = std::move(next);
      next = ahead(done + 1);
      const auto result = tune(
          tasks_[done], now,
          [&](const TuneTask& task, const std::string& what, bool full) { return time(task, what, full); }, state_,
          [&] { return out_of_time(); });
      if (!result) break;
      keep(*result);
    }
    progress.update(done, std::max<std::size_t>(tasks_.size(), 1));
    const bool complete = done == tasks_.size();
    report(done, complete && failed_ == 0 && state_.close(all_));
    return !complete ? kOutOfTime : failed_ == 0 ? 0 : 1;
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Ahead = std::map<std::string, Tactic>;
  // Far above the slowest honest answer: operands of 7 GB are made, and a kernel compiled, in a few seconds.
  static constexpr std::chrono::seconds kAnswerLimit{30};
  static constexpr int kOutOfTime = 3;  // exit status

  Timed time(const TuneTask& task, const std::string& what, bool full) {
    Timed timed = client_.time(task, what, full);
    if (!timed.failure.empty())
      fmt::print("{}x{} rows {}: {} failed: {}\n", task.n, task.k, task.rows, what, timed.failure);
    return timed;
  }

  Ahead ahead(std::size_t index) {
    if (index >= tasks_.size()) return {};
    Ahead candidates = tune_candidates(tasks_[index], facts_, options_.candidates);
    std::vector<std::string> names;
    for (const auto& [name, tactic] : candidates)
      if (!state_.failed(tasks_[index], name)) names.push_back(name);
    client_.compile(tasks_[index], names);
    return candidates;
  }

  // The table first: what the state calls finished is in it.
  void keep(const TuneResult& result) {
    print_result(result);
    if (!result.failure.empty()) {
      ++failed_;
      return;
    }
    merge_table(table_, machine_, {result.entry()});
    state_.add(result);
    ++verdicts_[static_cast<std::size_t>(verdict_of(result.chain()))];
  }

  void report(std::size_t done, bool state_removed) const {
    fmt::print("{}, driver {}, NVRTC {}: {} of {} entries, {} of them now in {:.0f} s; worker started {} times\n",
               machine_.device, machine_.driver, machine_.nvrtc, all_.size() - tasks_.size() + done - failed_,
               all_.size(), done - failed_, elapsed(), client_.starts());
    fmt::print("early chain against cuBLAS: {} wins, {} ties, {} losses; {} tactics failed{}\n", verdicts_[0],
               verdicts_[1], verdicts_[2], state_.num_failed(), state_removed ? "" : ": " + table_ + ".state");
    if (done < tasks_.size()) fmt::print("out of time: go on with --resume\n");
  }

  double elapsed() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  bool out_of_time() const { return options_.time_limit_s > 0 && elapsed() >= options_.time_limit_s; }
  std::string left(std::size_t done) const {
    std::string text = fmt::format("{}/{}", done, tasks_.size());
    if (done == 0) return text;
    const int seconds =
        static_cast<int>(elapsed() / static_cast<double>(done) * static_cast<double>(tasks_.size() - done));
    return text + fmt::format(", {}:{:02} left", seconds / 60, seconds % 60);
  }

  const TuneOptions& options_;
  const Clock::time_point start_ = Clock::now();
  const std::string table_;
  const std::vector<TuneTask> all_;
  TuneClient client_;
  Machine machine_;
  DeviceFacts facts_;
  const std::set<TableKey> in_table_;
  TuneState state_;
  std::vector<TuneTask> tasks_;  // of all_, those to be measured
  std::size_t failed_ = 0;
  std::array<int, 4> verdicts_{};  // by Verdict
};

int device_index(const std::string& text) {
  const auto index = text.starts_with("cuda:") ? parse_number(std::string_view(text).substr(5), 0) : std::nullopt;
  if (!index || *index > 255)
    fail(StatusCode::kInvalidArgument, kPlace, "--device", text, "cuda:0, cuda:1, ..", "only GPUs have tactics");
#if TWOSTEP_CUDA
  return parse_device(kPlace, text).value();
#else
  fail(StatusCode::kUnavailable, kPlace, "--device", text, "a GPU", "this build has no GPU rooms");
#endif
}

void add_worker(CLI::App& app, int& exit_code) {
  auto* worker = app.add_subcommand(kWorker, "Times tactics for twostep tune")->group("");  // not for people
  auto options = std::make_shared<TuneOptions>();
  worker->add_option("--device", options->device)->required();
  worker->add_option("--candidates", options->candidates)->required();
  worker->callback([options, &exit_code] {
    const int index = device_index(options->device);
#if TWOSTEP_CUDA
    exit_code = serve_tuning(index, options->candidates, std::cin, std::cout) ? 0 : 1;
#else
    (void)index;
#endif
  });
}

}  // namespace

void add_tune(CLI::App& app, int& exit_code) {
  auto* tune = app.add_subcommand("tune", "Search the tactics of a GPU and write its table");
  auto options = std::make_shared<TuneOptions>();
  tune->add_option("what", options->what, "gemm")->check(CLI::IsMember({"gemm"}))->capture_default_str();
  tune->add_option("--gpu-table", options->table, "The table: tactics/<gpu>.json; other entries are kept")->required();
  auto* cases = tune->add_option("--cases", options->cases, "Cases, layers or models: k3.1/tp8,q_b; default: all")
                    ->delimiter(',')
                    ->allow_extra_args(false);
  tune->add_option("--only", options->only, "N,K in place of cases; may be repeated")
      ->allow_extra_args(false)
      ->excludes(cases);
  tune->add_option("--rows", options->rows, "Row counts, each for its bucket of 8")->capture_default_str();
  tune->add_option("--device", options->device, "cuda:0, cuda:1, ..")->capture_default_str();
  tune->add_option("--candidates", options->candidates, "Tactics that are tried for one entry")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  tune->add_option("--time-limit", options->time_limit_s,
                   "Seconds after which the run ends, with exit status 3 and what is finished; 0: none")
      ->check(CLI::Range(0, 86400))
      ->capture_default_str();
  auto* resume = tune->add_flag("--resume", options->resume, "Go on where a run on this table stopped");
  tune->add_flag("--fresh", options->fresh, "Measure all again")->excludes(resume);
  tune->callback([options, &exit_code] {
    if (options->table.empty())
      fail(StatusCode::kInvalidArgument, kPlace, "--gpu-table", "\"\"", "a file: tactics/<gpu>.json");
    std::vector<TuneTask> tasks = tune_tasks(shapes_of(*options), parse_rows(kPlace, options->rows));
    device_index(options->device);  // last: it asks the driver
    exit_code = Run(*options, std::move(tasks)).run();
  });
  add_worker(app, exit_code);
}

}  // namespace twostep::cli
