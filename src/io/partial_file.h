// A file that gets its name when it is whole: written as FILE.partial, then renamed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace twostep {

// The name of the partial file is fixed, so that the next run takes over what a killed one left, and locked, so
// that two writers of one file do not mix: the second is refused. A failed call is kUnavailable with the file and
// the system's text; nothing is left.
class PartialFile {
 public:
  // `place` of the refusals, and the option that named the file; without one the file is their argument.
  PartialFile(std::filesystem::path file, std::string place, std::string option = {});
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;
  ~PartialFile();  // without publish(): removes the partial file

  // Takes the space at once where the file system can, so that a disk too small says so before gigabytes are written.
  void reserve(std::uint64_t bytes);
  void write(std::span<const std::byte> data);
  void publish();  // once, after the last write

 private:
  bool open_locked();  // false: the file was renamed or removed between open and lock
  [[noreturn]] void refuse(std::string what, std::string accepted, std::string remedy) const;
  [[noreturn]] void refuse(const char* call, int error) const;

  std::filesystem::path file_;
  std::filesystem::path partial_;
  std::string place_;
  std::string option_;
  int descriptor_ = -1;
};

}  // namespace twostep
