#include "gemm/tactics.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>

#include "core/check.h"
#include "core/embedded.h"
#include "gemm/contract.h"

namespace twostep {
namespace {

constexpr int kBoxColumns = 64;
constexpr int kReservedSmem = 1024;  // per CTA, by the system
// FP32 sums of one thread beyond which ptxas spills. With its loader a CTA of 8 warps puts three on one scheduler,
// which leaves 168 registers to each; one of 4 warps has all 255.
int max_accumulators(const Tactic& t) { return t.warps == 8 ? 64 : 128; }

constexpr int kClusterSizes[] = {1, 2, 4, 8};
constexpr int kMaxStages = 12;

// mma_sync
constexpr int kTileNs[] = {16, 32, 64, 128};
constexpr int kTileKs[] = {64, 128, 256, 512, 1024};
constexpr int kSliceCounts[] = {1, 2, 4, 8};
constexpr int kWarpCounts[] = {4, 8};

// wgmma: 64 rows of weight per warpgroup
constexpr int kWgmmaTileNs[] = {64, 128, 192, 256};
constexpr int kWgmmaTileKs[] = {64, 128, 256};
constexpr int kWgmmaStages[] = {2, 3, 4, 5, 6, 8, 12};  // of the search; others are as valid

bool known_arch(int arch) { return arch == 90 || arch == 100 || arch == 103 || arch == 120; }

const char* mma_name(const Tactic& t) { return t.mma == Mma::kMmaSync ? "mma_sync" : "wgmma"; }

const char* load_name(const Tactic& t) {
  if (t.weight_order == WeightOrder::kPacked) return "packed";
  return t.weight_load == WeightLoad::kRows ? "rows" : "tiles";
}

int accumulators(const Tactic& t, int m) { return t.tile_n * t.k_slices / t.warps / 16 * (bucket_of(m) / 8) * 4; }

Status invalid(const char* argument, std::string value, std::string accepted) {
  return refusal(StatusCode::kUnsupported, "gemm.tactic_valid", argument, std::move(value), std::move(accepted),
                 "take a tactic that warp_tactic gives");
}

bool among(std::span<const int> accepted, int value) {
  return std::find(accepted.begin(), accepted.end(), value) != accepted.end();
}

Status mma_sync_valid(const Tactic& t, int m, std::int64_t n, const DeviceFacts& facts) {
  if (t.cluster_k != 1) return invalid("cluster_k", std::to_string(t.cluster_k), "1 with mma_sync");
  if (!among(kClusterSizes, t.cluster_n)) return invalid("cluster_n", std::to_string(t.cluster_n), "1, 2, 4, 8");
  if (t.cluster_n > 1 && facts.arch == 120)
    return invalid("cluster_n", std::to_string(t.cluster_n), "1 on this architecture");
  if (!among(kTileNs, t.tile_n)) return invalid("tile_n", std::to_string(t.tile_n), "16, 32, 64, 128");
  if (!among(kTileKs, t.tile_k)) return invalid("tile_k", std::to_string(t.tile_k), "64, 128, 256, 512, 1024");
  if (t.stages < 1 || t.stages > kMaxStages) return invalid("stages", std::to_string(t.stages), "1 to 12");
  if (!among(kWarpCounts, t.warps)) return invalid("warps", std::to_string(t.warps), "4, 8");
  if (t.k_slices < 1 || t.warps % t.k_slices != 0)
    return invalid("k_slices", std::to_string(t.k_slices), "a divisor of warps");
  if (t.tile_k / kBoxColumns % t.k_slices != 0)
    return invalid("k_slices", std::to_string(t.k_slices),
                   fmt::format("a divisor of tile_k / 64 = {}", t.tile_k / kBoxColumns));
  if (t.tile_n % (16 * (t.warps / t.k_slices)) != 0)
    return invalid("tile_n", std::to_string(t.tile_n), "16 rows for each group of warps");
  if (t.weight_order == WeightOrder::kPacked && n % t.tile_n != 0)
    return invalid("tile_n", std::to_string(t.tile_n), fmt::format("divisors of N = {} for a packed weight", n));
  if (accumulators(t, m) > max_accumulators(t))
    return invalid("accumulators", std::to_string(accumulators(t, m)),
                   fmt::format("at most {} of a thread", max_accumulators(t)));
  return {};
}

// The static_asserts of kernels/gemm/sm90_wgmma.cuh.
Status wgmma_valid(const Tactic& t, std::int64_t k, const DeviceFacts& facts) {
  if (facts.arch != 90) return invalid("mma", "wgmma", "mma_sync on this architecture");
  if (t.weight_order != WeightOrder::kRowMajor) return invalid("weight_order", "packed", "row_major with wgmma");
  if (t.weight_load != WeightLoad::kTiles) return invalid("weight_load", "rows", "tiles with wgmma");
  if (t.k_slices != 1) return invalid("k_slices", std::to_string(t.k_slices), "1 with wgmma");
  if (t.cluster_n != 1) return invalid("cluster_n", std::to_string(t.cluster_n), "1 with wgmma");
  if (!among(kWgmmaTileNs, t.tile_n))
    return invalid("tile_n", std::to_string(t.tile_n), "64, 128, 192, 256 with wgmma");
  if (!among(kWgmmaTileKs, t.tile_k)) return invalid("tile_k", std::to_string(t.tile_k), "64, 128, 256 with wgmma");
  if (t.warps != t.tile_n / 16)
    return invalid("warps", std::to_string(t.warps), fmt::format("tile_n / 16 = {} with wgmma", t.tile_n / 16));
  // A stage is released while the next one is multiplied.
  if (t.stages < 2 || t.stages > kMaxStages) return invalid("stages", std::to_string(t.stages), "2 to 12 with wgmma");
  if (!among(kClusterSizes, t.cluster_k)) return invalid("cluster_k", std::to_string(t.cluster_k), "1, 2, 4, 8");
  if (t.warps % std::min(t.warps, t.cluster_k) != 0)  // CTAs that add take whole warps
    return invalid("cluster_k", std::to_string(t.cluster_k), fmt::format("1, 2, 4 with tile_n = {}", t.tile_n));
  const std::int64_t boxes = k / kBoxColumns;
  if (boxes < t.cluster_k)
    return invalid("cluster_k", std::to_string(t.cluster_k), fmt::format("at most K / 64 = {}", boxes));
  if (t.tile_k > kBoxColumns && k % (t.cluster_k * t.tile_k) != 0)
    return invalid("tile_k", std::to_string(t.tile_k),
                   fmt::format("64, or equal shares of K = {} for {} CTAs", k, t.cluster_k));
  return {};
}

struct Table {
  std::string gpu;
  std::vector<TableEntry> entries;
};

Tactic tactic_from(const nlohmann::json& json) {
  Tactic t;
  const std::string load = json.at("load");
  if (json.value("mma", "mma_sync") == "wgmma") t.mma = Mma::kWgmma;
  t.weight_order = load == "packed" ? WeightOrder::kPacked : WeightOrder::kRowMajor;
  t.weight_load = load == "rows" ? WeightLoad::kRows : WeightLoad::kTiles;
  json.at("tile_n").get_to(t.tile_n);
  json.at("tile_k").get_to(t.tile_k);
  json.at("stages").get_to(t.stages);
  json.at("k_slices").get_to(t.k_slices);
  json.at("warps").get_to(t.warps);
  json.at("cluster_n").get_to(t.cluster_n);
  t.cluster_k = json.value("cluster_k", 1);
  return t;
}

const std::vector<Table>& tables() {
  static const std::vector<Table> all = [] {
    std::vector<Table> made;
    for (const EmbeddedText& file : embedded_tactics()) {
      const auto json = nlohmann::json::parse(file.text);
      Table table{json.at("gpu"), {}};
      for (const auto& row : json.at("entries")) {
        TableEntry entry;
        row.at("n").get_to(entry.n);
        row.at("k").get_to(entry.k);
        row.at("rows").get_to(entry.rows);
        row.at("warp_us").get_to(entry.warp_us);
        row.at("cublas_us").get_to(entry.cublas_us);
        entry.tactic = tactic_from(row.at("tactic"));
        table.entries.push_back(entry);
      }
      made.push_back(std::move(table));
    }
    return made;
  }();
  return all;
}

}  // namespace

bool warp_eligible(std::int64_t n, std::int64_t k) { return n > 0 && k > 0 && n % 16 == 0 && k % 64 == 0; }

std::string to_string(const Tactic& t) {
  return fmt::format("{} {} tile {}x{} stages {} slices {} warps {} cluster_n {} cluster_k {} smem {} x{}/SM align {}",
                     mma_name(t), load_name(t), t.tile_n, t.tile_k, t.stages, t.k_slices, t.warps, t.cluster_n,
                     t.cluster_k, t.smem_bytes, t.ctas_per_sm, t.weight_align);
}

int wgmma_rows(int m) { return static_cast<int>(std::bit_ceil(static_cast<unsigned>(bucket_of(m)))); }

int tactic_smem_bytes(const Tactic& t, int m) {
  if (t.mma == Mma::kWgmma) {
    const int ring_bytes = t.stages * (t.tile_n + wgmma_rows(m)) * t.tile_k * 2;
    // FP32 sums of every CTA of the cluster, divided among the CTAs that add: each for whole warps, of 16 rows of
    // weight.
    const int owners = std::min(t.cluster_k, t.tile_n / 16);
    const int part_bytes = t.cluster_k > 1 ? t.cluster_k * t.tile_n * wgmma_rows(m) * 4 / owners : 0;
    return ring_bytes + part_bytes + t.stages * 16 + 8;
  }
  const int bucket = bucket_of(m);
  const int padded_pitch = t.tile_k * 2 + 16;
  const bool rows = t.weight_order == WeightOrder::kRowMajor && t.weight_load == WeightLoad::kRows;
  const int w_bytes = t.tile_n * (rows ? padded_pitch : t.tile_k * 2);
  const int stage_bytes = (w_bytes + bucket * padded_pitch + 1023) / 1024 * 1024;
  const int ring_bytes = t.stages * stage_bytes;
  const int sum_bytes = t.k_slices * bucket * (t.tile_n + 4) * 4;
  const bool sum_in_ring = sum_bytes > 8192 && sum_bytes <= ring_bytes;
  return ring_bytes + (sum_in_ring ? 0 : sum_bytes) + t.stages * 16;
}

Tactic complete(Tactic t, int m, const DeviceFacts& facts) {
  t.smem_bytes = tactic_smem_bytes(t, m);
  t.ctas_per_sm = std::max(1, facts.smem_per_sm / (t.smem_bytes + kReservedSmem));
  t.weight_align = 16;
  return t;
}

Status tactic_valid(const Tactic& t, int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts) {
  if (m < 1 || m > kMaxWarpRows) return invalid("m", std::to_string(m), "1 to 64");
  if (!warp_eligible(n, k))
    return invalid("shape", fmt::format("({}, {})", n, k), "N a multiple of 16 and K a multiple of 64, both above 0");
  if (n > INT32_MAX / 2 || k > INT32_MAX / 4)
    return invalid("shape", fmt::format("({}, {})", n, k), "N below 2^30 and K below 2^29");
  if (!known_arch(facts.arch)) return invalid("architecture", std::to_string(facts.arch), "90, 100, 103, 120");
  if (t.x_mode != XMode::kStreamed) return invalid("x_mode", "resident", "streamed");
  if (t.weight_align != 16) return invalid("weight_align", std::to_string(t.weight_align), "16");
  Status rule = t.mma == Mma::kWgmma ? wgmma_valid(t, k, facts) : mma_sync_valid(t, m, n, facts);
  if (!rule.ok()) return rule;
  if (t.smem_bytes != tactic_smem_bytes(t, m))
    return invalid("smem_bytes", std::to_string(t.smem_bytes), std::to_string(tactic_smem_bytes(t, m)));
  if (t.smem_bytes > facts.smem_per_block)
    return invalid("smem_bytes", std::to_string(t.smem_bytes),
                   fmt::format("at most {} on this GPU", facts.smem_per_block));
  return {};
}

std::vector<Tactic> candidate_tactics(int m, std::int64_t k, const DeviceFacts& facts) {
  std::vector<Tactic> all;
  // More stages than tiles of one CTA: a stage would never be filled.
  const auto too_many = [](int stages, int tile_k, std::int64_t columns) {
    return stages > 2 && (stages - 1) * tile_k >= columns;
  };
  for (WeightLoad load : {WeightLoad::kTiles, WeightLoad::kRows})
    for (int tile_n : kTileNs)
      for (int tile_k : kTileKs)
        for (int slices : kSliceCounts)
          for (int warps : kWarpCounts)
            for (int stages = 2; stages <= kMaxStages && !too_many(stages, tile_k, k); ++stages)
              for (int cluster : kClusterSizes) {
                Tactic t;
                t.weight_load = load;
                t.cluster_n = cluster;
                t.tile_n = tile_n;
                t.tile_k = tile_k;
                t.k_slices = slices;
                t.warps = warps;
                t.stages = stages;
                all.push_back(complete(t, m, facts));
              }
  for (int tile_n : kWgmmaTileNs)
    for (int tile_k : kWgmmaTileKs) {
      if (tile_n > 128 && wgmma_rows(m) < 32) break;  // x is too small for its traffic to count
      for (int cluster : kClusterSizes)
        for (int stages : kWgmmaStages) {
          if (too_many(stages, tile_k, k / cluster)) break;
          Tactic t;
          t.mma = Mma::kWgmma;
          t.weight_load = WeightLoad::kTiles;
          t.tile_n = tile_n;
          t.tile_k = tile_k;
          t.stages = stages;
          t.k_slices = 1;
          t.cluster_k = cluster;
          t.warps = tile_n / 16;
          all.push_back(complete(t, m, facts));
        }
    }
  return all;
}

std::vector<Tactic> valid_tactics(int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts) {
  std::vector<Tactic> all = candidate_tactics(m, k, facts);
  std::erase_if(all, [&](const Tactic& t) { return !tactic_valid(t, m, n, k, facts).ok(); });
  return all;
}

namespace {

constexpr double kDeviceRate = 4.6e6;    // bytes per microsecond, all SMs
constexpr double kSmRate = 6.0e4;        // what one SM can take in
constexpr double kL2Rate = 5.0e6;        // x, read again by every CTA
constexpr double kInFlight = 128 << 10;  // bytes per SM that keep the memory busy

double mma_sync_us(const Tactic& t, int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts) {
  constexpr double kCopyUs = 0.008;
  const double ctas = static_cast<double>(warp_grid(t, n));
  const double tile_bytes = 2.0 * t.tile_n * static_cast<double>(k);
  const double total = 2.0 * static_cast<double>(n) * static_cast<double>(k);
  const double rounds = std::ceil(ctas / facts.sm_count);
  const double resident = std::min<double>(t.ctas_per_sm, rounds);
  const double in_flight = resident * std::min(tile_bytes, 2.0 * t.stages * t.tile_n * t.tile_k);
  const double hidden = std::pow(std::min(1.0, in_flight / kInFlight), 0.3);
  // A ring that turns ties the weight streams of CTAs that share x to the slowest of them.
  const bool turns = static_cast<std::int64_t>(t.stages) * t.tile_k < k;
  const double tied = turns ? 1.0 + 0.06 * (t.cluster_n - 1) : 1.0;
  const double stream = std::max(total / kDeviceRate, rounds * tile_bytes / kSmRate) * std::min(tied, 1.25) / hidden;
  const double x_traffic = ctas * bucket_of(m) * 2.0 * static_cast<double>(k) / t.cluster_n / kL2Rate;
  // Copies that one SM's loaders issue: those of w, and a row of x each.
  const double tiles = std::ceil(static_cast<double>(k) / t.tile_k);
  const double w_copies = t.weight_order == WeightOrder::kPacked ? 1
                          : t.weight_load == WeightLoad::kRows   ? t.tile_n
                                                                 : t.tile_k / kBoxColumns;
  const double copies = rounds * tiles * (w_copies + static_cast<double>(bucket_of(m)) / t.cluster_n) * kCopyUs;
  const double tail = 0.8 + 0.02 * t.k_slices * bucket_of(m) * t.tile_n / 64.0 / t.warps;
  const double steps = tiles * 0.02;  // a barrier round each
  return std::max({stream, 0.5 * x_traffic, copies}) + 0.5 * x_traffic + tail + steps;
}

double wgmma_us(const Tactic& t, int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts) {
  const double rows = wgmma_rows(m);
  const double total = 2.0 * static_cast<double>(n) * static_cast<double>(k);
  const double columns = static_cast<double>(k) / t.cluster_k;  // of one CTA
  const double rounds = std::ceil(static_cast<double>(warp_grid(t, n)) / facts.sm_count);
  const double resident = std::min<double>(t.ctas_per_sm, rounds);
  const double row_bytes = 2.0 * (t.tile_n + rows);  // of w and x, a column
  const double in_flight = resident * row_bytes * std::min<double>(columns, t.stages * t.tile_k);
  const double hidden = std::pow(std::min(1.0, in_flight / kInFlight), 0.3);
  const double tile_bytes = 2.0 * t.tile_n * columns;
  const double stream = std::max(total / kDeviceRate, rounds * tile_bytes / kSmRate) / hidden;
  // x arrives once per tile of the weight, partly beside it.
  const double x_us = std::ceil(static_cast<double>(n) / t.tile_n) * rows * 2.0 * static_cast<double>(k) / kL2Rate;
  const double steps = columns / kBoxColumns * 0.015;
  const double first = row_bytes * t.tile_k / kSmRate;  // nothing is multiplied before a whole stage is there
  const double late = t.ctas_per_sm == 1 ? 0.5 : 0;     // the next launch has no room to load before this one ends
  const double meeting = t.cluster_k > 1 ? 0.2 + 0.03 * t.cluster_k + 0.005 * rows : 0;
  return stream + 0.3 * x_us + steps + first + late + meeting + 0.8;
}

}  // namespace

// A model of bytes and launches, fitted to nothing finer than the probes in docs/notes: it separates good from
// bad, not best from second.
double model_us(const Tactic& t, int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts) {
  return t.mma == Mma::kWgmma ? wgmma_us(t, m, n, k, facts) : mma_sync_us(t, m, n, k, facts);
}

namespace {

// The table's entry of the fewest rows, m at least; of `family`, where one is given. Its tactic need not be valid for
// m.
std::optional<TableEntry> find_entry(int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts,
                                     const std::optional<Family>& family) {
  std::optional<TableEntry> best;
  for (const Table& table : tables()) {
    if (table.gpu != facts.name) continue;
    for (const TableEntry& entry : table.entries)
      if (entry.n == n && entry.k == k && entry.rows >= m && (!best || entry.rows < best->rows) &&
          (!family || family_of(entry.tactic) == *family))
        best = entry;
  }
  if (best) best->tactic = complete(best->tactic, m, facts);
  return best;
}

std::optional<Tactic> best_of_model(int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts,
                                    const std::function<bool(const Tactic&)>& accepted) {
  std::optional<Tactic> best;
  double best_us = 0;
  for (const Tactic& tactic : valid_tactics(m, n, k, facts)) {
    if (!accepted(tactic)) continue;
    const double us = model_us(tactic, m, n, k, facts);
    if (best && us >= best_us) continue;  // the fixed order of enumeration breaks ties
    best = tactic;
    best_us = us;
  }
  return best;
}

}  // namespace

std::optional<TableEntry> table_entry(int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts) {
  return find_entry(m, n, k, facts, std::nullopt);
}

Family strict_family(std::int64_t n, std::int64_t k, const DeviceFacts& facts) {
  constexpr int kSlices = 4;
  if (facts.arch != 90) return {Mma::kMmaSync, kSlices, 1};
  const auto is_wgmma = [](const Tactic& t) { return t.mma == Mma::kWgmma; };
  for (int rows = kRowBucket; rows <= kMaxWarpRows; rows += kRowBucket)
    if (const auto entry = table_entry(rows, n, k, facts); entry && is_wgmma(entry->tactic))
      return family_of(entry->tactic);
  const auto best = best_of_model(kRowBucket, n, k, facts, is_wgmma);
  return best ? family_of(*best) : Family{Mma::kWgmma, 1, 1};
}

Tactic warp_tactic(int m, std::int64_t n, std::int64_t k, const DeviceFacts& facts, bool strict) {
  const int bucket = std::clamp(bucket_of(std::max(m, 1)), kRowBucket, kMaxWarpRows);
  std::optional<Family> family;
  if (strict && warp_eligible(n, k)) family = strict_family(n, k, facts);
  if (const auto entry = find_entry(bucket, n, k, facts, family))
    if (tactic_valid(entry->tactic, bucket, n, k, facts).ok()) return entry->tactic;
  const auto accepted = [&](const Tactic& t) { return !family || family_of(t) == *family; };
  if (const auto best = best_of_model(bucket, n, k, facts, accepted)) return *best;
  Tactic smallest;
  smallest.tile_k = 256;
  smallest.stages = 2;
  const Status why = tactic_valid(complete(smallest, bucket, facts), bucket, n, k, facts);
  fail(why.ok() ? refusal(StatusCode::kInternal, "gemm.warp_tactic", "tactic", "none", "at least one") : why);
}

int warp_grid(const Tactic& t, std::int64_t n) {
  const std::int64_t rows = static_cast<std::int64_t>(t.tile_n) * t.cluster_n;
  return static_cast<int>((n + rows - 1) / rows) * t.cluster_n * t.cluster_k;
}

namespace {

std::string mma_sync_text(int bucket, std::int64_t n, std::int64_t k, const Tactic& t, const TestSwitches& test) {
  const char* load = t.weight_order == WeightOrder::kPacked ? "kPacked"
                     : t.weight_load == WeightLoad::kRows   ? "kRows"
                                                            : "kTiles";
  return fmt::format(R"(// {}
#include "gemm/warp_split_k.cuh"

struct Config {{
  static constexpr int kN = {}, kK = {}, kBucket = {};
  static constexpr int kTileN = {}, kTileK = {}, kStages = {}, kSlices = {}, kWarps = {}, kClusterN = {};
  static constexpr auto kLoad = twostep::gemm::Load::{};
  static constexpr int kSmemBytes = {};
  static constexpr auto kFault = twostep::gemm::Fault::{};
  static constexpr bool kDebug = {};
}};

extern "C" __global__ void __launch_bounds__({}, 1) warp_split_k(const __grid_constant__ twostep::gemm::Params params,
                                                              const __grid_constant__ twostep::gemm::TensorMap map) {{
  twostep::gemm::warp_split_k<Config>(params, &map);
}}
)",
                     to_string(t), n, k, bucket, t.tile_n, t.tile_k, t.stages, t.k_slices, t.warps, t.cluster_n, load,
                     t.smem_bytes, test.fault, test.debug, warp_threads(t));
}

std::string wgmma_text(int rows, std::int64_t n, std::int64_t k, const Tactic& t, const TestSwitches& test) {
  return fmt::format(R"(// {}
#include "gemm/sm90_wgmma.cuh"

struct Config {{
  static constexpr int kN = {}, kK = {}, kRows = {};
  static constexpr int kTileN = {}, kTileK = {}, kStages = {}, kClusterK = {};
  static constexpr int kSmemBytes = {};
  static constexpr auto kFault = twostep::gemm::Fault::{};
  static constexpr bool kDebug = {};
}};

extern "C" __global__ void __launch_bounds__({}, 1) sm90_wgmma(const __grid_constant__ twostep::gemm::Params params,
                                                            const __grid_constant__ twostep::gemm::TensorMap w_map,
                                                            const __grid_constant__ twostep::gemm::TensorMap x_map) {{
  twostep::gemm::sm90_wgmma<Config>(params, &w_map, &x_map);
}}
)",
                     to_string(t), n, k, rows, t.tile_n, t.tile_k, t.stages, t.cluster_k, t.smem_bytes, test.fault,
                     test.debug, warp_threads(t));
}

}  // namespace

