#!/usr/bin/env bash
# scripts/python_device.sh FOLDER: the source of the Python package and of the vLLM plug-in, their tests, benchmark and
# examples, and in deps/ the headers and in wheels/ the Python packages that it builds with. Nothing else is needed there but
# g++, CMake, Ninja, NumPy, Python and pip.
set -euo pipefail
cd "$(dirname "$0")/.."

to=$1
rm -rf "$to"
mkdir -p "$to/deps"
git ls-files -z CMakeLists.txt LICENSE README.md pyproject.toml bench/cases bench/*.py cmake examples include integrations \
  kernels python src tactics tests/python | xargs -0 cp --parents -t "$to"
include=/usr/include
cp -r "$include"/fmt "$include"/nlohmann "$include"/spdlog "$include"/xxhash.h "$include"/xxh3.h "$to/deps"
.venv/bin/pip download -qq --retries 2 --only-binary=:all: --dest "$to/wheels" nanobind scikit-build-core pytest
git describe --always --dirty --abbrev=7 >"$to/commit"
du -sh "$to"
