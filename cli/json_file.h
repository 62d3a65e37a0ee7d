// What --json writes.
#pragma once

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <span>
#include <string>

#include "core/check.h"
#include "io/partial_file.h"

namespace twostep::cli {

// Opened before minutes of work, so that a file that cannot be written is refused at once. It gets its name when all is
// measured: an old one is kept until then. Behind a link it is the file that is replaced, and not the link. What is no
// file on a disk (/dev/stdout, a FIFO) is written in place. No path: nothing is written.
class JsonFile {
 public:
  JsonFile(const std::string& path, const char* place) : path_(path), place_(place) {
    namespace fs = std::filesystem;
    if (path.empty()) return;
    std::error_code error;
    const auto kind = fs::status(path, error).type();
    bool in_place = kind != fs::file_type::regular && kind != fs::file_type::not_found;
    fs::path file = path;
    while (!in_place && fs::is_symlink(file, error)) {
      // A descriptor of ours: standard output goes to the same file.
      in_place = fs::weakly_canonical(file.parent_path(), error).string().starts_with("/proc/");
      file = file.parent_path() / fs::read_symlink(file, error);
    }
    if (!in_place) file_.emplace(file, place, "--json");
    else if (stream_.open(path, std::ios::app); !stream_.is_open()) refuse();
  }
  void add(const std::string& text) {
    if (file_) file_->write(std::as_bytes(std::span(text)));
    if (!stream_.is_open()) return;
    std::fflush(stdout);  // what was printed before comes first
    stream_ << text;
  }
  void publish() {
    if (file_) file_->publish();
    else if (stream_.is_open() && !stream_.flush()) refuse();
  }

 private:
  [[noreturn]] void refuse() const {
    fail(StatusCode::kUnavailable, place_, "--json", path_, "a file that can be written", "choose another path");
  }

  std::string path_;
  std::string place_;
  std::optional<PartialFile> file_;
  std::ofstream stream_;
};

}  // namespace twostep::cli
