"""The vLLM plug-in on trees of vLLM's names (vllm_tree.py), without vLLM, on the CPU or on TWOSTEP_TEST_DEVICE."""

import logging
import multiprocessing
import os
import sys
import types

import pytest

torch = pytest.importorskip("torch")
import vllm_tree as tree  # noqa: E402

import twostep_vllm  # noqa: E402
from twostep_vllm import drafter as drafting  # noqa: E402
from twostep_vllm.drafter import Gather, rows_of  # noqa: E402
from twostep_vllm.framework import Unserved  # noqa: E402
from twostep_vllm.kda import keys_of  # noqa: E402
from twostep_vllm.switches import Switches  # noqa: E402

BF16 = torch.bfloat16
DEVICE = os.environ.get("TWOSTEP_TEST_DEVICE", "cpu")
KIND = "cpu" if DEVICE == "cpu" else "warp"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(7)
    with torch.no_grad(), torch.device(DEVICE):
        yield
    tree.CONTEXT.attn_metadata = None


@pytest.fixture
def wrapper(monkeypatch):
    yield tree.framework(monkeypatch)
    twostep_vllm.unregister()


@pytest.fixture(autouse=True)
def _logged(caplog):
    caplog.set_level(logging.INFO, "vllm.twostep")


def ids(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def close(a, b, part=2e-2):
    """Equal but for roundings that flip: a few BF16 steps, at the size of the row's largest."""
    assert a.shape == b.shape and a.dtype == b.dtype and a.isfinite().all()
    error, size = (a.double() - b.double()).abs().amax(-1), b.double().abs().amax(-1)
    assert (error <= part * size + 1e-6).all(), (error / size).max()


def attributes(model):
    return {name: (type(m), {k: v for k, v in vars(m).items() if not k.startswith("_")}, vars(m).get("quant_method"))
            for name, m in model.named_modules()}


def bound(target, slots=10):
    for layer in target.layers:
        layer.bind_kv_cache(tree.caches_of(layer, slots, DEVICE))
    return [tuple(cache.clone() for cache in layer.kv_cache) for layer in target.layers]


def restored(target, caches):
    for layer, copies in zip(target.layers, caches):
        for cache, copy in zip(layer.kv_cache, copies):
            cache.copy_(copy)


def step(target, x, m):
    """One step of the target; its output and caches."""
    tree.CONTEXT.attn_metadata = {layer.prefix: m for layer in target.layers}
    out = target(x)
    return out, [cache.clone() for layer in target.layers for cache in layer.kv_cache]


def test_the_hook_serves_what_a_worker_has_loaded_and_can_be_taken_back(wrapper, caplog):
    model = tree.K3DSparkForCausalLM(tree.Shape())
    worker = types.SimpleNamespace(model_runner=tree.Runner(torch.nn.Linear(8, 8), model,
                                                            model_config=types.SimpleNamespace(architectures=["Other"])),
                                   load_model=lambda *, load_dummy_weights=False: load_dummy_weights)
    before = dict(vars(wrapper))
    twostep_vllm.register()
    twostep_vllm.register()  # vLLM calls it in each process, perhaps more than once
    assert wrapper(worker).load_model(load_dummy_weights=True) is True
    lines = [r.getMessage() for r in caplog.records]
    assert sum("serves 12 drafter linears" in line for line in lines) == 1, lines
    assert any("kv_b_proj (2): kv_b_proj: the decode runs its absorbed halves" in line for line in lines)
    assert any("draft logits [1024, 256]" in line for line in lines) and "WARNING" not in caplog.text
    assert hasattr(model.model.context_proj.quant_method, "plan")
    twostep_vllm.unregister()
    assert dict(vars(wrapper)) == before


@pytest.mark.parametrize("owned", [False, True])
def test_the_hook_goes_round_a_load_model_of_the_wrapper(wrapper, owned):
    calls = []
    if owned:
        wrapper.load_model = lambda self: calls.append("own")
    twostep_vllm.register()
    wrapper(types.SimpleNamespace(load_model=lambda: calls.append("worker"))).load_model()  # no model_runner: one warning
    assert calls == ["own" if owned else "worker"]
    twostep_vllm.unregister()
    assert ("load_model" in vars(wrapper)) is owned


def test_switched_off_nothing_is_hooked(wrapper, monkeypatch):
    monkeypatch.setenv("TWOSTEP_VLLM", "0")
    twostep_vllm.register()
    assert "load_model" not in vars(wrapper)


@pytest.mark.parametrize("off", ["linears", "logits", "kda"])
def test_a_part_that_is_off_is_left_alone(wrapper, off):
    target, drafter = tree.KimiLinearForCausalLM(tree.Shape(), draft_tokens=3), tree.K3DSparkForCausalLM(tree.Shape())
    served = twostep_vllm.serve(tree.Runner(target, drafter, draft_tokens=3), Switches(**{off: False}))
    assert set(served.parts) == {"linears", "logits", "kda"} - {off} and not served.missing and not served.unserved
    served.remove()


def test_the_drafter_gives_the_same_and_afterwards_is_the_same(wrapper):
    drafter = tree.K3DSparkForCausalLM(tree.Shape())
    x, taps = torch.randn(7, 256).to(BF16), torch.randn(8, 768).to(BF16)

    def all_of():
        hidden = drafter(x)
        return [hidden, drafter.model.context_proj(taps)[0], drafter.model.context_kv_proj(hidden)[0],
                drafter.compute_draft_logits(hidden)]

    before, was = all_of(), attributes(drafter)
    served = twostep_vllm.serve(tree.Runner(torch.nn.Identity(), drafter), Switches(kda=False))
    linears = served.parts["linears"].report
    assert linears.count == 12 and {m for l in linears.layers for m in l.kinds} == {7, 8, 14, 16, 21, 24, 28, 32}
    left = {layer.name.rpartition(".")[2] for layer in linears.layers if not layer.installed}
    assert left == {"kv_b_proj", "markov_w2", "proj"}
    assert served.parts["logits"].kinds == {7: KIND, 14: KIND, 21: KIND, 28: KIND}
    for ours, theirs in zip(all_of(), before):
        close(ours, theirs)
    stats = drafter.model.context_proj.quant_method.plan.stats()
    assert stats["cpu_runs"] + stats["warp_runs"] + stats["cublas_runs"] > 0 and stats["late_compiles"] == 0
    served.remove()
    assert attributes(drafter) == was and all(torch.equal(a, b) for a, b in zip(all_of(), before))


def test_a_quantised_drafter_is_left_alone_with_the_reason(wrapper, caplog):
    drafter = tree.K3DSparkForCausalLM(tree.Shape())
    for layer in drafter.modules():
        if isinstance(layer, tree.Linear):
            layer.quant_method = tree.QuantizedMethod()
    served = twostep_vllm.serve(tree.Runner(torch.nn.Identity(), drafter), Switches(logits=False, kda=False))
    assert not served.parts and "QuantizedMethod" in served.unserved["linears"] and "serves nothing" in caplog.text


def test_another_drafter_is_left_alone_with_the_reason(wrapper, caplog):
    runner = tree.Runner(torch.nn.Identity(), torch.nn.Linear(8, 8))
    served = twostep_vllm.serve(runner, Switches(kda=False))
    why = "the drafter is a Linear; served is K3DSparkForCausalLM"
    assert served.unserved == {"linears": why, "logits": why}
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        f"twostep: vLLM's own code runs: linears, logits: {why}"]
    runner.vllm_config.speculative_config.method = "eagle"
    served = twostep_vllm.serve(runner, Switches(kda=False))
    assert not served.parts and not served.unserved and not served.missing


