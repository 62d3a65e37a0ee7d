#include "kda/tactics.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/embedded.h"

namespace twostep {
namespace {

constexpr int kSplits[] = {1, 2, 4, 8};
constexpr int kWarpCounts[] = {4, 8, 16};
constexpr int kPassRows[] = {1, 2, 4};
constexpr int kLeastStreamTokens = 3;  // with two, ptxas spills in one of the layouts

int values_of(const KdaTactic& t) { return kKdaHeadDim / t.split; }
// Rows of one pass, eight lanes to a row: of all warps, or of the first that hold all rows.
int pass_values(const KdaTactic& t) { return std::min(t.warps * 4 * t.pass_rows, values_of(t)); }

Status invalid(const char* argument, int value, std::string accepted) {
  return refusal(StatusCode::kUnsupported, "kda.prepare", std::string("tactic.") + argument, std::to_string(value),
                 std::move(accepted));
}

// CTAs that one SM is to hold: by shared memory, and by registers. Below these numbers of registers ptxas spills.
int ctas_per_sm(int tokens, const KdaTactic& t, int folded) {
  constexpr int kSmSmem = 227 << 10, kReserved = 1 << 10, kRegisters = 1 << 16;
  const int registers = t.warps == 4 ? 168 : 128;
  const int by_smem = kSmSmem / (kda_smem_bytes(tokens, t, folded) + kReserved);
  return std::max(1, std::min(by_smem, kRegisters / (registers * kda_threads(t))));
}

// By GPU.
const std::map<std::string, std::vector<KdaTableEntry>>& tables() {
  static const auto all = [] {
    std::map<std::string, std::vector<KdaTableEntry>> made;
    for (const EmbeddedText& file : embedded_tactics())
      made[nlohmann::json::parse(file.text).at("gpu")] = kda_table(file.text);
    return made;
  }();
  return all;
}

// See StreamLayout of kernels/kda/kda_stream.cuh.
int stream_smem_bytes(int tokens, int folded) {
  const int state = kKdaHeadDim * kKdaHeadDim + 4 * 8;  // four parts, 32 bytes apart
  const int of_tokens = tokens * (4 * kKdaHeadDim + 2) + (std::max(tokens, folded) + 2 * folded) * kKdaHeadDim;
  const int stage = ((state + of_tokens) * 4 + 32 + 127) / 128 * 128;
  const int inbox = (tokens + (3 + tokens) * 4 + folded * 2) * kKdaHeadDim * 2;
  const int constants = (3 * kKdaConvWidth + 2) * kKdaHeadDim * 4;
  return 2 * (stage + inbox) + constants + 6 * 8 + 2 * 16;
}

}  // namespace

std::string to_string(const KdaTactic& t) {
  return fmt::format("split {} warps {} pass_rows {}{}", t.split, t.warps, t.pass_rows, t.stream ? " stream" : "");
}

int kda_folded(StateMode mode, int conv_len) {
  return mode == StateMode::kRecords ? std::min(conv_len - 2, kKdaMaxTokens) : 0;
}

int kda_smem_bytes(int tokens, const KdaTactic& t, int folded) {
  if (t.stream) return stream_smem_bytes(tokens, folded);
  const int values = values_of(t);
  const int weights = kKdaConvWidth * (2 * kKdaHeadDim + values) + values;  // conv taps, norm
  const int of_tokens = tokens * (3 * kKdaHeadDim + values + 2) + std::max(tokens, folded) * values + t.split * tokens;
  const int state = values * kKdaHeadDim + (tokens > 1 ? values / pass_values(t) * 4 * 8 : 0);  // parts, 32 bytes apart
  const int floats = state + weights + of_tokens + folded * 2 * kKdaHeadDim;
  return (floats * 4 + 7) / 8 * 8 + (values / pass_values(t) + 2 + (folded > 0)) * 8;
}

std::uint32_t kda_grid(int heads, std::int64_t requests, const KdaTactic& t, const DeviceFacts& facts) {
  const std::int64_t request_heads = requests * heads;
  return static_cast<std::uint32_t>(t.stream ? std::min<std::int64_t>(request_heads, facts.sm_count)
                                             : request_heads * t.split);
}

Status kda_tactic_valid(const KdaTactic& t, int tokens, const DeviceFacts& facts, int folded) {
  const auto one_of = [](const auto& list, int value) {
    return std::find(std::begin(list), std::end(list), value) != std::end(list);
  };
  if (!one_of(kSplits, t.split)) return invalid("split", t.split, "1, 2, 4, 8");
  if (!one_of(kWarpCounts, t.warps)) return invalid("warps", t.warps, "4, 8, 16");
  if (!one_of(kPassRows, t.pass_rows)) return invalid("pass_rows", t.pass_rows, "1, 2, 4");
  if (t.split > 1 && facts.arch == 120) return invalid("split", t.split, "1 on this architecture");
  if (t.stream && (folded == 0 || tokens < kLeastStreamTokens))
    return invalid("stream", 1, "verify of three tokens or more in state mode records");
  if (t.stream && (t.split != 1 || t.warps != 16 || t.pass_rows != 4))
    return invalid("stream", 1, "split 1, warps 16, pass_rows 4");
  if (pass_values(t) < 4 * 4 * t.pass_rows)
    return invalid("pass_rows", t.pass_rows, fmt::format("four warps hold the {} values of a CTA", values_of(t)));
  if (const int bytes = kda_smem_bytes(tokens, t, folded); bytes > facts.smem_per_block)
    return refusal(StatusCode::kUnsupported, "kda.prepare", "shared memory", std::to_string(bytes),
                   fmt::format("at most {} bytes on this GPU", facts.smem_per_block), "split the head over more CTAs");
  return {};
}

std::vector<KdaTactic> valid_kda_tactics(int tokens, const DeviceFacts& facts, int folded) {
  std::vector<KdaTactic> all;
  for (int split : kSplits)
    for (int warps : kWarpCounts)
      for (int rows : kPassRows)
        for (bool stream : {false, true})
          if (const KdaTactic t{split, warps, rows, stream}; kda_tactic_valid(t, tokens, facts, folded).ok())
            all.push_back(t);
  return all;
}

std::vector<KdaTableEntry> kda_table(std::string_view text) {
  std::vector<KdaTableEntry> entries;
  const auto json = nlohmann::json::parse(text);
  for (const auto& item : json.value("kda", nlohmann::json::array())) {
    const auto& tactic = item.at("tactic");
    const bool records = item.value("state_mode", "slots") == "records";
    entries.push_back({records ? StateMode::kRecords : StateMode::kSlots,
                       item.at("heads"),
                       item.at("tokens"),
                       item.at("requests"),
                       {tactic.at("split"), tactic.at("warps"), tactic.at("pass_rows"), tactic.value("stream", false)},
                       item.at("us")});
  }
  return entries;
}

std::optional<KdaTableEntry> kda_table_entry(const std::vector<KdaTableEntry>& table, int heads, KdaKey key,
                                             StateMode mode) {
  std::optional<KdaTableEntry> above, last;
  for (const KdaTableEntry& entry : table) {
    if (entry.mode != mode || entry.heads != heads || entry.tokens != key.tokens) continue;
    if (entry.requests >= key.requests && (!above || entry.requests < above->requests)) above = entry;
    if (!last || entry.requests > last->requests) last = entry;
  }
  return above ? above : last;
}

std::optional<KdaTableEntry> kda_table_entry(int heads, KdaKey key, const DeviceFacts& facts, StateMode mode) {
  const auto table = tables().find(facts.name);
  return table == tables().end() ? std::nullopt : kda_table_entry(table->second, heads, key, mode);
}

KdaTactic kda_tactic(int heads, KdaKey key, const DeviceFacts& facts, int folded) {
  const bool records = folded > 0;
  if (const auto entry = kda_table_entry(heads, key, facts, records ? StateMode::kRecords : StateMode::kSlots);
      entry && kda_tactic_valid(entry->tactic, key.tokens, facts, folded).ok())
    return entry->tactic;
  // Few heads: split them while the CTAs still fit on the SMs at once, two to each. Many: three small CTAs on each SM
  // keep more bytes on the way than two large ones.
  const std::int64_t request_heads = key.requests * heads;
  KdaTactic t;
  while (facts.arch != 120 && t.split < 4 && request_heads * t.split * 2 <= 2 * facts.sm_count) t.split *= 2;
  if (key.tokens == 1) {
    // With room for records two CTAs fit on an SM, not three: large ones then.
    if (t.split == 1 && ctas_per_sm(1, {1, 4, 1}, folded) > 2) t.warps = 4;
  } else if (t.split < 4) {
    constexpr std::int64_t kManyHeads = 256;  // of all requests: a record costs little, so that halves need not overlap
    constexpr KdaTactic kStream{1, 16, 4, true};
    if (request_heads > kManyHeads && kda_tactic_valid(kStream, key.tokens, facts, folded).ok()) return kStream;
    t.split = facts.arch == 120 ? 1 : 2;
    t.pass_rows = 2;
  }
  return t;
}

KdaBuild kda_build(const KdaModel& model, const KdaLayout& layout, const KdaPolicy& policy, const DeviceFacts& facts) {
  KdaBuild build;
  build.heads = model.heads;
  build.tokens = policy.key.tokens;
  build.conv_len = layout.conv_len;
  build.conv_dim_first = model.options.conv_dim_first;
  build.lower_bound = model.options.gate_lower_bound.has_value();
  build.bias = model.weights.conv_bias.has_value();
  build.records = model.records();
  build.row_stride = policy.row_stride;
  build.early_caches = model.options.early_caches;
  build.tactic = policy.tactic ? *policy.tactic : kda_tactic(model.heads, policy.key, facts, kda_folded(build));
  return build;
}

namespace {

std::string config_text(const KdaBuild& b, const char* fault) {
  return fmt::format(R"(
struct Config {{
  static constexpr int kHeads = {}, kTokens = {}, kConvLen = {};
  static constexpr bool kDimFirst = {}, kLowerBound = {}, kBias = {}, kEarlyCaches = {}, kRecords = {};
  static constexpr long long kRowStride = {};
  static constexpr int kSplit = {}, kWarps = {}, kPassRows = {};
  static constexpr int kSmemBytes = {};
  static constexpr auto kFault = twostep::kda::Fault::{};
}};
)",
                     b.heads, b.tokens, b.conv_len, b.conv_dim_first, b.lower_bound, b.bias, b.early_caches, b.records,
                     b.row_stride, b.tactic.split, b.tactic.warps, b.tactic.pass_rows,
                     kda_smem_bytes(b.tokens, b.tactic, kda_folded(b)), fault);
}

}  // namespace

