// Collectives over memory that peers write: push, re-arm, poll. One kernel per operation; out and formulas stand there.
//
// A ring is a region of every GPU: kStages places, each with a segment per source rank. Call n of a ring uses place
// n mod 3. A word that is all ones has not arrived: payload never holds it, so arrival needs no flag, no fence, and no
// second byte on the wire. In call n a rank
//   1 waits for the kernel before, reads n, and counts itself in; the last CTA in makes it n + 1
//   2 tells every peer its rows (header) and pushes its vectors into place n of every peer
//   3 empties the place that call n + 2 will fill: that of call n - 1
//   4 polls its own place n, vector by vector, and stores what arrives to where it belongs
// Why 3 is safe: a peer fills that place in its call n + 2, which it enters after all of our call n + 1 has reached it,
// and that was sent after our call n had ended. Clearing the place of call n + 1 is not: a peer may be there already.
// All pushes of a CTA come before its first poll, and the grid is resident as a whole: nobody waits for who cannot
// come.
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

// Steps 1 and the header of 2. False: poisoned, nothing may be touched.
template <class Rules>
__device__ inline bool enter(const Ring& ring, i64 rows, u32 vectors, Shared& shared, Round& round) {
  pdl_wait();
  if (threadIdx.x == 0) {
    if (Rules::kStrictFence) fence_sys();
    Control& control = *ring.control;
    shared.epoch = Rules::epoch_of(ring);
    shared.cleared_vectors = control.used[(shared.epoch + Rules::kCleared) % Rules::kStages];
    shared.poisoned = load_relaxed_gpu(ring.poisoned);
    // Every CTA has read the epoch before it counts itself in, so the last one may change it.
    if (atomic_add_acq_rel_gpu(&control.arrived, 1) == gridDim.x - 1) {
      control.arrived = 0;
      control.used[shared.epoch % Rules::kStages] = vectors;
      control.epoch = shared.epoch + 1;
    }
  }
  __syncthreads();  // shared is written
  round = {shared.epoch, int(shared.epoch % Rules::kStages), vectors, shared.cleared_vectors, rows};
  if (shared.poisoned) return false;
  const int peer = threadIdx.x;
  if (blockIdx.x == 0 && peer < Rules::kRanks && peer != ring.rank) {
    const u32 epoch = u32(round.epoch), sent = u32(rows);
    store_relaxed_sys(header<Rules>(ring.regions[peer], round.stage, ring.rank),
                      make_uint4(epoch, sent, vectors, header_check(epoch, sent, vectors)));
  }
  return true;
}

template <class Rules>
__device__ inline void push(const Ring& ring, const Round& round, u32 vector, uint4 v) {
#pragma unroll
  for (int i = 1; i < Rules::kRanks; ++i) {  // each rank begins with another peer
    const int peer = (ring.rank + i) % Rules::kRanks;
    store_relaxed_sys(segment<Rules>(ring, peer, round.stage, ring.rank) + vector, v);
  }
}

