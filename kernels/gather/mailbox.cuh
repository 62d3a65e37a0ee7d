// Collectives over memory that peers write: push, re-arm, poll. One kernel per operation; out and formulas stand there.
//
// A ring is a region of every GPU: kStages places, each with a segment per source rank. Call n of a ring uses place
// n mod 3. A word that is all ones has not arrived: payload never holds it, so arrival needs no flag, no fence, and no
// second byte on the wire. In call n a rank
//   1 waits for the kernel before, reads n, and counts itself in; the last CTA in makes it n + 1
//   2 tells every peer its rows (header) and pushes its vectors into place n of every peer
//   3 empties the place that call n + 2 will fill: that of call n - 1
//   4 polls its own place n, a batch at a time, and stores what arrives to where it belongs
// Why 3 is safe: a peer fills that place in its call n + 2, which it enters after all of our call n + 1 has reached it,
// and that was sent after our call n had ended. Clearing the place of call n + 1 is not: a peer may be there already.
// A thread takes its vectors in the order of their indices and polls none before it has pushed all of its own up to
// that one. So the lowest vector that some rank has not pushed is one that no thread waits for before it pushes it:
// with the grid resident as a whole, nobody waits for who cannot come. Pushes of a batch overlap the polls of the one
// before.
//
// Grid: any that is resident; what a vector's place is depends on its index alone. Block Rules::kThreads.
// A wait has a limit. What goes wrong is reported once, to a page of the host, and poisons the mailbox: launches then
// count their epoch and return.
// PDL: nothing is read or written before pdl_wait().
#pragma once

#include "common/reduce.cuh"

