// The kernels of kernels/gather without a GPU: all ranks of a group at once, their CTAs taking turns at random, one
// rank far ahead of another; and protocols with one rule broken, which must be found out.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "core/hash.h"
#include "gather/fallback.cuh"
#include "mailbox/contract.h"
#include "tests/emulate/emulator.h"

namespace twostep {
namespace {

namespace g = gather;

static_assert(sizeof(g::Ring) == sizeof(MailboxRing) && sizeof(g::Report) == sizeof(MailboxReport));
static_assert(sizeof(g::Control) == sizeof(RingControl) && sizeof(g::AddNorm) == sizeof(AddNormStep));
static_assert(offsetof(g::Control, used) == offsetof(RingControl, used));
static_assert(offsetof(g::Report, elapsed_ns) == offsetof(MailboxReport, elapsed_ns));
static_assert(offsetof(g::Report, abort_request) == offsetof(MailboxReport, abort_request));
static_assert(offsetof(g::Ring, op) == offsetof(MailboxRing, op) && g::Protocol::kThreads == kMailboxThreads);

template <int kOf, class Base = g::Protocol>
struct Rules : Base {
  static constexpr int kRanks = kOf;
  static constexpr int kThreads = 32;
};

std::uint64_t fresh() {
  static const std::uint64_t number = std::random_device{}();
  return number;
}

// Word i of what `rank` sends in its call number `call`; one in eight is a hard one.
std::uint32_t sent(std::uint64_t data, int call, int rank, std::uint64_t i) {
  constexpr std::uint32_t kHard[] = {0xffffffff, 0xffff0000, 0x0000ffff, 0x7fc07fc0,
                                     0x80000000, 0x00010001, 0x7f80ff80, 0xfffffffe};
  const std::uint64_t x =
      mix64(data + mix64((static_cast<std::uint64_t>(call) << 40) + (static_cast<std::uint64_t>(rank) << 32) + i));
  return x % 8 == 0 ? kHard[x >> 32 & 7] : static_cast<std::uint32_t>(x >> 16);
}
// A finite BF16 pair, so that sums can be compared.
std::uint32_t sent_number(std::uint64_t data, int call, int rank, std::uint64_t i) {
  const auto half = [](std::uint32_t bits) { return (bits & 0x807f) | (0x3d00 + (bits & 0x380)); };
  const std::uint32_t word = sent(data, call, rank, i);
  return half(word & 0xffff) | half(word >> 16) << 16;
}
std::uint32_t kept(std::uint32_t word, std::uint32_t instead) { return word == 0xffffffff ? instead : word; }

struct Call {
  MailboxOp op;
  std::int64_t rows, cols;  // cols: words in the second operation
  unsigned grid;
};

// A group on the host. Each rank has a stream of launches.
template <class R>
class Group {
 public:
  static constexpr int kRanks = R::kRanks;

  explicit Group(std::uint64_t data) : data_(data) {
    config_.size = kRanks;
    config_.max_rows = 8;
    config_.max_cols = 512;     // batches of a thread that follow each other
    config_.max_hidden = 1024;  // four pieces of a thread
    config_.max_words = 40;
    layout_ = region_layout(config_);
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks_[rank].region.reset(
          static_cast<std::byte*>(std::aligned_alloc(256, static_cast<std::size_t>(layout_.bytes))));
      std::memset(ranks_[rank].region.get(), 0xff, static_cast<std::size_t>(layout_.bytes));
      // Their addresses stay: a launch that starts early is wrong, no more.
      for (auto* words : {&ranks_[rank].in, &ranks_[rank].out, &ranks_[rank].norm})
        words->reserve(static_cast<std::size_t>(kRanks * config_.max_rows * config_.max_hidden / 2 + 4));
    }
  }

  g::Ring ring(int rank, MailboxOp op) {
    const auto index = static_cast<std::size_t>(op);
    MailboxRing r{};
    for (int peer = 0; peer < kRanks; ++peer)
      r.regions[static_cast<std::size_t>(peer)] = ranks_[peer].region.get() + layout_.offset[index];
    r.control = &ranks_[rank].control[index];
    r.poisoned = &ranks_[rank].poisoned;
    r.report = &ranks_[rank].report;
    r.segment_bytes = layout_.segment_bytes[index];
    r.limit_ns = limit_ns;
    r.rank = rank;
    r.op = static_cast<std::int32_t>(op);
    return std::bit_cast<g::Ring>(r);
  }

