// twostep: one program for machines with and without a GPU. Exit status: 0 done, 1 failed, 2 usage or bad data, 3 a
// search ran out of time, 4 a draft loop ended with wrong tokens or a status.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "core/check.h"
#include "core/env.h"
#include "measure/row.h"
#include "twostep/status.h"

namespace {

// The line for what cannot be parsed. Of an unknown command CLI11 says only that one is required, and of what should be
// a number nothing more than that it is none.
std::string parse_failure(const CLI::App* app, const CLI::Error& error) {
  std::string place = "twostep";
  while (!app->get_subcommands().empty()) {
    app = app->get_subcommands().front();
    place += " " + app->get_name();
  }
  if (app->get_require_subcommand_min() == 0) {
    const bool is_no_number = error.get_name() == "ConversionError";
    return std::string("twostep: ") + error.what() +
           (is_no_number ? "; accepted: a number, see " + place + " --help" : std::string()) + "\n";
  }
  std::string known;
  for (const CLI::App* command : app->get_subcommands([](const CLI::App* c) { return !c->get_group().empty(); }))
    known += (known.empty() ? "" : ", ") + command->get_name();
  const std::vector<std::string> rest = app->remaining();
  const std::string given = rest.empty() ? "none" : rest.front();
  return twostep::refusal(twostep::StatusCode::kInvalidArgument, place, "command", given, known).message() + "\n";
}

int run(int argc, char** argv) {
  CLI::App app{"twostep: prepared decode kernels for the Kimi K3 family"};
  app.require_subcommand(1);
  app.set_version_flag("--version", "twostep " + twostep::build_version());
  app.failure_message(parse_failure);
  int exit_code = 0;
  twostep::cli::add_info(app, exit_code);
  twostep::cli::add_why(app, exit_code);
  twostep::cli::add_check(app, exit_code);
  twostep::cli::add_bench(app, exit_code);
  twostep::cli::add_tune(app, exit_code);
  twostep::cli::add_compile(app, exit_code);
  twostep::cli::add_synth(app, exit_code);
  twostep::cli::add_draft(app, exit_code);
  try {
    app.parse(argc, argv);  // runs the command's callback, which sets exit_code
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const twostep::Error& error) {
    std::fprintf(stderr, "twostep: %s\n", error.what());
    const auto code = error.code();
    const bool input = code == twostep::StatusCode::kDataError || code == twostep::StatusCode::kInvalidArgument ||
                       code == twostep::StatusCode::kUnsupported;
    return input ? 2 : 1;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "twostep: not enough memory for this size\n");
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "twostep: %s\n", error.what());
    return 1;
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  twostep::environment();  // first, so that the log begins with what is set
  const int exit_code = run(argc, argv);
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return exit_code;
  std::fprintf(stderr, "twostep: standard output could not be written; the result is not whole\n");
  return 1;
}
