#include "cli/mailbox_arguments.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "core/check.h"
#include "measure/mailbox_case.h"
#if TWOSTEP_CUDA
#include "cuda/driver.h"
#endif

namespace twostep::cli {
namespace {

constexpr int kMostRanks = 8;
constexpr MailboxOp kOps[] = {MailboxOp::kAllGather, MailboxOp::kAllGatherWords, MailboxOp::kAllReduceAddNorm};
// Ranks are threads of this process, whose own memory cuda_ipc refuses.
constexpr PeerTransport kTransports[] = {PeerTransport::kAuto, PeerTransport::kSameProcess, PeerTransport::kVmmFd};

}  // namespace

void add_mailbox_options(CLI::App& command, MailboxArguments& a) {
  std::vector<std::string> ops = {"all"}, transports;
  for (const MailboxOp op : kOps) ops.push_back(op_name(op));
  for (const PeerTransport transport : kTransports) transports.push_back(transport_name(transport));
  command
      .add_option("--ranks", a.ranks, "Ranks, each a thread; more than devices: virtual ones. Default: one a device")
      ->check(CLI::Range(2, kMostRanks));
  command.add_option("--devices", a.devices, "GPUs of ranks 0, 1, ..: 0,1. Default: all, up to 8")
      ->delimiter(',')
      ->check(CLI::Range(0, 255));
  command.add_option("--op", a.op, "Operation")->check(CLI::IsMember(ops))->capture_default_str();
  command.add_option("--transport", a.transport, "How ranks share memory")
      ->check(CLI::IsMember(transports))
      ->capture_default_str();
}

std::optional<MailboxOp> op_of(const MailboxArguments& a) {
  for (const MailboxOp op : kOps)
    if (a.op == op_name(op)) return op;
  return std::nullopt;
}

PeerTransport transport_of(const MailboxArguments& a) {
  for (const PeerTransport transport : kTransports)
    if (a.transport == transport_name(transport)) return transport;
  return PeerTransport::kAuto;
}

std::string to_options(const MailboxArguments& a) {
  std::string text = fmt::format(" --ranks {} --devices {}", a.ranks, fmt::join(a.devices, ","));
  if (a.op != "all") text += " --op " + a.op;
  if (a.transport != "auto") text += " --transport " + a.transport;
  if (!a.rows.empty()) text += fmt::format(" --rows {}", fmt::join(a.rows, ","));
  if (a.cols > 0) text += fmt::format(" --cols {}", a.cols);
  return text;
}

void complete(const std::string& place, MailboxArguments* a) {
#if TWOSTEP_CUDA
  throw_if_error(driver_status());
  const int count = device_count();
  for (int i = 0; a->devices.empty() && i < std::min(count, kMostRanks); ++i) a->devices.push_back(i);
  for (const int device : a->devices)
    if (device >= count)
      fail(StatusCode::kInvalidArgument, place, "--devices", std::to_string(device), fmt::format("0 to {}", count - 1));
  if (a->ranks == 0) a->ranks = std::clamp(static_cast<int>(a->devices.size()), 2, kMostRanks);
  // A GPU named twice has two ranks, as one named once does that ranks come round to.
  if (static_cast<int>(a->devices.size()) > a->ranks)
    fail(StatusCode::kInvalidArgument, place, "--devices", fmt::format("{}", fmt::join(a->devices, ",")),
         fmt::format("at most one for each of {} ranks", a->ranks));
#else
  (void)a;
  fail(StatusCode::kUnavailable, place, "GPU", "none", "a build with GPU rooms",
       "build with TWOSTEP_CUDA=ON: a mailbox moves memory between GPUs");
#endif
}

}  // namespace twostep::cli
