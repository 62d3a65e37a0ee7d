#!/usr/bin/env bash
# Prints the Python of .venv, with which the package is built and tested. Prints nothing if it lacks nanobind, the test
# packages or Python's headers: the build then has no Python package.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$PWD/.venv/bin/python
if "$python" - 2>/dev/null <<'END'; then
import os, sysconfig
import matplotlib, nanobind, numpy, pytest
os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))
END
  echo "$python"
fi