// Step 3. Nobody reads this before the end of the kernel has made it visible.
template <class Rules>
__device__ inline void rearm(const Ring& ring, const Round& round) {
  if (Rules::kCleared == 0) return;
  const uint4 empty = make_uint4(0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu);
  const int stage = int((round.epoch + Rules::kCleared) % Rules::kStages);
  for (int i = 1; i < Rules::kRanks; ++i) {
    uint4* to = segment<Rules>(ring, ring.rank, stage, (ring.rank + i) % Rules::kRanks);
    for (u32 v = blockIdx.x * Rules::kThreads + threadIdx.x; v < round.cleared_vectors;
         v += gridDim.x * Rules::kThreads)
      store_relaxed_sys(to + v, empty);
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

// Whether the peer's header of this call has come. A header that came by halves, or is of another call, has not.
template <class Rules>
__device__ inline bool header_of(const Ring& ring, const Round& round, int peer, uint4& h) {
  h = load_relaxed_sys(header<Rules>(ring.regions[ring.rank], round.stage, peer));
  return h.x == u32(round.epoch) && h.w == header_check(h.x, h.y, h.z);
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

// v, loaded before, until it is whole. False: given up.
template <class Rules>
__device__ inline bool wait_for(const Ring& ring, const Round& round, Patience& patience, int peer, const uint4* from,
                                uint4& v) {
  while (!arrived<Rules>(v)) {
    if (!patience.again<Rules>(ring, round, peer)) return false;
    v = load_relaxed_sys(from);
  }
  return true;
}

// After the last poll: every peer has made this very call. A call without data is nothing else. `waiting`: not given
// up.
template <class Rules>
__device__ inline void leave(const Ring& ring, const Round& round, Patience& patience, bool waiting) {
  const int peer = threadIdx.x;
  if (waiting && blockIdx.x == 0 && peer < Rules::kRanks && peer != ring.rank) {
    uint4 h;
    while (waiting && !header_of<Rules>(ring, round, peer, h)) waiting = patience.again<Rules>(ring, round, peer);
    if (waiting) same_call<Rules>(ring, round, peer, h);
  }
  __syncthreads();  // the first thread to say so speaks for the CTA, and others may still poll
  pdl_launch();
}

// ---- All-gathers

// load(vector) of this rank's segment; store(source, vector, v) to where it belongs.
template <class Rules, class Load, class Store>
__device__ inline void exchange(const Ring& ring, const Round& round, u32 instead, Load load, Store store) {
  const u32 first = blockIdx.x * Rules::kThreads + threadIdx.x, step = gridDim.x * Rules::kThreads;
  for (u32 v = first; v < round.vectors; v += kBatch * step) {
    uint4 x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (v + i * step < round.vectors) x[i] = filled(load(v + i * step), instead);
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (v + i * step < round.vectors) {
        push<Rules>(ring, round, v + i * step, x[i]);
        store(ring.rank, v + i * step, x[i]);
      }
  }
  rearm<Rules>(ring, round);
  Patience patience;
  bool waiting = true;
  for (int s = 1; s < Rules::kRanks && waiting; ++s) {
    const int source = (ring.rank + Rules::kRanks - s) % Rules::kRanks;  // in the order in which they push to us
    const uint4* from = segment<Rules>(ring, ring.rank, round.stage, source);
    for (u32 v = first; v < round.vectors && waiting; v += kBatch * step) {
      uint4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (v + i * step < round.vectors) x[i] = load_relaxed_sys(from + v + i * step);
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (v + i * step < round.vectors) {
          waiting = waiting && wait_for<Rules>(ring, round, patience, source, from + v + i * step, x[i]);
          if (waiting) store(source, v + i * step, x[i]);
        }
    }
  }
  leave<Rules>(ring, round, patience, waiting);
}

// out[m, r * cols + c] = in_r[m, c]
//   in   [rows, cols] BF16          rows in_stride elements apart; may be this rank's columns of out
//   out  [rows, kRanks * cols] BF16 rows out_stride elements apart
// cols and strides are multiples of 8, addresses of 16 bytes; rows * cols / 8 is below 2^31.
template <class Rules>
__device__ inline void all_gather(const Ring& ring, const u16* in, i64 in_stride, u16* out, i64 out_stride, u32 rows,
                                  u32 cols, Shared& shared) {
  Round round;
  const u32 row_vectors = cols / 8;
  if (!enter<Rules>(ring, rows, rows * row_vectors, shared, round)) return;
  exchange<Rules>(
      ring, round, kNanPair,
      [&](u32 v) { return *reinterpret_cast<const uint4*>(in + v / row_vectors * in_stride + v % row_vectors * 8); },
      [&](int source, u32 v, uint4 x) {
        const i64 column = i64(source) * cols + v % row_vectors * 8;
        *reinterpret_cast<uint4*>(out + v / row_vectors * out_stride + column) = x;
      });
}

// out[r, i] = in_r[i]
//   in   [words] 32 bits           16-byte aligned
//   out  [kRanks, words] 32 bits   dense
template <class Rules>
__device__ inline void all_gather_words(const Ring& ring, const u32* in, u32* out, u32 words, Shared& shared) {
  Round round;
  if (!enter<Rules>(ring, 1, (words + 3) / 4, shared, round)) return;
  exchange<Rules>(
      ring, round, kNanWord,
      [&](u32 v) {
        const u32 i = 4 * v;
        if (i + 4 <= words) return *reinterpret_cast<const uint4*>(in + i);
        return make_uint4(in[i], i + 1 < words ? in[i + 1] : 0, i + 2 < words ? in[i + 2] : 0, 0);
      },
      [&](int source, u32 v, uint4 x) {
        u32* to = out + i64(source) * words + 4 * v;
        const u32 left = words - 4 * v;
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

template <class Rules>
__device__ inline void all_reduce_add_norm(const Ring& ring, const AddNorm& a, Shared& shared) {
  Round round;
  const u32 row_vectors = a.hidden / 8;
  if (!enter<Rules>(ring, a.rows, a.rows * row_vectors, shared, round)) return;
  const auto vector_of = [](const u16* base, i64 stride, u32 row, u32 piece) {
    return *reinterpret_cast<const uint4*>(base + row * stride + piece * 8);
  };
  for (u32 row = blockIdx.x; row < a.rows; row += gridDim.x)
    for (u32 piece = threadIdx.x; piece < row_vectors; piece += Rules::kThreads)
      push<Rules>(ring, round, row * row_vectors + piece, filled(vector_of(a.in, a.in_stride, row, piece), kNanPair));
  rearm<Rules>(ring, round);

  Patience patience;
  bool waiting = true;  // false: given up; the barriers below are passed all the same
  for (u32 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    uint4 kept[kMostPieces];  // s
    float squares = 0;
#pragma unroll
    for (int p = 0; p < kMostPieces; ++p) {
      const u32 piece = p * Rules::kThreads + threadIdx.x;
      if (piece >= row_vectors || !waiting) continue;
      const u32 vector = row * row_vectors + piece;
      uint4 x[Rules::kRanks];
#pragma unroll
      for (int r = 0; r < Rules::kRanks; ++r)
        x[r] = r == ring.rank ? filled(vector_of(a.in, a.in_stride, row, piece), kNanPair)
                              : load_relaxed_sys(segment<Rules>(ring, ring.rank, round.stage, r) + vector);
      const uint4 residual = a.residual ? vector_of(a.residual, a.residual_stride, row, piece) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int r = 0; r < Rules::kRanks; ++r)
        if (r != ring.rank)
          waiting = waiting && wait_for<Rules>(ring, round, patience, r,
                                               segment<Rules>(ring, ring.rank, round.stage, r) + vector, x[r]);
      const auto sum = [&](u32 uint4::*word, u32 before) {
        float l = low_bf16(x[0].*word), h = high_bf16(x[0].*word);
#pragma unroll
        for (int r = 1; r < Rules::kRanks; ++r) {
          l += low_bf16(x[r].*word);
          h += high_bf16(x[r].*word);
        }
        const u32 s = pack_bf16(round_bf16(l) + low_bf16(before), round_bf16(h) + high_bf16(before));
        squares += low_bf16(s) * low_bf16(s);
        squares += high_bf16(s) * high_bf16(s);
        return s;
      };
      kept[p] = make_uint4(sum(&uint4::x, residual.x), sum(&uint4::y, residual.y), sum(&uint4::z, residual.z),
                           sum(&uint4::w, residual.w));
      if (waiting) *reinterpret_cast<uint4*>(a.residual_out + row * a.residual_out_stride + piece * 8) = kept[p];
    }
    if (a.gamma == nullptr) continue;
    const float scale = 1.0f / sqrtf(cta_sum<Rules::kThreads>(squares, shared.parts) / float(a.hidden) + a.eps);
#pragma unroll
    for (int p = 0; p < kMostPieces; ++p) {
      const u32 piece = p * Rules::kThreads + threadIdx.x;
      if (piece >= row_vectors || !waiting) continue;
      const u32 i = piece * 8;
      const auto norm = [&](u32 s, u32 at) {
        return pack_bf16(low_bf16(s) * scale * gamma_at(a, at), high_bf16(s) * scale * gamma_at(a, at + 1));
      };
      *reinterpret_cast<uint4*>(a.norm_out + row * a.norm_out_stride + i) =
          make_uint4(norm(kept[p].x, i), norm(kept[p].y, i + 2), norm(kept[p].z, i + 4), norm(kept[p].w, i + 6));
    }
  }
  leave<Rules>(ring, round, patience, waiting);
}

}  // namespace twostep::gather
