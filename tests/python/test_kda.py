"""PreparedKda over NumPy: values against FP64, keys, refusals, from_module."""

from types import SimpleNamespace

import numpy as np
import pytest

import twostep
from values import bf16, from_bf16, nans, normals, to_bf16

HEADS, D = 2, 256


class Layer:
    """Random weights of a KDA layer in the Kimi K3 form."""

    def __init__(self, random):
        self.conv_weight = (random.standard_normal((3 * D, 1, 4)) * 0.5).astype(np.float32)
        self.f_b = normals(random, D, 128, spread=0.09)
        self.a_log = (1 + random.standard_normal(HEADS) * 0.3).astype(np.float32)
        self.dt_bias = (random.standard_normal(D) * 0.3).astype(np.float32)
        self.norm = (1 + random.standard_normal(128) * 0.1).astype(np.float32)

    def prepared(self, policies, **options):
        return twostep.PreparedKda(self.conv_weight, bf16(self.f_b), self.a_log, self.dt_bias, self.norm, heads=HEADS,
                                   policies=policies, **{"gate_lower_bound": -5.0, **options})

    def module(self, **changes):
        parts = dict(num_heads=HEADS, head_dim=128, conv1d=SimpleNamespace(weight=self.conv_weight, bias=None),
                     f_b_proj=SimpleNamespace(weight=bf16(self.f_b)), A_log=self.a_log, dt_bias=self.dt_bias,
                     o_norm=SimpleNamespace(weight=self.norm, eps=1e-5), gate_lower_bound=-5.0)
        return SimpleNamespace(**{**parts, **changes})


def caches(slots, length, state=None):
    return (np.zeros((slots, length, 3 * D), np.uint16),
            np.zeros((slots, HEADS, 128, 128), np.float32) if state is None else state)


def views(pair):
    return bf16(pair[0]), pair[1]


def first_token(layer, row):
    """One token on empty caches, in FP64, with the BF16 roundings of the step."""
    def rounded(v):
        return from_bf16(to_bf16(v)).astype(np.float64)

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    x = from_bf16(row).astype(np.float64)
    y = x[: 3 * D] * layer.conv_weight[:, 0, 3]
    y = rounded(y * sigmoid(y)).reshape(3, HEADS, 128)
    q, k = (v / np.sqrt((v * v).sum(-1, keepdims=True) + 1e-6) for v in y[:2])
    q = q * 128**-0.5
    beta = sigmoid(x[4 * D + 128 : 4 * D + 128 + HEADS])
    out = np.empty((HEADS, 128))
    for h in range(HEADS):  # S = beta v k^T, o = S q
        o = rounded(beta[h] * y[2, h] * (k[h] @ q[h]))
        z = x[3 * D + 128 * h : 3 * D + 128 * (h + 1)]
        out[h] = o / np.sqrt((o * o).mean() + 1e-5) * layer.norm * sigmoid(z)
    return out.reshape(D)


def test_a_first_token_is_that_of_fp64(random):
    layer = Layer(random)
    stride = twostep.kda_row_stride(HEADS)
    core, pair = layer.prepared({3: stride}), caches(4, 3)
    core.prepare(views(pair))
    projected, out = normals(random, 3, stride), nans(3, D)
    result = core.run(bf16(projected), bf16(out), caches=views(pair), slots=np.array([1, 2, 3], np.int32))
    assert result is not None and core.keys() == [3] and core.stats()["runs"] == 1
    for n in range(3):
        wanted = first_token(layer, projected[n])
        assert np.abs(from_bf16(out[n]) - wanted).max() <= 0.02 * np.abs(wanted).max()
    assert not pair[1][0].any() and pair[1][1:].any(axis=(1, 2, 3)).all()  # slot 0 is dead


