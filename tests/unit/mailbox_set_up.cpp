// The set-up of a group without a GPU: ranks are threads or processes, their memory is the host's.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <thread>

#include "core/check.h"
#include "mailbox/set_up.h"

namespace twostep {
namespace {

namespace fs = std::filesystem;

std::string fresh_path() {
  static std::atomic<int> number{0};
  return fs::temp_directory_path() / ("twostep-mailbox-" + std::to_string(::getpid()) + "-" + std::to_string(++number));
}

MailboxConfig config_of(int rank, int size) {
  MailboxConfig config;
  config.rank = rank;
  config.size = size;
  config.max_cols = 64;
  config.peer_limit_s = 20;
  return config;
}

std::size_t open_descriptors() {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator{}));
}

// A rank's memory is a memfd. The self-test writes the rank to every peer and waits for theirs.
class HostMemory final : public PeerMemory {
 public:
  enum class Step { kNone, kAccess, kAllocate, kMap, kSelfTest };
  HostMemory(int rank, int size, Step fails = Step::kNone) : rank_(rank), size_(size), fails_(fails) {}
  ~HostMemory() override { EXPECT_EQ(mapped_, 0) << "memory that nobody let go of"; }

  std::uint32_t transports() const override { return possible; }
  std::array<std::uint8_t, 16> device_uuid() const override { return {static_cast<std::uint8_t>(rank_)}; }
  void require_access(const std::array<std::uint8_t, 16>& peer, PeerTransport) override {
    EXPECT_NE(peer[0], rank_);
    fail_at(Step::kAccess);
  }
  void allocate(PeerTransport transport, std::int64_t bytes) override {
    fail_at(Step::kAllocate);
    transport_ = transport;
    bytes_ = static_cast<std::size_t>(bytes);
    fd_ = ::memfd_create("region", MFD_CLOEXEC);
    ASSERT_EQ(::ftruncate(fd_, bytes), 0);
    own_ = map_of(fd_);
    std::memset(own_, 0xff, bytes_);
  }
  MemoryHandle handle() override {
    MemoryHandle handle;
    if (transport_ == PeerTransport::kVmmFd) handle.fd = ::dup(fd_);
    const void* address = own_;
    std::memcpy(handle.bytes.data(), &address, sizeof address);
    return handle;
  }
  void map(std::span<MemoryHandle> handles) override {
    fail_at(Step::kMap);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      const MemoryHandle& handle = handles[static_cast<std::size_t>(peer)];
      std::byte* address = nullptr;
      std::memcpy(&address, handle.bytes.data(), sizeof address);
      peers_.push_back(transport_ == PeerTransport::kVmmFd ? map_of(handle.fd) : address);
    }
  }
  void self_test() override {
    fail_at(Step::kSelfTest);
    for (std::byte* peer : peers_) {
      EXPECT_EQ(peer[static_cast<std::size_t>(8 + rank_)], std::byte{0xff}) << "written before it was filled";
      std::atomic_ref(peer[static_cast<std::size_t>(rank_)]).store(std::byte{1});
    }
    for (int peer = 0; peer < size_; ++peer)
      while (peer != rank_ && std::atomic_ref(own_[peer]).load() != std::byte{1}) std::this_thread::yield();
  }
  void share_device(int ranks) override { EXPECT_EQ(ranks, 1); }
  void stop() override {}
  void unmap() noexcept override {
    if (transport_ == PeerTransport::kVmmFd)
      for (std::byte* peer : peers_) unmap_of(peer);
    peers_.clear();
  }
  void release() noexcept override {
    if (own_) unmap_of(own_);
    if (fd_ >= 0) ::close(fd_);
    own_ = nullptr;
    fd_ = -1;
  }
  void forget() { mapped_ = 0; }  // a peer is gone, and the memory stays on purpose

  std::uint32_t possible =
      1u << static_cast<unsigned>(PeerTransport::kVmmFd) | 1u << static_cast<unsigned>(PeerTransport::kSameProcess);

 private:
  void fail_at(Step step) const {
    if (step == fails_) fail(StatusCode::kOutOfMemory, "test", "step", "refused", "another");
  }
  std::byte* map_of(int fd) {
    void* address = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    EXPECT_NE(address, MAP_FAILED);
    ++mapped_;
    return static_cast<std::byte*>(address);
  }
  void unmap_of(std::byte* address) {
    ::munmap(address, bytes_);
    --mapped_;
  }

  const int rank_, size_;
  const Step fails_;
  PeerTransport transport_ = PeerTransport::kAuto;
  std::size_t bytes_ = 0;
  int fd_ = -1;
  std::byte* own_ = nullptr;
  std::vector<std::byte*> peers_;
  int mapped_ = 0;
};

