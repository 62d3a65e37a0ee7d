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
#include "cli/kda_arguments.h"
#include "core/check.h"
#include "core/env.h"
#include "cuda/driver.h"
#include "drafter/logits_plan.h"
#include "drafter/plan.h"
#include "gemm/contract.h"
#include "gemm/tactics.h"
#include "gemm/warp.h"
#include "io/cases.h"
#include "io/synth.h"
#include "jit/build.h"
#include "jit/nvrtc.h"
#include "kda/plan.h"
#include "mailbox/kernels.h"
#include "measure/kda_bytes.h"
#include "measure/kda_case.h"
#include "measure/kernels.h"

namespace twostep::cli {
namespace {

// For whom and how, of every kernel.
struct CompileTarget {
  std::string gpu = "h200";
  std::string arch;
  int sms = 0;
  int smem = 0;
  bool all_archs = false;
  std::string cache;
  unsigned jobs = std::max(1u, std::thread::hardware_concurrency());
  bool list = false;
  bool report = false;
};

struct CompileOptions {
  std::string model;
  int tp = 8;
  std::vector<std::string> shapes;
  std::vector<int> rows{8, 16, 24, 32, 40, 48, 56, 64};
  bool strict = false;
  CompileTarget target;
};

struct KdaCompileOptions {
  std::vector<int> heads{12};
  std::vector<std::int64_t> requests{1, 2, 4, 8, 16, 32, 64, 128};
  std::vector<int> tokens{1, 8};
  std::vector<std::string> layouts{"sd"};
  std::vector<std::string> gates{"bound"};
  std::vector<std::string> modes{"slots"};
  int conv_len = 0;
  bool bias = false;
  bool early_caches = false;
  std::string tactic;
  CompileTarget target;
};

// One line of the output.
struct Job {
  CompileRequest request;
  std::string subject;  // N, K and M; or the key of PreparedKda
  std::string tactic;   // as text; of a kernel without tactic its name
  int smem_bytes = 0;   // dynamic
  std::string refusal;  // why there is nothing to build: no tactic fits this GPU
};

// Every SM has 1 KiB more than one CTA may ask for.
DeviceFacts facts_of(int arch, int sms, int smem) { return {arch, sms, smem, smem + 1024, {}}; }

std::vector<DeviceFacts> targets(const CompileTarget& options) {
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

std::string subject_of(Shape shape, int bucket) { return fmt::format("{:>7} {:>7} {:>3}", shape.n, shape.k, bucket); }

Job warp_job(Shape shape, int bucket, const Tactic& tactic, const DeviceFacts& facts) {
  Job job = job_of(compile_request(warp_kernel_text(bucket, shape.n, shape.k, tactic), facts.arch));
  job.subject = subject_of(shape, bucket);
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
        job.subject = subject_of(shape, bucket);
        job.refusal = error.what();
        jobs->push_back(job);
      }
    }
}

// What serves the keys on one GPU. Requests whose tactics agree share a kernel.
void add_kda(const KdaCompileOptions& options, const DeviceFacts& facts, std::vector<Job>* jobs) {
  std::optional<KdaTactic> tactic;
  if (!options.tactic.empty()) tactic = parse_tactic("twostep compile kda", options.tactic);
  std::vector<KdaBuild> seen;
  std::set<std::string> refused;
  const auto add = [&](const KdaProblem& problem) {
    Job job;
    job.subject = fmt::format("H {:<3} q {} L {:<2} {} {}{}", problem.heads, problem.tokens, problem.conv_len,
                              problem.dim_first ? "DS" : "SD", problem.softplus ? "softplus" : "bound",
                              problem.records ? " rec" : "");
    try {
      const KdaBuild build = kda_build_of(problem, facts);
      if (std::find(seen.begin(), seen.end(), build) != seen.end()) return;
      seen.push_back(build);
      job.request.arch = arch_name(facts.arch);
      job.tactic = to_string(build.tactic);
      job.smem_bytes = kda_smem_bytes(problem.tokens, build.tactic, kda_folded(build));
      throw_if_error(kda_tactic_valid(build.tactic, problem.tokens, facts, kda_folded(build)));
      job.request = kda_compile_request(kda_kernel_text(build), facts.arch);
    } catch (const Error& error) {
      if (!refused.insert(job.subject).second) return;  // once, not for each number of requests
      job.refusal = error.what();
    }
    jobs->push_back(std::move(job));
  };
  const auto add_fold = [&](const KdaProblem& problem) {
    Job job = job_of(kda_compile_request(kda_fold_text_of(problem), facts.arch));
    job.subject = fmt::format("H {:<3} fold L {:<2} {} {}", problem.heads, problem.conv_len,
                              problem.dim_first ? "DS" : "SD", problem.softplus ? "softplus" : "bound");
    jobs->push_back(std::move(job));
  };
  // The keys of a layer share one conv cache.
  const int shared_conv_len = least_conv_len(*std::max_element(options.tokens.begin(), options.tokens.end()));
  KdaProblem problem;
  problem.bias = options.bias;
  problem.early_caches = options.early_caches;
  problem.tactic = tactic;
  problem.conv_len = options.conv_len > 0 ? options.conv_len : shared_conv_len;
  for (const std::string& mode : options.modes)
    for (const int heads : options.heads)
      for (const std::string& layout : options.layouts)
        for (const std::string& gate : options.gates) {
          problem.records = mode == "records";
          problem.heads = heads;
          problem.dim_first = layout == "ds";
          problem.softplus = gate == "softplus";
          for (const int tokens : options.tokens)
            for (const std::int64_t requests : options.requests) {
              problem.requests = requests;
              problem.tokens = problem.window = tokens;
              add(problem);
            }
          if (problem.records) add_fold(problem);
        }
}

// The draft step of rank 0 of 8 of K3.1; for one architecture also that of the smallest model, with its switches on.
void add_draft_step(const DeviceFacts& facts, std::vector<Job>* jobs) {
  const auto add = [&](const std::string& preset, int ranks, DraftMode mode, bool switches) {
    DrafterConfig config = synth_preset(preset);
    if (switches) {
      config.hidden_act = "situ";
      config.activation_situ_linear_beta = 3;
      config.is_neox_style = true;
    }
    DrafterLimits limits;
    limits.mode = mode;
    limits.max_len = config.max_position_embeddings;
    limits.num_draft_tokens = preset == "tiny" ? 3 : 7;
    if (switches) limits.draft_logits = DType::kBF16;
    StepKernelModel model{step_model(config, limits, {ranks, 0}), switches, switches};
    const auto requests = step_kernel_requests(model, facts.arch);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const auto kernel = static_cast<StepKernel>(i);
      if (!step_kernel_possible(kernel, model.model, step_gpu(facts))) continue;
      jobs->push_back(job_of(requests[i]));
      jobs->back().subject = fmt::format("{} tp {}{}", preset, ranks, mode == DraftMode::kGreedy ? " greedy" : "");
      jobs->back().smem_bytes = static_cast<int>(step_kernel_smem(kernel, model.model, step_gpu(facts)));
    }
  };
  add("k3.1", 8, DraftMode::kProbabilistic, false);
  if (facts.arch == 90) add("tiny", 1, DraftMode::kGreedy, true);
}

