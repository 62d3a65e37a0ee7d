// A child process that answers one line for each line it is given. It is started when it is first asked, and again
// after it hung or died.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace twostep {

class LineWorker {
 public:
  // command[0] is the file that is run. A line must be taken and answered within `limit`.
  LineWorker(std::vector<std::string> command, std::chrono::milliseconds limit);
  LineWorker(const LineWorker&) = delete;
  LineWorker& operator=(const LineWorker&) = delete;
  ~LineWorker() { stop(); }

  struct Reply {
    std::string line;
    std::string lost;  // why there is no line: the process hung or died, and is gone
  };
  // Throws kUnavailable where no process can be made.
  Reply ask(const std::string& line);

  // Ends the process; the next ask starts another.
  void stop();
  int starts() const { return starts_; }

 private:
  void start();
  bool ready(short events, std::chrono::steady_clock::time_point deadline) const;  // false: not by then
  Reply hung();
  std::string reap();  // how it ended

  std::vector<std::string> command_;
  std::chrono::milliseconds limit_;
  pid_t pid_ = -1;
  int socket_ = -1;
  std::string received_;  // after the last line that was taken
  int starts_ = 0;
};

}  // namespace twostep
