// DsparkDrafter: the whole DSpark draft step of Kimi K3 and K3.1, from hidden states of the target to drafted tokens,
// and the rejection sampling that checks them (spec: drafter; method: https://arxiv.org/abs/2607.05147).
//
// A step is three calls. `ingest` projects the rows that the target just processed into the drafter's latent cache;
// `draft` runs k rows per request (the token just sampled, then mask tokens) through the layers and samples k tokens,
// one after the other, through the Markov head; `verify` checks them against the target's logits.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "twostep/drafter_config.h"
#include "twostep/status.h"
#include "twostep/tensor.h"

namespace twostep {

inline constexpr int kMaxDraftTokens = 16;

class Checkpoint;  // private

// A drafter's tensors: files that are mapped and read when a drafter is prepared, or memory of the caller. A file must
// not be written or cut from load until prepare returns: prepare refuses one that was (kDataError), and one that
// shrinks while it is read ends the process (SIGBUS), as with every mapped file. A new file under its name does no
// harm.
class DrafterWeights {
 public:
  struct Options {
    std::string overrides = "{}";  // a JSON object of config fields, which win over config.json; allow_nope
    bool embedding_lent = false;   // the target lends embed_tokens: it need not be there
    bool check_finite = false;     // refuse NaN and infinity, by tensor
  };

  // config.json with model.safetensors, or the files of model.safetensors.index.json; target.safetensors
  // (embed_tokens.weight, lm_head.weight) where it is there. Throws kInvalidArgument and kUnsupported (config),
  // kDataError: one Error that lists every missing, unexpected and wrongly shaped tensor.
  static DrafterWeights load(const std::filesystem::path& folder, const Options& options);
  static DrafterWeights load(const std::filesystem::path& folder) { return load(folder, Options()); }

  // Dense tensors in host memory by the names of drafter 3.1, with embed_tokens.weight and lm_head.weight where the
  // target does not lend them. The memory is the caller's and must outlive prepare. Throws as load.
  static DrafterWeights from_memory(const DrafterConfig& config, const std::map<std::string, TensorView>& tensors,
                                    const Options& options);

  const DrafterConfig& config() const;
  const Checkpoint& checkpoint() const { return *checkpoint_; }

