// Decode MLA by the warpgroup multiplies of sm_90a: what `attend` of attention.cuh computes, with queries as columns.
//
//   scores^T [64 keys, Q queries] = keys [64, kCacheWidth] . q [Q, kCacheWidth]^T
//   o^T [kKvLora, Q queries]     += keys [64, 0 .. kKvLora - 1]^T . p [Q, 64 keys]^T
//
// A tile of keys lies in shared memory once, in chunks of 64 columns, and both products read it there: the one as rows,
// the other as columns. Q is 48, for the 84 queries of 7 rows of 12 heads are two CTAs, or 64 where there are so many
// queries that wider tiles of them leave fewer keys to each CTA (Model). Two warpgroups share each tile: of the
// scores each sums half of the columns of q, and then has half of the queries for the softmax; of o each has half of
// the columns, in registers. The next tile is fetched meanwhile, each in thirds: the first one is multiplied as it
// arrives.
#pragma once

#include "common/sm90_wgmma.cuh"
#include "draft/keys.cuh"

namespace twostep::draft {

constexpr int kGroups = 2;  // warpgroups
constexpr int kGroupThreads = 128;
constexpr int kSm90AttendThreads = kGroups * kGroupThreads;
constexpr int kChunk = 64;  // columns: a swizzled row of 128 bytes
constexpr float kSlack = 8;

template <class Model>
struct Sm90AttendShared {
  static constexpr int kQueryColumns = Model::kQueryColumns;
  static constexpr int kChunks = Model::kCacheWidth / kChunk;
  static constexpr int kOfGroup = kQueryColumns / kGroups;
  static constexpr int kSumsPitch = Model::kKvLora + 8;  // elements: the rows of a matrix fall into other banks
  u16 q[kChunks][kQueryColumns][kChunk];
  u16 keys[2][kChunks][kKeys][kChunk];  // of two tiles; at the end, o [kQueryColumns][kSumsPitch]
  union {
    float4 scores[kOfGroup / 8][kGroupThreads];  // of the first group, for the second one
    u16 p[kQueryColumns][kKeys];
  };
  float of_warp[4][kQueryColumns];  // largest score of a warp's keys; at the end, its sum
  float base[2][kQueryColumns];     // what a tile's exponentials are taken from: before it, and after, by turns
  float shrink[kQueryColumns];      // of what was summed before the tile
  i64 place[kKeys];                 // in the cache, in elements
  int state[2][kKeys];
  signed char first_seen[kQueryColumns], last_seen[kQueryColumns];  // keys of the tile; -1: before it
};

// Where a piece of 8 elements lies in a row of 64.
__device__ inline int swizzled(int row, int piece) { return 8 * (piece ^ row % 8); }

// As attend(). Grid (k * heads / Model::kQueryColumns rounded up, splits, R), block
// kSm90AttendThreads, dynamic shared memory sizeof(Sm90AttendShared<Model>), a multiple of 1024 bytes from its start.
template <class Model, bool kCausal>
__device__ inline void sm90_attend(const Batch& batch, const u16* q, const i64* position, const i64* end, Cache cache,
                                   i64 window, int splits, u16* o, u16* sums, PartStats* stats, void* memory) {
  using Shared = Sm90AttendShared<Model>;
  constexpr int kRows = Model::kK * Model::kHeads;  // query rows of a request
  constexpr int kQueryColumns = Model::kQueryColumns;
  constexpr int kChunks = Shared::kChunks, kPieces = 8 * kChunks;
  constexpr int kWhole = kChunks / 2, kSecond = kChunks - kWhole;  // chunks of a group's scores, from this one on
  constexpr int kThird = (kSecond + 2) / 3;                     // of these and the one in the middle, fetched together
  constexpr int kBlocks = Model::kKvLora / (kGroups * kChunk);  // of o^T of a group
  constexpr int kColumns = kQueryColumns / 4;                   // of a thread: 8 g + 2 (lane % 4) and the next one
  constexpr int kOwn = kColumns / kGroups;                      // of them, those of its group's softmax
  constexpr float kLogScale = kLog2E * Model::kScale;
  static_assert(Model::kCacheWidth % kChunk == 0 && Model::kKvLora % (kGroups * kChunk) == 0);
  static_assert(kQueryColumns % 16 == 0 && kQueryColumns <= kChunk);  // half of the scores fit into a chunk of keys
  static_assert(kGroups * 4 == kSlabs && sizeof(Shared::keys) >= 2 * kQueryColumns * Shared::kSumsPitch);
  constexpr int kTileBytes = 2 * kKeys * kChunk, kQBytes = 2 * kQueryColumns * kChunk;  // of a chunk
  auto& s = *static_cast<Shared*>(memory);
  const int group = warp_uniform(threadIdx.x / kGroupThreads), thread = threadIdx.x % kGroupThreads;
  const int warp = thread / kWarp, lane = thread % kWarp;
  const int first_row = blockIdx.x * kQueryColumns;
  const int split = blockIdx.y;
  const i64 r = blockIdx.z;
  pdl_launch();
  pdl_wait();

  // ---- Find and fetch keys
  const KeysOfPart<Model, kCausal> part(position, end, window, splits, split, r);
  const auto find = [&](u32 tile, int stage) {
    if (threadIdx.x >= kKeys) return;
    const i64 place = part.place_of(batch, cache, r, tile + threadIdx.x);
    s.place[threadIdx.x] = place;
    s.state[stage][threadIdx.x] = place < 0 ? kUnseen : kSeen;
  };
  const auto fetch = [&](u32 tile, int stage) {  // three groups of copies, whatever there is
    const int piece = threadIdx.x % 8;
    constexpr int kAtOnce = kSm90AttendThreads / 8, kOfThread = kKeys / kAtOnce;
    const u16* from[kOfThread];
    bool is[kOfThread];
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const i64 place = s.place[threadIdx.x / 8 + i * kAtOnce];
      is[i] = place >= 0;
      from[i] = cache.data + (is[i] ? place : 0) + 8 * piece;
    }
    const auto to = smem_address(&s.keys[stage][0][threadIdx.x / 8][swizzled(threadIdx.x / 8, piece)]);
#pragma unroll
    for (int third = 0; third < 3; ++third) {
      if (tile < part.stop) {
#pragma unroll
        for (int of_half = third * kThird; of_half < kSecond && of_half < (third + 1) * kThird; ++of_half)
#pragma unroll
          for (int c = of_half; c < kChunks; c += kSecond)  // the one in the middle comes last
#pragma unroll
            for (int i = 0; i < kOfThread; ++i)
              copy_async(to + c * kTileBytes + i * kAtOnce * 2 * kChunk, from[i] + kChunk * c, is[i]);
      }
      copy_async_commit();
    }
  };
  find(part.begin, 0);
  const i64 own = threadIdx.x < kQueryColumns ? part.position_of(first_row + int(threadIdx.x)) : i64(-1);

