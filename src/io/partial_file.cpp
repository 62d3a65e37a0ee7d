#include "io/partial_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/check.h"

namespace twostep {

PartialFile::PartialFile(std::filesystem::path file, std::string place, std::string option)
    : file_(std::move(file)),
      partial_(file_.string() + ".partial"),
      place_(std::move(place)),
      option_(std::move(option)) {
  while (!open_locked()) {
  }
  if (::ftruncate(descriptor_, 0) == 0) return;
  const int error = errno;
  ::unlink(partial_.c_str());
  ::close(descriptor_);  // a constructor that throws has no destructor
  refuse("ftruncate", error);
}

bool PartialFile::open_locked() {
  // O_NONBLOCK: a FIFO of that name must not hang us.
  descriptor_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
  if (descriptor_ < 0) refuse("open", errno);
  struct stat ours {};
  struct stat named {};
  int error = 0;
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) error = errno;
  // Some network file systems know no lock; a single writer must work there too.
  if (error == ENOSYS || error == EOPNOTSUPP || error == ENOLCK) error = 0;
  const bool regular = ::fstat(descriptor_, &ours) == 0 && S_ISREG(ours.st_mode);
  const bool same = ::lstat(partial_.c_str(), &named) == 0 && named.st_ino == ours.st_ino;
  if (error == 0 && regular && same) return true;
  ::close(descriptor_);
  if (error == EWOULDBLOCK)
    refuse("another process is writing it", "one writer at a time", "wait for it, or choose another folder");
  if (error != 0) refuse("flock", error);
  if (!regular)
    refuse(partial_.filename().string() + " is not a regular file", "a file of that name, or none", "remove it");
  return false;
}

PartialFile::~PartialFile() {
  if (descriptor_ < 0) return;
  ::unlink(partial_.c_str());  // while the lock is held: afterwards it may be another writer's
  ::close(descriptor_);
}

void PartialFile::refuse(std::string what, std::string accepted, std::string remedy) const {
  if (!option_.empty()) what = file_.string() + ": " + what;
  fail(StatusCode::kUnavailable, place_, option_.empty() ? file_.string() : option_, std::move(what),
       std::move(accepted), std::move(remedy));
}

void PartialFile::refuse(const char* call, int error) const {
  refuse(fmt::format("{}: {}", call, std::strerror(error)), "a folder that can be written and has room",
         "nothing was left behind; free space or choose another folder");
}

void PartialFile::reserve(std::uint64_t bytes) {
  // Not every file system can; the writes then find out.
  if (bytes > 0 && ::fallocate(descriptor_, 0, 0, static_cast<off_t>(bytes)) != 0 &&
      (errno == ENOSPC || errno == EFBIG))
    refuse("fallocate", errno);
}

void PartialFile::write(std::span<const std::byte> data) {
  while (!data.empty()) {
    const auto written = ::write(descriptor_, data.data(), data.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) refuse("write", written < 0 ? errno : ENOSPC);
    data = data.subspan(static_cast<std::size_t>(written));
  }
}

void PartialFile::publish() {
  // What only close reports (FUSE, NFS), a close of a duplicate reports too, and the lock stays ours for the rename.
  if (::fsync(descriptor_) != 0 && errno != EINVAL) refuse("fsync", errno);
  const int duplicate = ::dup(descriptor_);
  if (duplicate < 0) refuse("dup", errno);
  if (::close(duplicate) != 0 && errno != EINTR) refuse("close", errno);
  if (::rename(partial_.c_str(), file_.c_str()) != 0) refuse("rename", errno);
  ::close(std::exchange(descriptor_, -1));
}

}  // namespace twostep
