#include "measure/torch_chain.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/embedded.h"

namespace twostep {
namespace {

constexpr std::chrono::minutes kLimit{10};  // kernels of a new shape are compiled and chosen

// Of its arguments, the text of torch_chain.py becomes the module of that name, and that of the script is run.
constexpr const char* kRun = R"(import sys, types
module = sys.modules["torch_chain"] = types.ModuleType("torch_chain")
exec(sys.argv.pop(1), vars(module))
exec(sys.argv.pop(1)))";

std::string text_of(const char* file) {
  const auto texts = embedded_chains();
  return std::string(std::find_if(texts.begin(), texts.end(), [&](const auto& one) { return one.name == file; })->text);
}

std::vector<std::string> command_of(const ChainScript& script, const std::string& python, int ordinal) {
  return {"/usr/bin/env", python, "-c", kRun, text_of("torch_chain.py"), text_of(script.file), std::to_string(ordinal)};
}

}  // namespace

TorchChain::TorchChain(const ChainScript& script, const std::string& python, int ordinal)
    : TorchChain(script, command_of(script, python, ordinal)) {}

TorchChain::TorchChain(const ChainScript& script, std::vector<std::string> command)
    : script_(script), name_(command.size() > 1 ? command[1] : command.front()), worker_(std::move(command), kLimit) {
  (void)ask(nlohmann::json::object());
}

Summary TorchChain::time(const nlohmann::json& request) {
  const nlohmann::json json = ask(request);
  try {
    return {json.at("median_us"), json.at("p10_us"), json.at("p90_us"), json.at("kept"), json.at("dropped")};
  } catch (const nlohmann::json::exception& error) {
    refuse(error.what());
  }
}

nlohmann::json TorchChain::ask(const nlohmann::json& request) {
  const LineWorker::Reply reply = worker_.ask(request.dump());
  if (!reply.lost.empty()) refuse(reply.lost);
  nlohmann::json json = nlohmann::json::parse(reply.line, nullptr, false);
  if (!json.is_object()) refuse("an answer that is no JSON object");
  if (const auto said = json.find("failure"); said != json.end())
    refuse(said->is_string() ? said->get<std::string>() : said->dump());
  if (const auto said = json.find("what"); said != json.end() && said->is_string()) what_ = said->get<std::string>();
  return json;
}

void TorchChain::refuse(const std::string& why) const {
  fail(StatusCode::kUnavailable, "measure.torch_chain", name_, why,
       fmt::format("a Python with {}, and this GPU", script_.needs),
       fmt::format("python -m pip install {}, or leave --chain out", script_.packages));
}

nlohmann::json chain_request(const KdaShape& shape, const KdaRing& ring) {
  return {{"heads", shape.heads},  {"requests", shape.requests}, {"tokens", shape.tokens},
          {"layers", ring.layers}, {"sets", ring.sets},          {"launches", ring.launches}};
}

nlohmann::json chain_request(const StepModel& model, const DrafterConfig& config, const DraftLoopOptions& options) {
  std::int64_t confidence = 0;
  if (config.enable_confidence_head.value_or(false))
    confidence = model.hidden + (model.confidence_with_markov ? model.markov_rank : 0);
  return {{"hidden", model.hidden},
          {"heads", model.heads},
          {"q_lora", model.q_lora},
          {"kv_lora", model.kv_lora},
          {"nope", model.nope},
          {"rope", model.rope},
          {"v", model.v},
          {"inner", model.inner},
          {"vocab", model.shard_vocab},
          {"markov_rank", model.markov_rank},
          {"k", options.draft_tokens},
          {"requests", options.requests},
          {"context", options.context},
          {"causal", config.causal},
          {"gate", config.mla_use_output_gate},
          {"situ", model.situ},
          {"confidence", confidence}};
}

}  // namespace twostep
