// What goes wrong is told by rank, peer and epoch, nobody hangs, and a new group works (mailbox 12.9 to 12.15).
#include <chrono>
#include <filesystem>

#include "group.h"

namespace twostep::test {
namespace {

class MailboxErrors : public testing::Test {
 protected:
  void SetUp() override { skip_without(1); }
};

struct Views {
  TensorView in, out;
};
Views views(const Rank& r, std::int64_t rows, std::int64_t cols = 64) {
  return {TensorView::matrix(r.memory, rows, cols, r.device),
          TensorView::matrix(r.memory + Rank::kMemory / 2, rows, r.size * cols, r.device)};
}
void gather(const Rank& r, std::int64_t rows, Stream stream) {
  const Views v = views(r, rows);
  r.mailbox->all_gather(v.in, v.out, stream);
}
void gather(const Rank& r, std::int64_t rows) { gather(r, rows, r.stream->view()); }

MailboxConfig impatient(int size) {
  MailboxConfig config = config_of({size});
  config.peer_limit_s = 2;
  return config;
}
std::size_t open_descriptors() {
  namespace fs = std::filesystem;
  return static_cast<std::size_t>(std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator{}));
}

TEST_F(MailboxErrors, a_peer_that_leaves_out_a_call_is_named_and_a_new_group_works) {
  const auto start = std::chrono::steady_clock::now();
  on_ranks({3}, impatient(3), [](Rank& r) {
    gather(r, 4);
    if (r.rank != 1) gather(r, 4);
    r.stream->synchronize();
    r.meet();
    const Status status = r.mailbox->status();
    if (r.rank == 1) {
      EXPECT_TRUE(status.ok()) << status.message();
      return;
    }
    EXPECT_EQ(status.code, StatusCode::kPeerLost) << status.message();
    EXPECT_EQ(status.place, "mailbox.all_gather");
    EXPECT_EQ(status.value.substr(0, 2), "1,") << status.message();
    EXPECT_THROW(r.mailbox->check(), Error);
    EXPECT_THROW(gather(r, 4), Error) << "a poisoned mailbox takes no call";
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
  on_ranks({3}, impatient(3), [](Rank& r) {
    gather(r, 4);
    r.stream->synchronize();
    r.mailbox->check();
  });
}

TEST_F(MailboxErrors, replays_of_a_poisoned_mailbox_drain_and_write_nothing) {
  on_ranks({2}, impatient(2), [](Rank& r) {
    gather(r, 4);
    r.stream->synchronize();
    r.meet();
    const Graph graph(r.stream->view(), [&] { gather(r, 4); });
    r.meet();
    if (r.rank == 0) {
      graph.launch(r.stream->view());  // nobody answers
      r.stream->synchronize();
      EXPECT_EQ(r.mailbox->status().code, StatusCode::kPeerLost);
      const Views v = views(r, 4);
      const std::vector<std::uint16_t> poison(4 * 128, 0x1234);
      r.write(v.out.data, poison.data(), 2 * poison.size());
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < 100; ++i) graph.launch(r.stream->view());
      std::vector<std::uint16_t> got(poison.size());
      r.read(got.data(), v.out.data, 2 * got.size());
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
      EXPECT_EQ(got, poison);
    }
    r.meet();
  });
}

TEST_F(MailboxErrors, rows_that_differ_are_told_with_both_numbers) {
  for (const std::int64_t other : {0, 5}) {
    int told = 0;
    on_ranks({2}, impatient(2), [&](Rank& r) {
      gather(r, r.rank == 0 ? 3 : other);
      r.stream->synchronize();
      r.meet();
      const Status status = r.mailbox->status();
      if (r.rank == 0 && !status.ok()) {
        ++told;
        EXPECT_EQ(status.code, StatusCode::kInvalidArgument) << status.message();
        EXPECT_EQ(status.argument, "rows");
      }
    });
    EXPECT_EQ(told, 1) << "rank 0 has the data that never comes, or the end of the call";
  }
}

TEST_F(MailboxErrors, an_abort_ends_a_wait) {
  on_ranks({2}, [](Rank& r) {
    gather(r, 1);
    r.stream->synchronize();
    r.meet();
    if (r.rank == 0) {
      gather(r, 1);
      r.mailbox->abort();
      r.stream->synchronize();
      EXPECT_EQ(r.mailbox->status().code, StatusCode::kUnavailable) << r.mailbox->status().message();
    }
    r.meet();
  });
}

TEST_F(MailboxErrors, a_second_stream_is_refused_until_it_is_rebound) {
  on_ranks({2}, [](Rank& r) {
    const OwnedStream other;
    r.meet();
    gather(r, 2);
    EXPECT_THROW(gather(r, 2, other.view()), Error);
    r.stream->synchronize();
    r.mailbox->rebind_stream(other.view());
    gather(r, 2, other.view());
    other.synchronize();
    r.mailbox->check();
    r.meet();
  });
}

TEST_F(MailboxErrors, two_groups_of_one_process_do_not_meet) {
  on_ranks({2}, [](Rank& r) {
    const std::string path = fresh_path();  // of this rank's thread: told to the other
    std::array<char, 128> mine{}, all[2];
    std::copy(path.begin(), path.end(), mine.begin());
    r.bootstrap->all_gather_bytes(mine.data(), all, mine.size(), 20);
    const auto bootstrap = make_socket_bootstrap(all[0].data(), r.rank, 2);
    MailboxConfig config = config_of({2});
    config.rank = r.rank;
    Mailbox second = Mailbox::create(*bootstrap, config, r.device);
    const Views v = views(r, 2);
    for (int i = 0; i < 100; ++i) {
      gather(r, 3);
      second.all_gather(v.in, v.out, r.stream->view());
    }
    r.stream->synchronize();
    r.mailbox->check();
    second.check();
    second.close();
    EXPECT_THROW(second.all_gather(v.in, v.out, r.stream->view()), Error);
  });
}

TEST_F(MailboxErrors, groups_come_and_go_without_a_leak) {
  for (const PeerTransport transport : {PeerTransport::kSameProcess, PeerTransport::kVmmFd}) {
    const auto free_bytes = [] {
      const ContextGuard context(0);
      std::size_t free = 0, total = 0;
      TWOSTEP_CUDA_CHECK(cuMemGetInfo(&free, &total), "test");
      return free;
    };
    MailboxConfig config = config_of({2});
    config.transport = transport;
    const auto once = [&] {
      on_ranks({2}, config, [&](Rank& r) {
        EXPECT_EQ(transport_name(r.mailbox->config().transport), std::string(transport_name(transport)));
        gather(r, 2);
        r.stream->synchronize();
        r.mailbox->check();
      });
    };
    once();  // modules and pools of the driver
    const std::size_t before = free_bytes(), descriptors = open_descriptors();
    for (int i = 0; i < 100 && !HasFailure(); ++i) once();
    EXPECT_GE(free_bytes() + (16 << 20), before) << transport_name(transport);
    EXPECT_EQ(open_descriptors(), descriptors) << transport_name(transport);
  }
}

}  // namespace
}  // namespace twostep::test