  // ---- Load q while the first keys are looked up
  const u16* q_rows = q + (r * kRows + first_row) * Model::kCacheWidth;
  const int q_piece = threadIdx.x % 8;
#pragma unroll 1
  for (int row = threadIdx.x / 8; row < kQueryColumns; row += kSm90AttendThreads / 8) {
    const bool is = first_row + row < kRows;
    const u16* from = q_rows + (is ? row : 0) * Model::kCacheWidth + 8 * q_piece;
    const auto to = smem_address(&s.q[0][row][swizzled(row, q_piece)]);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) copy_async(to + c * kQBytes, from + kChunk * c, is);
  }
  __syncthreads();  // places are there
  fetch(part.begin, 0);
  if (part.begin + kKeys < part.stop) {
    __syncthreads();  // places may be written again
    find(part.begin + kKeys, 1);
    __syncthreads();  // places are there
  }
  fetch(part.begin + kKeys, 1);
  if (threadIdx.x < kQueryColumns) s.base[0][threadIdx.x] = -infinity();

  const u64 q_of = wgmma_operand(smem_address(s.q)), p_of = wgmma_operand(smem_address(s.p));
  float acc[kBlocks][2 * kColumns] = {};  // [64 columns of o][4 g + 2 (row + 8) + (column + 1)]
  float total[kOwn] = {};                 // of exponentials of this thread's keys
  int stage = 0;
  for (u32 tile = part.begin; tile < part.stop; tile += kKeys) {
    const u64 keys_of = wgmma_operand(smem_address(s.keys[stage]));
    const bool is_first = tile == part.begin, is_edge = part.is_edge(tile);
    const auto next_third = [&](bool last) {
      if (is_first) {
        last ? copy_async_wait<3>() : copy_async_wait<4>();
        fence_proxy_async();
        __syncthreads();  // the next third of the first keys is there
      }
      wgmma_fence();
    };
    if (!is_first) copy_async_wait<0>();
    else if (is_edge) copy_async_wait<3>();
    else copy_async_wait<5>();  // its first third
    fence_proxy_async();
    __syncthreads();  // keys are there
    if (is_edge) {
      clear_spoilt<kSm90AttendThreads / kWarp, kPieces>(part, tile, s.state[stage], [&](int key, int i) -> uint4& {
        return *reinterpret_cast<uint4*>(&s.keys[stage][i / 8][key][8 * (i % 8)]);
      });
      if (threadIdx.x < kQueryColumns) {
        const auto seen = part.seen_by(own, tile);
        s.first_seen[threadIdx.x] = static_cast<signed char>(seen.first);
        s.last_seen[threadIdx.x] = static_cast<signed char>(seen.last);
      }
      fence_proxy_async();
      __syncthreads();  // what was spoilt is told
    }

    // ---- Scores: half of the columns of q, for all queries; then all of them for half of the queries
    float part_of[2 * kColumns] = {};
    wgmma_fence(part_of);
    wgmma_fence();
    const u64 keys_of_half = wgmma_further(keys_of, group * kSecond * kTileBytes);
    const u64 q_of_half = wgmma_further(q_of, group * kSecond * kQBytes);
#pragma unroll
    for (int i = 0; i < 4 * kWhole; ++i) {
      if (i == 4 * kThird || i == 8 * kThird) next_third(i == 8 * kThird);
      wgmma(part_of, wgmma_further(keys_of_half, i / 4 * kTileBytes + i % 4 * 32),
            wgmma_further(q_of_half, i / 4 * kQBytes + i % 4 * 32));
    }
    if (kSecond > kWhole) {  // half of the chunk in the middle
      if (kWhole % kThird == 0) next_third(kWhole == 2 * kThird);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        wgmma(part_of, wgmma_further(keys_of, kWhole * kTileBytes + (2 * group + i) * 32),
              wgmma_further(q_of, kWhole * kQBytes + (2 * group + i) * 32));
    }
    wgmma_commit();
    if (!is_first) fetch(tile + kKeys, stage ^ 1);  // into the tile before this one, while scores are made
    wgmma_wait<0>();
    wgmma_fence(part_of);
    // What the second group gives lies in the last chunk of the tile: it alone has read that, and o does not need it.
    if (group == 1) named_barrier(1, kGroupThreads);  // all of its warps have
    auto* given = group == 0 ? &s.scores[0][thread] : reinterpret_cast<float4*>(s.keys[stage][kChunks - 1]) + thread;
    auto* taken = group == 1 ? &s.scores[0][thread] : reinterpret_cast<float4*>(s.keys[stage][kChunks - 1]) + thread;
#pragma unroll
    for (int g = 0; g < kOwn / 2; ++g) {
      const float *first = &part_of[4 * g], *second = &part_of[2 * kOwn + 4 * g];  // queries of each group
      given[g * kGroupThreads] = group == 1 ? make_float4(first[0], first[1], first[2], first[3])
                                            : make_float4(second[0], second[1], second[2], second[3]);
    }
    __syncthreads();  // scores for the other group are there
    float score[2 * kOwn];
#pragma unroll
    for (int g = 0; g < kOwn / 2; ++g) {
      const float4 other = taken[g * kGroupThreads];
      const float of_other[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        score[4 * g + i] = of_other[i] + (group == 0 ? part_of[4 * g + i] : part_of[2 * kOwn + 4 * g + i]);
    }

    // ---- Softmax, over the rows
    const int first_column = group * Shared::kOfGroup + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = 16 * warp + lane / 4 + 8 * half;
      const int state = s.state[stage][key];
      if (state == kSeen && !is_edge) continue;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        float& of = score[i / 2 * 4 + 2 * half + i % 2];
        const int column = first_column + i / 2 * 8 + i % 2;
        if (state != kSeen) of = state == kUnseen ? -infinity() : not_a_number();
        if (is_edge && (key < s.first_seen[column] || key > s.last_seen[column])) of = -infinity();
      }
    }
    float most[kOwn];  // the largest score of a column; then what its exponentials are taken from
