// A draft step on two backends, on the same weights and inputs, and what must hold between them: the CPU backend
// against the GPU's launches, in the emulator or on a GPU.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "drafter/stages.h"
#include "tests/drafter/models.h"

namespace twostep::step_test {

inline constexpr std::int64_t kPageRows = 16, kPagesOfRequest = 16;

// The memory that a drafter runs on.
class Space {
 public:
  virtual ~Space() = default;
  virtual Device device() const = 0;
  virtual Stream stream() const = 0;
  virtual void* allocate(std::size_t bytes) = 0;  // 16-byte aligned; lives as long as the space
  // Both return when done; `get` waits for the stream first.
  virtual void put(void* to, const void* from, std::size_t bytes) = 0;
  virtual void get(void* to, const void* from, std::size_t bytes) = 0;
};
std::unique_ptr<Space> host_space();

// What a step reads. The fifth of the requests, if there are so many, is padding.
struct Inputs {
  // `rows` of each request; 0: any number, to other positions.
  Inputs(const Case& c, std::int64_t requests, std::uint64_t number, std::int64_t rows = 0);
  std::int64_t rows() const { return static_cast<std::int64_t>(positions.size()); }
  Inputs of(const std::vector<std::int64_t>& requests) const;  // these requests, in this order

  std::mt19937_64 random;
  std::int64_t count, width;
  std::vector<std::int32_t> request, row_start, rejected, anchor, page_table, step;
  std::vector<std::int64_t> positions, seed;
  std::vector<float> temperature;
  std::vector<std::vector<std::uint16_t>> features;  // of each tap [rows, width]
};

// What it leaves, on the host. Bytes, so that NaN equals itself.
struct Outcome {
  std::vector<std::int32_t> tokens, status;
  std::vector<std::int64_t> first_position;
  std::vector<float> confidence, survival;
  std::vector<std::uint16_t> hidden, base;
  std::vector<std::byte> draft_logits;
  std::vector<std::vector<std::uint16_t>> cache;  // of each layer

  std::vector<std::int32_t> tokens_of(std::int64_t r, int k) const {
    return {tokens.begin() + r * k, tokens.begin() + (r + 1) * k};
  }
};
void expect_same_bits(const Outcome& a, const Outcome& b);

// A drafter and all that its calls read, at addresses that stay.
class Side {
 public:
  // `phases` null: as DsparkDrafter::prepare makes them for the space's device. `spoilt` is a token whose embedding,
  // lent by the target, is NaN.
  Side(const Case& c, const DrafterWeights& weights, std::int64_t requests, std::unique_ptr<Space> space,
       std::unique_ptr<StepPhases> phases, std::optional<std::int64_t> spoilt = {});

  // Of at most as many requests. `one_buffer`: taps are windows of one buffer, else each has its own.
  void put(const Inputs& in, bool one_buffer = false);
  void ingest() { drafter_->ingest(batch(), taps_, space_->stream()); }
  void draft() { drafter_->draft(batch(), space_->stream()); }
  void run() {
    ingest();
    draft();
  }
  void verify(const VerifyBatch& verify) { drafter_->verify(batch(), verify, space_->stream()); }
  Outcome read() const;  // of the requests of the last `put`

  // NaN in the cache of a layer at a position of request r, by the page table of the last `put`; the whole cache; all
  // that a call leaves.
  void spoil(std::size_t layer, std::int64_t r, std::int64_t position);
  void poison_cache();
  void poison_output();

  template <class T>
  T* copy(const std::vector<T>& values) {
    auto* to = static_cast<T*>(space_->allocate(values.size() * sizeof(T)));
    space_->put(to, values.data(), values.size() * sizeof(T));
    return to;
  }
  template <class T>
  std::vector<T> get(const void* from, std::int64_t count) const {
    std::vector<T> values(static_cast<std::size_t>(count));
    space_->get(values.data(), from, values.size() * sizeof(T));
    return values;
  }

  DraftBatch batch() const;
  std::int32_t* steps() const { return step_; }
  DsparkDrafter& drafter() const { return *drafter_; }
  Space& space() const { return *space_; }
  std::int64_t pages() const { return pages_; }

 private:
  const int k_;
  std::int64_t most_, most_rows_, pages_, width_, requests_ = 0, rows_ = 0;
  std::unique_ptr<Space> space_;
  std::vector<std::uint16_t*> cache_;
  std::uint16_t* features_ = nullptr;
  std::vector<TensorView> taps_;
  std::vector<std::int32_t> pages_of_;  // the table, as the host knows it
  std::int32_t *request_, *row_start_, *rejected_, *anchor_, *page_table_, *step_;
  std::int64_t *positions_, *seed_;
  float* temperature_;
  std::unique_ptr<DsparkDrafter> drafter_;
};

// A checkpoint of synthetic values. Its files are gone; what is mapped stays.
DrafterWeights synthetic_weights(const DrafterConfig& config);

using MakeSide = std::function<std::unique_ptr<Side>(const Case& c, const DrafterWeights& weights,
                                                     std::int64_t requests, std::optional<std::int64_t> spoilt)>;

// The CPU backend and another one, on a checkpoint of their own.
class Pair {
 public:
  Pair(Case of, std::int64_t of_requests, const MakeSide& make, std::int64_t rows = 0,
       std::optional<std::int64_t> spoilt = {});

  void put() {
    cpu->put(in);
    other->put(in);
  }
  void run() {
    put();
    cpu->run();
    other->run();
  }

  const Case c;
  const std::int64_t requests;
  Inputs in;
  std::unique_ptr<Side> cpu, other;
};

// The number that makes this run's inputs: TWOSTEP_TEST_SEED, else a fresh one.
std::uint64_t inputs_number();

// ---- What must hold

// `rows` of each request, or any number.
void expect_the_same_step(const Case& c, std::int64_t requests, const MakeSide& make, std::int64_t rows = 0);
void expect_the_verdicts_of_the_host(const Case& c, std::int64_t requests, bool one_hot, const MakeSide& make);
// What the device cannot check before the launch.
void expect_bad_pages_and_bad_numbers_touch_one_request_alone(const MakeSide& make);
// NaN where no row of the block looks: before the window of a context that is longer, and behind its end.
void expect_what_no_row_sees_not_to_matter(const Case& c, const MakeSide& make);
// NaN in block rows that causal rows before them do not see.
void expect_later_rows_not_to_spoil_earlier_ones(const Case& c, const MakeSide& make);

// Alone, in another place, beside others: the same bits, with a context of several parts.
void expect_the_bits_of_a_request_alone(const MakeSide& make);
void expect_the_same_bits_of_taps_in_one_buffer(const MakeSide& make);

// Of a GPU whose CTAs keep no weight in shared memory, though the case's do.
void expect_the_same_bits_of_a_smaller_gpu(const Case& c, std::int64_t requests, const MakeSide& make);

}  // namespace twostep::step_test
