#include "measure/bench_kda.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "core/check.h"
#include "kda/tactics.h"

namespace twostep {
namespace {

std::int64_t l2_bytes(const MeasureDevice& device) {
  constexpr int kAttributeL2CacheSize = 38;
  CUdevice handle = 0;
  int bytes = 0;
  TWOSTEP_CUDA_CHECK(cuDeviceGet(&handle, device.ordinal()), "measure.l2");
  TWOSTEP_CUDA_CHECK(cuDeviceGetAttribute(&bytes, kAttributeL2CacheSize, handle), "measure.l2");
  return bytes;
}

}  // namespace

double kda_mix_rate(const MeasureDevice& device, double writes, Machine& machine) {
  constexpr std::int64_t kCall = 512 << 20;  // read and written by one launch: start and tail do not count
  constexpr int kRegions = 4, kLaunches = 16;
  const std::int64_t pieces = static_cast<std::int64_t>(kCall / (1 + writes)) / kReaderPiece;
  const std::int64_t read = pieces * kReaderPiece;
  const int whole = static_cast<int>(writes);
  const std::int64_t more = static_cast<std::int64_t>((writes - whole) * static_cast<double>(pieces)) * kReaderPiece;
  KdaCudaMemory memory(device);
  auto* pool = static_cast<std::byte*>(memory.allocate(kRegions * kCall));
  memory.fill(pool, kRegions * kCall / 2, operand_base("mix", 1), 1);
  const std::string arch = arch_name(device.facts().arch);
  ChainTimer timer(device, kLaunches);
  double best = 0;
  for (const Reader& mixer : kMixers) {
    if (!device.fits(mixer)) continue;
    const auto kernel = load_kernel(mix_limit_request(arch, mixer.stages), mixer.stages * kReaderPiece);
    Launch what;
    what.function = kernel->function;
    const bool vector = mixer.stages == 0;
    what.grid_x =
        static_cast<std::uint32_t>(vector ? read / kReaderPiece : mixer.ctas_per_sm * device.facts().sm_count);
    what.block = vector ? kMixVectorThreads : 32;
    what.smem_bytes = static_cast<std::uint32_t>(mixer.stages * kReaderPiece);
    const auto enqueue = [&](int i, bool in_place) {
      std::byte* from = pool + i % kRegions * kCall;
      std::byte* to = in_place ? from : from + read;
      std::int64_t bytes = read, once_more = more;
      int times = whole;
      void* arguments[] = {&from, &bytes, &to, &times, &once_more};
      what.programmatic = i > 0;
      launch(what, device.stream(), arguments);
    };
    for (const bool in_place : {false, true}) {
      const Summary time = timer.early([&](int i) { enqueue(i, in_place); });
      best = std::max(best, static_cast<double>(read * (1 + whole) + more) / time.median);
    }
    for (int i = 0; i < kLaunches; ++i) enqueue(0, false);  // what runs while the clocks are read
    device.describe(machine);
    device.synchronize();
  }
  return best;
}

KdaBench::KdaBench(const MeasureDevice& device, const KdaBenchOptions& options, std::vector<std::int64_t> requests,
                   double rate, std::shared_ptr<const KdaJudge> judge)
    : device_(device),
      options_(options),
      requests_(std::move(requests)),
      rate_(rate),
      memory_(device),
      layers_(memory_, options, requests_, l2_bytes(device), std::move(judge)) {}

void KdaBench::check(const std::vector<KdaTactic>& tactics) {
  constexpr std::size_t kThreads = 8;  // each has up to 1 GB of results on the host
  std::vector<KdaTactic> open;
  for (const KdaTactic& tactic : tactics)
    if (!layers_.judged(tactic)) open.push_back(tactic);
  std::atomic<std::size_t> next{0};
  std::mutex mutex;  // of layers_
  const auto work = [&] {
    for (std::size_t i = next++; i < open.size(); i = next++) {
      try {
        const ContextGuard context(device_.ordinal());
        const OwnedStream stream;
        KdaCudaMemory scratch(device_, stream.view());
        const KdaErrors errors = layers_.judge().judge(scratch, open[i]);
        const std::lock_guard lock(mutex);
        layers_.add_values(open[i], errors);
      } catch (const std::exception&) {  // shows again, with its sentence, when the tactic is prepared
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < std::min(kThreads, open.size()); ++t) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  device_.synchronize();  // throws where the context is lost
}

void KdaBench::prepare(const std::optional<KdaTactic>& tactic, std::optional<std::int64_t> requests) {
  forced_ = tactic.has_value();
  layers_.prepare(tactic, requests);
  device_.synchronize();
}

KdaRow KdaBench::measure(std::int64_t requests, Replays replays, std::int64_t bytes) {
  KdaRow row = layers_.row(requests);
  row.ring.launches = kda_launches(row.shape, row.ring, bytes);
  row.rate = rate_;
  const auto entry = kda_table_entry(options_.heads, {requests, options_.tokens}, device_.facts(), options_.mode());
  row.source = forced_ ? "forced" : entry && entry->tactic == row.tactic ? "table" : "rule";
  const ChainTimer timer(device_, row.ring.launches);
  row.time = timer.early([&](int launch) { layers_.run(requests, launch); }, replays);
  return row;
}

KdaSweep KdaBench::sweep(int finalists) {
  const std::vector<KdaTactic> tactics =
      valid_kda_tactics(options_.tokens, device_.facts(), kda_folded(options_.mode(), options_.conv_len));
  std::vector<KdaBuild> builds;
  for (const KdaTactic& tactic : tactics) {
    KdaProblem problem = problem_of(options_);
    problem.tactic = tactic;
    builds.push_back(kda_build_of(problem, device_.facts()));
  }
  compile_kda(builds, device_.facts());

  KdaSweep sweep;
  for (const KdaTactic& tactic : tactics) {
    try {
      prepare(tactic);
      for (const std::int64_t b : requests_) sweep.ranking[b].push_back(screen(b));
    } catch (const Error& error) {
      device_.synchronize();  // throws where the context is lost: no later time would be true
      sweep.failures.push_back({tactic, error.what()});
    }
  }
  const auto faster = [](const KdaRow& a, const KdaRow& b) { return a.time.median < b.time.median; };
  for (auto& [b, rows] : sweep.ranking) {
    std::stable_sort(rows.begin(), rows.end(), faster);
    const auto end = rows.begin() + std::min<std::ptrdiff_t>(finalists, std::ssize(rows));
    for (auto row = rows.begin(); row != end; ++row) {
      prepare(row->tactic);
      *row = measure(b);
    }
    std::stable_sort(rows.begin(), end, faster);
  }
  return sweep;
}

}  // namespace twostep
