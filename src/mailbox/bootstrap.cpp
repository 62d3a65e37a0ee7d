// Ranks of one host that find each other at a path: rank 0 hears everybody and tells all of it to everybody.
#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "core/check.h"
#include "mailbox/set_up.h"
#include "mailbox/socket.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "mailbox.bootstrap";
constexpr std::uint32_t kHello = 0x32706d62;  // "bmp2"
constexpr std::size_t kLongestPath = 90;      // room for the sockets of descriptors beside it
constexpr auto kAgain = std::chrono::milliseconds(5);

struct Hello {
  std::uint32_t word = kHello;
  std::int32_t rank = 0, size = 0;
};

[[noreturn]] void fail_peer(int rank, const char* how, double limit_s) {
  fail(StatusCode::kPeerLost, kPlace, "rank", fmt::format("{}, which {}", rank, how),
       fmt::format("all ranks within {} s", limit_s), "look at that rank, then start the group again");
}

class SocketBootstrap final : public Bootstrap {
 public:
  SocketBootstrap(std::string path, int rank, int size, double limit_s)
      : path_(std::move(path)), rank_(rank), peers_(static_cast<std::size_t>(size)) {
    const Deadline deadline(limit_s);
    if (rank_ == 0) listen(deadline, limit_s);
    else connect(deadline, limit_s);
  }

  void all_gather_bytes(const void* mine, void* all, std::size_t bytes, double limit_s) override {
    const Deadline deadline(limit_s);
    auto* to = static_cast<std::byte*>(all);
    if (rank_ != 0) {
      const std::uint64_t count = bytes;
      expect(send_all(peers_[0], &count, sizeof count, deadline), 0, limit_s);
      expect(send_all(peers_[0], mine, bytes, deadline), 0, limit_s);
      expect(receive_all(peers_[0], all, bytes * peers_.size(), deadline), 0, limit_s);
      return;
    }
    std::memcpy(to, mine, bytes);
    for (std::size_t rank = 1; rank < peers_.size(); ++rank) {
      std::uint64_t count = 0;
      expect(receive_all(peers_[rank], &count, sizeof count, deadline), static_cast<int>(rank), limit_s);
      if (count != bytes)
        fail(StatusCode::kInvalidArgument, kPlace, fmt::format("bytes of rank {}", rank), std::to_string(count),
             fmt::format("{}, as rank 0", bytes), "make the same calls on all ranks");
      expect(receive_all(peers_[rank], to + rank * bytes, bytes, deadline), static_cast<int>(rank), limit_s);
    }
    for (std::size_t rank = 1; rank < peers_.size(); ++rank)
      expect(send_all(peers_[rank], all, bytes * peers_.size(), deadline), static_cast<int>(rank), limit_s);
  }

  std::string socket_path() const override { return path_; }

 private:
  // A group that has lost a rank is of no more use: the others hear of it by their closed sockets.
  void expect(Transfer result, int rank, double limit_s) {
    if (result == Transfer::kDone) return;
    for (Socket& peer : peers_) peer = Socket();
    fail_peer(rank, result == Transfer::kLate ? "did not answer" : "has left", limit_s);
  }

  void listen(const Deadline& deadline, double limit_s) {
    listener_ = make_socket(SOCK_STREAM);
    bind_socket(listener_, path_);
    bound_.emplace(path_);
    if (::listen(listener_.fd(), kMostRanks) != 0) fail_socket("listen", path_);
    for (std::size_t come = 1; come < peers_.size();) {
      if (!wait_readable(listener_.fd(), deadline))
        for (std::size_t rank = 1; rank < peers_.size(); ++rank)
          if (!peers_[rank].is_open()) fail_peer(static_cast<int>(rank), "did not come", limit_s);
      Socket peer(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!peer.is_open()) continue;  // it has gone again
      Hello hello;
      if (receive_all(peer, &hello, sizeof hello, deadline) != Transfer::kDone || hello.word != kHello) continue;
      const auto size = static_cast<std::int32_t>(peers_.size());
      if (hello.size != size)
        fail(StatusCode::kInvalidArgument, kPlace, fmt::format("size of rank {}", hello.rank),
             std::to_string(hello.size), fmt::format("{}, as rank 0", size), "start all ranks with the same size");
      if (hello.rank < 1 || hello.rank >= size || peers_[static_cast<std::size_t>(hello.rank)].is_open())
        fail(StatusCode::kInvalidArgument, kPlace, "rank", fmt::format("{} came twice", hello.rank), "each rank once",
             "give each rank its own number, and each group its own path");
      peers_[static_cast<std::size_t>(hello.rank)] = std::move(peer);
      ++come;
    }
  }

