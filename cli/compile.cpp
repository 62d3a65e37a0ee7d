#include <CLI/CLI.hpp>

#include "cli/commands.h"

#if TWOSTEP_CUDA

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cli/arguments.h"
#include "core/check.h"
#include "core/env.h"
#include "cuda/driver.h"
#include "gemm/contract.h"
#include "gemm/tactics.h"
#include "gemm/warp.h"
#include "io/cases.h"
#include "jit/build.h"
#include "jit/nvrtc.h"
#include "measure/kernels.h"

namespace twostep::cli {
namespace {

struct CompileOptions {
  std::string model;
  int tp = 8;
  std::vector<std::string> shapes;
  std::vector<int> rows{8, 16, 24, 32, 40, 48, 56, 64};
  std::string gpu = "h200";
  std::string arch;
  int sms = 0;
  int smem = 0;
  bool strict = false;
  bool all_archs = false;
  std::string cache;
  unsigned jobs = std::max(1u, std::thread::hardware_concurrency());
  bool list = false;
  bool report = false;
};

// One line of the output.
struct Job {
  CompileRequest request;
  Shape shape;
  int bucket = 0;       // 0: not of a row bucket
  std::string tactic;   // as text; of a kernel without tactic its name
  int smem_bytes = 0;   // dynamic
  std::string refusal;  // why there is nothing to build: no tactic fits this GPU
};

// Every SM has 1 KiB more than one CTA may ask for.
DeviceFacts facts_of(int arch, int sms, int smem) { return {arch, sms, smem, smem + 1024, {}}; }

std::vector<DeviceFacts> targets(const CompileOptions& options) {
  // B200, B300 and RTX PRO 6000 stand for their architectures; their kernels are compiled, not tuned.
  if (options.all_archs)
    return {known_gpu("h200"), facts_of(100, 148, 232448), facts_of(103, 148, 232448), facts_of(120, 188, 101376)};
  if (options.arch.empty()) return {known_gpu(options.gpu)};
  for (int arch : {90, 100, 103, 120})
    if (arch_name(arch) == options.arch) return {facts_of(arch, options.sms, options.smem)};
  fail(StatusCode::kInvalidArgument, "twostep compile", "--arch", options.arch, "sm_90a, sm_100a, sm_103a, sm_120a");
}

std::vector<Shape> shapes_of(const CompileOptions& options) {
  std::vector<Shape> shapes;
  std::set<Shape> seen;
  const auto add = [&](Shape shape) {
    if (seen.insert(shape).second) shapes.push_back(shape);
  };
  for (const auto& text : options.shapes) {
    const Shape shape = parse_shape("twostep compile", text);
    if (!warp_eligible(shape.n, shape.k))
      fail(StatusCode::kInvalidArgument, "twostep compile", "--shape", text,
           "N,K with N a multiple of 16 and K a multiple of 64", "others are served by cuBLAS and need no kernel");
    add(shape);
  }
  if (!options.model.empty())
    for (const auto& item : gemm_cases({options.model, options.tp, {}})) add({item.n, item.k});
  if (shapes.empty())
    fail(StatusCode::kInvalidArgument, "twostep compile", "shapes", "none",
         "--shape N,K, or --model k3 or k3.1 with --tp 1, 4, 8 or 16");
  return shapes;
}

Job job_of(CompileRequest request) {
  Job job;
  job.tactic = request.name;
  job.request = std::move(request);
  return job;
}

Job warp_job(Shape shape, int bucket, const Tactic& tactic, const DeviceFacts& facts) {
  Job job = job_of(compile_request(warp_kernel_text(bucket, shape.n, shape.k, tactic), facts.arch));
  job.shape = shape;
  job.bucket = bucket;
  job.tactic = to_string(tactic);
  job.smem_bytes = tactic.smem_bytes;
  return job;
}

// What serves the shapes and buckets on one GPU.
void add_linears(const CompileOptions& options, const DeviceFacts& facts, std::vector<Job>* jobs) {
  std::set<int> buckets;
  for (int rows : options.rows) buckets.insert(bucket_of(rows));
  for (const Shape& shape : shapes_of(options))
    for (int bucket : buckets) {
      try {
        jobs->push_back(warp_job(shape, bucket, warp_tactic(bucket, shape.n, shape.k, facts, options.strict), facts));
      } catch (const Error& error) {
        Job job;
        job.request.arch = arch_name(facts.arch);
        job.shape = shape;
        job.bucket = bucket;
        job.refusal = error.what();
        jobs->push_back(job);
      }
    }
}

// The kernels and load paths that no tactic of today's tables may choose, on the first shape: with them, every
// embedded file is compiled.
void add_others(const CompileOptions& options, const DeviceFacts& facts, std::vector<Job>* jobs) {
  const Shape shape = shapes_of(options).front();
  Tactic packed = warp_tactic(kRowBucket, shape.n, shape.k, facts);
  for (int bucket : {kRowBucket, kMaxWarpRows}) {
    std::set<WeightLoad> seen;
    for (const Tactic& tactic : valid_tactics(bucket, shape.n, shape.k, facts))
      if (seen.insert(tactic.weight_load).second) jobs->push_back(warp_job(shape, bucket, tactic, facts));
  }
  packed.weight_order = WeightOrder::kPacked;
  packed.weight_load = WeightLoad::kTiles;
  packed.tile_n = 16 * packed.warps / packed.k_slices;
  packed = complete(packed, kRowBucket, facts);
  throw_if_error(tactic_valid(packed, kRowBucket, shape.n, shape.k, facts));
  jobs->push_back(warp_job(shape, kRowBucket, packed, facts));
  jobs->push_back(job_of(compile_request(pack_kernel_text(shape.n, shape.k, packed), facts.arch)));
  jobs->back().shape = shape;
  for (auto& request : measure_requests(arch_name(facts.arch))) jobs->push_back(job_of(std::move(request)));
}

void require_all_files(const std::vector<Job>& jobs) {
  for (const auto& file : embedded_kernels()) {
    if (file.name.starts_with("common/")) continue;
    const std::string line = fmt::format("#include \"{}\"", file.name);
    const bool used = std::any_of(jobs.begin(), jobs.end(),
                                  [&](const Job& job) { return job.request.text.find(line) != std::string::npos; });
    if (!used)
      fail(StatusCode::kInternal, "twostep compile", "kernels", std::string(file.name),
           "files that some kernel of --all-archs includes", "add it to add_others");
  }
}

class Output {
 public:
  explicit Output(bool report) : report_(report) {
    fmt::print("{:32}  {:>7} {:>7} {:>3}  {:8}{}  {:>7} {:>6}  {:8} {}\n", "key", "N", "K", "M", "arch",
               report_ ? fmt::format("  {:>4} {:>7} {:>6}", "regs", "smem", "spills") : "", "bytes", "ms", "state",
               "tactic");
  }

