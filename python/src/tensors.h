// Python's tensors as views: torch tensors by their attributes, NumPy and DLPack producers by nanobind, TensorView as
// it is. A view owns nothing: the Python object that was passed keeps the memory.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string_view>
#include <utility>

#include "twostep/gemm.h"
#include "twostep/status.h"
#include "twostep/tensor.h"

namespace nb = nanobind;

namespace twostep::python {

enum class Access { kRead, kWrite, kWeight };  // kWeight: read, and a gradient that it may ask for is no concern

// Throws kInvalidArgument (no tensor, more than four dimensions, a gradient is asked for, read-only memory that is to
// be written), kUnsupported (dtype), kWrongDevice (neither CPU nor CUDA). `name` is the argument's.
TensorView view_of(nb::handle tensor, const char* name, Access access = Access::kRead);
std::optional<TensorView> optional_view_of(nb::handle tensor, const char* name, Access access = Access::kRead);

// None: torch's current stream if `operand` is a torch tensor on a GPU, else the legacy default stream. Or an address,
// or an object with cuda_stream (torch), ptr (CuPy) or __cuda_stream__.
Stream stream_of(nb::handle stream, nb::handle operand, const TensorView& view);

[[noreturn]] void refuse(StatusCode code, std::string argument, std::string value, std::string accepted,
                         std::string remedy = {});

Device device_of_name(const std::string& name);  // "cpu", "cuda:1"; throws kInvalidArgument
std::string text_of(nb::handle object);          // str(object)

DType dtype_of_name(std::string_view name);  // "bf16", "BF16", "bfloat16"; throws kInvalidArgument

// Words for values of an enum, both ways.
template <class Enum>
struct Word {
  Enum value;
  const char* word;
};
template <class Enum, std::size_t kCount>
const char* word_of(const Word<Enum> (&words)[kCount], Enum value) {
  for (const auto& [known, word] : words)
    if (known == value) return word;
  return "unknown";
}
template <class Enum, std::size_t kCount>
Enum value_of(const Word<Enum> (&words)[kCount], std::string_view text, const char* argument) {
  std::string accepted;
  for (const auto& [value, word] : words) {
    if (text == word) return value;
    accepted += (accepted.empty() ? "" : ", ") + std::string(word);
  }
  refuse(StatusCode::kInvalidArgument, argument, std::string(text), accepted);
}

inline constexpr Word<Kind> kKinds[] = {{Kind::kWarp, "warp"}, {Kind::kCublas, "cublas"}, {Kind::kCpu, "cpu"}};

void bind_tensors(nb::module_& m);
void bind_gemm(nb::module_& m);
void bind_logits(nb::module_& m);
void bind_kda(nb::module_& m);
void bind_mailbox(nb::module_& m);
void bind_drafter(nb::module_& m);
void bind_system(nb::module_& m);

}  // namespace twostep::python
