// What --json writes: JSON lines.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "io/partial_file.h"

namespace twostep::cli {

// The file gets its name when all is measured: an old one is kept until then. No path: nothing is written.
class JsonFile {
 public:
  JsonFile(const std::string& path, const char* place) {
    if (!path.empty()) file_.emplace(path, place);
  }
  void add(const std::string& lines) {
    if (file_) file_->write(std::as_bytes(std::span(lines)));
  }
  void publish() {
    if (file_) file_->publish();
  }

 private:
  std::optional<PartialFile> file_;
};

}  // namespace twostep::cli
