// Whole draft steps without a model to serve: the toy target (drafter 11.4), whose logits depend on the last two tokens
// alone, synthetic features as its taps, and the bookkeeping of positions, pages and accepted tokens.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/timer.h"
#include "drafter/stages.h"
#include "twostep/drafter.h"

namespace twostep {

struct DraftLoopOptions {
  int requests = 1;
  int draft_tokens = 7;
  std::int64_t context = 64;  // tokens of each prompt
  std::int64_t steps = 8;
  float temperature = 0;  // 0: greedy drafts, greedy verification
  std::uint64_t seed = 1;
  VerifyMethod method = VerifyMethod::kBlock;
  DrafterShard shard = {};
};

// FP32 logits of the toy target after tokens a, b.
void toy_logits(std::uint64_t seed, std::int64_t a, std::int64_t b, std::span<float> out);
std::int32_t toy_greedy(std::uint64_t seed, std::int64_t a, std::int64_t b, std::int64_t vocab);

// What the loop's drafter runs on: memory, a stream, and a clock. A GPU's is in draft_loop_cuda.h.
class DraftMachine {
 public:
  virtual ~DraftMachine() = default;
  virtual Device device() const = 0;
  virtual Stream stream() const = 0;
  virtual void* allocate(std::size_t bytes) = 0;  // 64-byte aligned, zero; lives as long as the machine
  virtual void write(void* to, const void* host, std::size_t bytes) = 0;  // both return when done
  virtual void read(void* host, const void* from, std::size_t bytes) = 0;
  // Microseconds of the stream's time between each mark and the one before, the first one after `begin`.
  virtual void begin() = 0;
  virtual void mark() = 0;
  virtual std::vector<double> between_marks() = 0;
};
std::unique_ptr<DraftMachine> host_machine();

// Prompts of random tokens, then one draft, verify and ingest per step.
class DraftLoop {
 public:
  // Throws kInvalidArgument for options out of range, and as DsparkDrafter::prepare.
  DraftLoop(const DrafterWeights& weights, const DraftLoopOptions& options,
            const std::function<void(std::uint64_t, std::uint64_t)>& progress = {},
            std::unique_ptr<DraftMachine> machine = host_machine());
  ~DraftLoop();

  void step();

  // Of request r: the prompt's tokens, the target's first, then all that were emitted.
  const std::vector<std::int32_t>& tokens(int r) const { return tokens_[static_cast<std::size_t>(r)]; }
  // Tokens that the steps emitted for r, and the drafts of the last step.
  std::int64_t emitted(int r) const;
  const std::vector<std::int32_t>& drafts(int r) const { return drafts_[static_cast<std::size_t>(r)]; }
  // Emitted tokens over requests and steps: 1 to draft_tokens + 1.
  double accept_length() const;
  // DraftStatus bits that any call set for r.
  std::int32_t status(int r) const { return status_[static_cast<std::size_t>(r)]; }
  // Greedy loops: whether every sequence is what the target alone would have said.
  bool is_targets_own() const;

  DsparkDrafter& drafter() { return *drafter_; }
  // Microseconds of each step, by stage; the ingest of a step is that of its accepted rows.
  const std::vector<double>& stage_times(Stage stage) const { return times_[static_cast<std::size_t>(stage)]; }

  // The calls of the last step once more on what is there, without times and bookkeeping: for a graph. After a step.
  enum class Call : std::uint8_t { kIngest, kDraft, kVerify };
  void enqueue(Call call);

 private:
  class Marks;
  struct Buffers;

  void ingest(std::int64_t rows, const std::vector<std::int64_t>& first_positions);
  void keep_status();  // the next ingest begins it anew
  void timed(const std::function<void()>& call);

  const DraftLoopOptions options_;
  const std::unique_ptr<DraftMachine> machine_;
  std::vector<std::vector<std::int32_t>> tokens_, drafts_;
  std::vector<std::int32_t> status_;
  std::int64_t steps_done_ = 0;
  std::unique_ptr<Buffers> b_;
  std::unique_ptr<Marks> marks_;
  std::array<double, kNumStages> step_times_{};
  std::array<std::vector<double>, kNumStages> times_;
  std::optional<DsparkDrafter> drafter_;
};

}  // namespace twostep
