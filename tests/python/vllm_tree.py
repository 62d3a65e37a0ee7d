"""The modules of vLLM that twostep_vllm routes, rebuilt from torch with the names that the plug-in reads, and a plain KDA core
that has the roundings of the chapter and shares no code with the library. Also what it imports of vLLM, as modules."""

import sys
import types
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, rms_norm, softplus

BF16 = torch.bfloat16


@dataclass
class Shape:
    """Of one rank. The default is small; K3.1 at eight ranks is `rank_shape`."""

    hidden: int = 256
    layers: int = 2
    taps: int = 3
    q_lora: int = 192
    kv_width: int = 576
    heads: int = 2
    inner: int = 256
    vocab: int = 1008
    padded: int = 1024
    markov: int = 64
    kda_heads: int = 2


def rank_shape():
    return Shape(hidden=7168, layers=5, taps=5, q_lora=1536, heads=12, inner=1792, vocab=20480, padded=20480, markov=256,
                 kda_heads=12)


# ---- vLLM's layers


class UnquantizedLinearMethod:
    def apply(self, layer, x, bias=None):
        return linear(x, layer.weight, bias)


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod):
    pass


class QuantizedMethod:
    def apply(self, layer, x, bias=None):
        return linear(x, layer.weight, bias)


class Linear(torch.nn.Module):
    def __init__(self, k, n, method=UnquantizedLinearMethod, dtype=BF16, spread=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(n, k).mul_(spread or k**-0.5).to(dtype), requires_grad=False)
        self.bias, self.quant_method, self.tp_size = None, method(), 1

    def forward(self, x):
        return self.quant_method.apply(self, x, None), None


class LogitsProcessor(torch.nn.Module):
    def __init__(self, vocab, scale):
        super().__init__()
        self.org_vocab_size, self.scale, self.soft_cap = vocab, scale, None
        self.logits_as_input, self.head_dtype = False, BF16

    def forward(self, head, hidden):
        logits = head.quant_method.apply(head, hidden)[..., : self.org_vocab_size]
        return logits if self.scale == 1.0 else logits * self.scale


class Attention(torch.nn.Module):
    """The linears of the latent attention; what lies between them is a stand-in."""

    def __init__(self, s):
        super().__init__()
        self.fused_qkv_a_proj = Linear(s.hidden, s.q_lora + s.kv_width)
        self.q_b_proj = Linear(s.q_lora, s.heads * 192)
        self.kv_b_proj = Linear(s.kv_width - 64, s.heads * 256)
        self.o_proj = Linear(s.heads * 128, s.hidden)
        self.q_lora = s.q_lora

    def forward(self, x):
        q = self.fused_qkv_a_proj(x)[0][:, : self.q_lora]  # a slice: its rows are further apart
        q = self.q_b_proj(q)[0].unflatten(-1, (-1, 192))[..., :128].flatten(-2)
        return self.o_proj(torch.tanh(q))[0]