// The kernels and load paths that no tactic of today's tables may choose, on the first shape: with them, every
// embedded file is compiled.
void add_others(const CompileOptions& options, const DeviceFacts& facts, std::vector<Job>* jobs) {
  const Shape shape = shapes_of(options).front();
  for (int bucket : {kRowBucket, kMaxWarpRows}) {
    std::set<std::pair<Mma, WeightLoad>> seen;
    for (const Tactic& tactic : valid_tactics(bucket, shape.n, shape.k, facts))
      if (seen.insert({tactic.mma, tactic.weight_load}).second) jobs->push_back(warp_job(shape, bucket, tactic, facts));
  }
  Tactic packed;  // tile_n = 16 divides every N
  packed.weight_order = WeightOrder::kPacked;
  packed = complete(packed, kRowBucket, facts);
  throw_if_error(tactic_valid(packed, kRowBucket, shape.n, shape.k, facts));
  jobs->push_back(warp_job(shape, kRowBucket, packed, facts));
  jobs->push_back(job_of(compile_request(pack_kernel_text(shape.n, shape.k, packed), facts.arch)));
  jobs->back().subject = subject_of(shape, 0);
  for (const bool cap : {false, true}) jobs->push_back(job_of(logits_request(facts.arch, cap)));
  add_draft_step(facts, jobs);
  for (int op = 0; op < kMailboxOps; ++op)
    for (const int ranks : {2, 8})
      jobs->push_back(job_of(mailbox_request(static_cast<MailboxOp>(op), ranks, ranks == 8, arch_name(facts.arch))));
  jobs->push_back(job_of(move_request(arch_name(facts.arch))));
  jobs->push_back(job_of(add_norm_request(arch_name(facts.arch))));
  for (auto& request : measure_requests(arch_name(facts.arch))) jobs->push_back(job_of(std::move(request)));
  KdaCompileOptions kda;
  kda.requests = {1, 128};
  kda.tokens = {1, 2, 8};
  kda.layouts = {"sd", "ds"};
  kda.gates = {"bound", "softplus"};
  kda.modes = {"slots", "records"};
  add_kda(kda, facts, jobs);
}

