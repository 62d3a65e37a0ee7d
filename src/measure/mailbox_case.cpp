#include "measure/mailbox_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>

#include "core/bf16.h"
#include "core/hash.h"
#include "mailbox/contract.h"

namespace twostep {
namespace {

constexpr std::uint16_t kUnwritten = 0xa5a5;

std::int64_t below(std::mt19937_64& random, std::int64_t count) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(count));
}
// 0 or 1 to most, small numbers as likely as large ones.
std::int64_t any_size(std::mt19937_64& random, std::int64_t least, std::int64_t most) {
  std::int64_t limit = 1;
  while (limit < most && below(random, 4) != 0) limit *= 2;
  return least + below(random, std::min(limit, most) - least + 1);
}

// 32 bits of what a rank sends; one word in eight is a hard one.
std::uint32_t sent_word(std::uint64_t seed, int rank, std::int64_t i) {
  constexpr std::uint32_t kHard[] = {0xffffffff, 0xffff0000, 0x0000ffff, 0x7fc07fc0,
                                     0x80000000, 0x00010001, 0x7f80ff80, 0xfffffffe};
  const std::uint64_t x =
      mix64(seed + mix64((static_cast<std::uint64_t>(rank) << 40) + static_cast<std::uint64_t>(i) + 1));
  return x % 8 == 0 ? kHard[x >> 32 & 7] : static_cast<std::uint32_t>(x >> 16);
}
std::uint16_t half_of(std::uint32_t word, std::int64_t i) { return static_cast<std::uint16_t>(word >> 16 * (i % 2)); }
std::uint16_t sent_half(std::uint64_t seed, int rank, std::int64_t i) {
  return half_of(sent_word(seed, rank, i / 2), i);
}
// A finite number of size about 1, or a small integer.
std::uint16_t sent_number(const MailboxCase& c, std::uint64_t seed, int rank, std::int64_t i) {
  const std::uint32_t word = sent_word(seed, rank, i);
  if (c.integers) return float_to_bf16(static_cast<float>(word >> 8 & 15) - 7.0f);
  return static_cast<std::uint16_t>((word & 0x807f) | (0x3d00 + (word & 0x380)));
}
constexpr int kResidual = 101, kGamma = 102;  // in place of a rank

std::int64_t out_cols(const MailboxCase& c, int ranks) {
  return c.op == MailboxOp::kAllGather ? ranks * c.cols : c.cols;
}

float gamma_of(const CallMemory& memory, const MailboxCase& c, std::int64_t i) {
  const auto at = static_cast<std::size_t>(i);
  if (c.gamma == MailboxCase::Gamma::kBF16) return bf16_to_float(memory.gamma[at]);
  float value = 0;
  std::memcpy(&value, &memory.gamma[2 * at], sizeof value);
  return value;
}

std::string differs(const char* what, std::int64_t row, std::int64_t column, std::uint32_t is, std::uint32_t expected) {
  return fmt::format("{}[{}, {}] is {:#06x}, not {:#06x}", what, row, column, is, expected);
}

}  // namespace

const char* op_name(MailboxOp op) { return mailbox_op_name(op); }

std::string to_string(const MailboxCase& c) {
  return fmt::format("{} [{}, {}]{}{}{}{}", op_name(c.op), c.rows, c.cols, c.pad ? fmt::format(" pad {}", c.pad) : "",
                     c.in_place ? " in place" : "", c.residual ? " residual" : "",
                     c.gamma == MailboxCase::Gamma::kNone ? "" : " norm");
}

