"""The reference checks itself: check values of the specification, identities and exact laws.

NumPy and pytest are enough: `python3 -m pytest --noconftest tests/python/test_drafter_reference.py` needs no build.
"""

import itertools
import json
import math

import numpy as np
import pytest

from drafter_reference import (
    ACCEPT,
    DRAFT,
    RESAMPLE,
    Config,
    Reference,
    bf16,
    bf16_bits,
    block_bounds,
    checkpoint_tensors,
    errors,
    gumbel,
    load_safetensors,
    log_residual,
    log_softmax,
    one_hot,
    philox,
    random_words,
    rms_norm,
    sigmoid,
    softmax,
    synth_units,
    synth_values,
    toy_target_logits,
    uniform,
    verify,
    widen,
)

YARN = {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 256, "mscale": 1, "mscale_all_dim": 1}
TINY = {
    "model_type": "k3_dspark",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "vocab_size": 512,
    "markov_rank": 32,
    "target_layer_ids": [1, 3],
    "target_num_hidden_layers": 4,
    "mask_token_id": 511,
    "rope_theta": 50000,
    "rope_parameters": YARN,
    "max_position_embeddings": 2048,
}
SEED, ANCHOR, CONTEXT, K, MAX_LEN = 1, 7, 24, 3, 2048


def write_safetensors(path, tensors):
    """tensors {name: array}: uint16 is stored as BF16, float32 as F32."""
    header, parts, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, value in tensors.items():
        data = value.tobytes()
        dtype = "BF16" if value.dtype == np.uint16 else "F32"
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def synth(name, seed, shape, kind):
    return bf16_bits(synth_values(name, seed, 0, math.prod(shape), kind, shape[-1])).reshape(shape)


def make_checkpoint(folder, confidence="markov", **changes):
    """A synthetic `tiny` (drafter 11.1) with these changes of its config -> its folder."""
    text = json.dumps(TINY | changes)
    config = Config.from_json(text)
    table = checkpoint_tensors(config, confidence)
    shape = (config.vocab_size, config.hidden_size)
    target = {"embed_tokens.weight": (shape, "embedding"), "lm_head.weight": (shape, "linear")}
    for file, names in (("model.safetensors", table), ("target.safetensors", target)):
        write_safetensors(folder / file, {name: synth(name, SEED, *value) for name, value in names.items()})
    (folder / "config.json").write_text(text)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


def features(rows=CONTEXT):
    return [synth_values(f"tap.{j}", SEED, 0, rows * 256, "feature").reshape(rows, 256) for j in range(2)]


def step(reference, positions=np.arange(CONTEXT), k=K):
    return reference.block(ANCHOR, CONTEXT, reference.context_rows(features(), positions), k, MAX_LEN)


def chi_square_ok(counts, law):
    expected = law * counts.sum()
    return np.sum((counts - expected) ** 2 / expected) < counts.size - 1 + 4 * math.sqrt(2 * (counts.size - 1))


# ---- Numbers, generator, files ---------------------------------------------------------------------------------------


def test_bf16_rounds_once_to_nearest_even():
    tie = 1 + 2.0**-8
    assert bf16([tie, tie + 2.0**-40, tie + 2.0**-7, -tie]).tolist() == [1, 1 + 2.0**-7, 1 + 2.0**-6, -1]
    assert bf16([0.0, np.inf, -np.inf]).tolist() == [0, np.inf, -np.inf] and np.isnan(bf16(np.nan))
    bits = np.arange(0x80, 0x7F80, dtype=np.uint16)
    assert np.array_equal(bf16_bits(bf16(widen(bits))), bits)


@pytest.mark.parametrize(
    "name, kind, k, bits",
    [
        ("context_proj.weight", "linear", 512, "bd5d 3d21 3c09 bcfa"),
        ("markov_head.markov_w2.weight", "linear", 32, "be8d 3e4f 3e8f 3c99"),
        ("final_norm.weight", "norm", 0, "3f50 3f84 3f88 3f63"),
    ],
)
def test_generator_check_values(name, kind, k, bits):
    assert [f"{b:04x}" for b in bf16_bits(synth_values(name, 1, 0, 4, kind, k))] == bits.split()


def test_generator_takes_any_range_and_seed():
    whole = synth_values("a", 2**64 - 1, 0, 100, "w1")
    assert np.array_equal(whole[60:90], synth_values("a", 2**64 - 1, 60, 30, "w1"))
    assert np.all(np.abs(synth_units("a", 3, 0, 10000)) <= 1)


