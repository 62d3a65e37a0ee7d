// The Markov head (spec: drafter 6): l = base + kLogitScale * (W2 . e), e the W1 row of the token before; the pick is
// its argmax, with Gumbel noise in probabilistic mode. All drafts are one launch, `picks`: CTAs wait for each other's
// bests, so the whole grid must be resident: a cooperative launch.
//
// A CTA has a range of W2's rows, in chunks that pass through a ring of shared memory. Where the ring holds all of
// them, they are read once; else the ring goes on to the next draft's while the token before it is not known yet, each
// draft in the direction that the one before did not take: what was read last may still be in L2.
//
// The warps of a CTA take kSlices slices of r, so that a lane holds no more of e than it can load at once; the matrix
// operand serves kSampleRequests requests. FP32 sums, of a slice in the order of r, then of the slices in theirs: bits
// do not depend on chunks. NaN counts as -inf, the lowest id wins ties; a row with nothing above -inf gives token 0 and
// kNonFinite.
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
constexpr int kMaxStages = 16;  // of the ring
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

// A chunk is kTiles tiles of a warp. Pieces of work beside the product are 32 rows of a request, each of a warp.
template <int kTiles>
struct PickShared {
  static constexpr int kRows = kTileRows * kTiles * kSliceWarps;
  static constexpr int kParts = kRows / kWarp;  // of a request; as many pieces has a warp
  // Of this chunk and of the one before, which slower warps still read. Four floats more than rows: a warp stores eight
  // rows of four requests at once, to all banks.
  float sums[2][kSlices][kSampleRequests][kRows + 4];
  float noise[kSampleRequests][kRows];  // read by the thread that wrote it
  Best found[kSampleRequests][kParts];
  i32 before[kSampleRequests];          // -1: padding, or no request
  alignas(16) u64 arrived[kMaxStages];  // barriers of the ring
};

// The rows of W2 of a CTA.
struct Shard {
  const u16* w2;  // the first one
  i64 first;      // its number
  int rows;
};

// Whole tiles; two CTAs differ by one at most.
template <class Model>
__device__ inline Shard shard_of(const Sampling& s) {
  constexpr i64 kTiles = (i64(Model::kShardVocab) + kTileRows - 1) / kTileRows;
  const i64 first = kTiles * blockIdx.x / gridDim.x * kTileRows;
  const i64 end = kTiles * (blockIdx.x + 1) / gridDim.x * kTileRows;
  const int rows = int((end < Model::kShardVocab ? end : i64(Model::kShardVocab)) - first);
  return {s.w2 + first * Model::kMarkovRank, first, rows};
}

// ---- The ring

// Chunks as a CTA takes them, draft after draft: up through its rows, then down, and so on.
struct Turn {
  int chunk = 0, step = 1;
  __device__ void next(int chunks) {
    chunk += step;
    if (chunk >= 0 && chunk < chunks) return;
    step = -step;
    chunk += step;
  }
};

// Stages of kRows rows, each of a pitch that is 64 bytes off the 128 of all banks: the eight pieces that a load takes
// at once are of two rows.
template <class Model, int kRows>
struct Ring {
  static constexpr u32 kRowBytes = 2 * Model::kMarkovRank;
  static constexpr u32 kPitchBytes = (kRowBytes + 63) / 128 * 128 + 64;
  static constexpr u32 kStageBytes = kRows * kPitchBytes;

  const Shard& shard;
  u8* memory;
  decltype(smem_address(nullptr)) barriers;
  int stages, chunks;
  int left;         // loads not yet begun
  Turn load, read;  // next of each
  int load_to = 0, read_at = 0;
  u32 parity = 0;

  __device__ Ring(const Shard& shard, void* memory, u64* arrived, int stages, i64 drafts)
      : shard(shard), memory(static_cast<u8*>(memory)), barriers(smem_address(arrived)), stages(stages) {
    chunks = (shard.rows + kRows - 1) / kRows;
    left = int(chunks <= stages ? chunks : chunks * drafts);
    if (threadIdx.x == 0) {
      for (int i = 0; i < stages; ++i) barrier_init(barriers + 8 * i, 1);
      barrier_init_fence();
    }
    __syncthreads();  // the barriers are there
    for (int i = 0; i < stages; ++i) begin();
  }

  __device__ int first_row() const { return read.chunk * kRows; }
  __device__ int rows_of(int chunk) const {
    return shard.rows - chunk * kRows < kRows ? shard.rows - chunk * kRows : kRows;
  }
  __device__ const u16* rows() const { return reinterpret_cast<const u16*>(memory + read_at * kStageBytes); }

