// Shared by the KDA tests: random layers and steps, their operands in memory full of NaN, and the rules of kda 11.1.
//
// Most tests make a Scene, change its step, and judge its run:
//
//   Scene scene(random, {.heads = 12, .tokens = 4});
//   scene.step.accepted = {{3}};
//   scene.refill(random);                    // caches that this step may read
//   expect_right(scene.judge(scene.run()));  // exact rules at once, tolerances by expect_right
//
// For a forced tactic, early_caches or the switches of contract.h fill SceneSpec::rig. For graphs and other streams
// take the parts: Bound holds the operands of one call in device memory at fixed addresses (call(), put(), read()), and
// scene.rig.kda is the object under test.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "kda/contract.h"
#include "tests/kda/backend.h"
#include "tests/kda/oracle.h"
#include "twostep/kda.h"

namespace twostep::kda_test {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSlowBuild = true;  // by an order of magnitude
#else
inline constexpr bool kSlowBuild = false;
#endif

using Random = std::mt19937_64;

// TWOSTEP_TEST_SEED, else a fresh number; replay() is the line that repeats it.
std::uint64_t seed();
std::string replay();

// ---- Memory of the backend

struct Place {
  std::int64_t offset = 0;  // bytes from a 256-byte border
  bool last = false;        // ends where the allocation ends, so that a checker sees a read behind it
};

// Bytes with guards of NaN around them.
class Memory {
 public:
  Memory() = default;
  explicit Memory(std::size_t bytes, Place place = {}) : Memory(nullptr, bytes, place) {}  // NaN
  template <class T>
  explicit Memory(const std::vector<T>& values, Place place = {})
      : Memory(values.data(), values.size() * sizeof(T), place) {}
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();

  void* data() const { return static_cast<char*>(base_) + front_; }
  std::size_t bytes() const { return bytes_; }
  void poison();  // every byte 0xff: NaN in each dtype
  void put(const void* from, std::size_t bytes);
  template <class T>
  void put(const std::vector<T>& values) {
    put(values.data(), values.size() * sizeof(T));
  }
  template <class T>
  std::vector<T> get() const {  // and a failure, if a guard changed
    std::vector<T> values(bytes_ / sizeof(T));
    take(values.data());
    return values;
  }

 private:
  Memory(const void* values, std::size_t bytes, Place place);
  void take(void* to) const;
  void* base_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t front_ = 0;  // bytes of guard
  std::size_t back_ = 0;
};

// A dense view of memory.
TensorView view_of(const Memory& memory, DType dtype, std::vector<std::int64_t> shape);

// ---- The layer

struct LayerSpec {
  int heads = 1;
  bool softplus = false;
  bool bias = false;
};
LayerValues random_layer(Random& random, const LayerSpec& spec);
// For chains: every key of the state forgets within tens of tokens, and so a flip (kda 4.5) within as many. Where a key
// does not decay, one flip changes the outputs of all tokens behind it, and no rate of outputs holds.
void forget(LayerValues& layer);

// Weights in memory of the backend; conv weight, bias and norm weight as `small`.
class Layer {
 public:
  explicit Layer(LayerValues values, DType small = DType::kF32);
  KdaWeights weights() const;
  const LayerValues& values() const { return values_; }
  void put(LayerValues values);  // others of the same shape, at the same addresses

 private:
  LayerValues values_;
  DType small_;
  Memory conv_weight_, conv_bias_, f_b_, a_log_, dt_bias_, norm_weight_;
};

// ---- The object under test

struct RigOptions {
  std::vector<KdaKey> keys = {};  // empty: that of the scene
  std::int64_t row_stride = 0;    // 0: the natural one
  std::int64_t first_live_slot = 1;
  bool early_caches = false;
  bool counters = true;
  bool strict = true;  // binds a buffer for the rounded values; without it Verdict::strict stays empty
  std::optional<KdaTactic> tactic = {};
  KdaTestSwitches switches = {};  // `rounded` is bound by the rig
};

class Rig {
 public:
  Rig(const Layer& layer, const CacheShape& shape, RigOptions options);

  const LayerValues& layer() const { return *layer_; }
  const CacheShape& shape() const { return shape_; }
  const RigOptions& options() const { return options_; }
  KdaCounters counters() const;
  std::vector<std::uint16_t> rounded() const { return rounded_.get<std::uint16_t>(); }
  void clear();  // counters 0, rounded values NaN

 private:
  const LayerValues* layer_;  // follows Layer::put
  CacheShape shape_;
  RigOptions options_;
  Memory rounded_, counters_;

 public:
  PreparedKda kda;
};
KdaCaches cache_views(const CacheShape& shape, void* base);
KdaOptions kda_options(const LayerValues& layer, const CacheShape& shape, const RigOptions& options);

// ---- One call

struct Placement {
  std::int64_t out_stride = 0;  // 0: D
  std::int64_t projected_offset = 0;
  std::int64_t out_offset = 0;
  std::int64_t caches_offset = 0;
  bool slots_last = false;  // slots, accepted and lengths end where their allocations end
};

struct Outcome {
  std::int64_t out_stride = 0;
  std::vector<std::uint16_t> out;  // [R][out_stride]; poison was 0xffff
  Caches caches;
  std::vector<std::uint16_t> rounded;  // [R][4][D]: q, k, v, g
  KdaCounters counters;
};

// The operands of one call in memory of the backend, at addresses that stay.
class Bound {
 public:
  Bound(const Step& step, const Caches& caches, const Placement& placement = {});
  KdaCall call() const;
  void put(const Step& step);  // of the same shape
  void put(const Caches& caches);
  void poison_out();
  Outcome read(const Rig& rig) const;