def test_toy_target_in_plain_integers():
    """11.3 and 11.4 once more, an element at a time."""

    def mix64(z):
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    fnv = 0xCBF29CE484222325
    for byte in b"toy":
        fnv = (fnv ^ byte) * 0x100000001B3 % 2**64
    seed, a, b, V = 99, 3, 11, 16
    for v, logit in enumerate(toy_target_logits(seed, a, b, V)):
        bits = mix64((fnv + (seed + a * V + b) * 0xD1342543DE82EF95 + (v + 1) * 0x9E3779B97F4A7C15) % 2**64)
        assert logit == 4 * ((bits >> 40) / 2**23 - 1)


def test_tiny_has_the_counts_of_the_preset(tiny):
    tensors = load_safetensors(tiny / "model.safetensors")
    assert len(tensors) == 31 and sum(value.size for value in tensors.values()) == 1206433
    assert Reference(tiny).scale == pytest.approx(0.2106071, abs=1e-7)


@pytest.mark.parametrize("heads, rank, parameters", [(64, 256, 2387907841), (96, 512, 2686752257)])
def test_k3_has_the_counts_of_the_preset(heads, rank, parameters):
    config = Config(YARN, [0, 1, 2, 3, 4], 0, num_attention_heads=heads, markov_rank=rank)
    tensors = checkpoint_tensors(config)
    assert len(tensors) == 67 and sum(math.prod(shape) for shape, _ in tensors.values()) == parameters


def test_indexed_files_prefix_and_f32(tiny, tmp_path):
    values = load_safetensors(tiny / "model.safetensors")
    names, weight_map = sorted(values), {}
    for part in range(2):
        file = f"model-{part}.safetensors"
        stored = {}
        for name in names[part::2]:
            one_dimensional = values[name].ndim == 1  # norms may be F32
            stored[f"model.{name}"] = values[name].astype(np.float32) if one_dimensional else bf16_bits(values[name])
            weight_map[f"model.{name}"] = file
        write_safetensors(tmp_path / file, stored)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file in ("config.json", "target.safetensors"):
        (tmp_path / file).write_bytes((tiny / file).read_bytes())
    assert np.array_equal(step(Reference(tmp_path))["base"], step(Reference(tiny))["base"])


# ---- Config and rope -------------------------------------------------------------------------------------------------


def config(**changes):
    required = {"rope_parameters": YARN, "target_layer_ids": [1], "mask_token_id": 5}
    return Config.from_json(json.dumps(required | changes))


def test_defaults_and_precedence():
    plain = config()
    assert (plain.hidden_size, plain.num_hidden_layers, plain.rms_norm_eps, plain.logit_scale) == (7168, 5, 1e-5, 1.0)
    nested = config(mask_token_id=1, dflash_config={"mask_token_id": 2}, rope_theta=10)
    assert nested.mask_token_id == 2 and nested.rope_theta == 10
    alias = {"dflash_config": {"mask_token_id": 2}, "target_layer_ids": [1], "rope_scaling": YARN | {"rope_theta": 9}}
    over = Config.from_json(json.dumps(alias), {"mask_token_id": 3})
    assert over.mask_token_id == 3 and over.rope_theta == 9


def test_causality_and_windows_per_layer():
    types = ["sliding_attention", "full_attention"] * 2 + ["full_attention"]
    mixed = config(layer_types=types, sliding_window=8)
    assert [mixed.causal(i) for i in range(5)] == [True, False, True, False, False]
    assert [mixed.window(i) for i in range(5)] == [8, None, 8, None, None]
    assert not config(layer_types=types, dflash_config={"causal": False}).causal(0)
    assert config(is_causal=True, dflash_config={"causal": False}).causal(1)
    assert not config().causal(0) and config().window(0) is None
    assert config(use_swa=True, swa_window_size=4).window(3) == 4
    with pytest.raises(ValueError, match="no window"):
        config(layer_types=types).window(0)


def test_rope_of_k3():
    k3 = config(rope_parameters=YARN | {"factor": 32, "original_max_position_embeddings": 32768})
    inv = k3.rope_frequencies()
    assert inv.dtype == np.float32 and inv[0] == 1
    assert inv[16] == np.float32(0.00407828307) and inv[31] == np.float32(8.76441291e-7)
    assert k3.rope_amplitude == 1 and k3.softmax_scale == pytest.approx(0.1308608, abs=5e-8)
    plain = 50000.0 ** (-np.arange(32) / 32)
    assert np.allclose(inv[:16], plain[:16]) and np.allclose(inv[26:], plain[26:] / 32)  # low 15, high 26
    assert inv[25] > 1.01 * plain[25] / 32