  // Loads the next chunk, if one is left. All threads; none still reads the stage.
  __device__ void begin() {
    if (left == 0) return;
    --left;
    const int rows = rows_of(load.chunk), warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const auto to = smem_address(memory) + load_to * kStageBytes, barrier = barriers + 8 * load_to;
    const u16* from = shard.w2 + i64(load.chunk) * kRows * Model::kMarkovRank;
    if (threadIdx.x == 0) barrier_arrive_expect(barrier, rows * kRowBytes);
    for (int row = lane * kSampleWarps + warp; row < rows; row += kSampleThreads)
      bulk_load(to + row * kPitchBytes, from + i64(row) * Model::kMarkovRank, kRowBytes, barrier);
    load.next(chunks);
    if (++load_to == stages) load_to = 0;
  }
  __device__ void wait() const {
    while (!barrier_try_wait(barriers + 8 * read_at, parity)) {
    }
  }
  // After all threads have read the chunk.
  __device__ void next() {
    read.next(chunks);
    if (chunks <= stages) {  // each stays where it is
      read_at = read.chunk;
      return;
    }
    begin();
    if (++read_at == stages) read_at = 0, parity ^= 1;
  }
};

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

// ---- A draft

// e of the requests of a group, as the matrix operand of this warp's slice of r. Of a step of 32 columns, lane
// 4 * g + t holds 16 bytes of row g, of row g + 8 and of request g's e: columns 8t to 8t + 7. Which of them an
// instruction takes for its columns does not matter, as long as both operands agree.
template <class Model>
struct Embedding {
  static constexpr int kPieces = Model::kMarkovRank / 8;  // of 16 bytes, of a row
  static constexpr int kOfStep = 4 * kSlices;             // in all slices
  static constexpr int kSteps = (kPieces + kOfStep - 1) / kOfStep;
  uint4 of[kSteps];

  __device__ static int piece_of(int step) {
    return step * kOfStep + int(threadIdx.x / kWarp) % kSlices * 4 + int(threadIdx.x) % 4;
  }
  __device__ static bool has(int step) { return kPieces % kOfStep == 0 || piece_of(step) < kPieces; }

  __device__ void load(const u16* w1, const i32* before) {
    const i32 token = before[threadIdx.x % kWarp / 4];
    const uint4* e = reinterpret_cast<const uint4*>(w1 + (token < 0 ? 0 : i64(token)) * Model::kMarkovRank);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      of[step] = has(step) && token >= 0 ? e[piece_of(step)] : make_uint4(0, 0, 0, 0);
  }
};

