"""The draft step as PyTorch runs it over cuBLAS, in one CUDA graph, for `twostep bench draft --chain PYTHON`.

    echo '{}' | python3 bench/draft_chain.py

Needs torch. Reads a JSON object a line, the fields of Sizes, and answers each with one: microseconds per replay of
embedding, layers, head, picks and confidence of one rank, BF16; or "failure", one sentence. `{}` asks for "what" alone.
The argument is the GPU's number, or `cpu`: without a graph, for tests.

What favours it: picks are the
argmax, without noise; ids, positions, sines and pages are those of one batch; a request's cache is contiguous; the softmax
scale is in the weight of q_b; the tables of the embedding and of Markov W1 hold this rank's ids alone. Attention is the
faster of two ways over the same cache, in the absorbed form of both.
"""

import ctypes
import statistics
import time
from dataclasses import dataclass

from torch_chain import KEPT, WARMUP, replayed, serve, told

BALLAST, PASSES = 512 << 20, 12  # 1.4 ms on an H200: longer than a host takes to enqueue a replay
EPS = 1e-5
SITU_BETA = 4.0


@dataclass
class Sizes:
    hidden: int
    heads: int  # of this rank, as the next one with a rank's share
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int
    inner: int
    vocab: int
    markov_rank: int
    k: int
    requests: int
    context: int
    causal: list  # of each layer
    gate: bool
    situ: bool
    confidence: int  # width of its input; 0: no such head


def load(device):
    global torch, F
    import torch
    import torch.nn.functional as F
    if device != "cpu":
        torch.cuda.set_device(int(device))
    torch.set_default_device("cpu" if device == "cpu" else f"cuda:{device}")


def cublas_version():
    """Of the library that torch has loaded; empty where it has none."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if "/libcublas.so" in line}
    for path in paths:
        numbers = [ctypes.c_int() for _ in range(3)]
        for which, number in enumerate(numbers):
            ctypes.CDLL(path).cublasGetProperty(which, ctypes.byref(number))
        return ".".join(str(number.value) for number in numbers)
    return ""


def weight(rows, columns):
    return torch.randn(rows, columns, dtype=torch.bfloat16).mul_(columns**-0.5)


def gain(size):
    return torch.rand(size).add_(0.5).bfloat16()


def norm(x, by):
    return F.rms_norm(x, by.shape, by, EPS)


def rotated(x, turns):
    """Pairs (0, 1), (2, 3), .. turned, in FP32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)


class Layer:
    def __init__(self, m, causal):
        self.causal = causal
        self.input_norm, self.post_norm = gain(m.hidden), gain(m.hidden)
        self.q_norm, self.kv_norm = gain(m.q_lora), gain(m.kv_lora)
        self.qkv_a = weight(m.q_lora + m.kv_lora + m.rope, m.hidden)
        self.q_b = weight(m.heads * (m.nope + m.rope), m.q_lora).mul_((m.nope + m.rope) ** -0.5)  # the softmax scale
        kv_b = weight(m.heads * (m.nope + m.v), m.kv_lora).view(m.heads, m.nope + m.v, m.kv_lora)
        self.w_uk, self.w_uv = kv_b[:, :m.nope], kv_b[:, m.nope:]
        self.g_proj = weight(m.heads * m.v, m.hidden) if m.gate else None
        self.o_proj = weight(m.hidden, m.heads * m.v)
        self.gate_up, self.down = weight(2 * m.inner, m.hidden), weight(m.hidden, m.inner)
        self.cache = torch.randn(m.requests, m.context + m.k, m.kv_lora + m.rope, dtype=torch.bfloat16)