  // The next call of a rank: writes its input, runs, overwrites the input and looks at the output.
  void add(int rank, const Call& call) {
    Rank& self = ranks_[rank];
    const int number = self.calls++;
    const std::int64_t words_in = call.op == MailboxOp::kAllGatherWords ? call.cols : call.rows * call.cols / 2;
    host(rank, [this, &self, rank, number, call, words_in] {
      self.in.assign(static_cast<std::size_t>(words_in + 4), 0xdeadbeef);
      for (std::int64_t i = 0; i < words_in; ++i)
        self.in[static_cast<std::size_t>(i)] = word_of(call, number, rank, static_cast<std::uint64_t>(i));
      self.out.assign(static_cast<std::size_t>(words_in * kRanks + 4), 0xdeadbeef);
      self.norm.assign(static_cast<std::size_t>(words_in + 4), 0xdeadbeef);
    });
    streams_[static_cast<std::size_t>(rank)].push_back(
        {{call.grid, 1, 1}, R::kThreads, [this, &self, rank, call] { launch(self, rank, call); }, programmatic});
    host(rank, [this, &self, rank, number, call, words_in] {
      std::fill(self.in.begin(), self.in.end(), 0xdeadbeef);
      if (self.poisoned == 0) look_at(self, rank, number, call, words_in);
    });
  }
  // A kernel of the caller's, which lets the next one start before it has done anything.
  void host(int rank, std::function<void()> work) {
    streams_[static_cast<std::size_t>(rank)].push_back({{},
                                                        1,
                                                        [work = std::move(work)] {
                                                          emulate::let_successor_start();
                                                          emulate::wait_for_predecessors();
                                                          emulate::give_way();
                                                          work();
                                                        },
                                                        programmatic});
  }
  bool programmatic = false;  // the launches that are added

  // The number of words that are not what they should be.
  std::int64_t run(std::uint64_t seed) {
    wrong_ = 0;
    emulate::run_streams(streams_, seed);
    for (auto& stream : streams_) stream.clear();
    return wrong_;
  }

  struct Rank {
    struct Free {
      void operator()(std::byte* memory) const { std::free(memory); }
    };
    std::unique_ptr<std::byte, Free> region;
    RingControl control[kMailboxOps]{};
    std::uint32_t poisoned = 0;
    MailboxReport report{};
    std::vector<std::uint32_t> in, out, norm;
    int calls = 0;
  };
  Rank& rank(int r) { return ranks_[r]; }
  Status status(int r) { return status_of(ranks_[r].report, 1e-9 * static_cast<double>(limit_ns)); }
  std::uint64_t limit_ns = std::uint64_t{1} << 60;

 private:
  std::uint32_t word_of(const Call& call, int number, int rank, std::uint64_t i) const {
    return call.op == MailboxOp::kAllReduceAddNorm ? sent_number(data_, number, rank, i) : sent(data_, number, rank, i);
  }

  void launch(Rank& self, int rank, const Call& call) {
    auto& shared = *static_cast<g::Shared*>(emulate::cta_memory());
    const auto rows = static_cast<std::uint32_t>(call.rows), cols = static_cast<std::uint32_t>(call.cols);
    const g::Ring r = ring(rank, call.op);
    if (call.op == MailboxOp::kAllGather)
      g::all_gather<R>(r, reinterpret_cast<const u16*>(aligned(self.in)), cols,
                       reinterpret_cast<u16*>(aligned(self.out)), kRanks * call.cols, rows, cols, shared);
    if (call.op == MailboxOp::kAllGatherWords)
      g::all_gather_words<R>(r, aligned(self.in), aligned(self.out), cols, shared);
    if (call.op == MailboxOp::kAllReduceAddNorm) {
      const auto* in = reinterpret_cast<const u16*>(aligned(self.in));
      auto* out = reinterpret_cast<u16*>(aligned(self.out));
      g::all_reduce_add_norm<R>(r,
                                {in, nullptr, out, gamma(), reinterpret_cast<u16*>(aligned(self.norm)), cols, 0, cols,
                                 cols, rows, cols, 1e-5f, 1},
                                shared);
    }
  }
  static const float* gamma() {
    static const std::vector<float> values = [] {
      std::vector<float> v(1024);
      for (std::size_t i = 0; i < v.size(); ++i) v[i] = 0.5f + static_cast<float>(i % 7);
      return v;
    }();
    return values.data();
  }
  // Vectors are allocated in 16 bytes.
  static std::uint32_t* aligned(std::vector<std::uint32_t>& v) { return v.data(); }