std::vector<MailboxSequence> mailbox_sequences(std::uint64_t seed, int count, const MailboxLimits& limits,
                                               std::optional<MailboxOp> op) {
  std::mt19937_64 random(seed);
  std::vector<MailboxSequence> all(static_cast<std::size_t>(count));
  for (MailboxSequence& sequence : all) {
    sequence.replays = below(random, 2) == 0 ? 0 : 3;
    for (std::int64_t calls = 1 + below(random, 5); calls > 0; --calls) {
      MailboxCase c;
      c.op = op ? *op : static_cast<MailboxOp>(below(random, kMailboxOps));
      c.in_place = below(random, 3) == 0;
      if (c.op == MailboxOp::kAllGatherWords) {
        c.cols = any_size(random, 1, limits.words);
        if (c.in_place) c.cols = std::max<std::int64_t>(4, c.cols / 4 * 4);  // rows of 16 bytes
        if (c.cols > limits.words) c.in_place = false, c.cols = limits.words;
      } else {
        const bool gather = c.op == MailboxOp::kAllGather;
        c.rows = any_size(random, 0, limits.rows);
        c.cols = 8 * any_size(random, 1, (gather ? limits.cols : limits.hidden) / 8);
        c.pad = 8 * below(random, 3);
        c.residual = !gather && below(random, 3) != 0;
        c.integers = !gather && below(random, 2) == 0;
        if (!gather) c.gamma = static_cast<MailboxCase::Gamma>(below(random, 3));
      }
      sequence.calls.push_back(c);
    }
  }
  return all;
}

std::vector<MailboxCase> mailbox_bench_cases(int ranks, const std::vector<std::int64_t>& rows, std::int64_t cols,
                                             std::optional<MailboxOp> op) {
  constexpr std::int64_t kVocabulary = 163'840, kHidden = 7168;
  std::vector<MailboxCase> cases;
  const std::vector<std::int64_t> counts = rows.empty() ? std::vector<std::int64_t>{1, 4, 8, 16, 32, 64} : rows;
  for (const MailboxOp each : {MailboxOp::kAllGather, MailboxOp::kAllGatherWords, MailboxOp::kAllReduceAddNorm})
    for (const std::int64_t m : counts) {
      if (op && *op != each) continue;
      MailboxCase c;
      c.op = each;
      c.rows = each == MailboxOp::kAllGatherWords ? 1 : m;
      c.cols = cols > 0                             ? cols
               : each == MailboxOp::kAllGather      ? kVocabulary / ranks / 8 * 8
               : each == MailboxOp::kAllGatherWords ? 2 * m
                                                    : kHidden;
      if (each == MailboxOp::kAllReduceAddNorm) {
        c.residual = c.integers = true;
        c.gamma = MailboxCase::Gamma::kBF16;
      }
      if (!cases.empty() && to_string(cases.back()) == to_string(c)) continue;  // words of one width
      cases.push_back(c);
    }
  return cases;
}

CallMemory memory_before(const MailboxCase& c, int ranks, int rank, std::uint64_t seed) {
  CallMemory memory;
  const auto unwritten = [](std::int64_t elements) {
    return std::vector<std::uint16_t>(static_cast<std::size_t>(elements), kUnwritten);
  };
  if (c.op == MailboxOp::kAllGatherWords) {
    memory.out = unwritten(2 * ranks * c.cols);
    if (!c.in_place) memory.in = unwritten(2 * c.cols);
    std::uint16_t* in = c.in_place ? memory.out.data() + 2 * rank * c.cols : memory.in.data();
    for (std::int64_t i = 0; i < 2 * c.cols; ++i) in[i] = sent_half(seed, rank, i);
    return memory;
  }
  const std::int64_t in_stride = c.cols + c.pad, out_stride = out_cols(c, ranks) + c.pad;
  memory.out = unwritten(c.rows * out_stride);
  if (c.op == MailboxOp::kAllGather) {
    if (!c.in_place) memory.in = unwritten(c.rows * in_stride);
    for (std::int64_t row = 0; row < c.rows; ++row) {
      std::uint16_t* in =
          c.in_place ? memory.out.data() + row * out_stride + rank * c.cols : memory.in.data() + row * in_stride;
      for (std::int64_t i = 0; i < c.cols; ++i) in[i] = sent_half(seed, rank, row * c.cols + i);
    }
    return memory;
  }
  memory.in = unwritten(c.rows * in_stride);
  const bool norm = c.gamma != MailboxCase::Gamma::kNone;
  if (norm && !c.in_place) memory.norm = unwritten(c.rows * in_stride);
  if (c.residual && !c.in_place) memory.residual = unwritten(c.rows * in_stride);
  std::vector<std::uint16_t>& residual = c.in_place ? memory.out : memory.residual;
  for (std::int64_t row = 0; row < c.rows; ++row)
    for (std::int64_t i = 0; i < c.cols; ++i) {
      const auto at = static_cast<std::size_t>(row * in_stride + i);
      memory.in[at] = sent_number(c, seed, rank, row * c.cols + i);
      if (c.residual) residual[at] = sent_number(c, seed, kResidual, row * c.cols + i);
    }
  for (std::int64_t i = 0; norm && i < c.cols; ++i) {
    const float value = bf16_to_float(sent_number(c, seed, kGamma, i));
    std::uint16_t halves[2];
    std::memcpy(halves, &value, sizeof halves);
    if (c.gamma == MailboxCase::Gamma::kF32) memory.gamma.push_back(halves[0]);
    memory.gamma.push_back(halves[1]);
  }
  return memory;
}

