#!/usr/bin/env bash
# The environment of `make test-vllm`: .venv-vllm, with the tested vllm and torch and what its modules import on a machine
# without a GPU. 4 GB are downloaded, 8 GB lie there afterwards. A second run changes nothing and needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^tested = \["vllm==\(.*\)"\]$/\1/p' integrations/vllm/pyproject.toml)
python=.venv-vllm/bin/python
if "$python" -c "from importlib.metadata import version; assert version('vllm') == '$version'; import pytest, torch, xgrammar" \
  2>/dev/null; then
  exit 0
fi
echo "setup: taking vllm $version and what it imports into .venv-vllm"
python3 -m venv .venv-vllm
"$python" -m pip install -qq --retries 2 --no-deps "vllm==$version"
# Everything that vllm asks for, but what is of use to a GPU alone.
"$python" - >.venv-vllm/requirements.txt <<'END'
import re
from importlib.metadata import requires

gpu_alone = ("torchaudio torchvision torchcodec PyNvVideoCodec flashinfer-python tilelang nvidia-cudnn-frontend nvtx "
             "nvidia-cutlass-dsl quack-kernels tokenspeed-mla humming-kernels fastsafetensors instanttensor").split()
for line in requires("vllm"):
    if "extra ==" not in line and re.match(r"[\w.-]+", line)[0] not in gpu_alone:
        print(line)
END
"$python" -m pip install -qq --retries 2 pytest -r .venv-vllm/requirements.txt
