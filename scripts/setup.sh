#!/usr/bin/env bash
# What the build and the tests need: Debian packages, NVRTC, and the Python packages of .venv. Looks before it installs,
# so a second run changes nothing and needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."

build_packages=(g++ cmake ninja-build python3 libcli11-dev nlohmann-json3-dev libspdlog-dev libfmt-dev
  libgtest-dev libbenchmark-dev libxxhash-dev)
# Without these there is no oneDNN path, fuzz target, format check, NVRTC from .venv or Python package; the rest builds.
# ccache spares .ci/run what its builds have in common. oneDNN's CMake files need OpenCL, which its package forgets.
extra_packages=(libdnnl-dev ocl-icd-opencl-dev clang libclang-rt-14-dev clang-format-14 python3-venv python3-dev ccache)

missing() {
  local package
  for package in "$@"; do
    [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] || echo "$package"
  done
}

root=()
[[ $(id -u) -eq 0 ]] || root=(sudo)
install_packages() {
  local packages
  mapfile -t packages < <(missing "$@")
  [[ ${#packages[@]} -gt 0 ]] || return 0
  echo "setup: installing ${packages[*]}"
  "${root[@]}" apt-get update -qq &&
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
}

# One call for all is quick; the split tells what can be done without.
if ! install_packages "${build_packages[@]}" "${extra_packages[@]}"; then
  install_packages "${build_packages[@]}" || {
    echo "setup: these packages are needed and could not be installed: $(missing "${build_packages[@]}" | xargs)" >&2
    echo "setup: connect to a Debian mirror, or as root: apt-get install $(missing "${build_packages[@]}" | xargs)" >&2
    exit 1
  }
  echo "setup: going on without $(missing "${extra_packages[@]}" | xargs)" >&2
fi

nvrtc=$(scripts/nvrtc.sh)
if [[ -z "$nvrtc" ]]; then
  echo "setup: no NVRTC 13 is installed; taking the package nvidia-cuda-nvrtc into .venv"
  if python3 -m venv .venv && .venv/bin/pip install -qq --retries 2 'nvidia-cuda-nvrtc>=13,<14'; then
    nvrtc=$(scripts/nvrtc.sh)
  fi
fi
if [[ -z "$nvrtc" ]]; then
  echo "setup: no NVRTC and no network to get it: the CPU-only build follows (TWOSTEP_CUDA=OFF)." >&2
  echo "setup: for the GPU rooms, set TWOSTEP_NVRTC to a libnvrtc.so.13, or run again with a network." >&2
elif [[ ! -f "$nvrtc" ]]; then
  echo "setup: TWOSTEP_NVRTC = $nvrtc is no file; give the path of libnvrtc.so.13, or unset it" >&2
  exit 1
fi

if [[ -z "$(scripts/python.sh)" ]]; then
  echo "setup: taking nanobind, numpy, pytest and matplotlib into .venv"
  if ! { python3 -m venv .venv && .venv/bin/pip install -qq --retries 2 'nanobind>=2.4' numpy pytest matplotlib; } ||
    [[ -z "$(scripts/python.sh)" ]]; then
    echo "setup: going on without the Python package: it needs Python's headers (python3-dev) and these packages" >&2
  fi
fi