namespace twostep::gather {

using i32 = int;

constexpr int kMostRanks = 8;
constexpr int kBatch = 4;             // vectors of a thread in flight
constexpr int kMostPieces = 4;        // vectors of a row that a thread keeps: hidden up to 8 * 512 * 4
constexpr u32 kSleepAfter = 64;       // failed polls, then
constexpr u32 kSleepNs = 64;          // between two
constexpr u32 kAskPoisonEvery = 256;  // failed polls; a power of two
constexpr u32 kAskClockEvery = 4096;  // the same; the peer's header and the host's request are read then, too

// What was wrong: MailboxCause of src/mailbox/protocol.h.
enum Cause : u32 { kPeerLost = 1, kRowsDiffer = 2, kAborted = 3 };

// State of a ring on its own GPU, a line of 128 bytes each. RingControl of src/mailbox/protocol.h.
struct Control {
  alignas(128) u64 epoch;
  alignas(128) u32 arrived;  // CTAs of the call under way
  alignas(128) u32 used[3];  // vectors of a segment that the last call at each place had
};

// Pinned host memory. MailboxReport of src/mailbox/protocol.h.
struct Report {
  u32 done;  // 1: all below is written
  u32 cause;
  i32 op, rank, peer, cta, stage, pad;
  u64 epoch;
  i64 rows_here, rows_there;        // -1: not known
  i64 vectors_here, vectors_there;  // of a segment
  u64 elapsed_ns;
  alignas(128) u32 abort_request;  // written by the host
};

// One operation's ring as this rank sees it. MailboxRing of src/mailbox/protocol.h.
struct Ring {
  u8* regions[kMostRanks];  // of all ranks: headers [stages][sources] of 16 bytes, segments [stages][sources]
  Control* control;
  u32* poisoned;
  Report* report;
  i64 segment_bytes;
  u64 limit_ns;
  i32 rank, op;
};

// What the protocol is made of. Tests change one thing at a time and must then fail.
struct Protocol {
  static constexpr int kThreads = 512;
  static constexpr int kStages = 3;
  static constexpr int kCleared = 2;  // places ahead of that of the call; 0: none
  static constexpr bool kStrictFence = false;
  // Dependents are let in at entry, not at the end. They hold their place on the GPU while this call waits for a peer,
  // so no rank may share it.
  static constexpr bool kLaunchesEarly = false;
  __device__ static bool is_empty(u32 word) { return word == 0xffffffffu; }  // an integer: floats flush and compare NaN
  __device__ static u64 epoch_of(const Ring& ring) { return ring.control->epoch; }
};

struct Shared {
  u64 epoch;
  u32 cleared_vectors;
  u32 poisoned;
  float parts[32];  // of the warps
};

// The call as a CTA sees it.
struct Round {
  u64 epoch;
  int stage;
  u32 vectors;          // of this rank's segment
  u32 cleared_vectors;  // of the place that is emptied
  i64 rows;
};

// ---- Regions

template <class Rules>
__device__ inline uint4* header(u8* region, int stage, int source) {
  return reinterpret_cast<uint4*>(region) + stage * Rules::kRanks + source;
}
template <class Rules>
__device__ inline uint4* segment(const Ring& ring, int rank, int stage, int source) {
  const i64 place = stage * Rules::kRanks + source;
  return reinterpret_cast<uint4*>(ring.regions[rank] + 16 * Rules::kStages * Rules::kRanks +
                                  place * ring.segment_bytes);
}

// Of a header {epoch, rows, vectors, check}. Not their xor: halves of two headers may have the same xor, as epochs and
// rows are small numbers, and would be taken for rows that differ.
__device__ inline u32 header_check(u32 epoch, u32 rows, u32 vectors) {
  return epoch * 0x9e3779b1u + rows * 0x85ebca77u + vectors * 0xc2b2ae3du + 0x5bd1e995u;
}

// The threads that send a header, and that see to it that every peer makes this very call: each for the peer of its
// number.
template <class Rules>
__device__ inline bool asks_header(const Ring& ring) {
  return blockIdx.x == 0 && threadIdx.x < Rules::kRanks && int(threadIdx.x) != ring.rank;
}

// ---- Payload

__device__ inline u32 filled(u32 word, u32 instead) { return word == 0xffffffffu ? instead : word; }
__device__ inline uint4 filled(uint4 v, u32 instead) {
  return make_uint4(filled(v.x, instead), filled(v.y, instead), filled(v.z, instead), filled(v.w, instead));
}
constexpr u32 kNanPair = 0x7fff7fffu;  // two BF16 NaN in place of two with every bit set
constexpr u32 kNanWord = 0x7fffffffu;

template <class Rules>
__device__ inline bool arrived(uint4 v) {
  return !(Rules::is_empty(v.x) | Rules::is_empty(v.y) | Rules::is_empty(v.z) | Rules::is_empty(v.w));
}

// ---- Entry

// What a call reads of its ring. Asked for before all else; the rest of a thread's work goes on until it is there.
template <class Rules>
struct Entry {
  u64 epoch = 0;
  u32 used[Rules::kStages] = {};  // of all places, so that none waits for the epoch
  u32 poisoned = 0;
};

// After pdl_wait().
template <class Rules>
__device__ inline Entry<Rules> ask(const Ring& ring) {
  if (Rules::kLaunchesEarly) pdl_launch();
  Entry<Rules> entry;
  if (threadIdx.x != 0) return entry;
  if (Rules::kStrictFence) fence_sys();
  entry.epoch = Rules::epoch_of(ring);
#pragma unroll
  for (int stage = 0; stage < Rules::kStages; ++stage) entry.used[stage] = ring.control->used[stage];
  entry.poisoned = load_relaxed_gpu(ring.poisoned);
  return entry;
}

// Step 1 but for the count, and the header of 2. False: poisoned, nothing may be touched.
template <class Rules>
__device__ inline bool enter(const Ring& ring, const Entry<Rules>& entry, i64 rows, u32 vectors, Shared& shared,
                             Round& round) {
  if (threadIdx.x == 0) {
    const int cleared = int((entry.epoch + Rules::kCleared) % Rules::kStages);
    u32 cleared_vectors = entry.used[0];
#pragma unroll
    for (int stage = 1; stage < Rules::kStages; ++stage)
      if (stage == cleared) cleared_vectors = entry.used[stage];
    shared.epoch = entry.epoch;
    shared.cleared_vectors = cleared_vectors;
    shared.poisoned = entry.poisoned;
  }
  __syncthreads();  // shared is written
  round = {shared.epoch, int(shared.epoch % Rules::kStages), vectors, shared.cleared_vectors, rows};
  if (shared.poisoned) return false;
  const int peer = threadIdx.x;
  if (asks_header<Rules>(ring)) {
    const u32 epoch = u32(round.epoch), sent = u32(rows);
    store_relaxed_sys(header<Rules>(ring.regions[peer], round.stage, ring.rank),
                      make_uint4(epoch, sent, vectors, header_check(epoch, sent, vectors)));
  }
  return true;
}

// The count of step 1, once after enter(), when the pushes are under way. The CTA has its epoch in hand, so the last
// one may change it. Relaxed: a release would wait until the peers have taken the pushes, and there is nothing to
// publish.
template <class Rules>
__device__ inline void count_in(const Ring& ring, const Round& round) {
  if (threadIdx.x != Rules::kThreads - 1) return;
  Control& control = *ring.control;
  if (atomic_add_relaxed_gpu(&control.arrived, 1) != gridDim.x - 1) return;
  control.arrived = 0;
  control.used[round.epoch % Rules::kStages] = round.vectors;
  control.epoch = round.epoch + 1;
}

template <class Rules>
__device__ inline void push(const Ring& ring, const Round& round, u32 vector, uint4 v) {
#pragma unroll
  for (int i = 1; i < Rules::kRanks; ++i) {  // each rank begins with another peer
    const int peer = (ring.rank + i) % Rules::kRanks;
    store_relaxed_sys(segment<Rules>(ring, peer, round.stage, ring.rank) + vector, v);
  }
}

// Step 3, of the vectors from `first` on, `most` of a thread. Nobody reads this before the end of the kernel has made
// it visible.
template <class Rules>
__device__ inline void rearm(const Ring& ring, const Round& round, u32 first, u32 most = ~0u) {
  if (Rules::kCleared == 0) return;
  const uint4 empty = make_uint4(0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu);
  const int stage = int((round.epoch + Rules::kCleared) % Rules::kStages);
  const u32 step = gridDim.x * Rules::kThreads;
  for (u32 v = first; v < round.cleared_vectors && most > 0; v += step, --most) {
#pragma unroll
    for (int i = 1; i < Rules::kRanks; ++i)
      store_relaxed_sys(segment<Rules>(ring, ring.rank, stage, (ring.rank + i) % Rules::kRanks) + v, empty);
  }
}

// ---- Waiting

// The first to find something wrong says so; everybody else leaves when he sees the word.
__device__ inline void report(const Ring& ring, const Round& round, Cause cause, int peer, i64 rows_there,
                              i64 vectors_there, u64 elapsed_ns) {
  if (atomic_cas_relaxed_gpu(ring.poisoned, 0, 1) != 0) return;
  Report& r = *ring.report;
  r.cause = cause;
  r.op = ring.op;
  r.rank = ring.rank;
  r.peer = peer;
  r.cta = i32(blockIdx.x);
  r.stage = round.stage;
  r.epoch = round.epoch;
  r.rows_here = round.rows;
  r.rows_there = rows_there;
  r.vectors_here = round.vectors;
  r.vectors_there = vectors_there;
  r.elapsed_ns = elapsed_ns;
  store_release_sys(&r.done, 1);
}

// A header that came by halves, or is of another call, has not come.
__device__ inline bool is_header_of(const Round& round, uint4 h) {
  return h.x == u32(round.epoch) && h.w == header_check(h.x, h.y, h.z);
}
template <class Rules>
__device__ inline bool header_of(const Ring& ring, const Round& round, int peer, uint4& h) {
  h = load_relaxed_sys(header<Rules>(ring.regions[ring.rank], round.stage, peer));
  return is_header_of(round, h);
}
// False, and reported, where the peer makes another call than this one.
template <class Rules>
__device__ inline bool same_call(const Ring& ring, const Round& round, int peer, uint4 h) {
  if (h.y == u32(round.rows) && h.z == round.vectors) return true;
  report(ring, round, kRowsDiffer, peer, h.y, h.z, 0);
  return false;
}

// One thread's failed polls.
struct Patience {
  u32 failures = 0;
  uint4 header = make_uint4(0, 0, 0, 0);  // as last seen, where asks_header(); this is no call's
  u64 since = 0;

