// DsparkDrafter.
#include "twostep/drafter.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/function.h>

#include "drafter/stages.h"
#include "gemm.h"

namespace twostep::python {
namespace {

constexpr Word<DraftMode> kDraftModes[] = {{DraftMode::kGreedy, "greedy"},
                                           {DraftMode::kProbabilistic, "probabilistic"}};
constexpr Word<VerifyMethod> kMethods[] = {{VerifyMethod::kStandard, "standard"}, {VerifyMethod::kBlock, "block"}};

struct PyBatch {
  DraftBatch views;
  nb::object objects;  // what was passed, kept alive
};

struct PyDrafter {
  DsparkDrafter drafter;
  Device device;
  nb::object memory;  // cache, embedding and head, kept alive

  Stream stream_of_call(nb::handle stream) const {
    TensorView here;
    here.device = device;
    return stream_of(stream, nb::handle(nb::cast<nb::list>(memory)[0]), here);
  }
};

nb::dlpack::dtype dlpack_of(DType dtype, bool numpy) {
  switch (dtype) {
    case DType::kF32: return nb::dtype<float>();
    case DType::kI32: return nb::dtype<std::int32_t>();
    case DType::kI64: return nb::dtype<std::int64_t>();
    default: break;
  }
  if (numpy) return nb::dtype<std::uint16_t>();  // NumPy has no BF16
  return {static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
}

// A result in the drafter's memory, which lives as long as the array does.
nb::object array_of(const TensorView& view, nb::handle owner) {
  if (view.rank == 0) return nb::none();
  std::array<std::size_t, TensorView::kMaxRank> shape{};
  for (int i = 0; i < view.rank; ++i)
    shape[static_cast<std::size_t>(i)] = static_cast<std::size_t>(view.shape[static_cast<std::size_t>(i)]);
  const auto rank = static_cast<std::size_t>(view.rank);
  if (!view.device.is_cuda())
    return nb::cast(nb::ndarray<nb::numpy>(view.data, rank, shape.data(), owner, nullptr, dlpack_of(view.dtype, true)));
  return nb::cast(nb::ndarray<>(view.data, rank, shape.data(), owner, nullptr, dlpack_of(view.dtype, false),
                                nb::device::cuda::value, view.device.index));
}

void bind_weights(nb::module_& m) {
  nb::class_<DrafterWeights>(m, "DrafterWeights", R"(A drafter's checkpoint: config.json and mapped safetensors files.

folder: config.json with model.safetensors, or the files of model.safetensors.index.json; target.safetensors
(embed_tokens.weight, lm_head.weight) where it is there. overrides: JSON of config fields that win over config.json.
embedding_lent: the target lends embed_tokens. check_finite: refuse NaN and infinity.
Raises Error: invalid_argument, unsupported, data_error; one message lists all that is wrong.)")
      .def(
          "__init__",
          [](DrafterWeights* self, const std::filesystem::path& folder, const std::string& overrides, bool lent,
             bool check_finite) {
            const DrafterWeights::Options options{overrides, lent, check_finite};
            new (self) DrafterWeights(without_gil([&] { return DrafterWeights::load(folder, options); }));
          },
          nb::arg("folder"), nb::kw_only(), nb::arg("overrides") = "{}", nb::arg("embedding_lent") = false,
          nb::arg("check_finite") = false)
      .def_prop_ro(
          "config", [](const DrafterWeights& self) { return self.config().to_json(); }, "The config in use, as JSON.");
}

void bind_batch(nb::module_& m) {
  nb::class_<PyBatch>(m, "DraftBatch", R"(What a step reads, on the drafter's device; it may change between steps.

R requests, padding included, and T rows that the target processed. request [R] int32, -1 for padding; row_start [R + 1]
int32: request r has rows row_start[r] to row_start[r + 1]; rejected [R] int32: rejected drafts at the end of these rows;
anchor [R] int32: the token just sampled; positions [T] int64; page_table [R, any] int32; temperature [R] float32; seed [R]
int64; step [R] int32, which verify increments.)")
      .def(
          "__init__",
          [](PyBatch* self, nb::object request, nb::object row_start, nb::object rejected, nb::object anchor,
             nb::object positions, nb::object page_table, nb::object temperature, nb::object seed, nb::object step) {
            const DraftBatch views{view_of(request, "request"),          view_of(row_start, "row_start"),
                                   view_of(rejected, "rejected"),        view_of(anchor, "anchor"),
                                   view_of(positions, "positions"),      view_of(page_table, "page_table"),
                                   view_of(temperature, "temperature"),  view_of(seed, "seed"),
                                   view_of(step, "step", Access::kWrite)};
            new (self) PyBatch{views, nb::make_tuple(request, row_start, rejected, anchor, positions, page_table,
                                                     temperature, seed, step)};
          },
          nb::kw_only(), nb::arg("request"), nb::arg("row_start"), nb::arg("rejected"), nb::arg("anchor"),
          nb::arg("positions"), nb::arg("page_table"), nb::arg("temperature"), nb::arg("seed"), nb::arg("step"));
}

PyDrafter prepare(const DrafterWeights& weights, const std::vector<nb::object>& cache,
                  const std::vector<std::int64_t>& tap_layers, const std::string& stream, const DrafterLimits& limits,
                  const nb::object& embed_tokens, const nb::object& lm_head, DrafterShard shard,
                  const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  DrafterMemory memory;
  nb::list kept;
  for (const auto& layer : cache) {
    memory.cache.push_back(view_of(layer, "cache", Access::kWrite));
    kept.append(layer);
  }
  memory.embed_tokens = optional_view_of(embed_tokens, "embed_tokens", Access::kWeight);
  memory.lm_head = optional_view_of(lm_head, "lm_head", Access::kWeight);
  kept.append(embed_tokens);
  kept.append(lm_head);
  const Device device = memory.cache.empty() ? Device::cpu() : memory.cache[0].device;
  const DrafterTarget target{tap_layers, stream, {}, {}};
  std::function<void(std::uint64_t, std::uint64_t)> report;
  if (progress)
    report = [&](std::uint64_t done, std::uint64_t all) {
      const nb::gil_scoped_acquire acquire;
      progress(done, all);
    };
  return {without_gil([&] { return DsparkDrafter::prepare(weights, limits, target, memory, device, shard, report); }),
          device, kept};
}

}  // namespace

void bind_drafter(nb::module_& m) {
  bind_weights(m);
  bind_batch(m);
  nb::class_<PyDrafter> drafter(m, "DsparkDrafter", R"(The whole draft step of a DSpark drafter.

ingest projects the rows that the target just processed into the latent cache, draft runs k rows per request and samples k
tokens, verify checks them against the target's logits. Results are properties, in memory of the drafter; NumPy arrays on the
CPU (BF16 as uint16), DLPack producers on a GPU.)");
  drafter
      .def(
          "__init__",
          [](PyDrafter* self, const DrafterWeights& weights, const std::vector<nb::object>& cache,
             const std::vector<std::int64_t>& tap_layers, const std::string& stream,
             const std::vector<int>& request_counts, int num_draft_tokens, std::int64_t max_ingest_rows,
             std::int64_t max_len, std::string_view mode, std::string_view draft_logits,
             const std::vector<float>& calibration, bool strict, nb::object embed_tokens, nb::object lm_head, int ranks,
             int rank, const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
            DrafterLimits limits;
            limits.request_counts = request_counts;
            limits.num_draft_tokens = num_draft_tokens;
            limits.max_ingest_rows = max_ingest_rows;
            limits.max_len = max_len;
            limits.mode = value_of(kDraftModes, mode, "mode");
            limits.draft_logits = draft_logits == "fp32" ? DType::kF32 : dtype_of_name(draft_logits);
            limits.calibration = calibration;
            limits.strict = strict;
            new (self) PyDrafter(
                prepare(weights, cache, tap_layers, stream, limits, embed_tokens, lm_head, {ranks, rank}, progress));
          },
          nb::arg("weights"), nb::kw_only(), nb::arg("cache"), nb::arg("tap_layers"), nb::arg("stream") = "prefix",
          nb::arg("request_counts") = std::vector<int>{1}, nb::arg("num_draft_tokens") = 7,
          nb::arg("max_ingest_rows") = 0, nb::arg("max_len") = 0, nb::arg("mode") = "greedy",
          nb::arg("draft_logits") = "fp32", nb::arg("calibration") = std::vector<float>{}, nb::arg("strict") = true,
          nb::arg("embed_tokens") = nb::none(), nb::arg("lm_head") = nb::none(), nb::arg("ranks") = 1,
          nb::arg("rank") = 0, nb::arg("progress") = nb::none(),
          R"(Loads the weights to the cache's device; slow.

cache: per layer [pages, page rows, kv_lora_rank + qk_rope_head_dim] BF16; page 0 is never used. tap_layers and stream: what
the target supplies, equal to target_layer_ids and aux_hidden_stream. request_counts: padded batch sizes. max_ingest_rows
0: the largest R * (k + 1). mode: "greedy" or "probabilistic", which keeps draft_logits ("fp32" or "bf16"). calibration: k
temperatures of the confidence. embed_tokens [V, H], lm_head [V / ranks, H]: lent by the target. ranks, rank: act as one
rank of several, for timing. Raises Error: invalid_argument, unsupported, bad_layout, wrong_device, data_error,
unavailable, out_of_memory.)")
      .def(
          "ingest",
          [](PyDrafter& self, const PyBatch& batch, const std::vector<nb::object>& taps, nb::handle stream) {
            std::vector<TensorView> views;
            for (const auto& tap : taps) views.push_back(view_of(tap, "taps"));
            const Stream on = self.stream_of_call(stream);
            without_gil([&] { self.drafter.ingest(batch.views, views, on); });
          },
          nb::arg("batch"), nb::arg("taps"), nb::kw_only(), nb::arg("stream") = nb::none(),
          "taps: one [T, target_hidden_size] BF16 per target layer. Adjacent windows of one buffer are not copied.")
      .def(
          "draft",
          [](PyDrafter& self, const PyBatch& batch, nb::handle stream) {
            const Stream on = self.stream_of_call(stream);
            without_gil([&] { self.drafter.draft(batch.views, on); });
          },
          nb::arg("batch"), nb::kw_only(), nb::arg("stream") = nb::none(),
          "Drafts num_draft_tokens tokens per request: see tokens, draft_logits, confidence.")
      .def(
          "verify",
          [](PyDrafter& self, const PyBatch& batch, nb::handle draft_ids, nb::handle logits, nb::handle emitted,
             nb::handle accepted, bool one_hot, std::string_view method, nb::handle stream) {
            const VerifyBatch verify{view_of(draft_ids, "draft_ids"),
                                     view_of(logits, "logits"),
                                     view_of(emitted, "emitted", Access::kWrite),
                                     view_of(accepted, "accepted", Access::kWrite),
                                     one_hot,
                                     value_of(kMethods, method, "method")};
            const Stream on = self.stream_of_call(stream);
            without_gil([&] { self.drafter.verify(batch.views, verify, on); });
          },
          nb::arg("batch"), nb::arg("draft_ids"), nb::arg("logits"), nb::arg("emitted"), nb::arg("accepted"),
          nb::kw_only(), nb::arg("one_hot") = false, nb::arg("method") = "block", nb::arg("stream") = nb::none(),
          R"(Accepts or rejects draft_ids [R, k] int32 by the target's logits [R, k + 1, V], float32 or BF16, after all
sampling parameters. Writes emitted [R, k + 1] int32, padded with -1, and accepted [R] int32, 1 to k + 1. one_hot: the drafts
were chosen, not drawn: as in mode "greedy".)")
      .def_prop_ro("weight_bytes", [](const PyDrafter& self) { return self.drafter.weight_bytes(); });

  drafter.def(
      "_stage_result",
      [](nb::handle self, const std::string& name) {
        const DsparkDrafter& d = nb::cast<PyDrafter&>(self).drafter;
        return array_of(stage_result(d, name == "values" ? Stage::kValues : Stage::kContextProj), self);
      },
      "For tests: \"context_proj\" or \"values\", of the last layer.");

  const auto output = [&](const char* name, TensorView DraftOutput::*field, const char* doc) {
    drafter.def_prop_ro(
        name, [field](nb::handle self) { return array_of(nb::cast<PyDrafter&>(self).drafter.output().*field, self); },
        doc);
  };
  output("tokens", &DraftOutput::tokens, "[R, k] int32; -1 for padding.");
  output("draft_logits", &DraftOutput::draft_logits, "[R, k, V / ranks]; None in mode \"greedy\".");
  output("base_logits", &DraftOutput::base_logits, "[R k, V / ranks] BF16: before the Markov bias.");
  output("hidden", &DraftOutput::hidden, "[R k, H] BF16: after the final norm.");
  output("confidence", &DraftOutput::confidence, "[R, k] float32: chance that draft i is accepted if all before are.");
  output("survival", &DraftOutput::survival, "[R, k] float32: products of confidence.");
  output("first_position", &DraftOutput::first_position, "[R] int64: position of the anchor.");
  output("status", &DraftOutput::status, "[R] int32 bits: 1 bad page, 2 no finite logit, 4 bad input.");
}

}  // namespace twostep::python
