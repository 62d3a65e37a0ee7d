// One random step of PreparedKda, the same on every device, and how its results are judged (spec: kda 5, 9, 11). Pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kda/contract.h"
#include "kda/tactics.h"

namespace twostep {

// Memory of one device. What allocate gives lives as long as this.
class KdaMemory {
 public:
  virtual ~KdaMemory() = default;
  virtual Device device() const = 0;
  virtual Stream stream() const = 0;
  virtual std::unique_ptr<KdaMemory> fresh() const = 0;  // of the same device, for another life
  virtual void* allocate(std::size_t bytes) = 0;         // 256-byte aligned
  virtual void write(void* to, const void* host, std::size_t bytes) = 0;
  virtual void read(void* host, const void* from, std::size_t bytes) = 0;  // after the work on the stream
  // `count` BF16 values, normal with this deviation, that depend on `base` and their place alone. As FP32, two of them
  // are one such value with a random tail.
  virtual void fill(void* to, std::int64_t count, std::uint64_t base, float scale) = 0;
};
std::unique_ptr<KdaMemory> make_host_memory();

// A key, a layout, and which of the rarer things occur.
struct KdaProblem {
  int heads = 1;
  std::int64_t requests = 1;
  int tokens = 1;
  int conv_len = 3;  // L
  int window = 1;    // w: columns of slots; above tokens, or above 1 in decode: after a longer verify step
  bool dim_first = false;
  bool softplus = false;
  bool bias = false;
  bool bf16_weights = false;  // conv weight, bias and norm weight; else FP32
  bool padded = false;        // strides wider than dense, tables with more rows and columns than are used
  bool lengths = false;       // ragged requests
  bool dead = false;          // dead and bad requests among the live
  bool early_caches = false;
  bool records = false;  // state mode; the columns of slots past the first are then not used
  std::optional<KdaTactic> tactic;
  std::uint64_t seed = 1;
  bool with_accepted() const { return tokens > 1 || window > 1; }
  StateMode mode() const { return records ? StateMode::kRecords : StateMode::kSlots; }
};
// Throws what construction and prepare throw of such a key, and kInvalidArgument for a window past L - 2.
void check_problem_shape(const KdaProblem& problem);
// The kernel that serves the problem on a GPU. Throws as check_problem_shape.
KdaBuild kda_build_of(const KdaProblem& problem, const DeviceFacts& facts);
KdaKernelText kda_fold_text_of(const KdaProblem& problem);  // with records, that of fold_records
// "--heads 12 --requests 3 ..": the options of `twostep check kda` that give this problem.
std::string to_options(const KdaProblem& problem);

enum KdaArray {
  kConvWeight,
  kConvBias,
  kFB,
  kALog,
  kDtBias,
  kNormWeight,
  kProjected,
  kOut,
  kConv,
  kState,
  kSlots,
  kAccepted,
  kLengths,
  kRecords,
  kCounters,
  kFolded,  // of results, with records: the states once all tokens of the step are folded, too
  kNumKdaArrays
};
// Bytes of each array on the host; empty where the problem has none.
using KdaArrays = std::array<std::vector<std::byte>, kNumKdaArrays>;
// Weights depend on the seed, the operands of a step on the draw too. Outputs, gaps and everything that must not be
// read hold NaN.
KdaArrays make_kda_arrays(const KdaProblem& problem, std::uint64_t draw);

// What section 9 says of a request.
struct KdaFate {
  bool live = false;
  int line = 0;
  int length = 0;           // tokens that are computed
  int pending = 0;          // recorded tokens that are folded first
  std::vector<int> stores;  // slot of the state after token t; -1: none. Of a verify step with records: of that folded
};
std::vector<KdaFate> kda_fates(const KdaProblem& problem, const KdaArrays& arrays);

// The problem's layer on one device, prepared for its one key.
class KdaSide {
 public:
  // `cpu_path` as KdaTestSwitches. `memory` must outlive this.
  KdaSide(KdaMemory& memory, const KdaProblem& problem, const KdaArrays& weights, const char* cpu_path = "auto");
  // Runs the step on a copy of the arrays and gives back what it left of out, caches and counters. With records, then
  // folds what it recorded.
  KdaArrays run(const KdaArrays& arrays);

 private:
  void fold(const KdaArrays& arrays);
  KdaMemory& memory_;
  KdaProblem problem_;
  std::array<void*, kNumKdaArrays> at_{};
  PreparedKda kda_;
};

// Sums over draws. A head is one (request, head) after one step; m = max(1, |S|max) of it.
struct KdaErrors {
  std::uint64_t outputs = 0;  // of live rows
  std::uint64_t equal = 0;    // bit for bit
  double difference = 0;      // sum of (out - ref)^2
  double norm = 0;            // sum of ref^2
  std::uint64_t heads = 0;    // after a request's first token: later ones inherit its flips
  std::uint64_t close = 0;    // of them, max |S - S_ref| <= 1e-5 m
  double worst = 0;           // max |S - S_ref| / m, after every token
  std::uint64_t nans = 0;
  std::uint64_t conv = 0;        // elements of conv lines that differ
  std::uint64_t nonzero = 0;     // outputs of dead rows that are not +0
  std::uint64_t outside = 0;     // bytes that changed and belong to no named slot or row
  std::uint64_t counters = 0;    // of the four, that differ from section 9.4
  std::uint64_t unrepeated = 0;  // bytes that differ in a second run
  double equal_share() const { return outputs ? static_cast<double>(equal) / static_cast<double>(outputs) : 1; }
  double close_share() const { return heads ? static_cast<double>(close) / static_cast<double>(heads) : 1; }
  double rms() const;
  void add(const KdaErrors& more);
};
KdaErrors judge_kda(const KdaProblem& problem, const KdaArrays& before, const KdaArrays& result,
                    const KdaArrays& reference);
// Empty, or the first rule of kda 9, 11.1 (plain) or 11.2 that is broken. The 98 % rule asks for 256 heads.
std::string broken_rule(const KdaErrors& errors);

}  // namespace twostep
