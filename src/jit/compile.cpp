#include "jit/compile.h"

#include <algorithm>
#include <charconv>

#include "core/hash.h"

namespace twostep {
namespace {

// Appends a field with its length, so that no two lists of fields give the same bytes.
void append_field(std::string& bytes, std::string_view field) {
  bytes += std::to_string(field.size());
  bytes += ':';
  bytes += field;
}

// The last number that ends right before `label`; 0 if the label is not there.
int number_before(std::string_view line, std::string_view label) {
  const auto end = line.find(label);
  if (end == std::string_view::npos) return 0;
  auto begin = end;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  int value = 0;
  std::from_chars(line.data() + begin, line.data() + end, value);
  return value;
}

}  // namespace

std::vector<std::string> compile_options(const CompileRequest& request) {
  return {"--gpu-architecture=" + request.arch, "--std=c++20", "--ptxas-options=-v"};
}

std::string source_hash(const CompileRequest& request, std::span<const EmbeddedText> files) {
  std::string bytes;
  for (const auto& file : files) {
    append_field(bytes, file.name);
    append_field(bytes, file.text);
  }
  for (const auto& option : compile_options(request)) append_field(bytes, option);
  for (const auto& field : {request.entry, request.rules, request.text}) append_field(bytes, field);
  return hash128(bytes);
}

std::string key_hash(const std::string& source, const std::string& nvrtc_version) {
  return hash128(source + " nvrtc " + nvrtc_version);
}

CompileKey compile_key(const CompileRequest& request, const std::string& nvrtc_version) {
  return {request.name, key_hash(source_hash(request), nvrtc_version)};
}

KernelResources parse_ptxas_log(std::string_view log) {
  KernelResources all;
  while (!log.empty()) {
    const auto line = log.substr(0, log.find('\n'));
    log.remove_prefix(std::min(log.size(), line.size() + 1));
    all.registers = std::max(all.registers, number_before(line, " registers"));
    all.stack_bytes = std::max(all.stack_bytes, number_before(line, " bytes stack frame"));
    all.static_smem_bytes = std::max(all.static_smem_bytes, number_before(line, " bytes smem"));
    all.spill_store_bytes += number_before(line, " bytes spill stores");
    all.spill_load_bytes += number_before(line, " bytes spill loads");
  }
  return all;
}

}  // namespace twostep
