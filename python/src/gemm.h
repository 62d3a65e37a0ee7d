// DraftGemm as Python holds it: with the weight, which it keeps alive and looks at on every run.
#pragma once

#include "tensors.h"

namespace twostep::python {

template <class Call>
auto without_gil(Call&& call) {
  const nb::gil_scoped_release release;
  return call();
}

std::vector<std::pair<std::string, std::string>> key_names(const std::vector<CompileKey>& keys);

struct PyPacked {
  PackedWeight packed;
  nb::object source;
};

struct PyGemm {
  PyGemm(nb::object weight, const std::optional<Options>& options);
  static DraftGemm make(nb::handle weight, const Options& options);

  std::string prepare(int m, nb::handle stream);
  nb::object run(nb::object x, nb::object out, nb::object weight, nb::handle stream);
  void bind(nb::object weight);
  void weights_updated(nb::handle stream);
  std::string kind(int m) const { return kind_name(gemm.kind(m)); }
  std::string kind_of(nb::handle x, nb::handle out) const;
  std::string why_of(nb::handle x, nb::handle out) const;
  std::optional<std::string> accepts(nb::handle x, nb::handle out) const;
  nb::dict stats() const;
  std::vector<std::pair<std::string, std::string>> keys() const { return key_names(gemm.keys()); }
  std::vector<std::uintptr_t> captured_addresses() const;

  nb::object weight;
  nb::object packed_source;  // keeps a packed copy alive
  DraftGemm gemm;
};

}  // namespace twostep::python