  // After a failed poll of what `peer` sends: whether to try again.
  template <class Rules>
  __device__ bool again(const Ring& ring, const Round& round, int peer) {
    ++failures;
    if (failures > kSleepAfter) sleep_ns(kSleepNs);
    if (failures % kAskPoisonEvery == 0 && load_relaxed_gpu(ring.poisoned) != 0) return false;
    if (failures % kAskClockEvery != 0) return true;
    uint4 h;
    if (header_of<Rules>(ring, round, peer, h) && !same_call<Rules>(ring, round, peer, h)) return false;
    const u64 now = global_timer();
    if (since == 0) since = now;
    if (load_relaxed_sys(&ring.report->abort_request) != 0) {
      report(ring, round, kAborted, peer, -1, -1, now - since);
      return false;
    }
    if (now - since < ring.limit_ns) return true;
    report(ring, round, kPeerLost, peer, -1, -1, now - since);
    return false;
  }
};

// The first `count` of x, loaded before from `from` on, `step` vectors apart, until all are whole. What is missing is
// asked for again together, so that a batch waits once. False: given up.
template <class Rules, int kMost>
__device__ inline bool wait_for(const Ring& ring, const Round& round, Patience& patience, int peer, const uint4* from,
                                u32 step, int count, uint4 (&x)[kMost]) {
  while (true) {
    if (asks_header<Rules>(ring))  // in one flight with the vectors, for leave()
      patience.header = load_relaxed_sys(header<Rules>(ring.regions[ring.rank], round.stage, int(threadIdx.x)));
    bool whole = true;
#pragma unroll
    for (int i = 0; i < kMost; ++i) whole = whole && (i >= count || arrived<Rules>(x[i]));
    if (whole) return true;
    if (!patience.again<Rules>(ring, round, peer)) return false;
#pragma unroll
    for (int i = 0; i < kMost; ++i)
      if (i < count && !arrived<Rules>(x[i])) x[i] = load_relaxed_sys(from + i * step);
  }
}

// After the last poll: every peer has made this very call. A call without data is nothing else. `waiting`: not given
// up.
template <class Rules>
__device__ inline void leave(const Ring& ring, const Round& round, Patience& patience, bool waiting) {
  if (waiting && asks_header<Rules>(ring)) {
    const int peer = threadIdx.x;
    uint4 h = patience.header;
    bool come = is_header_of(round, h);
    while (!come && waiting && !(come = header_of<Rules>(ring, round, peer, h)))
      waiting = patience.again<Rules>(ring, round, peer);
    if (come) same_call<Rules>(ring, round, peer, h);
  }
  __syncthreads();  // the first thread to say so speaks for the CTA, and others may still poll
  if (!Rules::kLaunchesEarly) pdl_launch();
}

// ---- All-gathers

// A vector of a segment, and where it is in rows of `Walk::row_vectors`.
struct Place {
  u32 vector, row, column;
};
// A thread's way through a segment. The next place is found without a division.
struct Walk {
  u32 step, rows, columns, row_vectors;
  Place first;

