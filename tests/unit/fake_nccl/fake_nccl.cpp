// A stand-in for NCCL. A collective of `count` elements returns `count` as its result, and does nothing; a group of
// `size` ranks can be joined where size is below 100.
#include <cstddef>
#include <cstring>

#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 22809
#endif

namespace {

struct Id {
  char bytes[128];
};
int communicators = 0;

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return 0;
}

const char* ncclGetErrorString(int result) { return result == 5 ? "invalid usage" : "some error"; }
const char* ncclGetLastError(void* comm) { return comm ? "the last error of the group" : ""; }

int ncclGetUniqueId(Id* id) {
  std::memcpy(id->bytes, "fake id", 8);
  return 0;
}

int ncclCommInitRank(void** comm, int size, Id id, int) {
  if (size >= 100 || std::strcmp(id.bytes, "fake id") != 0) return 5;
  *comm = &communicators;
  ++communicators;
  return 0;
}

int ncclCommGetAsyncError(void*, int* result) {
  *result = 6;
  return 0;
}

int ncclCommDestroy(void*) { return --communicators == 0 ? 0 : 4; }
int ncclCommAbort(void*) { return --communicators == 0 ? 0 : 4; }

int ncclAllGather(const void*, void*, std::size_t count, int, void*, void*) { return static_cast<int>(count); }
int ncclAllReduce(const void*, void*, std::size_t count, int, int, void*, void*) { return static_cast<int>(count); }

}  // extern "C"
