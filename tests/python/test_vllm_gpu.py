"""The vLLM plug-in on a GPU: the trees of vllm_tree.py at the shapes of a rank, eager and in CUDA graphs. -s shows the times.
Run test_vllm_plugin.py there as well: TWOSTEP_TEST_DEVICE=cuda:0 python3 -m pytest tests/python."""

import time
import types

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import vllm_tree as tree  # noqa: E402

import twostep_vllm  # noqa: E402
from twostep_vllm.switches import Switches  # noqa: E402

BF16 = torch.bfloat16
DRAFTS = 7


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch):
    torch.manual_seed(7)
    tree.framework(monkeypatch)
    with torch.no_grad(), torch.device("cuda"):
        yield
    tree.CONTEXT.attn_metadata, tree.CONTEXT.cudagraph_runtime_mode = None, types.SimpleNamespace(name="NONE")
    torch.cuda.synchronize()


def close(a, b, part=2e-2):
    assert a.shape == b.shape and a.dtype == b.dtype and a.isfinite().all()
    error, size = (a.double() - b.double()).abs().amax(-1), b.double().abs().amax(-1)
    assert (error <= part * size + 1e-6).all(), (error / size).max()


def captured(step):
    """A graph of step() and its result; nothing has run on its stream before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def ids(*rows):
    return torch.tensor(rows, dtype=torch.int32)


@pytest.fixture(scope="module")
def drafter():
    with torch.no_grad(), torch.device("cuda"):
        torch.manual_seed(3)
        return tree.K3DSparkForCausalLM(tree.rank_shape())


def test_a_drafter_of_rank_shapes_is_routed_in_time_and_replays_without_a_miss(drafter):
    runner = tree.Runner(torch.nn.Identity(), drafter, DRAFTS, requests=9)
    cold = time.perf_counter()
    twostep_vllm.serve(runner, Switches(kda=False)).remove()
    cold = time.perf_counter() - cold
    x = {m: torch.randn(m, 7168).to(BF16) for m in (7, 14, 63)}
    taps = {m: torch.randn(m, 5 * 7168).to(BF16) for m in (8, 16, 64)}
    before = [drafter.compute_draft_logits(drafter(v)) for v in x.values()]
    before += [drafter.model.context_proj(t)[0] for t in taps.values()]
    before += [drafter.model.context_kv_proj(t[:, :7168])[0] for t in taps.values()]
    warm = time.perf_counter()
    served = twostep_vllm.serve(runner, Switches(kda=False))
    warm = time.perf_counter() - warm
    print(f"\nrouted and prepared: {cold:.2f} s, with a warm cache {warm:.2f} s; {'; '.join(map(str, served.parts.values()))}")
    assert warm < 5 and served.parts["linears"].report.count == 27 and not served.missing and not served.unserved
    graphs = [captured(lambda v=v: drafter.compute_draft_logits(drafter(v))) for v in x.values()]
    graphs += [captured(lambda t=t: drafter.model.context_proj(t)[0]) for t in taps.values()]
    graphs += [captured(lambda t=t: drafter.model.context_kv_proj(t[:, :7168])[0]) for t in taps.values()]
    for (graph, out), wanted in zip(graphs, before):
        graph.replay()
        torch.cuda.synchronize()
        close(out, wanted, 4e-2)  # five layers of flips
    for layer in drafter.model.modules():
        plan = getattr(getattr(layer, "quant_method", None), "plan", None)
        if plan is not None:
            stats = plan.stats()
            assert stats["capture_misses"] == stats["late_compiles"] == 0 and stats["warp_runs"] + stats["cublas_runs"] > 0
    served.remove()
    again = [drafter.compute_draft_logits(drafter(v)) for v in x.values()]
    assert all(torch.equal(a, b) for a, b in zip(again, before))


def replay_us(graph, count=40):
    samples = []
    for _ in range(count + 5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1000)
    return sorted(samples[5:])[count // 2]


def test_a_draft_step_is_not_slower(drafter):
    """The whole step of linears and logits in one graph, on torch's linear and routed. What lies between is the same."""
    runner = tree.Runner(torch.nn.Identity(), drafter, DRAFTS, requests=9)
    x = {m: torch.randn(m, 7168).to(BF16) for m in (7, 14, 28, 63)}
    times = {m: [] for m in x}
    for routed in (False, True):
        served = twostep_vllm.serve(runner, Switches(kda=False)) if routed else None
        for m, v in x.items():
            drafter.compute_draft_logits(drafter(v))
            times[m].append(replay_us(captured(lambda v=v: drafter.compute_draft_logits(drafter(v)))[0]))
        if routed:
            served.remove()
    print("\n" + "\n".join(f"{m} rows: {theirs:.1f} us, routed {ours:.1f} us" for m, (theirs, ours) in times.items()))
    assert all(ours <= theirs * 1.02 for theirs, ours in times.values()), times


