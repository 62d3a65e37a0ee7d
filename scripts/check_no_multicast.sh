#!/usr/bin/env bash
# check_no_multicast.sh BINARY...
# The mailbox moves its bytes by plain stores to each peer: neither the sources nor a binary, which holds the text of all
# kernels and the names of all driver functions, name the multicast of NVLink.
set -euo pipefail
cd "$(dirname "$0")/.."

names='cuMulticast|multimem'
for binary in "$@"; do
  # The same reading must find what every binary has: otherwise it went wrong.
  grep -qaF cuLaunchKernelEx "$binary" && grep -qaF griddepcontrol.wait "$binary" || {
    echo "$binary: holds no driver names or no text of kernels" >&2
    exit 1
  }
done
if grep -raEl "$names" include src kernels cli python integrations "$@"; then
  echo "these name $names" >&2
  exit 1
fi
echo "no $names in the sources nor in $*"
