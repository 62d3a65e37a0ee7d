#include "measure/draft_layer.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/check.h"
#include "gemm/cublas.h"
#include "gemm/tactics.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "measure.draft_layer";
constexpr std::uint64_t kSeed = 1;

// What the linears read and write, for the life of a measurement.
struct Operands {
  std::vector<DeviceBuffer> weights;
  std::vector<DeviceBuffer> buffers;  // of chain_buffers
  std::vector<ChainBuffer> sizes;
  std::vector<TensorView> weight, x, out;  // by linear
};

Operands make_operands(const MeasureDevice& device, const DraftLayerInputs& inputs) {
  Operands made;
  made.sizes = chain_buffers(inputs.linears);
  for (std::size_t i = 0; i < made.sizes.size(); ++i) {
    const ChainBuffer& size = made.sizes[i];
    const DeviceBuffer& buffer = made.buffers.emplace_back(static_cast<std::size_t>(size.rows * size.columns) * 2);
    device.fill(buffer.data(), size.rows, size.columns, size.columns, operand_base("x", kSeed + i), Data::kNormal,
                x_scale());
  }
  for (std::size_t i = 0; i < inputs.linears.size(); ++i) {
    const ChainLinear& linear = inputs.linears[i];
    const DeviceBuffer& weight = made.weights.emplace_back(static_cast<std::size_t>(linear.n * linear.k) * 2);
    const std::string name = fmt::format("rank {} {}", inputs.rank, linear.name);
    device.fill(weight.data(), linear.n, linear.k, linear.k, operand_base(name.c_str(), kSeed), Data::kNormal,
                weight_scale(linear.k));
    made.weight.push_back(TensorView::matrix(weight.data(), linear.n, linear.k, device.device()));
    made.x.push_back(
        TensorView::matrix(made.buffers[i].data(), linear.rows, linear.k, device.device(), made.sizes[i].columns));
    made.out.push_back(TensorView::matrix(made.buffers[i + 1].data(), linear.rows, linear.n, device.device(),
                                          made.sizes[i + 1].columns));
  }
  device.synchronize();
  return made;
}

// Judges each linear on what it read in a replay of the whole step.
ValueErrors check_values(const MeasureDevice& device, const std::vector<ChainLinear>& linears, const Operands& operands,
                         std::vector<DraftGemm>& plans) {
  static_assert(kPoison == 0xffff);
  std::int64_t most = 0;
  for (std::size_t i = 0; i < linears.size(); ++i) {
    TWOSTEP_CUDA_CHECK(
        cuMemsetD2D8Async(operands.buffers[i + 1].address(),
                          static_cast<std::size_t>(operands.sizes[i + 1].columns) * 2, 0xff,
                          static_cast<std::size_t>(linears[i].n) * 2, static_cast<std::size_t>(linears[i].rows),
                          static_cast<CUstream>(device.stream().handle)),
        kPlace);
    most = std::max(most, linears[i].rows * linears[i].n);
  }
  const Graph graph(device.stream(), [&] {
    for (std::size_t i = 0; i < linears.size(); ++i) plans[i].run(operands.x[i], operands.out[i], device.stream());
  });
  graph.launch(device.stream());

  const DeviceBuffer sum(static_cast<std::size_t>(most) * sizeof(double)), magnitude(sum.bytes());
  ValueErrors all;
  for (std::size_t i = 0; i < linears.size(); ++i) {
    const ChainLinear& linear = linears[i];
    const std::int64_t pitch = operands.sizes[i + 1].columns;
    device.reference(operands.x[i].data, operands.sizes[i].columns, operands.weight[i].data, linear.k, linear.rows,
                     linear.n, linear.k, static_cast<double*>(sum.data()), static_cast<double*>(magnitude.data()));
    ValueErrors errors =
        device.compare(operands.out[i].data, (linear.rows - 1) * pitch + linear.n, 0, pitch, linear.rows, linear.n,
                       linear.k, static_cast<const double*>(sum.data()), static_cast<const double*>(magnitude.data()));
    errors.outside = 0;  // what lies beside the result is an input of the next linear
    if (const std::string rule = broken_rule(errors, Data::kNormal); !rule.empty())
      fail(StatusCode::kInternal, kPlace, linear.name, rule, "values within 1.4", "run twostep check gemm");
    all.worst = std::max(all.worst, errors.worst);
    all.norm = std::max(all.norm, errors.norm);
    all.elements += errors.elements;
    all.wrong_bits += errors.wrong_bits;
    all.nans += errors.nans;
  }
  return all;
}

LinearChoice choice_of(const DraftGemm& plan, int rows) {
  LinearChoice choice;
  choice.kind = plan.kind(rows);
  choice.why_code = why_name(plan.why_code(rows));
  choice.why = plan.why(rows);
  if (choice.kind == Kind::kWarp) {
    choice.tactic = to_string(plan.tactic(rows));
    choice.key = plan.keys().front().hash;  // one bucket is prepared
  }
  return choice;
}

// Enqueues the product of linear i, on the result of the one before.
using Product = std::function<void(std::size_t i, bool first_of_unit)>;

struct Times {
  Chain chain;
  Summary ordinary;
};

