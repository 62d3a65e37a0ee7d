#include "jit/disk_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/hash.h"
#include "core/log.h"

namespace twostep {
namespace {

constexpr std::uint32_t kFormat = 1;
constexpr char kMagic[8] = {'T', 'W', 'O', 'S', 'T', 'E', 'P', 'C'};

struct Header {
  char magic[8];
  std::uint32_t format;
  std::int32_t registers;
  std::int32_t spill_store_bytes;
  std::int32_t spill_load_bytes;
  std::int32_t stack_bytes;
  std::int32_t static_smem_bytes;
  char key[32];
  std::uint64_t payload_bytes;
  std::uint64_t checksum;  // of the file with this field zero
};
static_assert(sizeof(Header) == 80, "the header has no padding: its bytes are the format");

std::string encode(const std::string& key, const Cubin& cubin) {
  const auto& r = cubin.resources;
  Header header{{},
                kFormat,
                r.registers,
                r.spill_store_bytes,
                r.spill_load_bytes,
                r.stack_bytes,
                r.static_smem_bytes,
                {},
                cubin.bytes.size(),
                0};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  std::memcpy(header.key, key.data(), std::min(key.size(), sizeof header.key));
  std::string file(reinterpret_cast<const char*>(&header), sizeof header);
  file += cubin.bytes;
  header.checksum = hash64(file);
  std::memcpy(file.data(), &header, sizeof header);
  return file;
}

std::optional<Cubin> decode(const std::string& key, std::string file) {
  Header header;
  if (file.size() < sizeof header) return std::nullopt;
  std::memcpy(&header, file.data(), sizeof header);
  const std::uint64_t checksum = std::exchange(header.checksum, 0);
  std::memcpy(file.data(), &header, sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 || header.format != kFormat ||
      std::string_view(header.key, sizeof header.key) != key || header.payload_bytes != file.size() - sizeof header ||
      checksum != hash64(file))
    return std::nullopt;
  return Cubin{file.substr(sizeof header),
               {header.registers, header.spill_store_bytes, header.spill_load_bytes, header.stack_bytes,
                header.static_smem_bytes}};
}

void warn_once(const std::string& dir, const std::string& path, const char* call) {
  const std::string reason = std::strerror(errno);
  static std::mutex mutex;
  static std::set<std::string> warned;
  const std::lock_guard guard(mutex);
  if (warned.insert(dir).second)
    log_warn(
        fmt::format("jit.cache: {} {}: {}; kernels stay in memory only; set TWOSTEP_CACHE_DIR to a folder that "
                    "can be written, or TWOSTEP_CACHE=0",
                    call, path, reason));
}

// None for what is no regular file or too large for an entry: neither stalls nor exhausts the process.
std::optional<std::string> read_file(const std::string& path) {
  constexpr std::size_t kMostBytes = std::size_t{64} << 20;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO opens without its writer
  if (fd < 0) return std::nullopt;
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || static_cast<std::size_t>(info.st_size) > kMostBytes) {
    ::close(fd);
    return std::nullopt;
  }
  std::string bytes;
  char part[1 << 16];
  ssize_t got = 0;
  while (bytes.size() <= kMostBytes && ((got = ::read(fd, part, sizeof part)) > 0 || (got < 0 && errno == EINTR)))
    if (got > 0) bytes.append(part, static_cast<std::size_t>(got));
  ::close(fd);
  if (got < 0 || bytes.size() > kMostBytes) return std::nullopt;
  return bytes;
}

bool write_all(int fd, const std::string& bytes) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t put = ::write(fd, bytes.data() + done, bytes.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    done += static_cast<std::size_t>(put);
  }
  return true;
}

// mkdir -p, each new folder private to the user. A folder that is there keeps its mode.
void make_private_folder(const std::filesystem::path& dir) {
  std::filesystem::path path;
  for (const auto& part : dir) {
    path /= part;
    ::mkdir(path.c_str(), 0700);  // the open that follows reports what went wrong
  }
}

bool same_file(int fd, const std::string& path) {
  struct stat open_file {};
  struct stat named_file {};
  return ::fstat(fd, &open_file) == 0 && ::stat(path.c_str(), &named_file) == 0 &&
         open_file.st_dev == named_file.st_dev && open_file.st_ino == named_file.st_ino;
}