namespace {

std::string wrong_gather(const MailboxCase& c, int ranks, std::uint64_t seed, const CallMemory& after) {
  const bool words = c.op == MailboxOp::kAllGatherWords;
  const std::int64_t rows = words ? 1 : c.rows, cols = words ? 2 * c.cols : c.cols;
  const std::int64_t stride = ranks * cols + (words ? 0 : c.pad);
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t column = 0; column < stride; ++column) {
      std::uint16_t expected = kUnwritten;
      if (column < ranks * cols) {
        const std::int64_t i = row * cols + column % cols;
        const std::uint32_t word = sent_word(seed, static_cast<int>(column / cols), i / 2);
        expected = half_of(word == 0xffffffff ? (words ? kNanWord : kNanPair) : word, i);
      }
      const std::uint16_t is = after.out[static_cast<std::size_t>(row * stride + column)];
      if (is != expected) return differs(words ? "half of out" : "out", row, column, is, expected);
    }
  return {};
}

std::string wrong_sum(const MailboxCase& c, int ranks, std::uint64_t seed, const CallMemory& after) {
  const std::int64_t stride = c.cols + c.pad;
  const bool norm = c.gamma != MailboxCase::Gamma::kNone;
  const std::vector<std::uint16_t>& norms = c.in_place ? after.in : after.norm;
  for (std::int64_t row = 0; row < c.rows; ++row) {
    double squares = 0;
    for (std::int64_t i = 0; i < stride; ++i) {
      std::uint16_t expected = kUnwritten;
      if (i < c.cols) {
        const std::int64_t at = row * c.cols + i;
        float sum = bf16_to_float(sent_number(c, seed, 0, at));
        for (int rank = 1; rank < ranks; ++rank) sum += bf16_to_float(sent_number(c, seed, rank, at));
        expected = float_to_bf16(sum);
        if (c.residual)
          expected = float_to_bf16(bf16_to_float(expected) + bf16_to_float(sent_number(c, seed, kResidual, at)));
        squares += std::pow(static_cast<double>(bf16_to_float(expected)), 2);
      }
      const std::uint16_t is = after.out[static_cast<std::size_t>(row * stride + i)];
      if (is != expected) return differs("residual_out", row, i, is, expected);
    }
    if (!norm) continue;
    constexpr double kEps = 1e-5;
    const double scale = 1 / std::sqrt(squares / static_cast<double>(c.cols) + kEps);
    for (std::int64_t i = 0; i < stride; ++i) {
      const auto at = static_cast<std::size_t>(row * stride + i);
      if (i >= c.cols) {
        if (norms[at] != kUnwritten) return differs("norm_out", row, i, norms[at], kUnwritten);
        continue;
      }
      const double exact = bf16_to_float(after.out[at]) * scale * gamma_of(after, c, i);
      if (!(std::abs(bf16_to_float(norms[at]) - exact) <= std::abs(exact) / 128 + 1e-30))
        return differs("norm_out", row, i, norms[at], double_to_bf16(exact));
    }
  }
  return {};
}

}  // namespace

