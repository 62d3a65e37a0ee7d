// The Markov head (spec: drafter 6): l = base + kLogitScale * (W2 . e), e the W1 row of the token before; the pick is
// its argmax, with Gumbel noise in probabilistic mode. All drafts are one launch. CTAs wait for each other's bests, so
// the whole grid must be resident: a cooperative launch. Two kernels that give the same bits:
//   picks            where W2's rows fit into shared memory: a CTA reads its own once
//   picks_streamed   W2 passes through rings of shared memory, at each draft again. They go on to the next draft's rows
//                    while the token before it is not known yet; and each draft takes them in the direction that the
//                    one before did not, so that what was read last may still be in L2.
//
// A CTA has a range of W2's rows. r is summed in kSlices slices, in FP32: of a slice in the order of r, then the slices
// in theirs. The matrix operand serves kSampleRequests requests. NaN counts as -inf, the lowest id wins ties; a row
// with nothing above -inf gives token 0 and kNonFinite.
//
// A CTA's best token per draft and request is one word of `best`, kNoneYet until it is there. It carries all that is
// passed on, so relaxed accesses do. `finish` empties the words again, when the grid before it is complete.
//
// PDL: W2 is older than the kernel before, and its rows are under way before pdl_wait(); base, tokens and best are read
// after it. Base and noise do not need the token before: they are there when it comes.
#pragma once

#include "draft/random.cuh"
#include "draft/row.cuh"

namespace twostep::draft {

constexpr int kSampleThreads = 256;
constexpr int kFinishThreads = 512;
constexpr int kSampleWarps = kSampleThreads / kWarp;
constexpr int kSampleRequests = 8;  // columns of a matrix operand
constexpr int kTileRows = 16;       // its rows: of W2
constexpr int kSlices = 4;          // of r
constexpr int kSliceWarps = kSampleWarps / kSlices;
constexpr int kTilesOfWarp = 5;  // sums in registers; K3.1's shard of 8 ranks is then one chunk on an H200
constexpr int kChunkRows = kTileRows * kTilesOfWarp * kSliceWarps;
static_assert(kSampleWarps == kSampleRequests, "a warp finds the token of a request");

struct Sampling {
  const u16* base;            // [R * kK, kShardVocab]
  const u16* w1;              // [kVocab, kMarkovRank]
  const u16* w2;              // [kShardVocab, kMarkovRank]
  const i32* ids;             // [R * kK]: the anchor of each block at its start
  const i64* first_position;  // [R]
  void* draft_logits;         // [R, kK, kShardVocab] FP32 or BF16
  u64* best;                  // [kK, R, CTAs]: kNoneYet before the first draft
  i32* tokens;                // [R, kK]
  i32* status;                // [R]
};

struct PickShared {
  // Four floats more than rows: a warp stores eight rows of four requests at once, to all banks.
  float sums[kSlices][kSampleRequests][kChunkRows + 4];
  float base[kSampleRequests][kChunkRows], noise[kSampleRequests][kChunkRows];  // read by the thread that wrote them
  Best found[kSampleRequests][kChunkRows / kWarp];
  i32 before[kSampleRequests];  // -1: padding, or no request
  alignas(16) u64 arrived;      // barrier of the rows of W2
};

// The rows of W2 of a CTA.
struct Shard {
  const u16* w2;  // the first one
  int pitch;      // elements
  i64 first;      // its number
  int rows;
  const u64* arrived;
};

// Of a row of W2, or of e, in shared memory: elements. 64 bytes off the 128 of all banks: the eight pieces that a load
// takes at once are of two rows.
template <class Model>
constexpr int kMarkovPitch = ((2 * Model::kMarkovRank + 63) / 128 * 128 + 64) / 2;

// Whole tiles; two CTAs differ by one at most.
template <class Model>
__device__ inline Shard shard_of(const Sampling& s) {
  constexpr i64 kTiles = (i64(Model::kShardVocab) + kTileRows - 1) / kTileRows;
  const i64 first = kTiles * blockIdx.x / gridDim.x * kTileRows;
  const i64 end = kTiles * (blockIdx.x + 1) / gridDim.x * kTileRows;
  const int rows = int((end < Model::kShardVocab ? end : i64(Model::kShardVocab)) - first);
  return {s.w2 + first * Model::kMarkovRank, Model::kMarkovRank, first, rows, nullptr};
}

// ---- Bests of CTAs

constexpr u64 kNoneYet = ~u64(0);  // no best has a score that is NaN

__device__ inline u64 word_of(Best best) { return u64(u32(best.token)) << 32 | __float_as_uint(best.score); }
__device__ inline Best best_of(u64 word) { return {__uint_as_float(u32(word)), i32(word >> 32)}; }
__device__ inline u64* bests_of(const Sampling& s, i64 requests, i64 r, int i, int ctas) {
  return s.best + (i * requests + r) * ctas;
}

// The best of all CTAs for a request, by one warp, when all are there.
__device__ inline Best reduce_best(const u64* words, int ctas, int lane) {
  constexpr int kAtOnce = 5;  // loads under way: all of 132 SMs
  constexpr u32 kSleepAfter = 64, kSleepNs = 32;
  Best found = no_best();
  for (int first = lane; first < ctas; first += kAtOnce * kWarp) {
    u64 some[kAtOnce];
    bool missing = true;
    for (u32 polls = 0; missing; ++polls) {
      if (polls >= kSleepAfter) sleep_ns(kSleepNs);
      missing = false;
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
        some[n] = first + n * kWarp < ctas ? load_relaxed_gpu(words + first + n * kWarp) : word_of(no_best());
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) missing |= some[n] == kNoneYet;
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) found = better(found, best_of(some[n]));
  }
  return warp_best(found);
}

