#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "core/check.h"
#include "core/log.h"
#include "core/timer.h"
#include "drafter/linears.h"
#include "drafter/reference.h"
#include "io/checkpoint.h"
#include "io/synth.h"
#include "measure/bench_host.h"
#include "twostep/gemm.h"
#if TWOSTEP_CUDA
#include "measure/draft_step.h"
#endif

namespace twostep::cli {
namespace {

constexpr const char* kPlace = "draft";

struct DraftOptions {
  std::string checkpoint;
  std::int64_t requests = 1;
  std::int64_t draft_tokens = 7;
  int tp = 1;
  int rank = 0;
  std::string device = "auto";
  std::uint64_t seed = 1;
  std::string json;
  int iterations = 5;
};

// One line of the table. Times in microseconds; none: not measured on this device.
struct Row {
  StepLinear linear;
  std::int64_t rows = 0;
  Kind kind = Kind::kCpu;
  std::string why;
  double time = 0;
  double read_limit = 0;
  std::optional<double> fallback;
  LinearError error;
};

struct Step {
  std::string device;
  std::string protocol;
  std::vector<Row> rows;
  double time = 0;
  double read_limit = 0;
};

std::vector<std::uint16_t> make_input(const StepLinear& linear, std::int64_t rows, std::uint64_t seed) {
  std::vector<std::uint16_t> x(static_cast<std::size_t>(rows * linear.k));
  fill("input." + linear.label(), seed, 0, ValueKind::kFeature, 0, x);
  return x;
}

LinearError compare(const StepLinear& linear, const Checkpoint& checkpoint, std::int64_t rows,
                    std::span<const std::uint16_t> x, std::span<const std::uint16_t> out) {
  return compare_linear(rows, linear.n, linear.k, x, out,
                        [&](std::int64_t row, std::span<std::uint16_t> to) { read_rows(linear, checkpoint, row, to); });
}

// ---- CPU

// One linear at a time, so that the memory of the largest weight is enough.
Step run_on_cpu(const std::vector<StepLinear>& linears, const Checkpoint& checkpoint, const DraftOptions& options) {
  const HostStream stream;
  const double bytes_per_us = stream.rate();
  Step step;
  step.device = "cpu";
  step.protocol = "each linear alone, caches filled with other memory before each sample; step = sum";
  Progress progress("draft");
  std::size_t done = 0;
  for (const auto& linear : linears) {
    progress.update(done++, linears.size(), linear.label());
    Row row;
    row.linear = linear;
    row.rows = rows_of(linear.rows, options.requests, options.draft_tokens);
    const auto m = static_cast<int>(row.rows);
    std::vector<std::uint16_t> weight(static_cast<std::size_t>(linear.n * linear.k));
    read_weight(linear, checkpoint, weight);
    std::vector<std::uint16_t> x = make_input(linear, row.rows, options.seed);
    std::vector<std::uint16_t> out(static_cast<std::size_t>(row.rows * linear.n), 0x7fc0);  // NaN
    DraftGemm gemm(TensorView::matrix(weight.data(), linear.n, linear.k));
    row.kind = gemm.prepare(m);
    row.why = gemm.why(m);
    const auto x_view = TensorView::matrix(x.data(), row.rows, linear.k);
    const auto out_view = TensorView::matrix(out.data(), row.rows, linear.n);
    std::vector<double> samples;
    for (int i = 0; i <= options.iterations; ++i) {
      stream.read();
      samples.push_back(time_host(0, 1, [&] { gemm.run(x_view, out_view); }).median);
    }
    row.time = summarize(std::move(samples), 1).median;
    row.read_limit = static_cast<double>(linear.weight_bytes()) / bytes_per_us;
    row.error = compare(linear, checkpoint, row.rows, x, out);
    step.time += row.time;
    step.read_limit += row.read_limit;
    step.rows.push_back(std::move(row));
  }
  progress.update(done, linears.size());
  return step;
}

// ---- GPU

#if TWOSTEP_CUDA
Step run_on_cuda(const std::vector<StepLinear>& linears, const Checkpoint& checkpoint, const DraftOptions& options,
                 int device_index) {
  DraftStepInputs inputs;
  inputs.iterations = options.iterations;
  for (const auto& linear : linears) {
    const std::int64_t rows = rows_of(linear.rows, options.requests, options.draft_tokens);
    inputs.linears.push_back({linear.label(), linear.n, linear.k, static_cast<int>(rows),
                              make_input(linear, rows, options.seed),
                              [&](std::span<std::uint16_t> to) { read_weight(linear, checkpoint, to); }});
  }
  Progress progress("draft");
  const DraftStepResult result = measure_draft_step_cuda(
      inputs, device_index,
      [&](const std::string& stage, std::size_t done, std::size_t all) { progress.update(done, all, stage); });
  Step step;
  step.device = result.device;
  step.protocol = "graph replays over cold weights; step = all linears in one graph";
  step.time = result.step_us;
  step.read_limit = result.step_read_limit_us;
  for (std::size_t i = 0; i < linears.size(); ++i) {
    const DraftStepLinearResult& measured = result.linears[i];
    Row row{linears[i],
            inputs.linears[i].rows,
            measured.kind,
            measured.why,
            measured.microseconds,
            measured.read_limit_us,
            std::nullopt,
            {}};
    if (measured.cublas_us > 0) row.fallback = measured.cublas_us;
    row.error = compare(linears[i], checkpoint, row.rows, inputs.linears[i].x, measured.out);
    step.rows.push_back(std::move(row));
  }
  return step;
}
#endif

Step run_on_device(const std::vector<StepLinear>& linears, const Checkpoint& checkpoint, const DraftOptions& options) {
  if ([[maybe_unused]] const auto index = parse_device(kPlace, resolve_device(options.device))) {
#if TWOSTEP_CUDA
    return run_on_cuda(linears, checkpoint, options, *index);
#endif
  }
  return run_on_cpu(linears, checkpoint, options);
}

// ---- Output

double bytes_of(const Step& step) {
  double bytes = 0;
  for (const auto& row : step.rows) bytes += static_cast<double>(row.linear.weight_bytes());
  return bytes;
}

void print_table(const Step& step, const DraftOptions& options) {
  const bool gpu = step.device != "cpu";
  if (!gpu && options.device == "auto") fmt::print("no GPU is used: `twostep info` says why\n");
  const double unit = gpu ? 1e-6 : 1e-3;  // bytes per microsecond to TB/s or GB/s
  fmt::print("device {}, {} requests, {} draft tokens, rank {} of {}, seed {}\n{}\n", step.device, options.requests,
             options.draft_tokens, options.rank, options.tp, options.seed, step.protocol);
  fmt::print("{:<20} {:>7} {:>6} {:>5} {:<7} {:>10} {:>7} {:>6} {:>9} {:>9} {:>6} {:>12}  {}\n", "linear", "N", "K",
             "rows", "kind", "us", gpu ? "TB/s" : "GB/s", "limit", "fallback", "rel norm", "bound", "columns", "why");
  std::vector<std::string> sentences;  // each reason once, below the table
  for (const auto& row : step.rows) {
    std::string note;
    if (!row.why.empty()) {
      const auto known = std::find(sentences.begin(), sentences.end(), row.why);
      note = fmt::format("[{}]", known - sentences.begin() + 1);
      if (known == sentences.end()) sentences.push_back(row.why);
    }
    fmt::print("{:<20} {:>7} {:>6} {:>5} {:<7} {:>10.2f} {:>7.2f} {:>5.0f}% {:>9} {:>9.2e} {:>6.2f} {:>12}  {}{}\n",
               row.linear.label(), row.linear.n, row.linear.k, row.rows, kind_name(row.kind), row.time,
               static_cast<double>(row.linear.weight_bytes()) / row.time * unit, 100 * row.read_limit / row.time,
               row.fallback ? fmt::format("{:.2f}x", *row.fallback / row.time) : "-", row.error.relative_norm,
               row.error.worst_of_bound, fmt::format("{}/{}", row.error.columns, row.linear.n), note,
               row.error.ok() ? "" : " FAILED");
  }
  for (std::size_t i = 0; i < sentences.size(); ++i) fmt::print("[{}] {}\n", i + 1, sentences[i]);
  fmt::print("step: {:.2f} MB, {:.1f} us, {:.2f} {}, {:.0f}% of the read limit {:.1f} us\n", bytes_of(step) * 1e-6,
             step.time, bytes_of(step) / step.time * unit, gpu ? "TB/s" : "GB/s", 100 * step.read_limit / step.time,
             step.read_limit);
  fmt::print(
      "limit: time to read the weight alone, as a share of the time taken. fallback: its time over ours.\n"
      "rel norm at most 2.0e-3 and bound at most 1.00, against FP64, on the columns given.\n");
}

nlohmann::ordered_json to_json(const Step& step, const DraftOptions& options) {
  nlohmann::ordered_json out = {{"device", step.device},
                                {"protocol", step.protocol},
                                {"checkpoint", options.checkpoint},
                                {"requests", options.requests},
                                {"draft_tokens", options.draft_tokens},
                                {"tp", options.tp},
                                {"rank", options.rank},
                                {"seed", options.seed},
                                {"iterations", options.iterations},
                                {"linears", nlohmann::ordered_json::array()}};
  for (const auto& row : step.rows) {
    nlohmann::ordered_json item = {{"name", row.linear.label()},
                                   {"n", row.linear.n},
                                   {"k", row.linear.k},
                                   {"m", row.rows},
                                   {"rows", rows_name(row.linear.rows)},
                                   {"kind", kind_name(row.kind)},
                                   {"why", row.why},
                                   {"bytes", row.linear.weight_bytes()},
                                   {"us", row.time},
                                   {"gb_per_s", static_cast<double>(row.linear.weight_bytes()) / row.time * 1e-3},
                                   {"read_limit_us", row.read_limit},
                                   {"fallback_us", nullptr},
                                   {"relative_norm", row.error.relative_norm},
                                   {"worst_of_bound", row.error.worst_of_bound},
                                   {"columns_compared", row.error.columns},
                                   {"ok", row.error.ok()}};
    if (row.fallback) item["fallback_us"] = *row.fallback;
    out["linears"].push_back(std::move(item));
  }
  out["step"] = {{"bytes", bytes_of(step)}, {"us", step.time}, {"read_limit_us", step.read_limit}};
  return out;
}

void check_options(const DraftOptions& options, const DrafterConfig& config) {
  const auto within = [](const char* name, std::int64_t value, std::int64_t min, std::int64_t max) {
    if (value < min || value > max)
      fail(StatusCode::kInvalidArgument, kPlace, name, std::to_string(value), fmt::format("{} to {}", min, max));
  };
  within("requests", options.requests, 1, 512);
  within("draft-tokens", options.draft_tokens, 1, std::min<std::int64_t>(16, config.max_position_embeddings - 1));
  within("iterations", options.iterations, 1, 10000);
  if (config.block_size) within("draft-tokens", options.draft_tokens, 1, *config.block_size);
  if (!config.block_size && options.draft_tokens > 7)
    log_warn(fmt::format("{}: draft-tokens = {}; the config has no block_size; drafters are trained for up to 7",
                         kPlace, options.draft_tokens));
}

int run_draft(const DraftOptions& options) {
  const Checkpoint checkpoint = Checkpoint::open(options.checkpoint);
  check_options(options, checkpoint.config());
  const std::vector<StepLinear> linears = draft_linears(checkpoint.config(), options.tp, options.rank);
  for (const auto& linear : linears)  // a missing tensor is refused before minutes of work
    for (const auto& part : linear.parts) (void)checkpoint.tensor(part.tensor);
  std::ofstream json;
  if (!options.json.empty()) {
    json.open(options.json);
    if (!json) fail(StatusCode::kInvalidArgument, kPlace, "json", options.json, "a file that can be written");
  }

  const Step step = run_on_device(linears, checkpoint, options);
  print_table(step, options);
  if (json.is_open() && !(json << to_json(step, options).dump(2) << '\n').flush())
    fail(StatusCode::kUnavailable, kPlace, "json", options.json, "a disk with room");
  const auto failed = std::count_if(step.rows.begin(), step.rows.end(), [](const Row& r) { return !r.error.ok(); });
  if (failed > 0)
    fmt::print(stderr, "twostep: draft: {} of {} linears FAILED the comparison\n", failed, step.rows.size());
  return failed == 0 ? 0 : 1;
}

}  // namespace

void add_draft(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<DraftOptions>();
  CLI::App* command = app.add_subcommand("draft", "run, time and compare the linears of one draft step");
  command->add_option("--checkpoint", options->checkpoint, "folder with config.json and safetensors")->required();
  command->add_option("--requests", options->requests, "requests in the step")->capture_default_str();
  command->add_option("--draft-tokens", options->draft_tokens, "drafted tokens per request")->capture_default_str();
  command->add_option("--tp", options->tp, "ranks that share the weights")->capture_default_str();
  command->add_option("--rank", options->rank, "the rank to act as")->capture_default_str();
  command->add_option("--device", options->device, "auto, cpu or cuda:0")->capture_default_str();
  command->add_option("--seed", options->seed, "of the inputs")->capture_default_str();
  command->add_option("--json", options->json, "file for the same table as JSON");
  command->add_option("--iterations", options->iterations, "timed runs of each linear")->capture_default_str();
  command->callback([options, &exit_code] { exit_code = run_draft(*options); });
}

}  // namespace twostep::cli