  void expect(std::uint32_t is, std::uint32_t should_be) { wrong_ += is != should_be; }

  void look_at(Rank& self, int, int number, const Call& call, std::int64_t words_in) {
    if (call.op == MailboxOp::kAllReduceAddNorm) return look_at_norm(self, number, call);
    const bool words = call.op == MailboxOp::kAllGatherWords;
    const std::int64_t row_words = words ? call.cols : call.cols / 2;
    for (int source = 0; source < kRanks; ++source)
      for (std::int64_t i = 0; i < words_in; ++i) {
        const std::int64_t row = i / row_words, column = i % row_words;
        expect(self.out[static_cast<std::size_t>((row * kRanks + source) * row_words + column)],
               kept(word_of(call, number, source, static_cast<std::uint64_t>(i)), words ? 0x7fffffff : 0x7fff7fff));
      }
    expect(self.out[static_cast<std::size_t>(words_in * kRanks)], 0xdeadbeef);
  }
  void look_at_norm(Rank& self, int number, const Call& call) {
    for (std::int64_t row = 0; row < call.rows; ++row) {
      std::vector<float> s;
      double squares = 0;
      for (std::int64_t i = row * call.cols / 2; i < (row + 1) * call.cols / 2; ++i)
        for (int half = 0; half < 2; ++half) {
          float sum = 0;
          for (int source = 0; source < kRanks; ++source) {
            const std::uint32_t word = word_of(call, number, source, static_cast<std::uint64_t>(i));
            const float x = bf16_to_float(static_cast<std::uint16_t>(half ? word >> 16 : word));
            sum = source == 0 ? x : sum + x;
          }
          const std::uint16_t bits = float_to_bf16(bf16_to_float(float_to_bf16(sum)) + 0.0f);  // no residual: zero
          const std::uint32_t out = self.out[static_cast<std::size_t>(i)];
          expect(half ? out >> 16 : out & 0xffff, bits);
          s.push_back(bf16_to_float(bits));
          squares += static_cast<double>(s.back()) * s.back();
        }
      const double scale = 1 / std::sqrt(squares / static_cast<double>(call.cols) + 1e-5);
      for (std::size_t j = 0; j < s.size(); ++j) {
        const std::uint32_t word = self.norm[static_cast<std::size_t>(row * call.cols / 2) + j / 2];
        const float out = bf16_to_float(static_cast<std::uint16_t>(j % 2 ? word >> 16 : word));
        const double exact = s[j] * scale * gamma()[j];
        wrong_ += !(std::abs(out - exact) <= std::abs(exact) / 128);
      }
    }
  }

  const std::uint64_t data_;
  MailboxConfig config_;
  RegionLayout layout_{};
  Rank ranks_[kRanks];
  std::vector<std::vector<emulate::Launch>> streams_{static_cast<std::size_t>(kRanks)};
  std::int64_t wrong_ = 0;
};

Call drawn_call(std::mt19937_64& random, bool gathers_only = false) {
  const auto one_of = [&](std::int64_t from, std::int64_t to) {
    return from + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(to - from + 1));
  };
  const auto grid = static_cast<unsigned>(one_of(1, 3));
  switch (gathers_only ? 0 : random() % 4) {
    case 2: return {MailboxOp::kAllGatherWords, 1, one_of(1, 40), grid};
    case 3: return {MailboxOp::kAllReduceAddNorm, one_of(0, 8), 8 * one_of(1, 128), grid};
    default: return {MailboxOp::kAllGather, one_of(0, 8), 8 * one_of(1, random() % 4 == 0 ? 64 : 8), grid};
  }
}

