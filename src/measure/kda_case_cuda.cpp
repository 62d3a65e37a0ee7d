#include "measure/kda_case_cuda.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "core/check.h"
#include "jit/build.h"
#include "kda/plan.h"

namespace twostep {

void* KdaCudaMemory::allocate(std::size_t bytes) { return buffers_.emplace_back(bytes).data(); }

void KdaCudaMemory::write(void* to, const void* host, std::size_t bytes) { copy_to_device(to, host, bytes, stream_); }

void KdaCudaMemory::read(void* host, const void* from, std::size_t bytes) { copy_to_host(host, from, bytes, stream_); }

void KdaCudaMemory::fill(void* to, std::int64_t count, std::uint64_t base, float scale) {
  constexpr std::int64_t kRow = 4096;
  auto* out = static_cast<std::uint16_t*>(to);
  const std::int64_t whole = count / kRow * kRow;
  device_.fill(out, whole / kRow, kRow, kRow, base, Data::kNormal, scale);
  device_.fill(out + whole, 1, count - whole, kRow, base + 1, Data::kNormal, scale);
  if (stream_.handle != device_.stream().handle) device_.synchronize();  // it fills on its own stream
}

void compile_kda(const std::vector<KdaBuild>& builds, const DeviceFacts& facts) {
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < builds.size(); i = next++) {
      try {
        (void)build_cubin(kda_compile_request(kda_kernel_text(builds[i]), facts.arch));
      } catch (const Error&) {
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1u, std::thread::hardware_concurrency()); ++t) threads.emplace_back(work);
  for (auto& thread : threads) thread.join();
}

}  // namespace twostep
