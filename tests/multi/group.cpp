#include "group.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <thread>

namespace twostep::test {

std::uint64_t test_seed() {
  static const std::uint64_t seed = [] {
    const char* text = std::getenv("TWOSTEP_TEST_SEED");
    return text ? std::strtoull(text, nullptr, 10) : std::random_device{}();
  }();
  return seed;
}

std::string fresh_path() {
  static std::atomic<int> number{0};
  return std::filesystem::temp_directory_path() /
         ("twostep-multi-" + std::to_string(::getpid()) + "-" + std::to_string(++number));
}

void Rank::write(void* device_memory, const void* host, std::size_t bytes) const {
  copy_to_device(device_memory, host, bytes, stream->view());
}
void Rank::read(void* host, const void* device_memory, std::size_t bytes) const {
  copy_to_host(host, device_memory, bytes, stream->view());
}

MailboxConfig config_of(const Setting& setting) {
  MailboxConfig config;
  config.size = setting.size;
  config.max_cols = 4096;
  config.max_hidden = 7168;
  config.strict_fence = setting.strict_fence;
  if (!setting.spread) config.max_ctas = 16;
  return config;
}

void on_ranks(const Setting& setting, const std::function<void(Rank&)>& body) {
  on_ranks(setting, config_of(setting), body);
}

void on_ranks(const Setting& setting, MailboxConfig config, const std::function<void(Rank&)>& body) {
  const std::string path = fresh_path();
  std::vector<std::thread> threads;
  for (int r = 0; r < setting.size; ++r)
    threads.emplace_back([&, r] {
      const int ordinal = setting.spread ? r : 0;
      const ContextGuard context(ordinal);
      const DeviceBuffer memory(Rank::kMemory);
      const OwnedStream stream;
      try {
        const auto bootstrap = make_socket_bootstrap(path, r, setting.size);
        MailboxConfig own = config;
        own.rank = r;
        Mailbox mailbox = Mailbox::create(*bootstrap, own, Device::cuda(ordinal));
        Rank rank{r,
                  setting.size,
                  Device::cuda(ordinal),
                  bootstrap.get(),
                  &mailbox,
                  &stream,
                  static_cast<std::byte*>(memory.data())};
        body(rank);
        stream.synchronize();
        rank.meet();
        mailbox.close();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << r << ": " << error.what();
      }
    });
  for (auto& thread : threads) thread.join();
}

void skip_without(int gpus) {
  if (const Status status = driver_status(); !status.ok()) GTEST_SKIP() << status.message();
  if (device_count() < gpus) GTEST_SKIP() << "needs " << gpus << " GPUs, there is " << device_count();
}

void MailboxTest::SetUp() { skip_without(GetParam().spread ? GetParam().size : 1); }

}  // namespace twostep::test

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  // Streams that share a hardware queue would wait for each other: with eight virtual ranks, for ever.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("TWOSTEP_PEER_LIMIT_S", "20", 0);
  testing::InitGoogleTest(&argc, argv);
  const std::string seed = std::to_string(twostep::test::test_seed());
  setenv("TWOSTEP_TEST_SEED", seed.c_str(), 1);
  if (!testing::GTEST_FLAG(list_tests)) std::printf("TWOSTEP_TEST_SEED=%s\n", seed.c_str());
  return RUN_ALL_TESTS();
}