def test_rope_without_yarn_and_with_other_mscales():
    assert config(rope_parameters={"rope_type": "default", "factor": 3}).rope_amplitude == 1
    other = config(rope_parameters={key: value for key, value in YARN.items() if not key.startswith("mscale")})
    assert other.rope_amplitude == pytest.approx(1 + 0.1 * math.log(8))
    assert other.softmax_scale == pytest.approx(192**-0.5)


def test_rope_layouts_agree_and_dot_products_are_relative(tiny):
    random = np.random.default_rng(3)
    pairs, half = Reference(tiny), Reference(tiny, {"is_neox_style": True})
    q, k = random.normal(size=(2, 5, 16))
    order = np.r_[0:16:2, 1:16:2]
    assert np.allclose(pairs.rope(q, np.arange(5))[:, order], half.rope(q[:, order], np.arange(5)), atol=1e-15)
    near = np.sum(pairs.rope(q, np.full(5, 9)) * pairs.rope(k, np.full(5, 4)), axis=-1)
    far = np.sum(pairs.rope(q, np.full(5, 1009)) * pairs.rope(k, np.full(5, 1004)), axis=-1)
    assert np.allclose(near, far, atol=1e-3)  # FP32 angles
    x = pairs.rope(np.eye(16)[:1], np.array([1]))  # frequency 1, pair (0, 1)
    assert x[0, :2] == pytest.approx([math.cos(1), math.sin(1)]) and not x[0, 2:].any()


# ---- The step --------------------------------------------------------------------------------------------------------


def test_shapes(tiny):
    reference = Reference(tiny)
    assert reference.context_proj(features()).shape == (CONTEXT, 256)
    assert reference.context_rows(features(), np.arange(CONTEXT)).shape == (2, CONTEXT, 80)
    shapes = {name: value.shape for name, value in step(reference).items()}
    assert shapes == {"attention": (2, K, 128), "hidden": (K, 256), "base": (K, 512), "rows": (2, K, 80)}


@pytest.mark.parametrize("causal", [False, True])
def test_step_by_hand(tiny, causal):
    """The whole step once more: one row and one head at a time, absorbed (B5, B7, B8), rope as complex numbers."""
    reference = Reference(tiny, {"is_causal": causal})
    cache = reference.context_rows(features(), np.arange(CONTEXT))
    out = reference.block(ANCHOR, CONTEXT, cache, K, MAX_LEN)
    w = load_safetensors(tiny / "model.safetensors") | load_safetensors(tiny / "target.safetensors")
    inv = Config.from_json(json.dumps(TINY)).rope_frequencies().astype(np.float64)

    def norm(x, name):
        return x / math.sqrt(x @ x / len(x) + 1e-5) * w[name + ".weight"]

    def turn(x, position):
        return (x.view(complex) * np.exp(1j * position * inv)).view(float)

    def row(layer, x, position):
        kv = w[f"layers.{layer}.self_attn.kv_a_proj_with_mqa.weight"] @ x
        return np.concatenate([norm(kv[:64], f"layers.{layer}.self_attn.kv_a_layernorm"), turn(kv[64:], position)])

    keys = [[], []]
    for t, tap in enumerate(np.concatenate(features(), axis=1)):
        x = norm(w["context_proj.weight"] @ tap, "context_norm")
        for layer in range(2):
            keys[layer].append(row(layer, x, t))
    assert np.allclose(cache, keys, rtol=1e-5, atol=1e-5)  # FP32 angles there

    residual = [w["embed_tokens.weight"][token] for token in (ANCHOR, 511, 511)]
    for layer in range(2):
        attn, mlp = f"layers.{layer}.self_attn.", f"layers.{layer}.mlp."
        x = [norm(s, f"layers.{layer}.input_layernorm") for s in residual]
        keys[layer] += [row(layer, x[j], CONTEXT + j) for j in range(K)]
        kv_b = w[attn + "kv_b_proj.weight"].reshape(4, 64, 64)
        for j in range(K):
            seen = np.stack(keys[layer][: CONTEXT + j + 1] if causal else keys[layer])
            q = w[attn + "q_b_proj.weight"] @ norm(w[attn + "q_a_proj.weight"] @ x[j], attn + "q_a_layernorm")
            heads = []
            for q_h, up in zip(q.reshape(4, 48), kv_b):
                absorbed = np.concatenate([q_h[:32] @ up[:32], turn(q_h[32:], CONTEXT + j)])
                weights = np.exp(0.2106071 * seen @ absorbed)
                heads.append(up[32:] @ (weights @ seen[:, :64] / weights.sum()))
            o = np.concatenate(heads)
            assert np.allclose(o, out["attention"][layer, j], rtol=1e-4, atol=1e-4)
            s = residual[j] + w[attn + "o_proj.weight"] @ o
            y = norm(s, f"layers.{layer}.post_attention_layernorm")
            g, u = w[mlp + "gate_proj.weight"] @ y, w[mlp + "up_proj.weight"] @ y
            residual[j] = s + w[mlp + "down_proj.weight"] @ (g / (1 + np.exp(-g)) * u)
    hidden = np.stack([norm(s, "final_norm") for s in residual])
    assert np.allclose(hidden, out["hidden"], rtol=1e-4, atol=1e-4)
    assert np.allclose(hidden @ w["lm_head.weight"].T, out["base"], rtol=1e-4, atol=1e-4)
    assert np.allclose(np.stack(keys)[:, CONTEXT:], out["rows"], rtol=1e-4, atol=1e-4)


