#include "measure/tune_worker.h"

#include <fmt/format.h>

#include <condition_variable>
#include <deque>
#include <istream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <ostream>
#include <thread>

#include "core/check.h"
#include "gemm/warp.h"
#include "measure/bench_gemm.h"
#include "measure/tune.h"

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

class TuneServer {
 public:
  TuneServer(int ordinal, int candidates) : device_(ordinal), candidates_(candidates) {}

  Json answer(const TuneRequest& request) {
    if (!request.compile.empty()) {
      for (const std::string& name : request.compile)
        ahead_.add(compile_request(
            warp_kernel_text(request.task.rows, request.task.n, request.task.k, tactic_of(request.task, name)),
            device_.facts().arch));
      return Json::object();
    }
    if (!request.time.empty()) return summary_json(time(request));
    throw_if_error(cublas_status());
    const DeviceFacts& facts = device_.facts();
    Machine machine;
    device_.describe(machine);
    return {{"device", facts.name},
            {"driver", machine.driver},
            {"nvrtc", machine.nvrtc},
            {"cublas", cublas_version()},
            {"arch", facts.arch},
            {"sm_count", facts.sm_count},
            {"smem_per_block", facts.smem_per_block},
            {"smem_per_sm", facts.smem_per_sm}};
  }

  void synchronize() const { device_.synchronize(); }

 private:
  Summary time(const TuneRequest& request) {
    const TuneTask& task = request.task;
    if (!bench_ || bench_->n() != task.n || bench_->k() != task.k) {
      bench_.reset();  // its memory is needed for the next
      bench_.emplace(device_, task.n, task.k, kMaxWarpRows);
    }
    const Replays replays = request.full ? Replays{} : kScreening;
    if (request.time == kTimeLimit) return bench_->limit(replays);
    if (request.time == kTimeCublas) return bench_->cublas(task.rows, replays);
    return bench_->tactic(tactic_of(task, request.time), task.rows, replays);
  }

  const Tactic& tactic_of(const TuneTask& task, const std::string& name) {
    auto [named, missing] = named_.try_emplace(task);
    if (missing) named->second = tune_candidates(task, device_.facts(), candidates_);
    if (const auto found = named->second.find(name); found != named->second.end()) return found->second;
    fail(StatusCode::kInvalidArgument, kPlace, "tactic", name, "a candidate of this shape and GPU");
  }

  const MeasureDevice device_;
  const int candidates_;
  std::map<TuneTask, std::map<std::string, Tactic>> named_;
  std::optional<GemmBench> bench_;
  CompileAhead ahead_;
};

}  // namespace

bool serve_tuning(int ordinal, int candidates, std::istream& in, std::ostream& out) {
  std::optional<TuneServer> server;
  for (std::string line; std::getline(in, line);) {
    TuneRequest request;
    Json answer;
    try {
      request = tune_request(line);
      if (!server) server.emplace(ordinal, candidates);
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
