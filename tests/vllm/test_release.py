"""The plug-in on the tested release of vLLM: its own classes, installed, run, compared, uninstalled, compared again."""

import inspect
import logging
import os
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm_tree as tree
from conftest import BF16, DRAFTS, HIDDEN, TAPS, VOCAB, free_port, make_drafter, make_kda, start

import twostep_vllm
from twostep_vllm.drafter import Linears, rows_of
from twostep_vllm.framework import release
from twostep_vllm.switches import Switches

ROOT = Path(__file__).parents[2]


class Runner:
    """What the plug-in reads of GPUModelRunner; which cannot be made without a GPU."""

    def __init__(self, config, target=None, drafter=None):
        self.vllm_config, self.target = config, target or torch.nn.Identity()
        self.speculator = SimpleNamespace(model=drafter)

    def get_model(self):
        return self.target

    def reset_lora_state(self):
        pass


def close(a, b, part=2e-2):
    assert a.shape == b.shape and a.dtype == b.dtype and a.isfinite().all()
    error, size = (a.double() - b.double()).abs().amax(-1), b.double().abs().amax(-1)
    assert (error <= part * size + 1e-6).all(), (error / size).max()


def attributes(model):
    return {name: (type(m), dict(vars(m)), dict(m._modules), dict(m._parameters)) for name, m in model.named_modules()}


def same_attributes(model, was):
    now = attributes(model)
    def same(a, b):
        return a.keys() == b.keys() and all(a[name] is b[name] for name in a)

    return now.keys() == was.keys() and all(
        now[k][0] is was[k][0] and all(map(same, now[k][1:], was[k][1:])) for k in now)


def test_it_is_a_tested_release():
    assert "not a tested release" not in release(), release()


def test_what_the_plug_in_reads_is_there():
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import ForwardContext
    from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention
    from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadata
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
    from vllm.v1.worker.gpu_worker import Worker

    for name in ("get_model", "reset_lora_state", "load_model"):
        assert callable(getattr(GPUModelRunner, name))
    for owner, text in ((GPUModelRunner.__init__, "self.speculator ="), (DSparkSpeculator.load_model, "self.model ="),
                        (DSparkSpeculator._sample_sequential, "self.model.compute_draft_logits("),
                        (Worker.load_model, "self.model_runner.load_model(")):
        assert text in inspect.getsource(owner), text
    assert list(inspect.signature(KimiK3DeltaAttention.forward).parameters) == ["self", "hidden_states", "positions"]
    assert {"num_prefills", "num_decodes", "num_spec_decodes", "num_spec_decode_tokens", "num_actual_tokens",
            "spec_state_indices_tensor", "non_spec_state_indices_tensor", "num_accepted_tokens",
            } <= {field.name for field in fields(KimiK3KDAMetadata)}
    assert {"attn_metadata", "cudagraph_runtime_mode"} <= {field.name for field in fields(ForwardContext)}
    assert CUDAGraphMode.FULL.name == "FULL" and CUDAGraphMode.FULL_AND_PIECEWISE.separate_routine()
    assert not CUDAGraphMode.FULL.separate_routine()


def test_the_wheel_is_found_by_vllm_and_without_it_vllm_is_as_before(tmp_path):
    source, wheel, elsewhere = (tmp_path / name for name in ("source", "wheel", "elsewhere"))
    shutil.copytree(ROOT / "integrations" / "vllm", source)  # a build writes beside the sources
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", wheel, source], check=True)
    program = ("import vllm.plugins, vllm.v1.worker.worker_base as w; vllm.plugins.load_general_plugins();"
               "print('hooked', 'load_model' in vars(w.WorkerWrapperBase))")
    for path, off, wanted in ((wheel, "", True), (wheel, "0", False), (None, "", False)):
        paths = [str(p) for p in (path, *os.environ["PYTHONPATH"].split(os.pathsep)) if p and "integrations" not in str(p)]
        done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, cwd=elsewhere, check=True,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TWOSTEP_VLLM": off})
        assert f"hooked {wanted}" in done.stdout, done.stderr


