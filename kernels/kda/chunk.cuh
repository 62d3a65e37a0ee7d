// The delta rule of several tokens at once (the chunk form: arxiv.org/abs/2406.06484, with the decay per key of
// arxiv.org/abs/2510.26692). S0 is the state before the tokens, D_t the product of the decays of tokens 0 .. t, w_ts
// that of tokens s + 1 .. t:
//
//   p_t = S0 (D_t k_t) + sum over s < t of u_s (k_s . w_ts k_t);  u_t = beta_t (v_t - p_t)
//   o_t = S0 (D_t q_t) + sum over s <= t of u_s (k_s . w_ts q_t)
//
// So the state is read once for all tokens, on the tensor cores, and what waits for the token before is two numbers of
// a row. Here: `combine_tokens` (D k, D q, and the products of keys), `Tile` (rows of the state), `solve_row`.
//
// Both state modes must get the same bits from the same tactic, as two kernels: where the compiler could choose what to
// fuse, the operations are written as intrinsics.
#pragma once

#include "kda/vectors.cuh"

namespace twostep::kda {

// Sums over kLanes neighbouring lanes of kValues values, both powers of two: a lane gets that of value lane * kValues /
// kLanes. Each exchange halves what is left to add.
template <int kLanes, int kValues, int kSize>
__device__ inline float sum_scattered(float (&v)[kSize], int lane) {
  if constexpr (kLanes == 1) {
    return v[0];
  } else if constexpr (kValues == 1) {
    v[0] += __shfl_xor_sync(~0u, v[0], kLanes / 2);
    return sum_scattered<kLanes / 2, 1>(v, lane);
  } else {
    const bool upper = lane & kLanes / 2;
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const float low = v[i], high = v[i + kValues / 2];
      v[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, kLanes / 2);
    }
    return sum_scattered<kLanes / 2, kValues / 2>(v, lane);
  }
}

// Rows of 128 that a token has in shared memory.
enum TokenRow { kKey, kQuery, kDecay };
constexpr int kTokenPitch = 3 * kDim;
constexpr int kChunk = 8;  // coefficients of a token: 8 of its p, 8 of its o

// D k and D q are read by tokens side by side, each a piece of 16 keys: odd tokens have the pieces of a pair swapped,
// so that they do not meet in the same banks.
__device__ inline int swapped(int token) { return token % 2 * 16; }

// Of token t, by a warp, four neighbouring keys per lane: D k and D q, which takes the place of q, and what u of the
// tokens before counts in its p and o.
__device__ inline void combine_tokens(float* tokens, float* decayed_keys, float* coefficients, int t, int lane) {
  const auto row = [&](int s, TokenRow which) {
    return reinterpret_cast<float4*>(tokens + s * kTokenPitch + which * kDim) + lane;
  };
  const float4 k = *row(t, kKey), q = *row(t, kQuery);
  float4 w = {1, 1, 1, 1};
  // Four tokens at a time, the last ones first: eight sums share the exchanges between lanes.
#pragma unroll 1
  for (int first = t / 4 * 4; first >= 0; first -= 4) {
    float sums[8] = {};
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      const int s = first + i;
      if (s > t) continue;
      const float4 seen = multiplied(w, *row(s, kKey));
      sums[i] = dot(seen, k);
      sums[4 + i] = dot(seen, q);
      w = multiplied(w, *row(s, kDecay));
    }
    const float sum = sum_scattered<32, 8>(sums, lane);
    if (lane % 4 == 0) coefficients[t * 2 * kChunk + lane / 16 * kChunk + first + lane / 4 % 4] = sum;
  }
  __syncwarp();  // q is read
  const int to = lane * 4 ^ swapped(t);
  *reinterpret_cast<float4*>(decayed_keys + t * kDim + to) = multiplied(w, k);
  *reinterpret_cast<float4*>(tokens + t * kTokenPitch + kQuery * kDim + to) = multiplied(w, q);
}

