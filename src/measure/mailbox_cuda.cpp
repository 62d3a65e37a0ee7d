#include "measure/mailbox_cuda.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <thread>

#include "core/check.h"
#include "core/hash.h"
#include "cuda/graph.h"
#include "cuda/memory.h"
#include "mailbox/nccl.h"
#include "measure/device.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "measure.mailbox";
constexpr int kVirtualCtas = 32;
constexpr double kBootstrapLimit = 120;  // seconds; kernels are compiled meanwhile
constexpr std::size_t kMostCalls = 5;    // of a sequence

// Where the sockets of one group are, removed with what is in it.
class Folder {
 public:
  Folder() : path_((std::filesystem::temp_directory_path() / "twostep-XXXXXX").string()) {
    if (::mkdtemp(path_.data()) == nullptr)
      fail(StatusCode::kUnavailable, kPlace, "temporary folder", path_, "a folder that can be made", "set TMPDIR");
  }
  ~Folder() {
    std::error_code gone;
    std::filesystem::remove_all(path_, gone);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string group() const { return path_ + "/group"; }

 private:
  std::string path_;
};

std::uint64_t seed_of(std::uint64_t seed, std::size_t sequence, int replay, std::size_t call) {
  return mix64(seed + mix64((static_cast<std::uint64_t>(sequence) << 32) + (static_cast<std::uint64_t>(replay) << 16) +
                            call + 1));
}

// Device memory of one call. Allocated once for the largest: freeing memory waits for the device, on which another
// rank's call may be waiting for this one's next.
class CallBuffers {
 public:
  explicit CallBuffers(const std::vector<MailboxCase>& cases, int ranks) {
    std::array<std::size_t, 5> most{};
    for (const MailboxCase& c : cases) {
      const bool gather = c.op == MailboxOp::kAllGather, words = c.op == MailboxOp::kAllGatherWords;
      const auto in = static_cast<std::size_t>(words ? 2 * c.cols : c.rows * (c.cols + c.pad));
      const auto out = static_cast<std::size_t>(words    ? 2 * ranks * c.cols
                                                : gather ? c.rows * (ranks * c.cols + c.pad)
                                                         : c.rows * (c.cols + c.pad));
      const std::array<std::size_t, 5> sizes = {in, out, gather || words ? 0 : in, gather || words ? 0 : in,
                                                gather || words ? 0 : 2 * static_cast<std::size_t>(c.cols)};
      for (std::size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], sizes[i]);
    }
    for (std::size_t i = 0; i < most.size(); ++i) buffers_[i] = DeviceBuffer(2 * most[i] + 16);
  }
  void upload(const CallMemory& memory, Stream stream) const {
    for (std::size_t i = 0; i < buffers_.size(); ++i)
      if (const auto& part = memory.*kParts[i]; !part.empty())
        copy_to_device(buffers_[i].data(), part.data(), 2 * part.size(), stream);
  }
  void download(CallMemory& memory, Stream stream) const {
    for (std::size_t i = 0; i < buffers_.size(); ++i)
      if (auto& part = memory.*kParts[i]; !part.empty())
        copy_to_host(part.data(), buffers_[i].data(), 2 * part.size(), stream);
  }
  // The call, by a Mailbox or an NcclGroup.
  template <class Group>
  void enqueue(Group& group, const MailboxCase& c, Device device, Stream stream) const {
    const auto matrix = [&](void* data, std::int64_t cols, std::int64_t stride) {
      return TensorView::matrix(data, c.rows, cols, device, stride);
    };
    void *in = buffers_[0].data(), *out = buffers_[1].data();
    const std::int64_t ranks = group.size(), rank = group.rank();
    if (c.op == MailboxOp::kAllGatherWords) {
      if (c.in_place) in = static_cast<std::uint32_t*>(out) + rank * c.cols;
      return group.all_gather_words(TensorView::dense(in, DType::kI32, {c.cols}, device),
                                    TensorView::dense(out, DType::kI32, {ranks, c.cols}, device), stream);
    }
    const std::int64_t in_stride = c.cols + c.pad, out_stride = ranks * c.cols + c.pad;
    if (c.op == MailboxOp::kAllGather) {
      const TensorView own = matrix(static_cast<std::uint16_t*>(out) + rank * c.cols, c.cols, out_stride);
      return group.all_gather(c.in_place ? own : matrix(in, c.cols, in_stride), matrix(out, ranks * c.cols, out_stride),
                              stream);
    }
    std::optional<TensorView> residual, gamma, norm;
    if (c.residual) residual = matrix(c.in_place ? out : buffers_[2].data(), c.cols, in_stride);
    if (c.gamma != MailboxCase::Gamma::kNone) {
      const DType dtype = c.gamma == MailboxCase::Gamma::kBF16 ? DType::kBF16 : DType::kF32;
      gamma = TensorView::dense(buffers_[4].data(), dtype, {c.cols}, device);
      norm = matrix(c.in_place ? in : buffers_[3].data(), c.cols, in_stride);
    }
    group.all_reduce_add_norm(matrix(in, c.cols, in_stride), residual, matrix(out, c.cols, in_stride), gamma, 1e-5f,
                              norm, stream);
  }

