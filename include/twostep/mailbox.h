// Mailbox: small collectives between the GPUs of one host, by stores into each other's memory (spec: mailbox).
//
//   all_gather           out[m, r * C + c] = in_r[m, c]
//   all_gather_words     out[r, i] = in_r[i]
//   all_reduce_add_norm  a = bf16( sum over r = 0 .. P - 1, in this order, of in_r, in FP32 );  s = bf16( a + residual
//   );
//                        residual_out = s;  norm_out = bf16( s * rsqrt(mean(s^2) + eps) * gamma )
//
// Of P ranks, r counts the ranks. What arrives is bit for bit what was sent, on all ranks the same, but for one pattern
// that stands for "not here yet": two BF16 0xffff in one 32-bit word arrive as 0x7fff each, a word 0xffffffff as
// 0x7fffffff. Both are NaN before and after, so a word that is an id must not be -1.
//
// Rules for the caller: all ranks make the same calls with the same sizes in the same order, captured or not; replays
// are ordered with the other calls of the mailbox. A kernel of the caller between two calls that is launched with
// programmatic dependent launch must itself execute griddepcontrol.wait.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "twostep/status.h"
#include "twostep/tensor.h"

namespace twostep {

// How the processes of a group reach each other before there is a mailbox, and when it is closed: a framework's store,
// MPI, or a socket. Lent by the caller, used by one thread at a time. An exchange that cannot be made within limit_s
// seconds must throw, so that no rank is left waiting.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int size() const = 0;  // of the group
  // `bytes` of every rank, in the order of ranks, into all [P * bytes].
  virtual void all_gather_bytes(const void* mine, void* all, std::size_t bytes, double limit_s) = 0;
  virtual void barrier(double limit_s);  // unless overridden: all_gather_bytes of one byte
  // Where ranks of this host may bind sockets: a path that is the same on all ranks and used by this group alone. The
  // transport vmm_fd sends its handles there. "": it is not possible.
  virtual std::string socket_path() const { return {}; }
};

// Ranks of one host that meet at a path, as processes or as threads: rank 0 listens there. The path is up to 90 bytes
// and is removed when all have come. Returns on rank 0 then, and elsewhere when rank 0 has been found. Throws
// kInvalidArgument, kUnavailable (the path), kPeerLost (who did not come within limit_s, or left).
std::unique_ptr<Bootstrap> make_socket_bootstrap(const std::string& path, int rank, int size, double limit_s = 60);

enum class MailboxOp : std::uint8_t { kAllGather, kAllGatherWords, kAllReduceAddNorm };

enum class PeerTransport : std::uint8_t {
  kAuto,         // the first of those below that all ranks can do
  kSameProcess,  // one thread per rank: plain pointers
  kVmmFd,        // cuMemCreate, its handle sent as a file descriptor
  kCudaIpc,      // cuIpcGetMemHandle
};
const char* transport_name(PeerTransport transport);  // "vmm_fd"

struct MailboxConfig {
  int rank = 0;
  int size = 0;                    // P, 2 to 8
  std::int64_t max_rows = 64;      // of all_gather and all_reduce_add_norm, up to 256
  std::int64_t max_cols = 0;       // of a rank: V / P, a multiple of 8
  std::int64_t max_hidden = 7168;  // a multiple of 8, up to 16384
  std::int64_t max_words = 4096;
  double peer_limit_s = 0;  // how long a rank waits for another; 0: TWOSTEP_PEER_LIMIT_S, else 60
  PeerTransport transport = PeerTransport::kAuto;
  int max_ctas = 0;  // of a call; 0: up to 128, nearly the whole GPU. Mailboxes at once on one GPU must fit together
  bool strict_fence = false;  // a system fence per CTA, where kernel boundaries suffice
};

class Mailbox {
 public:
  // Collective. Allocates on `device` (3 * P * max_rows * max_cols * 2 bytes and what the other operations need), maps
  // the memory of the peers, and makes one call of each operation on data that is known. What one rank finds wrong, all
  // throw, naming that rank: kInvalidArgument (config; differences between ranks), kUnavailable (driver, peer access,
  // no common transport, another host), kOutOfMemory, kCompileFailed, kDeviceError, kPeerLost (bootstrap). `bootstrap`
  // must outlive the mailbox.
  static Mailbox create(Bootstrap& bootstrap, const MailboxConfig& config, Device device);
  Mailbox(Mailbox&&) noexcept;
  Mailbox& operator=(Mailbox&&) noexcept;
  // Without close() before: logs a line, ends calls that wait, unmaps the peers' memory and keeps its own, which peers
  // may still write.
  ~Mailbox();

  // The calls: in stream order, no allocation, lock, synchronisation or compilation; may be captured. Bound to the
  // stream of the first one. After a call, inputs may be overwritten and outputs read, in stream order. Memory is that
  // of the mailbox's device, 16-byte aligned, columns contiguous, row strides multiples of 8. Each throws before any
  // launch: kInvalidArgument (sizes, another stream, closed), kUnsupported (dtype), kBadLayout, kWrongDevice, kOverlap,
  // and once the mailbox is poisoned what check() throws. Rows that differ between ranks, and a peer that does not
  // come, show in status().

