"""The bits of Python are those of C++: the program bits.cpp computes the same from raw files."""

import os
import subprocess

import numpy as np
import pytest

import twostep
from test_kda import D, HEADS, Layer, caches, views
from values import bf16, nans, normals

program = os.environ.get("TWOSTEP_BITS")
pytestmark = pytest.mark.skipif(not program, reason="TWOSTEP_BITS does not name the C++ program")


def in_cpp(folder, what, sizes, operands, results):
    for name, array in operands.items():
        array.tofile(folder / name)
    subprocess.run([program, folder, what, *map(str, sizes)], check=True)
    return [np.fromfile(folder / name, np.uint8) for name in results]


@pytest.mark.parametrize("m, n, k", [(1, 2304, 1536), (7, 1536, 7168), (65, 130, 200)])
def test_gemm(tmp_path, random, m, n, k):
    weight, x, out = normals(random, n, k), normals(random, m, k), nans(m, n)
    twostep.DraftGemm(bf16(weight)).run(bf16(x), bf16(out))
    (wanted,) = in_cpp(tmp_path, "gemm", (m, n, k), {"weight": weight, "x": x}, ["out"])
    assert np.array_equal(out.view(np.uint8).ravel(), wanted)


def test_kda(tmp_path, random):
    layer, requests, tokens = Layer(random), 3, 4
    stride = twostep.kda_row_stride(HEADS)
    core, pair = layer.prepared({(requests, tokens): stride}), caches(1 + requests * tokens, 2 + tokens)
    pair[0][:] = normals(random, *pair[0].shape)
    pair[1][:] = random.standard_normal(pair[1].shape) * 0.1
    slots = np.arange(1, 1 + requests * tokens, dtype=np.int32).reshape(requests, tokens)
    accepted = np.array([1, 2, 4], np.int32)
    projected, out = normals(random, requests * tokens, stride), nans(requests * tokens, D)
    operands = dict(conv_weight=layer.conv_weight, f_b=layer.f_b, a_log=layer.a_log, dt_bias=layer.dt_bias,
                    norm_weight=layer.norm, projected=projected, slots=slots, accepted=accepted, conv=pair[0].copy(),
                    state=pair[1].copy())
    core.prepare(views(pair))
    core.run(bf16(projected), bf16(out), caches=views(pair), slots=slots, accepted=accepted)
    wanted = in_cpp(tmp_path, "kda", (HEADS, requests, tokens), operands, ["out", "conv", "state"])
    for ours, theirs in zip((out, *pair), wanted):
        assert np.array_equal(ours.view(np.uint8).ravel(), theirs)