// sums[slice] = W2 . e of a chunk's rows, of this warp's slice of r.
template <class Model, int kTiles, class Sums>
__device__ inline void sum_slice(const Embedding<Model>& e, const u16* w2, int pitch, int rows, const i32* before,
                                 Sums& sums_of) {
  using E = Embedding<Model>;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int g = lane / 4, t = lane % 4;
  const bool wanted[2] = {before[2 * t] >= 0, before[2 * t + 1] >= 0};
  const auto tile_of = [&](int n) { return (warp / kSlices + n * kSliceWarps) * kTileRows; };
  const auto piece_of = [&](int row, int piece) {
    // Of the last row instead of one past it: nobody reads that sum.
    if (Model::kShardVocab % kTileRows != 0 && row >= rows) row = rows - 1;
    return reinterpret_cast<const uint4*>(w2 + row * pitch)[piece];
  };
  const uint4 zero = make_uint4(0, 0, 0, 0);
  float sums[kTiles][4] = {};
#pragma unroll
  for (int step = 0; step < E::kSteps; ++step) {
    const int piece = E::piece_of(step);
    const bool inside = E::has(step);
    const uint4 b = e.of[step];
    uint4 low[kTiles], high[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      low[n] = inside && tile_of(n) < rows ? piece_of(tile_of(n) + g, piece) : zero;
      high[n] = inside && tile_of(n) < rows ? piece_of(tile_of(n) + g + 8, piece) : zero;
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      mma_16x8x16(sums[n], {low[n].x, high[n].x, low[n].y, high[n].y}, b.x, b.y);
      mma_16x8x16(sums[n], {low[n].z, high[n].z, low[n].w, high[n].w}, b.z, b.w);
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (tile_of(n) < rows && wanted[j % 2])
        sums_of[warp % kSlices][2 * t + j % 2][tile_of(n) + g + j / 2 * 8] = sums[n][j];
}

// Draft i of the requests from `group` on: this CTA's best.
template <class Model, int kTiles>
__device__ inline void draft(const Batch& batch, const Sampling& s, int i, i64 group,
                             Ring<Model, PickShared<kTiles>::kRows>& ring, PickShared<kTiles>& shared) {
  constexpr int kParts = PickShared<kTiles>::kParts;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int count = batch.requests - group < kSampleRequests ? int(batch.requests - group) : kSampleRequests;
  // Piece n of this warp.
  const auto request_of = [&](int n) { return (n * kSampleWarps + warp) / kParts; };
  const auto at_of = [&](int n) { return (n * kSampleWarps + warp) % kParts * kWarp + lane; };
  i64 position[kParts];  // of the draft; -1: no work for this thread
  float temperature[kParts], base[kParts];
  Best best[kParts];
#pragma unroll
  for (int n = 0; n < kParts; ++n) {
    const bool is = request_of(n) < count;
    const i64 first = is ? s.first_position[group + request_of(n)] : -1;
    position[n] = first < 0 ? -1 : first + i;
    temperature[n] = Model::kProbabilistic && is ? batch.temperature[group + request_of(n)] : 0.0f;
    best[n] = no_best();
  }
  const auto row_of = [&](int n) { return (group + request_of(n)) * Model::kK + i; };
  const auto begin_chunk = [&] {  // what does not need the token
    const i64 first = ring.shard.first + ring.first_row();
    const int rows = ring.rows_of(ring.read.chunk);
#pragma unroll
    for (int n = 0; n < kParts; ++n)
      if (at_of(n) < rows && position[n] >= 0)
        base[n] = bf16_at(s.base, row_of(n) * Model::kShardVocab + first + at_of(n));
    if (!Model::kProbabilistic) return;
#pragma unroll 1  // a long text
    for (int n = 0; n < kParts && request_of(n) < count; ++n) {
      const i64 r = group + request_of(n), position_of = s.first_position[r] + i;
      if (at_of(n) >= rows || position_of < i || !(batch.temperature[r] >= 1e-5f)) continue;
      const DrawKey key = {u64(batch.seed[r]), u32(position_of), u32(batch.step[r])};
      shared.noise[request_of(n)][at_of(n)] = gumbel_at(key, u32(Model::kFirstToken + first + at_of(n)), kDraftStream);
    }
  };

  Embedding<Model> e;
#pragma unroll 1
  for (int c = 0; c < ring.chunks; ++c) {
    begin_chunk();
    if (c == 0) {
      const i32 token =
          warp < count ? token_before<Model>(s, batch.requests, group + warp, i, gridDim.x, lane, blockIdx.x == 0) : -1;
      if (lane == 0) shared.before[warp] = token;
      __syncthreads();  // before is there
      e.load(s.w1, shared.before);
    }
    auto& sums = shared.sums[c % 2];
    const i64 first = ring.shard.first + ring.first_row();
    const int rows = ring.rows_of(ring.read.chunk);
    ring.wait();
    sum_slice<Model, kTiles>(e, ring.rows(), ring.kPitchBytes / 2, rows, shared.before, sums);
    __syncthreads();  // sums are there, and the rows no longer read
    ring.next();
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      const int at = at_of(n);
      if (at >= rows || position[n] < 0) continue;
      const i64 v = first + at;
      float bias = 0;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) bias += sums[slice][request_of(n)][at];
      float l = base[n] + Model::kLogitScale * bias;
      if (Model::kProbabilistic && Model::kDraftLogitsBf16) {
        l = round_bf16(l);
        static_cast<u16*>(s.draft_logits)[row_of(n) * Model::kShardVocab + v] = to_bf16(l);
      } else if (Model::kProbabilistic) {
        static_cast<float*>(s.draft_logits)[row_of(n) * Model::kShardVocab + v] = l;
      }
      const float score = temperature[n] >= 1e-5f ? l * (1.0f / temperature[n]) + shared.noise[request_of(n)][at] : l;
      if (score > -infinity()) best[n] = better(best[n], {score, i32(Model::kFirstToken + v)});
    }
  }

#pragma unroll
  for (int n = 0; n < kParts; ++n) {
    if (request_of(n) >= count) continue;
    const Best found = warp_best(best[n]);
    if (lane == 0) shared.found[request_of(n)][at_of(n) / kWarp] = found;
  }
  __syncthreads();  // found is there; sums and before are no longer read
  if (warp >= count) return;
  const Best found = warp_best(lane < kParts ? shared.found[warp][lane] : no_best());
  if (lane == 0)
    store_relaxed_gpu(bests_of(s, batch.requests, group + warp, i, gridDim.x) + blockIdx.x, word_of(found));
  // One of the CTAs has the token: its W1 row comes closer while the others find that out.
  if (found.token >= 0 && i + 1 < Model::kK)
    for (int column = 64 * lane; column < Model::kMarkovRank; column += 64 * kWarp)
      prefetch_l2(s.w1 + i64(found.token) * Model::kMarkovRank + column);
}

// All drafts.   Grid up to the number of SMs, resident as a whole; block kSampleThreads.   memory: PickShared, then the
// ring of `stages` stages, of which the last one need be no longer than the rows that a CTA has for it.
template <class Model, int kTiles>
__device__ inline void picks(const Batch& batch, const Sampling& s, int stages, void* memory) {
  PickShared<kTiles>& shared = *static_cast<PickShared<kTiles>*>(memory);
  const Shard shard = shard_of<Model>(s);
  const i64 groups = (batch.requests + kSampleRequests - 1) / kSampleRequests;
  Ring<Model, PickShared<kTiles>::kRows> ring(shard, &shared + 1, shared.arrived, stages, Model::kK * groups);
  pdl_launch();
  pdl_wait();
  for (int i = 0; i < Model::kK; ++i)
    for (i64 group = 0; group < batch.requests; group += kSampleRequests)
      draft<Model, kTiles>(batch, s, i, group, ring, shared);
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
