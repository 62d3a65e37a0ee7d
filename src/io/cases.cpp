#include "io/cases.h"

#include "core/check.h"
#include "core/embedded.h"
#include "io/json.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "cases.read";
constexpr const char* kFile = "gemm.json";

std::string_view case_text() {
  for (const auto& file : embedded_cases())
    if (file.name == kFile) return file.text;
  fail(StatusCode::kInternal, kPlace, kFile, "missing", "embedded at build time");
}

}  // namespace

const char* rows_name(RowsKind rows) { return rows == RowsKind::kBlock ? "block" : "context"; }

std::int64_t rows_of(RowsKind rows, std::int64_t requests, std::int64_t draft_tokens) {
  return requests * (rows == RowsKind::kBlock ? draft_tokens : draft_tokens + 1);
}

std::string GemmCase::name() const { return model + "/tp" + std::to_string(tp) + "/" + layer; }

std::vector<GemmCase> gemm_cases(const CaseFilter& filter) {
  std::vector<GemmCase> cases;
  const nlohmann::json document = parse_json(case_text(), kPlace, kFile);
  try {
    for (const auto& row : document.at("cases")) {
      GemmCase item;
      row.at("model").get_to(item.model);
      row.at("tp").get_to(item.tp);
      row.at("layer").get_to(item.layer);
      row.at("n").get_to(item.n);
      row.at("k").get_to(item.k);
      row.at("split").get_to(item.split);
      item.rows = row.at("rows") == "context" ? RowsKind::kContext : RowsKind::kBlock;
      row.at("count").get_to(item.count);
      const bool wanted = (filter.model.empty() || filter.model == item.model) &&
                          (filter.tp == 0 || filter.tp == item.tp) &&
                          (filter.name.empty() || filter.name == item.name() || filter.name == item.layer);
      if (wanted) cases.push_back(std::move(item));
    }
  } catch (const nlohmann::json::exception& error) {
    fail(StatusCode::kDataError, kPlace, kFile, printable(error.what()), "model, tp, layer, n, k, split, rows, count");
  }
  return cases;
}

}  // namespace twostep
