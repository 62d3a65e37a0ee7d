#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <new>
#include <set>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/seed.h"
#include "io/cases.h"
#include "measure/check_gemm.h"
#if TWOSTEP_CUDA
#include "measure/values_cuda.h"
#endif

namespace twostep::cli {
namespace {

constexpr const char* kPlace = "twostep check gemm";

// Beside the models: one tile, tails of N and K, fewer K tiles than stages and slices, and what only the fallback
// takes.
constexpr Shape kOddShapes[] = {{16, 64},     {16, 128}, {32, 192}, {48, 320}, {80, 512},   {112, 1088}, {144, 8192},
                                {208, 16640}, {8, 128},  {17, 256}, {24, 129}, {100, 1000}, {6152, 128}};

struct CheckOptions {
  std::string device = "auto";
  std::vector<std::string> shapes;
  std::string rows;
  std::string data_text = "1";
  std::uint64_t data = 1;  // of data_text
  std::string name;
  bool quick = false;
  bool all_tactics = false;
};

std::vector<Shape> shapes_of(const CheckOptions& options) {
  std::vector<Shape> shapes;
  for (const std::string& text : options.shapes) shapes.push_back(parse_shape(kPlace, text));
  if (!shapes.empty()) return shapes;
  std::set<Shape> seen;
  for (const GemmCase& item : gemm_cases({{}, 0, options.name}))
    if (seen.insert({item.n, item.k}).second) shapes.push_back({item.n, item.k});
  if (shapes.empty())
    fail(StatusCode::kInvalidArgument, kPlace, "--case", options.name, "a case as k3/tp8/q_b, or a layer as q_b");
  if (options.name.empty()) shapes.insert(shapes.begin(), std::begin(kOddShapes), std::end(kOddShapes));
  return shapes;
}

// Makes the case of a shape on the chosen device. Holds what it needs of the device.
class Cases {
 public:
  explicit Cases(const std::optional<int>& device) {
#if TWOSTEP_CUDA
    if (device) device_ = std::make_unique<MeasureDevice>(*device);
#else
    (void)device;
#endif
  }
  std::unique_ptr<ValueCase> make(Shape shape, int max_rows) const {
#if TWOSTEP_CUDA
    if (device_) return std::make_unique<CudaCase>(*device_, shape.n, shape.k, max_rows);
#endif
    return make_host_case(shape.n, shape.k, max_rows);
  }