// The part of a warp of 16 rows of the state: 32 kParts keys of each. Lane 4 r + c has rows r and r + 8,
// of every 16 keys the four from 4 c on: the order in which mma.sync names them does not matter, as long as the vectors
// follow it.
template <int kParts>
struct Tile {
  static constexpr int kGroups = 2 * kParts;  // of 16 keys
  float4 s[2][kGroups];

  // `from`: the tile's first row and the warp's first key in shared memory. Two neighbouring rows would meet in the
  // same banks: odd ones take the two groups of a pair in the other order.
  __device__ void load(u32 from, int lane) {
    const bool odd = lane / 4 % 2;
    from += (lane / 4 * kDim + lane % 4 * 4) * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int g = 0; g < kGroups; g += 2) {
        const u32 at = from + (half * 8 * kDim + g * 16) * 4;
        const float4 a = load_shared_float4(at + (odd ? 64 : 0)), b = load_shared_float4(at + (odd ? 0 : 64));
        s[half][g] = odd ? b : a;
        s[half][g + 1] = odd ? a : b;
      }
  }
  // `to`: the tile's first row and the warp's first key.
  __device__ void store(float* to, int lane) const {
    to += lane / 4 * kDim + lane % 4 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int g = 0; g < kGroups; ++g) store_streaming(to + half * 8 * kDim + g * 16, s[half][g]);
  }
  // One token: S = S decay + u k^T. k and decay from the warp's first key on, u from the tile's first row on.
  __device__ void update(const float* k, const float* decay, const float* u, int lane) {
    const float low = u[lane / 4], high = u[lane / 4 + 8];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float4 key = *reinterpret_cast<const float4*>(k + g * 16 + lane % 4 * 4);
      const float4 d = *reinterpret_cast<const float4*>(decay + g * 16 + lane % 4 * 4);
      s[0][g] = multiply_add({low, low, low, low}, key, multiplied(s[0][g], d));
      s[1][g] = multiply_add({high, high, high, high}, key, multiplied(s[1][g], d));
    }
  }
  // sums[i][16 rows x 8] = S vectors over the warp's keys; vectors[i]: of lane / 4, which is `token`'s, from the warp's
  // first key on. FP32 as 11 bits and what is left: three products of four, for the last is below FP32's rounding. The
  // small ones have a sum of their own.
  template <int kSums>
  __device__ void multiply(const u32 (&vectors)[kSums], int token, float (&sums)[kSums][4], int lane) const {
    const int swap = swapped(token) * 4;
    float small[kSums][4] = {};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float4 v[kSums];
#pragma unroll
      for (int i = 0; i < kSums; ++i) v[i] = load_shared_float4(vectors[i] + lane % 4 * 16 + (g * 64 ^ swap));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 low = s[0][g], high = s[1][g];
        const float a[4] = {half ? low.z : low.x, half ? high.z : high.x, half ? low.w : low.y, half ? high.w : high.y};
        float heads[4], tails[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) heads[e] = head(a[e]), tails[e] = a[e] - heads[e];
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const float b0 = half ? v[i].z : v[i].x, b1 = half ? v[i].w : v[i].y;
          mma_16x8x8(sums[i], heads, head(b0), head(b1));
          mma_16x8x8(small[i], tails, head(b0), head(b1));
          mma_16x8x8(small[i], heads, b0 - head(b0), b1 - head(b1));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][e] += small[i][e];
  }

 private:
  __device__ static float head(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
};

// u and o of one row, token lane % 8 in each of eight lanes: r = beta (v - S0 D k), o = S0 D q; of_p is -beta times the
// token's coefficients. Tokens at or behind this one do not count, whatever they hold.
template <int kTokens, int kRows>
__device__ inline void solve_rows(float (&r)[kRows], float (&o)[kRows], const float (&of_p)[kChunk],
                                  const float (&of_o)[kChunk], int lane) {
#pragma unroll
  for (int s = 0; s < kTokens; ++s)
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float u = __shfl_sync(~0u, r[i], s, 8);
      if (lane % 8 > s) r[i] = __fmaf_rn(of_p[s], u, r[i]);
      if (lane % 8 >= s) o[i] = __fmaf_rn(of_o[s], u, o[i]);
    }
}

}  // namespace twostep::kda