def test_records_fold_to_the_states_of_slots(random):
    layer, stride, length = Layer(random), twostep.kda_row_stride(HEADS), 4
    projected = bf16(normals(random, 2, stride))
    one = np.ones(1, np.int32)
    slots_core, pair = layer.prepared({(1, 2): stride}), caches(4, length)
    slots_core.prepare(views(pair))
    wanted = nans(2, D)
    slots_core.run(projected, bf16(wanted), caches=views(pair), slots=np.array([[1, 2]], np.int32), accepted=one)

    core = layer.prepared({(1, 2): stride}, state_mode="records")
    conv, state = views(caches(4, length))
    records = np.full((4, twostep.kda_record_bytes(HEADS, length - 2)), 0xAA, np.uint8)
    core.prepare((conv, state, records))
    core.reset_records((conv, state, records), one)
    out = nans(2, D)
    core.run(projected, bf16(out), caches=(conv, state, records), slots=one, accepted=one, tokens=2)
    assert (out == wanted).all() and not state.any()
    for kept, slot in ((1, 2), (2, 3)):
        core.fold_records((conv, state, records), one, np.array([kept], np.int32), dst_slots=np.array([slot], np.int32))
        assert (state[slot] == pair[1][kept]).all()
    core.fold_records((conv, state, records), one, np.array([2], np.int32))
    assert (state[1] == pair[1][2]).all()


def test_verify_agrees_with_decoding_one_by_one(random):
    layer, tokens = Layer(random), 4
    stride = twostep.kda_row_stride(HEADS)
    core = layer.prepared({1: stride, (1, tokens): stride})
    batched, single = caches(1 + tokens, 2 + tokens), caches(1 + tokens, 2 + tokens)
    core.prepare(views(batched))
    assert core.keys() == [1, (1, tokens)]
    projected = normals(random, tokens, stride)
    slots, one = np.array([[1, 2, 3, 4]], np.int32), np.array([1], np.int32)
    out, alone = nans(tokens, D), nans(tokens, D)
    core.run(bf16(projected), bf16(out), caches=views(batched), slots=slots, accepted=one)
    for t in range(tokens):
        core.run(bf16(projected[t : t + 1]), bf16(alone[t : t + 1]), caches=views(single), slots=one)
    assert np.abs(from_bf16(out) - from_bf16(alone)).max() < 0.03


def test_dead_requests_give_zeros_and_are_counted(random):
    layer = Layer(random)
    stride = twostep.kda_row_stride(HEADS)
    core, pair = layer.prepared({2: stride}), caches(3, 3)
    core.prepare(views(pair))
    counters = np.zeros(4, np.int32)
    core.set_counters(counters)
    out = nans(2, D)
    core.run(bf16(normals(random, 2, stride)), bf16(out), caches=views(pair), slots=np.array([0, 99], np.int32))
    assert not out.any() and not pair[1].any() and list(counters) == [0, 1, 0, 0]
    core.set_counters(None)


def test_refusals(random, refuses):
    layer = Layer(random)
    stride = twostep.kda_row_stride(HEADS)
    pair = caches(3, 3)
    with refuses("bad_layout"):
        layer.prepared({1: 8})
    with refuses("invalid_argument"):
        layer.prepared({})
    with refuses("invalid_argument"):
        layer.prepared({2: stride, (2, 1): stride})
    with refuses("unsupported"):
        layer.prepared({1: {"row_stride": stride, "gate": "shared"}})
    with refuses("unsupported"):
        layer.prepared({1: stride}, state_dtype="bf16")
    with refuses("invalid_argument"):
        layer.prepared({1: stride}, gate_lower_bound=1.0)
    core = layer.prepared({1: stride})
    call = dict(caches=views(pair), slots=np.array([1], np.int32))
    with refuses("not_prepared"):
        core.run(bf16(normals(random, 1, stride)), bf16(nans(1, D)), **call)
    with refuses("invalid_argument"):
        core.prepare(bf16(pair[0]))
    # A layout needs no memory.
    core.prepare((twostep.TensorView([3, 3, 3 * D]), twostep.TensorView([3, HEADS, 128, 128], "f32")))
    with refuses("not_prepared") as refusal:
        core.run(bf16(normals(random, 2, stride)), bf16(nans(2, D)), **call)
    assert "prepared keys 1" in refusal.error.accepted
    with refuses("invalid_argument"):
        core.run(bf16(normals(random, 1, stride)), bf16(nans(1, D)), **{**call, "slots": np.array([1], np.int64)})


