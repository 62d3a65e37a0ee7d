#include "measure/tune_worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <istream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <ostream>
#include <thread>

#include "core/check.h"
#include "gemm/cublas.h"
#include "gemm/warp.h"
#include "measure/chain.h"
#include "measure/tune.h"
#include "measure/values_cuda.h"

namespace twostep {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kPlace = "measure.tune_worker";
constexpr std::uint64_t kSeed = 1;
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

// Rotating operands of one shape, and what is timed on them in the early chain.
class TuneBench {
 public:
  TuneBench(const MeasureDevice& device, std::int64_t n, std::int64_t k)
      : device_(device),
        n_(n),
        k_(k),
        ring_(plan_ring(2 * n * k)),
        values_(device, n, k, kMaxWarpRows),
        more_weights_(static_cast<std::size_t>(ring_.weights - 1) * static_cast<std::size_t>(n * k) * 2),
        x_(static_cast<std::size_t>(ring_.weights * kMaxWarpRows * k) * 2),
        out_(static_cast<std::size_t>(ring_.weights * kMaxWarpRows * n) * 2),
        timer_(device, ring_.launches) {
    values_.set_data(Data::kNormal, kSeed);
    weights_.push_back(values_.weight());
    for (int i = 1; i < ring_.weights; ++i) {
      auto* data = static_cast<std::uint16_t*>(more_weights_.data()) + (i - 1) * n * k;
      device.fill(data, n, k, k, operand_base("weight", kSeed + static_cast<std::uint64_t>(i)), Data::kNormal,
                  weight_scale(k));
      weights_.push_back(TensorView::matrix(data, n, k, device.device()));
    }
    device.fill(x_.data(), ring_.weights * kMaxWarpRows, k, k, operand_base("x", kSeed), Data::kNormal, x_scale());
    device.synchronize();
  }

  // Values first: a wrong kernel has no speed.
  Summary time(const Tactic& tactic, int rows, Replays replays) {
    std::vector<PreparedWarpSplitK> plans;  // a plan for each weight: a plan that is rebound does not load early
    for (const TensorView& weight : weights_) plans.emplace_back(weight, std::map<int, Tactic>{{rows, tactic}});
    const ValueErrors errors = values_.judge(
        [&](const TensorView& x, const TensorView& out, Stream stream) { plans.front().run(x, out, stream); }, rows,
        packed_placement(n_, k_));
    if (auto rule = broken_rule(errors, Data::kNormal); !rule.empty())
      fail(StatusCode::kInternal, kPlace, "values", rule, "values within 1.4");
    return timer_.early(rotate(rows, [&](std::size_t i, const TensorView& x, const TensorView& out,
                                         Stream stream) { plans[i].run(x, out, stream); }),
                        replays);
  }

  Summary cublas(int rows, Replays replays) {
    std::vector<Weight> weights;
    for (const TensorView& view : weights_) weights.push_back(check_weight(view, kPlace));
    if (!cublas_) cublas_.emplace(device_.ordinal(), weights.front(), Options{}.workspace_limit);
    cublas_->prepare(rows, weights.front());
    cublas_->make_workspace(device_.stream());
    Counters counters;
    const Summary summary = timer_.early(
        rotate(rows, [&](std::size_t i, const TensorView& x, const TensorView& out,
                         Stream stream) { cublas_->run(weights[i], x, out, stream, true, true, counters); }),
        replays);
    if (counters.workspace_misses > 0)
      fail(StatusCode::kOutOfMemory, kPlace, "workspace", "none", "memory for cuBLAS as a plan has it");
    return summary;
  }

  Summary limit(Replays replays) {
    std::vector<Piece> pieces;
    for (const TensorView& weight : weights_) pieces.push_back({weight.data, 2 * n_ * k_});
    if (limit_.kept == 0) limit_ = early_read_limit(timer_, pieces, replays);  // the same for all row counts
    return limit_;
  }

  bool serves(const TuneTask& task) const { return task.n == n_ && task.k == k_; }

 private:
  template <class Product>
  ChainTimer::Enqueue rotate(int rows, Product product) const {
    return [this, rows, product](int launch) {
      const int i = launch % ring_.weights;
      auto* x = static_cast<std::uint16_t*>(x_.data()) + i * kMaxWarpRows * k_;
      auto* out = static_cast<std::uint16_t*>(out_.data()) + i * kMaxWarpRows * n_;
      product(static_cast<std::size_t>(i), TensorView::matrix(x, rows, k_, device_.device()),
              TensorView::matrix(out, rows, n_, device_.device()), device_.stream());
    };
  }

  const MeasureDevice& device_;
  std::int64_t n_, k_;
  Ring ring_;
  CudaCase values_;  // its weight is the first of the ring
  DeviceBuffer more_weights_, x_, out_;
  std::vector<TensorView> weights_;
  std::optional<CublasGemm> cublas_;
  ChainTimer timer_;
  Summary limit_;
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
    if (!bench_ || !bench_->serves(request.task)) {
      bench_.reset();  // its memory is needed for the next
      bench_.emplace(device_, request.task.n, request.task.k);
    }
    const Replays replays = request.full ? Replays{} : kScreening;
    if (request.time == kTimeLimit) return bench_->limit(replays);
    if (request.time == kTimeCublas) return bench_->cublas(request.task.rows, replays);
    return bench_->time(tactic_of(request.task, request.time), request.task.rows, replays);
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
  std::optional<TuneBench> bench_;
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