// Token of draft i - 1 of request r, by one warp; the anchor for i = 0; -1 for padding. CTA `writes` keeps it.
template <class Model>
__device__ inline i32 token_before(const Sampling& s, i64 requests, i64 r, int i, int ctas, int lane, bool writes) {
  const i64 first_position = s.first_position[r];
  const i32 anchor = s.ids[r * Model::kK];
  const Best found = i == 0 ? no_best() : reduce_best(bests_of(s, requests, r, i - 1, ctas), ctas, lane);
  const i32 drafted = found.token < 0 ? i32(Model::kFirstToken) : found.token;
  const i32 token = first_position < 0 ? -1 : i == 0 ? anchor : drafted;
  if (i == 0 || !writes || lane != 0) return token;
  s.tokens[r * Model::kK + i - 1] = token;
  if (first_position >= 0 && found.token < 0) atomicOr(s.status + r, kNonFinite);
  return token;
}

// What a draft of a request is drawn with: of token v of the shard, from 0.
template <class Model>
__device__ inline float noise_of(const Batch& batch, i64 r, i64 position, i64 v) {
  const DrawKey key = {u64(batch.seed[r]), u32(position), u32(batch.step[r])};
  return gumbel_at(key, u32(Model::kFirstToken + v), kDraftStream);
}

// The score of token v of the shard in row `row` of the block, whose draft logit is kept. Noise is read where there is
// a temperature.
template <class Model>
__device__ inline float score_of(const Sampling& s, i64 row, i64 v, float base, float bias, float temperature,
                                 const float& noise) {
  float l = base + Model::kLogitScale * bias;
  const i64 at = row * Model::kShardVocab + v;
  if (Model::kProbabilistic && Model::kDraftLogitsBf16) {
    l = round_bf16(l);
    static_cast<u16*>(s.draft_logits)[at] = to_bf16(l);
  } else if (Model::kProbabilistic) {
    static_cast<float*>(s.draft_logits)[at] = l;
  }
  return temperature >= 1e-5f ? l * (1.0f / temperature) + noise : l;
}

// This CTA's best of draft i, by one warp.
template <class Model>
__device__ inline void tell_best(const Sampling& s, i64 requests, i64 r, int i, Best best) {
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) store_relaxed_gpu(bests_of(s, requests, r, i, gridDim.x) + blockIdx.x, word_of(best));
  // One of the CTAs has the token: its W1 row comes closer while the others find that out.
  if (best.token >= 0 && i + 1 < Model::kK)
    for (int column = 64 * lane; column < Model::kMarkovRank; column += 64 * kWarp)
      prefetch_l2(s.w1 + i64(best.token) * Model::kMarkovRank + column);
}

// ---- Kept: the warps of a CTA share a chunk of rows and their slices

