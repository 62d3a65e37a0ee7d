// The KDA tests on the CPU.
#include <cstdlib>
#include <cstring>

#include "tests/kda/backend.h"

namespace twostep::kda_test {
namespace {

class HostBackend : public Backend {
 public:
  Status usable() const override { return {}; }
  Device device() const override { return Device::cpu(); }
  Stream stream() override { return {}; }
  // Not aligned_alloc: its size would have to be a multiple of the alignment, and a checker would miss the last bytes.
  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    return posix_memalign(&memory, 256, bytes) == 0 ? memory : nullptr;
  }
  void release(void* memory) override { std::free(memory); }
  void upload(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  bool whole() const override { return false; }
};

}  // namespace

Backend& backend() {
  static HostBackend host;
  return host;
}

}  // namespace twostep::kda_test