 private:
  static constexpr std::vector<std::uint16_t> CallMemory::*kParts[] = {
      &CallMemory::in, &CallMemory::out, &CallMemory::residual, &CallMemory::norm, &CallMemory::gamma};
  std::array<DeviceBuffer, 5> buffers_;
};

// What one rank's thread has.
struct Rank {
  int rank;
  Device device;
  Bootstrap& bootstrap;
  Mailbox& mailbox;
  NcclGroup* nccl;  // null: none
  Stream stream;
};

MailboxConfig config_of(const MailboxRanks& ranks, int rank, const std::vector<MailboxCase>& cases) {
  MailboxConfig config;
  config.rank = rank;
  config.size = ranks.ranks;
  config.max_rows = 1;
  config.max_cols = config.max_hidden = 64;
  config.max_words = 64;
  config.transport = ranks.transport;
  if (ranks.gpus() < ranks.ranks) config.max_ctas = kVirtualCtas;
  for (const MailboxCase& c : cases) {
    config.max_rows = std::max(config.max_rows, c.rows);
    std::int64_t& cols = c.op == MailboxOp::kAllGather        ? config.max_cols
                         : c.op == MailboxOp::kAllGatherWords ? config.max_words
                                                              : config.max_hidden;
    cols = std::max(cols, c.cols);
  }
  return config;
}

// Runs `body` as every rank. Throws what the first rank threw that was not itself waiting for another.
void run_ranks(const MailboxRanks& ranks, const std::vector<MailboxCase>& cases,
               const std::function<void(const Rank&)>& body) {
  const bool with_nccl = why_no_nccl(ranks).empty();
  const Folder folder;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks.ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks.ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        const int ordinal = ranks.devices[static_cast<std::size_t>(rank) % ranks.devices.size()];
        const ContextGuard context(ordinal);
        const Device device = Device::cuda(ordinal);
        const auto bootstrap = make_socket_bootstrap(folder.group(), rank, ranks.ranks, kBootstrapLimit);
        const MailboxConfig config = config_of(ranks, rank, cases);
        Mailbox mailbox = Mailbox::create(*bootstrap, config, device);
        std::optional<NcclGroup> nccl;
        if (with_nccl) nccl.emplace(NcclGroup::create(*bootstrap, config, device));
        const OwnedStream stream;
        body({rank, device, *bootstrap, mailbox, nccl ? &*nccl : nullptr, stream.view()});
        bootstrap->barrier(kBootstrapLimit);
        if (nccl) nccl->close();
        mailbox.close();
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  std::exception_ptr first;
  for (const std::exception_ptr& error : errors) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      if (e.code() != StatusCode::kPeerLost) throw;
      if (!first) first = error;
    }
  }
  if (first) std::rethrow_exception(first);
}

std::vector<MailboxCase> all_cases(const std::vector<MailboxSequence>& sequences) {
  std::vector<MailboxCase> all;
  for (const MailboxSequence& sequence : sequences) all.insert(all.end(), sequence.calls.begin(), sequence.calls.end());
  return all;
}

// What ranks tell each other after a sequence: whether values were wrong, and the bits that must be equal on all.
struct Finding {
  std::uint64_t bits = 0;
  std::uint64_t wrong = 0;
};

// One rank of check_mailbox.
class Checker {
 public:
  Checker(const Rank& rank, const std::vector<MailboxSequence>& sequences, std::uint64_t seed)
      : rank_(rank), sequences_(sequences), seed_(seed) {
    const std::vector<MailboxCase> cases = all_cases(sequences);
    for (std::size_t call = 0; call < kMostCalls; ++call) buffers_.emplace_back(cases, rank.mailbox.size());
  }

  void run(MailboxCheck& result, const Tell& tell) {
    for (std::size_t i = 0; i < sequences_.size() && result.failure.empty(); ++i) {
      if (rank_.rank == 0) tell(i, sequences_.size());
      result.failure = run_sequence(i, result);
    }
  }