Times time_chain(const MeasureDevice& device, const DraftChain& chain, bool isolated, const Product& ours,
                 const Product& cublas, const std::vector<TensorView>& weights, const std::vector<ChainLinear>& linears,
                 Replays replays) {
  const auto graph_of = [&](Product product) {
    return [&device, &chain, isolated, product = std::move(product)] {
      for (const LinearRange& unit : chain.units)
        for (std::size_t i = unit.first; i < unit.first + unit.count; ++i) {
          const bool first = i == unit.first;
          if (first || isolated) device.plain();
          product(i, first);
        }
    };
  };
  // The ordinary kernels alone, ours, the readers, cuBLAS.
  std::vector<std::function<void()>> enqueues{graph_of([](std::size_t, bool) {}), graph_of(ours)};
  const std::size_t first_reader = enqueues.size();
  for (const Reader& reader : kReaders)
    if (device.fits(reader))
      enqueues.push_back(graph_of([&](std::size_t i, bool first) {
        device.read(reader, !isolated, !isolated && !first, weights[i].data,
                    static_cast<std::int64_t>(linears[i].bytes()));
      }));
  const std::size_t last_reader = enqueues.size();
  if (cublas) enqueues.push_back(graph_of(cublas));

  std::vector<Summary> times = time_in_turn(device, enqueues, replays);
  const double ordinary = times.front().median;
  for (std::size_t g = 0; g < times.size(); ++g)
    for (double* us : {&times[g].median, &times[g].p10, &times[g].p90})
      *us = (*us - (g == 0 ? 0 : ordinary)) / static_cast<double>(chain.units.size());
  const auto limit = std::min_element(times.begin() + static_cast<std::ptrdiff_t>(first_reader),
                                      times.begin() + static_cast<std::ptrdiff_t>(last_reader),
                                      [](const Summary& a, const Summary& b) { return a.median < b.median; });
  return {{isolated ? "isolated" : "early", times[1], cublas ? times.back() : Summary{}, *limit}, times.front()};
}

}  // namespace

std::vector<DraftChainRow> measure_draft_layer(
    const MeasureDevice& device, const DraftLayerInputs& inputs, Machine& machine,
    const std::function<void(const std::string& stage, std::size_t done, std::size_t all)>& progress, Replays replays) {
  const std::vector<ChainLinear>& linears = inputs.linears;
  const std::vector<DraftChain> chains = draft_chains(linears);
  const std::size_t all = linears.size() + 2 * chains.size();
  std::size_t done = 0;
  progress("weights", done, all);
  const Operands operands = make_operands(device, inputs);

  const bool has_cublas = cublas_status().ok();
  Options cublas_only;
  cublas_only.warp = false;
  std::vector<DraftGemm> ours, cublas;
  for (std::size_t i = 0; i < linears.size(); ++i) {
    progress("prepare " + linears[i].name, done++, all);
    ours.emplace_back(operands.weight[i]).prepare(linears[i].rows, device.stream());
    if (has_cublas) cublas.emplace_back(operands.weight[i], cublas_only).prepare(linears[i].rows, device.stream());
  }
  DraftChainRow row;
  row.model = inputs.model;
  row.tp = inputs.tp;
  row.rank = inputs.rank;
  row.rows = inputs.rows;
  row.values = check_values(device, linears, operands, ours);
  if (has_cublas) row.baseline = "cuBLASLt " + cublas_version();

  constexpr int kPasses = 20;
  for (int pass = 0; pass < kPasses; ++pass)  // what runs while the clocks are read
    for (const DeviceBuffer& weight : operands.weights)
      device.read(kReaders[1], false, false, weight.data(), static_cast<std::int64_t>(weight.bytes()));
  device.describe(machine);
  device.synchronize();

  const auto product_of = [&](std::vector<DraftGemm>& plans) -> Product {
    if (plans.empty()) return {};
    return [&](std::size_t i, bool) { plans[i].run(operands.x[i], operands.out[i], device.stream()); };
  };
  std::vector<DraftChainRow> rows;
  for (const DraftChain& chain : chains) {
    const LinearRange& unit = chain.units.front();
    row.name = chain.name;
    row.units = chain.units.size();
    row.linears.assign(linears.begin() + static_cast<std::ptrdiff_t>(unit.first),
                       linears.begin() + static_cast<std::ptrdiff_t>(unit.first + unit.count));
    row.choices.clear();
    for (std::size_t i = unit.first; i < unit.first + unit.count; ++i)
      row.choices.push_back(choice_of(ours[i], linears[i].rows));
    row.graph_bytes = 0;
    for (const LinearRange& range : chain.units) row.graph_bytes += bytes_of(linears, range);
    for (const bool isolated : {false, true}) {
      progress("time " + chain.name, done++, all);
      const Times times =
          time_chain(device, chain, isolated, product_of(ours), product_of(cublas), operands.weight, linears, replays);
      row.chain = times.chain;
      row.ordinary = times.ordinary;
      row.ordinary_kernels = isolated ? unit.count : 1;
      rows.push_back(row);
    }
  }
  progress("done", all, all);
  return rows;
}

}  // namespace twostep