class KimiMLP(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.gate_up_proj, self.down_proj = Linear(s.hidden, 2 * s.inner), Linear(s.inner, s.hidden)

    def forward(self, x):
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj(torch.nn.functional.silu(gate) * up)[0]


class DecoderLayer(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.self_attn, self.mlp = Attention(s), KimiMLP(s)

    def forward(self, x):
        x = x + self.self_attn(rms_norm(x, x.shape[-1:]))
        return x + self.mlp(rms_norm(x, x.shape[-1:]))


class MarkovHead(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.markov_w2 = Linear(s.markov, s.padded, UnquantizedEmbeddingMethod)


class ConfidenceHead(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.proj = Linear(s.hidden, 1, dtype=torch.float32)


class K3DSparkModel(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.embed_tokens = None
        self.context_proj = Linear(s.hidden * s.taps, s.hidden)
        self.layers = torch.nn.ModuleList(DecoderLayer(s) for _ in range(s.layers))
        self.context_kv_proj = Linear(s.hidden, s.layers * s.kv_width)
        self.markov_head, self.confidence_head = MarkovHead(s), ConfidenceHead(s)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return rms_norm(x, x.shape[-1:])


class K3DSparkForCausalLM(torch.nn.Module):
    def __init__(self, s, scale=0.5):
        super().__init__()
        self.model = K3DSparkModel(s)
        self.lm_head = Linear(s.hidden, s.padded, UnquantizedEmbeddingMethod)
        self.logits_processor = LogitsProcessor(s.vocab, scale)

    def forward(self, x):
        return self.model(x)

    def compute_logits(self, hidden):
        return self.logits_processor(self.lm_head, hidden)

    def compute_draft_logits(self, hidden):
        return self.compute_logits(hidden)


# ---- The KDA layer


def rounded(x):
    return x.to(BF16).double()


def kda_core(layer, qkv, g, z, beta, caches, slots, accepted, tokens, dim_first):
    """Rows [B tokens] of the core in FP64 with the BF16 roundings, one request and token after the other. In `slots` [B, w] an
    id below 1 is dead. `caches` are written."""
    heads, d = layer.local_num_heads, layer.local_projection_size
    conv, state = caches
    out = torch.zeros(qkv.shape[0], d, dtype=BF16, device=qkv.device)
    weight = layer.conv1d.weight.double()[:, 0]
    bound, A = layer.gate_lower_bound, layer.A_log.double().exp()[:, None]
    for n in range(qkv.shape[0] // tokens):
        ids = slots[n].tolist() if slots.dim() == 2 else [int(slots[n])]
        a = 1 if accepted is None else int(accepted[n])
        if ids[0] < 1 or ids[a - 1] < 1:
            continue
        line = conv[ids[0]] if not dim_first else conv[ids[0]].T  # [L, 3D]
        history = line[a - 1 : a + 2].clone()
        S = state[ids[a - 1]].double()
        rows = qkv[n * tokens : (n + 1) * tokens]
        window = torch.cat((history, rows)).double()
        line[:2] = history[1:]
        line[2 : 2 + tokens] = rows
        for t in range(tokens):
            r = n * tokens + t
            y = (window[t : t + 4] * weight.T).sum(0)
            y = rounded(y * torch.sigmoid(y)).view(3, heads, 128)
            q, k = (v * (v.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for v in y[:2])
            s = g[r].double().view(heads, 128) + layer.dt_bias.double().view(heads, 128)
            decay = torch.exp(bound * torch.sigmoid(A * s) if bound is not None else -A * softplus(s))
            S = S * decay[:, None, :]
            u = torch.sigmoid(beta[r].double())[:, None] * (y[2] - torch.einsum("hvk,hk->hv", S, k))
            S = S + u[:, :, None] * k[:, None, :]
            o = rounded(torch.einsum("hvk,hk->hv", S, q * 128**-0.5))
            o = o * (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).rsqrt() * layer.o_norm.weight.double()
            out[r] = (o * torch.sigmoid(z[r].double().view(heads, 128))).flatten().to(BF16)
            state[ids[t] if tokens > 1 else ids[0]] = S.float()
    return out


def reference_step(layer, m, qkv, g, z, beta, dim_first):
    """kda_core on a step's metadata: what vLLM's own kernels do with it."""
    rows = m.num_actual_tokens
    if m.num_spec_decodes:
        slots, accepted = m.spec_state_indices_tensor, m.num_accepted_tokens
        tokens = m.num_spec_decode_tokens // m.num_spec_decodes
    else:
        slots, accepted, tokens = m.non_spec_state_indices_tensor, None, 1
    return kda_core(layer, qkv[:rows], g[:rows], z[:rows], beta[:rows], layer.kv_cache[:2], slots, accepted, tokens, dim_first)


class KimiK3DeltaAttention(torch.nn.Module):
    dim_first = False

    def __init__(self, s, prefix, draft_tokens=0):
        super().__init__()
        h, self.prefix, self.draft_tokens = s.kda_heads, prefix, draft_tokens
        d = self.local_projection_size = 128 * h
        self.local_num_heads, self.num_heads, self.head_dim = h, h, 128
        self.in_proj_padding = -(4 * d + 128 + h) % 16
        self.use_recoverssm, self.gemm_rs_ar, self.gate_lower_bound = False, None, -5.0
        self.in_proj_qkvgfab = Linear(s.hidden, 4 * d + 128 + h + self.in_proj_padding)
        self.f_b_proj, self.o_proj = Linear(128, d), Linear(d, s.hidden)
        self.conv1d = torch.nn.Module()
        self.conv1d.weight, self.conv1d.bias = torch.nn.Parameter(torch.randn(3 * d, 1, 4) * 0.5, requires_grad=False), None
        self.A_log = torch.nn.Parameter(1 + torch.randn(h) * 0.3, requires_grad=False)
        self.dt_bias = torch.nn.Parameter(torch.randn(d) * 0.3, requires_grad=False)
        self.o_norm = torch.nn.Module()
        self.o_norm.weight = torch.nn.Parameter(1 + torch.randn(128).mul(0.1).to(BF16), requires_grad=False)
        self.o_norm.eps = 1e-5

    def get_state_shape(self):
        conv = (3 + self.draft_tokens, 3 * self.local_projection_size)
        return conv[::-1] if self.dim_first else conv, (self.local_num_heads, 128, 128)

    def get_state_dtype(self):
        return BF16, torch.float32

    def bind_kv_cache(self, caches):
        self.kv_cache = tuple(caches)

    def forward(self, hidden_states, positions):
        d = self.local_projection_size
        sizes = [3 * d, d, 128, self.local_num_heads, self.in_proj_padding]
        qkv, z, f, beta, _ = self.in_proj_qkvgfab(hidden_states)[0].split(sizes, -1)
        g = self.f_b_proj(f)[0]
        m = CONTEXT.attn_metadata[self.prefix]
        out = qkv.new_zeros(qkv.shape[0], d)
        out[: m.num_actual_tokens] = reference_step(self, m, qkv, g, z, beta, self.dim_first)
        return self.o_proj(out)[0]


class KimiLinearForCausalLM(torch.nn.Module):
    def __init__(self, s, layers=2, draft_tokens=0):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            KimiK3DeltaAttention(s, f"layers.{i}.self_attn", draft_tokens) for i in range(layers))

    def forward(self, x, positions=None):
        for layer in self.layers:
            x = x + layer(hidden_states=x, positions=positions)
        return x


def caches_of(layer, slots, device="cpu"):
    """Conv and state in one page per slot, as vLLM lays them, with numbers of a request's past."""
    conv, state = layer.get_state_shape()[:2]
    conv_bytes, state_bytes = 2 * conv[0] * conv[1], 4 * state[0] * 128 * 128
    pages = torch.zeros(slots, conv_bytes + state_bytes, dtype=torch.uint8, device=device)
    views = (pages[:, :conv_bytes].view(BF16).view(slots, *conv), pages[:, conv_bytes:].view(torch.float32).view(slots, *state))
    views[0].copy_(torch.randn(views[0].shape).to(BF16))
    views[1].copy_(torch.randn(views[1].shape) * 0.1)
    return views


def decode(slots, rows=None, **changes):
    """A step's metadata: decode of these slots."""
    count = len(slots)
    return types.SimpleNamespace(**{**dict(
        num_prefills=0, num_decodes=count, num_spec_decodes=0, num_spec_decode_tokens=0, num_actual_tokens=rows or count,
        non_spec_state_indices_tensor=slots, spec_state_indices_tensor=None, num_accepted_tokens=None), **changes})


def verify(slots, accepted, tokens=None, **changes):
    """A step's metadata: verify of `tokens` tokens for each row of `slots` [B, w], w by default."""
    tokens = tokens or slots.shape[1]
    return types.SimpleNamespace(**{**dict(
        num_prefills=0, num_decodes=0, num_spec_decodes=len(slots), num_spec_decode_tokens=len(slots) * tokens,
        num_actual_tokens=len(slots) * tokens, non_spec_state_indices_tensor=None, spec_state_indices_tensor=slots,
        num_accepted_tokens=accepted), **changes})


# ---- What is imported of vLLM, and a runner

CONTEXT = types.SimpleNamespace(attn_metadata=None, cudagraph_runtime_mode=types.SimpleNamespace(name="NONE"))


class Wrapper:
    """WorkerWrapperBase: what it lacks is the worker's."""

    def __init__(self, worker):
        self.worker = worker

    def __getattr__(self, name):
        return getattr(self.worker, name)


def framework(monkeypatch, without=()):
    """vLLM's modules, but those `without`. Returns WorkerWrapperBase."""
    wrapper = type("WorkerWrapperBase", (Wrapper,), {})
    group = types.SimpleNamespace(world_size=1, cpu_group=None)
    parts = {
        "vllm.v1.worker.worker_base": {"WorkerWrapperBase": wrapper},
        "vllm.forward_context": {"get_forward_context": lambda: CONTEXT},
        "vllm.distributed": {"get_tp_group": lambda: group,
                             "tensor_model_parallel_all_gather": lambda x: torch.cat((x, x), -1)},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.model_executor.layers.linear": {"UnquantizedLinearMethod": UnquantizedLinearMethod},
        "vllm.model_executor.layers.vocab_parallel_embedding": {"UnquantizedEmbeddingMethod": UnquantizedEmbeddingMethod},
    }
    for name, contents in parts.items():
        for folder in [name[: i] for i, c in enumerate(name) if c == "."]:
            if folder not in sys.modules:
                monkeypatch.setitem(sys.modules, folder, types.ModuleType(folder))
        module = types.ModuleType(name)
        vars(module).update({key: value for key, value in contents.items() if f"{name}.{key}" not in without})
        monkeypatch.setitem(sys.modules, name, module)
    return wrapper


class Mode:
    def __init__(self, separate):
        self.separate = separate

    def separate_routine(self):
        return self.separate


class Runner:
    """A model runner after load_model."""

    def __init__(self, target, drafter=None, draft_tokens=7, requests=4, sizes=(), **config):
        speculation = drafter and types.SimpleNamespace(method="dspark", num_speculative_tokens=draft_tokens,
                                                        enable_adaptive_verification=False)
        self.target, self.speculator = target, types.SimpleNamespace(model=drafter)
        self.lora_resets = 0
        compilation = types.SimpleNamespace(cudagraph_capture_sizes=list(sizes), cudagraph_mode=Mode(True))
        self.vllm_config = types.SimpleNamespace(**{**dict(
            model_config=types.SimpleNamespace(architectures=["KimiK3ForConditionalGeneration"]),
            speculative_config=speculation, scheduler_config=types.SimpleNamespace(max_num_seqs=requests), lora_config=None,
            compilation_config=compilation), **config})

    def get_model(self):
        return self.target

    def reset_lora_state(self):
        self.lora_resets += 1