def test_a_worker_loads_and_is_served(config, caplog):
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    caplog.set_level(logging.INFO, "vllm.twostep")
    logging.getLogger("vllm").propagate = True
    drafter, before = make_drafter(config), dict(vars(WorkerWrapperBase))
    wrapper = WorkerWrapperBase()
    wrapper.worker = SimpleNamespace(load_model=lambda: "loaded", model_runner=Runner(config, make_kda(config, False), drafter))
    twostep_vllm.register()
    try:
        assert wrapper.load_model() == "loaded"
    finally:
        twostep_vllm.unregister()
    assert dict(vars(WorkerWrapperBase)) == before
    line, = (r.getMessage() for r in caplog.records if " serves " in r.getMessage())
    print(line)
    assert "12 drafter linears" in line and f"draft logits [1024, {HIDDEN}]" in line and "2 KDA layers" in line
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_the_drafter_gives_the_same_and_afterwards_is_the_same(config):
    drafter = make_drafter(config)
    runner = Runner(config, drafter=drafter)
    x, taps = torch.randn(DRAFTS, HIDDEN).to(BF16), torch.randn(DRAFTS + 1, HIDDEN * TAPS).to(BF16)
    positions = torch.arange(DRAFTS)

    def all_of():
        hidden = drafter(None, positions, x)
        embed = drafter.markov_embed(torch.arange(DRAFTS))
        return [hidden, drafter.model.context_proj(taps), drafter.model.context_kv_proj(hidden),
                drafter.compute_draft_logits(hidden), drafter.markov_bias(embed), drafter.compute_confidence(hidden, embed)]

    before, was = all_of(), attributes(drafter)
    assert all(value.isfinite().all() for value in before) and before[3].shape == (DRAFTS, VOCAB)
    served = twostep_vllm.serve(runner, Switches(kda=False))
    report = served.parts["linears"].report
    assert report.count == 12 and not served.missing and not served.unserved, vars(served)
    left = {layer.name.rpartition(".")[2] for layer in report.layers if not layer.installed}
    assert left == {"kv_b_proj", "markov_w2", "proj"}
    during = all_of()
    for ours, theirs in zip(during[:5], before):
        close(ours, theirs)
    torch.testing.assert_close(during[5], before[5], rtol=0, atol=1e-2)
    routed = [m.quant_method.plan.stats()["cpu_runs"] for m in drafter.model.modules()
              if hasattr(getattr(m, "quant_method", None), "plan")]
    assert len(routed) == 12 and all(routed), routed  # every routed linear ran here
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    assert isinstance(drafter.model.context_proj.quant_method, UnquantizedLinearMethod)  # vLLM's own checks hold
    served.remove()
    assert same_attributes(drafter, was)
    assert all(torch.equal(a, b) for a, b in zip(all_of(), before))


