#include "mailbox/socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/check.h"

namespace twostep {
namespace {

sockaddr_un address_of(const std::string& path) {
  if (path.empty() || path.size() > kLongestSocketPath)
    fail(StatusCode::kInvalidArgument, "mailbox.bootstrap", "path", path,
         "1 to " + std::to_string(kLongestSocketPath) + " bytes", "use a shorter path, as under /tmp");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

bool wait_for(int fd, short events, const Deadline& deadline) {
  pollfd what = {fd, events, 0};
  for (;;) {
    const int left = deadline.milliseconds_left();
    const int ready = ::poll(&what, 1, left);
    if (ready > 0) return true;
    if (ready == 0 && left == 0) return false;
    if (ready < 0 && errno != EINTR) fail_socket("poll", "");
  }
}

bool is_closed(int error) { return error == EPIPE || error == ECONNRESET; }

}  // namespace

Socket::Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}
Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

SocketPath::~SocketPath() { ::unlink(path_.c_str()); }

int Deadline::milliseconds_left() const {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
}

void fail_socket(const char* call, const std::string& path) {
  fail(StatusCode::kUnavailable, "mailbox.bootstrap", path.empty() ? call : std::string(call) + " " + path,
       std::strerror(errno), "success", "use a folder that all ranks may write to");
}

Socket make_socket(int type) {
  Socket socket(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_open()) fail_socket("socket", "");
  return socket;
}

void bind_socket(const Socket& socket, const std::string& path) {
  const sockaddr_un address = address_of(path);
  ::unlink(path.c_str());  // left by a process that was killed
  if (::bind(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) fail_socket("bind", path);
}

bool connect_socket(const Socket& socket, const std::string& path) {
  const sockaddr_un address = address_of(path);
  if (::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return true;
  if (errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) return false;
  fail_socket("connect", path);
}

bool wait_readable(int fd, const Deadline& deadline) { return wait_for(fd, POLLIN, deadline); }

Transfer send_all(const Socket& socket, const void* data, std::size_t bytes, const Deadline& deadline) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(socket.fd(), from, bytes, MSG_NOSIGNAL);
    if (sent > 0) {
      from += sent;
      bytes -= static_cast<std::size_t>(sent);
    } else if (errno == EAGAIN) {
      if (!wait_for(socket.fd(), POLLOUT, deadline)) return Transfer::kLate;
    } else if (is_closed(errno)) {
      return Transfer::kClosed;
    } else if (errno != EINTR) {
      fail_socket("send", "");
    }
  }
  return Transfer::kDone;
}

Transfer receive_all(const Socket& socket, void* data, std::size_t bytes, const Deadline& deadline) {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t received = ::recv(socket.fd(), to, bytes, 0);
    if (received > 0) {
      to += received;
      bytes -= static_cast<std::size_t>(received);
    } else if (received == 0 || is_closed(errno)) {
      return Transfer::kClosed;
    } else if (errno == EAGAIN) {
      if (!wait_for(socket.fd(), POLLIN, deadline)) return Transfer::kLate;
    } else if (errno != EINTR) {
      fail_socket("recv", "");
    }
  }
  return Transfer::kDone;
}

}  // namespace twostep
