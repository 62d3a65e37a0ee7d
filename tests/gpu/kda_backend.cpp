// The KDA tests on a GPU.
#include <map>
#include <mutex>
#include <optional>

#include "cuda/driver.h"
#include "cuda/memory.h"
#include "gemm_fixture.h"
#include "tests/kda/backend.h"

namespace twostep::kda_test {
namespace {

class CudaBackend : public Backend {
 public:
  Status usable() const override { return driver_status(); }
  Device device() const override { return Device::cuda(test::kDevice); }
  Stream stream() override {
    const ContextGuard guard(test::kDevice);
    const std::lock_guard lock(mutex_);
    if (!stream_) stream_.emplace();
    return stream_->view();
  }
  void* allocate(std::size_t bytes) override {
    const ContextGuard guard(test::kDevice);
    DeviceBuffer buffer(bytes);
    void* const memory = buffer.data();
    const std::lock_guard lock(mutex_);
    buffers_.emplace(memory, std::move(buffer));
    return memory;
  }
  void release(void* memory) override {
    const ContextGuard guard(test::kDevice);
    const std::lock_guard lock(mutex_);
    buffers_.erase(memory);
  }
  void upload(void* to, const void* from, std::size_t bytes) override {
    const Stream on = stream();
    const ContextGuard guard(test::kDevice);
    copy_to_device(to, from, bytes, on);
  }
  void download(void* to, const void* from, std::size_t bytes) override {
    const Stream on = stream();
    const ContextGuard guard(test::kDevice);
    copy_to_host(to, from, bytes, on);
  }
  bool whole() const override { return true; }

 private:
  std::mutex mutex_;
  std::optional<OwnedStream> stream_;
  std::map<void*, DeviceBuffer> buffers_;
};

}  // namespace

Backend& backend() {
  static CudaBackend& cuda = *new CudaBackend;  // never destroyed: the driver may be gone before it
  return cuda;
}

}  // namespace twostep::kda_test
