// The text of each operation's kernel, for a number of ranks. Pure.
#pragma once

#include <string>

#include "jit/compile.h"
#include "mailbox/protocol.h"

namespace twostep {

CompileRequest mailbox_request(MailboxOp op, int ranks, bool strict_fence, const std::string& arch);

// Of NcclGroup.
CompileRequest move_request(const std::string& arch);
CompileRequest add_norm_request(const std::string& arch);

}  // namespace twostep