#pragma unroll
    for (int i = 0; i < kOwn; ++i) most[i] = fmaxf(score[i / 2 * 4 + i % 2], score[i / 2 * 4 + 2 + i % 2]);
#pragma unroll
    for (int step = 4; step < kWarp; step *= 2)
#pragma unroll
      for (int i = 0; i < kOwn; ++i) most[i] = fmaxf(most[i], __shfl_xor_sync(0xffffffffu, most[i], step));
    if (lane < 4) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) s.of_warp[warp][first_column + i / 2 * 8 + i % 2] = most[i];
    }
    __syncthreads();  // the largest scores of the warps are there, and scores have been taken
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int column = first_column + i / 2 * 8 + i % 2;
      float best =
          fmaxf(fmaxf(s.of_warp[0][column], s.of_warp[1][column]), fmaxf(s.of_warp[2][column], s.of_warp[3][column]));
      // A new base only where it is much larger: exponentials stay below 2^kSlack, and most sums as they are.
      const float before = s.base[stage][column];
      best = kLogScale * best > before + kSlack ? kLogScale * best : before;
      most[i] = best == -infinity() ? 0.0f : best;
      const float shrink = before == best ? 1.0f : exp2_approx(before - best);
      total[i] *= shrink;
      if (thread < 4) {
        s.base[stage ^ 1][column] = best;
        s.shrink[column] = shrink;
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kOwn; ++i) score[i] = exp2_approx(fmaf(score[i], kLogScale, -most[i / 4 * 2 + i % 2]));
    const auto p_rows =
        smem_address(&s.p[group * Shared::kOfGroup + lane % 8][swizzled(lane % 8, 2 * warp + lane / 8 % 2)]);
