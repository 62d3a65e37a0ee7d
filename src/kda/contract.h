// What PreparedKda accepts and, if not, why not (spec: kda 3, 5, 14). Pure: no driver call.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "twostep/kda.h"

namespace twostep {

// A layer that passed construction.
struct KdaModel {
  KdaWeights weights;
  KdaOptions options;  // policies in rising order of key
  Device device;
  int heads = 0;
  std::int64_t channels() const { return std::int64_t{128} * heads; }  // D
  std::int64_t used_columns() const { return 4 * channels() + 128 + heads; }
  bool records() const { return options.state_mode == StateMode::kRecords; }
};

// Rows 1-9 of kda 14. Throws.
KdaModel check_kda(const KdaWeights& weights, const KdaOptions& options);

// Row 24: may `now` be loaded in place of the model's weights? kWeightChanged else.
Status same_kda_weights(const KdaModel& model, const KdaWeights& now);

// The caches as prepare saw them. Strides in elements of the cache.
struct KdaLayout {
  std::int64_t num_slots = 0;
  int conv_len = 0;  // L
  std::int64_t conv_stride = 0;
  std::int64_t state_stride = 0;
  std::int64_t record_bytes = 0;  // of the view's rows, and between them; 0 without records
  std::int64_t record_stride = 0;
  std::int64_t entries() const { return conv_len - 2; }  // tokens that a record area has room for (E)
  friend bool operator==(const KdaLayout&, const KdaLayout&) = default;
};

// Rows 10-12. Throws. The stride of a single slot is taken as dense.
KdaLayout check_layouts(const KdaModel& model, const KdaCaches& layouts);

// A call that passed all checks: what a launch needs. Strides in elements.
struct KdaStep {
  std::size_t key = 0;  // index of the policy
  std::int64_t requests = 0;
  int tokens = 0;
  const std::uint16_t* projected = nullptr;
  std::int64_t row_stride = 0;
  std::uint16_t* out = nullptr;
  std::int64_t out_stride = 0;
  std::uint16_t* conv = nullptr;
  float* state = nullptr;
  std::uint8_t* records = nullptr;  // null in slots mode
  const std::int32_t* slots = nullptr;
  std::int64_t slots_stride = 0;  // between rows
  std::int64_t window = 0;        // w: columns that may be used; at least 1, with records 1
  const std::int32_t* accepted = nullptr;
  const std::int32_t* lengths = nullptr;
};

// fold_records and, without accepted, reset_records.
struct KdaFold {
  std::int64_t requests = 0;
  std::uint16_t* conv = nullptr;
  float* state = nullptr;
  std::uint8_t* records = nullptr;
  const std::int32_t* slots = nullptr;
  std::int64_t slots_stride = 0;
  const std::int32_t* accepted = nullptr;
  const std::int32_t* dst_slots = nullptr;  // slots itself in place
  std::int64_t dst_stride = 0;
};

// Row 15: *index of the policy when kOk, else kNotPrepared with the key and all prepared ones.
Status find_key(const KdaModel& model, bool prepared, KdaKey key, const char* place, std::size_t* index);

// Rows 15-21, in an order that names the first cause. `layout` null: nothing is prepared. Fills *step when kOk.
// Formats text only when it refuses; allocates nothing otherwise.
Status check_call(const KdaModel& model, const KdaLayout* layout, const KdaCall& call, KdaStep* step);

// The same rows for fold_records and, with null in place of accepted, reset_records.
Status check_fold(const KdaModel& model, const KdaLayout* layout, const KdaCaches& caches, const TensorView& slots,
                  const TensorView* accepted, const std::optional<TensorView>& dst_slots, KdaFold* fold);

// One head's part of a slot's record area (5.5); `area` is its first byte.
struct KdaRecords {
  float* u;          // [entries, 128]
  std::uint16_t* k;  // [entries, 128]
  std::uint16_t* g;  // [entries, 128]
  std::int32_t* count;
};
KdaRecords kda_records(std::uint8_t* area, int heads, std::int64_t entries, std::int64_t head);

// [3D, 1, 4], by the same checks as check_kda.
Status check_conv_weight(const TensorView& conv_weight, std::int64_t channels, const char* place);
// The arguments of decode_conv_weight.
Status check_decode_conv(const TensorView& conv_weight, const TensorView& out);

// The owned copies as one block of FP32 on the host: conv [3][4][D], bias [3D] (zeros when absent), norm weight [128].
// Sources are host memory of the dtypes that check_kda took.
struct KdaOwned {
  static std::int64_t floats(std::int64_t channels) { return 15 * channels + 128; }
  static std::int64_t bias_offset(std::int64_t channels) { return 12 * channels; }
  static std::int64_t norm_offset(std::int64_t channels) { return 15 * channels; }
};
// `weights` with data pointers that the host can read.
void fill_owned(const KdaWeights& weights, std::int64_t channels, float* owned);
void transpose_conv_weight(const TensorView& conv_weight, std::int64_t channels, float* out);

// For tests and checks alone.
struct KdaTestSwitches {
  // R16 values of q, k, v and g as the step used them: BF16 [R, 4, D], memory of the device. Null: not written.
  std::uint16_t* rounded = nullptr;
  const char* fault = "kNone";    // turns one synchronisation rule off (kernels/kda/kda_step.cuh)
  const char* cpu_path = "auto";  // or the name of one of kda_cpu_paths()
  int threads = 0;                // CPU; 0: all
};

// What runs a checked step on one kind of device.
class KdaPlan {
 public:
  virtual ~KdaPlan() = default;
  // Makes everything that run needs for every policy. Strong guarantee.
  virtual void prepare(const KdaLayout& layout) = 0;
  virtual void run(const KdaStep& step, KdaCounters* counters, Stream stream) = 0;
  virtual void fold(const KdaFold& fold, KdaCounters* counters, Stream stream) = 0;
  virtual void reload(const KdaWeights& weights, Stream stream) = 0;  // already checked
  virtual KdaTactic tactic(std::size_t key) const = 0;
  virtual std::string kernel(std::size_t key) const = 0;
  virtual KdaStats stats() const = 0;  // without runs
};

std::unique_ptr<KdaPlan> make_cpu_kda(const KdaModel& model, const KdaTestSwitches& test);   // cpu.cpp
std::unique_ptr<KdaPlan> make_cuda_kda(const KdaModel& model, const KdaTestSwitches& test);  // plan.cpp
void cuda_decode_conv_weight(const TensorView& conv_weight, const TensorView& out, Stream stream);

// The public class with test switches: the same checks, the same plan.
PreparedKda make_prepared_kda(const KdaWeights& weights, const KdaOptions& options, const KdaTestSwitches& test);

// The CPU implementations, fastest first; "reference" (FP32) and "reference64" (FP64) are always there.
std::vector<std::string> kda_cpu_paths();

}  // namespace twostep
