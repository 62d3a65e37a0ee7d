// A group of ranks as threads: on GPUs of their own where there are enough, else all on the first one, each with a
// stream and few CTAs.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cuda/graph.h"
#include "cuda/memory.h"
#include "twostep/mailbox.h"

namespace twostep::test {

std::uint64_t test_seed();  // TWOSTEP_TEST_SEED, else a fresh number
std::string fresh_path();

// What a rank's thread has. All memory is taken before the group is created and given back after it is closed: an
// allocation may wait for the GPU, where a virtual rank may be waiting for this one.
struct Rank {
  int rank = 0;
  int size = 0;
  Device device;
  Bootstrap* bootstrap = nullptr;
  Mailbox* mailbox = nullptr;
  const OwnedStream* stream = nullptr;
  std::byte* memory = nullptr;  // kMemory bytes

  static constexpr std::size_t kMemory = 64 << 20;
  void write(void* device_memory, const void* host, std::size_t bytes) const;  // in stream order; waits
  void read(void* host, const void* device_memory, std::size_t bytes) const;
  void meet() const { bootstrap->barrier(60); }
};

struct Setting {
  int size = 2;
  bool spread = false;  // a GPU for each rank
  bool strict_fence = false;
  friend void PrintTo(const Setting& s, std::ostream* out) {
    *out << s.size << (s.spread ? " GPUs" : " virtual ranks") << (s.strict_fence ? ", strict fence" : "");
  }
};
MailboxConfig config_of(const Setting& setting);  // all but the rank

// Creates the group, runs `body` as each rank, closes. A rank that throws fails the test, after all have ended.
void on_ranks(const Setting& setting, const std::function<void(Rank&)>& body);
void on_ranks(const Setting& setting, MailboxConfig config, const std::function<void(Rank&)>& body);

class MailboxTest : public testing::TestWithParam<Setting> {
 protected:
  void SetUp() override;  // skips
};
void skip_without(int gpus);

}  // namespace twostep::test
