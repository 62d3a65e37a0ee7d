// How a group of ranks becomes a mailbox, and stops being one (spec: mailbox 7). Each step is made by all ranks or by
// none: before the next one they vote, and what one rank finds wrong all throw. Pure: the memory stands behind
// PeerMemory.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "mailbox/protocol.h"
#include "mailbox/socket.h"

namespace twostep {

inline constexpr std::uint32_t kMailboxVersion = 1;

// What every rank tells of itself first. Plain bytes; text ends with 0.
struct RankRecord {
  std::uint32_t version = kMailboxVersion;
  std::int32_t rank = 0, size = 0;
  std::uint32_t transports = 0;  // bit 1 << PeerTransport: possible here, as far as one rank can tell
  std::int64_t max_rows = 0, max_cols = 0, max_hidden = 0, max_words = 0;
  PeerTransport transport = PeerTransport::kAuto;
  bool strict_fence = false;
  std::array<char, 2> pad{};
  std::uint32_t pad2 = 0;
  double peer_limit_s = 0;
  std::array<std::uint64_t, 2> host{};     // of the running system
  std::array<std::uint64_t, 2> process{};  // of this process, drawn when it first asked
  std::array<std::uint8_t, 16> device{};   // UUID of the GPU
};

// A handle to the memory of a rank.
struct MemoryHandle {
  std::array<std::byte, 64> bytes{};  // an address, or a cudaIpcMemHandle
  int fd = -1;                        // of vmm_fd
};

// The GPU's part of the set-up, in the order of the calls.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  virtual std::uint32_t transports() const = 0;  // bits, without what only the group can tell
  virtual std::array<std::uint8_t, 16> device_uuid() const = 0;
  // Throws kUnavailable unless this GPU can reach the memory of that one by this transport.
  virtual void require_access(const std::array<std::uint8_t, 16>& peer_device, PeerTransport transport) = 0;
  virtual void share_device(int ranks) = 0;  // of the group, this one included, that are on this GPU
  virtual void allocate(PeerTransport transport, std::int64_t bytes) = 0;  // the region, all 0xff, when it returns
  virtual MemoryHandle handle() = 0;
  // By rank; that of this rank is not used. The descriptors stay the caller's.
  virtual void map(std::span<MemoryHandle> handles) = 0;
  virtual void self_test() = 0;         // one call of each operation on data that is known
  virtual void stop() = 0;              // waits for the device; launches return at once from then on
  virtual void unmap() noexcept = 0;    // the memory of others
  virtual void release() noexcept = 0;  // the own
};

struct NcclId {  // ncclUniqueId: where rank 0 listens
  std::array<char, 128> bytes{};
};

// The GPU side of an NcclGroup: its kernels, its memory and the communicator.
class NcclPlan {
 public:
  virtual ~NcclPlan() = default;
  virtual int version() const = 0;  // 22809
  virtual NcclId unique_id() const = 0;
  virtual void join(const NcclId& id) = 0;  // collective: the communicator, and a first call of each kind
  virtual void all_gather(const GatherStep& step, Stream stream) = 0;
  virtual void all_gather_words(const GatherStep& step, Stream stream) = 0;
  virtual void all_reduce_add_norm(const AddNormStep& step, Stream stream) = 0;
  virtual bool is_capturing(Stream stream) const = 0;
  virtual Status status() const = 0;
  virtual void close() = 0;  // collective
};

// Thrown on every rank alike: all have voted.
class VotedError final : public Error {
 public:
  using Error::Error;
};
// Runs `step`, which may wait for peers up to limit_s, and then asks all ranks. Throws on every rank what the first one
// that failed threw, its rank named.
void all_or_none(Bootstrap& bootstrap, double limit_s, const std::function<void()>& step);

// What is wrong with a group, the same on every rank; then what it will use.
Status check_same_config(std::span<const RankRecord> records);
Status check_records(std::span<const RankRecord> records);
PeerTransport choose_transport(std::span<const RankRecord> records);  // kAuto: none is possible for all

// Steps 1 to 7. config.transport becomes what was chosen.
void set_up_mailbox(Bootstrap& bootstrap, MailboxConfig* config, PeerMemory& memory);
// The same of an NcclGroup: rank 0's id to all, then all join or none.
void set_up_nccl(Bootstrap& bootstrap, const MailboxConfig& config, NcclPlan& plan);
// Waits for the device, then for the peers, up to the limit. Frees all; a peer that does not come leaves the own memory
// in place, as it may still be written. Returns kOk or kPeerLost.
Status tear_down_mailbox(Bootstrap& bootstrap, const MailboxConfig& config, PeerMemory& memory);

// A socket at `path`.fd<rank>, for descriptors. All ranks have theirs before the first one sends.
class DescriptorSocket {
 public:
  DescriptorSocket(const std::string& path, int rank);  // throws kUnavailable
  // Sends the own descriptor to every peer and returns theirs by rank (-1 at the own place). Each is the caller's to
  // close. Throws kUnavailable (a socket), kPeerLost (limit).
  std::vector<int> exchange(int size, int fd, double limit_s) const;

 private:
  const std::string path_;
  const int rank_;
  const Socket socket_;
  const SocketPath bound_;
};
constexpr std::size_t kLongestBootstrapPath = 90;  // room for these beside it

}  // namespace twostep