// sums = W2 . e of a chunk's rows, of this warp's slice of r. Of a step of 32 columns, lane 4 * g + t holds 16 bytes
// of row g, of row g + 8 and of request g's e: columns 8t to 8t + 7. Which of them an instruction takes for its
// columns does not matter, as long as both operands agree.
template <class Model>
__device__ inline void sum_slice(const Sampling& s, const Shard& shard, int chunk, int rows, PickShared& shared) {
  constexpr int kPieces = Model::kMarkovRank / 8;  // of 16 bytes, of a row
  constexpr int kOfStep = 4 * kSlices;             // in all slices
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int g = lane / 4, t = lane % 4, slice = warp % kSlices;
  const i32 token = shared.before[g];
  const bool wanted[2] = {shared.before[2 * t] >= 0, shared.before[2 * t + 1] >= 0};
  const uint4* e = reinterpret_cast<const uint4*>(s.w1 + (token < 0 ? 0 : i64(token)) * Model::kMarkovRank);
  const auto tile_of = [&](int n) { return (warp / kSlices + n * kSliceWarps) * kTileRows; };
  const u16* chunk_rows = shard.w2 + i64(chunk) * shard.pitch;
  const auto piece_of = [&](int row, int piece) {
    // Of the last row instead of one past it: nobody reads that sum.
    if (Model::kShardVocab % kTileRows != 0 && row >= rows) row = rows - 1;
    return reinterpret_cast<const uint4*>(chunk_rows + row * shard.pitch)[piece];
  };

  const uint4 zero = make_uint4(0, 0, 0, 0);
  float sums[kTilesOfWarp][4] = {};
#pragma unroll 4  // steps whose loads are under way together
  for (int step = 0; step < (kPieces + kOfStep - 1) / kOfStep; ++step) {
    const int piece = step * kOfStep + 4 * slice + t;
    const bool inside = kPieces % kOfStep == 0 || piece < kPieces;
    const uint4 b = inside && token >= 0 ? e[piece] : zero;
    uint4 low[kTilesOfWarp], high[kTilesOfWarp];
#pragma unroll
    for (int n = 0; n < kTilesOfWarp; ++n) {
      low[n] = inside && tile_of(n) < rows ? piece_of(tile_of(n) + g, piece) : zero;
      high[n] = inside && tile_of(n) < rows ? piece_of(tile_of(n) + g + 8, piece) : zero;
    }
#pragma unroll
    for (int n = 0; n < kTilesOfWarp; ++n) {
      mma_16x8x16(sums[n], {low[n].x, high[n].x, low[n].y, high[n].y}, b.x, b.y);
      mma_16x8x16(sums[n], {low[n].z, high[n].z, low[n].w, high[n].w}, b.z, b.w);
    }
  }
#pragma unroll
  for (int n = 0; n < kTilesOfWarp; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (tile_of(n) < rows && wanted[j % 2])
        shared.sums[slice][2 * t + j % 2][tile_of(n) + g + j / 2 * 8] = sums[n][j];
}

// The warps of a CTA share `count` times `parts` pieces of work, without a division.
template <class Work>
__device__ inline void for_each_part(int count, int parts, Work work) {
  for (int q = 0, part = threadIdx.x / kWarp;; part += kSampleWarps) {
    for (; part >= parts; part -= parts) ++q;
    if (q >= count) return;
    work(q, part);
  }
}

// Draft i of the requests from `group` on: this CTA's best.
template <class Model>
__device__ inline void draft(const Batch& batch, const Sampling& s, const Shard& shard, int i, i64 group,
                             PickShared& shared) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int count = batch.requests - group < kSampleRequests ? int(batch.requests - group) : kSampleRequests;
  const auto temperature_of = [&](i64 r) { return Model::kProbabilistic ? batch.temperature[r] : 0.0f; };

  for (int chunk = 0; chunk < shard.rows; chunk += kChunkRows) {
    const int rows = shard.rows - chunk < kChunkRows ? shard.rows - chunk : kChunkRows;
    const int parts = (rows + kWarp - 1) / kWarp;  // of a request, each of a warp; the first chunk has the most

    for_each_part(count, parts, [&](int q, int part) {  // what does not need the token
      const i64 r = group + q, row = r * Model::kK + i;
      const int at = part * kWarp + lane;
      if (at >= rows || s.first_position[r] < 0) return;
      const i64 v = shard.first + chunk + at;
      shared.base[q][at] = bf16_at(s.base, row * Model::kShardVocab + v);
      if (!(temperature_of(r) >= 1e-5f)) return;
      shared.noise[q][at] = noise_of<Model>(batch, r, s.first_position[r] + i, v);
    });

    if (chunk == 0) {
      const i32 token =
          warp < count ? token_before<Model>(s, batch.requests, group + warp, i, gridDim.x, lane, blockIdx.x == 0) : -1;
      if (lane == 0) shared.before[warp] = token;
      while (!barrier_try_wait(smem_address(shard.arrived), 0)) {
      }
      __syncthreads();  // before is there
    }
    sum_slice<Model>(s, shard, chunk, rows, shared);
    __syncthreads();  // sums are there

    for_each_part(count, parts, [&](int q, int part) {
      const i64 r = group + q, row = r * Model::kK + i;
      const int at = part * kWarp + lane;
      Best best = no_best();
      if (at < rows && shared.before[q] >= 0) {
        const i64 v = shard.first + chunk + at;
        float bias = 0;
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) bias += shared.sums[slice][q][at];
        const float score =
            score_of<Model>(s, row, v, shared.base[q][at], bias, temperature_of(r), shared.noise[q][at]);
        if (score > best.score) best = {score, i32(Model::kFirstToken + v)};
      }
      best = warp_best(best);
      if (lane == 0) shared.found[q][part] = chunk == 0 ? best : better(shared.found[q][part], best);
    });
    __syncthreads();  // found is there; sums and before are no longer read
  }

  if (warp >= count) return;
  const int rows = shard.rows < kChunkRows ? shard.rows : kChunkRows;
  const Best best = warp_best(lane * kWarp < rows ? shared.found[warp][lane] : no_best());
  tell_best<Model>(s, batch.requests, group + warp, i, best);
}

