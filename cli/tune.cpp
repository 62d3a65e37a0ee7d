#include "measure/tune.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/kda_arguments.h"
#include "cli/progress.h"
#include "io/cases.h"
#include "measure/tune_gemm.h"
#include "measure/tune_kda.h"
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
  std::string device = "cuda:0";
  int time_limit_s = 0;
  bool resume = false;
  bool fresh = false;
  // Of the linears.
  std::vector<std::string> cases;
  std::vector<std::string> only;
  std::string rows = "8,16,24,32,40,48,56,64";
  int candidates = 90;
  // Of PreparedKda.
  KdaTuneKeys keys;
  std::string mode = "both";
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

TuneKind kind_of(TuneOptions& options) {
  if (options.what == "gemm")
    return gemm_kind(gemm_tasks(shapes_of(options), parse_rows(kPlace, options.rows)), options.candidates);
  if (options.mode != "both")
    options.keys.modes = {options.mode == "records" ? StateMode::kRecords : StateMode::kSlots};
  return kda_kind(options.keys);
}

void print_result(const TuneResult& result) {
  if (!result.failure.empty()) {
    fmt::print("{}: FAILED: {} ({} tried, {} failed)\n", result.task.name, result.failure, result.tried, result.failed);
  } else {
    const Finalist& best = result.best();
    fmt::print("{}: {:.2f} us (spread {:.2f}), runner-up {:.2f}, ", result.task.name, best.time.median,
               best.time.spread(), result.runner_up_us());
    for (const auto& [what, time] : result.references)
      fmt::print("{} {:.2f}, ", what == kTimeCublas ? "cuBLAS" : what, time.median);
    fmt::print("{} tried, {} failed; {}\n", result.tried, result.failed, best.tactic);
  }
  std::fflush(stdout);
}

std::vector<std::string> worker_of(const TuneOptions& options, const TuneKind& kind) {
  std::vector<std::string> command = {"/proc/self/exe", kWorker, "--device", options.device};
  command.insert(command.end(), kind.worker.begin(), kind.worker.end());
  return command;
}

// Kernels of a later task are compiled on the worker's host threads while the GPU times the present one.
class Run {
 public:
  Run(const TuneOptions& options, TuneKind kind)
      : options_(options),
        kind_(std::move(kind)),
        table_(real_path(options.table)),
        client_(worker_of(options, kind_), kind_.limit),
        machine_(this_machine(kPlace)),
        facts_(client_.describe(machine_)),
        in_table_(table_keys(table_, machine_.device, kind_.list)),  // refuses another GPU's file before the state
        state_(table_ + ".state", machine_,
               options.fresh    ? TuneStart::kFresh
               : options.resume ? TuneStart::kResume
                                : TuneStart::kNew,
               kind_.tasks),
        tasks_(open_tasks(kind_.tasks, state_, in_table_)) {
    merge_table(table_, machine_, kind_.list, {});  // refuses what cannot be written before anything is measured
  }

