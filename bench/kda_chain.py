"""The KDA core as an unfused chain of public kernels, for `twostep bench kda --chain PYTHON`.

    echo '{"heads":12,"requests":8,"tokens":1,"layers":17,"sets":51,"launches":102}' | python3 bench/kda_chain.py

Needs torch and flash-linear-attention 0.6 or later. Reads a JSON object a line and answers each with one: microseconds
per call of three short convolutions, the F_B product, the delta rule with gate and norms of q and k, and the gated
norm, in one CUDA graph over rotating weights, caches and rows; or "failure", one sentence. `{}` asks for "what" alone.
Where the layer of FLA has projections of their own, so has the chain: no copy of a slice is counted. In verify the
convolutions' new lines are not written back to a cache.
"""

from torch_chain import replayed, serve, told

HEAD = 128


def load(device):
    global torch, fla, FusedRMSNormGated, ShortConvolution, fused_recurrent_kda_fwd
    import torch
    import fla
    from fla.modules import FusedRMSNormGated, ShortConvolution
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    torch.cuda.set_device(int(device))


class Layer:
    def __init__(self, heads):
        width = HEAD * heads
        self.convs = [ShortConvolution(width, 4, activation="silu", device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
        self.f_b = torch.randn(width, HEAD, device="cuda").mul_(HEAD**-0.5).bfloat16()
        self.a_log = torch.randn(heads, device="cuda") * 0.5
        self.dt_bias = torch.randn(width, device="cuda")
        self.norm = FusedRMSNormGated(HEAD, eps=1e-5, activation="sigmoid", device="cuda", dtype=torch.float32)


class Step:
    """Rows, conv lines and slots of one call."""

    def __init__(self, heads, requests, tokens, slots):
        def rows(*shape):
            return torch.randn(*shape, device="cuda").bfloat16()

        self.qkv = [rows(requests, tokens, HEAD * heads) for _ in "qkv"]
        self.lines = [rows(requests, HEAD * heads, 4) for _ in "qkv"]
        self.f = rows(requests * tokens, HEAD)
        self.beta = rows(1, requests * tokens, heads)
        self.z = rows(1, requests * tokens, heads, HEAD)
        self.out = torch.empty_like(self.z)
        self.slots = slots

    def run(self, layer, pool, starts, accepted):
        heads = (1, -1, pool.shape[1], HEAD)
        q, k, v = (conv(x, cache=line, output_final_state=True)[0].view(heads)
                   for conv, x, line in zip(layer.convs, self.qkv, self.lines))
        g = torch.mm(self.f, layer.f_b.t()).view(heads)
        out, _ = fused_recurrent_kda_fwd(
            q, k, v, g, self.beta, layer.a_log, layer.dt_bias, initial_state=pool, inplace_final_state=True,
            state_v_first=True, cu_seqlens=starts, ssm_state_indices=self.slots, num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
            out=self.out)
        return layer.norm(out, self.z)


def time_chain(heads, requests, tokens, layers, sets, launches):
    """The samples, in microseconds per call."""
    count = sets * requests * tokens
    pool = torch.randn(count, heads, HEAD, HEAD, device="cuda").mul_(0.3)
    slots = torch.randperm(count, device="cuda").int().view(sets, requests, tokens)
    starts = torch.arange(requests + 1, device="cuda") * tokens
    accepted = torch.arange(requests, device="cuda").int() % tokens + 1 if tokens > 1 else None
    weights = [Layer(heads) for _ in range(layers)]
    steps = [Step(heads, requests, tokens, slots[i]) for i in range(sets)]

    def chain(calls):
        for i in range(calls):
            steps[i % sets].run(weights[i % layers], pool, starts, accepted)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain(launches)  # kernels are compiled and chosen, for pointers of every alignment
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(launches)
    return [sample / launches for sample in replayed(graph)]


def answer(request):
    what = f"FLA {fla.__version__}, torch {torch.__version__}: 3 convolutions, F_B, delta rule, norm"
    if not request:
        return {"what": what}
    with torch.no_grad():
        samples = time_chain(**request)
    torch.cuda.empty_cache()
    return told(what, samples)


if __name__ == "__main__":
    serve(load, answer)
