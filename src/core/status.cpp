#include "twostep/status.h"

namespace twostep {

std::string_view code_name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return "ok";
    case StatusCode::kInvalidArgument: return "invalid_argument";
    case StatusCode::kUnsupported: return "unsupported";
    case StatusCode::kBadLayout: return "bad_layout";
    case StatusCode::kOverlap: return "overlap";
    case StatusCode::kWrongDevice: return "wrong_device";
    case StatusCode::kWeightChanged: return "weight_changed";
    case StatusCode::kCapturing: return "capturing";
    case StatusCode::kNotPrepared: return "not_prepared";
    case StatusCode::kUnavailable: return "unavailable";
    case StatusCode::kOutOfMemory: return "out_of_memory";
    case StatusCode::kCompileFailed: return "compile_failed";
    case StatusCode::kDeviceError: return "device_error";
    case StatusCode::kPeerLost: return "peer_lost";
    case StatusCode::kDataError: return "data_error";
    case StatusCode::kInternal: return "internal";
  }
  return "internal";
}

std::string Status::message() const {
  if (ok()) return "ok";
  std::string text = place;
  if (!argument.empty()) text += (text.empty() ? "" : ": ") + argument;
  if (!value.empty()) text += (argument.empty() ? ": " : " = ") + value;
  if (!accepted.empty()) text += "; accepted: " + accepted;
  if (!remedy.empty()) text += "; " + remedy;
  return text;
}

Error::Error(Status status) : status_(std::move(status)), text_(status_.message()) {}

}  // namespace twostep
