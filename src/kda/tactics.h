// Which tactic serves a key on a GPU, and the text of its kernel. Pure: no driver call, no GPU needed.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kda/contract.h"

namespace twostep {

inline constexpr const char* kKdaRules = "kda-rules-1";

// All that makes two builds of the kernel differ, beside the architecture.
struct KdaBuild {
  int heads = 0;
  int tokens = 0;
  int conv_len = 0;
  bool conv_dim_first = false;
  bool lower_bound = false;
  bool bias = false;
  bool records = false;  // state mode records
  std::int64_t row_stride = 0;
  bool early_caches = false;
  KdaTactic tactic;
  friend bool operator==(const KdaBuild&, const KdaBuild&) = default;
};
KdaBuild kda_build(const KdaModel& model, const KdaLayout& layout, const KdaPolicy& policy, const DeviceFacts& facts);

// Recorded tokens that a step may have to fold, and has room for: L - 2, at most 8; in slots mode none. Below, `folded`
// is this number, and tells the modes apart.
int kda_folded(StateMode mode, int conv_len);

// kOk, or kUnsupported with the rule that is broken.
Status kda_tactic_valid(const KdaTactic& tactic, int tokens, const DeviceFacts& facts, int folded = 0);
std::vector<KdaTactic> valid_kda_tactics(int tokens, const DeviceFacts& facts, int folded = 0);

// An entry of tactics/<gpu>.json.
struct KdaTableEntry {
  StateMode mode = StateMode::kSlots;  // "state_mode": "records" in the file; absent: slots
  int heads = 0;
  int tokens = 0;
  std::int64_t requests = 0;
  KdaTactic tactic;
  double us = 0;
};
// Those of a file's text. Throws nlohmann::json::exception where it is no table.
std::vector<KdaTableEntry> kda_table(std::string_view text);
// Of (mode, heads, tokens), the entry of the fewest requests that are at least those of the key, else of the most.
std::optional<KdaTableEntry> kda_table_entry(const std::vector<KdaTableEntry>& table, int heads, KdaKey key,
                                             StateMode mode);
// The same from the table of this GPU.
std::optional<KdaTableEntry> kda_table_entry(int heads, KdaKey key, const DeviceFacts& facts,
                                             StateMode mode = StateMode::kSlots);

// The table's, else by a rule: enough CTAs to load every SM.
KdaTactic kda_tactic(int heads, KdaKey key, const DeviceFacts& facts, int folded = 0);

// Dynamic shared memory of a CTA, as the kernel computes it.
int kda_smem_bytes(int tokens, const KdaTactic& tactic, int folded = 0);
inline int kda_threads(const KdaTactic& tactic) { return tactic.warps * 32; }
// CTAs of a launch.
std::uint32_t kda_grid(int heads, std::int64_t requests, const KdaTactic& tactic, const DeviceFacts& facts);

struct KdaKernelText {
  std::string name;   // "kda-h12-q1-sd-l3-s8w8p1"
  std::string entry;  // extern "C" name
  std::string text;
  std::string rules;
};
KdaKernelText kda_kernel_text(const KdaBuild& build, const KdaTestSwitches& test = {});
inline int kda_folded(const KdaBuild& build) {
  return kda_folded(build.records ? StateMode::kRecords : StateMode::kSlots, build.conv_len);
}

// The kernel of fold_records and reset_records, one for all keys of a layer: "kda-fold-h12-sd-l10".
inline constexpr int kKdaFoldThreads = 256;
KdaKernelText kda_fold_text(const KdaModel& model, const KdaLayout& layout);

}  // namespace twostep
