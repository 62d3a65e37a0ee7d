// Verification of the drafts of one request (spec: drafter 8). Host arithmetic; allocates nothing.
#pragma once

#include <cstdint>
#include <span>

#include "drafter/sampling.h"
#include "twostep/drafter.h"

namespace twostep {

// Rows are FP32 or BF16, columns contiguous, of V = target.shape[1] >= 2 columns. NaN in them counts as -inf.
struct VerifyRequest {
  std::span<const std::int32_t> drafts;  // k ids. The first that is not in 0..V-1 ends the block, which leaves k_r
  TensorView target;                     // [k_r + 1 rows or more, V], after all sampling parameters, temperature too
  TensorView draft_logits;               // [k_r rows or more, V], which the drafts were drawn from; no data: one-hot
  float temperature = 0;                 // that of the drafts; below 1e-5 the request is greedy
  DrawKey key;                           // position: s_0, that of the anchor
};

struct VerifyResult {
  int accepted_drafts = 0;  // tau, 0..k_r
  bool nonfinite = false;   // a row of an emitted token had no value above -inf; token 0 is its only choice
  int accepted() const { return accepted_drafts + 1; }
};

// Writes the accepted() tokens to `emitted` [k + 1], then -1. At temperature 0 they are those of greedy decoding with
// target, whatever drafts and draft_logits hold. Above it their law is that of sampling from softmax(target row) one
// token at a time, if the drafts were drawn from softmax(draft row / temperature) by pick_draft, or are any (one-hot).
// The next step has position s_0 + accepted() and must have another `step`.
//   p, q  logarithms of softmax(target row) and softmax(fl32(draft row * fl32(1/temperature))) in FP64. A row with no
//         value above -inf is all on token 0, one with +inf all on the lowest id that has it: what pick_draft draws
//   u_i   uniform of kAcceptStream at position s_i; the token after the accepted ones is a Gumbel-max draw of
//         kResampleStream at position s_tau, lowest id on ties
VerifyResult verify(VerifyMethod method, const VerifyRequest& request, std::span<std::int32_t> emitted);

}  // namespace twostep
