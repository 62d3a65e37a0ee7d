// PreparedKda: the Kimi Delta Attention core of one layer, for decode and verify steps (spec: kda 1-14).
//
// One call takes R = B * q rows of a layer's projection and gives R rows for its output projection; the caches are
// updated in place, and nothing else is written but the optional counters. On a GPU a call is one launch. With x a
// projection row and per head 128 keys k and 128 values v:
//
//   y     = silu(conv4(x))                    q, k, v after a causal convolution of width 4
//   q, k  = y_q / |y_q| * scale, y_k / |y_k|
//   g     = F_B f;  decay = exp(lower_bound * sigmoid(exp(A_log) * (g + dt_bias)))      or the softplus form
//   S     = S * decay;  u = sigmoid(b) (v - S k);  S = S + u k^T;  o = S q              S [128 v][128 k], FP32
//   out   = rms_norm(o) * norm_weight * sigmoid(z)
//
// Rounded to BF16 are q, k, v after SiLU, g, o and out; all else is FP32 (kda 4.2).
//
// Rows: request n owns rows n q .. n q + q - 1 of `projected` and `out`, one per token. Columns of a projection row,
// D = 128 H: Q [0, D), K [D, 2D), V [2D, 3D), z [3D, 4D), f [4D, 4D + 128), beta logits [4D + 128, 4D + 128 + H).
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "twostep/status.h"
#include "twostep/tensor.h"