def _made_or_not(rank, path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    group = types.SimpleNamespace(world_size=2, cpu_group=torch.distributed.group.WORLD)
    removed = []

    def make(fails):
        if fails:
            raise RuntimeError("no memory")
        return types.SimpleNamespace(remove=lambda: removed.append(rank))

    try:
        assert drafting.on_all_ranks(group, lambda: make(False)) is not None
        with pytest.raises(Unserved, match="rank 1: no memory"):
            drafting.on_all_ranks(group, lambda: make(rank == 1))
    finally:
        torch.distributed.destroy_process_group()
    return removed


def test_what_one_rank_cannot_serve_no_rank_serves(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pending = [pool.apply_async(_made_or_not, (rank, str(tmp_path / "group"))) for rank in range(2)]
        assert [result.get(timeout=300) for result in pending] == [[0], []]


def test_a_head_of_two_ranks_is_gathered_and_cut(wrapper, monkeypatch):
    shape = tree.Shape(vocab=2000)  # of two shards of 1024 rows
    drafter, hidden = tree.K3DSparkForCausalLM(shape), torch.randn(7, 256).to(BF16)
    drafter.lm_head.tp_size = 2
    whole = torch.nn.functional.linear(hidden, drafter.lm_head.weight).repeat(1, 2)[:, :2000]
    runner = tree.Runner(torch.nn.Identity(), drafter)
    for scale in (0.5, 1.0):
        drafter.logits_processor.scale = scale
        served = twostep_vllm.serve(runner, Switches(linears=False, kda=False))
        assert "gathered by vLLM's all-gather" in str(served.parts["logits"])
        close(drafter.compute_draft_logits(hidden), whole * scale)
        assert drafter.compute_draft_logits(hidden[:0]).shape == (0, 2000)
        served.remove()

    checks, calls = [], []

    class LogitsGather:
        def __init__(self, group, width, rows):
            assert (width, rows) == (1024, 64)
            self.mailbox = types.SimpleNamespace(check=lambda: checks.append(1))

        def gather_logits(self, logits):
            calls.append(len(logits))
            return None if len(logits) > 7 else torch.cat((logits, logits), 1)

    monkeypatch.setattr(drafting.twostep.torch, "LogitsGather", LogitsGather, raising=False)
    served = twostep_vllm.serve(runner, Switches(linears=False, kda=False))
    assert ("the head is not on a GPU" if DEVICE == "cpu" else "propose is missing") in str(served.parts["logits"])
    served.remove()
    gather = Gather(2, lambda shard: torch.cat((shard, shard), 1), LogitsGather(None, 1024, 64))
    speculator = type("Speculator", (), {"propose": staticmethod(lambda step: step + 1)})()
    logits = drafting.Logits(drafter, (7,), gather, speculator=speculator)
    close(drafter.compute_draft_logits(hidden), whole)
    assert not calls  # eager steps are vLLM's
    monkeypatch.setattr(drafting, "captures", lambda shard: True)
    close(drafter.compute_draft_logits(hidden), whole)
    close(drafter.compute_draft_logits(hidden.repeat(2, 1)), whole.repeat(2, 1))  # not taken: vLLM's
    assert calls == [7, 14] and speculator.propose(1) == 2 and checks == [1]
    logits.remove()
    assert "propose" not in vars(speculator) and "compute_draft_logits" not in vars(drafter)


@pytest.mark.parametrize("dim_first", [False, True])
def test_decode_and_verify_give_the_same_caches_and_rows(wrapper, monkeypatch, dim_first):
    monkeypatch.setattr(tree.KimiK3DeltaAttention, "dim_first", dim_first)
    target = tree.KimiLinearForCausalLM(tree.Shape(), draft_tokens=3)
    runner = tree.Runner(target, tree.K3DSparkForCausalLM(tree.Shape()), draft_tokens=3, sizes=(1, 2, 4, 8))
    start, was = bound(target), attributes(target)
    table = torch.zeros(4, 7, dtype=torch.int32)  # a wider table: slots are a slice of it
    table[:3, :4] = ids([1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 0, 0])
    steps = {
        "decode": (2, tree.decode(ids([1, 9], [5, 9])[:, 0])),
        "decode, padded": (4, tree.decode(ids(1, 5, 0, 0), rows=4)),
        "verify": (8, tree.verify(table[:2, :4], ids(3, 1))),
        "verify, padded": (12, tree.verify(table[:3, :4], ids(2, 4, 1), num_spec_decodes=2, num_spec_decode_tokens=8,
                                           num_actual_tokens=12)),
        "one token after a verify step": (2, tree.verify(table[:2, :4], ids(2, 1), tokens=1)),
    }
    inputs = {name: torch.randn(rows, 256).to(BF16) for name, (rows, _) in steps.items()}
    wanted = {}
    for name, (rows, m) in steps.items():
        restored(target, start)
        wanted[name] = step(target, inputs[name], m)
    served = twostep_vllm.serve(runner, Switches(linears=False, logits=False))
    layers = served.parts["kda"].layers
    assert len(layers) == 2 and served.parts["kda"].keys == [1, 2, 4, (1, 4), (2, 4)]
    for name, (rows, m) in steps.items():
        restored(target, start)
        out, caches = step(target, inputs[name], m)
        close(out, wanted[name][0])
        for ours, theirs in zip(caches, wanted[name][1]):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2 if ours.dtype == torch.float32 else 3e-2)
    # (3, 4) is no key: that step, alone, is vLLM's.
    assert [layer.steps for layer in layers.values()] == 2 * [{"twostep": 4, "vllm": 1}]
    served.remove()
    assert attributes(target) == was and runner.reset_lora_state.__func__ is tree.Runner.reset_lora_state
    restored(target, start)
    out, caches = step(target, inputs["verify"], steps["verify"][1])
    assert torch.equal(out, wanted["verify"][0]) and all(torch.equal(a, b) for a, b in zip(caches, wanted["verify"][1]))


def test_steps_that_are_not_all_decode_or_all_verify_are_vllms(wrapper):
    target = tree.KimiLinearForCausalLM(tree.Shape(), layers=1, draft_tokens=3)
    runner = tree.Runner(target, tree.K3DSparkForCausalLM(tree.Shape()), draft_tokens=3)
    bound(target)
    layer = twostep_vllm.serve(runner, Switches(linears=False, logits=False)).parts["kda"].layers["layers.0"]
    slots, x = ids([1, 2, 3, 4], [5, 6, 7, 8]), torch.zeros(8, 256, dtype=BF16)

    def served(m, rows=8, **context):
        tree.CONTEXT.attn_metadata = {"layers.0.self_attn": m}
        return layer._step(x[:rows]) is not None

    one = ids(1, 1)
    assert served(tree.verify(slots, one)) and served(tree.decode(ids(1, 5)), 2)
    assert served(tree.verify(slots, one, tokens=1), 2)
    assert not served(None)
    assert not served(tree.decode(ids(1, 5), num_prefills=1), 2)
    assert not served(tree.decode(ids(1, 5), num_decodes=0), 2)
    assert not served(tree.verify(slots, one, num_decodes=1))
    assert not served(tree.verify(slots, one, num_spec_decode_tokens=7, num_actual_tokens=7))  # ragged
    assert not served(tree.verify(slots, one, tokens=2), 4)  # two of four: 1 + 3 has the same sum
    assert not served(tree.verify(ids([1, 2, 3, 4, 9], [5, 6, 7, 8, 9]), one, tokens=4))  # four of five, likewise
    assert not served(tree.verify(slots, one, num_actual_tokens=12))  # more rows than slots
    tree.CONTEXT.attn_metadata = [{}]  # microbatches
    assert layer._step(x) is None
    layer.layer.kv_cache = tuple(layer.layer.kv_cache)[:1] + (torch.zeros(1),)  # not the caches that were bound
    assert not served(tree.verify(slots, one))


def test_under_adaptive_verification_verify_is_vllms(wrapper):
    target = tree.KimiLinearForCausalLM(tree.Shape(), layers=1, draft_tokens=3)
    runner = tree.Runner(target, tree.K3DSparkForCausalLM(tree.Shape()), draft_tokens=3)
    runner.vllm_config.speculative_config.enable_adaptive_verification = True
    bound(target)
    part = twostep_vllm.serve(runner, Switches(linears=False, logits=False)).parts["kda"]
    assert part.keys == [1, 2, 3, 4]
    tree.CONTEXT.attn_metadata = {"layers.0.self_attn": tree.verify(ids([1, 2, 3, 4]), ids(1), tokens=1)}
    assert part.layers["layers.0"]._step(torch.zeros(1, 256, dtype=BF16)) is None


def test_replaced_weights_are_followed(wrapper):
    target = tree.KimiLinearForCausalLM(tree.Shape(), layers=1)
    runner = tree.Runner(target)
    start, layer = bound(target), target.layers[0]
    x, m = torch.randn(2, 256).to(BF16), tree.decode(ids(1, 2))
    served = twostep_vllm.serve(runner)
    step(target, x, m)
    layer.conv1d.weight.mul_(-2)
    layer.o_norm.weight.mul_(3)
    runner.reset_lora_state()
    assert runner.lora_resets == 1
    restored(target, start)
    ours = step(target, x, m)[0]
    assert served.parts["kda"].layers["layers.0"].steps == {"twostep": 2}
    served.remove()
    restored(target, start)
    close(ours, step(target, x, m)[0])


def test_caches_that_cannot_be_prepared_are_vllms_with_one_warning(wrapper, caplog):
    target = tree.KimiLinearForCausalLM(tree.Shape(), layers=1)
    served = twostep_vllm.serve(tree.Runner(target))
    layer = target.layers[0]
    pair = tree.caches_of(layer, 4, DEVICE)
    for _ in range(2):
        layer.bind_kv_cache((pair[0], pair[1].to(BF16)))
    assert sum("run on vLLM's kernels" in r.getMessage() for r in caplog.records) == 1
    layer.bind_kv_cache(pair)  # others are prepared again
    step(target, torch.randn(1, 256).to(BF16), tree.decode(ids(1)))
    assert served.parts["kda"].layers["layers.0"].steps == {"twostep": 1}


def test_a_runner_that_loads_again_is_served_anew(wrapper):
    drafter = tree.K3DSparkForCausalLM(tree.Shape())
    first, second = (tree.KimiLinearForCausalLM(tree.Shape(), draft_tokens=3) for _ in range(2))
    runner = tree.Runner(first, drafter, draft_tokens=3)
    was = [attributes(model) for model in (first, second, drafter)]
    twostep_vllm.serve(runner)
    runner.target = second
    served = twostep_vllm.serve(runner)
    assert attributes(first) == was[0] and set(served.parts) == {"linears", "logits", "kda"} and runner._twostep is served
    twostep_vllm.serve(runner).remove()
    assert [attributes(model) for model in (first, second, drafter)] == was
    assert "_twostep" not in vars(runner) and "reset_lora_state" not in vars(runner)


def test_moved_metadata_is_one_warning_and_the_step_is_vllms(wrapper, caplog):
    target = tree.KimiLinearForCausalLM(tree.Shape())
    start, x, m = bound(target), torch.randn(1, 256).to(BF16), tree.decode(ids(1))
    wanted = step(target, x, m)[0]
    layers = twostep_vllm.serve(tree.Runner(target)).parts["kda"].layers
    del m.num_prefills
    for _ in range(2):
        restored(target, start)
        assert torch.equal(step(target, x, m)[0], wanted)
    assert sum("no attribute 'num_prefills'" in r.getMessage() for r in caplog.records) == 1
    assert [layer.steps for layer in layers.values()] == 2 * [{"vllm": 2}]


def test_a_step_that_is_refused_is_vllms(wrapper, caplog):
    target = tree.KimiLinearForCausalLM(tree.Shape(), layers=1)
    start, x, m = bound(target), torch.randn(1, 256).to(BF16), tree.decode(ids(1).long())  # slots are int32
    wanted = step(target, x, m)
    layers = twostep_vllm.serve(tree.Runner(target)).parts["kda"].layers
    restored(target, start)
    ours = step(target, x, m)
    assert torch.equal(ours[0], wanted[0]) and all(torch.equal(a, b) for a, b in zip(ours[1], wanted[1]))
    assert layers["layers.0"].steps == {"vllm": 1} and "slots" in caplog.records[-1].getMessage()


def test_another_signature_is_missed_and_nothing_is_half_routed(wrapper, caplog):
    target = tree.KimiLinearForCausalLM(tree.Shape())
    target.layers[1].forward = lambda hidden_states, positions, output: None
    served = twostep_vllm.serve(tree.Runner(target))
    assert list(served.parts["kda"].layers) == ["layers.0"] and "forward(hidden_states, positions)" in caplog.text
    served.remove()
    target.layers[0].get_state_shape = lambda: ()
    was = attributes(target)
    served = twostep_vllm.serve(tree.Runner(target))
    assert "forward(hidden_states, positions)" in served.missing["kda"] and attributes(target) == was


@pytest.mark.parametrize("change, reason", [
    (dict(use_recoverssm=True), "--use-replayssm"),
    (dict(gemm_rs_ar=object()), "fused with a reduction"),
    (dict(get_state_dtype=lambda: (BF16, BF16)), "served are bfloat16"),
    (dict(gate_lower_bound=1.0), "gate_lower_bound"),
])
def test_layers_that_the_core_does_not_compute_are_named(wrapper, change, reason):
    target = tree.KimiLinearForCausalLM(tree.Shape())
    for name, value in change.items():
        setattr(target.layers[0], name, value)
    part = twostep_vllm.serve(tree.Runner(target)).parts["kda"]
    assert list(part.layers) == ["layers.1"] and reason in part.skipped()[0]
    for layer in target.layers:
        for name, value in change.items():
            setattr(layer, name, value)
    part.remove()
    assert reason in twostep_vllm.serve(tree.Runner(target)).unserved["kda"]


def test_adapters_and_exact_batches_keep_vllms_own(wrapper):
    target, drafter = tree.KimiLinearForCausalLM(tree.Shape()), tree.K3DSparkForCausalLM(tree.Shape())
    served = twostep_vllm.serve(tree.Runner(target, lora_config=object()))
    assert "LoRA" in served.unserved["kda"]
    sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = True
    served = twostep_vllm.serve(tree.Runner(target, drafter))
    assert not served.parts and len(served.unserved) == 3
    assert all("VLLM_BATCH_INVARIANT" in why for why in served.unserved.values())


@pytest.mark.parametrize("gone, part", [
    ("vllm.forward_context.get_forward_context", "kda"), ("vllm.distributed.get_tp_group", "linears"),
    ("vllm.envs.VLLM_BATCH_INVARIANT", "logits")])
def test_a_moved_module_is_one_warning_that_names_it(monkeypatch, caplog, gone, part):
    tree.framework(monkeypatch, without=(gone,))
    target, drafter = tree.KimiLinearForCausalLM(tree.Shape()), tree.K3DSparkForCausalLM(tree.Shape())
    served = twostep_vllm.serve(tree.Runner(target, drafter))
    assert served.missing[part] == gone and part not in served.parts
    assert [r.levelname for r in caplog.records if gone in r.getMessage()] == ["WARNING"]
    served.remove()


@pytest.mark.parametrize("owner, name, part", [
    ("runner", "get_model", "kda"), ("runner", "speculator", "linears"), ("drafter", "logits_processor", "logits"),
    ("layer", "in_proj_qkvgfab", "kda"), ("layer", "get_state_shape", "kda"), ("runner", "reset_lora_state", "kda")])
def test_a_moved_attribute_leaves_its_part_to_vllm(monkeypatch, caplog, owner, name, part):
    tree.framework(monkeypatch)
    target, drafter = tree.KimiLinearForCausalLM(tree.Shape(), layers=1), tree.K3DSparkForCausalLM(tree.Shape())
    runner = tree.Runner(target, drafter)
    what = {"runner": runner, "drafter": drafter, "layer": target.layers[0]}[owner]
    if name in vars(what) or name in getattr(what, "_modules", ()):
        delattr(what, name)
    else:
        monkeypatch.delattr(type(what), name)
    served = twostep_vllm.serve(runner)
    assert part not in served.parts and any(name in r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    served.remove()


def test_a_renamed_class_of_the_kimi_family_is_missed(wrapper):
    served = twostep_vllm.serve(tree.Runner(torch.nn.Identity()))
    assert served.missing["kda"] == "a KimiK3DeltaAttention in Identity"
    other = types.SimpleNamespace(architectures=["LlamaForCausalLM"])
    served = twostep_vllm.serve(tree.Runner(torch.nn.Identity(), model_config=other))
    assert not served.missing and not served.parts and not served.unserved


def test_row_counts_and_keys():
    assert rows_of((7, 8), 3) == [7, 8, 14, 16, 21, 24]
    assert rows_of((7, 8), 1000)[-2:] == [63, 64]
    assert keys_of((), 3, 0) == [1, 2, 3] and keys_of((), 2, 7) == [1, 2, (1, 8), (2, 8)]
    assert keys_of((1, 2, 4, 8, 16, 256), 1000, 0) == [1, 2, 4, 8, 16]
    assert keys_of((1, 2, 4, 8, 16, 24), 16, 7) == [1, 2, 4, 8, 16, (1, 8), (2, 8), (3, 8)]
    assert keys_of((8, 16), 16, 9) == [8, 16]  # ten tokens are more than the core takes
