#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <thread>

#include "cli/commands.h"
#include "core/env.h"
#include "measure/row.h"
#if TWOSTEP_CUDA
#include "cuda/driver.h"
#include "gemm/cublas.h"
#include "jit/nvrtc.h"
#include "mailbox/nccl.h"
#include "measure/nvml.h"
#endif

namespace twostep::cli {
namespace {

#if TWOSTEP_CUDA
// Whether each pair of GPUs can share a mailbox, and over what.
void print_links() {
  constexpr int kPerformanceRank = 1;  // CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK: 0 is the fastest
  const Driver& cu = driver();
  for (int a = 0; a < device_count(); ++a)
    for (int b = a + 1; b < device_count(); ++b) {
      CUdevice one = 0, other = 0;
      int there = 0, back = 0, rank = 0;
      const bool known = cu.cuDeviceGet(&one, a) == kCudaSuccess && cu.cuDeviceGet(&other, b) == kCudaSuccess &&
                         cu.cuDeviceCanAccessPeer(&there, one, other) == kCudaSuccess &&
                         cu.cuDeviceCanAccessPeer(&back, other, one) == kCudaSuccess;
      const bool ranked =
          known && cu.cuDeviceGetP2PAttribute(&rank, kPerformanceRank, one, other) == kCudaSuccess && there && back;
      const auto nvlink = joined_by_nvlink(a, b);
      fmt::print("{:<15}{}, {}{}\n", fmt::format("cuda:{}-{}", a, b),
                 !known          ? "peer access not known"
                 : there && back ? "peer access"
                                 : "no peer access: NCCL serves",
                 !nvlink   ? "NVLink not known"
                 : *nvlink ? "NVLink"
                           : "no NVLink",
                 ranked ? fmt::format(", performance rank {}", rank) : "");
    }
}
#endif

void print_gpus() {
#if TWOSTEP_CUDA
  const Status status = driver_status();
  if (!status.ok()) {
    fmt::print("GPU            none: {}\n", status.message());
    return;
  }
  fmt::print("libcuda        CUDA {}.{}\n", driver().version / 1000, driver().version % 1000 / 10);
  for (int i = 0; i < device_count(); ++i) {
    const DeviceFacts facts = device_facts(i);
    const std::string arch = arch_name(facts.arch);
    fmt::print("cuda:{:<9} {}, {} SMs, shared memory {} B per CTA and {} B per SM, {}\n", i, facts.name, facts.sm_count,
               facts.smem_per_block, facts.smem_per_sm,
               arch.empty() ? fmt::format("capability {}: no kernels of ours, cuBLAS serves", facts.arch) : arch);
  }
  print_links();
#else
  fmt::print("GPU            none: this build has no GPU rooms (TWOSTEP_CUDA=OFF)\n");
#endif
}

void print_libraries() {
#if TWOSTEP_CUDA
  if (const Nvrtc* nvrtc = Nvrtc::get()) fmt::print("NVRTC          {} at {}\n", nvrtc->version(), nvrtc->path());
  else fmt::print("NVRTC          none: {}\n", Nvrtc::status().message());
  const Status cublas = cublas_status();
  fmt::print("cuBLASLt       {}\n", cublas.ok() ? cublas_version() : "none: " + cublas.message());
  if (const Nccl* nccl = Nccl::get()) fmt::print("NCCL           {} at {}\n", nccl->version(), nccl->path());
  else fmt::print("NCCL           none: {}\n", Nccl::status().message());
#endif
}

void print_cache() {
  const Environment& env = environment();
  if (!env.cache) return fmt::print("cache          off (TWOSTEP_CACHE=0)\n");
  if (env.cache_dir.empty()) return fmt::print("cache          none: no home folder; set TWOSTEP_CACHE_DIR\n");
  std::size_t kernels = 0;
  std::uintmax_t bytes = 0;
  std::error_code error;
  for (std::filesystem::directory_iterator at(env.cache_dir, error), end; !error && at != end; at.increment(error)) {
    std::error_code gone;  // another process may delete an entry meanwhile
    if (at->path().extension() != ".cubin") continue;
    const auto size = at->file_size(gone);
    if (gone) continue;
    ++kernels;
    bytes += size;
  }
  fmt::print(
      "cache          {}: {}\n", env.cache_dir,
      error ? error.message() : fmt::format("{} kernels, {:.1f} MB", kernels, static_cast<double>(bytes) * 1e-6));
}

void print_cpu() {
  std::string sets;
  const auto add = [&](bool supported, const char* name) {
    if (supported) sets += (sets.empty() ? "" : ", ") + std::string(name);
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  add(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), "AVX2 FMA");
  add(__builtin_cpu_supports("avx512f"), "AVX-512F");
  add(__builtin_cpu_supports("avx512bf16"), "AVX-512 BF16");
#endif
  fmt::print("CPU            {}; {}\n", this_machine({}).device, sets.empty() ? "no vector sets of ours" : sets);
  const int threads = environment().threads;
  fmt::print("threads        {}\n", threads > 0 ? fmt::format("{} (TWOSTEP_THREADS)", threads)
                                                : fmt::format("all: {}", std::thread::hardware_concurrency()));
  std::vector<std::uint16_t> weight(16 * 64);
  fmt::print("CPU backend    {}\n", DraftGemm(TensorView::matrix(weight.data(), 16, 64)).why(1));
}

void print_environment() {
  for (const auto& [name, value] : environment().set) fmt::print("environment    {}={}\n", name, value);
  if (environment().set.empty()) fmt::print("environment    no TWOSTEP_ variable is set\n");
}

}  // namespace

void add_info(CLI::App& app, int& exit_code) {
  auto* info = app.add_subcommand("info", "Devices, libraries and folders that twostep found");
  info->callback([&exit_code] {
    fmt::print("twostep        {}\n", build_version());
    print_gpus();
    print_libraries();
    print_cache();
    print_cpu();
    print_environment();
    exit_code = 0;
  });
}

}  // namespace twostep::cli