@pytest.mark.parametrize("dim_first", [False, True])
def test_the_kda_layers_give_the_same_and_afterwards_are_the_same(config, dim_first):
    """Against vLLM's own kernels: its convolution, its recurrence in decode and in verify, its norm."""
    from vllm.forward_context import set_forward_context
    from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadata

    target = make_kda(config, dim_first)
    runner = Runner(config, target, torch.nn.Identity())
    size = sum(t.numel() * t.element_size() for t in tree.caches_of(target.layers[0], 1))
    pages = [torch.zeros(10, 1, 1, size, dtype=torch.int8) for _ in target.layers]
    start_caches = [tree.caches_of(layer, 10) for layer in target.layers]

    def bind():
        for layer, page in zip(target.layers, pages):
            layer.bind_kv_cache(page)

    def fresh():
        for layer, caches in zip(target.layers, start_caches):
            for cache, values in zip(layer.kv_cache, caches):
                cache.copy_(values)

    def metadata(namespace):
        m = dict(vars(namespace), num_prefill_tokens=0, num_decode_tokens=namespace.num_decodes)
        if namespace.num_spec_decodes:
            lengths = namespace.num_spec_decode_tokens // namespace.num_spec_decodes
            m["spec_query_start_loc"] = torch.arange(namespace.num_spec_decodes + 1, dtype=torch.int32) * lengths
        return KimiK3KDAMetadata(**m)

    ids = lambda *rows: torch.tensor(rows, dtype=torch.int32)  # noqa: E731
    table = ids([1, 2, 3, 4, -7], [5, 6, 7, 8, -7])
    steps = {
        "decode": tree.decode(table[:, 0]), "padded decode": tree.decode(ids(1, 5, 0, 0), rows=4),
        "verify": tree.verify(table[:, :4], ids(3, 1)),
        "one token after verify": tree.verify(table[:, :4], ids(2, 4), tokens=1),
        "ragged": tree.verify(table[:, :4], ids(1, 1), tokens=2),
    }
    steps = {name: metadata(m) for name, m in steps.items()}
    inputs = {name: torch.randn(m.num_actual_tokens, HIDDEN).to(BF16) for name, m in steps.items()}

    def run(name):
        fresh()
        with set_forward_context({layer.prefix: steps[name] for layer in target.layers}, config):
            out = target(inputs[name])
        return out, [cache.clone() for layer in target.layers for cache in layer.kv_cache]

    bind()
    before, was = {name: run(name) for name in steps}, attributes(target)
    served = twostep_vllm.serve(runner, Switches(linears=False, logits=False))
    assert not served.missing and not served.unserved, vars(served)
    bind()  # as vLLM does: for the profile, then for good
    layers = served.parts["kda"].layers
    assert len(layers) == 2 and not served.parts["kda"].skipped() and served.parts["kda"].keys == [1, 2, 4, (1, 4), (2, 4)]
    assert (target.layers[0].kv_cache[0].shape[1] == 768) is dim_first  # 3D first, or L
    for name in steps:
        out, caches = run(name)
        close(out, before[name][0])
        for place, ours, theirs in zip(("conv 0", "state 0", "conv 1", "state 1"), caches, before[name][1]):
            error = (ours.double() - theirs.double()).abs()
            # Of one projection: the conv line bit for bit, the states but for roundings to BF16 of q, k and v that flip, and of
            # what these reach. The second layer's projection has the first one's flips.
            most, share = {"conv 0": (0, 0), "state 0": (2e-2, 5e-3), "conv 1": (4e-2, 0.15), "state 1": (5e-2, 3e-2)}[place]
            assert error.max() <= most and (error > 1e-3).double().mean() <= share, (name, place, error.max())
    assert [layer.steps for layer in layers.values()] == 2 * [{"twostep": 4, "vllm": 1}]  # vllm: the ragged one
    served.remove()
    bind()
    for name in steps:
        out, caches = run(name)
        assert torch.equal(out, before[name][0]) and all(torch.equal(a, b) for a, b in zip(caches, before[name][1]))
    now = attributes(target)
    for state in (now, was):
        for layer in state.values():
            layer[1].pop("kv_cache", None)  # bound anew
    assert all(now[k][1].keys() == was[k][1].keys() for k in was)


def two_ranks(rank, port, results):
    config = start(rank, 2, port)
    torch.manual_seed(7)
    with torch.no_grad():
        drafter = make_drafter(config)
        torch.manual_seed(11)
        hidden = torch.randn(DRAFTS, HIDDEN).to(BF16)
        before = drafter.compute_draft_logits(hidden)
        served = twostep_vllm.serve(Runner(config, drafter=drafter), Switches(kda=False))
        during = drafter.compute_draft_logits(hidden)
        shard, part = list(drafter.lm_head.weight.shape), str(served.parts["logits"])
        count = served.parts["linears"].report.count
        served.remove()
        after = drafter.compute_draft_logits(hidden)
    torch.save((before, during, after, shard, part, count), results / str(rank))


def test_the_logits_of_two_ranks_are_gathered(tmp_path):
    torch.multiprocessing.spawn(two_ranks, (free_port(), tmp_path), nprocs=2)
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    for before, during, after, shard, part, count in ranks:
        assert shard == [512, HIDDEN] and before.shape == (DRAFTS, VOCAB) and "on each of 2 ranks, gathered by" in part
        assert count == 12
        close(during, before)
        assert torch.equal(after, before) and torch.equal(during, ranks[0][1])


def test_routing_the_drafter_at_the_shapes_of_a_rank_takes_less_than_five_seconds(config):
    """K3.1 at eight ranks: the linears of five layers, with the row counts of up to nine requests."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    drafter = tree.K3DSparkForCausalLM(tree.rank_shape())
    with set_current_vllm_config(config):
        for layer in drafter.model.modules():
            if type(getattr(layer, "quant_method", None)) is tree.UnquantizedLinearMethod:
                layer.quant_method = UnquantizedLinearMethod()
    begin = time.perf_counter()
    report = Linears(drafter, rows_of((7, 8), 9)).report
    took = time.perf_counter() - begin
    print(f"{report.count} linears, {report.bytes / 1e6:.0f} MB in {took:.2f} s")
    assert report.count == 27 and took < 5
