// Progress on standard error: a bar on a terminal; elsewhere a line now and then, so that a log stays short.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace twostep::cli {

class Progress {
 public:
  explicit Progress(std::string label) : label_(std::move(label)) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() {  // a message that follows, of an error too, starts on its own line
    if (bar_shown_) std::fputc('\n', stderr);
  }

  // `done` of `all` units; `item` names what is being done, if that helps.
  void update(std::uint64_t done, std::uint64_t all, const std::string& item = {}) {
    const auto now = std::chrono::steady_clock::now();
    const auto pause = terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(10);
    if (now - shown_ < pause && !(terminal_ && done == all)) return;
    shown_ = now;
    const int percent = all ? static_cast<int>(100 * done / all) : 100;
    if (!terminal_) {
      std::fprintf(stderr, "%s: %d%% %s\n", label_.c_str(), percent, item.c_str());
      return;
    }
    constexpr int kWidth = 30;
    const std::string bar(static_cast<std::size_t>(std::clamp(percent, 0, 100) * kWidth / 100), '#');
    std::fprintf(stderr, "\r%s [%-*s] %3d%% %-24.24s", label_.c_str(), kWidth, bar.c_str(), percent, item.c_str());
    std::fflush(stderr);
    bar_shown_ = true;
  }

 private:
  std::string label_;
  bool terminal_ = ::isatty(STDERR_FILENO) == 1;
  bool bar_shown_ = false;
  std::chrono::steady_clock::time_point shown_ = std::chrono::steady_clock::now();
};

}  // namespace twostep::cli
