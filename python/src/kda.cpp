// PreparedKda. The class of the package adds from_module.
#include "twostep/kda.h"

#include <nanobind/stl/pair.h>

#include "gemm.h"

namespace twostep::python {
namespace {

constexpr Word<StateMode> kModes[] = {{StateMode::kSlots, "slots"}, {StateMode::kRecords, "records"}};
constexpr Word<GateSchedule> kGates[] = {
    {GateSchedule::kInline, "inline"}, {GateSchedule::kShared, "shared"}, {GateSchedule::kPrepass, "prepass"}};

// B, or (requests, tokens).
KdaKey key_of(nb::handle key) {
  if (nb::isinstance<nb::tuple>(key)) {
    const auto [requests, tokens] = nb::cast<std::pair<std::int64_t, int>>(key);
    return {requests, tokens};
  }
  return {nb::cast<std::int64_t>(key), 1};
}
nb::object key_object(KdaKey key) {
  if (key.tokens == 1) return nb::int_(key.requests);
  return nb::make_tuple(key.requests, key.tokens);
}

// {key: row_stride} or {key: {"row_stride": .., "gate": .., "tactic": (split, warps, pass_rows[, stream])}}.
std::vector<KdaPolicy> policies_of(const nb::dict& policies) {
  std::vector<KdaPolicy> all;
  for (const auto& [key, value] : policies) {
    KdaPolicy policy{.key = key_of(key)};
    if (nb::isinstance<nb::dict>(value)) {
      for (const auto& [name, field] : nb::cast<nb::dict>(value)) {
        const auto word = nb::cast<std::string>(name);
        if (word == "row_stride") {
          policy.row_stride = nb::cast<std::int64_t>(field);
        } else if (word == "gate") {
          policy.gate = value_of(kGates, nb::cast<std::string>(field), "gate");
        } else if (word == "tactic") {
          if (nb::len(field) == 3) {
            const auto [split, warps, pass_rows] = nb::cast<std::tuple<int, int, int>>(field);
            policy.tactic = KdaTactic{split, warps, pass_rows};
          } else {
            const auto [split, warps, pass_rows, stream] = nb::cast<std::tuple<int, int, int, bool>>(field);
            policy.tactic = KdaTactic{split, warps, pass_rows, stream};
          }
        } else {
          refuse(StatusCode::kInvalidArgument, "policies", word, "row_stride, gate, tactic");
        }
      }
    } else {
      policy.row_stride = nb::cast<std::int64_t>(value);
    }
    all.push_back(policy);
  }
  return all;
}

// (conv, state) or (conv, state, records).
KdaCaches caches_of(nb::handle caches) {
  const auto size = PySequence_Check(caches.ptr()) ? nb::len(caches) : 0;
  if (size < 2 || size > 3)
    refuse(StatusCode::kInvalidArgument, "caches", text_of(caches.type()), "(conv, state) or (conv, state, records)");
  KdaCaches views{view_of(caches[0], "conv", Access::kWrite), view_of(caches[1], "state", Access::kWrite), {}};
  if (size == 3) views.records = optional_view_of(caches[2], "records", Access::kWrite);
  return views;
}

// The Python objects keep the borrowed weights alive.
struct WeightObjects {
  nb::object conv_weight, f_b, a_log, dt_bias, norm_weight, conv_bias;
  KdaWeights views() const {
    return {view_of(conv_weight, "conv_weight", Access::kWeight),
            optional_view_of(conv_bias, "conv_bias", Access::kWeight),
            view_of(f_b, "f_b", Access::kWeight),
            view_of(a_log, "a_log", Access::kWeight),
            view_of(dt_bias, "dt_bias", Access::kWeight),
            view_of(norm_weight, "norm_weight", Access::kWeight)};
  }
};

struct PyKda {
  WeightObjects weights;
  PreparedKda kda;
  Device device;  // of the weights
  nb::object counters = nb::none();
};

}  // namespace

void bind_kda(nb::module_& m) {
  m.attr("KDA_HEAD_DIM") = kKdaHeadDim;
  m.def("kda_record_bytes", &kda_record_bytes, nb::arg("heads"), nb::arg("entries"),
        "Bytes of one slot's records: the records cache is uint8 [slots, kda_record_bytes(H, L - 2)].");
  m.def("kda_row_stride", &kda_row_stride, nb::arg("heads"),
        "The used width of a projection row, 4 * 128 * heads + 128 + heads, rounded up to 16: in elements.");

  nb::class_<PyKda>(m, "PreparedKda", R"(The KDA core of one layer, prepared for decode and verify steps.

One call takes R = B * q rows of the layer's projection and gives R rows for its output projection; the caches are updated
in place. On a GPU a call is one launch. Weights: conv_weight [3D, 1, 4] and conv_bias [3D] FP32 or BF16, f_b [D, 128] BF16,
a_log [H] FP32, dt_bias [D] FP32, norm_weight [128] FP32 or BF16; D = 128 H. f_b, a_log and dt_bias are kept and must stay
at their addresses; the others are copied.

policies: {key: row_stride}. A key is B (decode) or (requests, tokens) (verify); row_stride is the pitch of projection rows
in elements. A value may also be a dict of row_stride, gate and tactic.)")
      .def(
          "__init__",
          [](PyKda* self, nb::object conv_weight, nb::object f_b, nb::object a_log, nb::object dt_bias,
             nb::object norm_weight, int heads, const nb::dict& policies, nb::object conv_bias,
             std::optional<float> gate_lower_bound, float scale, float norm_eps, bool conv_dim_first,
             std::string_view state_mode, std::string_view state_dtype, std::int64_t first_live_slot, bool early_caches,
             bool jit) {
            WeightObjects objects{conv_weight, f_b, a_log, dt_bias, norm_weight, conv_bias};
            KdaOptions options;
            options.heads = heads;
            options.gate_lower_bound = gate_lower_bound;
            options.scale = scale;
            options.norm_eps = norm_eps;
            options.policies = policies_of(policies);
            options.conv_dim_first = conv_dim_first;
            options.state_mode = value_of(kModes, state_mode, "state_mode");
            options.state_dtype = state_dtype == "fp32" ? DType::kF32 : dtype_of_name(state_dtype);
            options.first_live_slot = first_live_slot;
            options.early_caches = early_caches;
            options.jit = jit;
            const KdaWeights views = objects.views();
            new (self)
                PyKda{std::move(objects), without_gil([&] { return PreparedKda(views, options); }), views.f_b.device};
          },
          nb::arg("conv_weight"), nb::arg("f_b"), nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("norm_weight"),
          nb::kw_only(), nb::arg("heads"), nb::arg("policies"), nb::arg("conv_bias") = nb::none(),
          nb::arg("gate_lower_bound") = nb::none(), nb::arg("scale") = KdaOptions{}.scale,
          nb::arg("norm_eps") = KdaOptions{}.norm_eps, nb::arg("conv_dim_first") = false,
          nb::arg("state_mode") = "slots", nb::arg("state_dtype") = "fp32", nb::arg("first_live_slot") = 1,
          nb::arg("early_caches") = false, nb::arg("jit") = true,
          R"(Checks everything and compiles nothing. gate_lower_bound: below 0; None: the softplus form of the gate.

Raises Error: invalid_argument, unsupported, bad_layout, wrong_device, unavailable.)")
      .def(
          "prepare",
          [](PyKda& self, nb::handle caches) {
            const KdaCaches layouts = caches_of(caches);
            without_gil([&] { self.kda.prepare(layouts); });
          },
          nb::arg("caches"), R"(Compiles and loads the kernel of every key, for caches of this layout.

caches: (conv, state), with state_mode "records" (conv, state, records), tensors or TensorViews without memory. conv BF16 [slots, L, 3D] ([slots, 3D, L] with conv_dim_first),
state FP32 [slots, H, 128, 128]. Host work without the interpreter lock. Raises Error: invalid_argument, bad_layout,
unsupported, unavailable, compile_failed; the object is then as it was.)")
      .def(
          "run",
          [](PyKda& self, nb::object projected, nb::object out, nb::handle caches, nb::handle slots,
             nb::handle accepted, nb::handle lengths, std::optional<int> tokens, nb::handle stream) {
            KdaCall call;
            call.projected = view_of(projected, "projected");
            call.out = view_of(out, "out", Access::kWrite);
            call.caches = caches_of(caches);
            call.slots = view_of(slots, "slots");
            call.accepted = optional_view_of(accepted, "accepted");
            call.lengths = optional_view_of(lengths, "lengths");
            call.tokens = tokens;
            const Stream on = stream_of(stream, projected, call.projected);
            if (self.device.is_cuda()) self.kda.run(call, on);
            else without_gil([&] { self.kda.run(call, on); });
            return out;
          },
          nb::arg("projected"), nb::arg("out"), nb::kw_only(), nb::arg("caches"), nb::arg("slots"),
          nb::arg("accepted") = nb::none(), nb::arg("lengths") = nb::none(), nb::arg("tokens") = nb::none(),
          nb::arg("stream") = nb::none(),
          R"(One step on a stream, torch's current one by default. Returns out. Copies no argument.

projected [B q, >= 4D + 128 + H] BF16; out [B q, D] BF16; slots [B] or [B, w], accepted [>= B], lengths [>= B] int32.
tokens: q; absent, the columns of slots when accepted is given, else 1. May be captured after prepare. Raises Error before any
launch, with nothing changed: not_prepared, bad_layout, invalid_argument, wrong_device, overlap.)")
      .def(
          "reset_records",
          [](PyKda& self, nb::handle caches, nb::object slots, nb::handle stream) {
            const TensorView ids = view_of(slots, "slots");
            const KdaCaches views = caches_of(caches);
            const Stream on = stream_of(stream, slots, ids);
            without_gil([&] { self.kda.reset_records(views, ids, on); });
          },
          nb::arg("caches"), nb::arg("slots"), nb::kw_only(), nb::arg("stream") = nb::none(),
          "state_mode \"records\": forgets what is recorded of these slots (int32 [B] or [B, w], column 0). After "
          "whatever else has written their states.")
      .def(
          "fold_records",
          [](PyKda& self, nb::handle caches, nb::object slots, nb::handle accepted, nb::handle dst_slots,
             nb::handle stream) {
            const TensorView ids = view_of(slots, "slots"), kept = view_of(accepted, "accepted");
            const KdaCaches views = caches_of(caches);
            const auto dst = optional_view_of(dst_slots, "dst_slots");
            const Stream on = stream_of(stream, slots, ids);
            without_gil([&] { self.kda.fold_records(views, ids, kept, dst, on); });
          },
          nb::arg("caches"), nb::arg("slots"), nb::arg("accepted"), nb::kw_only(), nb::arg("dst_slots") = nb::none(),
          nb::arg("stream") = nb::none(),
          R"(state_mode "records": completes states between steps, for whoever looks at them.

Folds the first accepted [B] int32 recorded tokens into the state, in place or into dst_slots [B]; then nothing is recorded
there, and the next accepted is 1.)")
      .def(
          "reload",
          [](PyKda& self, nb::object conv_weight, nb::object f_b, nb::object a_log, nb::object dt_bias,
             nb::object norm_weight, nb::object conv_bias, nb::handle stream) {
            WeightObjects objects{conv_weight, f_b, a_log, dt_bias, norm_weight, conv_bias};
            const KdaWeights views = objects.views();
            const Stream on = stream_of(stream, f_b, views.f_b);
            without_gil([&] { self.kda.reload(views, on); });
            self.weights = std::move(objects);
          },
          nb::arg("conv_weight"), nb::arg("f_b"), nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("norm_weight"),
          nb::kw_only(), nb::arg("conv_bias") = nb::none(), nb::arg("stream") = nb::none(),
          "Other values: copies are rebuilt at their addresses, borrowed tensors must be the same memory. "
          "Raises Error: weight_changed, capturing.")
      .def(
          "set_counters",
          [](PyKda& self, nb::object counters) {
            KdaCounters* memory = nullptr;
            if (!counters.is_none()) {
              const TensorView view = view_of(counters, "counters", Access::kWrite);
              const std::int64_t fields = sizeof(KdaCounters) / sizeof(std::uint32_t);
              if (view.dtype != DType::kI32 || view.rank != 1 || view.shape[0] < fields || view.stride[0] != 1)
                refuse(StatusCode::kInvalidArgument, "counters", to_string(view),
                       "I32[" + std::to_string(fields) +
                           "], contiguous: bad_accepted, bad_slot, bad_length, stale_records");
              if (view.device != self.device)
                refuse(StatusCode::kWrongDevice, "counters.device", to_string(view.device), to_string(self.device),
                       "put them on the weights' device");
              memory = static_cast<KdaCounters*>(view.data);
            }
            self.kda.set_counters(memory);
            self.counters = std::move(counters);
          },
          nb::arg("counters").none(),
          "Where bad requests are counted from now on: int32 [4] (bad_accepted, bad_slot, bad_length, stale_records) "
          "on "
          "the weights' device, or None. Before a capture.")
      .def(
          "keys",
          [](const PyKda& self) {
            nb::list keys;
            for (const KdaKey key : self.kda.keys()) keys.append(key_object(key));
            return keys;
          },
          "The prepared keys, in rising order.")
      .def(
          "kernel", [](const PyKda& self, nb::handle key) { return self.kda.kernel(key_of(key)); }, nb::arg("key"),
          "Name and hash of the compiled kernel of a key, or the CPU path.")
      .def(
          "tactic",
          [](const PyKda& self, nb::handle key) {
            const KdaTactic t = self.kda.tactic(key_of(key));
            return nb::make_tuple(t.split, t.warps, t.pass_rows, t.stream);
          },
          nb::arg("key"), "(split, warps, pass_rows, stream) of a key.")
      .def("stats", [](const PyKda& self) {
        const KdaStats s = self.kda.stats();
        nb::dict counters;
        counters["runs"] = s.runs;
        counters["compiles"] = s.compiles;
        counters["cache_hits"] = s.cache_hits;
        return counters;
      });

  m.def(
      "decode_conv_weight",
      [](nb::object conv_weight, nb::object out, nb::handle stream) {
        const TensorView from = view_of(conv_weight, "conv_weight", Access::kWeight);
        const TensorView to = view_of(out, "out", Access::kWrite);
        const Stream on = stream_of(stream, conv_weight, from);
        without_gil([&] { decode_conv_weight(from, to, on); });
        return out;
      },
      nb::arg("conv_weight"), nb::arg("out"), nb::kw_only(), nb::arg("stream") = nb::none(),
      R"(The form in which a KDA step reads a conv weight: out[s, i, c] = conv_weight[s D + c, 0, i]; returns out.

conv_weight [3D, 1, 4] FP32 or BF16, out [3, 4, D] FP32. Waits until out is written. Raises Error: invalid_argument,
unsupported, bad_layout, wrong_device, overlap, capturing.)");
}

}  // namespace twostep::python
