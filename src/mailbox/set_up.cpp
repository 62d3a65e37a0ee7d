#include "mailbox/set_up.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <utility>

#include "core/check.h"
#include "core/env.h"
#include "core/hash.h"
#include "core/log.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "mailbox.create";

// A status as every rank can read it.
struct Vote {
  StatusCode code = StatusCode::kOk;
  std::array<char, 64> place{};
  std::array<char, 128> argument{};
  std::array<char, 384> value{};
  std::array<char, 192> accepted{};
  std::array<char, 192> remedy{};
};
static_assert(std::is_trivially_copyable_v<Vote> && std::is_trivially_copyable_v<RankRecord>);

template <std::size_t kSize>
void put(std::array<char, kSize>& to, const std::string& text) {
  std::memcpy(to.data(), text.data(), std::min(text.size(), kSize - 1));
}

Vote vote_of(const std::function<void()>& step) {
  Status status;
  try {
    step();
    return {};
  } catch (const Error& error) {
    status = error.status();
  } catch (const std::bad_alloc&) {
    status = refusal(StatusCode::kOutOfMemory, kPlace, "host memory", "used up", "free host memory");
  } catch (const std::exception& error) {
    status = refusal(StatusCode::kInternal, kPlace, "set-up", error.what(), "no exception");
  }
  Vote vote;
  vote.code = status.code;
  put(vote.place, status.place);
  put(vote.argument, status.argument);
  put(vote.value, status.value);
  put(vote.accepted, status.accepted);
  put(vote.remedy, status.remedy);
  return vote;
}

std::array<std::uint64_t, 2> host_identity() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return {hash64(text), hash64(name)};
}
// A drawn number, since containers may give the same process number, which in turn tells a process from its fork.
std::array<std::uint64_t, 2> process_identity() {
  static const std::uint64_t drawn = [] {
    std::random_device random;
    return std::uint64_t{random()} << 32 | random();
  }();
  return {drawn, static_cast<std::uint64_t>(::getpid())};
}

constexpr std::uint32_t bit(PeerTransport transport) { return 1u << static_cast<unsigned>(transport); }
constexpr PeerTransport kTransports[] = {PeerTransport::kSameProcess, PeerTransport::kVmmFd, PeerTransport::kCudaIpc};

bool in_one_process(std::span<const RankRecord> records) {
  for (const RankRecord& r : records)
    if (r.process != records[0].process) return false;
  return true;
}

// What all ranks can do.
std::uint32_t common_transports(std::span<const RankRecord> records) {
  std::uint32_t common = ~0u;
  for (const RankRecord& r : records) common &= r.transports;
  if (!in_one_process(records)) common &= ~bit(PeerTransport::kSameProcess);
  // cuIpcOpenMemHandle refuses memory of its own process.
  for (std::size_t a = 0; a < records.size(); ++a)
    for (std::size_t b = 0; b < a; ++b)
      if (records[a].process == records[b].process) common &= ~bit(PeerTransport::kCudaIpc);
  return common;
}

void close_all(std::span<MemoryHandle> handles) {
  for (MemoryHandle& handle : handles)
    if (handle.fd >= 0) ::close(std::exchange(handle.fd, -1));
}

std::string names_of(std::uint32_t transports) {
  std::string names;
  for (const PeerTransport t : kTransports)
    if (transports & bit(t)) names += (names.empty() ? "" : ", ") + std::string(transport_name(t));
  return names.empty() ? "none" : names;
}

}  // namespace

void Bootstrap::barrier(double limit_s) {
  const char mine = 0;
  std::vector<char> all(static_cast<std::size_t>(size()));
  all_gather_bytes(&mine, all.data(), 1, limit_s);
}

void all_or_none(Bootstrap& bootstrap, double limit_s, const std::function<void()>& step) {
  const Vote mine = vote_of(step);
  std::vector<Vote> votes(static_cast<std::size_t>(bootstrap.size()));
  // A rank whose step waited for another in vain comes to its vote that much later.
  if (!(limit_s > 0)) limit_s = environment().peer_limit_s;
  bootstrap.all_gather_bytes(&mine, votes.data(), sizeof mine, 2 * limit_s + 1);
  for (int rank = 0; rank < bootstrap.size(); ++rank) {
    const Vote& vote = votes[static_cast<std::size_t>(rank)];
    if (vote.code == StatusCode::kOk) continue;
    throw VotedError(refusal(vote.code, vote.place.data(), fmt::format("rank {}: {}", rank, vote.argument.data()),
                             vote.value.data(), vote.accepted.data(), vote.remedy.data()));
  }
}

