#include "measure/draft_step.h"

#include <map>
#include <tuple>

#include "measure/bench_gemm.h"

namespace twostep {
namespace {

// What one linear keeps on the device for the whole step.
struct Resident {
  DeviceBuffer weight, x, out;
  TensorView x_view, out_view;
  std::unique_ptr<DraftGemm> plan;
};

Resident upload(const MeasureDevice& device, const DraftStepLinear& linear) {
  const auto bytes = static_cast<std::size_t>(linear.n * linear.k) * 2;
  Resident made;
  made.weight = DeviceBuffer(bytes);
  made.x = DeviceBuffer(linear.x.size() * 2);
  made.out = DeviceBuffer(static_cast<std::size_t>(linear.rows * linear.n) * 2);
  std::vector<std::uint16_t> host(bytes / 2);
  linear.read_weight(host);
  copy_to_device(made.weight.data(), host.data(), bytes, device.stream());
  copy_to_device(made.x.data(), linear.x.data(), made.x.bytes(), device.stream());
  made.x_view = TensorView::matrix(made.x.data(), linear.rows, linear.k, device.device());
  made.out_view = TensorView::matrix(made.out.data(), linear.rows, linear.n, device.device());
  return made;
}

// From one launch of a graph to all of them.
Summary times(Summary one, double launches) {
  one.median *= launches;
  one.p10 *= launches;
  one.p90 *= launches;
  return one;
}

}  // namespace

DraftStepResult measure_draft_step_cuda(
    const DraftStepInputs& inputs, int device_index,
    const std::function<void(const std::string& stage, std::size_t done, std::size_t all)>& progress) {
  const MeasureDevice device(device_index);
  const std::size_t count = inputs.linears.size();
  const Replays replays{3, inputs.iterations};
  DraftStepResult result;
  result.machine = inputs.machine;
  result.linears.resize(count);

  std::vector<Resident> residents;
  for (const DraftStepLinear& linear : inputs.linears) {
    progress("load " + linear.name, residents.size(), count);
    residents.push_back(upload(device, linear));
  }
  for (std::size_t i = 0; i < count; ++i) {
    const DraftStepLinear& linear = inputs.linears[i];
    progress("prepare " + linear.name, i, count);
    Resident& resident = residents[i];
    resident.plan =
        std::make_unique<DraftGemm>(TensorView::matrix(resident.weight.data(), linear.n, linear.k, device.device()));
    result.linears[i].kind = resident.plan->prepare(linear.rows, device.stream());
    result.linears[i].why = resident.plan->why(linear.rows);
    TWOSTEP_CUDA_CHECK(cuMemsetD8Async(resident.out.address(), 0xff, resident.out.bytes(),
                                       static_cast<CUstream>(device.stream().handle)),
                       "measure.draft_step");
    resident.plan->run(resident.x_view, resident.out_view, device.stream());
    result.linears[i].out.resize(resident.out.bytes() / 2);
    copy_to_host(result.linears[i].out.data(), resident.out.data(), resident.out.bytes(), device.stream());
  }

  // The weights of a step are many times L2: each is cold when its turn comes.
  ChainTimer step(device, static_cast<int>(count));
  const auto launches = static_cast<double>(count);
  const auto run = [&](int i) {
    const Resident& resident = residents[static_cast<std::size_t>(i)];
    resident.plan->run(resident.x_view, resident.out_view, device.stream());
  };
  std::vector<Piece> pieces;
  for (const Resident& resident : residents)
    pieces.push_back({resident.weight.data(), static_cast<std::int64_t>(resident.weight.bytes())});
  result.step = times(step.early(run, replays), launches);
  result.step_read_limit = times(early_read_limit(step, pieces, replays), launches);

  // Layers share shapes, and a time does not depend on the values: each shape is measured once.
  std::map<std::tuple<std::int64_t, std::int64_t, int>, BenchRow> measured;
  for (std::size_t i = 0; i < count; ++i) {
    const DraftStepLinear& linear = inputs.linears[i];
    progress("time " + linear.name, i, count);
    const std::tuple key{linear.n, linear.k, linear.rows};
    auto at = measured.find(key);
    if (at == measured.end()) {
      GemmBench bench(device, linear.n, linear.k, linear.rows);
      at = measured.emplace(key, bench.measure(linear.rows, false, replays)).first;
      if (measured.size() == 1) bench.describe_under_load(result.machine);
    }
    const BenchRow& row = at->second;
    DraftStepLinearResult& of_linear = result.linears[i];
    of_linear.tactic = row.tactic;
    of_linear.key = row.key;
    of_linear.time = row.chains.front().ours;
    of_linear.read_limit = row.chains.front().limit;
    of_linear.fallback = row.baseline;
    of_linear.fallback_time = row.chains.front().baseline;
  }
  progress("done", count, count);
  return result;
}

}  // namespace twostep