  void connect(const Deadline& deadline, double limit_s) {
    const Hello hello{kHello, rank_, static_cast<std::int32_t>(peers_.size())};
    for (;;) {
      peers_[0] = make_socket(SOCK_STREAM);
      if (connect_socket(peers_[0], path_)) break;
      if (deadline.is_over()) fail_peer(0, "does not listen there", limit_s);
      std::this_thread::sleep_for(kAgain);
    }
    expect(send_all(peers_[0], &hello, sizeof hello, deadline), 0, limit_s);
  }

  const std::string path_;
  const int rank_;
  Socket listener_;  // of rank 0, as its path
  std::optional<SocketPath> bound_;
  std::vector<Socket> peers_;  // of rank 0: everybody; of others: rank 0 alone
};

}  // namespace

std::unique_ptr<Bootstrap> make_socket_bootstrap(const std::string& path, int rank, int size, double limit_s) {
  if (path.empty() || path.size() > kLongestPath)
    fail(StatusCode::kInvalidArgument, kPlace, "path", path, fmt::format("1 to {} bytes", kLongestPath),
         "use a shorter path, as under /tmp");
  if (size < 2 || size > kMostRanks)
    fail(StatusCode::kInvalidArgument, kPlace, "size", std::to_string(size), fmt::format("2 to {}", kMostRanks));
  if (rank < 0 || rank >= size)
    fail(StatusCode::kInvalidArgument, kPlace, "rank", std::to_string(rank), fmt::format("0 to {}", size - 1));
  if (!(limit_s >= 1e-3 && limit_s <= 3600))
    fail(StatusCode::kInvalidArgument, kPlace, "limit_s", fmt::format("{}", limit_s), "0.001 to 3600");
  return std::make_unique<SocketBootstrap>(path, rank, size, limit_s);
}

std::vector<int> exchange_descriptors(const std::string& path, int rank, int size, int fd, double limit_s) {
  const Deadline deadline(limit_s);
  const auto path_of = [&](int of) { return fmt::format("{}.fd{}", path, of); };
  const Socket socket = make_socket(SOCK_DGRAM);
  bind_socket(socket, path_of(rank));
  const SocketPath bound(path_of(rank));

  struct Descriptors {  // closed unless they are given away
    std::vector<int> fds;
    ~Descriptors() {
      for (const int of : fds)
        if (of >= 0) ::close(of);
    }
  } got{std::vector<int>(static_cast<std::size_t>(size), -1)};

  // One descriptor beside the sender's rank.
  struct Message {
    explicit Message(std::int32_t* of_rank) : rank_part{of_rank, sizeof *of_rank} {
      header.msg_iov = &rank_part;
      header.msg_iovlen = 1;
      header.msg_control = control;
      header.msg_controllen = sizeof control;
    }
    iovec rank_part;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
  };

  for (int i = 1; i < size; ++i) {
    const int peer = (rank + i) % size;
    std::int32_t mine = rank;
    Message message(&mine);
    cmsghdr* part = CMSG_FIRSTHDR(&message.header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(part), &fd, sizeof fd);
    for (;;) {
      const Socket to = make_socket(SOCK_DGRAM);
      if (connect_socket(to, path_of(peer)) && ::sendmsg(to.fd(), &message.header, MSG_NOSIGNAL) >= 0) break;
      if (deadline.is_over()) fail_peer(peer, "has no socket for descriptors", limit_s);
      std::this_thread::sleep_for(kAgain);
    }
  }
  for (int come = 1; come < size;) {
    if (!wait_readable(socket.fd(), deadline))
      for (int peer = 0; peer < size; ++peer)
        if (peer != rank && got.fds[static_cast<std::size_t>(peer)] < 0) fail_peer(peer, "sent no descriptor", limit_s);
    std::int32_t from = -1;
    Message message(&from);
    if (::recvmsg(socket.fd(), &message.header, MSG_CMSG_CLOEXEC) != sizeof from) continue;
    const cmsghdr* part = CMSG_FIRSTHDR(&message.header);
    if (part == nullptr || part->cmsg_type != SCM_RIGHTS) continue;
    int received = -1;
    std::memcpy(&received, CMSG_DATA(part), sizeof received);
    const bool expected = from >= 0 && from < size && from != rank && got.fds[static_cast<std::size_t>(from)] < 0;
    if (!expected) {
      ::close(received);
      continue;
    }
    got.fds[static_cast<std::size_t>(from)] = received;
    ++come;
  }
  return std::exchange(got.fds, {});
}

}  // namespace twostep