#pragma unroll
    for (int g = 0; g < kOwn / 2; ++g) {
      total[2 * g] += score[4 * g] + score[4 * g + 2];
      total[2 * g + 1] += score[4 * g + 1] + score[4 * g + 3];
      store_matrices_transposed(p_rows + g * 8 * 2 * kKeys, pack_bf16(score[4 * g], score[4 * g + 1]),
                                pack_bf16(score[4 * g + 2], score[4 * g + 3]));
    }
    fence_proxy_async();
    __syncthreads();  // p and shrink are there

    // ---- Sums, while the places of the keys after the next ones are looked up
    bool shrinks = false;
    float2 shrink[kColumns / 2];
#pragma unroll
    for (int g = 0; g < kColumns / 2; ++g) {
      shrink[g] = *reinterpret_cast<const float2*>(&s.shrink[8 * g + lane % 4 * 2]);
      shrinks |= shrink[g].x != 1 || shrink[g].y != 1;
    }
    if (shrinks) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m)
#pragma unroll
        for (int i = 0; i < 2 * kColumns; ++i) acc[m][i] *= i % 2 == 0 ? shrink[i / 4].x : shrink[i / 4].y;
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) wgmma_fence(acc[m]);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < kBlocks; ++m)
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step)
        wgmma_columns(acc[m], wgmma_further(keys_of, (group * kBlocks + m) * kTileBytes + 2048 * step),
                      wgmma_further(p_of, 32 * step));
    wgmma_commit();
    const u32 next = tile + 2 * kKeys;
    if (next < part.stop) find(next, stage);
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) wgmma_fence(acc[m]);
    __syncthreads();  // places are there, and the tile is no longer read
    stage ^= 1;
  }

  copy_async_wait<0>();  // q of an empty part, too

  // ---- Totals