namespace twostep {

inline constexpr int kKdaHeadDim = 128;   // keys and values of a head
inline constexpr int kKdaConvWidth = 4;   // taps of the convolution
inline constexpr int kKdaMaxHeads = 128;  // heads on one device
inline constexpr int kKdaMaxTokens = 8;   // tokens of one request in one step

// One prepared step: `requests` requests of `tokens` tokens each. tokens = 1 is decode, 2..8 is verify.
struct KdaKey {
  std::int64_t requests = 1;
  int tokens = 1;
  friend auto operator<=>(const KdaKey&, const KdaKey&) = default;
};
std::string to_string(KdaKey key);  // "4" for decode, "(4, 2)" for verify

// Which CTAs compute the gate's product F_B f. Only kInline exists: each CTA computes what it needs (10.1).
enum class GateSchedule : std::uint8_t { kInline, kShared, kPrepass };
// Where a verify step leaves what its tokens did to the state.
//   kSlots    one state per token, each in a slot of its own; the next step reads that of the last accepted token
//   kRecords  u, k and g of each token beside the state of before the step; the next step folds the accepted ones into
//             the state and stores it once. One slot per request, an eighth of the bytes at q = 8; the same bits
enum class StateMode : std::uint8_t { kSlots, kRecords };

// How one key runs on a GPU. Plain and printable.
struct KdaTactic {
  int split = 1;      // CTAs of a cluster that share the 128 values of a head: 1, 2, 4, 8
  int warps = 8;      // of a CTA: 4, 8, 16; the first that the values of the CTA need hold the state
  int pass_rows = 1;  // rows of the state that a thread holds at a time: 1, 2, 4
  // CTAs that stay, one to an SM, and prepare a (request, head) while they walk through the tokens of the one before.
  // Verify of three tokens or more in state mode records alone, with split 1, warps 16, pass_rows 4.
  bool stream = false;
  friend bool operator==(const KdaTactic&, const KdaTactic&) = default;
};
std::string to_string(const KdaTactic& tactic);  // "split 2 warps 8 pass_rows 1", "split 1 warps 16 pass_rows 4 stream"

struct KdaPolicy {
  KdaKey key;
  std::int64_t row_stride = 0;  // elements between projection rows: at least 4D + 128 + H, a multiple of 8
  GateSchedule gate = GateSchedule::kInline;
  std::optional<KdaTactic> tactic = {};  // absent: the measured choice of the GPU's table, else a rule
};

// The used width of a projection row rounded up to 16: the natural row stride, in elements.
std::int64_t kda_row_stride(int heads);

// Bytes of one slot's area in the record cache. `entries`: the tokens it has room for, L - 2.
//   per head, 1024 * entries bytes: u [entries, 128] FP32, k after SiLU [entries, 128] BF16, g [entries, 128] BF16
//   then count [heads] int32: tokens that are recorded and not yet folded; 0 in a new pool
std::int64_t kda_record_bytes(int heads, std::int64_t entries);

// The layer's weights, all on one device and contiguous. Marked (b) are borrowed: valid and at their address while the
// object lives. The others are copied by the constructor and by reload.
struct KdaWeights {
  TensorView conv_weight;               // [3D, 1, 4] FP32 or BF16; channels in Q, K, V order; tap 0 is the oldest
  std::optional<TensorView> conv_bias;  // [3D] FP32 or BF16
  TensorView f_b;                       // (b) [D, 128] BF16, row-major, 16-byte aligned
  TensorView a_log;                     // (b) H values FP32, [H] or [1, 1, H, 1]
  TensorView dt_bias;                   // (b) [D] FP32
  TensorView norm_weight;               // [128] FP32 or BF16
};

struct KdaOptions {
  int heads = 0;                          // H on this device, 1..128
  std::optional<float> gate_lower_bound;  // finite, below 0; absent: the softplus form of the gate
  float scale = 0.08838834764831845f;     // of q, 128^-0.5
  float norm_eps = 1e-5f;
  std::vector<KdaPolicy> policies;  // the keys; each once
  bool conv_dim_first = false;      // the conv cache is [slots, 3D, L] and not [slots, L, 3D]
  StateMode state_mode = StateMode::kSlots;
  DType state_dtype = DType::kF32;
  std::int64_t first_live_slot = 1;  // ids below are dead: their requests give zeros and touch no cache
  // The caller's promise that no unfinished work before a launch writes slots, accepted or the caches: the kernel may
  // then read them while the kernel before it still runs (12.2). A step that breaks the promise may hang.
  bool early_caches = false;
  bool jit = true;  // false: only kernels found in the caches
};

// The caches of one layer; as layouts, `data` is not looked at and may be null.
//   conv     BF16 [slots, L, 3D], or [slots, 3D, L] with conv_dim_first. L >= 3, for verify L >= 2 + q
//   state    FP32 [slots, H, 128, 128], values before keys: element (h, v, k)
//   records  u8 [slots, at least kda_record_bytes(H, L - 2)]; not used by StateMode::kSlots
// Dense inside a slot; slots may lie any multiple of 16 bytes apart, so that all of a slot may share a page. Bases
// 16-byte aligned.
struct KdaCaches {
  TensorView conv;
  TensorView state;
  std::optional<TensorView> records;
};

// The operands of one step. B = rows of projected / tokens.
struct KdaCall {
  TensorView projected;  // [B q, at least 4D + 128 + H] BF16, rows row_stride of the policy apart, 16-byte aligned
  TensorView out;        // [B q, D] BF16, rows any multiple of 8 elements apart; overlaps no other argument
  KdaCaches caches;      // of the prepared layouts, at any address
  // [B] or [B, w] int32, at least B rows, columns adjacent, rows any stride apart. Column 0 names the request's conv
  // line. Column t of a verify step receives the state after token t; the state read is that of column accepted - 1.
  // With StateMode::kRecords column 0 names line, state and records, and the others are not read.
  TensorView slots;
  // [>= B] int32: tokens kept of the request's last verify step, bonus included, 1..w; with StateMode::kRecords
  // 1..L - 2, at most what is recorded, and 1 where nothing is. Verify needs it; decode without it means 1.
  std::optional<TensorView> accepted;
  // [>= B] int32: tokens the request really has, 0..q; absent: q. The next step's accepted is at most this.
  std::optional<TensorView> lengths;
  // Absent: the columns of slots (1 for [B]) when accepted is given, else 1.
  std::optional<int> tokens;
};

struct KdaStats {
  std::uint64_t runs = 0;
  std::uint64_t compiles = 0;
  std::uint64_t cache_hits = 0;  // kernels found in memory or on disk
};

// Error counters in memory that the weights' device can write, in this order. A bad request adds 1 per launch (9.4).
struct KdaCounters {
  std::uint32_t bad_accepted = 0;
  std::uint32_t bad_slot = 0;
  std::uint32_t bad_length = 0;
  std::uint32_t stale_records = 0;
};

class PreparedKda;

// One layer of a call about many.
struct KdaLayerCaches {
  PreparedKda* layer = nullptr;  // prepared for these caches
  KdaCaches caches;
};

// A graph that captured a run uses memory of the object: it must not be replayed once the object is gone.
class PreparedKda {
 public:
  // Checks weights and options and copies what is owned; host work and small copies; compiles nothing. What
  // is copied must be complete: no unfinished work may write it. Throws kInvalidArgument, kUnsupported, kBadLayout,
  // kWrongDevice as in kda 14 rows 1-9, kUnavailable (weights on a GPU and no driver), kOutOfMemory, kDeviceError.
  PreparedKda(const KdaWeights& weights, const KdaOptions& options);
  PreparedKda(PreparedKda&&) noexcept;
  PreparedKda& operator=(PreparedKda&&) noexcept;
  ~PreparedKda();

