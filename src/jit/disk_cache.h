// Cubins on disk: one checked file per key, published by one rename (spec: draft-gemm 6.5). Pure, and optional:
// no function throws for a fault of the disk. Trouble costs a compile and one warning per folder.
//
//   <source hash>.<NVRTC version>.cubin   header, then the cubin; 0600, in a folder of 0700
//   <source hash>.<NVRTC version>.tmp     lock of the key, and the file that becomes the entry
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "jit/compile.h"

namespace twostep {

class DiskCache {
 public:
  struct Entry {
    std::string version;  // NVRTC that built it
    Cubin cubin;
  };

  // Exclusive over processes and threads while it lives; the operating system frees it when its holder dies.
  class Lock {
   public:
    Lock() = default;
    Lock(Lock&& other) noexcept;
    Lock& operator=(Lock&&) = delete;
    ~Lock();
    bool held() const { return fd_ >= 0; }

   private:
    friend class DiskCache;
    int fd_ = -1;
    std::string path_;
  };

  explicit DiskCache(std::string dir) : dir_(std::move(dir)) {}  // "": always empty, keeps nothing

  // The entry of this source and NVRTC version; version "" takes the highest that is there. An entry whose
  // header, length or checksum is wrong is deleted, not returned.
  std::optional<Entry> read(const std::string& source, const std::string& version) const;

  // Waits at most `wait` for the lock of the key. Not held afterwards: no folder, no locks on this file system,
  // or the time is over; the caller then builds for itself.
  Lock lock(const std::string& source, const std::string& version, std::chrono::milliseconds wait) const;

  // Publishes an entry. Without a held lock it goes through a file of its own: the last rename wins, and both
  // contents are whole.
  void write(const std::string& source, const Entry& entry, Lock& lock) const;

  void remove(const std::string& source, const std::string& version) const;

  const std::string& dir() const { return dir_; }

 private:
  std::string path(const std::string& source, const std::string& version, const char* suffix) const;

  std::string dir_;
};

}  // namespace twostep