// Random calls, the same on all ranks; grids are each rank's own.
template <class R>
std::int64_t wrong_words(std::uint64_t seed, int calls, bool gathers_only, std::uint64_t first_epoch = 0,
                         std::uint64_t limit_ns = std::uint64_t{1} << 60, bool programmatic = false) {
  std::mt19937_64 random(seed);
  Group<R> group(seed);
  group.limit_ns = limit_ns;
  group.programmatic = programmatic;
  for (int rank = 0; rank < R::kRanks; ++rank)
    for (RingControl& control : group.rank(rank).control) control.epoch = first_epoch;
  for (int i = 0; i < calls; ++i) {
    Call call = drawn_call(random, gathers_only);
    for (int rank = 0; rank < R::kRanks; ++rank) {
      call.grid = static_cast<unsigned>(1 + random() % 3);
      group.add(rank, call);
    }
  }
  std::int64_t wrong = group.run(seed);
  for (int rank = 0; rank < R::kRanks; ++rank) wrong += group.rank(rank).poisoned;
  return wrong;
}

TEST(EmulatedMailbox, calls_of_all_kinds_and_sizes_move_every_bit) {
  SCOPED_TRACE(testing::Message() << "inputs " << fresh());
  for (std::uint64_t i = 0; i < 8; ++i) {
    EXPECT_EQ((wrong_words<Rules<2>>(fresh() + i, 40, false)), 0) << i;
    EXPECT_EQ((wrong_words<Rules<3>>(fresh() + i, 20, false)), 0) << i;
    EXPECT_EQ((wrong_words<Rules<4>>(fresh() + i, 16, false)), 0) << i;
  }
  EXPECT_EQ((wrong_words<Rules<8>>(fresh(), 12, false)), 0);
}

TEST(EmulatedMailbox, epochs_pass_two_to_the_32) {
  SCOPED_TRACE(testing::Message() << "inputs " << fresh());
  for (std::uint64_t i = 0; i < 30; ++i)
    EXPECT_EQ((wrong_words<Rules<2>>(fresh() + i, 20, false, (std::uint64_t{1} << 32) - 2 - i % 6)), 0) << i;
}

// One rule of the protocol broken at a time.
struct TwoStages : g::Protocol {
  static constexpr int kStages = 2;
  static constexpr int kCleared = 1;
};
struct NoClearing : g::Protocol {
  static constexpr int kCleared = 0;
};
struct ClearsTheNext : g::Protocol {
  static constexpr int kCleared = 1;
};
struct ComparesFloats : g::Protocol {  // a NaN that was sent never arrives
  static bool is_empty(u32 word) { return std::isnan(__uint_as_float(word)); }
};
struct EpochOfTheHost : g::Protocol {  // the number that a captured launch would replay
  static u64 epoch_of(const g::Ring&) { return 4; }
};
struct EpochPerCta : g::Protocol {
  static u64 epoch_of(const g::Ring& ring) { return counts[{ring.control, emulate::block.x}]++; }
  static inline std::map<std::pair<const void*, unsigned>, u64> counts;
};

// Found: a word that is wrong, a rank that waits in vain.
template <class Broken>
bool is_found_out() {
  for (std::uint64_t i = 0; i < 40; ++i)
    if (wrong_words<Rules<2, Broken>>(fresh() + i, 30, true, 0, 30'000'000) != 0) return true;
  return false;
}
TEST(EmulatedMailbox, a_broken_rule_is_found_out) {
  SCOPED_TRACE(testing::Message() << "inputs " << fresh());
  EXPECT_TRUE(is_found_out<TwoStages>());
  EXPECT_TRUE(is_found_out<NoClearing>());
  EXPECT_TRUE(is_found_out<ClearsTheNext>());
  EXPECT_TRUE(is_found_out<ComparesFloats>());
  EXPECT_TRUE(is_found_out<EpochOfTheHost>());
  EXPECT_TRUE(is_found_out<EpochPerCta>());
  EXPECT_FALSE(is_found_out<g::Protocol>());  // not by the limit of these tests
}

struct LaunchesEarly : g::Protocol {  // no rule is broken
  static constexpr bool kLaunchesEarly = true;
};
TEST(EmulatedMailbox, calls_behind_programmatic_edges_wait_for_what_is_before_them) {
  SCOPED_TRACE(testing::Message() << "inputs " << fresh());
  constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60, kShort = 30'000'000;
  for (std::uint64_t i = 0; i < 8; ++i) {
    EXPECT_EQ((wrong_words<Rules<2>>(fresh() + i, 40, false, 0, kNoLimit, true)), 0) << i;
    EXPECT_EQ((wrong_words<Rules<4>>(fresh() + i, 16, false, 0, kNoLimit, true)), 0) << i;
    EXPECT_EQ((wrong_words<Rules<2, LaunchesEarly>>(fresh() + i, 40, false, 0, kNoLimit, true)), 0) << i;
  }
  emulate::pdl_wait_is_skipped = true;
  EXPECT_NE((wrong_words<Rules<2>>(fresh(), 40, false, 0, kShort, true)), 0);
  emulate::pdl_wait_is_skipped = false;
}