  // Compiles or fetches the kernel of every key, and that of fold_records, and loads it. Needs no data: `layouts` are
  // descriptions. Host work; not concurrently with run. On an error the object is as it was. Throws kInvalidArgument,
  // kBadLayout, kUnsupported (architecture, tactic), kUnavailable, kCompileFailed.
  void prepare(const KdaCaches& layouts);

  // One step on `stream`, in one launch; may be captured. Allocates, compiles and locks nothing, reads no device
  // memory, does not synchronise. One object may run on several streams if the caches differ. Throws kNotPrepared,
  // kBadLayout, kInvalidArgument, kWrongDevice, kOverlap before any launch, with nothing changed, and kDeviceError.
  // Bad values in slots, accepted or lengths are no error. In column 0 or column accepted - 1 of slots, in accepted or
  // in lengths: the request is dead for this step (zeros out, no cache touched) and counted. In another column that is
  // written: that token's state is dropped, and counted where the id is past the pool. With StateMode::kRecords an
  // accepted that does not fit the records is counted as stale_records, and the request is dead.
  void run(const KdaCall& call, Stream stream = {});

  // Two calls of StateMode::kRecords alone. Each is one launch on `stream` for each layer, may be captured, and treats
  // bad ids, counts and arguments as run does. `slots` as in KdaCall, column 0 alone; all its rows count. Live requests
  // of a call name different slots. Many layers share the ids; all are checked before the first launch.

  // Forgets what is recorded: the state is complete as it lies. For each slot whose state something else has written:
  // a prefill, a copy without its records.
  void reset_records(const KdaCaches& caches, const TensorView& slots, Stream stream = {});
  static void reset_records(std::span<const KdaLayerCaches> layers, const TensorView& slots, Stream stream = {});
  // Folds the first `accepted` recorded tokens into the state, as the next step would: the caches then hold the request
  // after these tokens, with positions 0..2 of the line, nothing recorded, and 1 as the next accepted. For whoever
  // looks at a state between steps.
  //   accepted   [>= rows of slots] int32; 1 where nothing is recorded: then the state is taken as it is
  //   dst_slots  [>= rows of slots] or of more columns, int32: where line, state and an empty record go; absent: the
  //              slot itself. The slot that is read stays as it was. No request reads what another one writes.
  void fold_records(const KdaCaches& caches, const TensorView& slots, const TensorView& accepted,
                    const std::optional<TensorView>& dst_slots = {}, Stream stream = {});
  static void fold_records(std::span<const KdaLayerCaches> layers, const TensorView& slots, const TensorView& accepted,
                           const std::optional<TensorView>& dst_slots = {}, Stream stream = {});

  // Other values for the weights: owned copies are rebuilt at their addresses in stream order, so that captured graphs
  // see them; borrowed memory must be the same. Waits for the copies; not under capture, not concurrently with a run.
  // Throws kWeightChanged (shape, dtype, or address of borrowed memory), kCapturing.
  void reload(const KdaWeights& weights, Stream stream = {});

  // Where bad requests are counted from now on; null: nowhere. Before capture. The memory is the caller's, on the
  // weights' device or readable by it, and outlives the graphs that captured it.
  void set_counters(KdaCounters* counters);

  std::vector<KdaKey> keys() const;      // prepared, in rising order
  KdaTactic tactic(KdaKey key) const;    // that serves it; throws kNotPrepared. {} on the CPU
  std::string kernel(KdaKey key) const;  // name and hash of the compiled kernel, or the CPU path
  KdaStats stats() const;

  struct Impl;
  explicit PreparedKda(std::unique_ptr<Impl> impl);

 private:
  std::unique_ptr<Impl> impl_;
};

// The owned form of a conv weight: W[s][i][c] = weight[s D + c][0][i], s = Q, K, V; i = tap, 0 the oldest.
//   conv_weight [3D, 1, 4] FP32 or BF16, out [3, 4, D] FP32, both contiguous and on one device.
// Waits until out is written. Throws kInvalidArgument, kUnsupported (width), kBadLayout, kWrongDevice, kOverlap,
// kUnavailable, kCapturing.
void decode_conv_weight(const TensorView& conv_weight, const TensorView& out, Stream stream = {});

}  // namespace twostep