// All drafts.   Grid up to the number of SMs, resident as a whole; block kSampleThreads.   memory: PickShared, then the
// rows of W2, kMarkovPitch apart.
template <class Model>
__device__ inline void picks(const Batch& batch, const Sampling& s, void* memory) {
  constexpr u32 kRowBytes = 2 * Model::kMarkovRank;
  constexpr int kPitch = kMarkovPitch<Model>;
  PickShared& shared = *static_cast<PickShared*>(memory);
  u16* kept = reinterpret_cast<u16*>(&shared + 1);
  Shard shard = shard_of<Model>(s);
  const auto arrived = smem_address(&shared.arrived);
  if (threadIdx.x == 0) {
    barrier_init(arrived, 1);
    barrier_init_fence();
    barrier_arrive_expect(arrived, shard.rows * kRowBytes);
  }
  __syncthreads();  // the barrier is there
  for (int row = threadIdx.x; row < shard.rows; row += kSampleThreads)
    bulk_load(smem_address(kept + row * kPitch), shard.w2 + i64(row) * Model::kMarkovRank, kRowBytes, arrived);
  pdl_launch();
  pdl_wait();

  shard.w2 = kept;
  shard.pitch = kPitch;
  shard.arrived = &shared.arrived;
  for (int i = 0; i < Model::kK; ++i)
    for (i64 group = 0; group < batch.requests; group += kSampleRequests)
      draft<Model>(batch, s, shard, i, group, shared);
}

// ---- Streamed: each warp for itself, 16 rows at a time

constexpr int kStreamWarps = 4;
constexpr int kStreamThreads = kStreamWarps * kWarp;
constexpr int kMaxStages = 16;  // of a warp's ring

// Before the rings: kStreamWarps of `stages` tiles of W2, as they lie in global memory.
template <class Model>
struct StreamShared {
  alignas(128) u16 e[kSampleRequests][kMarkovPitch<Model>];
  Best found[kStreamWarps][kSampleRequests];
  i32 before[kSampleRequests];
  alignas(128) u64 arrived[kStreamWarps][kMaxStages];
};

// The tiles of a warp: every kStreamWarps-th of its CTA, up through them in one draft, down in the next, and so on.
template <class Model>
class Stream {
 public:
  static constexpr u32 kTileElements = kTileRows * Model::kMarkovRank;

