#!/usr/bin/env bash
# compile_all_kernels.sh [TWOSTEP [ARGUMENT...]]
# Compiles every kernel file for every architecture with NVRTC, without a GPU; fails on an error, on a spill, and where
# ptxas serialises wgmma (its remarks C75xx). More arguments of `twostep compile` may choose other shapes than those of
# K3.1 at TP8. The step of PreparedKda is compiled for 12 heads, with 1, 2 and 8 tokens, both conv layouts, both gates and
# both state modes.
set -euo pipefail
cd "$(dirname "$0")/.."

twostep=${1:-build/bin/twostep}
shift || true
[[ $# -gt 0 ]] || set -- --model k3.1 --tp 8
TWOSTEP_NVRTC=$(scripts/nvrtc.sh)
export TWOSTEP_NVRTC
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
TWOSTEP_LOG=debug "$twostep" compile --all-archs --report --cache "$folder" "$@" 2>"$folder/log" || {
  grep -v '^twostep debug' "$folder/log" >&2
  exit 1
}
if grep -E '\(C75[0-9]+\)' "$folder/log" >&2; then exit 1; fi
