// Benchmark cases as data: the one reader that check, bench and tune share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace twostep {

// Rows of a linear in a draft step of R requests and k draft tokens (spec: draft-gemm 13.1).
enum class RowsKind : std::uint8_t {
  kBlock,    // R * k: the drafted positions
  kContext,  // R * (k + 1): what the target just processed
};
const char* rows_name(RowsKind rows);  // "block", "context"
std::int64_t rows_of(RowsKind rows, std::int64_t requests, std::int64_t draft_tokens);

// One linear of a model at one tensor-parallel size: weight [n, k] of one rank.
struct GemmCase {
  std::string model;  // "k3", "k3.1"
  int tp = 1;
  std::string layer;  // "qkv_a"
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::string split;  // what tensor parallelism divides: "n", "k", "none"
  RowsKind rows = RowsKind::kBlock;
  int count = 0;  // linears of this kind in one draft step; 0: another form, which no released step runs

  std::string name() const;  // "k3.1/tp8/qkv_a"
  friend bool operator==(const GemmCase&, const GemmCase&) = default;
};

// An empty or zero field matches everything. `name` is a case's name or its layer.
struct CaseFilter {
  std::string model;
  int tp = 0;
  std::string name;
};

// The cases of bench/cases/gemm.json, embedded at build time, in file order. Throws kDataError where the file is
// malformed.
std::vector<GemmCase> gemm_cases(const CaseFilter& filter = {});

}  // namespace twostep
