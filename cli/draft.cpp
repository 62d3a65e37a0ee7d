#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/seed.h"
#include "core/check.h"
#include "core/log.h"
#include "core/timer.h"
#include "drafter/linears.h"
#include "drafter/reference.h"
#include "io/checkpoint.h"
#include "io/partial_file.h"
#include "io/synth.h"
#include "measure/bench_host.h"
#include "measure/row.h"
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
  std::string seed_text = "1";
  std::uint64_t seed = 1;  // of seed_text
  std::string json;
  int iterations = 5;
};

// One line of the table. Times in microseconds; kept = 0: no samples of its own, or not measured on this device.
struct Row {
  StepLinear linear;
  std::int64_t rows = 0;
  Kind kind = Kind::kCpu;
  std::string why;
  std::string tactic, key;  // empty where no kernel of ours ran
  Summary time;
  Summary read_limit;
  std::string fallback;  // library and version; empty: none
  Summary fallback_time;
  LinearError error;
};

struct Step {
  std::string device;
  Machine machine;
  std::string protocol;
  std::vector<Row> rows;
  Summary time;
  Summary read_limit;
};

std::string command_of(const DraftOptions& options) {
  return fmt::format(
      "twostep draft --checkpoint {} --requests {} --draft-tokens {} --tp {} --rank {} --device {} --seed {} "
      "--iterations {}",
      options.checkpoint, options.requests, options.draft_tokens, options.tp, options.rank, options.device,
      options.seed, options.iterations);
}

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

void load_weight(const StepLinear& linear, const Checkpoint& checkpoint, std::span<std::uint16_t> to) {
  read_weight(linear, checkpoint, to);
  require_finite(linear, to);
}

// ---- CPU

// One linear at a time, so that the memory of the largest weight is enough.
Step run_on_cpu(const std::vector<StepLinear>& linears, const Checkpoint& checkpoint, const DraftOptions& options) {
  const HostStream stream;
  const double bytes_per_us = stream.rate();
  Step step;
  step.device = "cpu";
  step.machine = this_machine(command_of(options));
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
    load_weight(linear, checkpoint, weight);
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
    row.time = summarize(std::move(samples), 1);
    row.read_limit.median = static_cast<double>(linear.weight_bytes()) / bytes_per_us;
    row.error = compare(linear, checkpoint, row.rows, x, out);
    step.time.median += row.time.median;
    step.read_limit.median += row.read_limit.median;
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
  inputs.machine = this_machine(command_of(options));
  for (const auto& linear : linears) {
    const std::int64_t rows = rows_of(linear.rows, options.requests, options.draft_tokens);
    inputs.linears.push_back({linear.label(), linear.n, linear.k, static_cast<int>(rows),
                              make_input(linear, rows, options.seed),
                              [&](std::span<std::uint16_t> to) { load_weight(linear, checkpoint, to); }});
  }
  Progress progress("draft");
  const DraftStepResult result = measure_draft_step_cuda(
      inputs, device_index,
      [&](const std::string& stage, std::size_t done, std::size_t all) { progress.update(done, all, stage); });
  Step step;
  step.device = result.machine.device;
  step.machine = result.machine;
  step.protocol = "graph replays over cold weights; step = all linears in one graph";
  step.time = result.step;
  step.read_limit = result.step_read_limit;
  for (std::size_t i = 0; i < linears.size(); ++i) {
    const DraftStepLinearResult& measured = result.linears[i];
    Row row{linears[i],
            inputs.linears[i].rows,
            measured.kind,
            measured.why,
            measured.tactic,
            measured.key,
            measured.time,
            measured.read_limit,
            measured.fallback,
            measured.fallback_time,
            {}};
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
               row.linear.label(), row.linear.n, row.linear.k, row.rows, kind_name(row.kind), row.time.median,
               static_cast<double>(row.linear.weight_bytes()) / row.time.median * unit,
               100 * row.read_limit.median / row.time.median,
               row.fallback.empty() ? "-" : fmt::format("{:.2f}x", row.fallback_time.median / row.time.median),
               row.error.relative_norm, row.error.worst_of_bound, fmt::format("{}/{}", row.error.columns, row.linear.n),
               note, row.error.ok() ? "" : " FAILED");
  }
  for (std::size_t i = 0; i < sentences.size(); ++i) fmt::print("[{}] {}\n", i + 1, sentences[i]);
  fmt::print("step: {:.2f} MB, {:.1f} us, {:.2f} {}, {:.0f}% of the read limit {:.1f} us\n", bytes_of(step) * 1e-6,
             step.time.median, bytes_of(step) / step.time.median * unit, gpu ? "TB/s" : "GB/s",
             100 * step.read_limit.median / step.time.median, step.read_limit.median);
  fmt::print(
      "limit: time to read the weight alone, as a share of the time taken. fallback: its time over ours.\n"
      "bound at most 1.00 and, from {} outputs on, rel norm at most 2.0e-3, against FP64, on the columns given.\n",
      LinearError::kNormElements);
}

