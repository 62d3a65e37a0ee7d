// One way to refuse: throws Error with the fields of a Status.
#pragma once

#include <string>
#include <utility>

#include "twostep/status.h"

namespace twostep {

inline Status refusal(StatusCode code, std::string place, std::string argument, std::string value, std::string accepted,
                      std::string remedy = {}) {
  return {code, std::move(place), std::move(argument), std::move(value), std::move(accepted), std::move(remedy)};
}

[[noreturn]] inline void fail(Status status) { throw Error(std::move(status)); }

[[noreturn]] inline void fail(StatusCode code, std::string place, std::string argument, std::string value,
                              std::string accepted, std::string remedy = {}) {
  throw Error(
      refusal(code, std::move(place), std::move(argument), std::move(value), std::move(accepted), std::move(remedy)));
}

inline void throw_if_error(const Status& status) {
  if (!status.ok()) throw Error(status);
}

}  // namespace twostep