KernelText warp_kernel_text(int m, std::int64_t n, std::int64_t k, const Tactic& t, const TestSwitches& test) {
  const int bucket = bucket_of(m);
  const bool wgmma = t.mma == Mma::kWgmma;
  KernelText kernel;
  kernel.name = fmt::format("gemm-n{}-k{}-m{}", n, k, bucket);
  kernel.entry = wgmma ? "sm90_wgmma" : "warp_split_k";
  kernel.rules = kTacticRules;
  kernel.text = wgmma ? wgmma_text(wgmma_rows(m), n, k, t, test) : mma_sync_text(bucket, n, k, t, test);
  return kernel;
}

KernelText pack_kernel_text(std::int64_t n, std::int64_t k, const Tactic& t) {
  KernelText kernel;
  kernel.name = fmt::format("gemm-pack-n{}-k{}-t{}", n, k, t.tile_n);
  kernel.entry = "pack";
  kernel.rules = kTacticRules;
  kernel.text = fmt::format(R"(#include "gemm/pack.cuh"

extern "C" __global__ void __launch_bounds__(256) pack(const twostep::u8* w, twostep::i64 w_pitch, twostep::u8* packed) {{
  twostep::gemm::pack<{}, {}, {}>(w, w_pitch, packed);
}}
)",
                            n, k, t.tile_n);
  return kernel;
}

DeviceFacts known_gpu(const std::string& name) {
  if (name == "h200") return {90, 132, 232448, 233472, "NVIDIA H200"};
  if (name == "h100") return {90, 132, 232448, 233472, "NVIDIA H100 80GB HBM3"};
  fail(StatusCode::kInvalidArgument, "gemm.known_gpu", "gpu", name, "h200, h100",
       "or give the architecture, SM count and shared memory");
}

}  // namespace twostep