void require_all_files(const std::vector<Job>& jobs) {
  for (const auto& file : embedded_kernels()) {
    if (file.name.starts_with("common/")) continue;
    const std::string line = fmt::format("#include \"{}\"", file.name);
    const auto has_line = [&](std::string_view text) { return text.find(line) != std::string_view::npos; };
    const auto files = embedded_kernels();  // one that another includes is compiled with it
    const bool used =
        std::any_of(jobs.begin(), jobs.end(), [&](const Job& job) { return has_line(job.request.text); }) ||
        std::any_of(files.begin(), files.end(), [&](const EmbeddedText& other) { return has_line(other.text); });
    if (!used)
      fail(StatusCode::kInternal, "twostep compile", "kernels", std::string(file.name),
           "files that some kernel of --all-archs includes", "add it to add_others");
  }
}

class Output {
 public:
  Output(bool report, const std::string& subject) : report_(report) {
    fmt::print("{:32}  {:25}  {:8}{}  {:>7} {:>6}  {:8} {}\n", "key", subject, "arch",
               report_ ? fmt::format("  {:>4} {:>7} {:>5} {:>6}", "regs", "smem", "stack", "spills") : "", "bytes",
               "ms", "state", "tactic");
  }

  void line(const Job& job, const std::string& key, const Cubin* cubin, double milliseconds, const char* state,
            const std::string& more = {}) {
    const KernelResources r = cubin ? cubin->resources : KernelResources{};
    const std::string numbers =
        fmt::format("  {:>4} {:>7} {:>5} {:>6}", r.registers, r.static_smem_bytes + job.smem_bytes, r.stack_bytes,
                    r.spill_store_bytes + r.spill_load_bytes);
    const std::lock_guard guard(mutex_);
    fmt::print("{:32}  {:25}  {:8}{}  {:>7} {:>6.0f}  {:8} {}\n", key, job.subject, job.request.arch,
               report_ ? numbers : "", cubin ? cubin->bytes.size() : 0, milliseconds, state, job.tactic);
    if (!more.empty()) fmt::print("  {}\n", more);
    std::fflush(stdout);
  }

 private:
  const bool report_;
  std::mutex mutex_;
};

