// The driver API that twostep calls, opened at run time through our own declarations: a binary that uses it
// runs on a machine without libcuda. Names and values as in NVIDIA's cuda.h (12.3 and newer).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "twostep/status.h"
#include "twostep/tensor.h"

namespace twostep {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphNode = struct CUgraphNode_st*;
using CUgraphExec = struct CUgraphExec_st*;

inline constexpr CUresult kCudaSuccess = 0;
inline constexpr CUresult kCudaOutOfMemory = 2;
inline constexpr CUresult kCudaLossyQuery = 402;

// CUgraphEdgeData: type 0 is an ordinary edge, from full completion.
struct GraphEdgeData {
  unsigned char from_port = 0;
  unsigned char to_port = 0;
  unsigned char type = 0;
  unsigned char reserved[5] = {};
};

struct LaunchAttribute {  // CUlaunchAttribute
  std::int32_t id = 0;
  std::int32_t pad = 0;
  union {
    char bytes[64];
    std::int32_t flag;  // cooperative, programmatic stream serialization
    struct {
      std::uint32_t x, y, z;
    } cluster;
  };
};
inline constexpr std::int32_t kAttributeCooperative = 2;
inline constexpr std::int32_t kAttributeClusterDimension = 4;
inline constexpr std::int32_t kAttributeProgrammaticStreamSerialization = 6;

struct LaunchConfig {  // CUlaunchConfig
  std::uint32_t grid_x = 1, grid_y = 1, grid_z = 1;
  std::uint32_t block_x = 1, block_y = 1, block_z = 1;
  std::uint32_t shared_bytes = 0;
  CUstream stream = nullptr;
  LaunchAttribute* attributes = nullptr;
  std::uint32_t num_attributes = 0;
};

struct alignas(64) TensorMap {  // CUtensorMap
  std::uint64_t opaque[16] = {};
};

using CUmemHandle = unsigned long long;  // CUmemGenericAllocationHandle

struct MemLocation {      // CUmemLocation
  std::int32_t type = 1;  // a device
  std::int32_t id = 0;
};
struct AllocationProperties {  // CUmemAllocationProp
  std::int32_t type = 1;       // pinned
  std::int32_t handle_types = 0;
  MemLocation location;
  void* win32 = nullptr;
  struct {
    unsigned char compression = 0;
    unsigned char gpu_direct_rdma = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags;
};
inline constexpr int kHandlePosixFd = 1;
struct AccessDescription {  // CUmemAccessDesc
  MemLocation location;
  std::int32_t flags = 3;  // read and write
};
struct IpcMemHandle {  // CUipcMemHandle
  char reserved[64] = {};
};

enum class CaptureMode : std::int32_t { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum class CaptureStatus : std::int32_t { kNone = 0, kActive = 1, kInvalidated = 2 };

// One member per entry point; the loader takes the exported name in the second column.
#define TWOSTEP_DRIVER_CALLS(X)                                                                                        \
  X(cuInit, "cuInit", (unsigned flags))                                                                                \
  X(cuDriverGetVersion, "cuDriverGetVersion", (int* version))                                                          \
  X(cuGetErrorName, "cuGetErrorName", (CUresult, const char** text))                                                   \
  X(cuGetErrorString, "cuGetErrorString", (CUresult, const char** text))                                               \
  X(cuDeviceGetCount, "cuDeviceGetCount", (int* count))                                                                \
  X(cuDeviceGet, "cuDeviceGet", (CUdevice*, int ordinal))                                                              \
  X(cuDeviceGetName, "cuDeviceGetName", (char* name, int length, CUdevice))                                            \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int* value, int attribute, CUdevice))                               \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice))                                      \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice))                                             \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext*))                                                                  \
  X(cuCtxSetCurrent, "cuCtxSetCurrent", (CUcontext))                                                                   \
  X(cuCtxSynchronize, "cuCtxSynchronize", ())                                                                          \
  X(cuModuleLoadDataEx, "cuModuleLoadDataEx",                                                                          \
    (CUmodule*, const void* image, unsigned num_options, int* options, void** values))                                 \
  X(cuModuleUnload, "cuModuleUnload", (CUmodule))                                                                      \
  X(cuModuleGetFunction, "cuModuleGetFunction", (CUfunction*, CUmodule, const char* name))                             \
  X(cuFuncGetAttribute, "cuFuncGetAttribute", (int* value, int attribute, CUfunction))                                 \
  X(cuFuncSetAttribute, "cuFuncSetAttribute", (CUfunction, int attribute, int value))                                  \
  X(cuLaunchKernelEx, "cuLaunchKernelEx", (const LaunchConfig*, CUfunction, void** arguments, void** extra))           \
  X(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr*, std::size_t bytes))                                                    \
  X(cuMemFree, "cuMemFree_v2", (CUdeviceptr))                                                                          \
  X(cuMemGetInfo, "cuMemGetInfo_v2", (std::size_t * free, std::size_t * total))                                        \
  X(cuMemAllocHost, "cuMemAllocHost_v2", (void**, std::size_t bytes))                                                  \
  X(cuMemFreeHost, "cuMemFreeHost", (void*))                                                                           \
  X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void*, std::size_t bytes, CUstream))                \
  X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void*, CUdeviceptr, std::size_t bytes, CUstream))                      \
  X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (CUdeviceptr, CUdeviceptr, std::size_t bytes, CUstream))                \
  X(cuMemsetD8Async, "cuMemsetD8Async", (CUdeviceptr, unsigned char, std::size_t count, CUstream))                     \
  X(cuMemsetD2D8Async, "cuMemsetD2D8Async",                                                                            \
    (CUdeviceptr, std::size_t pitch, unsigned char, std::size_t width, std::size_t height, CUstream))                  \
  X(cuStreamCreate, "cuStreamCreate", (CUstream*, unsigned flags))                                                     \
  X(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream))                                                                 \
  X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream))                                                            \
  X(cuStreamWaitEvent, "cuStreamWaitEvent", (CUstream, CUevent, unsigned flags))                                       \
  X(cuStreamGetId, "cuStreamGetId", (CUstream, unsigned long long* id))                                                \
  X(cuStreamBeginCapture, "cuStreamBeginCapture_v2", (CUstream, CaptureMode))                                          \
  X(cuStreamEndCapture, "cuStreamEndCapture", (CUstream, CUgraph*))                                                    \
  X(cuStreamIsCapturing, "cuStreamIsCapturing", (CUstream, CaptureStatus*))                                            \
  X(cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo_v3",                                                               \
    (CUstream, CaptureStatus*, unsigned long long* id, CUgraph*, const CUgraphNode** dependencies,                     \
     const GraphEdgeData** edges, std::size_t* count))                                                                 \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (CaptureMode*))                            \
  X(cuEventCreate, "cuEventCreate", (CUevent*, unsigned flags))                                                        \
  X(cuEventDestroy, "cuEventDestroy_v2", (CUevent))                                                                    \
  X(cuEventRecord, "cuEventRecord", (CUevent, CUstream))                                                               \
  X(cuEventSynchronize, "cuEventSynchronize", (CUevent))                                                               \
  X(cuEventElapsedTime, "cuEventElapsedTime", (float* milliseconds, CUevent start, CUevent end))                       \
  X(cuGraphInstantiate, "cuGraphInstantiateWithFlags", (CUgraphExec*, CUgraph, unsigned long long flags))              \
  X(cuGraphLaunch, "cuGraphLaunch", (CUgraphExec, CUstream))                                                           \
  X(cuGraphUpload, "cuGraphUpload", (CUgraphExec, CUstream))                                                           \
  X(cuGraphDestroy, "cuGraphDestroy", (CUgraph))                                                                       \
  X(cuGraphExecDestroy, "cuGraphExecDestroy", (CUgraphExec))                                                           \
  X(cuGraphGetNodes, "cuGraphGetNodes", (CUgraph, CUgraphNode*, std::size_t * count))                                  \
  X(cuGraphGetEdges, "cuGraphGetEdges_v2",                                                                             \
    (CUgraph, CUgraphNode * from, CUgraphNode * to, GraphEdgeData*, std::size_t * count))                              \
  X(cuDeviceGetUuid, "cuDeviceGetUuid_v2", (unsigned char* uuid, CUdevice))                                            \
  X(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", (int* can, CUdevice, CUdevice peer))                               \
  X(cuDeviceGetP2PAttribute, "cuDeviceGetP2PAttribute", (int* value, int attribute, CUdevice, CUdevice peer))          \
  X(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", (CUcontext peer, unsigned flags))                                  \
  X(cuOccupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor",                                                        \
    (int* count, CUfunction, int block, std::size_t dynamic_bytes))                                                    \
  X(cuMemsetD32Async, "cuMemsetD32Async", (CUdeviceptr, unsigned value, std::size_t count, CUstream))                  \
  X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",                                                    \
    (std::size_t * granularity, const AllocationProperties*, int option))                                              \
  X(cuMemCreate, "cuMemCreate",                                                                                        \
    (CUmemHandle*, std::size_t bytes, const AllocationProperties*, unsigned long long flags))                          \
  X(cuMemRelease, "cuMemRelease", (CUmemHandle))                                                                       \
  X(cuMemAddressReserve, "cuMemAddressReserve",                                                                        \
    (CUdeviceptr*, std::size_t bytes, std::size_t alignment, CUdeviceptr wanted, unsigned long long flags))            \
  X(cuMemAddressFree, "cuMemAddressFree", (CUdeviceptr, std::size_t bytes))                                            \
  X(cuMemMap, "cuMemMap", (CUdeviceptr, std::size_t bytes, std::size_t offset, CUmemHandle, unsigned long long flags)) \
  X(cuMemUnmap, "cuMemUnmap", (CUdeviceptr, std::size_t bytes))                                                        \
  X(cuMemSetAccess, "cuMemSetAccess", (CUdeviceptr, std::size_t bytes, const AccessDescription*, std::size_t count))   \
  X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle",                                                      \
    (void* handle, CUmemHandle, int type, unsigned long long flags))                                                   \
  X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", (CUmemHandle*, void* handle, int type))          \
  X(cuIpcGetMemHandle, "cuIpcGetMemHandle", (IpcMemHandle*, CUdeviceptr))                                              \
  X(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2", (CUdeviceptr*, IpcMemHandle, unsigned flags))                         \
  X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", (CUdeviceptr))                                                         \
  X(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                                                  \
    (TensorMap*, int dtype, std::uint32_t rank, void* address, const std::uint64_t* dims,                              \
     const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t* element_strides, int interleave,     \
     int swizzle, int l2_promotion, int oob_fill))

