"""The draft step again, from its specification alone: what the tests of DsparkDrafter compare with.

NumPy in FP64. Weights are BF16 numbers, read exactly; nothing is rounded between operations, so that the distance to
this reference is the rounding error of the implementation. What is rounded belongs to a definition: the rope angle
(drafter 4.4), drawn draft logits (6.3) and whatever section 7 calls fl32. Attention is unabsorbed: each head has its
own keys and values.

Letters as in the specification: T context rows, k block rows, H hidden size, V vocabulary, n heads, L draft layers;
a cache row is [latent | rope], kv_lora + rope wide. Nothing of twostep is imported here.
"""

import itertools
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

DRAFT, ACCEPT, RESAMPLE = 1, 2, 3  # streams, drafter 7.1


# ---- Numbers ---------------------------------------------------------------------------------------------------------


def bf16(x):
    """x rounded once to BF16 (nearest even), as FP64; for magnitudes in the normal range of BF16, zero, inf and NaN."""
    x, drop = np.asarray(x, np.float64), 52 - 7
    bits = x.view(np.uint64)
    bits = bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)
    return np.where(np.isnan(x), x, (bits >> drop << drop).view(np.float64))


def bf16_bits(x):
    """The 16 bits of x, which must be a BF16 number already."""
    return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widen(raw):
    """BF16 bits (uint16) or FP32 to FP64, exactly."""
    raw = np.asarray(raw)
    if raw.dtype == np.uint16:
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float64)


