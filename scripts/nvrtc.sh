#!/usr/bin/env bash
# Prints the path of NVRTC 13: TWOSTEP_NVRTC, else an installed toolkit, else .venv. Prints nothing if there is none.
# Older releases are passed over: they do not know every architecture that twostep compiles for.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -n "${TWOSTEP_NVRTC:-}" ]]; then
  echo "$TWOSTEP_NVRTC"
  exit
fi
shopt -s nullglob
known=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p | awk '$1 == "libnvrtc.so.13" { print $NF }')
for path in $known /usr/local/cuda*/lib64/libnvrtc.so.13 \
  "$PWD"/.venv/lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so.13; do
  if [[ -f "$path" ]]; then
    echo "$path"
    exit
  fi
done