// True if the kernel is there, and without spills where a report was asked for.
bool compile_one(const Job& job, const CompileTarget& options, const DiskCache& disk, Output& output) {
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

int run_jobs(const std::vector<Job>& jobs, const CompileTarget& options, const std::string& subject) {
  const DiskCache disk(!options.cache.empty() ? options.cache : environment().cache ? environment().cache_dir : "");
  if (disk.dir().empty())
    fail(StatusCode::kUnavailable, "twostep compile", "cache folder", "none", "a folder to fill", "pass --cache DIR");
  Output output(options.report, subject);
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

int compile_linears(const CompileOptions& options) {
  std::vector<Job> jobs;
  for (const DeviceFacts& facts : targets(options.target)) {
    add_linears(options, facts, &jobs);
    if (options.target.all_archs) add_others(options, facts, &jobs);
  }
  if (options.target.all_archs) require_all_files(jobs);
  return run_jobs(jobs, options.target, fmt::format("{:>7} {:>7} {:>3}", "N", "K", "M"));
}

int compile_kda_keys(const KdaCompileOptions& options) {
  std::vector<Job> jobs;
  for (const DeviceFacts& facts : targets(options.target)) add_kda(options, facts, &jobs);
  return run_jobs(jobs, options.target, "key");
}

void add_target(CLI::App* command, CompileTarget* target) {
  auto* gpu = command->add_option("--gpu", target->gpu, "target GPU: h200, h100")->capture_default_str();
  auto* arch = command->add_option("--arch", target->arch, "target sm_90a, sm_100a, sm_103a or sm_120a");
  auto* sms = command->add_option("--sms", target->sms, "its SMs")->check(CLI::PositiveNumber);
  auto* smem =
      command->add_option("--smem", target->smem, "its shared memory for one block, bytes")->check(CLI::PositiveNumber);
  arch->needs(sms)->needs(smem)->excludes(gpu);
  sms->needs(arch);
  smem->needs(arch);
  command->add_flag("--all-archs", target->all_archs, "every architecture; of linears also every kernel file, for CI")
      ->excludes(gpu)
      ->excludes(arch);
  command->add_option("--cache", target->cache, "folder to fill; default: that of this user");
  command->add_option("--jobs", target->jobs, "compiles at a time")->check(CLI::Range(1, 1024))->capture_default_str();
  command->add_flag("--list", target->list, "say what is there, compile nothing");
  command->add_flag("--report", target->report, "registers, shared memory, stack and spills; a spill is a failure");
}

void add_compile_kda(CLI::App* compile, int& exit_code) {
  auto options = std::make_shared<KdaCompileOptions>();
  CLI::App* command = compile->add_subcommand("kda", "the kernels of PreparedKda for these keys");
  add_list(*command, "--heads", options->heads, "heads on one GPU", 1, kKdaMaxHeads);
  add_list(*command, "--requests", options->requests, "requests, each for its tactic", 1, 1 << 20);
  add_list(*command, "--tokens", options->tokens, "tokens of each request", 1, kKdaMaxTokens);
  command
      ->add_option("--conv-len", options->conv_len,
                   "positions of a conv line; default: the least that serves all --tokens")
      ->check(CLI::Range(3, 4096));
  command->add_option("--layout", options->layouts, "conv cache: sd, ds")
      ->delimiter(',')
      ->check(CLI::IsMember({"sd", "ds"}))
      ->capture_default_str();
  command->add_option("--gate", options->gates, "bound, softplus")
      ->delimiter(',')
      ->check(CLI::IsMember({"bound", "softplus"}))
      ->capture_default_str();
  command->add_option("--mode", options->modes, "state mode: slots, records")
      ->delimiter(',')
      ->check(CLI::IsMember({"slots", "records"}))
      ->capture_default_str();
  command->add_flag("--bias", options->bias, "with a conv bias");
  command->add_flag("--early-caches", options->early_caches, "the kernels of KdaOptions::early_caches");
  command->add_option("--tactic", options->tactic, "split,warps,pass_rows in place of the choice");
  add_target(command, &options->target);
  command->callback([options, command, &exit_code] {
    refuse_options_of(*command->get_parent());
    exit_code = compile_kda_keys(*options);
  });
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
  command->add_flag("--strict", options->strict, "the kernels of Options::strict");
  add_target(command, &options->target);
  add_compile_kda(command, exit_code);
  command->callback([options, command, &exit_code] {
    if (command->get_subcommands().empty()) exit_code = compile_linears(*options);
  });
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
