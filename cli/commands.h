// One file per command; each adds itself to the program and sets the exit status when it runs.
#pragma once

namespace CLI {
class App;
}

namespace twostep::cli {

void add_info(CLI::App& app, int& exit_code);     // device, libraries found, cache, why no GPU
void add_why(CLI::App& app, int& exit_code);      // which kind and tactic serve a shape, and why not others
void add_check(CLI::App& app, int& exit_code);    // values against the FP64 reference
void add_bench(CLI::App& app, int& exit_code);    // time against cuBLAS and the read limit
void add_tune(CLI::App& app, int& exit_code);     // the fastest tactic of each shape or key, into a table
void add_compile(CLI::App& app, int& exit_code);  // fill the cubin cache, no GPU needed
void add_synth(CLI::App& app, int& exit_code);    // synthetic checkpoints
void add_draft(CLI::App& app, int& exit_code);    // the linears of a draft step from a checkpoint

// `kda` below the command of the same name.
void add_why_kda(CLI::App& why, int& exit_code);
void add_check_kda(CLI::App& check, int& exit_code);
void add_bench_kda(CLI::App& bench, int& exit_code);

// Below bench.
void add_bench_draft(CLI::App& bench, int& exit_code);
void add_bench_draft_layer(CLI::App& bench, int& exit_code);
// `mailbox` below the command of the same name.
void add_check_mailbox(CLI::App& check, int& exit_code);
void add_bench_mailbox(CLI::App& bench, int& exit_code);

}  // namespace twostep::cli
