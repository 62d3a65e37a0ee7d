// Which keys of a request's context a CTA of the attention reads, and what the rows of the block see of them.
//
// Visible: keys before `end` on good pages; with kCausal, up to the row's own position; with a window, the last
// `window` of them. A key has weight 0 where it is not visible, and 0 * NaN is NaN. So a key that no row sees arrives
// as zeros, and what is not finite of one that some rows see alone (behind their own position, or as the window moves
// on) becomes zero: it then scores NaN for those who see it, and nothing for the others.
#pragma once

#include "draft/row.cuh"

namespace twostep::draft {

constexpr int kKeys = 64;               // of a tile
constexpr float kLog2E = 1.442695041f;  // scores times this: their exponentials are powers of two

// What a part of the context leaves of a query row besides its sum of values: what its exponentials were taken from,
// their sum, and what the sum of values is a multiple of, in each slab of its columns. An empty part leaves (-inf, 0).
constexpr int kSlabs = 8;
constexpr float kLeastSlab = 1e-30f, kLargestSlab = 0x1p126f;  // a slab of less is 0, of more NaN: it has no reciprocal
struct PartStats {
  float base, total;
  float scale[kSlabs];
};

// Of a key: no row sees it; seen; seen, and not finite.
constexpr int kUnseen = 0, kSeen = 1, kSpoilt = 2;

__device__ inline bool are_finite(u32 two) { return (two & 0x7f80u) != 0x7f80u && (two & 0x7f800000u) != 0x7f800000u; }
__device__ inline bool are_finite(uint4 eight) {
  return are_finite(eight.x) && are_finite(eight.y) && are_finite(eight.z) && are_finite(eight.w);
}

// What is not finite of those keys of an edge tile that some rows see alone becomes zero, and the key kSpoilt. A warp
// looks at a key; those behind the end are zeros. All threads of kWarps warps; at(key, i): its 16 bytes i.
template <int kWarps, int kPieces, class Part, class At>
__device__ inline void clear_spoilt(const Part& part, u32 tile, int* state, const At& at) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int key = warp; key < kKeys; key += kWarps) {
    if (!part.is_of_some(tile + u32(key)) || tile + u32(key) >= part.stop) continue;
    for (int i = lane; i < kPieces; i += kWarp) {
      uint4& piece = at(key, i);
      if (are_finite(piece)) continue;
      piece = make_uint4(0, 0, 0, 0);
      state[key] = kSpoilt;
      fence_proxy_async();
    }
  }
}

// One of `splits` parts of the context of request r.   position [M]; end [R]
template <class Model, bool kCausal>
struct KeysOfPart {
  const i64* of_request;  // positions of its kK rows
  i64 window;
  u32 top;                      // position of its first row
  u32 first_seen, last_window;  // the first key that its first row sees, and its last row
  u32 begin, stop;              // from a whole tile on, up to the end of the keys; none where begin is not below

  __device__ KeysOfPart(const i64* position, const i64* end, i64 of_window, int splits, int split, i64 r)
      : of_request(position + r * Model::kK), window(of_window) {
    const u32 keys_end = u32(end[r]);
    const i64 first = of_request[0];
    top = u32(first);
    first_seen = u32(window_of(first));
    last_window = u32(window_of(first + Model::kK - 1));
    const u32 low = first_seen / kKeys * kKeys;
    const u32 tiles = keys_end > low ? (keys_end - low + kKeys - 1) / kKeys : 0;
    const u32 tiles_of_split = (tiles + u32(splits) - 1) / u32(splits);
    begin = low + u32(split) * tiles_of_split * kKeys;
    stop = begin + tiles_of_split * kKeys;
    if (stop > keys_end) stop = keys_end;
  }
  // The first key that a row at this position sees.
  __device__ i64 window_of(i64 at) const {
    const i64 first = (at < Model::kMaxLen ? at : i64(Model::kMaxLen - 1)) - window + 1;
    return window > 0 && first > 0 ? first : 0;
  }
  // Where a key lies in the cache, in elements; -1: no row sees it.
  __device__ i64 place_of(const Batch& batch, const Cache& cache, i64 r, u32 key) const {
    return key >= first_seen && key < stop ? row_offset<Model>(batch, cache, r, key) : i64(-1);
  }
  // Some of the tile's keys are seen by some rows alone.
  __device__ bool is_edge(u32 tile) const { return (kCausal && tile + kKeys - 1 > top) || tile < last_window; }
  __device__ bool is_of_some(u32 key) const { return (kCausal && key > top) || key < last_window; }

  // Keys first .. last of a tile are those that a row sees of it.
  struct Seen {
    int first, last;
  };
  // `row` is one of kK * kHeads, or behind them: at -1 it sees nothing.
  __device__ i64 position_of(int row) const {
    return row < Model::kK * Model::kHeads ? of_request[row / Model::kHeads] : i64(-1);
  }
  __device__ Seen seen_by(i64 own, u32 tile) const {
    const i64 behind = own - i64(tile), before = window_of(own) - i64(tile);
    return {before <= 0       ? 0
            : before >= kKeys ? kKeys
                              : int(before),
            own < 0                       ? -1
            : !kCausal || behind >= kKeys ? kKeys - 1
                                          : int(behind < -1 ? -1 : behind)};
  }
};

}  // namespace twostep::draft