  template <class Rules>
  __device__ static Walk over(u32 row_vectors) {
    const u32 first = blockIdx.x * Rules::kThreads + threadIdx.x, step = gridDim.x * Rules::kThreads;
    const u32 width = row_vectors > 0 ? row_vectors : 1;
    return {step, step / width, step % width, width, {first, first / width, first % width}};
  }
  __device__ void advance(Place& at) const {
    at.vector += step;
    at.row += rows;
    at.column += columns;
    if (at.column >= row_vectors) {
      at.column -= row_vectors;
      ++at.row;
    }
  }
  __device__ int left(const Place& at, u32 vectors) const {  // of a batch
    int count = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) count += at.vector + i * step < vectors;
    return count;
  }
};

// load(place) of this rank's segment; store(source, place, v) to where it belongs.
template <class Rules, class Load, class Store>
__device__ inline void exchange(const Ring& ring, i64 rows, u32 vectors, u32 row_vectors, u32 instead, Shared& shared,
                                Load load, Store store) {
  const Walk walk = Walk::over<Rules>(row_vectors);
  uint4 own[kBatch];
  const auto load_batch = [&](Place at) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i, walk.advance(at))
      if (at.vector < vectors) own[i] = load(at);
  };
  pdl_wait();
  const Entry<Rules> entry = ask<Rules>(ring);
  load_batch(walk.first);  // under way while the epoch is read
  Round round;
  const bool entered = enter<Rules>(ring, entry, rows, vectors, shared, round);
  if (!entered) return count_in<Rules>(ring, round);

  Patience patience;
  bool waiting = true;
  // Polls the batch at `at`. Step 3 for the batch at `cleared` fills the time in which the first answers come.
  const auto poll_batch = [&](const Place& at, u32 cleared, u32 most) {
    const int count = walk.left(at, vectors);
#pragma unroll
    for (int s = 1; s < Rules::kRanks; ++s) {
      const int source = (ring.rank + Rules::kRanks - s) % Rules::kRanks;  // in the order in which they push to us
      const uint4* from = segment<Rules>(ring, ring.rank, round.stage, source) + at.vector;
      uint4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (i < count) x[i] = load_relaxed_sys(from + i * walk.step);
      if (s == 1) rearm<Rules>(ring, round, cleared, most);
      waiting = waiting && wait_for<Rules>(ring, round, patience, source, from, walk.step, count, x);
      Place to = at;
#pragma unroll
      for (int i = 0; i < kBatch; ++i, walk.advance(to))
        if (i < count && waiting) store(source, to, x[i]);
    }
  };

  Place at = walk.first, before = walk.first;
  bool counted = false;
  while (at.vector < vectors) {  // given up or not: a peer that comes late ends its call, too
    Place next = at;
#pragma unroll
    for (int i = 0; i < kBatch; ++i, walk.advance(next))
      if (next.vector < vectors) {
        const uint4 v = filled(own[i], instead);
        push<Rules>(ring, round, next.vector, v);
        store(ring.rank, next, v);
      }
    load_batch(next);
    if (counted) poll_batch(before, before.vector, kBatch);
    else count_in<Rules>(ring, round);
    counted = true;
    before = at;
    at = next;
  }
  if (!counted) count_in<Rules>(ring, round);
  poll_batch(before, before.vector, ~0u);
  leave<Rules>(ring, round, patience, waiting);
}