 private:
  Step step_;  // the shape of it
  CacheShape shape_;
  std::int64_t out_stride_;
  Memory projected_, out_, caches_, slots_, accepted_, lengths_;
};

// NaN in `out`, zero counters, one run, everything read back.
Outcome run(Rig& rig, const Step& step, const Caches& caches, const Placement& placement = {});
// What fold_records and, without accepted, reset_records leave.
Caches folded(Rig& rig, const Caches& caches, const std::vector<std::int32_t>& slots,
              const std::optional<std::vector<std::int32_t>>& accepted = {},
              const std::optional<std::vector<std::int32_t>>& dst_slots = {});

// ---- Steps and caches

// Projections of realistic size; NaN in columns past the used ones. Distinct live slots in random order, one per
// column of `window`; accepted 1 for verify, absent for decode.
Step random_step(Random& random, int heads, int requests, int tokens, std::int64_t row_stride, std::int64_t pool,
                 std::int64_t window = 0, std::int64_t first_live_slot = 1);
// Taps and states that live requests of the step read, |S| <= 2; all else NaN.
Caches random_caches(Random& random, const CacheShape& shape, const Step& step, std::int64_t first_live_slot);
void fill_state(Random& random, Caches* caches, std::int64_t slot);
// Of `tokens` tokens of every head; `count` are said to be there.
void fill_records(Random& random, Caches* caches, std::int64_t slot, int tokens, int count);
void fill_line(Random& random, Caches* caches, std::int64_t slot, std::int64_t first, std::int64_t count);

struct SceneSpec {
  int heads = 1;
  int requests = 1;
  int tokens = 1;
  int conv_len = 0;         // 0: 3 for decode, else 2 + tokens
  std::int64_t window = 0;  // columns of slots; 0: tokens
  std::int64_t pool = 0;    // slots; 0: one dead, one spare
  std::int64_t pad = 0;     // bytes between slots
  bool softplus = false;
  bool bias = false;
  bool dim_first = false;
  bool paged = false;
  bool records = false;  // state mode; pending records of random tokens, where accepted is not 1 or by chance
  DType small = DType::kF32;
  std::optional<CacheShape> shape = {};  // in place of conv_len, dim_first, pool, pad, paged, records
  RigOptions rig = {};
};

struct Scene {
  // `edit` changes the random layer before it is bound.
  Scene(Random& random, SceneSpec spec, const std::function<void(LayerValues&)>& edit = {});
  Scene(const Scene&) = delete;
  void redraw(Random& random);                      // another step and other caches for the same rig
  void refill(Random& random);                      // caches for the step as it is now
  void set_slots(std::vector<std::int32_t> table);  // compact, as many columns as now
  Outcome run(const Placement& placement = {}) { return kda_test::run(rig, step, before, placement); }
  struct Verdict judge(const Outcome& outcome, Profile profile = Profile::kStock) const;

  SceneSpec spec;
  CacheShape shape;
  Layer layer;
  Rig rig;
  Step step;
  Caches before;
};

// ---- Judgement

// What the rules of 11.1 need, pooled. A head is one stored state of one (request, head).
struct Tally {
  std::int64_t outputs = 0;
  std::int64_t unequal = 0;
  double error_squares = 0;
  double squares = 0;
  std::int64_t heads = 0;
  std::int64_t singles = 0;      // of them, those after one token from equal inputs
  std::int64_t singles_off = 0;  // by more than 1e-5 m
  std::int64_t far = 0;          // heads off by more than 5e-3 m
  double worst = 0;              // max |S - S_ref| / m
  double worst_rounded = 0;      // of the kernel's q, k, v, g: in BF16 steps
  Tally& operator+=(const Tally& other);
};
struct Verdict {
  Tally plain;
  Tally strict;
  Verdict& operator+=(const Verdict& other);
};
std::string to_string(const Tally& tally);

// The oracle's own states of a chain of steps, by slot: [H][k][v].
struct Carried {
  std::map<std::int64_t, State> plain, strict;
};

// Fails at once where a byte is not as it must be: dead rows, bytes around `out`, conv lines, untouched slots, padding,
// counters. Tallies the outputs and states of live tokens. With `carried` the oracle starts from its own states.
Verdict judge(const Rig& rig, const Step& step, const Caches& before, const Outcome& outcome,
              Profile profile = Profile::kStock, Carried* carried = nullptr);

void expect_states(const Tally& tally);  // of plain, the rule of every head
void expect_strict(const Tally& tally);
void expect_plain(const Tally& tally);
void expect_right(const Verdict& verdict);  // single steps: strict, and plain as far as the pool allows
void expect_chain(const Verdict& verdict);  // pooled over the steps of a chain

// Outputs, caches and counters bit by bit.
void expect_same_bits(const Outcome& a, const Outcome& b);
void expect_same_out(const Outcome& a, const Outcome& b);
// Line, state and records of one slot, into a pool of the same heads and line.
void copy_slot(const Caches& from, std::int64_t slot, Caches* to);
// The same lines and states in another shape.
Caches reshaped(const Caches& caches, const CacheShape& shape);
void expect_same_contents(const Caches& a, const Caches& b);
void expect_untouched(const Caches& before, const Caches& after);
// Rows of `outcome` are +0.
void expect_zero_row(const Outcome& outcome, std::int64_t row);

template <class Work>
std::string_view code_of(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    return code_name(error.code());
  }
  return code_name(StatusCode::kOk);
}

class KdaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = backend().usable(); !status.ok()) GTEST_SKIP() << status.message();
  }
  Random random{seed()};

 private:
  testing::ScopedTrace trace_{__FILE__, __LINE__, replay()};
};

// Calls f(0) .. f(count - 1) from all cores and passes the first exception on.
void parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& f);

}  // namespace twostep::kda_test
