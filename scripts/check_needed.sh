#!/usr/bin/env bash
# check_needed.sh [--static] BINARY...
# One binary serves machines with and without a GPU: the loader must not be asked for a CUDA library. With --static,
# for a binary that is carried to a bare machine, it may be asked for the C library alone.
set -euo pipefail

allowed='.*'
if [[ "${1:-}" == --static ]]; then
  allowed='(libc|libm|libdl|libpthread|librt|ld-linux-x86-64)\.so\.[0-9]+'
  shift
fi
failed=0
for binary in "$@"; do
  needed=$(readelf -d "$binary" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
  # Every dynamic program needs libc: an empty list means that the reading went wrong.
  if [[ -z "$needed" ]]; then
    echo "$binary: readelf shows no needed library" >&2
    failed=1
  fi
  bad=$(grep -E '^lib(cuda|cudart|nvrtc|cublas)' <<<"$needed" || grep -Evx "$allowed" <<<"$needed" || true)
  if [[ -n "$bad" ]]; then
    echo "$binary: needs $(xargs <<<"$bad"); open it at run time, or link it statically" >&2
    failed=1
  else
    echo "$binary: needs $(xargs <<<"$needed")"
  fi
done
exit $failed