// "us" is the median; the rest only where there were samples.
void add_time(nlohmann::ordered_json& out, const std::string& prefix, const Summary& time) {
  out[prefix + "us"] = time.median;
  if (time.kept == 0) return;
  out[prefix + "p10_us"] = time.p10;
  out[prefix + "p90_us"] = time.p90;
  out[prefix + "kept"] = time.kept;
  out[prefix + "dropped"] = time.dropped;
}

nlohmann::ordered_json to_json(const Row& row) {
  nlohmann::ordered_json out = {{"name", row.linear.label()},
                                {"n", row.linear.n},
                                {"k", row.linear.k},
                                {"m", row.rows},
                                {"dtype", "bfloat16"},
                                {"rows", rows_name(row.linear.rows)},
                                {"kind", kind_name(row.kind)},
                                {"tactic", row.tactic},
                                {"key", row.key},
                                {"why", row.why},
                                {"bytes", row.linear.weight_bytes()}};
  add_time(out, "", row.time);
  out["gb_per_s"] = static_cast<double>(row.linear.weight_bytes()) / row.time.median * 1e-3;
  add_time(out, "read_limit_", row.read_limit);
  out["fallback"] = row.fallback;
  if (row.fallback.empty()) out["fallback_us"] = nullptr;
  else add_time(out, "fallback_", row.fallback_time);
  out["relative_norm"] = row.error.relative_norm;
  out["worst_of_bound"] = row.error.worst_of_bound;
  out["columns_compared"] = row.error.columns;
  out["elements_compared"] = row.error.elements;
  out["ok"] = row.error.ok();
  return out;
}

nlohmann::ordered_json to_json(const Step& step, const DraftOptions& options) {
  nlohmann::ordered_json out = {{"origin", origin_json(step.machine)},
                                {"machine", machine_json(step.machine)},
                                {"device", step.device},
                                {"protocol", step.protocol},
                                {"checkpoint", options.checkpoint},
                                {"requests", options.requests},
                                {"draft_tokens", options.draft_tokens},
                                {"tp", options.tp},
                                {"rank", options.rank},
                                {"seed", options.seed},
                                {"iterations", options.iterations},
                                {"linears", nlohmann::ordered_json::array()}};
  for (const auto& row : step.rows) out["linears"].push_back(to_json(row));
  out["step"]["bytes"] = bytes_of(step);
  add_time(out["step"], "", step.time);
  add_time(out["step"], "read_limit_", step.read_limit);
  return out;
}

// Opened before minutes of work, so that a folder that cannot be written is refused at once. The result of an earlier
// run stays until the new one is whole. What is no regular file (/dev/stdout) is written in place.
class JsonFile {
 public:
  explicit JsonFile(const std::string& path) : path_(path) {
    if (path.empty()) return;
    std::error_code error;
    const auto kind = std::filesystem::status(path, error).type();
    if (kind == std::filesystem::file_type::regular || kind == std::filesystem::file_type::not_found) {
      partial_ = std::make_unique<PartialFile>(path, kPlace);
    } else {
      plain_.open(path);
      if (!plain_) fail(StatusCode::kInvalidArgument, kPlace, "json", path, "a file that can be written");
    }
  }
  void write(const std::string& text) {
    if (partial_) {
      partial_->write(std::as_bytes(std::span(text)));
      partial_->publish();
    } else if (plain_.is_open() && !(plain_ << text).flush()) {
      fail(StatusCode::kUnavailable, kPlace, "json", path_, "a file that can be written");
    }
  }

 private:
  std::string path_;
  std::unique_ptr<PartialFile> partial_;
  std::ofstream plain_;
};

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
  JsonFile json(options.json);

  const Step step = run_on_device(linears, checkpoint, options);
  print_table(step, options);
  // A path need not be UTF-8; JSON must be.
  json.write(to_json(step, options).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
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
  command->add_option("--seed", options->seed_text, "of the inputs")->capture_default_str();
  command->add_option("--json", options->json, "file for the same table as JSON");
  command->add_option("--iterations", options->iterations, "timed runs of each linear")->capture_default_str();
  command->callback([options, &exit_code] {
    options->seed = parse_seed(kPlace, options->seed_text);
    exit_code = run_draft(*options);
  });
}

}  // namespace twostep::cli
