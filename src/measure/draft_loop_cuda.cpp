#include "measure/draft_loop_cuda.h"

#include <algorithm>
#include <deque>
#include <numeric>

namespace twostep {
namespace {

constexpr std::int64_t kBallast = std::int64_t{512} << 20;
constexpr int kPasses = 12;  // 1.4 ms on an H200: longer than a host takes to enqueue a call

class CudaMachine final : public DraftMachine {
 public:
  explicit CudaMachine(const MeasureDevice& device) : device_(device), ballast_(kBallast) {}

  Device device() const override { return device_.device(); }
  Stream stream() const override { return device_.stream(); }
  void* allocate(std::size_t bytes) override {
    const DeviceBuffer& made = memory_.emplace_back(std::max<std::size_t>(bytes, 1));
    TWOSTEP_CUDA_CHECK(cuMemsetD8Async(made.address(), 0, made.bytes(), static_cast<CUstream>(stream().handle)),
                       "measure.draft");
    return made.data();
  }
  void write(void* to, const void* host, std::size_t bytes) override { copy_to_device(to, host, bytes, stream()); }
  void read(void* host, const void* from, std::size_t bytes) override { copy_to_host(host, from, bytes, stream()); }

  void begin() override {
    for (int pass = 0; pass < kPasses; ++pass) device_.read(kReaders[1], false, false, ballast_.data(), kBallast);
    marks_ = 0;
    mark();
  }
  void mark() override {
    if (marks_ == events_.size()) events_.emplace_back();
    events_[marks_++].record(stream());
  }
  std::vector<double> between_marks() override {
    std::vector<double> times;
    for (std::size_t i = 1; i < marks_; ++i) times.push_back(events_[i].since(events_[i - 1]));
    return times;
  }

 private:
  const MeasureDevice& device_;
  DeviceBuffer ballast_;
  std::vector<DeviceBuffer> memory_;
  std::deque<Event> events_;  // made once, used by every call
  std::size_t marks_ = 0;
};

std::int64_t sum_of(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

}  // namespace

std::unique_ptr<DraftMachine> cuda_machine(const MeasureDevice& device) {
  return std::make_unique<CudaMachine>(device);
}

DraftGraphs time_draft_graphs(const MeasureDevice& device, DraftLoop& loop, const DraftLoopOptions& options,
                              Machine& machine, Replays replays) {
  observe_stages(loop.drafter(), nullptr);  // events of a capture are no events
  const auto pieces_of = [&](bool ingest) {
    return draft_pieces(model_of(loop.drafter()), loop.drafter().config().mla_use_output_gate, ingest, options.requests,
                        options.context + options.draft_tokens, markov_reads_of(loop.drafter()));
  };
  const std::vector<std::int64_t> draft = pieces_of(false), ingest = pieces_of(true);
  DraftGraphs out;
  out.draft_bytes = static_cast<double>(sum_of(draft));
  out.ingest_bytes = static_cast<double>(sum_of(ingest));
  const DeviceBuffer memory(static_cast<std::size_t>(std::max(sum_of(draft), sum_of(ingest))));

  using Call = DraftLoop::Call;
  const auto call = [&](Call one) { return [&loop, one] { loop.enqueue(one); }; };
  const auto step = [&] {
    for (const Call one : {Call::kDraft, Call::kVerify, Call::kIngest}) loop.enqueue(one);
  };
  const auto reads = [&](const Reader& reader, const std::vector<std::int64_t>& pieces) {
    return [&device, &memory, &pieces, reader] {
      const auto* at = static_cast<const std::byte*>(memory.data());
      for (std::size_t i = 0; i < pieces.size(); at += pieces[i++]) device.read(reader, true, i > 0, at, pieces[i]);
    };
  };
  std::vector<std::function<void()>> enqueues{call(Call::kDraft), call(Call::kIngest), call(Call::kVerify), step};
  const std::size_t own = enqueues.size();
  for (const Reader& reader : kReaders)
    if (device.fits(reader)) {
      enqueues.push_back(reads(reader, ingest));
      enqueues.push_back(reads(reader, draft));
    }
  {
    const Graph graph(device.stream(), step);
    out.launches = graph.num_nodes();
    out.programmatic = graph.num_programmatic_edges();
    for (int i = 0; i < 10; ++i) graph.launch(device.stream());  // what runs while the clocks are read
    device.describe(machine);
    device.synchronize();
  }
  const std::vector<Summary> times = time_in_turn(device, enqueues, replays);
  out.draft = times[0];
  out.ingest = times[1];
  out.verify = times[2];
  out.step = times[3];
  out.ingest_limit = times[own];
  out.draft_limit = times[own + 1];
  for (std::size_t i = own; i < times.size(); i += 2) {
    if (times[i].median < out.ingest_limit.median) out.ingest_limit = times[i];
    if (times[i + 1].median < out.draft_limit.median) out.draft_limit = times[i + 1];
  }
  return out;
}

}  // namespace twostep