@pytest.mark.parametrize("dim_first", [False, True])
def test_kda_steps_in_full_graphs_are_those_of_the_plain_core(monkeypatch, dim_first):
    monkeypatch.setattr(tree.KimiK3DeltaAttention, "dim_first", dim_first)
    shape = tree.Shape(kda_heads=12)
    target = tree.KimiLinearForCausalLM(shape, draft_tokens=DRAFTS)
    runner = tree.Runner(target, tree.K3DSparkForCausalLM(tree.Shape()), DRAFTS, sizes=(1, 2, 4, 8, 16))
    for layer in target.layers:
        layer.bind_kv_cache(tree.caches_of(layer, 20, "cuda"))
    start = [tuple(c.clone() for c in layer.kv_cache) for layer in target.layers]

    def fresh():
        for layer, copies in zip(target.layers, start):
            for cache, copy in zip(layer.kv_cache, copies):
                cache.copy_(copy)

    table = torch.zeros(2, 11, dtype=torch.int32)
    table[:, :8] = torch.arange(1, 17, dtype=torch.int32).view(2, 8)
    steps = {"decode": tree.decode(ids(1, 9, 0, 0), rows=4), "verify": tree.verify(table[:, :8], ids(3, 8))}
    for name, m in steps.items():
        x = torch.randn(m.num_actual_tokens, shape.hidden).to(BF16)
        tree.CONTEXT.attn_metadata = {layer.prefix: m for layer in target.layers}
        fresh()
        wanted = target(x)
        caches = [c.clone() for layer in target.layers for c in layer.kv_cache]
        served = twostep_vllm.serve(runner, Switches(linears=False, logits=False))
        fresh()
        close(target(x), wanted)  # eager
        tree.CONTEXT.cudagraph_runtime_mode = types.SimpleNamespace(name="FULL")
        graph, out = captured(lambda: target(x))
        tree.CONTEXT.cudagraph_runtime_mode = types.SimpleNamespace(name="NONE")
        for _ in range(2):
            fresh()
            graph.replay()
            torch.cuda.synchronize()
            close(out, wanted)
            for layer_caches, theirs in zip([c for layer in target.layers for c in layer.kv_cache], caches):
                torch.testing.assert_close(layer_caches, theirs, rtol=0, atol=1e-2 if theirs.dtype == torch.float32 else 3e-2)
        assert all(layer.steps == {"twostep": 2} for layer in served.parts["kda"].layers.values()), name
        served.remove()


def test_a_verify_step_is_left_to_vllm_in_pieces_and_in_graphs_of_any_mix():
    target = tree.KimiLinearForCausalLM(tree.Shape(), layers=1, draft_tokens=DRAFTS)
    runner = tree.Runner(target, tree.K3DSparkForCausalLM(tree.Shape()), DRAFTS, sizes=(8,))
    target.layers[0].bind_kv_cache(tree.caches_of(target.layers[0], 10, "cuda"))
    layer = twostep_vllm.serve(runner, Switches(linears=False, logits=False)).parts["kda"].layers["layers.0"]
    tree.CONTEXT.attn_metadata = {"layers.0.self_attn": tree.verify(ids([1, 2, 3, 4, 5, 6, 7, 8]), ids(1))}
    x = torch.zeros(8, 256, dtype=BF16)
    for mode, separate, served in (("FULL", True, True), ("PIECEWISE", True, False), ("FULL", False, False)):
        tree.CONTEXT.cudagraph_runtime_mode = types.SimpleNamespace(name=mode)
        runner.vllm_config.compilation_config.cudagraph_mode = tree.Mode(separate)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add_(0)
            assert (layer._step(x) is not None) is served, (mode, separate)


def test_the_layers_of_a_target_are_prepared_in_time():
    """69 layers of 12 heads, with the keys of a server: when the caches are bound."""
    with torch.device("cuda"):
        target = tree.KimiLinearForCausalLM(tree.Shape(kda_heads=12), layers=69, draft_tokens=DRAFTS)
    sizes = [1, 2, 4, *range(8, 257, 8)]
    runner = tree.Runner(target, tree.K3DSparkForCausalLM(tree.Shape()), DRAFTS, requests=128, sizes=sizes)
    begin = time.perf_counter()
    part = twostep_vllm.serve(runner, Switches(linears=False, logits=False)).parts["kda"]
    routed = time.perf_counter() - begin
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        for layer in target.layers:
            conv, state = layer.get_state_shape()
            layer.bind_kv_cache((torch.empty(4, *conv, dtype=BF16), torch.empty(4, *state)))
        times.append(time.perf_counter() - begin)
    print(f"\n69 layers, {len(part.keys)} keys: routed in {routed:.2f} s, prepared in {times[0]:.2f}, then {times[1]:.2f} s")
    assert times[1] < 5
    part.remove()
