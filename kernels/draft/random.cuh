// Random words of a request and the noise that is made of them (spec: drafter 7); as src/drafter/philox.h.
#pragma once

#include "common/ptx.cuh"

namespace twostep::draft {

constexpr u32 kDraftStream = 1, kAcceptStream = 2, kResampleStream = 3;

struct DrawKey {
  u64 seed;
  u32 position, step;
};

struct Words {
  u32 w[4];
};

// Philox4x32-10: the words of the indices 4 * quad to 4 * quad + 3.
__device__ inline Words philox(const DrawKey& key, u32 quad, u32 stream) {
  u32 c0 = quad, c1 = key.position, c2 = key.step, c3 = stream;
  u32 low = u32(key.seed), high = u32(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 a = u64(0xd2511f53u) * c0, b = u64(0xcd9e8d57u) * c2;
    c0 = u32(b >> 32) ^ c1 ^ low;
    c1 = u32(b);
    c2 = u32(a >> 32) ^ c3 ^ high;
    c3 = u32(a);
    low += 0x9e3779b9u;
    high += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

__device__ inline float uniform(u32 word) {
  return fminf(__fadd_rn(float(word) * 2.3283064365386963e-10f, 1.1641532182693481e-10f), 0.999999940395355225f);
}
__device__ inline float gumbel(u32 word) { return -logf(-log1pf(-uniform(word))); }

// Of one index: the word of its quad, chosen by selects, since an index would put the quad into local memory.
__device__ inline float gumbel_at(const DrawKey& key, u32 index, u32 stream) {
  const Words words = philox(key, index >> 2, stream);
  const u32 even = index & 2 ? words.w[2] : words.w[0], odd = index & 2 ? words.w[3] : words.w[1];
  return gumbel(index & 1 ? odd : even);
}

// A score and its token; the better one is larger, then lower. Token -1: nothing above -inf.
struct alignas(8) Best {
  float score;
  int token;
};
__device__ inline Best no_best() { return {-infinity(), -1}; }
// Without a branch, so that loads of several bests need not wait for each other.
__device__ inline Best better(Best a, Best b) {
  const bool larger = (b.score > a.score) | ((b.score == a.score) & (b.token < a.token));
  const bool wins = (b.token >= 0) & ((a.token < 0) | larger);
  return {wins ? b.score : a.score, wins ? b.token : a.token};
}
__device__ inline Best warp_best(Best best) {
  for (int lane = 16; lane > 0; lane /= 2)
    best =
        better(best, {__shfl_xor_sync(0xffffffffu, best.score, lane), __shfl_xor_sync(0xffffffffu, best.token, lane)});
  return best;
}

}  // namespace twostep::draft