Status check_same_config(std::span<const RankRecord> records) {
  const auto size = static_cast<std::int32_t>(records.size());
  const RankRecord& first = records[0];
  const auto differ = [](const char* argument, int rank, auto value, auto of_first) {
    return refusal(StatusCode::kInvalidArgument, kPlace, fmt::format("{} of rank {}", argument, rank),
                   fmt::format("{}", value), fmt::format("{}, as rank 0 has it", of_first),
                   "create the group with the same config on all ranks");
  };
  for (int i = 0; i < size; ++i) {
    const RankRecord& r = records[static_cast<std::size_t>(i)];
    if (r.version != first.version) return differ("version of twostep's protocol", i, r.version, first.version);
    if (r.rank != i)
      return refusal(StatusCode::kInvalidArgument, kPlace, "rank",
                     fmt::format("{} at place {} of the group", r.rank, i),
                     "each rank once, and the bootstrap in their order", "give each rank its own number");
    if (r.size != size) return differ("size", i, r.size, size);
    if (r.max_rows != first.max_rows) return differ("max_rows", i, r.max_rows, first.max_rows);
    if (r.max_cols != first.max_cols) return differ("max_cols", i, r.max_cols, first.max_cols);
    if (r.max_hidden != first.max_hidden) return differ("max_hidden", i, r.max_hidden, first.max_hidden);
    if (r.max_words != first.max_words) return differ("max_words", i, r.max_words, first.max_words);
    if (r.strict_fence != first.strict_fence) return differ("strict_fence", i, r.strict_fence, first.strict_fence);
    if (r.peer_limit_s != first.peer_limit_s) return differ("peer_limit_s", i, r.peer_limit_s, first.peer_limit_s);
    if (r.transport != first.transport)
      return differ("transport", i, transport_name(r.transport), transport_name(first.transport));
  }
  return {};
}

Status check_records(std::span<const RankRecord> records) {
  if (auto status = check_same_config(records); !status.ok()) return status;
  const auto size = static_cast<std::int32_t>(records.size());
  const RankRecord& first = records[0];
  for (int i = 0; i < size; ++i) {
    const RankRecord& r = records[static_cast<std::size_t>(i)];
    if (r.host != first.host)
      return refusal(StatusCode::kUnavailable, kPlace, fmt::format("host of rank {}", i), "another than that of rank 0",
                     "ranks of one host", "use NCCL between hosts, and a mailbox inside each");
  }
  if (choose_transport(records) != PeerTransport::kAuto) return {};
  std::string each;
  for (int i = 0; i < size; ++i)
    each += fmt::format("{}rank {}: {}", i ? "; " : "", i, names_of(records[static_cast<std::size_t>(i)].transports));
  return refusal(StatusCode::kUnavailable, kPlace, fmt::format("transport {}", transport_name(first.transport)),
                 fmt::format("not possible for all ({})", each), "one that all ranks can do",
                 "give the bootstrap a socket path for vmm_fd, or use NCCL");
}

PeerTransport choose_transport(std::span<const RankRecord> records) {
  const std::uint32_t common = common_transports(records);
  const PeerTransport wanted = records[0].transport;
  for (const PeerTransport t : kTransports)
    if ((wanted == PeerTransport::kAuto || wanted == t) && common & bit(t)) return t;
  return PeerTransport::kAuto;
}

namespace {

RankRecord record_of(const MailboxConfig& config) {
  RankRecord mine;
  mine.rank = config.rank;
  mine.size = config.size;
  mine.max_rows = config.max_rows;
  mine.max_cols = config.max_cols;
  mine.max_hidden = config.max_hidden;
  mine.max_words = config.max_words;
  mine.transport = config.transport;
  mine.strict_fence = config.strict_fence;
  mine.peer_limit_s = config.peer_limit_s;
  mine.host = host_identity();
  mine.process = process_identity();
  return mine;
}

}  // namespace

