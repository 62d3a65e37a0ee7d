#include "measure/kda_chain.h"

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/embedded.h"

namespace twostep {
namespace {

constexpr std::chrono::minutes kLimit{10};  // kernels of a new shape are compiled and chosen

std::vector<std::string> command_of(const std::string& python, int ordinal) {
  return {"/usr/bin/env", python, "-c", std::string(embedded_chain().front().text), std::to_string(ordinal)};
}

}  // namespace

KdaChain::KdaChain(const std::string& python, int ordinal) : KdaChain(command_of(python, ordinal)) {}

KdaChain::KdaChain(std::vector<std::string> command)
    : name_(command.size() > 1 ? command[1] : command.front()), worker_(std::move(command), kLimit) {
  what_ = ask(nlohmann::json::object()).value("what", "");
}

Summary KdaChain::time(const KdaShape& shape, const KdaRing& ring) {
  const nlohmann::json json = ask({{"heads", shape.heads},
                                   {"requests", shape.requests},
                                   {"tokens", shape.tokens},
                                   {"layers", ring.layers},
                                   {"sets", ring.sets},
                                   {"launches", ring.launches}});
  try {
    return {json.at("median_us"), json.at("p10_us"), json.at("p90_us"), json.at("kept"), json.at("dropped")};
  } catch (const nlohmann::json::exception& error) {
    refuse(error.what());
  }
}

nlohmann::json KdaChain::ask(const nlohmann::json& request) {
  const LineWorker::Reply reply = worker_.ask(request.dump());
  if (!reply.lost.empty()) refuse(reply.lost);
  nlohmann::json json = nlohmann::json::parse(reply.line, nullptr, false);
  if (!json.is_object()) refuse("an answer that is no JSON object");
  if (const auto said = json.find("failure"); said != json.end())
    refuse(said->is_string() ? said->get<std::string>() : said->dump());
  return json;
}

void KdaChain::refuse(const std::string& why) const {
  fail(StatusCode::kUnavailable, "measure.kda_chain", name_, why,
       "a Python with torch, flash-linear-attention 0.6 or later, and this GPU",
       "python -m pip install torch flash-linear-attention, or leave --chain out");
}

}  // namespace twostep