  int run() {
    Progress progress("tune");
    for (std::size_t i = 0; i < kind_.ahead; ++i) compile(i);
    std::size_t done = 0;
    for (; done < tasks_.size() && !out_of_time(); ++done) {
      progress.update(done, tasks_.size(), left(done));
      compile(done + kind_.ahead);
      check(done);
      const auto result = tune(
          tasks_[done], kind_.plan(tasks_[done], facts_),
          [&](const TuneTask& task, const std::string& what, bool full) { return time(task, what, full); }, state_,
          [&] { return out_of_time(); });
      if (!result) break;
      keep(*result);
    }
    progress.update(done, std::max<std::size_t>(tasks_.size(), 1));
    const bool complete = done == tasks_.size();
    report(done, complete && failed_ == 0 && state_.close(kind_.tasks));
    return !complete ? kOutOfTime : failed_ == 0 ? 0 : 1;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kOutOfTime = 3;  // exit status

  Timed time(const TuneTask& task, const std::string& what, bool full) {
    Timed timed = client_.time(task, what, full);
    if (!timed.failure.empty()) fmt::print("{}: {} failed: {}\n", task.name, what, timed.failure);
    return timed;
  }

  std::vector<std::string> tactics_of(const TuneTask& task) const {
    std::vector<std::string> names;
    for (const auto& [name, smem_bytes] : kind_.plan(task, facts_).candidates)
      if (!state_.failed(task, name)) names.push_back(name);
    return names;
  }

  void compile(std::size_t index) {
    if (index < tasks_.size()) client_.compile(tasks_[index], tactics_of(tasks_[index]));
  }

  // A tactic that ends the worker would end it for every task: once is enough.
  void check(std::size_t index) {
    if (!check_together_) return;
    const std::string failure = client_.check(tasks_[index], tactics_of(tasks_[index]));
    check_together_ = failure.empty();
    if (!check_together_) fmt::print("values are checked one by one from here on: {}\n", failure);
  }

  // The table first: what the state calls finished is in it.
  void keep(const TuneResult& result) {
    print_result(result);
    if (!result.failure.empty()) {
      ++failed_;
      return;
    }
    merge_table(table_, machine_, kind_.list, {kind_.entry(result, facts_)});
    state_.add(result);
    if (const auto cublas = result.references.find(kTimeCublas); cublas != result.references.end())
      ++verdicts_[static_cast<std::size_t>(verdict_of({"early", result.best().time, cublas->second, {}}))];
  }

  void report(std::size_t done, bool state_removed) const {
    const std::size_t all = kind_.tasks.size();
    fmt::print("{}, driver {}, NVRTC {}: {} of {} entries, {} of them now in {:.0f} s; worker started {} times\n",
               machine_.device, machine_.driver, machine_.nvrtc, all - tasks_.size() + done - failed_, all,
               done - failed_, elapsed(), client_.starts());
    if (options_.what == "gemm")
      fmt::print("early chain against cuBLAS: {} wins, {} ties, {} losses; ", verdicts_[0], verdicts_[1], verdicts_[2]);
    fmt::print("{} tactics failed{}\n", state_.num_failed(), state_removed ? "" : ": " + table_ + ".state");
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
  const TuneKind kind_;
  const std::string table_;
  TuneClient client_;
  Machine machine_;
  DeviceFacts facts_;
  const std::set<std::string> in_table_;
  TuneState state_;
  std::vector<TuneTask> tasks_;  // of the kind's, those to be measured
  bool check_together_ = kind_.check_together;
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
  struct Options {
    std::string device;
    int candidates = 0;
    std::vector<std::int64_t> requests;
  };
  auto options = std::make_shared<Options>();
  worker->add_option("--device", options->device)->required();
  worker->add_option("--candidates", options->candidates);
  worker->add_option("--requests", options->requests)->delimiter(',');
  worker->callback([options, &exit_code] {
    const int index = device_index(options->device);
#if TWOSTEP_CUDA
    exit_code = serve_tuning({index, options->candidates, options->requests}, std::cin, std::cout) ? 0 : 1;
#else
    (void)index;
#endif
  });
}

}  // namespace

void add_tune(CLI::App& app, int& exit_code) {
  auto* tune = app.add_subcommand("tune", "Search the tactics of a GPU and write its table");
  auto options = std::make_shared<TuneOptions>();
  tune->add_option("what", options->what, "gemm: the linears; kda: PreparedKda")
      ->check(CLI::IsMember({"gemm", "kda"}))
      ->capture_default_str();
  tune->add_option("--gpu-table", options->table, "The table: tactics/<gpu>.json; other entries are kept")->required();
  tune->add_option("--device", options->device, "cuda:0, cuda:1, ..")->capture_default_str();
  tune->add_option("--time-limit", options->time_limit_s,
                   "Seconds after which the run ends, with exit status 3 and what is finished; 0: none")
      ->check(CLI::Range(0, 86400))
      ->capture_default_str();
  auto* resume = tune->add_flag("--resume", options->resume, "Go on where a run on this table stopped");
  tune->add_flag("--fresh", options->fresh, "Measure all again")->excludes(resume);

  auto* gemm = tune->add_option_group("tune gemm");
  auto* cases = gemm->add_option("--cases", options->cases, "Cases, layers or models: k3.1/tp8,q_b; default: all")
                    ->delimiter(',')
                    ->allow_extra_args(false);
  gemm->add_option("--only", options->only, "N,K in place of cases; may be repeated")
      ->allow_extra_args(false)
      ->excludes(cases);
  gemm->add_option("--rows", options->rows, "Row counts, each for its bucket of 8")->capture_default_str();
  gemm->add_option("--candidates", options->candidates, "Tactics that are tried for one entry")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();

  auto* kda = tune->add_option_group("tune kda");
  KdaTuneKeys& keys = options->keys;
  add_list(*kda, "--heads", keys.heads, "Heads on this device", 1, kKdaMaxHeads)->allow_extra_args(false);
  add_list(*kda, "--requests", keys.requests, "Requests", 1, 4096)->allow_extra_args(false);
  add_list(*kda, "--tokens", keys.tokens, "Tokens of each request", 1, kKdaMaxTokens)->allow_extra_args(false);
  kda->add_option("--mode", options->mode, "State mode: slots, records, or both")
      ->check(CLI::IsMember({"slots", "records", "both"}))
      ->capture_default_str();

  tune->callback([options, gemm, kda, &exit_code] {
    // An option of the other kind would do nothing.
    if ((options->what == "gemm" ? kda : gemm)->count_all() > 0)
      throw CLI::ExcludesError("tune " + options->what,
                               "the options of " + std::string(options->what == "gemm" ? "kda" : "gemm"));
    if (options->table.empty())
      fail(StatusCode::kInvalidArgument, kPlace, "--gpu-table", "\"\"", "a file: tactics/<gpu>.json");
    TuneKind kind = kind_of(*options);
    device_index(options->device);  // last: it asks the driver
    exit_code = Run(*options, std::move(kind)).run();
  });
  add_worker(app, exit_code);
}

}  // namespace twostep::cli