def exchange_gate_and_up(reference):
    for i in range(2):
        gate, up = f"layers.{i}.mlp.gate_proj.weight", f"layers.{i}.mlp.up_proj.weight"
        reference.tensors[gate], reference.tensors[up] = reference.tensors[up], reference.tensors[gate]


def leave_out_m(reference):
    reference.scale = 48**-0.5


@pytest.mark.parametrize(
    "overrides, change, shift",
    [
        ({}, leave_out_m, 0),
        ({}, exchange_gate_and_up, 0),
        ({"is_neox_style": True}, None, 0),
        ({"mla_use_nope": True}, None, 0),
        ({"is_causal": True}, None, 0),
        ({}, None, 1),
    ],
)
def test_faults_of_the_error_table_exceed_the_logit_bound(tiny, overrides, change, shift):
    reference, faulty = Reference(tiny), Reference(tiny, overrides)
    if change:
        change(faulty)
    assert errors(step(faulty, np.arange(CONTEXT) + shift)["base"], step(reference)["base"])[0] > 0.1


def test_a_causal_row_ignores_later_rows_and_a_non_causal_one_does_not(tiny):
    causal, full = Reference(tiny, {"is_causal": True}), Reference(tiny)
    assert np.allclose(step(causal)["base"][:2], step(causal, k=2)["base"], rtol=1e-9, atol=1e-12)
    assert errors(step(full)["base"][:2], step(full, k=2)["base"])[0] > 0.02


def test_window_with_nan_behind_it(tiny):
    overrides = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "is_causal": False}
    reference = Reference(tiny, overrides)
    cache = reference.context_rows(features(), np.arange(CONTEXT))
    out = reference.block(ANCHOR, CONTEXT, cache, K, MAX_LEN)
    cache[0, : CONTEXT - 5] = np.nan  # row 0 of the block is at 24 and sees keys from 19 on
    assert np.array_equal(reference.block(ANCHOR, CONTEXT, cache, K, MAX_LEN)["base"], out["base"])
    cache[0, CONTEXT - 5] = np.nan
    got = reference.block(ANCHOR, CONTEXT, cache, K, MAX_LEN)["attention"][0]
    assert np.isnan(got[0]).all() and np.isfinite(got[1:]).all()
    assert errors(out["base"], step(Reference(tiny))["base"])[0] > 0.02


def test_mixed_layers(tiny):
    types = ["sliding_attention", "full_attention"]
    mixed = step(Reference(tiny, {"layer_types": types, "sliding_window": 2000}))
    causal, full = step(Reference(tiny, {"is_causal": True})), step(Reference(tiny))
    assert np.array_equal(mixed["attention"][0], causal["attention"][0])
    assert errors(mixed["attention"][0], full["attention"][0])[0] > 0.02


def test_the_end_of_the_sequence(tiny):
    """max_len = p + 2: only row 0 is written; rows 1 and 2 turn at max_len - 1 and are seen by none."""
    reference = Reference(tiny)
    cache = reference.context_rows(features(), np.arange(CONTEXT))
    out = reference.block(ANCHOR, CONTEXT, cache, K, CONTEXT + 1)
    one = reference.block(ANCHOR, CONTEXT, cache, 1, MAX_LEN)
    assert np.allclose(out["base"][0], one["base"][0], rtol=1e-9, atol=1e-12)
    assert np.array_equal(out["base"][1], out["base"][2]) and np.array_equal(out["rows"][:, 1], out["rows"][:, 2])
    behind = reference.block(ANCHOR, CONTEXT, cache, K, CONTEXT)  # the anchor itself is behind the end
    assert np.isfinite(behind["base"]).all()