void set_up_nccl(Bootstrap& bootstrap, const MailboxConfig& config, NcclPlan& plan) {
  NcclId id;  // of rank 0
  all_or_none(bootstrap, config.peer_limit_s, [&] {
    if (config.rank == 0) id = plan.unique_id();
  });
  struct Record {
    RankRecord rank;
    NcclId id;
    std::int32_t version = 0, pad = 0;
  } const mine{record_of(config), id, plan.version()};
  static_assert(std::is_trivially_copyable_v<Record>);
  std::vector<Record> records(static_cast<std::size_t>(config.size));
  bootstrap.all_gather_bytes(&mine, records.data(), sizeof mine, config.peer_limit_s);
  std::vector<RankRecord> ranks;
  for (const Record& record : records) ranks.push_back(record.rank);
  throw_if_error(check_same_config(ranks));  // the same on every rank: no vote
  for (int rank = 0; rank < config.size; ++rank)
    if (const int version = records[static_cast<std::size_t>(rank)].version; version != records[0].version)
      fail(StatusCode::kInvalidArgument, "nccl.create", fmt::format("NCCL of rank {}", rank), std::to_string(version),
           fmt::format("{}, as rank 0 has it", records[0].version),
           "install the same NCCL on all ranks, or name it in TWOSTEP_NCCL");
  all_or_none(bootstrap, config.peer_limit_s, [&] { plan.join(records[0].id); });
}

void set_up_mailbox(Bootstrap& bootstrap, MailboxConfig* config, PeerMemory& memory) {
  RankRecord mine = record_of(*config);
  mine.transports = memory.transports();
  const std::string path = bootstrap.socket_path();
  if (path.empty() || path.size() > kLongestBootstrapPath) mine.transports &= ~bit(PeerTransport::kVmmFd);
  mine.device = memory.device_uuid();
  const auto size = static_cast<std::size_t>(config->size);
  std::vector<RankRecord> records(size);
  bootstrap.all_gather_bytes(&mine, records.data(), sizeof mine, config->peer_limit_s);
  throw_if_error(check_records(records));  // the same on every rank: no vote
  config->transport = choose_transport(records);

  const auto together = [&](const std::function<void()>& step) { all_or_none(bootstrap, config->peer_limit_s, step); };
  together([&] {
    int here = 0;
    for (const RankRecord& peer : records) {
      here += peer.device == mine.device;
      if (peer.rank != config->rank) memory.require_access(peer.device, config->transport);
    }
    memory.share_device(here);
  });
  std::vector<MemoryHandle> handles(size);
  MemoryHandle& own = handles[static_cast<std::size_t>(config->rank)];
  bool given_away = false;  // others may have mapped our memory
  try {
    together([&] {
      memory.allocate(config->transport, region_layout(*config).bytes);
      own = memory.handle();
    });
    given_away = true;
    if (config->transport == PeerTransport::kVmmFd) {
      std::optional<DescriptorSocket> socket;
      together([&] { socket.emplace(path, config->rank); });
      together([&] {
        const auto descriptors = socket->exchange(config->size, own.fd, config->peer_limit_s);
        for (std::size_t rank = 0; rank < size; ++rank)
          if (descriptors[rank] >= 0) handles[rank].fd = descriptors[rank];
      });
    } else {
      std::vector<std::array<std::byte, 64>> all(size);
      bootstrap.all_gather_bytes(own.bytes.data(), all.data(), sizeof own.bytes, config->peer_limit_s);
      for (std::size_t rank = 0; rank < size; ++rank) handles[rank].bytes = all[rank];
    }
    together([&] { memory.map(handles); });
    // The vote was the barrier before which nobody may write to a peer: every region is empty and mapped.
    together([&] { memory.self_test(); });
    close_all(handles);
  } catch (const std::exception& error) {
    close_all(handles);
    memory.unmap();
    // What all have voted on, all clean up after. Where the group itself is broken, nobody is waited for, and what
    // others may still write stays.
    bool let_go = !given_away;
    try {
      if (dynamic_cast<const VotedError*>(&error)) {
        bootstrap.barrier(config->peer_limit_s);
        let_go = true;
      }
    } catch (const std::exception& of_barrier) {
      log_warn(std::string("mailbox.create: ") + of_barrier.what());
    }
    if (let_go) memory.release();
    throw;
  }
}

Status tear_down_mailbox(Bootstrap& bootstrap, const MailboxConfig& config, PeerMemory& memory) {
  Status status, of_device;
  const auto meet = [&] {
    if (!status.ok()) return;
    try {
      bootstrap.barrier(config.peer_limit_s);
    } catch (const Error& error) {
      status = error.status();
    } catch (const std::exception& error) {  // of the caller's own exchange
      status = refusal(StatusCode::kPeerLost, "mailbox.close", "the group", error.what(), "all ranks");
    }
  };
  try {
    memory.stop();
  } catch (const Error& error) {
    of_device = error.status();
  }
  meet();  // nobody writes any more
  memory.unmap();
  meet();  // nobody can
  if (status.ok()) memory.release();
  else log_warn("mailbox.close: its memory stays, since not all ranks have let go of it: " + status.message());
  return of_device.ok() ? status : of_device;
}

}  // namespace twostep
