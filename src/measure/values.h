// Values and how they are judged, on the host (spec: draft-gemm 1.4, 15.1). Pure: no driver call.
//
// Operands depend on a seed alone: the same bits on a CPU and on every GPU, for every row count and stride. One
// reference over the largest row count therefore serves all smaller ones.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "twostep/gemm.h"

namespace twostep {

enum class Data { kNormal, kIntegers };  // as kernels/measure/fill.cuh; integers are -4..4
const char* data_name(Data data);        // "normal", "integers"

inline constexpr std::uint16_t kPoison = 0xffff;  // BF16 NaN, in every output and gap before a run

// The base of fill for one operand.
std::uint64_t operand_base(const char* operand, std::uint64_t seed);
inline float x_scale() { return 1.0f; }
float weight_scale(std::int64_t k);  // 1 / sqrt(K): outputs of about 1

struct ValueErrors {
  double worst = 0;  // largest |out - r| over the bound of 1.4 (a); above 1 breaks it
  double norm = 0;   // ||out - r|| / ||r||
  std::uint64_t elements = 0;
  std::uint64_t wrong_bits = 0;  // not the reference rounded once
  std::uint64_t nans = 0;
  std::uint64_t outside = 0;  // written beside the result: gaps, guards
};
// Empty, or the rule of 1.4 that is broken: (a) and (b) for real numbers, (c) for integers.
std::string broken_rule(const ValueErrors& errors, Data data);

void fill_host(std::uint16_t* out, std::int64_t rows, std::int64_t cols, std::int64_t stride, std::uint64_t base,
               Data data, float scale);

// How x and out lie in their buffers, in elements.
struct Placement {
  std::int64_t x_stride = 0;
  std::int64_t x_offset = 0;
  std::int64_t out_stride = 0;
  std::int64_t out_offset = 0;
  std::int64_t x_elements(std::int64_t m) const { return x_offset + m * x_stride; }
  std::int64_t out_elements(std::int64_t m) const { return out_offset + m * out_stride + kGuard; }
  static constexpr std::int64_t kGuard = 64;  // poisoned elements behind the last row
};
Placement packed_placement(std::int64_t n, std::int64_t k);

struct CaseRun {
  Kind said = Kind::kCpu;  // by kind(x, out), before
  Kind ran = Kind::kCpu;   // by stats(), after
  ValueErrors errors;
};

// One weight shape on one device with a reference for its operands. Owns the memory.
class ValueCase {
 public:
  virtual ~ValueCase() = default;
  // Fills the weight, keeps a reference for max_rows rows of x. Plans see the new values: the weight stays.
  virtual void set_data(Data data, std::uint64_t seed) = 0;
  virtual const TensorView& weight() const = 0;
  // Fills x, poisons out and its gaps, runs m rows and judges them.
  virtual CaseRun run(DraftGemm& plan, int m, const Placement& placement) = 0;
};

// On the CPU: a plain FP64 loop, independent of the backend that it judges. Where all columns would take too long,
// an evenly spaced sample with the first and the last is compared; all others are checked for NaN.
std::unique_ptr<ValueCase> make_host_case(std::int64_t n, std::int64_t k, int max_rows);

}  // namespace twostep
