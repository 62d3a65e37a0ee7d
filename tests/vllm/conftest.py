"""The tested vLLM on a machine without a GPU: its configuration, groups and modules, as far as they need no kernel of its own.

Triton's interpreter runs vLLM's KDA kernels. The attention between the drafter's linears has no form for the CPU: a stand-in in
torch takes its place, the same before, during and after the routing.
"""

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else vLLM takes Triton without a driver for none
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
sys.path[:0] = [str(Path(__file__).parents[1] / "python"), str(Path(__file__).parents[2] / "integrations" / "vllm")]

import pytest  # noqa: E402
import torch  # noqa: E402

BF16 = torch.bfloat16
TAPS, HIDDEN, HEADS, KDA_HEADS, DRAFTS, VOCAB = 3, 256, 2, 2, 3, 1000


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def drafter_config():
    return SimpleNamespace(
        hidden_size=HIDDEN, target_hidden_size=HIDDEN, num_target_layers=TAPS, rms_norm_eps=1e-5, num_hidden_layers=2,
        num_attention_heads=HEADS, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=192, kv_lora_rank=512,
        intermediate_size=512, hidden_act="silu", vocab_size=VOCAB, draft_vocab_size=VOCAB, markov_rank=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=256,
        enable_confidence_head=True, logit_scale=0.5)


def target_config():
    return SimpleNamespace(
        hidden_size=HIDDEN, hidden_act="silu", rms_norm_eps=1e-5,
        linear_attn_config=dict(head_dim=128, num_heads=KDA_HEADS, short_conv_kernel_size=4, gate_lower_bound=-5.0,
                                use_full_rank_gate=True, kda_layers=[1]))


def start(rank=0, world=1, port=None):
    """A process of a group of ranks over gloo. Returns a VllmConfig with a drafter of three tokens."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    config = VllmConfig()
    config.parallel_config.tensor_parallel_size = world
    with set_current_vllm_config(config):
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port or free_port()}", rank, backend="gloo")
        initialize_model_parallel(world)
    config.model_config = SimpleNamespace(
        dtype=BF16, head_dtype=BF16, get_total_num_hidden_layers=lambda: 4, architectures=["KimiK3ForConditionalGeneration"])
    config.speculative_config = SimpleNamespace(
        method="dspark", draft_model_config=SimpleNamespace(hf_config=drafter_config()), num_speculative_tokens=DRAFTS,
        enable_adaptive_verification=False)
    config.scheduler_config.max_num_seqs = 4
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8]
    return config


def fill(model):
    """Random weights, and what vLLM does to them after a load on the CPU, but that it keeps them."""
    for name, weight in model.named_parameters():
        if name.endswith(("norm.weight", "layernorm.weight")):
            weight.data.fill_(1)
        else:
            weight.data.copy_(torch.randn(weight.shape) * (0.5 if weight.dim() == 3 else weight.shape[-1] ** -0.5))
    for layer in model.modules():
        if hasattr(layer, "quant_method"):
            layer.cpu_linear = torch.nn.functional.linear
    return model.requires_grad_(False)


def norm(x, weight, eps):
    return (torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=eps) * weight.float()).to(x.dtype)


def make_drafter(config, head=True):
    """K3DSparkForCausalLM of two layers, with a head as the target has."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.models.kimi_k3.nvidia import dspark_mla, mla

    class Implementation:
        is_lse_base_on_e = True

        def __init__(self, **options):
            pass

    def attention(self, positions, q, kv, k_pe, out):  # of each head, the first part of its query
        out.copy_(torch.tanh(q[..., : self.v_head_dim]).flatten(-2))

    def all_reduce_and_norm(x, residual, layer):
        total = x + residual
        return norm(total, layer.weight, layer.variance_epsilon), total

    mla.get_attn_backend = lambda *a, **k: SimpleNamespace(get_impl_cls=lambda: Implementation)
    mla.get_mla_prefill_backend = lambda config: lambda **options: None
    mla.MultiHeadLatentAttention._attention = attention
    mla.fused_q_kv_rmsnorm = lambda q, kv, wq, wkv, eps: (norm(q, wq, eps), norm(kv, wkv, eps))
    dspark_mla.fused_allreduce_rms_norm = all_reduce_and_norm
    dspark_mla.get_draft_quant_config = lambda config: None
    config.compilation_config.static_forward_context.clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with set_current_vllm_config(config):
            drafter = dspark_mla.K3DSparkForCausalLM(vllm_config=config)
            if head:
                drafter.lm_head = ParallelLMHead(VOCAB, HIDDEN)
    finally:
        torch.set_default_dtype(before)
    for layer in drafter.model.layers:
        for part in ("input_layernorm", "post_attention_layernorm"):
            one = getattr(layer, part)
            one.forward = lambda x, one=one: norm(x, one.weight, one.variance_epsilon)
    return fill(drafter)


@pytest.fixture(scope="session", autouse=True)
def _interpreted():
    """vLLM's KDA kernels, as they are for a GPU, for Triton's interpreter. Before anything else imports them."""
    import triton.language as tl
    from vllm.platforms import current_platform

    platform = type(current_platform)
    is_cpu, platform.is_cpu = platform.is_cpu, lambda self: False
    import vllm.model_executor.layers.mamba.ops.causal_conv1d  # noqa: F401

    platform.is_cpu = is_cpu
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent

    # Bound at import, these are not what the interpreter puts in the place of tl.exp and tl.log.
    fused_recurrent.exp, fused_recurrent.log = lambda x: tl.exp(x), lambda x: tl.log(x)


def make_kda(config, dim_first):
    """A model of two KimiK3DeltaAttention."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    from vllm.models.kimi_k3.nvidia import kda

    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS" if dim_first else "SD"
    get_conv_state_layout.cache_clear()

    class KimiLinearForCausalLM(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                kda.KimiK3DeltaAttention(target_config(), config, f"model.layers.{i}.self_attn") for i in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(hidden_states=x, positions=None)
            return x

    config.compilation_config.static_forward_context.clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with set_current_vllm_config(config):
            model = fill(KimiLinearForCausalLM())
    finally:
        torch.set_default_dtype(before)
    for layer in model.layers:
        layer.A_log.add_(1)
    return model


@pytest.fixture(scope="session")
def config():
    return start()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(7)
    with torch.no_grad():
        yield
