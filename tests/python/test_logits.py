"""DraftLogits over NumPy: cut, cap, scale (G44 to G46)."""

import numpy as np

import twostep
from values import bf16, from_bf16, integers, nans, product, to_bf16


def test_cut_cap_scale(random):
    head, hidden = integers(random, 1024, 64), integers(random, 3, 64)
    wanted = from_bf16(product(hidden, head))[:, :1001]
    head[1001:] = 0x7F7F  # the largest BF16: padding must not show
    for cap, scale in ((None, 1.0), (30.0, 0.5), (None, 0.25)):
        logits = twostep.DraftLogits(bf16(head), 1001, soft_cap=cap, scale=scale)
        assert logits.prepare(3) == logits.kind(3) == "cpu" and logits.vocab == 1001
        wide = nans(3, 1010)
        logits.run(bf16(hidden), bf16(wide[:, :1001]))
        exact = wanted.astype(np.float64)
        exact = (cap * np.tanh(exact / cap) if cap else exact) * scale
        got = from_bf16(wide[:, :1001])
        assert (np.abs(got - exact) <= np.abs(exact) * (2**-8 + 2**-19)).all()
        if cap is None:
            assert np.array_equal(wide[:, :1001], to_bf16(wanted * np.float32(scale)))
        assert (wide[:, 1001:] == 0x7FC1).all()


def test_the_head_of_each_call_is_used(random, refuses):
    first, second, hidden = integers(random, 48, 64), integers(random, 48, 64), integers(random, 2, 64)
    logits, out = twostep.DraftLogits(bf16(first)), nans(2, 48)
    for head in (first, second, first):
        logits.run(bf16(hidden), bf16(out), head=bf16(head))
        assert np.array_equal(out, product(hidden, head))
    with refuses("weight_changed"):
        logits.run(bf16(hidden), bf16(out), head=bf16(integers(random, 64, 64)))


def test_refusals(random, refuses):
    head = integers(random, 48, 64)
    with refuses("invalid_argument"):
        twostep.DraftLogits(bf16(head), 49)
    with refuses("invalid_argument"):
        twostep.DraftLogits(bf16(head), soft_cap=0.0)
    with refuses("invalid_argument"):
        twostep.DraftLogits(bf16(head), scale=float("nan"))


def test_the_stage_alone_works_in_place(random):
    logits = integers(random, 4, 32)
    wanted = to_bf16(from_bf16(logits) * np.float32(0.5))
    twostep.LogitsStage(scale=0.5).run(bf16(logits), bf16(logits))
    assert np.array_equal(logits, wanted)