def test_reload(random, refuses):
    layer = Layer(random)
    core = layer.prepared({1: twostep.kda_row_stride(HEADS)})
    core.reload(layer.conv_weight * 2, bf16(layer.f_b), layer.a_log, layer.dt_bias, layer.norm)
    with refuses("weight_changed"):
        core.reload(layer.conv_weight, bf16(layer.f_b.copy()), layer.a_log, layer.dt_bias, layer.norm)


def test_decode_conv_weight(random):
    weight, out = Layer(random).conv_weight, np.full((3, 4, D), np.nan, np.float32)
    assert twostep.decode_conv_weight(weight, out) is out
    assert np.array_equal(out, weight.reshape(3, D, 4).transpose(0, 2, 1))


def test_from_module_needs_to_know_the_gate(random, refuses):
    module = Layer(random).module()
    del module.gate_lower_bound
    with refuses("unsupported") as refusal:
        twostep.PreparedKda.from_module(module, {1: twostep.kda_row_stride(HEADS)})
    assert refusal.error.argument == "gate_lower_bound"


def test_counters_lie_on_the_device_of_the_weights(random, refuses):
    core = Layer(random).prepared({1: twostep.kda_row_stride(HEADS)})
    with refuses("wrong_device"):
        core.set_counters(twostep.TensorView([4], "i32", device="cuda:0", address=4096))


def test_a_view_of_read_only_memory_is_no_output(random, refuses):
    layer, stride = Layer(random), twostep.kda_row_stride(HEADS)
    core, pair, out = layer.prepared({1: stride}), caches(2, 3), nans(1, D)
    core.prepare(views(pair))
    out.flags.writeable = False
    with refuses("invalid_argument"):
        core.run(bf16(normals(random, 1, stride)), bf16(out), caches=views(pair), slots=np.array([1], np.int32))


def test_from_module_gives_the_same_bits(random):
    layer = Layer(random)
    stride = twostep.kda_row_stride(HEADS)
    projected, slots = normals(random, 1, stride), np.array([1], np.int32)
    results = []
    for core in (layer.prepared({1: stride}), twostep.PreparedKda.from_module(layer.module(), {1: stride})):
        pair, out = caches(2, 3), nans(1, D)
        core.prepare(views(pair))
        core.run(bf16(projected), bf16(out), caches=views(pair), slots=slots)
        results.append((out, *pair))
    assert all(np.array_equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize(
    "name, change",
    [
        ("allow_neg_eigval", {"allow_neg_eigval": True}),
        ("num_v_heads", {"num_v_heads": 4}),
        ("expand_v", {"expand_v": 2}),
        ("head_v_dim", {"head_v_dim": 256}),
        ("output gate", {"g_b_proj": object()}),
        ("output gate", {"g_proj": [object(), object()]}),
        ("f_b_proj.bias", {"f_b_proj": SimpleNamespace(weight=None, bias=1)}),
        ("conv1d.weight", {"conv1d": None}),
        ("o_norm", {"o_norm": None}),
        ("o_norm.activation", {"o_norm": SimpleNamespace(weight=None, eps=1e-5, activation="silu")}),
        ("variance_epsilon", {"o_norm": SimpleNamespace(weight=None)}),
    ],
)
def test_from_module_refuses_by_name(random, refuses, name, change):
    with refuses("unsupported") as refusal:
        twostep.PreparedKda.from_module(Layer(random).module(**change), {1: 1184})
    assert refusal.error.argument == name
