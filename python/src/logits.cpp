// DraftLogits and its last stage.
#include "twostep/logits.h"

#include "gemm.h"

namespace twostep::python {
namespace {

struct PyLogits {
  nb::object head;
  DraftLogits logits;
};

struct PyStage {
  LogitsStage stage;
};

}  // namespace

void bind_logits(nb::module_& m) {
  nb::class_<PyLogits>(m, "DraftLogits",
                       R"(The drafter's LM head: out = bf16(scale * cap * tanh(bf16(hidden @ head.T) / cap)).

The first vocab rows of head [rows, K]; the padding behind them is not read. Without cap and scale the bits are those of
DraftGemm. The head is not copied: where it is now is looked at on every run.)")
      .def(
          "__init__",
          [](PyLogits* self, nb::object head, std::int64_t vocab, std::optional<float> soft_cap, float scale,
             const std::optional<Options>& options) {
            const TensorView view = view_of(head, "head", Access::kWeight);
            const LogitsOptions what{vocab, soft_cap, scale, options.value_or(Options{})};
            new (self) PyLogits{head, without_gil([&] { return DraftLogits(view, what); })};
          },
          nb::arg("head"), nb::arg("vocab") = 0, nb::kw_only(), nb::arg("soft_cap") = nb::none(),
          nb::arg("scale") = 1.0f, nb::arg("options") = nb::none(),
          R"(vocab: rows without padding; 0: all. soft_cap: above 0, or None.

Raises Error: invalid_argument, unsupported, bad_layout, unavailable, compile_failed.)")
      .def(
          "prepare",
          [](PyLogits& self, int rows, nb::handle stream) {
            const nb::object current = self.head;  // another thread may run with another one meanwhile
            const Stream on = stream_of(stream, current, view_of(current, "head", Access::kWeight));
            return std::string(kind_name(without_gil([&] { return self.logits.prepare(rows, on); })));
          },
          nb::arg("m"), nb::kw_only(), nb::arg("stream") = nb::none(), "As DraftGemm.prepare.")
      .def(
          "run",
          [](PyLogits& self, nb::object hidden, nb::object out, nb::object head, nb::handle stream) {
            const nb::object current = head.is_none() ? self.head : head;
            const TensorView w = view_of(current, "head", Access::kWeight);
            const TensorView from = view_of(hidden, "hidden");
            const TensorView to = view_of(out, "out", Access::kWrite);
            const Stream on = stream_of(stream, hidden, from);
            without_gil([&] { self.logits.run(w, from, to, on); });
            if (!current.is(self.head)) self.head = current;
            return out;
          },
          nb::arg("hidden"), nb::arg("out"), nb::kw_only(), nb::arg("head") = nb::none(),
          nb::arg("stream") = nb::none(),
          R"(out [M, vocab] from hidden [M, K], both BF16. Returns out, which is the caller's.

Rows may be further apart than their width. May be captured after prepare(M). Raises Error as DraftGemm.run.)")
      .def(
          "kind", [](const PyLogits& self, int rows) { return kind_name(self.logits.gemm().kind(rows)); }, nb::arg("m"),
          R"(Which kind serves rows m: "warp", "cublas", "cpu".)")
      .def(
          "why", [](const PyLogits& self, int rows) { return self.logits.gemm().why(rows); }, nb::arg("m"),
          "One sentence: why rows m are not on the warp kernel.")
      .def(
          "pin",
          [](PyLogits& self, int rows, std::string_view kind) {
            self.logits.gemm().pin(rows, value_of(kKinds, kind, "kind"));
          },
          nb::arg("m"), nb::arg("kind"), R"(Forces rows m to "warp" or "cublas".)")
      .def_prop_ro("vocab", [](const PyLogits& self) { return self.logits.vocab(); })
      .def_prop_ro("k", [](const PyLogits& self) { return self.logits.gemm().k(); });

  nb::class_<PyStage>(m, "LogitsStage", "The last stage of DraftLogits alone, for logits that another method made.")
      .def(
          "__init__",
          [](PyStage* self, const std::string& device, std::optional<float> soft_cap, float scale) {
            const Device on = device_of_name(device);
            new (self) PyStage{without_gil([&] { return LogitsStage(on, soft_cap, scale); })};
          },
          nb::arg("device") = "cpu", nb::kw_only(), nb::arg("soft_cap") = nb::none(), nb::arg("scale") = 1.0f,
          "Loads the kernel. Raises Error: invalid_argument, unavailable, compile_failed.")
      .def(
          "run",
          [](const PyStage& self, nb::object logits, nb::object out, nb::handle stream) {
            const TensorView from = view_of(logits, "logits");
            const TensorView to = view_of(out, "out", Access::kWrite);
            const Stream on = stream_of(stream, logits, from);
            without_gil([&] { self.stage.run(from, to, on); });
            return out;
          },
          nb::arg("logits"), nb::arg("out"), nb::kw_only(), nb::arg("stream") = nb::none(),
          "out [M, V] from the first V columns of logits [M, >= V]; out may be logits itself. Returns out.");
}

}  // namespace twostep::python