// What `body` threw on each rank, run as threads.
std::vector<Status> on_ranks(int size, const std::function<void(int, Bootstrap&)>& body, double limit_s = 20) {
  std::vector<Status> statuses(static_cast<std::size_t>(size));
  const std::string path = fresh_path();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        const auto bootstrap = make_socket_bootstrap(path, rank, size, limit_s);
        body(rank, *bootstrap);
      } catch (const Error& error) {
        statuses[static_cast<std::size_t>(rank)] = error.status();
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_FALSE(fs::exists(path));
  return statuses;
}

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST(MailboxSetUp, every_rank_gets_all_bytes_in_order) {
  for (const int size : {2, 8}) {
    const auto statuses = on_ranks(size, [&](int rank, Bootstrap& bootstrap) {
      for (std::uint32_t round = 0; round < 50; ++round) {
        std::vector<std::uint32_t> mine(1 + 1000 * (round % 2), round * 100 + static_cast<std::uint32_t>(rank));
        std::vector<std::uint32_t> all(mine.size() * static_cast<std::size_t>(size));
        bootstrap.all_gather_bytes(mine.data(), all.data(), mine.size() * 4, 20);
        for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], round * 100 + i / mine.size());
        bootstrap.barrier(20);
      }
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.message();
  }
}

TEST(MailboxSetUp, a_rank_that_does_not_come_or_leaves_is_named_in_time) {
  Status status;
  const double took = seconds([&] {
    try {
      make_socket_bootstrap(fresh_path(), 0, 3, 0.2);
    } catch (const Error& error) {
      status = error.status();
    }
  });
  EXPECT_EQ(status.code, StatusCode::kPeerLost) << status.message();
  EXPECT_EQ(status.value, "1, which did not come");
  EXPECT_LT(took, 5);
  const auto statuses = on_ranks(3, [](int rank, Bootstrap& bootstrap) {
    if (rank == 2) return;  // its socket closes
    bootstrap.barrier(20);
  });
  EXPECT_EQ(statuses[0].code, StatusCode::kPeerLost);
  EXPECT_EQ(statuses[0].value, "2, which has left");
  EXPECT_EQ(statuses[1].code, StatusCode::kPeerLost) << "it hears of it by rank 0";
}

TEST(MailboxSetUp, a_config_of_another_size_than_the_group_is_refused_on_all_ranks) {
  const auto statuses = on_ranks(3, [](int rank, Bootstrap& bootstrap) {
    MailboxConfig config = config_of(rank, rank == 1 ? 2 : 3);
    Mailbox::create(bootstrap, config, Device::cpu());
  });
  for (const Status& status : statuses) {
    EXPECT_NE(status.argument.find("rank "), std::string::npos) << status.message();
    EXPECT_EQ(status.message(), statuses[0].message());
  }
}

TEST(MailboxSetUp, ranks_that_are_not_one_group_are_refused) {
  const std::string path = fresh_path();
  Status first;
  std::thread other([&] {
    try {
      const auto bootstrap = make_socket_bootstrap(path, 1, 3, 5);
    } catch (const Error&) {
    }
  });
  try {
    make_socket_bootstrap(path, 0, 2, 5);
  } catch (const Error& error) {
    first = error.status();
  }
  other.join();
  EXPECT_EQ(first.code, StatusCode::kInvalidArgument) << first.message();
  EXPECT_EQ(first.argument, "size of rank 1");
  const auto statuses = on_ranks(2, [](int rank, Bootstrap& bootstrap) {
    char bytes[16] = {};
    bootstrap.all_gather_bytes(bytes, bytes, rank == 0 ? 4 : 8, 5);
  });
  EXPECT_EQ(statuses[0].code, StatusCode::kInvalidArgument) << statuses[0].message();
  EXPECT_THROW(make_socket_bootstrap(std::string(91, 'x'), 0, 2), Error);
  EXPECT_THROW(make_socket_bootstrap(path, 2, 2), Error);
  EXPECT_THROW(make_socket_bootstrap(path, 0, 9), Error);
}

