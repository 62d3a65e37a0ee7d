// NCCL, opened at run time through our own declarations: for what a mailbox does not accept, and as its baseline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mailbox/contract.h"

namespace twostep {

enum class NcclType : int { kU8 = 1, kU32 = 3, kBF16 = 9 };

// The libraries that are tried, in order: `chosen` alone, or the usual names. A libnccl.so.2 that the process has
// loaded, as torch does, is found first.
std::vector<std::string> nccl_paths(const std::string& chosen);

class Nccl {
 public:
  struct Opened {
    std::unique_ptr<const Nccl> nccl;
    Status status;  // kOk, or kUnavailable with what was tried
  };
  static Opened open(const std::vector<std::string>& paths);
  // The process's NCCL, looked for at first use: TWOSTEP_NCCL if it is set, and no other. Null: status() says why.
  static const Nccl* get();
  static const Status& status();

  int version_code() const { return version_; }  // 22809
  std::string version() const;                   // "2.28.9"
  const std::string& path() const { return path_; }
  NcclId unique_id() const;

 private:
  friend class NcclComm;
  struct Calls {
    int (*version)(int*) = nullptr;
    const char* (*error_string)(int) = nullptr;
    const char* (*last_error)(void* comm) = nullptr;  // of 2.13; may be absent
    int (*unique_id)(NcclId*) = nullptr;
    int (*init_rank)(void** comm, int size, NcclId, int rank) = nullptr;
    int (*async_error)(void* comm, int* result) = nullptr;
    int (*destroy)(void* comm) = nullptr;
    int (*abort)(void* comm) = nullptr;
    int (*all_gather)(const void*, void*, std::size_t count, NcclType, void* comm, void* stream) = nullptr;
    int (*all_reduce)(const void*, void*, std::size_t count, NcclType, int op, void* comm, void* stream) = nullptr;
  };
  static const Opened& opened();
  // Empty, or why the library at `path` cannot be used.
  std::string load(const std::string& path);
  // kOk, or the failed call with NCCL's text.
  Status status_of(int result, const char* call, void* comm) const;

  Calls calls_;
  int version_ = 0;
  std::string path_;
};

// A communicator of the current context's device. Owned: a destruction without destroy() aborts it.
class NcclComm {
 public:
  NcclComm(const Nccl& nccl, const NcclId& id, int rank, int size);  // collective; returns when all ranks are there
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;
  ~NcclComm();

  // in [count] of every rank, in the order of ranks, into out [size * count]; in may be the own part of out.
  void all_gather(const void* in, void* out, std::size_t count, NcclType type, Stream stream) const;
  void all_reduce_sum(const void* in, void* out, std::size_t count, NcclType type,
                      Stream stream) const;  // in may be out
  Status status() const;                     // of what was enqueued, so far; nothing waits
  void destroy();                            // collective among the ranks of a host; the stream is synchronised

 private:
  const Nccl& nccl_;
  void* comm_ = nullptr;
};

}  // namespace twostep
