"""DraftGemm over NumPy and DLPack: values, refusals, weight life."""

import gc
import pickle
import threading

import numpy as np
import pytest

import twostep
from values import bf16, from_bf16, integers, nans, product


def test_every_row_count_from_0_to_72_is_exact(random):
    for n, k in ((48, 192), (17, 129)):
        weight = integers(random, n, k)
        gemm = twostep.DraftGemm(bf16(weight))
        for m in range(73):
            x, out = integers(random, m, k), nans(m, n)
            gemm.run(bf16(x), bf16(out))
            assert np.array_equal(out, product(x, weight)), m


def test_kind_why_and_shape(random):
    gemm = twostep.DraftGemm(bf16(integers(random, 48, 192)))
    assert (gemm.n, gemm.k) == (48, 192)
    assert gemm.prepare(8) == gemm.kind(8) == "cpu"
    assert gemm.why_code(8) == "" and "CPU" in gemm.why(8)
    assert gemm.keys() == [] and gemm.captured_addresses() == []


def test_rows_further_apart_than_their_width(random):
    weight = integers(random, 48, 64)
    wide_x, wide_out = integers(random, 5, 100), nans(5, 60)
    x, out = wide_x[:, 8:72], wide_out[:, 4:52]
    assert twostep.DraftGemm(bf16(weight)).run(bf16(x), bf16(out)) is not None
    assert np.array_equal(out, product(x, weight))
    assert (wide_out[:, :4] == 0x7FC1).all() and (wide_out[:, 52:] == 0x7FC1).all()


def test_run_returns_out_itself(random):
    out = bf16(nans(1, 16))
    assert twostep.DraftGemm(bf16(integers(random, 16, 64))).run(bf16(integers(random, 1, 64)), out) is out


@pytest.mark.parametrize(
    "code, x, out",
    [
        ("invalid_argument", lambda x: x[0], lambda out: out),  # rank
        ("invalid_argument", lambda x: x[:, :32], lambda out: out),  # K
        ("invalid_argument", lambda x: x, lambda out: out[:3]),  # M
        ("bad_layout", lambda x: np.repeat(x, 2, 1)[:, ::2], lambda out: out),  # inner stride
        ("bad_layout", lambda x: np.lib.stride_tricks.as_strided(x, strides=(0, 2)), lambda out: out),  # expanded
    ],
)
def test_refuses_before_it_writes(random, refuses, code, x, out):
    gemm = twostep.DraftGemm(bf16(integers(random, 48, 64)))
    rows, result = integers(random, 4, 64), nans(4, 48)
    assert gemm.accepts(bf16(x(rows)), bf16(out(result)))
    with refuses(code):
        gemm.run(bf16(x(rows)), bf16(out(result)))
    assert (result == 0x7FC1).all()


def test_dtypes(random, refuses):
    gemm = twostep.DraftGemm(bf16(integers(random, 48, 64)))
    with refuses("unsupported"):
        gemm.run(np.zeros((1, 64), np.float32), bf16(nans(1, 48)))
    with refuses("unsupported") as refusal:  # no tag: what the bits mean is not known
        gemm.run(np.zeros((1, 64), np.uint16), bf16(nans(1, 48)))
    assert "view" in refusal.error.remedy
    with refuses("unsupported"):
        twostep.DraftGemm(np.zeros((16, 64), np.float32))
    with refuses("invalid_argument"):
        twostep.view(np.zeros((16, 64), np.float32), "bf16")
    with refuses("invalid_argument"):
        gemm.run([1, 2], bf16(nans(1, 48)))
    with refuses("invalid_argument"):
        twostep.DraftGemm(bf16(integers(random, 64)))


def test_overlap(random, refuses):
    gemm = twostep.DraftGemm(bf16(integers(random, 128, 128)))
    buffer = integers(random, 8, 256)
    with refuses("overlap"):
        gemm.run(bf16(buffer[:, :128]), bf16(buffer[:, 64:192]))
    gemm.run(bf16(buffer[:, :128]), bf16(buffer[:, 128:]))


def test_wrong_device(random, refuses):
    gemm = twostep.DraftGemm(bf16(integers(random, 48, 64)))
    elsewhere = twostep.TensorView([1, 64], device="cuda:0", address=4096)
    with refuses("wrong_device"):
        gemm.run(elsewhere, bf16(nans(1, 48)))


def test_a_gpu_that_is_not_there_is_unavailable(refuses):
    if twostep.info()["gpus"]:
        pytest.skip("there is a GPU")
    with refuses("unavailable"):
        twostep.DraftGemm(twostep.TensorView([16, 64], device="cuda:0", address=4096))
    with refuses("unavailable"):
        twostep.LogitsStage("cuda:0", scale=0.5)


def test_descriptions_of_memory(random, refuses):
    memory = integers(random, 6, 64)
    x = twostep.TensorView([3, 64], strides=[128, 1], address=memory.ctypes.data)
    assert (x.shape, x.strides, x.dtype, x.device) == ([3, 64], [128, 1], "BF16", "cpu") and "BF16[3, 64]" in repr(x)
    assert twostep.TensorView([2, 3, 4], "f32").strides == [12, 4, 1]
    weight, out = integers(random, 16, 64), nans(3, 16)
    twostep.DraftGemm(bf16(weight)).run(x, bf16(out))
    assert np.array_equal(out, product(memory[::2], weight))
    for device in ("gpu", "cuda:", "cuda:x", "cuda:1234", ""):
        with refuses("invalid_argument"):
            twostep.TensorView([1], device=device)
    with refuses("invalid_argument"):
        twostep.TensorView([1, 2], strides=[1])
    with refuses("invalid_argument"):
        twostep.TensorView([1] * 5)
    with refuses("invalid_argument"):
        twostep.TensorView([1], "bf17")