// "13.0" as numbers, so that 13.10 is above 13.9.
std::tuple<int, int> version_order(const std::string& version) {
  int major = 0;
  int minor = 0;
  std::sscanf(version.c_str(), "%d.%d", &major, &minor);
  return {major, minor};
}

}  // namespace

DiskCache::Lock::Lock(Lock&& other) noexcept : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

DiskCache::Lock::~Lock() {
  if (!held()) return;
  if (!path_.empty()) ::unlink(path_.c_str());  // before the lock is free: whoever waits finds it gone and starts anew
  ::close(fd_);
}

std::string DiskCache::path(const std::string& source, const std::string& version, const char* suffix) const {
  return dir_ + "/" + source + "." + version + suffix;
}

std::optional<DiskCache::Entry> DiskCache::read(const std::string& source, const std::string& version) const {
  if (dir_.empty()) return std::nullopt;
  std::vector<std::string> versions{version};
  if (version.empty()) {
    versions.clear();
    const std::string prefix = source + ".";
    std::error_code error;
    for (std::filesystem::directory_iterator it(dir_, error), end; !error && it != end; it.increment(error)) {
      const std::string name = it->path().filename();
      if (name.starts_with(prefix) && name.ends_with(".cubin"))
        versions.push_back(name.substr(prefix.size(), name.size() - prefix.size() - std::strlen(".cubin")));
    }
    std::sort(versions.begin(), versions.end(),
              [](const auto& a, const auto& b) { return version_order(a) > version_order(b); });
  }
  for (const auto& candidate : versions) {
    auto file = read_file(path(source, candidate, ".cubin"));
    if (!file) continue;
    if (auto cubin = decode(key_hash(source, candidate), *std::move(file))) return Entry{candidate, *std::move(cubin)};
    log_info("jit.cache: damaged entry deleted: " + path(source, candidate, ".cubin"));
    remove(source, candidate);
  }
  return std::nullopt;
}

DiskCache::Lock DiskCache::lock(const std::string& source, const std::string& version,
                                std::chrono::milliseconds wait) const {
  Lock lock;
  if (dir_.empty()) return lock;
  const auto deadline = std::chrono::steady_clock::now() + wait;
  const std::string name = path(source, version, ".tmp");
  make_private_folder(dir_);
  for (;;) {
    const int fd = ::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) {
      warn_once(dir_, name, "open");
      return lock;
    }
    int failed = 0;
    while ((failed = ::flock(fd, LOCK_EX | LOCK_NB)) != 0 && errno == EWOULDBLOCK &&
           std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    // The file may have become the entry, or be gone, while we waited: then it guards nothing.
    if (!failed && same_file(fd, name)) {
      lock.fd_ = fd;
      lock.path_ = name;
      return lock;
    }
    const bool no_locks_here = failed && errno != EWOULDBLOCK;
    if (no_locks_here) ::unlink(name.c_str());
    ::close(fd);
    if (failed) return lock;
  }
}

void DiskCache::write(const std::string& source, const Entry& entry, Lock& lock) const {
  if (dir_.empty()) return;
  if (!lock.held()) {
    static std::atomic<int> count{0};
    lock.path_ = path(source, entry.version, fmt::format(".{}-{}.tmp", ::getpid(), count++).c_str());
    make_private_folder(dir_);
    lock.fd_ = ::open(lock.path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (!lock.held()) return warn_once(dir_, lock.path_, "open");
  }
  // A holder that was killed may have left part of its entry in the file. There is no fsync: what a power cut
  // leaves behind does not pass the checksum.
  if (::ftruncate(lock.fd_, 0) != 0 || !write_all(lock.fd_, encode(key_hash(source, entry.version), entry.cubin)))
    return warn_once(dir_, lock.path_, "write");
  if (::rename(lock.path_.c_str(), path(source, entry.version, ".cubin").c_str()) != 0)
    return warn_once(dir_, lock.path_, "rename");
  lock.path_.clear();
}

void DiskCache::remove(const std::string& source, const std::string& version) const {
  if (!dir_.empty()) ::unlink(path(source, version, ".cubin").c_str());
}

}  // namespace twostep