  void line(const Job& job, const std::string& key, const Cubin* cubin, double milliseconds, const char* state,
            const std::string& more = {}) {
    const KernelResources r = cubin ? cubin->resources : KernelResources{};
    const std::string numbers = fmt::format("  {:>4} {:>7} {:>6}", r.registers, r.static_smem_bytes + job.smem_bytes,
                                            r.spill_store_bytes + r.spill_load_bytes);
    const std::lock_guard guard(mutex_);
    fmt::print("{:32}  {:>7} {:>7} {:>3}  {:8}{}  {:>7} {:>6.0f}  {:8} {}\n", key, job.shape.n, job.shape.k, job.bucket,
               job.request.arch, report_ ? numbers : "", cubin ? cubin->bytes.size() : 0, milliseconds, state,
               job.tactic);
    if (!more.empty()) fmt::print("  {}\n", more);
    std::fflush(stdout);
  }

 private:
  const bool report_;
  std::mutex mutex_;
};

// True if the kernel is there, and without spills where a report was asked for.
bool compile_one(const Job& job, const CompileOptions& options, const DiskCache& disk, Output& output) {
  if (!job.refusal.empty()) {
    output.line(job, "-", nullptr, 0, "refused", job.refusal);
    return false;
  }
  try {
    const Built built = build_cubin(job.request, {true, disk.dir()});
    // Without a folder that can be written the build is good and gone with this process.
    const bool stored = disk.read(source_hash(job.request), built.nvrtc_version).has_value();
    const auto& resources = built.cubin->resources;
    const bool bad = options.report && (resources.spills() || resources.registers == 0);
    const char* state = bad                                  ? "spills"
                        : !stored                            ? "unstored"
                        : built.from == BuiltFrom::kCompiled ? "built"
                                                             : "present";
    output.line(job, built.key.hash, built.cubin.get(), built.milliseconds, state,
                bad && !resources.spills() ? "no resource numbers in NVRTC's log" : "");
    return stored && !bad;
  } catch (const Error& error) {
    output.line(job, "-", nullptr, 0, "failed", error.what());
    return false;
  }
}

bool list_one(const Job& job, const DiskCache& disk, Output& output) {
  if (!job.refusal.empty()) {
    output.line(job, "-", nullptr, 0, "refused", job.refusal);
    return false;
  }
  const std::string version = Nvrtc::get() ? Nvrtc::get()->version() : "";
  const auto entry = disk.read(source_hash(job.request), version);
  const std::string key = entry             ? compile_key(job.request, entry->version).hash
                          : version.empty() ? "-"
                                            : compile_key(job.request, version).hash;
  output.line(job, key, entry ? &entry->cubin : nullptr, 0, entry ? "present" : "missing");
  return entry.has_value();
}

int run_compile(const CompileOptions& options) {
  std::vector<Job> jobs;
  for (const DeviceFacts& facts : targets(options)) {
    add_linears(options, facts, &jobs);
    if (options.all_archs) add_others(options, facts, &jobs);
  }
  if (options.all_archs) require_all_files(jobs);
  const DiskCache disk(!options.cache.empty() ? options.cache : environment().cache ? environment().cache_dir : "");
  if (disk.dir().empty())
    fail(StatusCode::kUnavailable, "twostep compile", "cache folder", "none", "a folder to fill", "pass --cache DIR");
  Output output(options.report);
  std::atomic<std::size_t> next{0};
  std::atomic<std::size_t> done{0};
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < options.jobs; ++thread)
    threads.emplace_back([&] {
      for (std::size_t i = next++; i < jobs.size(); i = next++)
        done += options.list ? list_one(jobs[i], disk, output) : compile_one(jobs[i], options, disk, output);
    });
  for (auto& thread : threads) thread.join();
  fmt::print("{} of {} kernels {} in {}\n", done.load(), jobs.size(),
             options.report ? "there, without spills," : "there", disk.dir());
  return done == jobs.size() ? 0 : 1;
}

}  // namespace