TEST(EmulatedMailbox, rows_that_differ_are_told_with_both_numbers) {
  for (const std::int64_t other : {0, 5}) {
    Group<Rules<2>> group(fresh());
    group.add(0, {MailboxOp::kAllGather, 3, 64, 2});
    group.add(1, {MailboxOp::kAllGather, other, 64, 1});
    group.run(fresh());
    int told = 0;
    for (int rank = 0; rank < 2; ++rank) {
      const Status status = group.status(rank);
      if (status.ok()) continue;
      ++told;
      EXPECT_EQ(status.code, StatusCode::kInvalidArgument) << status.message();
      EXPECT_EQ(status.argument, "rows");
      EXPECT_NE(status.value.find(std::to_string(rank == 0 ? 3 : other) + " here"), std::string::npos) << status.value;
    }
    EXPECT_GE(told, 1);
  }
  Group<Rules<2>> group(fresh());
  group.add(0, {MailboxOp::kAllReduceAddNorm, 2, 64, 2});
  group.add(1, {MailboxOp::kAllReduceAddNorm, 2, 56, 2});
  group.run(fresh());
  EXPECT_EQ(group.status(0).argument, "bytes of a rank") << group.status(0).message();
}

TEST(EmulatedMailbox, a_peer_that_does_not_come_is_named_and_later_launches_return) {
  Group<Rules<3>> group(fresh());
  group.limit_ns = 20'000'000;
  const Call call = {MailboxOp::kAllGather, 2, 64, 2};
  for (int rank = 0; rank < 3; ++rank) group.add(rank, call);
  for (int rank = 0; rank < 2; ++rank) group.add(rank, call);  // rank 2 leaves it out
  group.run(fresh());
  for (int rank = 0; rank < 2; ++rank) {
    const Status status = group.status(rank);
    EXPECT_EQ(status.code, StatusCode::kPeerLost);
    EXPECT_EQ(status.value.substr(0, 2), "2,") << status.message();
    EXPECT_NE(status.message().find("epoch 1 "), std::string::npos) << status.message();
    EXPECT_EQ(status.place, "mailbox.all_gather");
    EXPECT_EQ(group.rank(rank).report.rows_here, 2);
    EXPECT_GE(group.rank(rank).report.elapsed_ns, group.limit_ns);
  }
  EXPECT_TRUE(group.status(2).ok());
  group.add(0, call);  // drains: nobody answers, nothing is written
  group.host(0, [&] { EXPECT_EQ(group.rank(0).out[0], 0xdeadbeef); });
  group.run(fresh());
  EXPECT_EQ(group.rank(0).control[0].epoch, 3u);
  EXPECT_NE(group.status(0).message().find("epoch 1 "), std::string::npos) << "the first report stays";
}

// What a launch that is held up looks like: no word was lost, and yet all accuse each other, after twice the limit.
TEST(EmulatedMailbox, a_rank_that_comes_after_the_limit_ends_that_call_and_waits_for_the_others_in_the_next) {
  Group<Rules<4>> group(fresh());
  group.limit_ns = 20'000'000;
  const Call call = {MailboxOp::kAllGather, 1, 64, 1};
  for (int rank = 0; rank < 4; ++rank) group.add(rank, call);
  group.host(1, [&] {
    for (const int rank : {0, 2, 3})
      while (group.rank(rank).poisoned == 0) emulate::give_way();
  });
  for (int rank = 0; rank < 4; ++rank) group.add(rank, call);
  group.add(1, call);
  EXPECT_EQ(group.run(fresh()), 0) << "what did arrive";
  for (int rank = 0; rank < 4; ++rank) {
    const Status status = group.status(rank);
    EXPECT_EQ(status.code, StatusCode::kPeerLost);
    EXPECT_EQ(group.rank(rank).report.peer, rank == 1 ? 0 : 1) << status.message();
    EXPECT_EQ(group.rank(rank).report.epoch, rank == 1 ? 2u : 1u) << status.message();
  }
}