KdaKernelText kda_kernel_text(const KdaBuild& b, const KdaTestSwitches& test) {
  KdaKernelText kernel;
  kernel.name = fmt::format("kda-h{}-q{}-{}-l{}{}-s{}w{}p{}{}", b.heads, b.tokens, b.conv_dim_first ? "ds" : "sd",
                            b.conv_len, b.records ? "-records" : "", b.tactic.split, b.tactic.warps, b.tactic.pass_rows,
                            b.tactic.stream ? "-stream" : "");
  kernel.entry = "kda_step";
  const char* function = b.tactic.stream ? "kda_stream" : "kda_step";  // each in the file of its name
  kernel.rules = kKdaRules;
  kernel.text = fmt::format(R"(#include "kda/{}.cuh"
{}
extern "C" __global__ void __launch_bounds__({}, {}) kda_step(const __grid_constant__ twostep::kda::Params params) {{
  extern __shared__ __align__(128) unsigned char smem[];
  twostep::kda::{}<Config>(params, smem);
}}
)",
                            function, config_text(b, test.fault), kda_threads(b.tactic),
                            ctas_per_sm(b.tokens, b.tactic, kda_folded(b)), function);
  return kernel;
}

KdaKernelText kda_fold_text(const KdaModel& model, const KdaLayout& layout) {
  KdaBuild b;
  b.heads = model.heads;
  b.tokens = 1;
  b.conv_len = layout.conv_len;
  b.conv_dim_first = model.options.conv_dim_first;
  b.lower_bound = model.options.gate_lower_bound.has_value();
  b.records = true;
  KdaKernelText kernel;
  kernel.name = fmt::format("kda-fold-h{}-{}-l{}", b.heads, b.conv_dim_first ? "ds" : "sd", b.conv_len);
  kernel.entry = "kda_fold";
  kernel.rules = kKdaRules;
  kernel.text = fmt::format(R"(#include "kda/records.cuh"
{}
extern "C" __global__ void __launch_bounds__({}) kda_fold(const __grid_constant__ twostep::kda::FoldParams params) {{
  static_assert(twostep::kda::kFoldThreads == {});
  twostep::kda::kda_fold<Config>(params);
}}
)",
                            config_text(b, "kNone"), kKdaFoldThreads, kKdaFoldThreads);
  return kernel;
}

}  // namespace twostep
