// The kernels of PreparedKda that the emulator runs.
#pragma once

#include <string>
#include <vector>

#include "kda/tactics.h"

namespace twostep {

inline std::vector<KdaBuild> emulated_kda() {
  struct Case {
    int tokens, conv_len;
    bool dim_first, lower_bound, bias, early_caches, records;
    KdaTactic tactic;
  };
  std::vector<KdaBuild> builds;
  for (const Case& c : {
           Case{1, 3, false, true, false, false, false, {1, 4, 1}},
           {1, 3, true, false, true, true, false, {4, 4, 2}},
           {1, 10, false, true, false, false, true, {1, 8, 4}},
           {1, 6, true, false, true, false, true, {2, 8, 1}},
           {2, 4, false, false, true, false, false, {8, 4, 1}},
           {4, 6, true, true, false, false, false, {1, 8, 2}},
           {4, 6, false, true, true, true, true, {2, 4, 2}},
           {5, 7, false, false, false, false, true, {1, 4, 4}},
           {8, 10, false, true, false, false, false, {1, 16, 2}},
           {8, 10, false, true, false, false, true, {1, 8, 4}},
           {8, 10, true, false, true, false, true, {4, 8, 1}},
           {8, 10, false, true, false, false, true, {8, 8, 1}},
           {8, 10, false, true, false, false, false, {4, 16, 2}},
           {6, 8, true, true, false, false, true, {1, 16, 4}},
           {1, 3, false, true, false, false, false, {2, 16, 2}},
           {8, 10, false, true, false, false, true, {1, 16, 4, true}},
           {4, 10, true, false, true, true, true, {1, 16, 4, true}},
           {3, 5, false, false, true, false, true, {1, 16, 4, true}},
           {5, 7, true, true, false, false, true, {1, 16, 4, true}},
       }) {
    KdaBuild build;
    build.heads = 2;
    build.tokens = c.tokens;
    build.conv_len = c.conv_len;
    build.conv_dim_first = c.dim_first;
    build.lower_bound = c.lower_bound;
    build.bias = c.bias;
    build.early_caches = c.early_caches;
    build.records = c.records;
    build.row_stride = kda_row_stride(build.heads);
    build.tactic = c.tactic;
    builds.push_back(build);
  }
  return builds;
}

}  // namespace twostep