def test_output_gate(tmp_path, tiny):
    gated = Reference(make_checkpoint(tmp_path, mla_use_output_gate=True))
    assert len(gated.tensors) == 33 + 2
    plain, out = step(Reference(tiny)), step(gated)
    assert errors(out["base"], plain["base"])[0] > 0.02
    for i in range(2):
        gated.tensors[f"layers.{i}.self_attn.g_proj.weight"] = np.zeros((128, 256), np.uint16)
    assert np.allclose(step(gated)["attention"][0], plain["attention"][0] / 2)


def test_situ(tiny):
    def run(**changes):
        return step(Reference(tiny, changes))["base"]

    assert errors(run(hidden_act="situ"), run())[0] > 1e-4
    assert np.allclose(run(hidden_act="situ", activation_situ_beta=1e6), run(), atol=1e-9)
    small = run(hidden_act="situ", activation_situ_beta=1e6, activation_situ_linear_beta=0.5)
    assert errors(small, run())[0] > 1e-3


def test_fc_norm_takes_the_size_off_each_tap(tmp_path):
    reference = Reference(make_checkpoint(tmp_path, fc_norm=True))
    a, b = features()
    assert np.allclose(reference.context_proj([a, b]), reference.context_proj([8 * a, b / 2]), rtol=1e-4, atol=1e-4)
    w = reference.weight
    x = np.concatenate([rms_norm(tap, w(f"fc_norm.{j}.weight"), 1e-5) for j, tap in enumerate((a, b))], axis=1)
    assert np.allclose(reference.context_proj([a, b]), x @ w("context_proj.weight").T)


def test_logit_scale_meets_base_and_markov_bias(tiny):
    plain, scaled = Reference(tiny), Reference(tiny, {"logit_scale": 0.25})
    assert np.allclose(step(scaled)["base"], step(plain)["base"] / 4)
    l, tokens = plain.markov(step(plain)["base"], ANCHOR, K)
    assert np.allclose(scaled.markov(step(scaled)["base"], ANCHOR, K, tokens)[0], l / 4)


# ---- Markov head, confidence -----------------------------------------------------------------------------------------


def test_markov_chain(tiny):
    reference = Reference(tiny)
    base = step(reference)["base"]
    w1, w2 = (reference.weight(f"markov_head.markov_w{i}.weight") for i in (1, 2))
    l, tokens = reference.markov(base, ANCHOR, K)
    for i, previous in enumerate([ANCHOR, *tokens[:-1]]):
        assert np.allclose(l[i], base[i] + w2 @ w1[previous]) and tokens[i] == l[i].argmax()
    forced = [3, 200, 9]
    l_forced, _ = reference.markov(base, ANCHOR, K, forced)
    assert np.array_equal(l_forced[0], l[0]) and np.allclose(l_forced[2], base[2] + w2 @ w1[200])


def test_ties_and_nan_in_draft_logits(tiny):
    reference = Reference(tiny)
    reference.tensors["markov_head.markov_w2.weight"] = np.zeros((512, 32), np.uint16)
    base = np.zeros((K, 512))
    base[:, [40, 30]] = 1
    assert reference.markov(base, ANCHOR, K)[1] == [30, 30, 30]
    base[1] = np.nan
    assert reference.markov(base, ANCHOR, K)[1][1] == 0
    base[1, 77] = -5.0
    assert reference.markov(base, ANCHOR, K)[1][1] == 77


def test_confidence(tiny, tmp_path):
    reference = Reference(tiny)
    hidden, tokens, T = step(reference)["hidden"], [3, 200, 9], [1, 2, 0.5]
    w = reference.weight("confidence_head.proj.weight")[0]
    w1 = reference.weight("markov_head.markov_w1.weight")
    c, survival = reference.confidence(hidden, ANCHOR, tokens, T)
    for i, previous in enumerate([ANCHOR, 3, 200]):
        assert c[i] == pytest.approx(1 / (1 + math.exp(-(hidden[i] @ w[:256] + w1[previous] @ w[256:]) / T[i])))
    assert survival == pytest.approx([c[0], c[0] * c[1], c[0] * c[1] * c[2]])
    plain = Reference(make_checkpoint(tmp_path, confidence="hidden"))
    w = plain.weight("confidence_head.proj.weight")[0]
    assert w.shape == (256,) and np.allclose(plain.confidence(hidden, ANCHOR, tokens)[0], sigmoid(hidden @ w))