  __device__ Stream(const Shard& shard, u16* ring, u64* arrived, int stages, i64 passes)
      : shard_(shard), ring_(ring), arrived_(smem_address(arrived)), stages_(stages) {
    const int warp = threadIdx.x / kWarp, all = (shard.rows + kTileRows - 1) / kTileRows;
    tiles = all > warp ? (all - warp + kStreamWarps - 1) / kStreamWarps : 0;
    left_ = tiles * passes;
    if (threadIdx.x % kWarp == 0) {
      for (int i = 0; i < stages; ++i) barrier_init(arrived_ + 8 * i, 1);
      barrier_init_fence();
    }
    __syncwarp();
    for (int i = 0; i < stages; ++i) begin(i);
  }

  int tiles;  // of a pass
  __device__ int first_row() const { return row_of(reads_); }
  // This tile's rows, when they have arrived. All lanes.
  __device__ const u16* wait() const {
    while (!barrier_try_wait(arrived_ + 8 * stage_, parity_)) {
    }
    return ring_ + stage_ * kTileElements;
  }
  // All lanes have read this tile: its room is the next one's.
  __device__ void next() {
    __syncwarp();
    begin(stage_);
    reads_.next(tiles);
    if (++stage_ == stages_) stage_ = 0, parity_ ^= 1;
  }

 private:
  struct Place {
    int tile = 0, step = 1;
    __device__ void next(int tiles) {
      tile += step;
      if (tile >= 0 && tile < tiles) return;
      step = -step;
      tile += step;
    }
  };
  __device__ static int row_of(Place place) {
    return (place.tile * kStreamWarps + int(threadIdx.x / kWarp)) * kTileRows;
  }
  __device__ void begin(int stage) {
    if (left_ == 0) return;
    --left_;
    if (threadIdx.x % kWarp == 0) {
      const int row = row_of(loads_), rows = shard_.rows - row < kTileRows ? shard_.rows - row : kTileRows;
      const u32 bytes = rows * 2 * Model::kMarkovRank;
      barrier_arrive_expect(arrived_ + 8 * stage, bytes);
      bulk_load(smem_address(ring_ + stage * kTileElements), shard_.w2 + i64(row) * Model::kMarkovRank, bytes,
                arrived_ + 8 * stage);
    }
    loads_.next(tiles);
  }

  const Shard& shard_;
  u16* ring_;
  decltype(smem_address(nullptr)) arrived_;
  int stages_, stage_ = 0;
  u32 parity_ = 0;
  Place loads_, reads_;
  i64 left_;  // tiles not yet under way
};

// sums[slice] = W2 . e of a tile, as sum_slice() has them. Ranks are multiples of 64 as a rule, rows of 128 bytes:
// lanes of odd rows take the pieces of two slices in the other order, so that each load meets all banks once.
template <class Model>
__device__ inline void sum_tile(const u16* tile, const StreamShared<Model>& shared, float (&sums)[kSlices][4]) {
  constexpr int kPieces = Model::kMarkovRank / 8;
  constexpr int kOfStep = 4 * kSlices;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const bool odd = g % 2 != 0;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const auto piece_of = [&](const u16* row, int piece) {
    return kPieces % kOfStep == 0 || piece < kPieces ? reinterpret_cast<const uint4*>(row)[piece] : zero;
  };
#pragma unroll 4
  for (int step = 0; step < (kPieces + kOfStep - 1) / kOfStep; ++step)
#pragma unroll
    for (int pair = 0; pair < kSlices; pair += 2) {
      const int piece = step * kOfStep + 4 * pair + t;
      uint4 of[2][2];  // [slice][row g, row g + 8]
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u16* row = tile + (g + 8 * half) * Model::kMarkovRank;
        const uint4 first = piece_of(row, piece + (odd ? 4 : 0)), second = piece_of(row, piece + (odd ? 0 : 4));
        of[0][half] = odd ? second : first;
        of[1][half] = odd ? first : second;
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint4 low = of[n][0], high = of[n][1], b = piece_of(shared.e[g], piece + 4 * n);
        mma_16x8x16(sums[pair + n], {low.x, high.x, low.y, high.y}, b.x, b.y);
        mma_16x8x16(sums[pair + n], {low.z, high.z, low.w, high.w}, b.z, b.w);
      }
    }
}