// out[m, r * cols + c] = in_r[m, c]
//   in   [rows, cols] BF16          rows in_stride elements apart; may be this rank's columns of out
//   out  [rows, kRanks * cols] BF16 rows out_stride elements apart
// cols and strides are multiples of 8, addresses of 16 bytes; rows * cols / 8 is below 2^31.
template <class Rules>
__device__ inline void all_gather(const Ring& ring, const u16* in, i64 in_stride, u16* out, i64 out_stride, u32 rows,
                                  u32 cols, Shared& shared) {
  const u32 row_vectors = cols / 8;
  exchange<Rules>(
      ring, rows, rows * row_vectors, row_vectors, kNanPair, shared,
      [&](const Place& at) { return *reinterpret_cast<const uint4*>(in + at.row * in_stride + at.column * 8); },
      [&](int source, const Place& at, uint4 x) {
        *reinterpret_cast<uint4*>(out + at.row * out_stride + i64(source) * cols + at.column * 8) = x;
      });
}

// out[r, i] = in_r[i]
//   in   [words] 32 bits           16-byte aligned
//   out  [kRanks, words] 32 bits   dense
template <class Rules>
__device__ inline void all_gather_words(const Ring& ring, const u32* in, u32* out, u32 words, Shared& shared) {
  const u32 vectors = (words + 3) / 4;
  exchange<Rules>(
      ring, 1, vectors, vectors, kNanWord, shared,
      [&](const Place& at) {
        const u32 i = 4 * at.vector;
        if (i + 4 <= words) return *reinterpret_cast<const uint4*>(in + i);
        return make_uint4(in[i], i + 1 < words ? in[i + 1] : 0, i + 2 < words ? in[i + 2] : 0, 0);
      },
      [&](int source, const Place& at, uint4 x) {
        u32* to = out + i64(source) * words + 4 * at.vector;
        const u32 left = words - 4 * at.vector;
        to[0] = x.x;
        if (left > 1) to[1] = x.y;
        if (left > 2) to[2] = x.z;
        if (left > 3) to[3] = x.w;
      });
}