TEST(EmulatedMailbox, an_abort_ends_a_wait) {
  Group<Rules<2>> group(fresh());
  group.rank(0).report.abort_request = 1;
  group.add(0, {MailboxOp::kAllGatherWords, 1, 8, 1});
  group.run(fresh());
  EXPECT_EQ(group.status(0).code, StatusCode::kUnavailable) << group.status(0).message();
  EXPECT_NE(group.status(0).message().find("aborted"), std::string::npos);
}

// ---- What NCCL leaves to do

static_assert(sizeof(g::Move) == sizeof(MoveStep) && offsetof(g::Move, empty_as) == offsetof(MoveStep, empty_as));
static_assert(g::kMoveThreads == kMoveThreads && g::kBatch == kMoveBatch);
static_assert(g::kNanPair == kNanPair && g::kNanWord == kNanWord);

void run_move(const MoveStep& step, unsigned lines) {
  const unsigned units = step.row_bytes / step.unit, of_cta = kMoveThreads * kMoveBatch;
  emulate::run({(units + of_cta - 1) / of_cta, lines, 1}, kMoveThreads,
               [&] { g::move_rows(std::bit_cast<g::Move>(step)); });
}

// Ranks' rows, packed where they have gaps, gathered as NCCL does and permuted: every element at its place, the pair
// that a mailbox does not let through replaced, and nothing beside the rows written.
void gather_by_moves(std::int64_t rows, std::int64_t cols, DType dtype, std::int64_t pad, std::int64_t offset,
                     unsigned unit) {
  constexpr std::int64_t kRanks = 3;
  const auto size = static_cast<std::int64_t>(dtype_size(dtype));
  const std::int64_t in_stride = cols + pad, out_stride = kRanks * cols + pad;
  const auto byte_of = [&](std::int64_t rank, std::int64_t row, std::int64_t byte) {
    const std::uint32_t word =
        sent(7, static_cast<int>(row), static_cast<int>(rank), static_cast<std::uint64_t>(byte / 4));
    return static_cast<std::uint8_t>(word >> 8 * (byte % 4));
  };
  const auto bytes_of = [&](std::int64_t count) {
    return std::vector<std::uint8_t>(static_cast<std::size_t>(count * size), 0xa5);
  };
  std::vector<std::uint8_t> gathered = bytes_of(kRanks * rows * cols), out = bytes_of(offset + rows * out_stride);
  for (std::int64_t rank = 0; rank < kRanks; ++rank) {
    std::vector<std::uint8_t> in = bytes_of(offset + rows * in_stride);
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t byte = 0; byte < cols * size; ++byte)
        in[static_cast<std::size_t>((offset + row * in_stride) * size + byte)] = byte_of(rank, row, byte);
    run_move(
        pack_step(in.data() + offset * size, in_stride, rows, cols, dtype, gathered.data() + rank * rows * cols * size),
        2);
  }
  GatherStep step;
  step.out = out.data() + offset * size;
  step.out_stride = out_stride;
  step.rows = static_cast<std::uint32_t>(rows);
  step.cols = static_cast<std::uint32_t>(cols);
  step.dtype = dtype;
  const MoveStep permute = permute_step(step, kRanks, gathered.data());
  EXPECT_EQ(permute.unit, unit);
  run_move(permute, 2);
  std::int64_t wrong = 0, replaced = 0;
  const bool pairs = dtype == DType::kBF16 && cols % 2 == 0;
  for (std::int64_t at = 0; at < static_cast<std::int64_t>(out.size()); ++at) {
    const std::int64_t element = at / size - offset, row = element / out_stride, column = element % out_stride;
    std::uint8_t expected = 0xa5;
    if (element >= 0 && column < kRanks * cols) {
      const std::int64_t rank = column / cols, byte = column % cols * size + at % size;
      expected = byte_of(rank, row, byte);
      const auto word_of_ones = [&] {
        for (std::int64_t b = byte / 4 * 4; b < byte / 4 * 4 + 4; ++b)
          if (byte_of(rank, row, b) != 0xff) return false;
        return true;
      };
      if (pairs && word_of_ones()) {
        expected = byte % 2 == 1 ? 0x7f : 0xff;
        ++replaced;
      }
    }
    wrong += out[static_cast<std::size_t>(at)] != expected;
  }
  EXPECT_EQ(wrong, 0) << rows << " x " << cols << " " << dtype_name(dtype) << " pad " << pad << " offset " << offset;
  EXPECT_EQ(pairs && rows * cols > 64, replaced > 0);
}