 private:
  std::string run_sequence(std::size_t index, MailboxCheck& result) {
    const MailboxSequence& sequence = sequences_[index];
    // Nobody is in a call while graphs come and go.
    std::optional<Graph> graph;
    const auto meet = [&] { rank_.bootstrap.barrier(kBootstrapLimit); };
    meet();
    const auto enqueue = [&] {
      for (std::size_t call = 0; call < sequence.calls.size(); ++call)
        buffers_[call].enqueue(rank_.mailbox, sequence.calls[call], rank_.device, rank_.stream);
    };
    if (sequence.replays > 0) graph.emplace(rank_.stream, enqueue);
    meet();
    std::string failure;
    for (int replay = 0; replay < std::max(1, sequence.replays) && failure.empty(); ++replay) {
      failure = judge(index, replay, false, [&] {
        if (graph) graph->launch(rank_.stream);
        else enqueue();
      });
      for (const MailboxCase& c : sequence.calls) {
        ++result.calls[static_cast<std::size_t>(c.op)];
        result.captured += sequence.replays > 0;
        result.in_place += c.in_place;
        result.padded += c.pad > 0;
      }
    }
    if (rank_.nccl != nullptr && failure.empty()) {
      failure = judge(index, 0, true, [&] {
        for (std::size_t call = 0; call < sequence.calls.size(); ++call)
          if (with_nccl(sequence.calls[call]))
            buffers_[call].enqueue(*rank_.nccl, sequence.calls[call], rank_.device, rank_.stream);
      });
      for (const MailboxCase& c : sequence.calls) result.through_nccl += with_nccl(c);
    }
    meet();
    return failure;
  }

  // Sums in another order are other sums, unless they are exact.
  static bool with_nccl(const MailboxCase& c) { return c.op != MailboxOp::kAllReduceAddNorm || c.integers; }

  template <class Work>
  std::string judge(std::size_t index, int replay, bool nccl, Work&& work) {
    const std::vector<MailboxCase>& calls = sequences_[index].calls;
    const int ranks = rank_.mailbox.size();
    std::vector<CallMemory> memory;
    for (std::size_t call = 0; call < calls.size(); ++call) {
      memory.push_back(memory_before(calls[call], ranks, rank_.rank, seed_of(seed_, index, replay, call)));
      buffers_[call].upload(memory.back(), rank_.stream);
    }
    work();
    TWOSTEP_CUDA_CHECK(cuStreamSynchronize(static_cast<CUstream>(rank_.stream.handle)), kPlace);
    if (nccl) rank_.nccl->check();
    else rank_.mailbox.check();
    std::string failure;
    Finding mine;
    for (std::size_t call = 0; call < calls.size(); ++call) {
      if (nccl && !with_nccl(calls[call])) continue;
      CallMemory& m = memory[call];
      buffers_[call].download(m, rank_.stream);
      std::string wrong = wrong_after(calls[call], ranks, rank_.rank, seed_of(seed_, index, replay, call), m);
      if (failure.empty() && !wrong.empty())
        failure =
            fmt::format("sequence {}, {}call {}: {}{}", index, replay > 0 ? fmt::format("replay {}, ", replay) : "",
                        call, wrong, nccl ? " (through NCCL)" : "");
      if (calls[call].op != MailboxOp::kAllReduceAddNorm) continue;
      const std::vector<std::uint16_t>& norms = calls[call].in_place ? m.in : m.norm;
      const bool norm = calls[call].gamma != MailboxCase::Gamma::kNone;
      mine.bits = mix64(mine.bits + hash(m.out) + (norm ? hash(norms) : 0));
    }
    mine.wrong = !failure.empty();
    std::vector<Finding> all(static_cast<std::size_t>(ranks));
    rank_.bootstrap.all_gather_bytes(&mine, all.data(), sizeof mine, kBootstrapLimit);
    for (int peer = 0; peer < ranks && failure.empty(); ++peer) {
      const Finding& other = all[static_cast<std::size_t>(peer)];
      if (other.wrong) failure = fmt::format("rank {} found wrong values", peer);
      else if (other.bits != mine.bits)
        failure =
            fmt::format("sequence {}: sums of rank {} have other bits than those of rank {}", index, peer, rank_.rank);
    }
    return failure;
  }

  static std::uint64_t hash(const std::vector<std::uint16_t>& values) {
    return hash64({reinterpret_cast<const char*>(values.data()), 2 * values.size()});
  }