def test_read_only_out_is_refused(random, refuses):
    gemm = twostep.DraftGemm(bf16(integers(random, 16, 64)))
    out = np.zeros((1, 16), np.float32)
    out.flags.writeable = False
    with refuses("invalid_argument"):
        gemm.run(bf16(integers(random, 1, 64)), out)


def test_weight_in_place_moved_and_changed(random, refuses):
    weight, x, out = integers(random, 48, 64), integers(random, 3, 64), nans(3, 48)
    gemm = twostep.DraftGemm(bf16(weight))
    gemm.run(bf16(x), bf16(out))
    weight[:] = integers(random, 48, 64)
    gemm.run(bf16(x), bf16(out))
    assert np.array_equal(out, product(x, weight))

    moved = integers(random, 48, 64)
    gemm.run(bf16(x), bf16(out), weight=bf16(moved))
    assert np.array_equal(out, product(x, moved)) and gemm.stats()["rebinds"] == 1
    gemm.run(bf16(x), bf16(out))  # stays with the weight passed last
    assert np.array_equal(out, product(x, moved)) and gemm.stats()["rebinds"] == 1

    with refuses("weight_changed"):
        gemm.bind(bf16(integers(random, 64, 64)))


def test_the_weight_is_kept_alive(random):
    x, out = integers(random, 2, 64), nans(2, 48)
    weight = integers(random, 48, 64)
    wanted = product(x, weight)
    gemm = twostep.DraftGemm(bf16(weight))
    del weight
    gc.collect()
    noise = [np.full((48, 64), 0x4000, np.uint16) for _ in range(64)]
    gemm.run(bf16(x), bf16(out))
    assert np.array_equal(out, wanted) and noise


def test_threads_share_a_plan(random):
    weight = integers(random, 512, 1024)
    gemm = twostep.DraftGemm(bf16(weight))
    wrong = []

    def work(seed):
        own = np.random.default_rng(seed)
        for m in (1, 7, 16):
            gemm.prepare(m)
            x, out = integers(own, m, 1024), nans(m, 512)
            gemm.run(bf16(x), bf16(out))
            if not np.array_equal(out, product(x, weight)):
                wrong.append((seed, m))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_errors_carry_their_fields(random, refuses):
    gemm = twostep.DraftGemm(bf16(integers(random, 16, 64)))
    with refuses("invalid_argument") as refusal:
        gemm.prepare(-1)
    error = refusal.error
    assert (error.place, error.argument, error.value, error.accepted) == ("gemm.prepare", "m", "-1", "0 and more")
    assert str(error) == "gemm.prepare: m = -1; accepted: 0 and more"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.code, again.argument) == (str(error), error.code, "m")
    with refuses("invalid_argument") as refusal:
        twostep.Options(pdl="sometimes")
    assert refusal.error.accepted == "auto, off, always"


def test_pin_and_seal(random, refuses):
    gemm = twostep.DraftGemm(bf16(integers(random, 16, 64)), twostep.Options(strict=True))
    gemm.pin(1, "cpu")
    gemm.seal()
    with refuses("unsupported"):
        gemm.pin(1, "warp")
    with refuses("not_prepared"):
        gemm.tactic(1)


def test_what_needs_no_gpu_of_the_warp_kernel(random, refuses):
    assert twostep.warp_eligible(7168, 35840)
    assert not twostep.warp_eligible(8, 64) and not twostep.warp_eligible(16, 65)
    h200 = twostep.known_gpu("h200")
    assert (h200.arch, h200.sm_count) == (90, 132)
    tactic = twostep.warp_tactic(8, 2304, 1536, h200)
    assert tactic == twostep.warp_tactic(7, 2304, 1536, h200) and tactic.mma in ("mma_sync", "wgmma")
    assert tactic != twostep.Tactic() and "tile" in repr(tactic)
    with refuses("invalid_argument"):
        twostep.known_gpu("abacus")
    with refuses("unsupported"):
        twostep.warp_tactic(8, 8, 64, h200)
    if not twostep.info()["gpus"]:
        with refuses("unavailable"):
            twostep.PreparedWarpSplitK(bf16(integers(random, 16, 64)), {8: tactic})


def test_empty_shapes(random):
    gemm = twostep.DraftGemm(bf16(integers(random, 16, 64)))
    gemm.run(bf16(np.zeros((0, 64), np.uint16)), bf16(np.zeros((0, 16), np.uint16)))
    out = nans(2, 16)
    twostep.DraftGemm(bf16(np.zeros((16, 0), np.uint16))).run(bf16(np.zeros((2, 0), np.uint16)), bf16(out))
    assert (from_bf16(out) == 0).all()


def test_info_and_compile(tmp_path):
    found = twostep.info()
    assert found["version"] == twostep.__version__ and "threads" in found["cpu"]
    if not found["gpu_rooms"] or found["nvrtc"].startswith("none"):
        pytest.skip("no NVRTC")
    for state in ("built", "present"):
        (line,) = twostep.compile([(2304, 1536)], rows=[7, 8], facts=twostep.known_gpu("h200"), cache_dir=str(tmp_path))
        assert (line["n"], line["rows"], line["state"]) == (2304, 8, state) and len(line["key"]) == 32