  // in BF16 [M, C], out BF16 [M, P * C]; in may be the rank's own columns of out. M = 0 is a round without data.
  void all_gather(const TensorView& in, const TensorView& out, Stream stream);
  // in I32 or F32 [W], out the same [P, W] dense. W from 1.
  void all_gather_words(const TensorView& in, const TensorView& out, Stream stream);
  // in BF16 [M, H]; residual the same or absent (zero), residual_out [M, H], may be residual; gamma F32 or BF16 [H] or
  // absent: no norm; norm_out [M, H], may be in, absent without gamma.
  void all_reduce_add_norm(const TensorView& in, const std::optional<TensorView>& residual,
                           const TensorView& residual_out, const std::optional<TensorView>& gamma, float eps,
                           const std::optional<TensorView>& norm_out, Stream stream);

  // Whether a call is served: a matter of values that are the same on all ranks. cols: C, H, or W with one row.
  Status accepts(MailboxOp op, std::int64_t rows, std::int64_t cols, DType dtype) const;

  // What went wrong on the device, kOk so far. Host memory is read, nothing waits. kPeerLost and rows that differ name
  // rank, peer, operation and epoch; from then on every launch returns at once and outputs are undefined (poisoned),
  // until all ranks close and create again. Ask at each step's synchronisation; after close() it says the last.
  Status status() const;
  void check() const;  // throws what status() says
  void abort();        // calls that wait give up; poisoned. From any thread
  // Collective. Waits for the device and, up to the limit, for the peers; then frees. Replays of captured calls return
  // at once from then on, while the object lives. Throws kPeerLost or kDeviceError. A second call does nothing.
  void close();
  void rebind_stream(Stream stream);  // after a synchronisation of the caller's

  int rank() const;
  int size() const;
  Device device() const;
  const MailboxConfig& config() const;  // transport, peer_limit_s and max_ctas as chosen

  struct Impl;
  explicit Mailbox(std::unique_ptr<Impl> impl);
  Impl& impl() const { return *impl_; }  // of the library

 private:
  std::unique_ptr<Impl> impl_;
};

// The same three calls through NCCL, for what no mailbox accepts: more than 8 ranks, several hosts, GPUs without peer
// access, more rows, other dtypes and widths of all_gather. libnccl.so.2 is opened at run time (TWOSTEP_NCCL names it).
// Which of the two serves a call is a matter of Mailbox::accepts alone, so that all ranks agree; a mailbox that is
// poisoned is none, and the caller switches all ranks together.
//
// The gathers give the same bits as those of a mailbox, for what both accept. The all-reduce is NCCL's BF16 sum, which
// is the same on all ranks and may differ from that of a mailbox in its last bit; residual and norm follow in one
// kernel.
//
// The rules for the caller are those of a mailbox. NCCL waits without a limit of ours: a rank that does not come shows
// in its own time-outs. NCCL's environment is left as it is.
class NcclGroup {
 public:
  // Collective; any hosts. Of `config`, size is 2 and more, max_rows up to 65536, max_cols what is needed (in BF16; of
  // a wider dtype as many as fit in), max_hidden up to 2^20; transport, max_ctas and strict_fence have no meaning here.
  // Allocates on `device` 2 * P * max_rows * max_cols + 2 * max_rows * max_hidden bytes beside what NCCL takes, and
  // makes a first call of each kind, where NCCL connects. What one rank finds wrong, all throw, naming that rank:
  // kInvalidArgument (config; differences between ranks; NCCL's own, as two ranks on one GPU), kUnavailable (driver,
  // NCCL), kOutOfMemory, kCompileFailed, kDeviceError, kPeerLost. `bootstrap` is used here alone.
  static NcclGroup create(Bootstrap& bootstrap, const MailboxConfig& config, Device device);
  NcclGroup(NcclGroup&&) noexcept;
  NcclGroup& operator=(NcclGroup&&) noexcept;
  ~NcclGroup();  // without close() before: logs a line and aborts the communicator

  // The calls, as those of Mailbox: in stream order, no allocation, synchronisation or compilation of ours; may be
  // captured; bound to the stream of the first one. all_gather takes every dtype, any number of columns, and addresses
  // and row strides of whole elements; all_gather_words addresses of 4 bytes. M = 0 does nothing. Each throws before
  // any launch: kInvalidArgument, kUnsupported, kBadLayout, kWrongDevice, kOverlap; and what NCCL refuses, with its
  // text.
  void all_gather(const TensorView& in, const TensorView& out, Stream stream);
  void all_gather_words(const TensorView& in, const TensorView& out, Stream stream);
  void all_reduce_add_norm(const TensorView& in, const std::optional<TensorView>& residual,
                           const TensorView& residual_out, const std::optional<TensorView>& gamma, float eps,
                           const std::optional<TensorView>& norm_out, Stream stream);

  // Whether a call is served: a matter of values that are the same on all ranks.
  Status accepts(MailboxOp op, std::int64_t rows, std::int64_t cols, DType dtype) const;
  Status status() const;              // what NCCL has found wrong so far; nothing waits
  void check() const;                 // throws what status() says
  void close();                       // collective. Waits for the device, then frees. A second call does nothing
  void rebind_stream(Stream stream);  // after a synchronisation of the caller's

  int rank() const;
  int size() const;
  const MailboxConfig& config() const;

  struct Impl;
  explicit NcclGroup(std::unique_ptr<Impl> impl);

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace twostep
