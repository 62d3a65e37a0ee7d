#!/usr/bin/env python3
"""Checks that every #include follows an arrow of the layout, and prints each one that does not."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Room, the files that belong to it (the first row that matches), the rooms that it may include beside itself.
# Device text is compiled with no include path, so it may include nothing but device text.
ROOMS = [
    ("status.h", ["include/twostep/status.h"], []),
    ("tensor.h", ["include/twostep/tensor.h"], []),
    ("gemm.h", ["include/twostep/gemm.h"], ["status.h", "tensor.h"]),
    ("kda.h", ["include/twostep/kda.h"], ["status.h", "tensor.h"]),
    ("logits.h", ["include/twostep/logits.h"], ["status.h", "tensor.h", "gemm.h", "mailbox.h"]),
    ("mailbox.h", ["include/twostep/mailbox.h"], ["status.h", "tensor.h"]),
    ("drafter_config.h", ["include/twostep/drafter_config.h"], []),
    ("drafter.h", ["include/twostep/drafter.h"], ["status.h", "tensor.h", "drafter_config.h"]),
    ("kernels/common", ["kernels/common/*.cuh"], []),
    ("kernels/gemm", ["kernels/gemm/*.cuh"], ["kernels/common"]),
    ("kernels/kda", ["kernels/kda/*.cuh"], ["kernels/common"]),
    ("kernels/draft", ["kernels/draft/*.cuh"], ["kernels/common"]),
    ("kernels/gather", ["kernels/gather/*.cuh"], ["kernels/common"]),
    ("kernels/measure", ["kernels/measure/*.cuh"], ["kernels/common"]),
    ("core", ["src/core/*"], ["include"]),
    ("cuda", ["src/cuda/*"], ["include", "core"]),
    ("jit loading", ["src/jit/nvrtc.*", "src/jit/build.*", "src/jit/kernel_cache.*"],
     ["include", "core", "cuda", "jit"]),
    ("jit", ["src/jit/*"], ["include", "core"]),
    ("io", ["src/io/*"], ["include", "core"]),
    ("gemm plan", ["src/gemm/plan.*", "src/gemm/warp.*", "src/gemm/cublas.*", "src/gemm/packed.*"],
     ["include", "core", "gemm", "cuda", "jit", "jit loading"]),
    ("gemm", ["src/gemm/*"], ["include", "core"]),
    ("kda plan", ["src/kda/plan.*"], ["include", "core", "kda", "cuda", "jit", "jit loading"]),
    ("kda", ["src/kda/*"], ["include", "core"]),
    ("mailbox plan", ["src/mailbox/plan.*", "src/mailbox/peer_memory.*", "src/mailbox/nccl.*", "src/mailbox/nccl_plan.*"],
     ["include", "core", "mailbox", "cuda", "jit", "jit loading"]),
    ("mailbox", ["src/mailbox/*"], ["include", "core", "jit"]),
    ("logits plan", ["src/drafter/logits_plan.*"], ["include", "core", "drafter", "cuda", "jit", "jit loading"]),
    ("drafter plan", ["src/drafter/plan.*"], ["include", "core", "io", "drafter", "cuda", "jit", "jit loading"]),
    ("drafter", ["src/drafter/*"], ["include", "core", "io", "jit", "mailbox"]),
    ("measure on a GPU", ["src/measure/device.*", "src/measure/nvml.*", "src/measure/*_cuda.*", "src/measure/chain.*",
                          "src/measure/bench_gemm.*", "src/measure/bench_kda.*", "src/measure/tune_worker.*",
                          "src/measure/draft_layer.*"], ["include", "src"]),
    ("measure", ["src/measure/*"], ["include", "core", "jit", "io", "gemm", "kda", "mailbox", "drafter"]),
    ("cli", ["cli/*"], ["include", "src"]),
    # The loader is tested without a GPU, on an NVRTC that the test brings.
    ("tests of the loader", ["tests/unit/jit_nvrtc.cpp"], ["include", "core", "jit", "jit loading", "tests/unit"]),
    ("tests of NCCL's loader", ["tests/unit/mailbox_nccl.cpp"], ["include", "core", "mailbox", "mailbox plan"]),
    ("fake NVRTC", ["tests/unit/fake_nvrtc/*"], []),
    ("fake NCCL", ["tests/unit/fake_nccl/*"], []),
    ("tests/unit", ["tests/unit/*"], ["include", "core", "jit", "io", "gemm", "kda", "mailbox", "drafter", "measure", "tests/kda",
      "tests/common"]),
    ("tests/emulate", ["tests/emulate/*", "tests/emulate/common/*"],
     ["include", "core", "io", "drafter", "kda", "mailbox", "kernels/common", "kernels/draft", "kernels/gather",
      "kernels/kda", "tests/drafter", "tests/kda"]),
    ("tests/drafter", ["tests/drafter/*"], ["include", "core", "io", "drafter"]),
    ("tests/common", ["tests/common/*"], []),
    ("tests/kda", ["tests/kda/*"], ["include", "core", "kda"]),
    ("tests/gpu", ["tests/gpu/*"], ["include", "src", "tests/kda", "tests/common", "tests/drafter"]),
    ("tests/multi", ["tests/multi/*"], ["include", "src", "tests/common"]),
    ("tests/python", ["tests/python/*"], ["include"]),
    ("tests/fuzz", ["tests/fuzz/*"], ["include", "core", "io"]),
    ("bench", ["bench/*"], ["include", "core", "gemm", "kda"]),
    ("examples", ["examples/*"], ["include"]),
    # info and compile look at what no class tells, as the program's commands do.
    ("python system", ["python/src/system.cpp"], ["include", "src", "python"]),
    ("python drafter", ["python/src/drafter.cpp"], ["include", "drafter", "python"]),  # what tests look at
    ("python", ["python/src/*"], ["include"]),
]
GROUPS = {
    "include": ["status.h", "tensor.h", "gemm.h", "kda.h", "logits.h", "mailbox.h", "drafter_config.h",
                "drafter.h"],
    "src": ["core", "cuda", "jit loading", "jit", "io", "gemm plan", "gemm", "kda plan", "kda", "mailbox plan", "mailbox", "logits plan",
            "drafter plan", "drafter",
            "measure on a GPU", "measure"],
}
# Folders that an include may be relative to, beside the file's own.
INCLUDE_PATH = ["include", "src", "kernels", "python/src", "."]
STANDARD_ONLY = GROUPS["include"]
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:<([^>]*)>|"([^"]*)"|(\S+))', re.MULTILINE)
# Device text inside host code, as `R"(#include "gemm/pack.cuh" ...)"`: NVRTC reads it, the host compiler does not.
RAW_STRING = re.compile(r'R"(\w*)\(.*?\)\1"', re.DOTALL)
# Libraries that are opened at run time through declarations of our own.
TOOLKIT = re.compile(r"^(cuda|nvrtc|cublas|nvml|cooperative_groups|cub/|thrust/)")


def room_of(path):
    for room, patterns, _ in ROOMS:
        if any(path.match(pattern) and len(path.parts) == len(Path(pattern).parts) for pattern in patterns):
            return room
    return None


def allowed_of(room):
    named = next(allowed for name, _, allowed in ROOMS if name == room)
    return {room}.union(*(GROUPS.get(name, [name]) for name in named))


def resolve(path, name):
    for folder in [path.parent, *map(Path, INCLUDE_PATH)]:
        target = (ROOT / folder / name).resolve()
        if target.is_file() and target.is_relative_to(ROOT):
            return target.relative_to(ROOT)
    return None


def findings_of(path):
    room = room_of(path)
    if room is None:
        return [f"{path}: belongs to no room; add it to the table in cmake/include_scan.py"]
    found = []
    text = RAW_STRING.sub(lambda match: "\n" * match[0].count("\n"), (ROOT / path).read_text())
    for match in INCLUDE.finditer(text):
        place = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
        angle, quoted, macro = match.groups()
        if macro:
            found.append(f"{place}: includes the macro {macro}; name the file")
        elif angle:
            if room.startswith("kernels/"):
                found.append(f"{place}: device text includes <{angle}>; it is compiled with no include path")
            elif room in STANDARD_ONLY and not re.fullmatch(r"[a-z0-9_]+", angle):
                found.append(f"{place}: a public header includes <{angle}>; accepted: the C++ standard library")
            elif TOOLKIT.match(angle):
                found.append(f"{place}: includes <{angle}>; declare what is needed and open the library at run time")
        else:
            target = resolve(path, quoted)
            if target is None:
                found.append(f'{place}: "{quoted}" is no file of this repository; write other headers as <{quoted}>')
            elif room_of(target) not in allowed_of(room):
                accepted = ", ".join(sorted(allowed_of(room)))
                found.append(f"{place}: {room} includes {target} of {room_of(target)}; accepted: {accepted}")
    return found


def main():
    files = [
        path.relative_to(ROOT)
        for folder in ["include", "kernels", "src", "cli", "tests", "bench", "examples", "python"]
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".h", ".cpp", ".cuh"}
    ]
    findings = [finding for path in files for finding in findings_of(path)]
    print("\n".join(findings + [f"include scan: {len(files)} files, {len(findings)} findings"]))
    return 1 if findings or not files else 0


if __name__ == "__main__":
    sys.exit(main())
