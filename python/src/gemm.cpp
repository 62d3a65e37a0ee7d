// DraftGemm and the kernel beneath it.
#include "gemm.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>

namespace twostep::python {
namespace {

constexpr Word<Mma> kMmas[] = {{Mma::kMmaSync, "mma_sync"}, {Mma::kWgmma, "wgmma"}};
constexpr Word<WeightOrder> kOrders[] = {{WeightOrder::kRowMajor, "row_major"}, {WeightOrder::kPacked, "packed"}};
constexpr Word<WeightLoad> kLoads[] = {{WeightLoad::kRows, "rows"}, {WeightLoad::kTiles, "tiles"}};
constexpr Word<XMode> kModes[] = {{XMode::kStreamed, "streamed"}, {XMode::kResident, "resident"}};
constexpr Word<Pdl> kPdls[] = {{Pdl::kAuto, "auto"}, {Pdl::kOff, "off"}, {Pdl::kAlways, "always"}};
constexpr Word<OnMiss> kMisses[] = {{OnMiss::kCublas, "cublas"}, {OnMiss::kRefuse, "refuse"}};

// A field of an enum as a property of words.
template <auto kField, class Class, class Enum, std::size_t kCount>
void def_word(nb::class_<Class>& cls, const char* name, const Word<Enum> (&words)[kCount]) {
  cls.def_prop_rw(
      name, [&words](const Class& self) { return word_of(words, self.*kField); },
      [&words, name](Class& self, std::string_view text) { self.*kField = value_of(words, text, name); });
}

struct PyWarp {
  PreparedWarpSplitK kernel;
  nb::object weight;
};

// All of it, for copies and comparison.
using OptionsState = std::tuple<bool, int, int, bool, std::int64_t, bool>;
OptionsState state_of(const Options& o) {
  return {o.strict, static_cast<int>(o.pdl), static_cast<int>(o.on_miss), o.jit, o.workspace_limit, o.warp};
}

void bind_tactic(nb::module_& m) {
  nb::class_<DeviceFacts>(m, "DeviceFacts", R"(What a choice of kernel needs to know of a GPU. Plain data.

arch is 10 * major + minor (90: H200); smem_per_block and smem_per_sm are bytes; name picks the table of tactics.)")
      .def(nb::init<int, int, int, int, std::string>(), nb::arg("arch"), nb::arg("sm_count"), nb::arg("smem_per_block"),
           nb::arg("smem_per_sm"), nb::arg("name") = "")
      .def_rw("arch", &DeviceFacts::arch)
      .def_rw("sm_count", &DeviceFacts::sm_count)
      .def_rw("smem_per_block", &DeviceFacts::smem_per_block)
      .def_rw("smem_per_sm", &DeviceFacts::smem_per_sm)
      .def_rw("name", &DeviceFacts::name)
      .def(
          "__eq__", [](const DeviceFacts& a, const DeviceFacts& b) { return a == b; }, nb::is_operator());

  nb::class_<Tactic> tactic(m, "Tactic", "One runnable choice of the warp kernel: plain, comparable, printable.");
  tactic.def(nb::init<>())
      .def_rw("tile_n", &Tactic::tile_n)
      .def_rw("tile_k", &Tactic::tile_k)
      .def_rw("stages", &Tactic::stages)
      .def_rw("k_slices", &Tactic::k_slices)
      .def_rw("cluster_k", &Tactic::cluster_k)
      .def_rw("cluster_n", &Tactic::cluster_n)
      .def_rw("warps", &Tactic::warps)
      .def_rw("smem_bytes", &Tactic::smem_bytes)
      .def_rw("ctas_per_sm", &Tactic::ctas_per_sm)
      .def_rw("weight_align", &Tactic::weight_align)
      .def(
          "__eq__", [](const Tactic& a, const Tactic& b) { return a == b; }, nb::is_operator())
      .def("__repr__", [](const Tactic& t) { return "Tactic(" + to_string(t) + ")"; });
  def_word<&Tactic::mma>(tactic, "mma", kMmas);
  def_word<&Tactic::weight_order>(tactic, "weight_order", kOrders);
  def_word<&Tactic::weight_load>(tactic, "weight_load", kLoads);
  def_word<&Tactic::x_mode>(tactic, "x_mode", kModes);

  m.def("warp_eligible", &warp_eligible, nb::arg("n"), nb::arg("k"),
        "True exactly when the warp kernel is defined for a weight [n, k]: n % 16 == 0, k % 64 == 0, both above 0.");
  m.def("warp_tactic", &warp_tactic, nb::arg("m"), nb::arg("n"), nb::arg("k"), nb::arg("facts"),
        nb::arg("strict") = false,
        R"(The tactic that serves rows 1..64 on a GPU (known_gpu("h200")). Pure: no driver call, equal inputs give equal
tactics. strict: one order of summation for every row count. Raises Error: unsupported where no tactic is valid.)");
}

void bind_plan(nb::module_& m) {
  nb::class_<Options> options(m, "Options", R"(How a DraftGemm serves its rows.

strict: a row's bits do not depend on the number of rows, 1..64. pdl: "auto" (early weight loads under capture alone),
"off", "always". on_miss: an unprepared row count under capture runs on "cublas" or is an error ("refuse"). jit: False
takes only kernels found in the caches. workspace_limit: bytes for cuBLAS. warp: False is cuBLAS alone.)");
  options.def(
      "__init__",
      [](Options* self, bool strict, std::string_view pdl, std::string_view on_miss, bool jit,
         std::int64_t workspace_limit, bool warp) {
        new (self) Options{
            strict, value_of(kPdls, pdl, "pdl"), value_of(kMisses, on_miss, "on_miss"), jit, workspace_limit, warp};
      },
      nb::kw_only(), nb::arg("strict") = false, nb::arg("pdl") = "auto", nb::arg("on_miss") = "cublas",
      nb::arg("jit") = true, nb::arg("workspace_limit") = Options{}.workspace_limit, nb::arg("warp") = true);
  options.def("__getstate__", &state_of)
      .def("__setstate__",
           [](Options& self, const OptionsState& state) {
             const auto [strict, pdl, on_miss, jit, workspace_limit, warp] = state;
             new (&self)
                 Options{strict, static_cast<Pdl>(pdl), static_cast<OnMiss>(on_miss), jit, workspace_limit, warp};
           })
      .def(
          "__eq__", [](const Options& a, const Options& b) { return state_of(a) == state_of(b); }, nb::is_operator());
  options.def_rw("strict", &Options::strict)
      .def_rw("jit", &Options::jit)
      .def_rw("workspace_limit", &Options::workspace_limit)
      .def_rw("warp", &Options::warp);
  def_word<&Options::pdl>(options, "pdl", kPdls);
  def_word<&Options::on_miss>(options, "on_miss", kMisses);

  nb::class_<PyPacked>(m, "PackedWeight",
                       R"(A second copy of a weight, in the order in which kernels of one tactic read it.

Made by pack_weight; keeps its source alive.)")
      .def_prop_ro("tactic", [](const PyPacked& p) { return p.packed.tactic(); })
      .def_prop_ro("bytes", [](const PyPacked& p) { return p.packed.bytes(); });
  m.def(
      "pack_weight",
      [](nb::object weight, const Tactic& tactic, nb::handle stream) {
        const TensorView view = view_of(weight, "weight", Access::kWeight);
        const Stream on = stream_of(stream, weight, view);
        return PyPacked{without_gil([&] { return pack_weight(view, tactic, on); }), weight};
      },
      nb::arg("weight"), nb::arg("tactic"), nb::kw_only(), nb::arg("stream") = nb::none(),
      R"(Packs weight [N, K] BF16, row-major, on a GPU, in stream order. Allocates N * K * 2 bytes.

After a write to the source call weights_updated of its plans. Raises Error: unsupported, bad_layout, capturing.)");

  nb::class_<PyGemm>(m, "DraftGemm",
                     R"(A linear for few rows, prepared once: out[M, N] = bf16(x[M, K] @ weight[N, K].T).

BF16 operands, FP32 sums, one rounding. A weight on a GPU is served by a kernel compiled for its shape and 8 rows at a
time (rows 1..64), by cuBLASLt for the rest; a weight on the CPU by vector code. Operands are torch tensors, DLPack
producers, NumPy arrays through view(array, "bf16"), or TensorView. The weight is not copied: it is kept alive, and where
it is now is looked at on every run, so that values changed in place, and a tensor that was re-pointed, are seen.)")
      .def(nb::init<nb::object, const std::optional<Options>&>(), nb::arg("weight"), nb::arg("options") = nb::none(),
           R"(A plan for weight [N, K] BF16 on its device, or for a PackedWeight. Never refuses for a capability reason.

Raises Error: invalid_argument (rank, no memory), unsupported (dtype), bad_layout, unavailable (GPU without driver).)")
      .def("prepare", &PyGemm::prepare, nb::arg("m"), nb::kw_only(), nb::arg("stream") = nb::none(),
           R"(Compiles or fetches and loads all that rows m need, and returns their kind: "warp", "cublas" or "cpu".

Host work without the interpreter lock; idempotent; thread-safe. Stream: torch's current one. Raises Error:
invalid_argument (m < 0), capturing; with strict: unsupported, compile_failed.)")
      .def("run", &PyGemm::run, nb::arg("x"), nb::arg("out"), nb::kw_only(), nb::arg("weight") = nb::none(),
           nb::arg("stream") = nb::none(),
           R"(out = x @ weight.T on a stream, torch's current one by default. Returns out.

x [M, K], out [M, N] BF16, columns contiguous, rows any pitch of at least the width. weight: another tensor of the same
shape, in place of the one that was bound. May be captured after prepare(M). Raises Error before any launch, with out
untouched: bad_layout, overlap, invalid_argument, unsupported, wrong_device, weight_changed.)")
      .def("bind", &PyGemm::bind, nb::arg("weight"), "Another weight of the same shape, dtype and device.")
      .def("weights_updated", &PyGemm::weights_updated, nb::kw_only(), nb::arg("stream") = nb::none(),
           "Say so after a write to the weight inside a capture, and after any write to the source of a packed weight.")
      .def(
          "seal", [](PyGemm& self) { self.gemm.seal(); }, "From now on nothing is compiled.")
      .def(
          "pin",
          [](PyGemm& self, int rows, std::string_view kind) {
            const Kind value = value_of(kKinds, kind, "kind");
            without_gil([&] { self.gemm.pin(rows, value); });
          },
          nb::arg("m"), nb::arg("kind"), R"(Forces rows m to "warp" or "cublas". Raises Error: unsupported.)")
      .def("kind", &PyGemm::kind, nb::arg("m"), R"(Which kind serves rows m now: "warp", "cublas", "cpu".)")
      .def("kind", &PyGemm::kind_of, nb::arg("x"), nb::arg("out"), "The same for real operands.")
      .def(
          "why", [](const PyGemm& self, int rows) { return self.gemm.why(rows); }, nb::arg("m"),
          R"(One sentence: why rows m are not on the warp kernel. Empty for "warp".)")
      .def("why", &PyGemm::why_of, nb::arg("x"), nb::arg("out"), "The same for real operands.")
      .def(
          "why_code", [](const PyGemm& self, int rows) { return why_name(self.gemm.why_code(rows)); }, nb::arg("m"),
          R"(The reason as a word: "n_not_multiple_of_16".)")
      .def("accepts", &PyGemm::accepts, nb::arg("x"), nb::arg("out"),
           "None, or the message of the Error that run would raise for these operands.")
      .def(
          "tactic", [](const PyGemm& self, int rows) { return self.gemm.tactic(rows); }, nb::arg("m"),
          "Of the loaded kernel of rows m. Raises Error: not_prepared.")
      .def("stats", &PyGemm::stats, "Counters, with the runs that were not on the warp kernel by their reason.")
      .def("keys", &PyGemm::keys, "Name and hash of each loaded kernel.")
      .def("captured_addresses", &PyGemm::captured_addresses, "Weight addresses that graphs recorded.")
      .def_prop_ro(
          "n", [](const PyGemm& self) { return self.gemm.n(); }, "Rows of the weight.")
      .def_prop_ro(
          "k", [](const PyGemm& self) { return self.gemm.k(); }, "Columns of the weight.")
      .def_ro("weight", &PyGemm::weight, "The weight as it was passed last.");

  nb::class_<PyWarp>(m, "PreparedWarpSplitK", R"(One weight made ready for the warp kernel with given tactics.

No fallback, no lazy work. On a GPU alone.)")
      .def(
          "__init__",
          [](PyWarp* self, nb::object weight, const std::map<int, Tactic>& tactics) {
            const TensorView view = view_of(weight, "weight", Access::kWeight);
            new (self) PyWarp{without_gil([&] { return PreparedWarpSplitK(view, tactics); }), weight};
          },
          nb::arg("weight"), nb::arg("tactics"),
          "tactics: {m: Tactic}. Raises Error: unavailable, unsupported, bad_layout, compile_failed.")
      .def(
          "run",
          [](PyWarp& self, nb::object x, nb::object out, nb::handle stream) {
            const TensorView from = view_of(x, "x");
            const TensorView to = view_of(out, "out", Access::kWrite);
            self.kernel.run(from, to, stream_of(stream, x, from));
            return out;
          },
          nb::arg("x"), nb::arg("out"), nb::kw_only(), nb::arg("stream") = nb::none(),
          "One launch, or Error: not_prepared, bad_layout, overlap, invalid_argument, wrong_device. Returns out.")
      .def(
          "rebind",
          [](PyWarp& self, nb::object weight) {
            self.kernel.rebind(view_of(weight, "weight", Access::kWeight));
            self.weight = weight;
          },
          nb::arg("weight"), "Another weight of the same shape, dtype, strides and device.")
      .def("keys", [](const PyWarp& self) { return key_names(self.kernel.keys()); });
}

}  // namespace

std::vector<std::pair<std::string, std::string>> key_names(const std::vector<CompileKey>& keys) {
  std::vector<std::pair<std::string, std::string>> names;
  for (const CompileKey& key : keys) names.emplace_back(key.name, key.hash);
  return names;
}

PyGemm::PyGemm(nb::object source, const std::optional<Options>& options)
    : weight(std::move(source)), gemm(make(weight, options.value_or(Options{}))) {
  if (PyPacked * packed; nb::try_cast(weight, packed) && packed != nullptr) {
    packed_source = weight;
    weight = packed->source;
  }
}

DraftGemm PyGemm::make(nb::handle weight, const Options& options) {
  if (PyPacked * packed; nb::try_cast(weight, packed) && packed != nullptr)
    return without_gil([&] { return DraftGemm(packed->packed, options); });
  const TensorView view = view_of(weight, "weight", Access::kWeight);
  return without_gil([&] { return DraftGemm(view, options); });
}

std::string PyGemm::prepare(int m, nb::handle stream) {
  const nb::object current = weight;  // another thread may bind another one meanwhile
  const TensorView view = view_of(current, "weight", Access::kWeight);
  const Stream on = stream_of(stream, current, view);
  return kind_name(without_gil([&] { return gemm.prepare(m, on); }));
}

nb::object PyGemm::run(nb::object x, nb::object out, nb::object now, nb::handle stream) {
  const nb::object current = now.is_none() ? weight : now;  // alive, whatever another thread binds
  const TensorView w = view_of(current, "weight", Access::kWeight);
  const TensorView from = view_of(x, "x");
  const TensorView to = view_of(out, "out", Access::kWrite);
  const Stream on = stream_of(stream, x, from);
  // A launch is shorter than giving the lock away; a product on the CPU, or the first run of a row count, is not.
  if (!w.device.is_cuda() || gemm.why_code(static_cast<int>(from.shape[0])) == WhyCode::kNotPrepared)
    without_gil([&] { gemm.run(w, from, to, on); });
  else gemm.run(w, from, to, on);
  if (!current.is(weight)) weight = current;
  return out;
}

void PyGemm::bind(nb::object now) {
  gemm.bind(view_of(now, "weight", Access::kWeight));
  weight = std::move(now);
}

void PyGemm::weights_updated(nb::handle stream) {
  gemm.weights_updated(stream_of(stream, weight, view_of(weight, "weight", Access::kWeight)));
}

std::string PyGemm::kind_of(nb::handle x, nb::handle out) const {
  return kind_name(gemm.kind(view_of(x, "x"), view_of(out, "out", Access::kWrite)));
}
std::string PyGemm::why_of(nb::handle x, nb::handle out) const {
  return gemm.why(view_of(x, "x"), view_of(out, "out", Access::kWrite));
}
std::optional<std::string> PyGemm::accepts(nb::handle x, nb::handle out) const {
  const Status status = gemm.accepts(view_of(x, "x"), view_of(out, "out", Access::kWrite));
  if (status.ok()) return {};
  return status.message();
}

nb::dict PyGemm::stats() const {
  const Stats s = gemm.stats();
  nb::dict fallbacks;
  for (int i = 0; i < kNumWhyCodes; ++i)
    if (const auto code = static_cast<WhyCode>(i); s.fallbacks(code) != 0)
      fallbacks[nb::str(std::string(why_name(code)).c_str())] = s.fallbacks(code);
  nb::dict counters;
  counters["warp_runs"] = s.warp_runs;
  counters["cublas_runs"] = s.cublas_runs;
  counters["cpu_runs"] = s.cpu_runs;
  counters["fallback_by_code"] = fallbacks;
  counters["capture_misses"] = s.capture_misses;
  counters["workspace_misses"] = s.workspace_misses;
  counters["compiles"] = s.compiles;
  counters["late_compiles"] = s.late_compiles;
  counters["cache_hits"] = s.cache_hits;
  counters["rebinds"] = s.rebinds;
  return counters;
}

std::vector<std::uintptr_t> PyGemm::captured_addresses() const {
  std::vector<std::uintptr_t> all;
  for (const Address address : gemm.captured_addresses()) all.push_back(address.value);
  return all;
}

void bind_gemm(nb::module_& m) {
  bind_tactic(m);
  bind_plan(m);
}

}  // namespace twostep::python
