#include "mailbox/nccl.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "core/check.h"
#include "core/env.h"
#include "core/log.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "mailbox.nccl";
constexpr int kSum = 0;  // ncclSum
constexpr int kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7;

}  // namespace

std::vector<std::string> nccl_paths(const std::string& chosen) {
  if (!chosen.empty()) return {chosen};
  return {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2", "/usr/local/cuda/lib/libnccl.so.2"};
}

Nccl::Opened Nccl::open(const std::vector<std::string>& paths) {
  std::vector<std::string> tried;
  for (const std::string& path : paths) {
    auto nccl = std::make_unique<Nccl>();
    if (auto reason = nccl->load(path); !reason.empty()) {
      tried.push_back(std::move(reason));
      continue;
    }
    log_info(fmt::format("{}: version {} from {}", kPlace, nccl->version(), nccl->path()));
    return {std::move(nccl), {}};
  }
  return {nullptr, refusal(StatusCode::kUnavailable, kPlace, "libnccl", fmt::format("{}", fmt::join(tried, "; ")),
                           "NCCL 2.10 or newer", "install NCCL, or name its libnccl.so.2 in TWOSTEP_NCCL")};
}

const Nccl* Nccl::get() { return opened().nccl.get(); }
const Status& Nccl::status() { return opened().status; }

const Nccl::Opened& Nccl::opened() {
  static const Opened& result = *new Opened(open(nccl_paths(environment().nccl)));  // groups may outlive main
  return result;
}

std::string Nccl::load(const std::string& path) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed
  if (library == nullptr) return ::dlerror();
  const char* missing = nullptr;
  const auto find = [&](auto& call, const char* name) {
    call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(::dlsym(library, name));
    if (call == nullptr) missing = name;
  };
  find(calls_.version, "ncclGetVersion");
  find(calls_.error_string, "ncclGetErrorString");
  find(calls_.unique_id, "ncclGetUniqueId");
  find(calls_.init_rank, "ncclCommInitRank");
  find(calls_.async_error, "ncclCommGetAsyncError");
  find(calls_.destroy, "ncclCommDestroy");
  find(calls_.abort, "ncclCommAbort");
  find(calls_.all_gather, "ncclAllGather");
  find(calls_.all_reduce, "ncclAllReduce");
  if (missing) return fmt::format("{}: no entry point {}", path, missing);
  calls_.last_error = reinterpret_cast<decltype(calls_.last_error)>(::dlsym(library, "ncclGetLastError"));
  if (calls_.version(&version_) != 0) return path + ": does not tell its version";
  path_ = path;
  if (Dl_info info; ::dladdr(reinterpret_cast<void*>(calls_.version), &info) != 0 && info.dli_fname != nullptr)
    path_ = info.dli_fname;  // what the loader found under that name
  // BF16 came with 2.10, and with 2.9 the form of this number.
  if (version_ < 21000) return fmt::format("{}: version {} is older than 2.10", path_, version());
  return {};
}

std::string Nccl::version() const {
  return fmt::format("{}.{}.{}", version_ / 10000, version_ / 100 % 100, version_ % 100);
}

Status Nccl::status_of(int result, const char* call, void* comm) const {
  if (result == 0 || result == kInProgress) return {};
  const StatusCode code = result == kInvalidArgument || result == kInvalidUsage ? StatusCode::kInvalidArgument
                          : result == kRemoteError                              ? StatusCode::kPeerLost
                                                                                : StatusCode::kDeviceError;
  const char* more = calls_.last_error != nullptr ? calls_.last_error(comm) : nullptr;
  return refusal(code, kPlace, call,
                 fmt::format("{}{}{}", calls_.error_string(result), more != nullptr && *more != 0 ? ": " : "",
                             more != nullptr ? more : ""),
                 "ncclSuccess", fmt::format("NCCL_DEBUG=WARN has NCCL {} say more", version()));
}

NcclId Nccl::unique_id() const {
  NcclId id;
  throw_if_error(status_of(calls_.unique_id(&id), "ncclGetUniqueId", nullptr));
  return id;
}

NcclComm::NcclComm(const Nccl& nccl, const NcclId& id, int rank, int size) : nccl_(nccl) {
  throw_if_error(nccl_.status_of(nccl_.calls_.init_rank(&comm_, size, id, rank), "ncclCommInitRank", nullptr));
}

NcclComm::~NcclComm() {
  if (comm_ != nullptr) nccl_.calls_.abort(comm_);
}

void NcclComm::all_gather(const void* in, void* out, std::size_t count, NcclType type, Stream stream) const {
  throw_if_error(
      nccl_.status_of(nccl_.calls_.all_gather(in, out, count, type, comm_, stream.handle), "ncclAllGather", comm_));
}

void NcclComm::all_reduce_sum(const void* in, void* out, std::size_t count, NcclType type, Stream stream) const {
  throw_if_error(nccl_.status_of(nccl_.calls_.all_reduce(in, out, count, type, kSum, comm_, stream.handle),
                                 "ncclAllReduce", comm_));
}

Status NcclComm::status() const {
  int result = 0;
  const int asked = nccl_.calls_.async_error(comm_, &result);
  return nccl_.status_of(asked != 0 ? asked : result, "ncclCommGetAsyncError", comm_);
}

void NcclComm::destroy() {
  void* comm = std::exchange(comm_, nullptr);
  throw_if_error(nccl_.status_of(nccl_.calls_.destroy(comm), "ncclCommDestroy", nullptr));
}

}  // namespace twostep
