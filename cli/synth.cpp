#include "io/synth.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/seed.h"

namespace twostep::cli {
namespace {

struct SynthOptions {
  std::string preset;
  std::string seed = "1";
  std::string out;
  std::string set = "{}";
  bool force = false;
};

void run_synth(const SynthOptions& options) {
  const std::uint64_t seed = parse_seed("synth", options.seed);
  const DrafterConfig config = DrafterConfig::from_json(synth_preset(options.preset).to_json(), options.set);
  SynthReport report;
  {
    Progress progress("synth " + options.preset);
    report = write_synthetic(config, seed, options.out, options.force,
                             [&](std::uint64_t done, std::uint64_t all) { progress.update(done, all); });
  }
  for (const auto& file : report.present) fmt::print("already there  {}\n", file);
  for (const auto& file : report.written) fmt::print("written        {}\n", file);
  fmt::print("{} seed {}: {:.1f} MB written\n", options.preset, seed, static_cast<double>(report.bytes) * 1e-6);
}

}  // namespace

void add_synth(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<SynthOptions>();
  CLI::App* command = app.add_subcommand("synth", "write a synthetic drafter checkpoint and its target's head");
  command->add_option("--preset", options->preset, "tiny, tiny-causal, k3 or k3.1")->required();
  command->add_option("--seed", options->seed, "equal seeds give equal bits")->capture_default_str();
  command->add_option("--out", options->out, "folder to write to")->required();
  command->add_option("--set", options->set, "JSON object of config fields to change");
  command->add_flag("--force", options->force, "overwrite another checkpoint");
  command->callback([options, &exit_code] {
    run_synth(*options);
    exit_code = 0;
  });
}

}  // namespace twostep::cli