// ---- All-reduce with residual and norm

// a = bf16( in_0 + in_1 + ... ) in FP32;  s = bf16( a + residual );  residual_out = s
// norm_out = bf16( s * rsqrt(mean(s^2) + eps) * gamma )
//   in, residual, residual_out, norm_out  [rows, hidden] BF16, rows *_stride elements apart; residual null: zero.
//                                         residual_out may be residual, norm_out may be in
//   gamma                                 [hidden] BF16, or FP32 where gamma_f32; null: no norm, norm_out unused
// A CTA has whole rows, so that every rank sums a row in the same order. hidden is a multiple of 8.
struct AddNorm {
  const u16* in;
  const u16* residual;
  u16* residual_out;
  const void* gamma;
  u16* norm_out;
  i64 in_stride, residual_stride, residual_out_stride, norm_out_stride;
  u32 rows, hidden;
  float eps;
  u32 gamma_f32;  // 1: gamma is FP32
};

__device__ inline float gamma_at(const AddNorm& a, u32 i) {
  if (a.gamma_f32) return static_cast<const float*>(a.gamma)[i];
  return __uint_as_float(u32(static_cast<const u16*>(a.gamma)[i]) << 16);
}

// What a thread needs of its row besides what arrives, loaded before it waits.
struct OwnRow {
  uint4 in[kMostPieces], residual[kMostPieces];
};

