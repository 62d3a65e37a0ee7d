// Sockets of one host that do not wait beyond a deadline.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>

namespace twostep {

// Closed on destruction.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();
  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

class Deadline {
 public:
  explicit Deadline(double seconds)
      : at_(std::chrono::steady_clock::now() +
            std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds))) {}
  int milliseconds_left() const;  // 0: over
  bool is_over() const { return milliseconds_left() == 0; }

 private:
  std::chrono::steady_clock::time_point at_;
};

enum class Transfer { kDone, kLate, kClosed };

constexpr std::size_t kLongestSocketPath = 107;  // of sockaddr_un, without its final 0

// All throw kUnavailable with the system's message where the socket itself fails.
Socket make_socket(int type);  // SOCK_STREAM, SOCK_DGRAM; AF_UNIX, not blocking
// The path is the socket's until its owner goes.
class SocketPath {
 public:
  explicit SocketPath(std::string path) : path_(std::move(path)) {}
  ~SocketPath();
  SocketPath(const SocketPath&) = delete;
  SocketPath& operator=(const SocketPath&) = delete;

 private:
  const std::string path_;
};
void bind_socket(const Socket& socket, const std::string& path);
bool connect_socket(const Socket& socket, const std::string& path);  // false: nobody listens there
bool wait_readable(int fd, const Deadline& deadline);
Transfer send_all(const Socket& socket, const void* data, std::size_t bytes, const Deadline& deadline);
Transfer receive_all(const Socket& socket, void* data, std::size_t bytes, const Deadline& deadline);

[[noreturn]] void fail_socket(const char* call, const std::string& path);  // with errno

}  // namespace twostep