// Draft i of the requests from `group` on: this CTA's best.
template <class Model>
__device__ inline void draft_streamed(const Batch& batch, const Sampling& s, const Shard& shard, int i, i64 group,
                                      Stream<Model>& stream, StreamShared<Model>& shared) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int count = batch.requests - group < kSampleRequests ? int(batch.requests - group) : kSampleRequests;
  // Of this lane: requests 2t and 2t + 1, of a tile rows g and g + 8.
  i64 position[2];  // of the draft; -1: padding, or no request
  float temperature[2];
  Best best[2] = {no_best(), no_best()};
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const bool is = 2 * t + q < count;
    const i64 first = is ? s.first_position[group + 2 * t + q] : -1;
    position[q] = first < 0 ? -1 : first + i;
    temperature[q] = Model::kProbabilistic && is ? batch.temperature[group + 2 * t + q] : 0.0f;
  }
  const auto row_of = [&](int q) { return (group + 2 * t + q) * Model::kK + i; };

  for (int n = 0; n == 0 || n < stream.tiles; ++n) {
    const int first_row = stream.first_row();
    const auto has = [&](int q, int half) { return position[q] >= 0 && first_row + g + 8 * half < shard.rows; };
    const i64 v = shard.first + first_row + g;
    float base[2][2], noise[2][2];  // [request][half]: they do not need the token
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!has(q, half)) continue;
        base[q][half] = bf16_at(s.base, row_of(q) * Model::kShardVocab + v + 8 * half);
        if (!(temperature[q] >= 1e-5f)) continue;
        noise[q][half] = noise_of<Model>(batch, group + 2 * t + q, position[q], v + 8 * half);
      }

    if (n == 0) {
      for (int q = warp; q < kSampleRequests; q += kStreamWarps) {
        const i32 token =
            q < count ? token_before<Model>(s, batch.requests, group + q, i, gridDim.x, lane, blockIdx.x == 0) : -1;
        if (lane == 0) shared.before[q] = token;
      }
      __syncthreads();  // before is there
      constexpr int kPieces = Model::kMarkovRank / 8;
      for (int at = threadIdx.x; at < kSampleRequests * kPieces; at += kStreamThreads) {
        const int q = at / kPieces, piece = at % kPieces;
        const i32 token = shared.before[q];
        reinterpret_cast<uint4*>(shared.e[q])[piece] =
            token < 0 ? make_uint4(0, 0, 0, 0)
                      : reinterpret_cast<const uint4*>(s.w1 + i64(token) * Model::kMarkovRank)[piece];
      }
      __syncthreads();  // e is there
      if (stream.tiles == 0) break;
    }

    float sums[kSlices][4] = {};
    sum_tile<Model>(stream.wait(), shared, sums);
    stream.next();
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!has(q, half)) continue;
        float bias = 0;
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) bias += sums[slice][2 * half + q];
        const float score =
            score_of<Model>(s, row_of(q), v + 8 * half, base[q][half], bias, temperature[q], noise[q][half]);
        if (score > -infinity()) best[q] = better(best[q], {score, i32(Model::kFirstToken + v + 8 * half)});
      }
  }

#pragma unroll
  for (int q = 0; q < 2; ++q) {
#pragma unroll
    for (int step = 4; step < kWarp; step *= 2)
      best[q] = better(best[q], {__shfl_xor_sync(0xffffffffu, best[q].score, step),
                                 __shfl_xor_sync(0xffffffffu, best[q].token, step)});
    if (g == 0) shared.found[warp][2 * t + q] = best[q];
  }
  __syncthreads();  // found is there; e and before are no longer read
  for (int q = warp; q < count; q += kStreamWarps)
    tell_best<Model>(s, batch.requests, group + q, i,
                     warp_best(lane < kStreamWarps ? shared.found[lane][q] : no_best()));
}

// All drafts.   Grid up to the number of SMs, resident as a whole; block kStreamThreads.   memory: StreamShared, then
// the rings, of `stages` tiles for each warp.
template <class Model>
__device__ inline void picks_streamed(const Batch& batch, const Sampling& s, int stages, void* memory) {
  StreamShared<Model>& shared = *static_cast<StreamShared<Model>*>(memory);
  const Shard shard = shard_of<Model>(s);
  const int warp = threadIdx.x / kWarp;
  const i64 groups = (batch.requests + kSampleRequests - 1) / kSampleRequests;
  Stream<Model> stream(shard, reinterpret_cast<u16*>(&shared + 1) + i64(warp * stages) * Stream<Model>::kTileElements,
                       shared.arrived[warp], stages, Model::kK * groups);
  pdl_launch();
  pdl_wait();
  for (int i = 0; i < Model::kK; ++i)
    for (i64 group = 0; group < batch.requests; group += kSampleRequests)
      draft_streamed<Model>(batch, s, shard, i, group, stream, shared);
}

