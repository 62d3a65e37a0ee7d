// What the commands about Mailbox read the same way.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "twostep/mailbox.h"

namespace twostep::cli {

struct MailboxArguments {
  int ranks = 0;             // 0: a rank per device, at least two
  std::vector<int> devices;  // empty: all GPUs, at most eight
  std::string op = "all";
  std::string transport = "auto";
  std::vector<std::int64_t> rows;
  std::int64_t cols = 0;  // 0: what the command says
};

void add_mailbox_options(CLI::App& command, MailboxArguments& a);

std::optional<MailboxOp> op_of(const MailboxArguments& a);  // none: all
PeerTransport transport_of(const MailboxArguments& a);
std::string to_options(const MailboxArguments& a);  // " --ranks 2 --devices 0,1 .."

// Fills in ranks and devices. Throws kUnavailable with the reason why there is no GPU, kInvalidArgument.
void complete(const std::string& place, MailboxArguments* a);

}  // namespace twostep::cli
