#include "measure/tune_worker.h"

#include <fmt/format.h>

#include <condition_variable>
#include <deque>
#include <future>
#include <istream>
#include <limits>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <thread>
#include <utility>

#include "core/check.h"
#include "gemm/warp.h"
#include "kda/plan.h"
#include "measure/bench_gemm.h"
#include "measure/bench_kda.h"
#include "measure/tune_gemm.h"
#include "measure/tune_kda.h"

namespace twostep {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kPlace = "measure.tune_worker";
constexpr Replays kScreening{1, 5};

// Compiles on host threads into the memory of the jit room, where load_kernel finds the build or waits for it.
class CompileAhead {
 public:
  CompileAhead() {
    constexpr unsigned kForTiming = 2;  // cores left to the thread that times
    const unsigned cores = std::thread::hardware_concurrency();
    for (unsigned i = 0; i < (cores > kForTiming ? cores - kForTiming : 1); ++i)
      threads_.emplace_back([this] { work(); });
  }
  CompileAhead(const CompileAhead&) = delete;
  CompileAhead& operator=(const CompileAhead&) = delete;
  ~CompileAhead() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void add(CompileRequest request) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(request));
    }
    wake_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return ending_ || !queue_.empty(); });
      if (ending_) return;
      const CompileRequest request = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      try {
        (void)build_cubin(request);
      } catch (const std::exception&) {  // shows again, with its sentence, when the kernel is loaded
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<CompileRequest> queue_;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

// The GPU's side of a TuneKind.
class TuneBench {
 public:
  virtual ~TuneBench() = default;
  virtual CompileRequest build(const std::string& key, const std::string& tactic) = 0;
  virtual void check(const std::string& /*key*/, const std::vector<std::string>& /*tactics*/) {}
  virtual Summary time(const TuneRequest& request) = 0;
};

template <class Tactics>
const auto& named(const Tactics& tactics, const std::string& name) {
  if (const auto found = tactics.find(name); found != tactics.end()) return found->second;
  fail(StatusCode::kInvalidArgument, kPlace, "tactic", name, "a candidate of this task and GPU");
}

class GemmTuneBench final : public TuneBench {
 public:
  GemmTuneBench(const MeasureDevice& device, int candidates) : device_(device), candidates_(candidates) {
    throw_if_error(cublas_status());
  }

  CompileRequest build(const std::string& key, const std::string& tactic) override {
    const GemmTask task = gemm_task(key);
    return compile_request(warp_kernel_text(task.rows, task.n, task.k, tactic_of(task, tactic)), device_.facts().arch);
  }

  Summary time(const TuneRequest& request) override {
    const GemmTask task = gemm_task(request.key);
    if (!bench_ || bench_->n() != task.n || bench_->k() != task.k) {
      bench_.reset();  // its memory is needed for the next
      bench_.emplace(device_, task.n, task.k, kMaxWarpRows);
    }
    const Replays replays = request.full ? Replays{} : kScreening;
    if (request.time == kTimeLimit) return bench_->limit(replays);
    if (request.time == kTimeCublas) return bench_->cublas(task.rows, replays);
    return bench_->tactic(tactic_of(task, request.time), task.rows, replays);
  }

 private:
  const Tactic& tactic_of(const GemmTask& task, const std::string& name) {
    auto [of_task, missing] = tactics_.try_emplace(task);
    if (missing) of_task->second = gemm_candidates(task, device_.facts(), candidates_);
    return named(of_task->second, name);
  }

  const MeasureDevice& device_;
  const int candidates_;
  std::map<GemmTask, std::map<std::string, Tactic>> tactics_;
  std::optional<GemmBench> bench_;
};

// All request counts share the caches, kernels and checked values of their (mode, q, H).
class KdaTuneBench final : public TuneBench {
 public:
  KdaTuneBench(const MeasureDevice& device, std::vector<std::int64_t> requests)
      : device_(device), requests_(std::move(requests)) {}

  CompileRequest build(const std::string& key, const std::string& tactic) override {
    const KdaTask task = kda_task(key);
    if (!benched(task)) judge_ahead(task);
    KdaProblem problem = problem_of(bench_options(task));
    problem.tactic = tactic_of(task, tactic);
    return kda_compile_request(kda_kernel_text(kda_build_of(problem, device_.facts())), device_.facts().arch);
  }

  void check(const std::string& key, const std::vector<std::string>& names) override {
    const KdaTask task = kda_task(key);
    std::vector<KdaTactic> tactics;
    for (const std::string& name : names) tactics.push_back(tactic_of(task, name));
    bench_of(task).check(tactics);
  }

  Summary time(const TuneRequest& request) override {
    constexpr std::int64_t kFullBytes = 8'000'000'000;  // 2 ms: 64 launches of the longest step would be 230
    constexpr std::int64_t kScreeningBytes = 2'000'000'000;
    constexpr double kHopeless = 1.5;  // times the best screening of the task: no second sample
    const KdaTask task = kda_task(request.key);
    KdaBench& bench = bench_of(task);
    bench.prepare(tactic_of(task, request.time), task.requests);
    if (request.full) return bench.measure(task.requests, {}, kFullBytes).time;
    if (std::exchange(screened_, request.key) != request.key) best_us_ = std::numeric_limits<double>::infinity();
    const Summary time = bench.measure(task.requests, {1, 3, kHopeless * best_us_}, kScreeningBytes).time;
    best_us_ = std::min(best_us_, time.median);
    return time;
  }

 private:
  using Judge = std::shared_ptr<const KdaJudge>;
  static KdaTask shared_of(const KdaTask& task) { return {task.mode, task.tokens, task.heads, 0}; }

  bool benched(const KdaTask& task) const { return bench_ && shared_of(task) == benched_; }
  KdaBench& bench_of(const KdaTask& task) {
    if (!benched(task)) {
      const std::shared_future<Judge> made = judge_ahead(task);
      judges_.erase(shared_of(task));  // one that failed is made anew at the next request
      const Judge judge = made.get();
      bench_.reset();  // its memory is needed for the next
      bench_.emplace(device_, bench_options(task), requests_, 0, judge);
      benched_ = shared_of(task);
    }
    return *bench_;
  }
  // FP64 results take the host a second: they are made while the GPU times the keys before.
  std::shared_future<Judge>& judge_ahead(const KdaTask& task) {
    const auto [found, missing] = judges_.try_emplace(shared_of(task));
    if (missing)
      found->second = std::async(std::launch::async, [problem = judged_problem(bench_options(task))] {
                        return std::make_shared<const KdaJudge>(problem);
                      }).share();
    return found->second;
  }
  KdaTactic tactic_of(const KdaTask& task, const std::string& name) const {
    return named(kda_candidates(task, device_.facts()), name);
  }

  const MeasureDevice& device_;
  const std::vector<std::int64_t> requests_;
  std::map<KdaTask, std::shared_future<Judge>> judges_;  // of what comes next, without request counts
  KdaTask benched_;
  std::optional<KdaBench> bench_;
  std::string screened_;  // the task whose tactics are being screened
  double best_us_ = 0;    // of them
};

class TuneServer {
 public:
  explicit TuneServer(const TuneWorkerOptions& options) : device_(options.ordinal) {
    if (options.requests.empty()) bench_ = std::make_unique<GemmTuneBench>(device_, options.candidates);
    else bench_ = std::make_unique<KdaTuneBench>(device_, options.requests);
  }

  Json answer(const TuneRequest& request) {
    for (const std::string& name : request.compile) {
      CompileRequest build = bench_->build(request.key, name);
      if (asked_.insert(build.text).second) ahead_.add(std::move(build));
    }
    if (!request.check.empty()) bench_->check(request.key, request.check);
    if (!request.compile.empty() || !request.check.empty()) return Json::object();
    if (!request.time.empty()) return summary_json(bench_->time(request));
    const DeviceFacts& facts = device_.facts();
    Machine machine;
    device_.describe(machine);
    return {{"device", facts.name},
            {"driver", machine.driver},
            {"nvrtc", machine.nvrtc},
            {"arch", facts.arch},
            {"sm_count", facts.sm_count},
            {"smem_per_block", facts.smem_per_block},
            {"smem_per_sm", facts.smem_per_sm}};
  }

  void synchronize() const { device_.synchronize(); }

 private:
  const MeasureDevice device_;
  std::unique_ptr<TuneBench> bench_;
  std::set<std::string> asked_;  // texts of kernels: tasks may share them
  CompileAhead ahead_;
};

}  // namespace

bool serve_tuning(const TuneWorkerOptions& options, std::istream& in, std::ostream& out) {
  std::optional<TuneServer> server;
  for (std::string line; std::getline(in, line);) {
    TuneRequest request;
    Json answer;
    try {
      request = tune_request(line);
      if (!server) server.emplace(options);
      answer = server->answer(request);
    } catch (const std::exception& error) {
      answer = {{"failure", error.what()}};
      if (const auto* known = dynamic_cast<const Error*>(&error)) answer["code"] = code_name(known->code());
      try {
        if (server) server->synchronize();
      } catch (const Error&) {
        answer["lost"] = true;  // no later time would be true
      }
    }
    answer["id"] = request.id;
    out << answer.dump(-1, ' ', true, Json::error_handler_t::replace) << std::endl;
    if (answer.contains("lost")) return false;
  }
  return true;
}

}  // namespace twostep
