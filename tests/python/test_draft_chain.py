"""bench/draft_chain.py: that it is the draft step, on a CPU and for tiny sizes, and how it says what is wrong."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

script = Path(__file__).parents[2] / "bench" / "draft_chain.py"
tiny = {"hidden": 256, "heads": 4, "q_lora": 128, "kv_lora": 64, "nope": 32, "rope": 16, "v": 32, "inner": 512,
        "vocab": 512, "markov_rank": 32, "k": 3, "requests": 2, "context": 40, "causal": [True, False], "gate": False,
        "situ": False, "confidence": 288}


def asked(*lines, device="cpu"):
    done = subprocess.run([sys.executable, script, device], input="".join(line + "\n" for line in lines), check=True,
                          capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def chain(monkeypatch):
    spec = importlib.util.spec_from_file_location("draft_chain", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules["draft_chain"] = module
    monkeypatch.syspath_prepend(script.parent)  # torch_chain.py
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    module.load("cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        yield module
    torch.set_num_threads(threads)
    torch.set_default_device(None)


def turned(x, position, rope):
    """One vector of pairs, by the formula."""
    angle = position * 50000.0 ** (-torch.arange(0, rope, 2) / rope)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)


def reference(step):
    """Hidden rows in FP32, row by row, with keys and values of each head: nothing is absorbed."""
    m = step.m
    ids = [[int(anchor)] + [m.vocab - 1] * (m.k - 1) for anchor in step.anchor]
    s = step.embed.float()[torch.tensor(ids)]

    def norm(x, by):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * by.float()

    for layer in step.layers:
        x = norm(s, layer.input_norm)
        q_c, latent, k_pe = (x @ layer.qkv_a.float().T).split([m.q_lora, m.kv_lora, m.rope], -1)
        q = (norm(q_c, layer.q_norm) @ layer.q_b.float().T).view(m.requests, m.k, m.heads, -1)
        cache = layer.cache.float().clone()
        for j in range(m.k):
            cache[:, m.context + j, :m.kv_lora] = norm(latent[:, j], layer.kv_norm)
            cache[:, m.context + j, m.kv_lora:] = turned(k_pe[:, j], m.context + j, m.rope)
        out = torch.zeros(m.requests, m.k, m.heads, m.v)
        for j in range(m.k):
            seen = cache[:, : m.context + (j + 1 if layer.causal else m.k)]
            for h in range(m.heads):
                keys = seen[..., :m.kv_lora] @ layer.w_uk[h].float().T
                score = torch.einsum("rnd,rd->rn", keys, q[:, j, h, :m.nope])
                q_pe = turned(q[:, j, h, m.nope:], m.context + j, m.rope)
                score += torch.einsum("rnd,rd->rn", seen[..., m.kv_lora:], q_pe)
                values = seen[..., :m.kv_lora] @ layer.w_uv[h].float().T
                out[:, j, h] = torch.einsum("rn,rnd->rd", score.softmax(-1), values)
        out = out.flatten(2)
        if m.gate:
            out = out * torch.sigmoid(x @ layer.g_proj.float().T)
        s = s + out @ layer.o_proj.float().T
        gate, up = (norm(s, layer.post_norm) @ layer.gate_up.float().T).chunk(2, -1)
        active = 4 * torch.tanh(gate / 4) if m.situ else gate
        s = s + (active * torch.sigmoid(gate) * up) @ layer.down.float().T
    return norm(s, step.final_norm).flatten(0, 1)


@pytest.mark.parametrize("attention", ["by_matmul", "by_sdpa"])
@pytest.mark.parametrize("switched", [False, True])
def test_the_hidden_rows_are_those_of_the_step(chain, attention, switched):
    step = chain.Step(chain.Sizes(**tiny | {"gate": switched, "situ": switched}))
    step.choose_attention()
    step.attend = getattr(step, attention)
    hidden = step.run()[2].float()
    expected = reference(step)
    assert (hidden - expected).square().mean() < 0.03**2 * expected.square().mean()


def test_each_pick_follows_the_one_before(chain):
    step = chain.Step(chain.Sizes(**tiny))
    tokens, confidence, hidden = step.run()
    base = (hidden @ step.head.T).float().view(2, 3, -1)
    for r in range(2):
        before = int(step.anchor[r])
        for i in range(3):
            row = base[r, i] + step.w2.float() @ step.w1[before].float()
            before = int(tokens[r, i])
            assert row.max() - row[before] < 0.05
    assert confidence.shape == (2, 3) and ((confidence > 0) & (confidence < 1)).all()


def test_it_answers_each_line_with_its_time_or_a_failure():
    what, timed, no_json, no_sizes = asked("{}", json.dumps(tiny), "[1", '{"hidden": 1}')
    assert what == {"what": what["what"]} and torch.__version__ in what["what"]
    assert timed["what"].startswith(what["what"] + ", attention by ")
    assert timed["p10_us"] <= timed["median_us"] <= timed["p90_us"] and (timed["kept"], timed["dropped"]) == (15, 3)
    assert no_json["failure"].startswith("JSONDecodeError") and "missing" in no_sizes["failure"]


def test_a_device_that_is_not_there_is_a_failure():
    assert asked("{}", device="4096")[0].keys() == {"failure"}
