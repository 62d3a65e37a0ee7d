// Status, StatusCode, Error: the one error vocabulary of twostep (spec: style 6).
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace twostep {

enum class StatusCode {
  kOk,
  kInvalidArgument,  // breaks the contract
  kUnsupported,      // valid, but not served here
  kBadLayout,        // strides, pitch or alignment
  kOverlap,          // an output meets an input
  kWrongDevice,      // an operand lives on another device than the plan
  kWeightChanged,    // not the weight that was bound
  kCapturing,        // not allowed while a stream captures
  kNotPrepared,      // run met a key that prepare did not
  kUnavailable,      // no driver, NVRTC, cuBLASLt, GPU or peer access
  kOutOfMemory,
  kCompileFailed,  // with NVRTC's log
  kDeviceError,    // a driver call failed: call, place, code name, text
  kPeerLost,       // which rank, which epoch, how long
  kDataError,      // file, tensor, offset
  kInternal,       // a defect of twostep
};

// The code's name without k, in snake case: "bad_layout". Python's `.code` is this word.
std::string_view code_name(StatusCode code);

// What went wrong, as fields. The sentence is made when it is printed, never on the way there.
struct [[nodiscard]] Status {
  StatusCode code = StatusCode::kOk;
  std::string place;     // "gemm.prepare"
  std::string argument;  // "K"
  std::string value;     // "1500"
  std::string accepted;  // "multiples of 64 from 64"
  std::string remedy;    // "pad x and weight with zero columns"

  bool ok() const { return code == StatusCode::kOk; }
  // "gemm.prepare: K = 1500; accepted: multiples of 64 from 64; pad x and weight with zero columns".
  // Empty fields are left out. "ok" for kOk.
  std::string message() const;
};

// Thrown by functions that do (constructors, prepare, run, bind). what() is status().message().
class Error : public std::exception {
 public:
  explicit Error(Status status);
  const Status& status() const { return status_; }
  StatusCode code() const { return status_.code; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  Status status_;
  std::string text_;
};

}  // namespace twostep