void add_compile(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<CompileOptions>();
  CLI::App* command = app.add_subcommand("compile", "fill the cubin cache for a GPU that need not be here");
  command->add_option("--model", options->model, "all linears of k3 or k3.1")->check(CLI::IsMember({"k3", "k3.1"}));
  command->add_option("--tp", options->tp, "tensor-parallel size of the model")
      ->check(CLI::IsMember({1, 4, 8, 16}))
      ->capture_default_str();
  command->add_option("--shape", options->shapes, "a weight N,K; may be repeated")->allow_extra_args(false);
  command->add_option("--rows", options->rows, "row counts, each for its bucket of 8")
      ->delimiter(',')
      ->check(CLI::Range(1, kMaxWarpRows))
      ->capture_default_str();
  auto* gpu = command->add_option("--gpu", options->gpu, "target GPU: h200, h100")->capture_default_str();
  auto* arch = command->add_option("--arch", options->arch, "target sm_90a, sm_100a, sm_103a or sm_120a");
  auto* sms = command->add_option("--sms", options->sms, "its SMs")->check(CLI::PositiveNumber);
  auto* smem = command->add_option("--smem", options->smem, "its shared memory for one block, bytes")
                   ->check(CLI::PositiveNumber);
  arch->needs(sms)->needs(smem)->excludes(gpu);
  sms->needs(arch);
  smem->needs(arch);
  command->add_flag("--all-archs", options->all_archs, "every architecture and every kernel file, for CI")
      ->excludes(gpu)
      ->excludes(arch);
  command->add_flag("--strict", options->strict, "the kernels of Options::strict");
  command->add_option("--cache", options->cache, "folder to fill; default: that of this user");
  command->add_option("--jobs", options->jobs, "compiles at a time")->check(CLI::Range(1, 1024))->capture_default_str();
  command->add_flag("--list", options->list, "say what is there, compile nothing");
  command->add_flag("--report", options->report, "registers, shared memory and spills; a spill is a failure");
  command->callback([options, &exit_code] { exit_code = run_compile(*options); });
}

}  // namespace twostep::cli

#else  // without CUDA there is no kernel to compile for, and the command says so

#include "core/check.h"

namespace twostep::cli {

void add_compile(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand("compile", "not in this build: it has no GPU rooms");
  command->allow_extras();
  command->callback([] {
    fail(StatusCode::kUnavailable, "twostep compile", "TWOSTEP_CUDA", "OFF", "ON", "configure with -DTWOSTEP_CUDA=ON");
  });
}

}  // namespace twostep::cli

#endif
