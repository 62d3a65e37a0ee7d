#include "measure/line_worker.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <thread>

#include "core/check.h"

namespace twostep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLongestLine = 1 << 20;
constexpr auto kEndingLimit = std::chrono::seconds(5);  // a process that closed its end is about to end

std::string how_ended(int status) {
  if (WIFSIGNALED(status)) return fmt::format("it was ended by signal {}", WTERMSIG(status));
  return fmt::format("it ended with status {}", WEXITSTATUS(status));
}

}  // namespace

LineWorker::LineWorker(std::vector<std::string> command, std::chrono::milliseconds limit)
    : command_(std::move(command)), limit_(limit) {}

void LineWorker::start() {
  // One socket for both directions, since a write to a dead one gives an error in place of a signal.
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0)
    fail(StatusCode::kUnavailable, "measure.LineWorker", command_.front(), std::strerror(errno), "a socket");
  std::vector<char*> arguments;
  for (std::string& word : command_) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ == 0) {  // only calls that are safe after a fork
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() == parent && ::dup2(ends[1], 0) == 0 && ::dup2(ends[1], 1) == 1)
      ::execv(arguments.front(), arguments.data());
    ::_exit(127);
  }
  ::close(ends[1]);
  socket_ = ends[0];
  if (pid_ < 0) {
    const std::string error = std::strerror(errno);
    stop();
    fail(StatusCode::kUnavailable, "measure.LineWorker", command_.front(), error, "a process");
  }
  ++starts_;
}

void LineWorker::stop() {
  if (socket_ >= 0) ::close(socket_);
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  socket_ = pid_ = -1;
  received_.clear();
}

bool LineWorker::ready(short events, Clock::time_point deadline) const {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd waiting{socket_, events, 0};
    const int count = left.count() > 0 ? ::poll(&waiting, 1, static_cast<int>(left.count())) : 0;
    if (count >= 0 || errno != EINTR) return count != 0;
  }
}

LineWorker::Reply LineWorker::hung() {
  stop();
  return {{}, fmt::format("no answer within {:g} s", std::chrono::duration<double>(limit_).count())};
}

std::string LineWorker::reap() {
  int status = 0;
  for (const auto deadline = Clock::now() + kEndingLimit; Clock::now() < deadline;) {
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      stop();
      return how_ended(status);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  stop();
  return "it closed its output";
}

LineWorker::Reply LineWorker::ask(const std::string& line) {
  if (pid_ < 0) start();
  const auto deadline = Clock::now() + limit_;
  const std::string message = line + "\n";
  for (std::size_t sent = 0; sent < message.size();) {
    if (!ready(POLLOUT, deadline)) return hung();
    const ssize_t count = ::send(socket_, message.data() + sent, message.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count <= 0) return {{}, reap()};
    sent += static_cast<std::size_t>(count);
  }
  for (;;) {
    if (const auto end = received_.find('\n'); end != std::string::npos) {
      Reply reply{received_.substr(0, end), {}};
      received_.erase(0, end + 1);
      return reply;
    }
    if (!ready(POLLIN, deadline)) return hung();
    std::array<char, 4096> buffer;
    const ssize_t count = ::recv(socket_, buffer.data(), buffer.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return {{}, reap()};
    received_.append(buffer.data(), static_cast<std::size_t>(count));
    if (received_.size() > kLongestLine) {
      stop();
      return {{}, "it answered more than one line holds"};
    }
  }
}

}  // namespace twostep