template <class Rules>
__device__ inline void all_reduce_add_norm(const Ring& ring, const AddNorm& a, Shared& shared) {
  const u32 row_vectors = a.hidden / 8;
  const auto vector_of = [](const u16* base, i64 stride, u32 row, u32 piece) {
    return *reinterpret_cast<const uint4*>(base + row * stride + piece * 8);
  };
  const auto residual_of = [&](u32 row, u32 piece) {
    return a.residual ? vector_of(a.residual, a.residual_stride, row, piece) : make_uint4(0, 0, 0, 0);
  };
  constexpr bool kEarly =
      Rules::kRanks <= 4;  // the vectors of more ranks leave no registers for what is not needed yet
  const auto own_row = [&](OwnRow& own, u32 row) {
#pragma unroll
    for (int p = 0; p < kMostPieces; ++p) {
      const u32 piece = p * Rules::kThreads + threadIdx.x;
      if (piece >= row_vectors || row >= a.rows) continue;
      own.in[p] = vector_of(a.in, a.in_stride, row, piece);
      if (kEarly) own.residual[p] = residual_of(row, piece);
    }
  };
  pdl_wait();
  const Entry<Rules> entry = ask<Rules>(ring);
  OwnRow own;
  own_row(own, blockIdx.x);  // under way while the epoch is read
  Round round;
  const bool entered = enter<Rules>(ring, entry, a.rows, a.rows * row_vectors, shared, round);
  if (!entered) return count_in<Rules>(ring, round);
#pragma unroll
  for (int p = 0; p < kMostPieces; ++p) {
    const u32 piece = p * Rules::kThreads + threadIdx.x;
    if (piece < row_vectors && blockIdx.x < a.rows)
      push<Rules>(ring, round, blockIdx.x * row_vectors + piece, filled(own.in[p], kNanPair));
  }
  for (u32 row = blockIdx.x + gridDim.x; row < a.rows; row += gridDim.x)
    for (u32 piece = threadIdx.x; piece < row_vectors; piece += Rules::kThreads)
      push<Rules>(ring, round, row * row_vectors + piece, filled(vector_of(a.in, a.in_stride, row, piece), kNanPair));
  count_in<Rules>(ring, round);
  // BF16 in vectors is what models have; the rest is loaded where it is used.
  const bool gamma_early = kEarly && a.gamma != nullptr && a.gamma_f32 == 0 && reinterpret_cast<u64>(a.gamma) % 16 == 0;
  uint4 gamma[kMostPieces];
#pragma unroll
  for (int p = 0; p < kMostPieces; ++p) {
    const u32 piece = p * Rules::kThreads + threadIdx.x;
    if (piece < row_vectors && gamma_early) gamma[p] = static_cast<const uint4*>(a.gamma)[piece];
  }
  rearm<Rules>(ring, round, blockIdx.x * Rules::kThreads + threadIdx.x);

  constexpr int kTogether = Rules::kRanks <= 4 ? 2 : 1;  // pieces polled at once: a row of 7168 has two per thread
  const int pieces = int((row_vectors + Rules::kThreads - 1 - threadIdx.x) / Rules::kThreads);
  const auto arrives_at = [&](int source, u32 row, int piece) -> const uint4* {
    return segment<Rules>(ring, ring.rank, round.stage, source) + row * row_vectors + piece * Rules::kThreads +
           threadIdx.x;
  };
  Patience patience;
  bool waiting = true;  // false: given up; the barriers below are passed all the same
  for (u32 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    if (row != blockIdx.x) own_row(own, row);
    uint4 kept[kMostPieces];  // s
    float squares = 0;
#pragma unroll
    for (int first = 0; first < kMostPieces; first += kTogether) {
      if (first >= pieces) continue;
      uint4 x[Rules::kRanks][kTogether];
#pragma unroll
      for (int r = 0; r < Rules::kRanks; ++r)
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          if (first + i < pieces)
            x[r][i] = r == ring.rank ? filled(own.in[first + i], kNanPair)
                                     : load_relaxed_sys(arrives_at(r, row, first) + i * Rules::kThreads);
#pragma unroll
      for (int r = 0; r < Rules::kRanks; ++r)
        if (r != ring.rank)
          waiting = waiting && wait_for<Rules>(ring, round, patience, r, arrives_at(r, row, first),
                                               u32(Rules::kThreads), pieces - first, x[r]);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int p = first + i;
        if (p >= pieces || !waiting) continue;
        const uint4 residual = kEarly ? own.residual[p] : residual_of(row, p * Rules::kThreads + threadIdx.x);
        const auto sum = [&](u32 uint4::*word, u32 before) {
          float l = low_bf16(x[0][i].*word), h = high_bf16(x[0][i].*word);
#pragma unroll
          for (int r = 1; r < Rules::kRanks; ++r) {
            l += low_bf16(x[r][i].*word);
            h += high_bf16(x[r][i].*word);
          }
          const u32 s = pack_bf16(round_bf16(l) + low_bf16(before), round_bf16(h) + high_bf16(before));
          squares += low_bf16(s) * low_bf16(s);
          squares += high_bf16(s) * high_bf16(s);
          return s;
        };
        kept[p] = make_uint4(sum(&uint4::x, residual.x), sum(&uint4::y, residual.y), sum(&uint4::z, residual.z),
                             sum(&uint4::w, residual.w));
        const u32 piece = p * Rules::kThreads + threadIdx.x;
        *reinterpret_cast<uint4*>(a.residual_out + row * a.residual_out_stride + piece * 8) = kept[p];
      }
    }
    if (a.gamma == nullptr) continue;
    const float scale = 1.0f / sqrtf(cta_sum<Rules::kThreads>(squares, shared.parts) / float(a.hidden) + a.eps);
#pragma unroll
    for (int p = 0; p < kMostPieces; ++p) {
      const u32 piece = p * Rules::kThreads + threadIdx.x;
      if (piece >= row_vectors || !waiting) continue;
      const u32 i = piece * 8;
      const auto norm = [&](u32 s, u32 two, u32 at) {
        const float low = gamma_early ? low_bf16(two) : gamma_at(a, at);
        const float high = gamma_early ? high_bf16(two) : gamma_at(a, at + 1);
        return pack_bf16(low_bf16(s) * scale * low, high_bf16(s) * scale * high);
      };
      *reinterpret_cast<uint4*>(a.norm_out + row * a.norm_out_stride + i) =
          make_uint4(norm(kept[p].x, gamma[p].x, i), norm(kept[p].y, gamma[p].y, i + 2),
                     norm(kept[p].z, gamma[p].z, i + 4), norm(kept[p].w, gamma[p].w, i + 6));
    }
  }
  leave<Rules>(ring, round, patience, waiting);
}

}  // namespace twostep::gather