  const Rank& rank_;
  const std::vector<MailboxSequence>& sequences_;
  const std::uint64_t seed_;
  std::vector<CallBuffers> buffers_;
};

}  // namespace

std::string why_no_nccl(const MailboxRanks& ranks) {
  ::setenv("NCCL_NVLS_ENABLE", "0", 1);
  if (ranks.gpus() < ranks.ranks) return "ranks share a GPU, which NCCL refuses";
  return Nccl::status().ok() ? "" : Nccl::status().message();
}

MailboxCheck check_mailbox(const MailboxRanks& ranks, const std::vector<MailboxSequence>& sequences, std::uint64_t seed,
                           const Tell& tell) {
  std::vector<MailboxCheck> results(static_cast<std::size_t>(ranks.ranks));
  run_ranks(ranks, all_cases(sequences), [&](const Rank& rank) {
    MailboxCheck& result = results[static_cast<std::size_t>(rank.rank)];
    result.transport = transport_name(rank.mailbox.config().transport);
    Checker(rank, sequences, seed).run(result, tell);
  });
  MailboxCheck result = results[0];
  for (const MailboxCheck& other : results)  // the rank that saw it says more than those that heard of it
    if (other.failure.find("sequence") != std::string::npos && result.failure.find("sequence") == std::string::npos)
      result.failure = other.failure;
  return result;
}

std::vector<MailboxRow> bench_mailbox(const MailboxRanks& ranks, const std::vector<MailboxCase>& cases, int calls,
                                      int replays, Machine& machine, const Tell& tell) {
  constexpr int kWarmup = 20;
  const std::string no_nccl = why_no_nccl(ranks);
  std::vector<MailboxRow> rows(cases.size());
  using Samples = std::vector<std::vector<double>>;  // by rank
  const auto none = [&] { return std::vector<Samples>(cases.size(), Samples(static_cast<std::size_t>(ranks.ranks))); };
  std::vector<Samples> ours = none(), theirs = none();
  run_ranks(ranks, cases, [&](const Rank& rank) {
    const CallBuffers buffers(cases, ranks.ranks);
    rank.bootstrap.barrier(kBootstrapLimit);
    const auto measure = [&](auto& group, const MailboxCase& c, std::size_t index) {
      const std::uint64_t seed = seed_of(1, index, 0, 0);
      CallMemory memory = memory_before(c, ranks.ranks, rank.rank, seed);
      buffers.upload(memory, rank.stream);
      buffers.enqueue(group, c, rank.device, rank.stream);
      buffers.download(memory, rank.stream);
      group.check();
      if (const std::string wrong = wrong_after(c, ranks.ranks, rank.rank, seed, memory); !wrong.empty())
        fail(StatusCode::kInternal, kPlace, "values", wrong, "those that were sent", "run twostep check mailbox");
      rank.bootstrap.barrier(kBootstrapLimit);
      const Graph graph(rank.stream, [&] {
        for (int i = 0; i < calls; ++i) buffers.enqueue(group, c, rank.device, rank.stream);
      });
      rank.bootstrap.barrier(kBootstrapLimit);
      std::vector<double> samples = time_back_to_back(graph, rank.stream, kWarmup, replays);
      group.check();
      for (double& sample : samples) sample /= calls;
      if (rank.rank == 0) describe_gpu(rank.device.index, machine);  // right after the load
      rank.bootstrap.barrier(kBootstrapLimit);                       // nobody is in a call while the graph goes
      return samples;
    };
    for (std::size_t i = 0; i < cases.size(); ++i) {
      if (rank.rank == 0) tell(i, cases.size());
      const auto at = static_cast<std::size_t>(rank.rank);
      ours[i][at] = measure(rank.mailbox, cases[i], i);
      if (rank.nccl != nullptr) theirs[i][at] = measure(*rank.nccl, cases[i], i);
      if (rank.rank == 0) {
        rows[i].transport = transport_name(rank.mailbox.config().transport);
        rows[i].ctas = rank.mailbox.config().max_ctas;
      }
    }
  });
  for (std::size_t i = 0; i < cases.size(); ++i) {
    MailboxRow& row = rows[i];
    row.what = cases[i];
    row.ranks = ranks.ranks;
    row.gpus = ranks.gpus();
    row.calls = calls;
    row.time = over_ranks(ours[i]);
    row.no_baseline = no_nccl;
    if (no_nccl.empty()) {
      row.baseline = "NCCL " + Nccl::get()->version();
      row.baseline_time = over_ranks(theirs[i]);
    }
  }
  return rows;
}

}  // namespace twostep