struct Driver {
#define TWOSTEP_DECLARE(member, symbol, parameters) CUresult(*member) parameters = nullptr;
  TWOSTEP_DRIVER_CALLS(TWOSTEP_DECLARE)
#undef TWOSTEP_DECLARE
  int version = 0;  // of the driver: 13000 for CUDA 13.0
};

// kOk, or kUnavailable with what was looked for and the reason (no libcuda, too old, no GPU).
Status driver_status();
// The table. Throws kUnavailable where driver_status() is not kOk.
const Driver& driver();
int device_count();  // 0 without a driver

// Throws kOutOfMemory or kDeviceError (call and place, code name, text) unless kCudaSuccess.
void check_cuda(CUresult result, const char* call, const char* place);
#define TWOSTEP_CUDA_CHECK(call, place) ::twostep::check_cuda(::twostep::driver().call, #call, place)

DeviceFacts device_facts(int ordinal);  // remembered per ordinal

// "sm_90a", or empty where the architecture has no kernels of ours (draft-gemm 6.3).
std::string arch_name(int arch);

CUcontext primary_context(int ordinal);  // retained for the life of the process

// Makes the primary context of a device current for its scope and puts the caller's back.
class ContextGuard {
 public:
  explicit ContextGuard(int ordinal) : ContextGuard(primary_context(ordinal)) {}
  explicit ContextGuard(CUcontext wanted);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  CUcontext previous_ = nullptr;
  bool changed_ = false;
};

// Exchanges the thread's capture mode to relaxed, so that driver calls that are unsafe during capture do no
// harm to a capture that another thread has under way; restored on every path.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  CaptureMode mode_ = CaptureMode::kRelaxed;
};

// For destructors: `work` with the context current and the capture mode relaxed. What it throws is logged: at the end
// of a process the driver may be gone before the object.
void quietly(CUcontext context, const std::function<void()>& work) noexcept;

bool is_capturing(Stream stream);

}  // namespace twostep