TEST(MailboxSetUp, descriptors_reach_every_peer) {
  const std::size_t before = open_descriptors();
  const std::string path = fresh_path();
  const auto statuses = on_ranks(4, [&](int rank, Bootstrap& bootstrap) {
    const int fd = ::memfd_create("own", MFD_CLOEXEC);
    const char letter = static_cast<char>('a' + rank);
    ASSERT_EQ(::pwrite(fd, &letter, 1, 0), 1);
    const DescriptorSocket socket(path, rank);
    bootstrap.barrier(20);
    const auto fds = socket.exchange(4, fd, 20);
    for (int peer = 0; peer < 4; ++peer) {
      if (peer == rank) {
        EXPECT_EQ(fds[static_cast<std::size_t>(peer)], -1);
        continue;
      }
      char is = 0;
      EXPECT_EQ(::pread(fds[static_cast<std::size_t>(peer)], &is, 1, 0), 1);
      EXPECT_EQ(is, 'a' + peer);
      ::close(fds[static_cast<std::size_t>(peer)]);
    }
    ::close(fd);
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(open_descriptors(), before);
  EXPECT_THROW(DescriptorSocket(path, 0).exchange(2, 0, 0.1), Error);
  EXPECT_FALSE(fs::exists(path + ".fd0"));
}

TEST(MailboxSetUp, groups_come_and_go_without_a_trace) {
  const std::size_t before = open_descriptors();
  for (const PeerTransport transport : {PeerTransport::kAuto, PeerTransport::kVmmFd})
    for (int round = 0; round < 20; ++round) {
      const auto statuses = on_ranks(3, [&](int rank, Bootstrap& bootstrap) {
        MailboxConfig config = config_of(rank, 3);
        config.transport = transport;
        HostMemory memory(rank, 3);
        set_up_mailbox(bootstrap, &config, memory);
        EXPECT_EQ(config.transport,
                  transport == PeerTransport::kAuto ? PeerTransport::kSameProcess : PeerTransport::kVmmFd);
        throw_if_error(tear_down_mailbox(bootstrap, config, memory));
      });
      for (const Status& status : statuses) ASSERT_TRUE(status.ok()) << status.message();
    }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(MailboxSetUp, what_fails_on_one_rank_fails_on_all_by_its_name) {
  using Step = HostMemory::Step;
  const std::size_t before = open_descriptors();
  for (const Step step : {Step::kAccess, Step::kAllocate, Step::kMap, Step::kSelfTest})
    for (const PeerTransport transport : {PeerTransport::kSameProcess, PeerTransport::kVmmFd}) {
      std::vector<Status> statuses;
      const double took = seconds([&] {
        statuses = on_ranks(2, [&](int rank, Bootstrap& bootstrap) {
          MailboxConfig config = config_of(rank, 2);
          config.transport = transport;
          // Where one fails its self-test the other must not wait for it in there.
          const bool fails = rank == 1 || step == Step::kSelfTest;
          HostMemory memory(rank, 2, fails ? step : Step::kNone);
          set_up_mailbox(bootstrap, &config, memory);
        });
      });
      EXPECT_LT(took, 10);
      for (const Status& status : statuses) {
        EXPECT_EQ(status.code, StatusCode::kOutOfMemory) << status.message();
        EXPECT_EQ(status.argument, step == Step::kSelfTest ? "rank 0: step" : "rank 1: step");
      }
    }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(MailboxSetUp, ranks_with_other_limits_are_told_so) {
  const auto told = [](const std::function<void(MailboxConfig&, HostMemory&)>& change) {
    const auto statuses = on_ranks(2, [&](int rank, Bootstrap& bootstrap) {
      MailboxConfig config = config_of(rank, 2);
      HostMemory memory(rank, 2);
      if (rank == 1) change(config, memory);
      set_up_mailbox(bootstrap, &config, memory);
    });
    EXPECT_EQ(statuses[0].message(), statuses[1].message());
    return statuses[0];
  };
  EXPECT_EQ(told([](MailboxConfig& c, HostMemory&) { c.max_rows = 32; }).argument, "max_rows of rank 1");
  EXPECT_EQ(told([](MailboxConfig& c, HostMemory&) { c.max_cols = 72; }).argument, "max_cols of rank 1");
  EXPECT_EQ(told([](MailboxConfig& c, HostMemory&) { c.strict_fence = true; }).argument, "strict_fence of rank 1");
  EXPECT_EQ(told([](MailboxConfig& c, HostMemory&) { c.rank = 0; }).argument, "rank");
  EXPECT_EQ(told([](MailboxConfig& c, HostMemory&) { c.transport = PeerTransport::kVmmFd; }).argument,
            "transport of rank 1");
  const Status none = told([](MailboxConfig&, HostMemory& memory) { memory.possible = 0; });
  EXPECT_EQ(none.code, StatusCode::kUnavailable);
  EXPECT_NE(none.value.find("rank 1: none"), std::string::npos) << none.message();
}

TEST(MailboxSetUp, a_group_that_spans_hosts_is_refused) {
  RankRecord a, b;
  a.size = b.size = 2;
  b.rank = 1;
  a.transports = b.transports = 1u << static_cast<unsigned>(PeerTransport::kVmmFd);
  const RankRecord good[] = {a, b};
  EXPECT_TRUE(check_records(good).ok());
  b.host = {1, 2};
  const RankRecord spread[] = {a, b};
  EXPECT_EQ(check_records(spread).code, StatusCode::kUnavailable);
  EXPECT_EQ(check_records(spread).argument, "host of rank 1");
}

TEST(MailboxSetUp, two_processes_share_memory_by_descriptor) {
  const std::string path = fresh_path();
  const auto rank = [&](int of) {
    MailboxConfig config = config_of(of, 2);
    HostMemory memory(of, 2);
    const auto bootstrap = make_socket_bootstrap(path, of, 2, 20);
    set_up_mailbox(*bootstrap, &config, memory);
    const bool by_descriptor = config.transport == PeerTransport::kVmmFd;
    throw_if_error(tear_down_mailbox(*bootstrap, config, memory));
    return by_descriptor;
  };
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int result = 1;
    try {
      result = rank(1) ? 0 : 2;
    } catch (...) {
    }
    ::_exit(result);
  }
  EXPECT_TRUE(rank(0));
  int result = -1;
  ASSERT_EQ(::waitpid(child, &result, 0), child);
  EXPECT_EQ(result, 0);
}

TEST(MailboxSetUp, a_peer_that_is_gone_does_not_keep_close_waiting) {
  const auto statuses = on_ranks(2, [&](int rank, Bootstrap& bootstrap) {
    MailboxConfig config = config_of(rank, 2);
    config.transport = PeerTransport::kVmmFd;
    HostMemory memory(rank, 2);
    set_up_mailbox(bootstrap, &config, memory);
    if (rank == 1) {
      memory.unmap();
      memory.release();
      return;
    }
    Status status;
    EXPECT_LT(seconds([&] { status = tear_down_mailbox(bootstrap, config, memory); }), 10);
    EXPECT_EQ(status.code, StatusCode::kPeerLost) << status.message();
    memory.forget();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.message();
}

// An NCCL that joins where all have rank 0's id.
class HostNccl final : public NcclPlan {
 public:
  explicit HostNccl(int rank) : rank_(rank) {}
  int version() const override { return version_code; }
  NcclId unique_id() const override {
    EXPECT_EQ(rank_, 0) << "one rank makes the id";
    if (fails) fail(StatusCode::kDeviceError, "test", "ncclGetUniqueId", "some error", "ncclSuccess");
    return {{'i', 'd'}};
  }
  void join(const NcclId& id) override { joined = id.bytes[0] == 'i' && id.bytes[1] == 'd'; }
  void all_gather(const GatherStep&, Stream) override {}
  void all_gather_words(const GatherStep&, Stream) override {}
  void all_reduce_add_norm(const AddNormStep&, Stream) override {}
  bool is_capturing(Stream) const override { return false; }
  Status status() const override { return {}; }
  void close() override {}

  int version_code = 22809;
  bool fails = false;
  bool joined = false;

 private:
  const int rank_;
};

TEST(MailboxSetUp, ranks_join_nccl_by_the_id_of_rank_0_or_none_does) {
  const auto statuses_of = [](auto change, bool all_join) {
    return on_ranks(4, [&](int rank, Bootstrap& bootstrap) {
      MailboxConfig config = config_of(rank, 4);
      HostNccl plan(rank);
      change(rank, config, plan);
      try {
        set_up_nccl(bootstrap, config, plan);
      } catch (const Error&) {
        EXPECT_FALSE(plan.joined);
        throw;
      }
      EXPECT_EQ(plan.joined, all_join);
    });
  };
  for (const Status& status : statuses_of([](int, MailboxConfig&, HostNccl&) {}, true))
    EXPECT_TRUE(status.ok()) << status.message();
  for (const Status& status : statuses_of([](int, MailboxConfig&, HostNccl& plan) { plan.fails = true; }, false)) {
    EXPECT_EQ(status.code, StatusCode::kDeviceError);
    EXPECT_EQ(status.argument, "rank 0: ncclGetUniqueId");
  }
  for (const Status& status :
       statuses_of([](int rank, MailboxConfig&, HostNccl&plan) { plan.version_code -= rank == 2; }, false)) {
    EXPECT_EQ(status.code, StatusCode::kInvalidArgument);
    EXPECT_EQ(status.argument, "NCCL of rank 2");
  }
  for (const Status& status :
       statuses_of([](int rank, MailboxConfig&config, HostNccl&) { config.max_rows += rank == 3; }, false))
    EXPECT_EQ(status.argument, "max_rows of rank 3");
}

}  // namespace
}  // namespace twostep