TEST(EmulatedFallback, rows_are_permuted_in_units_that_their_addresses_allow) {
  gather_by_moves(5, 64, DType::kBF16, 8, 0, 16);
  gather_by_moves(1, 2 * 5120, DType::kBF16, 0, 0, 16);
  gather_by_moves(3, 42, DType::kBF16, 2, 2, 4);
  gather_by_moves(4, 40, DType::kBF16, 1, 1, 2);
  gather_by_moves(4, 33, DType::kBF16, 0, 0, 2);
  gather_by_moves(3, 7, DType::kF32, 2, 1, 4);
  gather_by_moves(2, 13, DType::kU8, 1, 0, 1);
}

TEST(EmulatedFallback, gathered_words_have_no_word_of_ones) {
  constexpr std::uint32_t kWords = 13;
  std::vector<std::uint32_t> out(2 * kWords + 1, 0xffffffff);
  for (std::uint32_t i = 0; i < 2 * kWords; i += 2) out[i] = i;
  GatherStep step;
  step.out = out.data();
  step.cols = kWords;
  run_move(words_step(step, 2), 1);
  for (std::uint32_t i = 0; i < 2 * kWords; ++i) EXPECT_EQ(out[i], i % 2 == 0 ? i : 0x7fffffff);
  EXPECT_EQ(out.back(), 0xffffffff);
}

TEST(EmulatedFallback, residual_and_norm_follow_the_formula) {
  constexpr std::uint32_t kRows = 3, kHidden = 8 * 41, kThreads = 32;
  for (const bool with_residual : {false, true})
    for (const bool with_gamma : {false, true})
      for (const bool in_place : {false, true}) {
        const auto bf16 = [](std::uint32_t i) { return float_to_bf16(static_cast<float>(std::sin(0.7 * i) * 3)); };
        std::vector<std::uint16_t> in(kRows * kHidden), before(in.size()), residual(in.size(), 0xffff),
            norm(in.size(), 0xffff);
        std::vector<std::uint16_t> gamma(kHidden);
        for (std::uint32_t i = 0; i < in.size(); ++i) in[i] = bf16(i), before[i] = bf16(3 * i + 1);
        for (std::uint32_t i = 0; i < kHidden; ++i) gamma[i] = bf16(5 * i + 2);
        if (in_place) residual = before;
        std::uint16_t* before_at = in_place ? residual.data() : before.data();
        const std::vector<std::uint16_t> sums = in;
        std::uint16_t* norm_at = in_place ? in.data() : norm.data();
        const g::AddNorm step = {in.data(),
                                 with_residual ? before_at : nullptr,
                                 residual.data(),
                                 with_gamma ? gamma.data() : nullptr,
                                 with_gamma ? norm_at : nullptr,
                                 kHidden,
                                 kHidden,
                                 kHidden,
                                 kHidden,
                                 kRows,
                                 kHidden,
                                 1e-5f,
                                 0};
        emulate::run({2, 1, 1}, kThreads,
                     [&] { g::add_norm<kThreads>(step, static_cast<float*>(emulate::cta_memory())); });
        int wrong = 0;
        for (std::uint32_t row = 0; row < kRows; ++row) {
          double squares = 0;
          for (std::uint32_t i = row * kHidden; i < (row + 1) * kHidden; ++i) {
            const float sum = bf16_to_float(sums[i]) + (with_residual ? bf16_to_float(before[i]) : 0.0f);
            wrong += residual[i] != float_to_bf16(sum);
            squares += std::pow(bf16_to_float(residual[i]), 2);
          }
          for (std::uint32_t i = row * kHidden; with_gamma && i < (row + 1) * kHidden; ++i) {
            const double exact = bf16_to_float(residual[i]) / std::sqrt(squares / kHidden + 1e-5) *
                                 bf16_to_float(gamma[i - row * kHidden]);
            wrong += !(std::abs(bf16_to_float(norm_at[i]) - exact) <= std::abs(exact) / 128);
          }
        }
        EXPECT_EQ(wrong, 0) << with_residual << with_gamma << in_place;
      }
}

}  // namespace
}  // namespace twostep