// After the last draft: its token, and the confidence of all of them. One pass over the weights.
//   weight [kHidden (+ kMarkovRank)], then the bias; null: no head.   confidence, survival [R, kK]
// Grid R, block kFinishThreads.
template <class Model>
__device__ inline void finish(const Batch& batch, const Sampling& s, int ctas, const u16* hidden, const float* weight,
                              const float* calibration, float* confidence, float* survival) {
  constexpr int kWarps = kFinishThreads / kWarp;
  constexpr int kFours =
      (Model::kHidden / 4 + kFinishThreads - 1) / kFinishThreads;  // of a thread, all under way at once
  __shared__ float parts[Model::kK][kWarps], of_draft[Model::kK];
  const i64 r = blockIdx.x;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const auto column_of = [](int n) { return 4 * (n * kFinishThreads + int(threadIdx.x)); };
  pdl_launch();
  float4 of_weight[kFours];
#pragma unroll
  for (int n = 0; n < kFours; ++n)
    of_weight[n] = weight != nullptr && column_of(n) < Model::kHidden
                       ? *reinterpret_cast<const float4*>(weight + column_of(n))
                       : make_float4(0, 0, 0, 0);
  pdl_wait();
  for (int i = warp; i < Model::kK; i += kWarps) {
    if (i == Model::kK - 1) token_before<Model>(s, batch.requests, r, Model::kK, ctas, lane, true);
    u64* words = bests_of(s, batch.requests, r, i, ctas);
    for (int cta = lane; cta < ctas; cta += kWarp) words[cta] = kNoneYet;
  }
  if (weight == nullptr) return;

  float sums[Model::kK] = {};
#pragma unroll
  for (int n = 0; n < kFours; ++n) {
    const float4 w = of_weight[n];
    if (column_of(n) >= Model::kHidden) break;
#pragma unroll
    for (int i = 0; i < Model::kK; ++i) {
      const uint2 four = *reinterpret_cast<const uint2*>(hidden + (r * Model::kK + i) * Model::kHidden + column_of(n));
      sums[i] += w.x * low_bf16(four.x) + w.y * high_bf16(four.x) + w.z * low_bf16(four.y) + w.w * high_bf16(four.y);
    }
  }
  if (Model::kConfidenceWithMarkov) {
    i32 before[Model::kK];  // older than the last token, which this launch finds
#pragma unroll
    for (int i = 0; i < Model::kK; ++i) before[i] = i == 0 ? s.ids[r * Model::kK] : s.tokens[r * Model::kK + i - 1];
    for (int c = threadIdx.x; c < Model::kMarkovRank; c += kFinishThreads)
#pragma unroll
      for (int i = 0; i < Model::kK; ++i)
        if (before[i] >= 0)
          sums[i] += weight[Model::kHidden + c] * bf16_at(s.w1, i64(before[i]) * Model::kMarkovRank + c);
  }
#pragma unroll
  for (int i = 0; i < Model::kK; ++i) {
    const float sum = warp_sum(sums[i]);
    if (lane == 0) parts[i][warp] = sum;
  }
  __syncthreads();  // parts are there
  const int i = threadIdx.x;
  if (i < Model::kK) {
    float sum = weight[Model::kHidden + (Model::kConfidenceWithMarkov ? Model::kMarkovRank : 0)];
    for (int other = 0; other < kWarps; ++other) sum += parts[i][other];
    of_draft[i] = s.first_position[r] < 0 ? 0.0f : sigmoid(sum / calibration[i]);
  }
  __syncthreads();  // every confidence is there
  if (i >= Model::kK) return;
  float survived = 1;
  for (int j = 0; j <= i; ++j) survived *= of_draft[j];
  confidence[r * Model::kK + i] = of_draft[i];
  survival[r * Model::kK + i] = survived;
}

}  // namespace twostep::draft
