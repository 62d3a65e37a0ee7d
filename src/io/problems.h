// Many refusals, one Error: a reader that checks a whole file tells all that is wrong with it.
#pragma once

#include <vector>

#include "core/check.h"

namespace twostep {

// Throws nothing for an empty list. Else an Error with the fields of the first problem; the sentences of the
// others follow in its remedy. One bad value outweighs what is merely not served: kUnsupported only if all are.
inline void throw_if_any(const std::vector<Status>& problems) {
  if (problems.empty()) return;
  Status all = problems.front();
  for (std::size_t i = 1; i < problems.size(); ++i) {
    const Status& next = problems[i];
    if (all.code == StatusCode::kUnsupported) all.code = next.code;
    all.remedy += (all.remedy.empty() ? "also " : "; also ") + Status(next).message();
  }
  fail(std::move(all));
}

}  // namespace twostep