def errors(value, reference):
    """(relRMS, max) of drafter 13.1."""
    difference, rms = value - reference, np.sqrt(np.mean(np.square(reference)))
    return np.sqrt(np.mean(np.square(difference))) / rms, np.abs(difference).max() / rms


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def softmax(x):
    """Over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


# ---- Checkpoint: drafter 2, 3, 11 ------------------------------------------------------------------------------------


def map_safetensors(path):
    """{name: array mapped from the file}; BF16 stays as its bits (uint16). A leading `model.` is removed."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r")[8 + size :]
    dtypes = {"BF16": "<u2", "F32": "<f4"}
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        tensors[name.removeprefix("model.")] = data[first:last].view(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def load_safetensors(path):
    """{name: FP64 array, exactly the stored numbers} of one file with BF16 and F32 tensors."""
    return {name: widen(raw) for name, raw in map_safetensors(path).items()}


def map_checkpoint(folder):
    """All tensors of a drafter's folder: one file or indexed ones, and the target's embedding and head, which win."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if (folder / "target.safetensors").exists():
        names.append("target.safetensors")
    tensors = {}
    for name in names:
        tensors |= map_safetensors(folder / name)
    return tensors


@dataclass
class Config:
    """What the arithmetic needs of config.json, with the defaults of drafter 2.1."""

    rope_parameters: dict
    target_layer_ids: list
    mask_token_id: int
    hidden_size: int = 7168
    intermediate_size: int = 14336
    num_hidden_layers: int = 5
    num_attention_heads: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = False
    mla_use_output_gate: bool = False
    hidden_act: str = "silu"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = None
    rms_norm_eps: float = 1e-5
    vocab_size: int = 163840
    rope_theta: float = 50000.0
    is_neox_style: bool = False
    target_hidden_size: int | None = None
    fc_norm: bool = False
    markov_rank: int = 256
    is_causal: bool | None = None
    dflash_causal: bool | None = None  # `causal` inside dflash_config
    layer_types: list | None = None
    sliding_window: int | None = None
    use_swa: bool | None = None
    swa_window_size: int | None = None
    logit_scale: float = 1.0

    @classmethod
    def from_json(cls, text, overrides=None):
        """An override wins over a key of dflash_config, that over one at top level; null counts as absent."""
        top, overrides = json.loads(text), overrides or {}
        nested = top.get("dflash_config") or {}
        merged = top | nested | overrides
        if merged.get("q_lora_rank", 0) is None:
            raise ValueError("q_lora_rank = null is not served")
        merged["rope_parameters"] = merged.get("rope_parameters") or merged.get("rope_scaling")
        merged["dflash_causal"] = (nested | overrides).get("causal")
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in merged.items() if key in known and value is not None})

    def __post_init__(self):
        self.rope_theta = self.rope_parameters.get("rope_theta", self.rope_theta)
        self.target_hidden_size = self.target_hidden_size or self.hidden_size

    def sliding(self, layer):
        return self.layer_types[layer] == "sliding_attention" if self.layer_types else bool(self.use_swa)

    def causal(self, layer):
        """drafter 2.2"""
        for flag in (self.is_causal, self.dflash_causal):
            if flag is not None:
                return flag
        return bool(self.layer_types) and self.layer_types[layer] == "sliding_attention"

    def window(self, layer):
        """Keys that a query of this layer sees at most, itself included; None without a limit."""
        if not self.sliding(layer):
            return None
        window = self.swa_window_size if self.sliding_window is None else self.sliding_window
        if window is None:
            raise ValueError(f"layer {layer} is sliding and has no window")
        return window

    @property
    def rope_factor(self):
        return 1.0 if self.rope_parameters["rope_type"] == "default" else self.rope_parameters["factor"]

    def _m(self, key, default):
        return 0.1 * self.rope_parameters.get(key, default) * math.log(self.rope_factor) + 1

    @property
    def rope_amplitude(self):
        return self._m("mscale", 1) / self._m("mscale_all_dim", 0)

    @property
    def softmax_scale(self):
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self._m("mscale_all_dim", 0) ** 2

    def rope_frequencies(self):
        """inv_i of drafter 4.3, FP32 [rope / 2]."""
        d, theta, rope = self.qk_rope_head_dim, self.rope_theta, self.rope_parameters
        i = np.arange(d // 2)
        f = theta ** (-2.0 * i / d)
        if rope["rope_type"] == "default":
            return f.astype(np.float32)

        def pair_that_turns(times):  # that often within the original length
            original = rope["original_max_position_embeddings"]
            return d * math.log(original / (2 * math.pi * times)) / (2 * math.log(theta))

        low = max(math.floor(pair_that_turns(rope.get("beta_fast", 32))), 0)
        high = min(math.ceil(pair_that_turns(rope.get("beta_slow", 1))), d - 1)
        if high == low:
            high += 0.001
        ramp = np.clip((i - low) / (high - low), 0, 1)
        return (f * (1 - ramp) + f / self.rope_factor * ramp).astype(np.float32)


def checkpoint_tensors(config, confidence="markov"):
    """{name: (shape, kind of synth_values)} of drafter 3.1, no embedding; confidence "markov", "hidden" or None"""
    c = config
    H, I, n, V, r = c.hidden_size, c.intermediate_size, c.num_attention_heads, c.vocab_size, c.markov_rank
    taps, nope, rope, v = len(c.target_layer_ids), c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    tensors = {
        "context_proj.weight": ((H, taps * c.target_hidden_size), "linear"),
        "context_norm.weight": ((H,), "norm"),
        "final_norm.weight": ((H,), "norm"),
        "markov_head.markov_w1.weight": ((V, r), "w1"),
        "markov_head.markov_w2.weight": ((V, r), "linear"),
    }
    if c.fc_norm:
        tensors |= {f"fc_norm.{j}.weight": ((c.target_hidden_size,), "norm") for j in range(taps)}
    if confidence:
        width = H + r if confidence == "markov" else H
        tensors |= {"confidence_head.proj.weight": ((1, width), "linear"), "confidence_head.proj.bias": ((1,), "zero")}
    for i in range(c.num_hidden_layers):
        layer = {
            "input_layernorm": ((H,), "norm"),
            "post_attention_layernorm": ((H,), "norm"),
            "self_attn.q_a_proj": ((c.q_lora_rank, H), "linear"),
            "self_attn.kv_a_proj_with_mqa": ((c.kv_lora_rank + rope, H), "linear"),
            "self_attn.q_a_layernorm": ((c.q_lora_rank,), "norm"),
            "self_attn.kv_a_layernorm": ((c.kv_lora_rank,), "norm"),
            "self_attn.q_b_proj": ((n * (nope + rope), c.q_lora_rank), "linear"),
            "self_attn.kv_b_proj": ((n * (nope + v), c.kv_lora_rank), "linear"),
            "self_attn.o_proj": ((H, n * v), "linear"),
            "mlp.gate_proj": ((I, H), "linear"),
            "mlp.up_proj": ((I, H), "linear"),
            "mlp.down_proj": ((H, I), "linear"),
        }
        if c.mla_use_output_gate:
            layer["self_attn.g_proj"] = ((n * v, H), "linear")
        tensors |= {f"layers.{i}.{name}.weight": value for name, value in layer.items()}
    return tensors


def synth_units(name, seed, first, count):
    """`unit` of drafter 11.3 for elements first..first+count-1: FP64 [count], multiples of 2^-23 in [-1, 1)."""
    fnv = 0xCBF29CE484222325
    for byte in name.encode():
        fnv = (fnv ^ byte) * 0x100000001B3 % 2**64
    start = (fnv + int(seed) * 0xD1342543DE82EF95 + (int(first) + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    z = (z ^ (z >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27)) * np.uint64(0x94D049BB133111EB)
    z ^= z >> 31
    return (z >> 40) * 2.0**-23 - 1


def synth_values(name, seed, first, count, kind, k=0):
    """BF16 numbers as FP64 [count]. kind: linear (k its input features), norm, embedding, w1, feature, zero."""
    if kind == "zero":
        return np.zeros(count)
    unit = synth_units(name, seed, first, count)
    if kind == "norm":
        return bf16(1 + unit / 4)
    scale = math.sqrt(3 / k) if kind == "linear" else {"embedding": 1, "w1": math.sqrt(3), "feature": 1.7}[kind]
    return bf16(unit.astype(np.float32) * np.float32(scale))


def toy_target_logits(seed, a, b, V):
    """The toy target of drafter 11.4 after tokens a, b: FP32 [V]."""
    return (4 * synth_units("toy", int(seed) + int(a) * V + int(b), 0, V)).astype(np.float32)


# ---- The drafter: drafter 4, 5, 6 ------------------------------------------------------------------------------------


class Reference:
    """The drafter in a folder with config.json, model.safetensors (or indexed files) and target.safetensors."""

    def __init__(self, folder, overrides=None):
        self.config = Config.from_json((Path(folder) / "config.json").read_text(), overrides)
        self.tensors = map_checkpoint(folder)  # mapped, and widened at each use: K3 must fit
        self.frequencies = self.config.rope_frequencies()
        self.amplitude = self.config.rope_amplitude
        self.scale = self.config.softmax_scale

    def weight(self, name):
        return widen(self.tensors[name])

    def linear(self, x, name):
        """x [.., K] -> [.., N], in parts of at most about 2^26 weights."""
        raw = self.tensors[name]
        parts = np.array_split(raw, 1 + (raw.size >> 26))
        return np.concatenate([x @ widen(part).T for part in parts], axis=-1)

    def norm(self, x, name):
        return rms_norm(x, self.weight(name), self.config.rms_norm_eps)

    def rope(self, x, positions):
        """x [.., rope], turned; positions broadcast against x's leading dimensions."""
        if self.config.mla_use_nope:
            return x
        angle = np.asarray(positions, np.float32)[..., None] * self.frequencies  # FP32 by definition: drafter 4.4
        cos, sin = (self.amplitude * f(angle.astype(np.float64)) for f in (np.cos, np.sin))
        half = x.shape[-1] // 2
        first, second = slice(0, None, 2), slice(1, None, 2)
        if self.config.is_neox_style:
            first, second = slice(0, half), slice(half, None)
        a, b, turned = x[..., first], x[..., second], np.empty_like(x)
        turned[..., first], turned[..., second] = a * cos - b * sin, a * sin + b * cos
        return turned

    def cache_rows(self, layer, x, positions):
        """x [T, H] -> the layer's rows [T, kv_lora + rope]: C3, C4 of a context row; B2, B3, B6 of a block row."""
        attn = f"layers.{layer}.self_attn"
        kv = self.linear(x, f"{attn}.kv_a_proj_with_mqa.weight")
        latent, k_pe = np.split(kv, [self.config.kv_lora_rank], axis=-1)
        return np.concatenate([self.norm(latent, f"{attn}.kv_a_layernorm.weight"), self.rope(k_pe, positions)], axis=-1)

    def context_proj(self, taps):
        """C0, C1: taps, a list of [T, H_t] in the order of target_layer_ids -> [T, H]."""
        taps = [np.asarray(tap, np.float64) for tap in taps]
        if self.config.fc_norm:
            taps = [self.norm(tap, f"fc_norm.{j}.weight") for j, tap in enumerate(taps)]
        return self.linear(np.concatenate(taps, axis=-1), "context_proj.weight")

    def context_rows(self, taps, positions):
        """C0..C4: taps, a list of [T, H_t]; positions [T] -> cache rows [L, T, kv_lora + rope]."""
        x = self.norm(self.context_proj(taps), "context_norm.weight")
        return np.stack([self.cache_rows(i, x, positions) for i in range(self.config.num_hidden_layers)])

    def visible(self, layer, queries, keys):
        """Positions [k] of the block rows and [S] of the keys -> bool [k, S] (drafter 5.7)."""
        queries, keys = np.asarray(queries)[:, None], np.asarray(keys)[None, :]
        seen = np.ones((queries.size, keys.size), bool)
        if self.config.causal(layer):
            seen &= keys <= queries
        if (window := self.config.window(layer)) is not None:
            seen &= keys >= queries - window + 1
        return seen

    def attention(self, layer, x, positions, keys, visible):
        """B2..B8: x [k, H], positions [k], keys [S, kv_lora + rope], visible [k, S] -> [k, n*v], gated."""
        c, attn = self.config, f"layers.{layer}.self_attn"
        n, nope = c.num_attention_heads, c.qk_nope_head_dim
        q_c = self.norm(self.linear(x, f"{attn}.q_a_proj.weight"), f"{attn}.q_a_layernorm.weight")
        q = self.linear(q_c, f"{attn}.q_b_proj.weight").reshape(len(x), n, -1)
        q_nope, q_pe = q[..., :nope], self.rope(q[..., nope:], positions[:, None])

        latent, k_pe = np.split(keys, [c.kv_lora_rank], axis=-1)
        kv = self.linear(latent, f"{attn}.kv_b_proj.weight").reshape(len(keys), n, -1)
        k_nope, v = kv[..., :nope], kv[..., nope:]

        o = np.empty((len(x), n, c.v_head_dim))
        for j, seen in enumerate(visible):  # only the rows that are seen: the others may hold NaN
            scores = np.einsum("hd,thd->ht", q_nope[j], k_nope[seen]) + q_pe[j] @ k_pe[seen].T
            o[j] = np.einsum("ht,thd->hd", softmax(self.scale * scores), v[seen])
        o = o.reshape(len(x), -1)
        return o * sigmoid(self.linear(x, f"{attn}.g_proj.weight")) if c.mla_use_output_gate else o

    def mlp(self, layer, x):
        """B10: [k, H] -> [k, H]."""
        c, mlp = self.config, f"layers.{layer}.mlp"
        g, u = self.linear(x, f"{mlp}.gate_proj.weight"), self.linear(x, f"{mlp}.up_proj.weight")
        if c.hidden_act == "situ":
            beta, linear_beta = c.activation_situ_beta, c.activation_situ_linear_beta
            up = u if linear_beta is None else linear_beta * np.tanh(u / linear_beta)
            act = beta * np.tanh(g / beta) * sigmoid(g) * up
        else:
            act = g * sigmoid(g) * u
        return self.linear(act, f"{mlp}.down_proj.weight")

    def block(self, anchor, position, cache, k, max_len):
        """One request's block: anchor at `position` = p + 1, k - 1 mask tokens behind it.

        cache [L, p + 1, kv_lora + rope] holds the rows of positions 0..p in order. Returns a dict:
        "attention" [L, k, n*v] (B8), "hidden" [k, H] (B11), "base" [k, V] (drafter 5.9),
        "rows" [L, k, kv_lora + rope], of which those at positions below max_len are written.
        """
        c = self.config
        s_j = position + np.arange(k)
        positions = np.minimum(s_j, max_len - 1)
        end = min(position + k, max_len)  # keys 0..end-1, for all rows of the block
        s = widen(self.tensors["embed_tokens.weight"][[anchor] + [c.mask_token_id] * (k - 1)])
        attention, rows = [], []
        for i in range(c.num_hidden_layers):
            assert len(cache[i]) == position, "the cache must hold positions 0..p"
            x = self.norm(s, f"layers.{i}.input_layernorm.weight")
            rows.append(self.cache_rows(i, x, positions))
            keys = np.concatenate([cache[i], rows[i]])[:end]
            attention.append(self.attention(i, x, positions, keys, self.visible(i, positions, np.arange(end))))
            s = s + self.linear(attention[i], f"layers.{i}.self_attn.o_proj.weight")
            s = s + self.mlp(i, self.norm(s, f"layers.{i}.post_attention_layernorm.weight"))
        hidden = self.norm(s, "final_norm.weight")
        base = c.logit_scale * self.linear(hidden, "lm_head.weight")
        return {"attention": np.stack(attention), "hidden": hidden, "base": base, "rows": np.stack(rows)}

    def embed_markov(self, tokens):
        """e = W1[tokens]: [.., r]."""
        return widen(self.tensors["markov_head.markov_w1.weight"][np.asarray(tokens)])

    def _chain(self, base, anchor, k, forced, keep, score):
        """l_i = base_i + logit_scale * W2 e_i, kept as keep(l_i); x_i = argmax of score(i, l_i), or forced[i]."""
        logits, picks, previous = [], [], anchor
        for i in range(k):
            bias = self.config.logit_scale * self.linear(self.embed_markov(previous), "markov_head.markov_w2.weight")
            logits.append(keep(base[i] + bias))
            picks.append(int(np.argmax(score(i, without_nan(logits[i])))))
            previous = picks[i] if forced is None else forced[i]
        return np.stack(logits), picks

    def markov(self, base, anchor, k, forced=None):
        """Greedy drafting (drafter 6.2): base [k, V] -> (l [k, V], the argmax of each row).

        forced: the tokens x_0..x_{k-1} of an implementation; forced[i - 1], not this reference's pick, feeds step i.
        """
        return self._chain(base, anchor, k, forced, keep=lambda l: l, score=lambda i, l: l)

    def draft_probabilistic(self, base, anchor, k, temperature, seed, step, position, dtype="fp32", forced=None):
        """Probabilistic drafting (drafter 6.3) -> (draft_logits [k, V] as kept, picks); position is s_0 = p + 1.

        dtype "fp32" or "bf16" of the kept logits: rounded before they are used, for the argmax of temperature 0 too.
        """

        def keep(l):
            l = l.astype(np.float32)
            return bf16(l) if dtype == "bf16" else l.astype(np.float64)

        def score(i, l):
            if is_greedy(temperature):
                return l
            return l * inverse(temperature) + gumbel(seed, position + i, step, DRAFT, np.arange(len(l)))

        return self._chain(base, anchor, k, forced, keep, score)

    def confidence(self, hidden, anchor, tokens, calibration=None):
        """drafter 6.6: hidden [k, H], tokens x_0..x_{k-1}, calibration T_i [k] -> (c [k], survival [k])."""
        w, b = self.weight("confidence_head.proj.weight")[0], self.weight("confidence_head.proj.bias")[0]
        x = hidden
        if len(w) > self.config.hidden_size:
            previous = [anchor, *tokens][: len(hidden)]
            x = np.concatenate([hidden, self.embed_markov(previous)], axis=-1)
        c = sigmoid((x @ w + b) / (1.0 if calibration is None else np.asarray(calibration)))
        return c, np.cumprod(c)


# ---- Random streams: drafter 7 ---------------------------------------------------------------------------------------


def philox(counter, key):
    """Philox4x32-10: four 32-bit counter words, integers or arrays, and two key words -> uint32 [4, ..]."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = key
    low = np.uint64(2**32 - 1)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & low, (a >> 32) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3)).astype(np.uint32)


def random_words(seed, position, step, stream, index):
    """The word of each index (drafter 7.1): uint32, of the shape that position and index broadcast to."""
    index, position = np.broadcast_arrays(np.asarray(index), np.asarray(position))
    four = philox((index >> 2, position, step, stream), (int(seed) % 2**32, int(seed) >> 32))
    return np.take_along_axis(four, (index & 3)[None], axis=0)[0]


def uniform(word):
    """32-bit words -> FP32 in (0, 1) (drafter 7.3)."""
    u = np.asarray(word, np.uint32).astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    return np.minimum(u, np.float32(1 - 2**-24))


def gumbel(seed, position, step, stream, index):
    """G(index) (drafter 7.3): FP64 logarithms of the FP32 u, rounded to FP32 at the end."""
    u = uniform(random_words(seed, position, step, stream, index)).astype(np.float64)
    return (-np.log(-np.log1p(-u))).astype(np.float32)


def is_greedy(temperature):
    """A temperature, an FP32 number, below 1e-5 counts as 0 (drafter 6.3)."""
    return np.float32(temperature) < np.float32(1e-5)


def inverse(temperature):
    """z = fl32(1 / temperature)"""
    return float(np.float32(1) / np.float32(temperature))


# ---- Verification: drafter 8 -----------------------------------------------------------------------------------------


def without_nan(logits):
    return np.where(np.isnan(logits), -np.inf, logits)


def log_softmax(logits):
    """[V] -> [V]; NaN counts as -inf (drafter 6.5). Where the largest is infinite, all weight is on its lowest id."""
    logits = without_nan(np.asarray(logits, np.float64))
    if np.isinf(logits.max()):
        return one_hot(int(logits.argmax()), len(logits))
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


def one_hot(token, V):
    """log q of a draft that was not drawn: [V]."""
    log_q = np.full(V, -np.inf)
    log_q[token] = 0
    return log_q


def log_residual(log_p, log_q):
    """log max(p - q, 0), not normalised (drafter 8.5): [V]."""
    out, more = np.full(len(log_p), -np.inf), log_p > log_q
    with np.errstate(divide="ignore"):
        out[more] = log_p[more] + np.log1p(-np.exp(log_q[more] - log_p[more]))
    return out


def block_bounds(drafts, log_p, log_q):
    """drafter 8.4: (h_1..h_{k_r}, log P_0..log P_{k_r}) of k_r drafts; log_p [k_r + 1, V], log_q [k_r, V]."""
    log_P, h = [0.0], []
    for x, lp, lq in zip(drafts, log_p, log_q):
        if lp[x] == -np.inf:
            log_P.append(-np.inf)
        elif lq[x] == -np.inf:
            log_P.append(0.0)
        else:
            log_P.append(min(log_P[-1] + lp[x] - lq[x], 0.0))
    for i in range(1, len(drafts) + 1):
        if i == len(drafts):
            h.append(np.exp(log_P[i]))
            continue
        S = np.maximum(np.exp(log_P[i] + log_p[i]) - np.exp(log_q[i]), 0).sum()  # 0-based rows: p_{i+1} is log_p[i]
        rest = S - np.expm1(log_P[i])
        h.append(S / rest if rest else 1.0)
    return h, log_P


def verify(draft_ids, target_logits, draft_logits, temperature, seed, step, position, method="standard"):
    """One request (drafter 8) -> (emitted tokens, accepted_drafts).

    draft_ids [<= k]; target_logits [>= k_r + 1, V] after all sampling parameters, temperature included;
    draft_logits [>= k_r, V] as kept, or None: one-hot; position is s_0 = p + 1; method "standard" or "block".
    """
    rows = without_nan(np.asarray(target_logits, np.float64))
    V = rows.shape[1]
    drafts = list(itertools.takewhile(lambda x: 0 <= x < V, map(int, draft_ids)))
    k_r = len(drafts)

    if is_greedy(temperature):
        best = rows.argmax(axis=1)
        tau = next((i for i, x in enumerate(drafts) if x != best[i]), k_r)
        return [*drafts[:tau], int(best[tau])], tau

    log_p = [log_softmax(row) for row in rows[: k_r + 1]]
    if draft_logits is None:
        log_q = [one_hot(x, V) for x in drafts]
    else:
        log_q = [log_softmax(inverse(temperature) * np.asarray(row, np.float64)) for row in draft_logits[:k_r]]
    u = uniform(random_words(seed, position + np.arange(k_r), step, ACCEPT, 0)).astype(np.float64)

    if method == "block":
        h, log_P = block_bounds(drafts, log_p, log_q)
        tau = max((i for i in range(1, k_r + 1) if u[i - 1] <= h[i - 1]), default=0)
        scale = log_P[tau]
    else:
        kept = [log_p[i][x] > np.log(u[i]) + log_q[i][x] for i, x in enumerate(drafts)]
        tau = next((i for i in range(k_r) if not kept[i]), k_r)
        scale = 0.0

    law = log_p[tau]
    if tau < k_r:
        residual = log_residual(scale + law, log_q[tau])
        law = residual if residual.max() > -np.inf else law
    drawn = np.argmax(law + gumbel(seed, position + tau, step, RESAMPLE, np.arange(V)))
    return [*drafts[:tau], int(drawn)], tau