 private:
#if TWOSTEP_CUDA
  std::unique_ptr<MeasureDevice> device_;
#endif
};

void print_report(const CheckOptions& options, Shape shape, const CheckReport& report) {
  fmt::print("{:>7} x {:<6} {:>4} runs, {:>4} on warp, bound {:.2f}, norm {:.2e}: {}\n", shape.n, shape.k, report.runs,
             report.warp_runs, report.worst, report.norm,
             report.failures.empty() ? "ok" : fmt::format("{} FAILED", report.failures.size()));
  for (const CheckFailure& failure : report.failures)
    fmt::print("  {} data, {}: {}\n    {} --device {} --shape {},{} --rows {} --data {}\n", data_name(failure.data),
               failure.route, failure.sentence, kPlace, options.device, shape.n, shape.k, failure.m, options.data);
}

int check_gemm(const CheckOptions& options) {
  const std::optional<int> device = parse_device(kPlace, options.device);
  const Cases cases(device);
  const std::vector<Shape> shapes = shapes_of(options);
  // A CPU takes seconds for a large weight at 64 rows.
  constexpr std::int64_t kLargeOnCpu = 20'000'000;
  std::size_t failures = 0, skipped = 0, done = 0;
  int runs = 0;
  fmt::print("device {}, data {}: normal values within draft-gemm 1.4 (a) and (b), integers exact (c)\n",
             options.device, options.data);
  Progress progress("check");
  for (const Shape shape : shapes) {
    progress.update(done++, shapes.size(), fmt::format("{},{}", shape.n, shape.k));
    const bool quick = options.quick || (!device && shape.n * shape.k > kLargeOnCpu);
    const std::vector<int> rows =
        options.rows.empty() ? rows_to_check(shape.n, shape.k, quick) : parse_rows(kPlace, options.rows);
    std::unique_ptr<ValueCase> values;
    try {
      values = cases.make(shape, *std::max_element(rows.begin(), rows.end()));
    } catch (const std::bad_alloc&) {
    } catch (const Error& error) {
      if (error.code() != StatusCode::kOutOfMemory) throw;
    }
    if (!values) {
      fmt::print("{:>7} x {:<6} skipped: not enough memory\n", shape.n, shape.k);
      ++skipped;
      continue;
    }
    const CheckReport report = check_shape(*values, rows, options.data);
    print_report(options, shape, report);
    std::fflush(stdout);
    failures += report.failures.size();
    runs += report.runs;
  }
  progress.update(done, shapes.size());
  fmt::print("{} shapes, {} runs, {} failed, {} shapes skipped\n", shapes.size(), runs, failures, skipped);
  return failures == 0 && runs > 0 ? 0 : 1;
}

#if TWOSTEP_CUDA
// Those of the table that --shape, --case and --rows leave.
std::vector<TableEntry> entries_of(const CheckOptions& options, const DeviceFacts& facts) {
  std::vector<TableEntry> entries = table_entries(facts);
  if (entries.empty())
    fail(StatusCode::kUnsupported, kPlace, "--all-tactics", facts.name, "a GPU with a table",
         "write one by twostep tune and build again");
  if (!options.shapes.empty() || !options.name.empty()) {
    const std::vector<Shape> shapes = shapes_of(options);
    std::erase_if(entries, [&](const TableEntry& entry) {
      return std::find(shapes.begin(), shapes.end(), Shape{entry.n, entry.k}) == shapes.end();
    });
  }
  if (!options.rows.empty()) {
    const std::vector<int> rows = parse_rows(kPlace, options.rows);
    std::erase_if(entries, [&](const TableEntry& entry) {
      return std::find(rows.begin(), rows.end(), entry.rows) == rows.end();
    });
  }
  if (entries.empty())
    fail(StatusCode::kInvalidArgument, kPlace, "--shape, --case, --rows", "no entry",
         "entries of the table of this GPU", "twostep check gemm --all-tactics without them lists all");
  return entries;
}

void print_report(const CheckOptions& options, const TableEntry& entry, const CheckReport& report) {
  fmt::print("{:>7} x {:<6} rows {:>2}, {} runs, bound {:.2f}, norm {:.2e}: {}; {}\n", entry.n, entry.k, entry.rows,
             report.runs, report.worst, report.norm, report.failures.empty() ? "ok" : "FAILED",
             to_string(entry.tactic));
  for (const CheckFailure& failure : report.failures)
    fmt::print("  {} data, M = {}: {}\n", data_name(failure.data), failure.m, failure.sentence);
  if (!report.failures.empty())
    fmt::print("    {} --device {} --all-tactics --shape {},{} --rows {} --data {}\n", kPlace, options.device, entry.n,
               entry.k, entry.rows, options.data);
  std::fflush(stdout);
}

int check_tactics(const CheckOptions& options, int index) {
  const MeasureDevice device(index);
  const std::vector<TableEntry> entries = entries_of(options, device.facts());
  fmt::print("{}, data {}: normal values within draft-gemm 1.4 (a) and (b), integers exact (c)\n", device.facts().name,
             options.data);
  std::optional<CudaCase> values;
  std::size_t failed = 0, done = 0;
  Progress progress("check");
  for (const TableEntry& entry : entries) {
    progress.update(done++, entries.size(), fmt::format("{},{} rows {}", entry.n, entry.k, entry.rows));
    const bool same_shape = values && values->weight().shape[0] == entry.n && values->weight().shape[1] == entry.k;
    if (!same_shape) {
      values.reset();  // its memory is needed for the next
      values.emplace(device, entry.n, entry.k, kMaxWarpRows);
    }
    const CheckReport report =
        check_tactic(*values, rows_of_entry(entry), options.data, [&](int m, const Placement& placement) {
          PreparedWarpSplitK plan(values->weight(), {{m, entry.tactic}});
          return values->judge(
              [&](const TensorView& x, const TensorView& out, Stream stream) { plan.run(x, out, stream); }, m,
              placement);
        });
    print_report(options, entry, report);
    if (report.failures.empty()) continue;
    ++failed;
    device.synchronize();  // throws where the context is lost: no later entry could be right
  }
  progress.update(done, entries.size());
  fmt::print("{} entries, {} failed\n", entries.size(), failed);
  return failed == 0 ? 0 : 1;
}
#endif

int check_all_tactics(const CheckOptions& options) {
  if (const std::optional<int> index = parse_device(kPlace, options.device)) {
#if TWOSTEP_CUDA
    return check_tactics(options, *index);
#endif
  }
  fail(StatusCode::kUnsupported, kPlace, "--device", options.device, "a GPU for --all-tactics",
       "the CPU backend has no tactics; twostep info says why no GPU was found");
}

}  // namespace

void add_check(CLI::App& app, int& exit_code) {
  auto* check = app.add_subcommand("check", "Compare results with an FP64 reference");
  check->require_subcommand(1);
  add_check_kda(*check, exit_code);
  add_check_mailbox(*check, exit_code);
  auto* gemm = check->add_subcommand("gemm", "DraftGemm: every kind, row counts 1 to 65, odd layouts");
  auto options = std::make_shared<CheckOptions>();
  gemm->add_option("--device", options->device, "auto, cpu, cuda:0, ..")->capture_default_str();
  auto* shape = gemm->add_option("--shape", options->shapes, "N,K; may be repeated; default: all cases and odd shapes")
                    ->allow_extra_args(false);
  gemm->add_option("--case", options->name, "Only cases of this name or layer: k3.1/tp8/q_b, q_b")->excludes(shape);
  gemm->add_option("--rows", options->rows, "Row counts and ranges: 1,8,16-20");
  gemm->add_option("--data", options->data_text, "Seed of the operands and their layout")->capture_default_str();
  auto* quick = gemm->add_flag("--quick", options->quick, "Bucket edges alone");
  gemm->add_flag("--all-tactics", options->all_tactics,
                 "Each entry of this GPU's table of tactics by itself; --shape, --case and --rows choose entries")
      ->excludes(quick);
  gemm->callback([options, &exit_code] {
    options->data = parse_seed("twostep check gemm", options->data_text, "--data");
    options->device = resolve_device(options->device);
    exit_code = options->all_tactics ? check_all_tactics(*options) : check_gemm(*options);
  });
}

}  // namespace twostep::cli
