// What a step did against what it must do: bytes exactly, values by the rules of kda 11.1.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "tests/kda/fixture.h"

namespace twostep::kda_test {
namespace {

constexpr std::uint16_t kPoison = 0xffff;

bool same_output(std::uint16_t a, std::uint16_t b) { return a == b || ((a | b) & 0x7fff) == 0; }

// Of one state against the oracle's, both [k][v]. `single`: after one token from equal inputs. The rate of kda 11.1 is
// that of single steps: a flip stays in the states of all tokens behind it.
void tally_state(const State& got, const double* reference, bool single, Tally* tally) {
  double largest = 1, error = 0;
  for (std::size_t i = 0; i < kCells; ++i) {
    const double off = std::abs(got[i] - reference[i]);
    largest = std::max(largest, std::abs(reference[i]));
    error = std::isnan(off) ? std::numeric_limits<double>::infinity() : std::max(error, off);
  }
  ++tally->heads;
  tally->singles += single;
  tally->singles_off += single && error > 1e-5 * largest;
  tally->far += !(error <= 5e-3 * largest);
  tally->worst = std::max(tally->worst, error / largest);
}

void tally_outputs(const std::uint16_t* got, const std::array<std::uint16_t, kDim>& want, Tally* tally) {
  for (std::size_t v = 0; v < kDim; ++v) {
    const double reference = decode_bf16(want[v]);
    const double off = decode_bf16(got[v]) - reference;
    ++tally->outputs;
    tally->unequal += !same_output(got[v], want[v]);
    tally->error_squares += std::isnan(off) ? std::numeric_limits<double>::infinity() : off * off;
    tally->squares += reference * reference;
  }
}

// How far the kernel's own rounding is from the oracle's. Sums near 0 are as exact as their terms of size 1 allow.
void tally_rounded(const std::array<double, kDim>& got, const std::array<double, kDim>& want, Tally* tally) {
  for (std::size_t j = 0; j < kDim; ++j) {
    const double off = std::abs(got[j] - want[j]) / (std::ldexp(std::abs(want[j]), -7) + 1e-5);
    tally->worst_rounded =
        std::isnan(off) ? std::numeric_limits<double>::infinity() : std::max(tally->worst_rounded, off);
  }
}

Rounded kernel_inputs(const Outcome& outcome, std::int64_t channels, std::int64_t row, int head) {
  Rounded inputs;
  for (int part = 0; part < 4; ++part) {
    auto& values = part == 0 ? inputs.q : part == 1 ? inputs.k : part == 2 ? inputs.v : inputs.g;
    const std::uint16_t* bits = outcome.rounded.data() + (row * 4 + part) * channels + std::int64_t{kDim} * head;
    std::transform(bits, bits + kDim, values.begin(), decode_bf16);
  }
  return inputs;
}

std::string where(const CacheShape& shape, std::int64_t at) {
  std::ostringstream text;
  text << "byte " << at;
  const auto inside = [&](std::int64_t base, std::int64_t pitch, std::int64_t dense, const char* name) {
    const std::int64_t slot = at < base ? -1 : std::min((at - base) / pitch, shape.slots - 1);
    if (slot >= 0 && at - base - slot * pitch < dense)
      text << ", " << name << " of slot " << slot << ", byte " << at - base - slot * pitch << " of it";
  };
  inside(shape.conv_base, shape.conv_pitch, shape.conv_bytes(), "conv line");
  inside(shape.state_base, shape.state_pitch, shape.state_bytes(), "state");
  if (shape.records()) inside(shape.record_base, shape.record_pitch, shape.record_bytes(), "records");
  return text.str();
}

void expect_same_bytes(const Caches& want, const Caches& got, const char* what) {
  ASSERT_EQ(want.bytes.size(), got.bytes.size()) << what;
  if (std::memcmp(want.bytes.data(), got.bytes.data(), want.bytes.size()) == 0) return;  // much faster than mismatch
  const auto [a, b] = std::mismatch(want.bytes.begin(), want.bytes.end(), got.bytes.begin(), got.bytes.end());
  if (a != want.bytes.end()) ADD_FAILURE() << what << ": " << where(want.shape, a - want.bytes.begin());
}

}  // namespace

Tally& Tally::operator+=(const Tally& other) {
  outputs += other.outputs;
  unequal += other.unequal;
  error_squares += other.error_squares;
  squares += other.squares;
  heads += other.heads;
  singles += other.singles;
  singles_off += other.singles_off;
  far += other.far;
  worst = std::max(worst, other.worst);
  worst_rounded = std::max(worst_rounded, other.worst_rounded);
  return *this;
}
Verdict& Verdict::operator+=(const Verdict& other) {
  plain += other.plain;
  strict += other.strict;
  return *this;
}

std::string to_string(const Tally& tally) {
  std::ostringstream text;
  text << tally.unequal << " of " << tally.outputs << " outputs differ, RMS ratio "
       << std::sqrt(tally.error_squares / tally.squares) << "; " << tally.singles_off << " of " << tally.singles
       << " states off, worst " << tally.worst << " m";
  return text.str();
}

Verdict judge(const Rig& rig, const Step& step, const Caches& before, const Outcome& outcome, Profile profile,
              Carried* carried) {
  const LayerValues& layer = rig.layer();
  const std::int64_t channels = layer.channels();
  KdaCounters counts;
  const std::vector<Fate> all = fates(step, before, rig.options().first_live_slot, &counts);
  const bool notes = before.shape.records() && step.tokens > 1;  // u, k and g, and no states

  // What must be exact. The states that are stored are taken over here and compared below.
  Caches expected = before;
  shift_lines(step, all, &expected);
  const auto take_state = [&](std::int64_t slot) {
    std::memcpy(expected.state(slot, 0), outcome.caches.state(slot, 0),
                static_cast<std::size_t>(before.shape.state_bytes()));
  };
  for (std::size_t n = 0; n < all.size(); ++n) {
    const Fate& fate = all[n];
    if (fate.pending > 0) take_state(fate.line);
    for (const std::int64_t slot : fate.store)
      if (slot >= 0) take_state(slot);
    if (!fate.live || !before.shape.records()) continue;
    for (int h = 0; h < layer.heads; ++h) {
      expected.count(fate.line, h) = notes ? fate.tokens : 0;
      for (int t = 0; notes && t < fate.tokens; ++t) {
        std::copy_n(outcome.caches.u(fate.line, h, t), kDim, expected.u(fate.line, h, t));
        std::copy_n(outcome.caches.k(fate.line, h, t), kDim, expected.k(fate.line, h, t));
        std::copy_n(outcome.caches.g(fate.line, h, t), kDim, expected.g(fate.line, h, t));
        if (!rig.options().strict) continue;
        const auto row = static_cast<std::int64_t>(n) * step.tokens + t;
        const std::uint16_t* used = outcome.rounded.data() + row * 4 * channels + std::int64_t{kDim} * h;
        EXPECT_TRUE(std::equal(used + channels, used + channels + kDim, outcome.caches.k(fate.line, h, t)) &&
                    std::equal(used + 3 * channels, used + 3 * channels + kDim, outcome.caches.g(fate.line, h, t)))
            << "the record of row " << row << ", head " << h << " is not what the step used";
      }
    }
  }
  expect_same_bytes(expected, outcome.caches, "caches after the step");
  for (std::int64_t row = 0; row < step.rows(); ++row) {
    const std::uint16_t* out = outcome.out.data() + row * outcome.out_stride;
    if (row % step.tokens >= all[static_cast<std::size_t>(row / step.tokens)].tokens) expect_zero_row(outcome, row);
    EXPECT_EQ(std::count(out + channels, out + outcome.out_stride, kPoison), outcome.out_stride - channels)
        << "columns past D of output row " << row << " were written";
  }
  if (rig.options().counters) {
    EXPECT_EQ(outcome.counters.bad_accepted, counts.bad_accepted);
    EXPECT_EQ(outcome.counters.bad_slot, counts.bad_slot);
    EXPECT_EQ(outcome.counters.bad_length, counts.bad_length);
    EXPECT_EQ(outcome.counters.stale_records, counts.stale_records);
  }

  // Room for the carried states first: below, several threads write into it.
  if (carried)
    for (const Fate& fate : all) {
      if (!fate.live) continue;
      for (auto* states : {&carried->plain, &carried->strict}) {
        if (!states->contains(fate.read)) {
          State& state = (*states)[fate.read];
          for (int h = 0; h < layer.heads; ++h) {
            const State head = load_state(before.state(fate.read, h));
            state.insert(state.end(), head.begin(), head.end());
          }
        }
        for (const std::int64_t slot : fate.store)
          if (slot >= 0) (*states)[slot].resize(static_cast<std::size_t>(layer.heads) * kCells);
      }
    }

  std::vector<Verdict> verdicts(static_cast<std::size_t>(step.requests) * static_cast<std::size_t>(layer.heads));
  const bool strict_too = rig.options().strict && profile == Profile::kStock;
  parallel_for(static_cast<std::int64_t>(verdicts.size()), [&](std::int64_t index) {
    const auto n = static_cast<int>(index / layer.heads), h = static_cast<int>(index % layer.heads);
    const Fate& fate = all[static_cast<std::size_t>(n)];
    if (!fate.live) return;
    Verdict& verdict = verdicts[static_cast<std::size_t>(index)];
    const auto start = [&](const State* from) {
      State state = from ? State(from->begin() + h * kCells, from->begin() + (h + 1) * kCells)
                         : load_state(before.state(fate.read, h));
      if (fate.pending > 0) fold(layer, before, fate.read, h, fate.pending, state.data());
      return state;
    };
    // The folded state that is stored; and, behind the tokens, that which their records give.
    const auto tally_recorded = [&](int tokens, const State& state, Tally* tally) {
      State got = load_state(outcome.caches.state(fate.line, h));
      fold(layer, outcome.caches, fate.line, h, tokens, got.data());
      tally_state(got, state.data(), tokens == 1 && fate.pending == 0, tally);
    };
    // Each from its own inputs and, in a chain, its own state.
    const auto advance_by = [&](const Rounded& inputs, int t, State* state, Tally* tally,
                                std::map<std::int64_t, State>* states) {
      const std::int64_t row = std::int64_t{n} * step.tokens + t;
      const auto out = advance(layer, step, row, h, inputs, profile, state->data());
      tally_outputs(outcome.out.data() + row * outcome.out_stride + std::int64_t{kDim} * h, out, tally);
      const std::int64_t slot = fate.store[static_cast<std::size_t>(t)];
      if (slot < 0 || !fate.last_to(t)) return;
      tally_state(load_state(outcome.caches.state(slot, h)), state->data(), t == 0 && !carried && fate.pending == 0,
                  tally);
      if (states) std::copy(state->begin(), state->end(), states->at(slot).begin() + h * kCells);
    };
    State plain = start(carried ? &carried->plain.at(fate.read) : nullptr);
    State strict = strict_too ? start(carried ? &carried->strict.at(fate.read) : nullptr) : State();
    if (notes && fate.pending > 0) {
      tally_recorded(0, plain, &verdict.plain);
      if (strict_too) tally_recorded(0, strict, &verdict.strict);
    }
    for (int t = 0; t < fate.tokens; ++t) {
      const Rounded inputs = token_inputs(layer, step, before, fate, n, t, h, profile);
      advance_by(inputs, t, &plain, &verdict.plain, carried ? &carried->plain : nullptr);
      if (!strict_too) continue;
      const Rounded own = kernel_inputs(outcome, channels, std::int64_t{n} * step.tokens + t, h);
      tally_rounded(own.q, inputs.q, &verdict.strict);
      tally_rounded(own.k, inputs.k, &verdict.strict);
      tally_rounded(own.v, inputs.v, &verdict.strict);
      tally_rounded(own.g, inputs.g, &verdict.strict);
      advance_by(own, t, &strict, &verdict.strict, carried ? &carried->strict : nullptr);
    }
    if (notes) {
      tally_recorded(fate.tokens, plain, &verdict.plain);
      if (strict_too) tally_recorded(fate.tokens, strict, &verdict.strict);
    }
  });
  Verdict total;
  for (const Verdict& verdict : verdicts) total += verdict;
  return total;
}

namespace {

constexpr std::int64_t kPool = 256;  // heads that the rules of plain need

// The rates of 11.1 are those of many: a sample may exceed them by three standard deviations. Outputs of a head do not
// flip one by one, though: a flip before its norm moves many of its 128 at once (19 in the worst of 500 draws of 20
// heads).
constexpr double kOfOneHead = 32;
bool within_rate(std::int64_t hits, double rate, std::int64_t count, double at_once = 0) {
  const double expected = rate * static_cast<double>(count);
  return static_cast<double>(hits) <= expected + 3 * std::sqrt(expected) + at_once;
}

// So may the error of few outputs: it is that of the few which lie on a rounding boundary.
void expect_outputs(const Tally& tally) {
  EXPECT_TRUE(within_rate(tally.unequal, 0.01, tally.outputs, kOfOneHead)) << to_string(tally);
  const double share =
      static_cast<double>(kPool * kDim) / static_cast<double>(std::max<std::int64_t>(tally.outputs, 1));
  EXPECT_LE(tally.error_squares, 25e-8 * std::max(1.0, share) * tally.squares) << to_string(tally);
}

}  // namespace

// A flip of the largest element of k moves it by up to 2^-7 of itself, so that one head in many thousands misses 5e-3
// m.
void expect_states(const Tally& tally) {
  EXPECT_TRUE(within_rate(tally.far, 1e-4, tally.heads, 1)) << to_string(tally);
  EXPECT_LE(tally.worst, 0x1p-6) << to_string(tally);
}

void expect_strict(const Tally& tally) {
  SCOPED_TRACE("strict");
  EXPECT_LE(tally.worst, 1e-5) << to_string(tally);
  EXPECT_LE(tally.worst_rounded, 1.0) << "q, k, v or g are more than one BF16 step off";
  expect_outputs(tally);
}

void expect_plain(const Tally& tally) {
  SCOPED_TRACE("plain");
  expect_states(tally);
  if (tally.singles >= kPool) {
    EXPECT_TRUE(within_rate(tally.singles_off, 0.02, tally.singles)) << to_string(tally);
  }
  if (tally.heads >= kPool) expect_outputs(tally);
}

void expect_right(const Verdict& verdict) {
  EXPECT_GT(verdict.plain.outputs, 0);
  expect_plain(verdict.plain);
  expect_strict(verdict.strict);
}

void expect_chain(const Verdict& verdict) {
  expect_states(verdict.plain);
  // One flip changes outputs for tens of tokens: in fewer tokens than these the rate of a chain says nothing.
  constexpr std::int64_t kTokens = 512;
  if (verdict.plain.outputs >= kTokens * kDim) {
    EXPECT_TRUE(within_rate(verdict.plain.unequal, 0.01, verdict.plain.outputs)) << to_string(verdict.plain);
  }
  expect_strict(verdict.strict);
}

void expect_same_out(const Outcome& a, const Outcome& b) {
  const auto [x, y] = std::mismatch(a.out.begin(), a.out.end(), b.out.begin(), b.out.end());
  EXPECT_TRUE(x == a.out.end() && y == b.out.end()) << "outputs differ first at element " << x - a.out.begin();
}

void expect_same_bits(const Outcome& a, const Outcome& b) {
  expect_same_out(a, b);
  expect_same_bytes(a.caches, b.caches, "caches differ");
}

void copy_slot(const Caches& from, std::int64_t slot, Caches* to) {
  const CacheShape& shape = to->shape;
  for (std::int64_t channel = 0; channel < 3 * kDim * shape.heads; ++channel)
    for (int position = 0; position < shape.conv_len; ++position)
      to->set_conv(slot, channel, position, from.conv(slot, channel, position));
  std::memcpy(to->state(slot, 0), from.state(slot, 0), static_cast<std::size_t>(shape.state_bytes()));
  if (shape.records())
    std::memcpy(to->u(slot, 0, 0), from.u(slot, 0, 0), static_cast<std::size_t>(shape.record_bytes()));
}

Caches reshaped(const Caches& caches, const CacheShape& shape) {
  Caches other(shape);
  for (std::int64_t slot = 0; slot < shape.slots; ++slot) copy_slot(caches, slot, &other);
  return other;
}

void expect_same_contents(const Caches& a, const Caches& b) {
  expect_same_bytes(reshaped(a, a.shape), reshaped(b, a.shape), "lines or states differ");
}

void expect_untouched(const Caches& before, const Caches& after) { expect_same_bytes(before, after, "written"); }

void expect_zero_row(const Outcome& outcome, std::int64_t row) {
  const std::int64_t channels = std::int64_t{kDim} * outcome.caches.shape.heads;
  const std::uint16_t* out = outcome.out.data() + row * outcome.out_stride;
  EXPECT_EQ(std::count(out, out + channels, std::uint16_t{0}), channels) << "output row " << row << " is not +0";
}

}  // namespace twostep::kda_test