 private:
  explicit DrafterWeights(std::shared_ptr<const Checkpoint> checkpoint) : checkpoint_(std::move(checkpoint)) {}
  std::shared_ptr<const Checkpoint> checkpoint_;
};

enum class DraftMode : std::uint8_t {
  kGreedy,         // every request drafts the best token; no draft logits are kept
  kProbabilistic,  // a request of temperature T draws from softmax(l / T); its logits are kept for `verify`
};
enum class VerifyMethod : std::uint8_t {
  kStandard,  // https://arxiv.org/abs/2211.17192
  kBlock,     // https://arxiv.org/abs/2403.10444
};

struct DrafterLimits {
  std::vector<int> request_counts = {1};  // R of a step: a smaller one is padded by the caller. Each from 1 to 512
  int num_draft_tokens = 7;               // k, 1 to 16 and at most the config's block_size
  std::int64_t max_ingest_rows = 0;       // 0: the largest R * (k + 1). At most 2^20
  std::int64_t max_len = 0;               // positions of a sequence; 0: the config's max_position_embeddings
  DraftMode mode = DraftMode::kGreedy;
  DType draft_logits = DType::kF32;  // or kBF16: l is rounded before it is used, so that q stays exactly softmax(l / T)
  std::vector<float> calibration;    // T_i of the confidence, k values above 0; empty: 1
  bool strict = true;                // a request's bits do not depend on how many share the step (DraftGemm's strict)
};

// One GPU as rank `rank` of `ranks`: its shards and shapes, without communication. What other ranks would send counts
// as zero, so that results are partial and only timed.
struct DrafterShard {
  int ranks = 1;
  int rank = 0;
};

// What the target supplies: it must be what the drafter was trained on, and nothing later can find a mistake.
struct DrafterTarget {
  std::vector<std::int64_t> tap_layers;  // in the order in which `ingest` gets the taps
  std::string stream;                    // "prefix": the residual after a layer; "attn_res": what the next one reads
  std::optional<std::int64_t> hidden_size;
  std::optional<std::int64_t> num_hidden_layers;
};

// Memory of the caller on the drafter's device. It must outlive the drafter.
struct DrafterMemory {
  // One per layer: [pages, page rows, kv_lora_rank + qk_rope_head_dim] BF16, rows [latent | rope] dense, pages any
  // stride. All of one shape, no two with a byte in common. Page 0 is never written nor read: page tables point to it
  // where they hold nothing.
  std::vector<TensorView> cache;
  std::optional<TensorView> embed_tokens;  // [V, H] BF16, lent by the target; else the checkpoint's: this rank's rows
  std::optional<TensorView> lm_head;       // [V / ranks, H] BF16: this rank's rows; else the checkpoint's
};

// What one step reads, all of it on the drafter's device, so that a graph can be replayed with new values. R is the
// number of requests in the step, padding included; T the rows that the target processed, of all requests.
struct DraftBatch {
  TensorView request;    // I32 [R]: number of the request, -1: padding, as is one that the call has no rows of
  TensorView row_start;  // I32 [R + 1], ascending: request r has rows row_start[r] .. row_start[r + 1] - 1, one or more
  TensorView rejected;   // I32 [R]: how many of these rows, at the end, were rejected drafts
  TensorView anchor;     // I32 [R]: the token just sampled; in an unfinished prefill the next token of the prompt
  TensorView positions;  // I64 [T]: position of each row in its sequence
  TensorView page_table;   // I32 [R, any]: page of each `page rows` positions
  TensorView temperature;  // F32 [R]: below 1e-5 greedy
  TensorView seed;         // I64 [R]
  TensorView step;         // I32 [R]: counter that must not repeat for a seed; `verify` adds 1
};

// What is written, and batch.step, must not meet anything that `verify` reads.
struct VerifyBatch {
  TensorView draft_ids;  // I32 [R, k]: -1, or an id that is none, ends a block
  TensorView logits;     // F32 or BF16 [R, k + 1, V]: the target's, after all sampling parameters
  TensorView emitted;    // I32 [R, k + 1]: written, padded with -1
  TensorView accepted;   // I32 [R]: written, 1 to k + 1; 0 for padding. Drafts accepted are one fewer
  bool one_hot = false;  // the drafts were not drawn from draft_logits but chosen: as in greedy mode
  VerifyMethod method = VerifyMethod::kBlock;
};

// Bits of DraftOutput::status.
enum DraftStatus : std::int32_t {
  kBadPage = 1,    // a page id outside 1..pages - 1, or a page table too short: these rows were not read or written
  kNonFinite = 2,  // a row of logits without a finite value: id 0 was taken
  kBadInput = 4,  // row_start, rejected, positions or anchor out of range, or no row that was not rejected: the request
                  // was treated as padding
};

// What a step leaves, in memory of the drafter at fixed addresses. Rows of the batch's R requests are valid.
struct DraftOutput {
  TensorView tokens;          // I32 [R, k]; -1 for padding
  TensorView draft_logits;    // F32 or BF16 [R, k, V / ranks]; rank 0 in greedy mode
  TensorView base_logits;     // BF16 [R * k, V / ranks]: before the Markov bias
  TensorView hidden;          // BF16 [R * k, H]: after the final norm
  TensorView confidence;      // F32 [R, k]: chance that draft i is accepted if all before it are; rank 0: no head
  TensorView survival;        // F32 [R, k]: products of confidence
  TensorView first_position;  // I64 [R]: of the anchor, p + 1
  TensorView status;          // I32 [R]: DraftStatus bits of all calls since the last ingest, that one included. Each
                              // ingest begins anew, since place r may then be another request's: read them before
};

class DsparkDrafter {
 public:
  // Loads this rank's shards to `device`, makes every kernel and buffer. Slow; the only call that allocates. `progress`
  // gets bytes done and in all. The device is that of the cache. Throws kInvalidArgument (limits, target facts,
  // shard, cache), kUnsupported, kBadLayout, kOverlap (layers of the cache), kWrongDevice, kDataError (a tensor is
  // missing, a file was written since load), kUnavailable, kOutOfMemory, kCompileFailed, kDeviceError.
  static DsparkDrafter prepare(const DrafterWeights& weights, const DrafterLimits& limits, const DrafterTarget& target,
                               const DrafterMemory& memory, Device device = Device::cpu(), DrafterShard shard = {},
                               const std::function<void(std::uint64_t, std::uint64_t)>& progress = {});
  DsparkDrafter(DsparkDrafter&&) noexcept;
  DsparkDrafter& operator=(DsparkDrafter&&) noexcept;
  ~DsparkDrafter();

  // The three calls of a step. They allocate, lock, synchronise and compile nothing, may be captured, and leave their
  // results in stream order. (On the CPU, the first step of a thread makes that thread's scratch and OpenMP team.) One
  // drafter runs on one stream at a time. Each throws before any launch: kInvalidArgument (shape), kUnsupported
  // (dtype), kBadLayout, kOverlap, kWrongDevice, kNotPrepared (an R that limits do not name).

  // taps: one [T, target_hidden_size] BF16 per tap, any row stride; adjacent windows of one buffer are read in place.
  // Writes the cache rows of the first T_q - rejected rows of each request. T from 0 to max_ingest_rows.
  void ingest(const DraftBatch& batch, std::span<const TensorView> taps, Stream stream = {});

  // Drafts from the batch's positions: request r's block is at p + 1 .. p + k, p the position of its last valid row.
  void draft(const DraftBatch& batch, Stream stream = {});

  // Reads temperature, seed, step and request of the batch, output().first_position and, unless one_hot,
  // output().draft_logits.
  void verify(const DraftBatch& batch, const VerifyBatch& verify, Stream stream = {});

  const DraftOutput& output() const;  // shapes of the largest R
  const DrafterConfig& config() const;
  std::int64_t weight_bytes() const;  // resident, of this rank

  struct Impl;
  Impl& impl() const { return *impl_; }  // of the library

  explicit DsparkDrafter(std::unique_ptr<Impl> impl);

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace twostep
