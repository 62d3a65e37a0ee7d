// Arguments that several commands read the same way. Each throws kInvalidArgument with what it accepts.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#if TWOSTEP_CUDA
#include "cuda/driver.h"
#endif

namespace twostep::cli {

struct Shape {
  std::int64_t n = 0;
  std::int64_t k = 0;
  friend auto operator<=>(const Shape&, const Shape&) = default;
};

// The whole of `text` as a number from `low` on; none if it is not one.
inline std::optional<std::int64_t> parse_number(std::string_view text, std::int64_t low) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low) return std::nullopt;
  return value;
}

// "2304,1536"
inline Shape parse_shape(const std::string& place, const std::string& text) {
  const auto comma = text.find(',');
  const auto n = parse_number(std::string_view(text).substr(0, comma), 1);
  const auto k = parse_number(comma == std::string::npos ? "" : std::string_view(text).substr(comma + 1), 1);
  // Below 2^40 products, as the widest accepted weight, so that no count overflows.
  if (n && k && *n < (std::int64_t{1} << 40) / *k) return {*n, *k};
  fail(StatusCode::kInvalidArgument, place, "--shape", text, "N,K with both above 0 and N * K below 2^40");
}

// "1,8,16-20"
inline std::vector<int> parse_rows(const std::string& place, const std::string& text) {
  constexpr std::int64_t kMost = 4096;
  std::vector<int> rows;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    const std::string_view part = std::string_view(text).substr(at, end - at);
    const std::size_t dash = part.find('-');
    const auto first = parse_number(part.substr(0, dash), 1);
    const auto last = dash == std::string_view::npos ? first : parse_number(part.substr(dash + 1), 1);
    if (!first || !last || *last < *first || *last > kMost)
      fail(StatusCode::kInvalidArgument, place, "--rows", text, "counts from 1 to 4096 and ranges of them: 1,8,16-20");
    for (std::int64_t m = *first; m <= *last; ++m) rows.push_back(static_cast<int>(m));
    at = end + 1;
  }
  return rows;
}

// "auto" becomes the first GPU, or the CPU where there is none.
inline std::string resolve_device(const std::string& text) {
  if (text != "auto") return text;
#if TWOSTEP_CUDA
  if (driver_status().ok()) return "cuda:0";
#endif
  return "cpu";
}

// "cuda:0" gives its index, "cpu" none. Throws kUnavailable too, with the reason why there is no GPU.
inline std::optional<int> parse_device(const std::string& place, const std::string& text) {
  if (text == "cpu") return std::nullopt;
  const auto index = text.starts_with("cuda:") ? parse_number(std::string_view(text).substr(5), 0) : std::nullopt;
  if (!index || *index > 255)
    fail(StatusCode::kInvalidArgument, place, "--device", text, "auto, cpu, cuda:0, cuda:1, ..");
#if TWOSTEP_CUDA
  throw_if_error(driver_status());
  return static_cast<int>(*index);
#else
  fail(StatusCode::kUnavailable, place, "--device", text, "cpu", "this build has no GPU rooms");
#endif
}

}  // namespace twostep::cli