std::string wrong_after(const MailboxCase& c, int ranks, int rank, std::uint64_t seed, const CallMemory& after) {
  std::string wrong =
      c.op == MailboxOp::kAllReduceAddNorm ? wrong_sum(c, ranks, seed, after) : wrong_gather(c, ranks, seed, after);
  if (!wrong.empty()) return fmt::format("{} on rank {}: {}", to_string(c), rank, wrong);
  const bool written = c.in_place && c.gamma != MailboxCase::Gamma::kNone;  // norm_out is in
  if (!written && after.in != memory_before(c, ranks, rank, seed).in)
    return fmt::format("{} on rank {}: in was changed", to_string(c), rank);
  return {};
}

std::int64_t mailbox_bytes(const MailboxCase& c) {
  return c.op == MailboxOp::kAllGatherWords ? 4 * c.cols : 2 * c.rows * c.cols;
}

std::optional<double> mailbox_target_us(const MailboxCase& c, int ranks) {
  constexpr double kLatency = 4.5, kBytesPerUs = 340e3;
  if (c.op == MailboxOp::kAllReduceAddNorm)
    return ranks == 2 && c.rows == 8 && c.cols == 7168 ? std::optional(5.5) : std::nullopt;
  return kLatency + static_cast<double>((ranks - 1) * mailbox_bytes(c)) / kBytesPerUs;
}

RankTimes over_ranks(const std::vector<std::vector<double>>& samples) {
  std::vector<double> slowest;
  for (const std::vector<double>& of_rank : samples) {
    slowest.resize(std::max(slowest.size(), of_rank.size()));
    for (std::size_t i = 0; i < of_rank.size(); ++i) slowest[i] = std::max(slowest[i], of_rank[i]);
  }
  if (slowest.empty()) return {};
  std::sort(slowest.begin(), slowest.end());
  const auto at = [&](double share) {
    const auto place = std::ceil(share * static_cast<double>(slowest.size())) - 1;
    return slowest[static_cast<std::size_t>(std::max(place, 0.0))];
  };
  return {at(0.5), at(0.99), slowest.back(), static_cast<int>(slowest.size())};
}

namespace {

nlohmann::ordered_json times_json(const RankTimes& times) {
  if (times.kept == 0) return nullptr;
  return {{"p50_us", times.p50}, {"p99_us", times.p99}, {"max_us", times.max}, {"kept", times.kept}};
}

}  // namespace

std::string json_line(const MailboxRow& row, const Machine& machine) {
  const MailboxCase& c = row.what;
  nlohmann::ordered_json json;
  json["case"] = {{"layer", op_name(c.op)}, {"rows", c.rows},
                  {"cols", c.cols},         {"dtype", c.op == MailboxOp::kAllGatherWords ? "int32" : "bfloat16"},
                  {"residual", c.residual}, {"norm", c.gamma != MailboxCase::Gamma::kNone},
                  {"ranks", row.ranks},     {"gpus", row.gpus}};
  json["choice"] = {{"kind", "mailbox"}, {"transport", row.transport}, {"most_ctas", row.ctas}};
  json["origin"] = origin_json(machine);
  json["machine"] = machine_json(machine);
  json["protocol"] = {
      {"graph", true}, {"calls_per_graph", row.calls}, {"pdl", true}, {"l2", "warm"}, {"sample", "maximum over ranks"}};
  json["time"] = times_json(row.time);
  json["bytes"] = (row.ranks - 1) * mailbox_bytes(c);
  json["bytes_formula"] = "(ranks - 1) * bytes of a rank";
  const auto target = mailbox_target_us(c, row.ranks);
  json["target_us"] = target && row.gpus == row.ranks ? nlohmann::ordered_json(*target) : nlohmann::ordered_json();
  json["baseline"] = row.baseline;
  json["baseline_why_not"] = row.no_baseline;
  json["baseline_time"] = times_json(row.baseline_time);
  return json.dump() + "\n";
}

}  // namespace twostep