# ---- Random streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counter, key, words",
    [  # the first is in the specification, the others are Random123's
        ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_check_values(counter, key, words):
    assert [f"{word:08x}" for word in philox(counter, key)] == words.split()


def test_stream_check_values():
    word = random_words(42, 17, 3, DRAFT, 5)
    assert word == 0x4A88F33E and uniform(word) == np.float32(0.29115218)
    assert gumbel(42, 17, 3, DRAFT, 5) == np.float32(1.0667811)


def test_words_are_of_key_counter_and_number():
    seed = 0x123456789ABCDEF0
    four = philox((500 >> 2, 9, 8, RESAMPLE), (0x9ABCDEF0, 0x12345678))
    assert np.array_equal(random_words(seed, 9, 8, RESAMPLE, np.arange(500, 504)), four)
    many = random_words(seed, np.array([[9], [10]]), 8, RESAMPLE, np.arange(500, 504))
    assert many.shape == (2, 4) and np.array_equal(many[0], four)


def test_uniform_is_inside_and_streams_are_disjoint():
    u = uniform([0, 1, 2**31, 2**32 - 1])
    assert u.dtype == np.float32 and u[0] == 2.0**-33 and u[-1] == 1 - 2**-24 and np.all(np.diff(u) > 0)
    words = [random_words(5, np.arange(64)[:, None], 0, stream, np.arange(64)) for stream in (DRAFT, ACCEPT, RESAMPLE)]
    assert np.unique(words).size > 3 * 4096 - 10  # 2^32 words: about 0.02 chance pairs are expected


def test_draft_law():
    """50,000 Gumbel draws over 32 tokens against softmax."""
    l = toy_target_logits(3, 1, 2, 32)
    scores = l + gumbel(11, np.arange(50000)[:, None], 4, DRAFT, np.arange(32))
    counts = np.bincount(scores.argmax(axis=1), minlength=32)
    assert chi_square_ok(counts, softmax(l.astype(np.float64)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_probabilistic_draft(tiny, dtype):
    reference = Reference(tiny)
    base = step(reference)["base"]
    l, tokens = reference.draft_probabilistic(base, ANCHOR, K, 0.7, 42, 3, CONTEXT, dtype)
    assert np.array_equal(l, bf16(l) if dtype == "bf16" else l.astype(np.float32))
    z = float(np.float32(1 / 0.7))
    for i in range(K):
        assert tokens[i] == np.argmax(l[i] * z + gumbel(42, CONTEXT + i, 3, DRAFT, np.arange(512)))
    assert np.allclose(l, reference.markov(base, ANCHOR, K, tokens)[0], rtol=2.0**-8)
    l, tokens = reference.draft_probabilistic(base, ANCHOR, K, 9e-6, 42, 3, CONTEXT, dtype)
    assert tokens == [int(row.argmax()) for row in l]


# ---- Verification ----------------------------------------------------------------------------------------------------

METHODS = pytest.mark.parametrize("method", ["standard", "block"])


def test_log_softmax_of_what_is_not_finite():
    assert np.allclose(np.exp(log_softmax([0, np.nan, np.log(3), -np.inf])), [0.25, 0, 0.75, 0])
    assert log_softmax([np.nan, -np.inf]).tolist() == [0, -np.inf]
    assert log_softmax([1, np.inf, np.inf]).tolist() == [-np.inf, 0, -np.inf]


@METHODS
def test_greedy_contract(method):
    random = np.random.default_rng(5)
    V, k = 16, 4
    for prompt in range(100):
        tokens = list(random.integers(0, V, 2))
        expected = list(tokens)
        while len(expected) < 40:
            expected.append(int(toy_target_logits(7, *expected[-2:], V).argmax()))
        while len(tokens) + k + 1 <= len(expected):
            good = random.integers(0, k + 1)
            draft = expected[len(tokens) : len(tokens) + good] + list(random.integers(-1, V + 2, k - good))
            path = tokens[-2:] + [x if 0 <= x < V else 0 for x in draft]
            rows = [toy_target_logits(7, path[i], path[i + 1], V) for i in range(k + 1)]
            emitted, tau = verify(draft, rows, np.full((k, V), np.nan), 0, prompt, 0, len(tokens), method)
            assert good <= tau == len(emitted) - 1 <= k
            assert emitted == expected[len(tokens) : len(tokens) + len(emitted)]
            tokens += emitted


def test_greedy_ties_and_nan():
    rows = [[1, 2, 2], [np.nan, 0, -1]]
    assert verify([1], rows, None, 0, 1, 1, 1) == ([1, 1], 1)
    assert verify([2], rows, None, 0, 1, 1, 1) == ([1], 0)
    assert verify([], [[np.nan, np.nan]], None, 0, 1, 1, 1) == ([0], 0)


@METHODS
def test_draws_use_their_own_positions(method):
    """u_i at s_i on stream 2; the draw after tau acceptances at s_tau on stream 3."""
    random = np.random.default_rng(6)
    V, k, s_0, seen = 8, 3, 100, set()
    for seed in range(60):
        target, draft = random.normal(size=(k + 1, V)), random.normal(size=(k, V))
        p, q = softmax(target), softmax(2 * draft)
        ids = [int(random.choice(V, p=row)) for row in q]
        emitted, tau = verify(ids, target, draft, 0.5, seed, 2, s_0, method)
        u = [float(uniform(random_words(seed, s_0 + i, 2, ACCEPT, 0))) for i in range(k)]
        P = [1.0]
        for i, x in enumerate(ids):
            P.append(min(P[i] * p[i, x] / q[i, x], 1))
        if method == "standard":
            accepted = [u[i] < p[i, x] / q[i, x] for i, x in enumerate(ids)]
            want, scale = next((i for i in range(k) if not accepted[i]), k), 1
        else:
            S = [np.maximum(P[i] * p[i] - q[i], 0).sum() for i in range(k)]
            h = [S[i] / (S[i] + 1 - P[i]) for i in (1, 2)] + [P[3]]
            want = max(i for i in range(k + 1) if i == 0 or u[i - 1] <= h[i - 1])
            scale = P[want]
        law = np.maximum(scale * p[want] - q[want], 0) if want < k else p[k]
        with np.errstate(divide="ignore"):
            drawn = np.argmax(np.log(law) + gumbel(seed, s_0 + want, 2, RESAMPLE, np.arange(V)))
        assert (emitted, tau) == (ids[:want] + [drawn], want)
        seen.add(tau)
    assert seen == {0, 1, 2, 3}


@METHODS
def test_bad_ids_end_the_block(method):
    random = np.random.default_rng(7)
    rows = random.normal(size=(4, 8))
    for bad in (-1, 8, 2**31 - 1):
        for seed in range(20):
            short = verify([3], rows[:2], None, 1, seed, 0, 5, method)
            assert verify([3, bad, 2], rows, None, 1, seed, 0, 5, method) == short
    drawn = np.argmax(rows[0] + gumbel(9, 5, 0, RESAMPLE, np.arange(8)))
    assert verify([-1, 2, 2], rows, None, 1, 9, 0, 5, method) == ([drawn], 0)


@METHODS
def test_certain_cases(method):
    random = np.random.default_rng(8)
    V, row = 8, random.normal(size=8)
    impossible = np.where(np.arange(V) == 2, -np.inf, row)
    for seed in range(30):
        equal = verify([4, 1], [row, row, row], [row, row], 1, seed, 0, 5, method)
        assert equal[1] == 2  # q = p: all accepted
        emitted, tau = verify([2, 1], [impossible, row, row], None, 1, seed, 0, 5, method)
        assert tau == 0 and emitted[0] != 2
        emitted, tau = verify([2], [row, row], None, 1, seed, 0, 5, method)
        assert tau == 1 or emitted[0] != 2  # the residual of a one-hot has no x
        certain = np.where(np.arange(V) == 2, 0.0, -np.inf)
        assert verify([2], [certain, row], None, 1, seed, 0, 5, method)[1] == 1


def test_block_bounds_at_the_edges():
    half = np.log([0.5, 0.5])
    with np.errstate(divide="ignore"):
        zero = np.log([0.0, 1.0])
    h, log_P = block_bounds([0], [zero, half], [half])  # P = 0
    assert h == [0] and log_P[1] == -np.inf
    h, _ = block_bounds([0, 0], [zero, half, half], [half, half])  # P_1 = 0: S_1 = 0, h_1 = 0 / 1
    assert h == [0, 0]
    h, _ = block_bounds([0, 0], [half, half, half], [half, half])  # P = 1, S = 0: h = 0 / 0
    assert h == [1, 1]
    h, log_P = block_bounds([0], [half, half], [zero])  # q = 0 with p > 0
    assert h == [1] and log_P == [0, 0]
    one_third = np.log([1 / 3, 2 / 3])
    h, log_P = block_bounds([0, 1], [one_third, half, half], [half, one_third])
    S = max(2 / 3 * 0.5 - 1 / 3, 0) + max(2 / 3 * 0.5 - 2 / 3, 0)
    assert h == pytest.approx([S / (S + 1 / 3), 0.5]) and np.exp(log_P) == pytest.approx([1, 2 / 3, 0.5])


def test_an_empty_residual_draws_from_p():
    assert np.all(log_residual(np.log([0.5, 0.5]), np.log([0.5, 0.5])) == -np.inf)
    p, q = np.log([0.7, 0.2, 0.1]), np.log([0.2, 0.3, 0.5])
    assert np.exp(log_residual(p, q)) == pytest.approx([0.5, 0, 0])


@pytest.mark.parametrize("kind", ["near", "far", "equal", "disjoint", "one-hot"])
def test_block_law_is_exact(kind):
    """The sum over all drafts and outcomes of a step: the law of k + 1 tokens must be the product of p."""
    random = np.random.default_rng(10)
    V, k = 3, 3
    prefixes = [prefix for n in range(k + 1) for prefix in itertools.product(range(V), repeat=n)]
    logits = {prefix: random.normal(size=V) * 1.5 for prefix in prefixes}
    p = {prefix: log_softmax(value) for prefix, value in logits.items()}
    q = {
        "near": lambda s: log_softmax(logits[s] + 0.3 * np.cos(np.arange(V) + sum(s))),
        "far": lambda s: log_softmax(-logits[s]),
        "equal": lambda s: p[s],
        "disjoint": lambda s: one_hot(int(logits[s].argmin()), V),
        "one-hot": lambda s: one_hot(sum(s) % V, V),
    }[kind]
    if kind == "disjoint":  # the draft's token is impossible
        p = {s: log_softmax(np.where(np.arange(V) == logits[s].argmin(), -np.inf, logits[s])) for s in prefixes}

    def tail(prefix, length):  # {continuation: probability} under p
        return {
            rest: math.prod(np.exp(p[prefix + rest[:i]][rest[i]]) for i in range(length))
            for rest in itertools.product(range(V), repeat=length)
        }

    law = dict.fromkeys(itertools.product(range(V), repeat=k + 1), 0.0)
    for x in itertools.product(range(V), repeat=k):
        log_p, log_q = [p[x[:i]] for i in range(k + 1)], [q(x[:i]) for i in range(k)]
        drawn = math.prod(np.exp(log_q[i][x[i]]) for i in range(k))
        if drawn == 0:
            continue
        h, log_P = block_bounds(x, log_p, log_q)
        for tau in range(k + 1):
            chance = drawn * (h[tau - 1] if tau else 1) * math.prod(1 - h[i - 1] for i in range(tau + 1, k + 1))
            if chance == 0:
                continue
            weights = np.exp(log_residual(log_P[tau] + log_p[tau], log_q[tau]) if tau < k else log_p[k])
            for y in range(V):
                for rest, probability in tail(x[:tau] + (y,), k - tau).items():
                    law[x[:tau] + (y,) + rest] += chance * weights[y] / weights.sum() * probability
    for sequence, probability in tail((), k + 1).items():
        assert law[sequence] == pytest.approx(probability, abs=1e-14)


@METHODS
@pytest.mark.parametrize("one_hot_draft", [False, True])
def test_law_of_whole_steps(method, one_hot_draft):
    """Three tokens from steps of k = 2, drafted and verified with the streams of one seed."""
    V, k, n, length, temperature = 3, 2, 1200, 3, 0.8
    p = {(a, b): toy_target_logits(1, a, b, V) / 2 for a in range(V) for b in range(V)}
    q = {(a, b): toy_target_logits(2, a, b, V) / 4 for a in range(V) for b in range(V)}
    counts = np.zeros((V,) * length)
    for seed in range(n):
        tokens, step_number = [0, 1], 0
        while len(tokens) < 2 + length:
            path, position = list(tokens[-2:]), len(tokens)
            for i in range(k):
                scores = q[tuple(path[-2:])] / np.float32(temperature)
                if not one_hot_draft:
                    scores = scores + gumbel(seed, position + i, step_number, DRAFT, np.arange(V))
                path.append(int(scores.argmax()))
            rows = [p[path[i], path[i + 1]] for i in range(k + 1)]
            kept = None if one_hot_draft else [q[path[i], path[i + 1]] for i in range(k)]
            tokens += verify(path[2:], rows, kept, temperature, seed, step_number, position, method)[0]
            step_number += 1
        counts[tuple(tokens[2 : 2 + length])] += 1
    law = np.empty_like(counts)
    for x in itertools.product(range(V), repeat=length):
        path = (0, 1) + x
        law[x] = math.prod(softmax(p[path[i], path[i + 1]].astype(np.float64))[path[i + 2]] for i in range(length))
    assert chi_square_ok(counts, law)