#pragma unroll
  for (int step = 4; step < kWarp; step *= 2)
#pragma unroll
    for (int i = 0; i < kOwn; ++i) total[i] += __shfl_xor_sync(0xffffffffu, total[i], step);
  if (lane < 4) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) s.of_warp[warp][group * Shared::kOfGroup + lane * 2 + i / 2 * 8 + i % 2] = total[i];
  }
  __syncthreads();  // the sums of the warps are there, and no keys are read

  // ---- Scale: o by its total; of a part, by the largest value of its slab, which FP16 then holds to 2^-12
  const auto total_of = [&](int row) {
    return s.of_warp[0][row] + s.of_warp[1][row] + s.of_warp[2][row] + s.of_warp[3][row];
  };
  const i64 first_of_part = (r * splits + split) * kRows + first_row;  // where splits is 1, of o
  float scale[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
    if (splits == 1) {
      const float sum = total_of(row);
      scale[i] = sum == 0 ? 0.0f : reciprocal(sum);  // a row that sees nothing gives 0
      continue;
    }
    float largest = 0;
#pragma unroll
    for (int m = 0; m < kBlocks; ++m)
      largest = fmaxf(largest, fmaxf(fabsf(acc[m][i / 2 * 4 + i % 2]), fabsf(acc[m][i / 2 * 4 + 2 + i % 2])));
#pragma unroll
    for (int step = 4; step < kWarp; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    scale[i] = largest < kLeastSlab ? 0.0f : largest > kLargestSlab ? not_a_number() : reciprocal(largest);
    if (lane < 4 && first_row + row < kRows) stats[first_of_part + row].scale[4 * group + warp] = largest;
  }

  // ---- Store, through shared memory: there the rows of o^T become columns
  auto* o_of = reinterpret_cast<u16*>(s.keys);
  const auto o_rows =
      smem_address(&o_of[lane % 8 * Shared::kSumsPitch + group * kBlocks * kChunk + 16 * warp + lane / 8 % 2 * 8]);
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (int g = 0; g < kColumns / 2; ++g) {
      const auto pack = [&](int half) {
        const float a = acc[m][4 * g + 2 * half] * scale[2 * g], b = acc[m][4 * g + 2 * half + 1] * scale[2 * g + 1];
        return splits == 1 ? pack_bf16(a, b) : pack_f16(a, b);
      };
      store_matrices_transposed(o_rows + 2 * (kChunk * m + 8 * g * Shared::kSumsPitch), pack(0), pack(1));
    }
  if (splits > 1 && threadIdx.x < kQueryColumns && first_row + int(threadIdx.x) < kRows) {
    stats[first_of_part + threadIdx.x].base = s.base[stage][threadIdx.x];
    stats[first_of_part + threadIdx.x].total = total_of(threadIdx.x);
  }
  __syncthreads();  // o is there
  constexpr int kVectors = Model::kKvLora / 8;
  const int rows = kRows - first_row < kQueryColumns ? kRows - first_row : kQueryColumns;
  auto* to = reinterpret_cast<uint4*>((splits == 1 ? o : sums) + first_of_part * Model::kKvLora);
  for (int i = threadIdx.x; i < rows * kVectors; i += kSm90AttendThreads)
    to[i] = *reinterpret_cast<const uint4*>(&o_of[i / kVectors * Shared::kSumsPitch + i % kVectors * 8]);
}

}  // namespace twostep::draft