class Step:
    """The weights of a rank, one batch, and the step over them."""

    def __init__(self, m):
        self.m = m
        self.layers = [Layer(m, causal) for causal in m.causal]
        self.final_norm = gain(m.hidden)
        self.embed, self.head = weight(m.vocab, m.hidden), weight(m.vocab, m.hidden)
        self.w1, self.w2 = weight(m.vocab, m.markov_rank), weight(m.vocab, m.markov_rank)
        self.confidence = (weight(1, m.confidence), torch.zeros(1, dtype=torch.bfloat16)) if m.confidence else None

        self.anchor = torch.arange(m.requests) % m.vocab
        self.ids = torch.full((m.requests, m.k), m.vocab - 1)
        keys = m.context + m.k
        self.rows = (torch.arange(m.requests)[:, None] * keys + m.context + torch.arange(m.k)).flatten()  # of the cache
        frequency = 50000.0 ** (-torch.arange(0, m.rope, 2) / m.rope)
        angle = torch.outer((m.context + torch.arange(m.k)).float(), frequency).repeat(m.requests, 1)
        self.turns = torch.polar(torch.ones_like(angle), angle)
        self.later = torch.ones(m.k, m.k, dtype=torch.bool).triu(1)  # block rows that a causal row does not see
        self.q = torch.empty(m.requests * m.k, m.heads, m.kv_lora + m.rope, dtype=torch.bfloat16)
        self.values = torch.empty(m.requests * m.k, m.heads, m.v, dtype=torch.bfloat16)
        self.attend = self.by_matmul

    # Queries [requests, k * heads, kv_lora + rope] to [requests, k, heads, kv_lora].

    def by_matmul(self, q, layer):
        m = self.m
        scores = torch.bmm(q, layer.cache.transpose(1, 2))
        if layer.causal:
            block = scores.view(m.requests, m.k, m.heads, -1)[..., m.context:]
            block.masked_fill_(self.later[:, None], float("-inf"))
        part = torch.softmax(scores, -1)  # sums in FP32
        return torch.bmm(part, layer.cache[..., :m.kv_lora]).view(m.requests, m.k, m.heads, m.kv_lora)

    def by_sdpa(self, q, layer):
        m = self.m
        of_heads = q.view(m.requests, m.k, m.heads, -1).transpose(1, 2)
        keys = layer.cache[:, None].expand(-1, m.heads, -1, -1)
        mask = self.seen if layer.causal else None
        out = F.scaled_dot_product_attention(of_heads, keys, keys[..., :m.kv_lora], attn_mask=mask, scale=1.0)
        return out.transpose(1, 2)

    def choose_attention(self):
        """Takes the faster way, and says which."""
        m = self.m
        self.seen = torch.cat([torch.ones(m.k, m.context, dtype=torch.bool), ~self.later], 1)
        q = torch.randn(m.requests, m.k * m.heads, m.kv_lora + m.rope, dtype=torch.bfloat16)
        times = {"matmul, softmax, matmul": (sampled(lambda: self.by_matmul(q, self.layers[0])), self.by_matmul)}
        try:
            self.by_sdpa(q, self.layers[0])
            times["scaled_dot_product_attention"] = (sampled(lambda: self.by_sdpa(q, self.layers[0])), self.by_sdpa)
        except RuntimeError:  # no backend of it serves these widths
            pass
        best = min(times, key=lambda name: statistics.median(times[name][0]))
        self.attend = times[best][1]
        return best

    def attention(self, x, layer):
        m = self.m
        q_c, kv_c, k_pe = F.linear(x, layer.qkv_a).split([m.q_lora, m.kv_lora, m.rope], -1)
        rows = torch.cat([norm(kv_c, layer.kv_norm), rotated(k_pe, self.turns).bfloat16()], -1)
        layer.cache.view(-1, m.kv_lora + m.rope).index_copy_(0, self.rows, rows)
        q = F.linear(norm(q_c, layer.q_norm), layer.q_b).view(-1, m.heads, m.nope + m.rope)
        torch.bmm(q[..., :m.nope].transpose(0, 1), layer.w_uk, out=self.q[..., :m.kv_lora].transpose(0, 1))
        self.q[..., m.kv_lora:].copy_(rotated(q[..., m.nope:], self.turns[:, None]))
        o = self.attend(self.q.view(m.requests, m.k * m.heads, -1), layer).reshape(-1, m.heads, m.kv_lora)
        torch.bmm(o.transpose(0, 1), layer.w_uv.transpose(1, 2), out=self.values.transpose(0, 1))
        values = self.values.view(-1, m.heads * m.v)
        if m.gate:
            values = values * torch.sigmoid(F.linear(x, layer.g_proj))
        return F.linear(values, layer.o_proj)

    def mlp(self, x, layer):
        gate, up = F.linear(x, layer.gate_up).chunk(2, -1)
        if self.m.situ:
            return F.linear(SITU_BETA * torch.tanh(gate / SITU_BETA) * torch.sigmoid(gate) * up, layer.down)
        return F.linear(F.silu(gate) * up, layer.down)

    def run(self):
        """Tokens, confidences (or None), and the hidden rows that they come from."""
        m = self.m
        self.ids[:, 0].copy_(self.anchor)
        residual = F.embedding(self.ids.view(-1), self.embed)
        x = norm(residual, self.layers[0].input_norm)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for layer, next_norm in zip(self.layers, next_norms):
            residual = residual + self.attention(x, layer)
            residual = residual + self.mlp(norm(residual, layer.post_norm), layer)
            x = norm(residual, next_norm)
        base = F.linear(x, self.head).view(m.requests, m.k, m.vocab)

        token, tokens, embedded = self.anchor, [], []
        for i in range(m.k):
            embedded.append(F.embedding(token, self.w1))
            token = torch.addmm(base[:, i], embedded[-1], self.w2.t()).argmax(-1)
            tokens.append(token)
        confidence = None
        if self.confidence:
            x = x.view(m.requests, m.k, m.hidden)
            of = torch.cat([x, torch.stack(embedded, 1)], -1) if m.confidence > m.hidden else x
            confidence = torch.sigmoid(F.linear(of, *self.confidence).float()).flatten(1)
            self.survival = confidence.cumprod(-1)
        return torch.stack(tokens, 1), confidence, x.view(-1, m.hidden)


def sampled(run):
    """Microseconds of each replay after the warm-up."""
    if torch.get_default_device().type == "cpu":
        samples = []
        for _ in range(WARMUP + KEPT):
            start = time.perf_counter()
            run()
            samples.append((time.perf_counter() - start) * 1e6)
        return samples[WARMUP:]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):  # cuBLAS loads and chooses
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    ballast = torch.zeros(BALLAST // 4)

    def fill():  # L2 is cold then, and the replay enqueued before it may begin
        for _ in range(PASSES):
            ballast.sum()

    return replayed(graph, fill)


def answer(request):
    what = f"torch {torch.__version__}, cuBLAS {cublas_version() or '-'}"
    if not request:
        return {"what": what}
    with torch.no_grad():
        step = Step(Sizes(**request))
        what += f", attention by {step.choose_attention()}"
        samples = sampled(step.run)
    del step
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return told(what, samples)


if __name__ == "__main__":
    serve(load, answer)
