// For tests of what is refused.
#pragma once

#include "twostep/status.h"

namespace twostep::test {

// The code of the Error that `work` throws; kOk where it throws none.
template <class Work>
StatusCode code_of(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.code();
  }
  return StatusCode::kOk;
}

}  // namespace twostep::test
