"""DraftLinear, install and uninstall, draft_logits, over torch: on the CPU, or on TWOSTEP_TEST_DEVICE (cuda:0)."""

import copy
import gc
import os
import pickle
import sys
import types
import warnings
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import twostep  # noqa: E402
import twostep.torch as routed  # noqa: E402

BF16 = torch.bfloat16
DEVICE = os.environ.get("TWOSTEP_TEST_DEVICE", "cpu")
KIND = "cpu" if DEVICE == "cpu" else "warp"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(7)
    with torch.no_grad(), torch.device(DEVICE):
        yield


def linear(k, n, **options):
    return torch.nn.Linear(k, n, **{"bias": False, "dtype": BF16, **options}).requires_grad_(False)


def integers(*shape):
    return torch.randint(-4, 5, shape).to(BF16)


def runs(plan):
    return sum(plan.stats()[name] for name in ("cpu_runs", "warp_runs", "cublas_runs"))


def exact(x, weight):
    return (x.double() @ weight.double().t()).to(BF16)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = linear(64, 256), linear(128, 64)
        for layer in (self.gate_up, self.down):
            layer.weight.copy_(integers(*layer.weight.shape))

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down((torch.sign(gate) * up.clamp(-4, 4)))


# ---- DraftGemm on torch tensors


def test_run_takes_tensors_as_they_are():
    weight, wide = integers(48, 64), integers(5, 100)
    x = wide[:, 8:72]
    out = torch.full((5, 60), float("nan"), dtype=BF16)
    gemm = twostep.DraftGemm(weight)
    assert gemm.prepare(5) == KIND
    assert gemm.run(x, out[:, 4:52]).shape == (5, 48)
    assert same(out[:, 4:52].contiguous(), exact(x, weight)) and out[:, :4].isnan().all() and out[:, 52:].isnan().all()


def test_a_transposed_weight_is_served():
    weight, x, out = integers(64, 48), integers(3, 64), torch.empty(3, 48, dtype=BF16)
    twostep.DraftGemm(weight.t()).run(x, out)
    assert same(out, exact(x, weight.t()))


def test_run_refuses(refuses):
    gemm = twostep.DraftGemm(integers(48, 64))
    x, out = integers(2, 64), torch.zeros(2, 48, dtype=BF16)
    with refuses("unsupported"):
        gemm.run(x.float(), out)
    with refuses("unsupported"):
        gemm.run(x.to(torch.int8), out)
    with refuses("wrong_device"):
        gemm.run(x.to("meta"), out)
    with refuses("bad_layout"):
        gemm.run(integers(2, 128)[:, ::2], out)
    with refuses("bad_layout"):
        gemm.run(integers(1, 64).expand(2, 64), out)
    with refuses("bad_layout"):
        gemm.run(x, torch.zeros(1, 48, dtype=BF16).expand(2, 48))
    with refuses("invalid_argument"):
        gemm.run(x[0], out)
    with refuses("invalid_argument"):
        gemm.run(integers(1, 1, 1, 1, 64), out)
    with torch.enable_grad(), refuses("invalid_argument") as refusal:
        gemm.run(x.requires_grad_(), out)
    assert "requires grad" in refusal.error.value
    gemm.run(x, out)  # outside autograd it is fine
    with torch.enable_grad():
        twostep.DraftGemm(torch.nn.Linear(64, 48, bias=False, dtype=BF16).weight)  # a weight may ask for one


def test_dlpack_producers_that_are_not_torch():
    class Producer:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    weight, x, out = integers(48, 64), integers(3, 64), torch.zeros(3, 48, dtype=BF16)
    twostep.DraftGemm(Producer(weight)).run(Producer(x), Producer(out))
    assert same(out, exact(x, weight))


def test_tags_of_tensors(refuses):
    weight, x, out = integers(48, 64), integers(3, 64), torch.zeros(3, 48, dtype=BF16)
    twostep.DraftGemm(twostep.view(weight.view(torch.uint16), "bf16")).run(x, out)
    assert same(out, exact(x, weight)) and twostep.view(x).dtype == "BF16"
    with refuses("invalid_argument"):
        twostep.view(x, "f32")


def test_kda_takes_torch_tensors():
    heads, d, stride = 1, 128, twostep.kda_row_stride(1)
    layer = types.SimpleNamespace(
        num_heads=heads, head_dim=128, allow_neg_eigval=False,
        conv1d=types.SimpleNamespace(weight=torch.randn(3 * d, 1, 4), bias=None),
        f_b_proj=types.SimpleNamespace(weight=torch.randn(d, 128).to(BF16)), A_log=torch.zeros(1, 1, heads, 1),
        dt_bias=torch.zeros(heads, 128), o_norm=types.SimpleNamespace(weight=torch.ones(128, dtype=BF16), eps=1e-5),
        gate_lower_bound=-5.0)
    core = routed.PreparedKda.from_module(layer, {2: stride})
    conv, state = torch.zeros(3, 3, 3 * d, dtype=BF16), torch.zeros(3, heads, 128, 128)
    core.prepare((conv, state))
    out = torch.full((2, d), float("nan"), dtype=BF16)
    assert core.run(torch.randn(2, stride).to(BF16), out, caches=(conv, state),
                    slots=torch.tensor([1, 2], dtype=torch.int32)) is out
    assert out.isfinite().all() and state[1:].abs().sum() > 0 and not state[0].any()


# ---- install, DraftLinear, uninstall


def test_install_is_idempotent_and_uninstall_leaves_nothing():
    model, x = Mlp(), integers(4, 64)
    before, state = model(x), {name: dict(vars(layer)) for name, layer in model.named_modules()}
    report = routed.install(model, rows=(4, 100))
    assert (report.count, report.new, report.bytes) == (2, 2, 2 * (256 * 64 + 64 * 128))
    line = report.layers[0]
    assert (line.name, line.n, line.k, line.bytes, line.installed) == ("gate_up", 256, 64, 2 * 256 * 64, True)
    assert line.kinds == {4: KIND, 100: "original"} and bool(line.why[4]) == (KIND == "cpu") and "64" in line.why[100]
    assert "2 linears routed" in str(report)
    again = routed.install(model)
    assert (again.count, again.new) == (2, 0)
    assert same(model(x), before) and isinstance(model.gate_up, torch.nn.Linear)
    assert runs(model.gate_up._twostep.plan) == 1
    done = routed.uninstall(model)
    assert (done.count, done.left) == (2, [])
    assert {name: dict(vars(layer)) for name, layer in model.named_modules()} == state
    assert type(model.gate_up) is torch.nn.Linear
    assert routed.uninstall(model).count == 0


def test_what_is_not_routed_says_why():
    model = torch.nn.ModuleDict(dict(
        a=linear(64, 64), kv_b_proj=linear(64, 64), bias=linear(64, 64, bias=True), single=linear(64, 64, dtype=torch.float32),
        own=type("Own", (torch.nn.Linear,), {})(64, 64, bias=False, dtype=BF16), norm=torch.nn.LayerNorm(64)))
    model["patched"] = linear(64, 64)
    model["patched"].forward = lambda x: x
    report = routed.install(model)
    reasons = {line.name: line.reason for line in report.layers}
    assert report.count == 1 and reasons["a"] == "" and "norm" not in reasons
    assert "kv_b_proj" in reasons["kv_b_proj"] and "bias" in reasons["bias"] and "float32" in reasons["single"]
    assert "Own" in reasons["own"] and "forward" in reasons["patched"]


def test_inputs_that_go_to_the_original_method():
    layer = linear(64, 48)
    routed.install(layer)
    x = integers(3, 64)
    method, plan = layer._twostep, layer._twostep.plan
    base = runs(plan)
    assert same(layer(x), exact(x, layer.weight)) and runs(plan) == base + 1
    with pytest.raises(RuntimeError):
        layer(x.float())
    with pytest.raises(RuntimeError):
        layer(integers(3, 32))
    assert layer(x.to("meta")).device.type == "meta"  # a shape, from the operator's fake version
    assert same(layer(x[0]), exact(x[:1], layer.weight)[0])  # rank 1
    bias = integers(48)
    assert same(method.apply(layer, x, bias), torch.nn.functional.linear(x, layer.weight, bias))
    assert layer(integers(65, 64)).shape == (65, 48)
    assert runs(plan) == base + 1
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        layer(leaf).sum().backward()
        assert leaf.grad is not None
        layer.weight.requires_grad_()
        assert layer(x).requires_grad
    layer.weight.requires_grad_(False)
    assert runs(plan) == base + 1


def test_layouts_of_x():
    layer, wide = linear(64, 48), integers(6, 200)
    routed.install(layer)
    plan = layer._twostep.plan
    for count, x in enumerate((
        wide[:, :64], wide[:1, 8:72], wide[:, :128:2], integers(1, 64).expand(4, 64), integers(2, 3, 64),
        integers(2, 6, 64)[:, ::2], integers(2, 2, 2, 64), integers(64, 3).t(), integers(0, 64), integers(2, 0, 64))):
        out = layer(x)
        assert same(out, exact(x.reshape(-1, 64), layer.weight).view(*x.shape[:-1], 48)) and out.is_contiguous()
        assert runs(plan) == count + 1 or x.numel() == 0


def test_weights_that_change():
    layer, x = linear(64, 48), integers(3, 64)
    routed.install(layer, rows=(3,))
    plan = layer._twostep.plan
    layer.weight.copy_(integers(48, 64))  # in place
    assert same(layer(x), exact(x, layer.weight)) and plan.stats()["rebinds"] == 0
    layer.weight.data = integers(48, 64)  # the same tensor object elsewhere
    assert same(layer(x), exact(x, layer.weight)) and plan.stats()["rebinds"] == 1
    layer.weight = torch.nn.Parameter(integers(48, 64), requires_grad=False)  # another object
    assert same(layer(x), exact(x, layer.weight)) and layer._twostep.plan is plan
    layer.weight = torch.nn.Parameter(integers(80, 64), requires_grad=False)  # another shape: a new plan
    assert same(layer(x), exact(x, layer.weight)) and layer._twostep.plan is not plan
    layer.weight = torch.nn.Parameter(torch.randn(80, 64), requires_grad=False)  # another dtype: the original
    assert layer(x.float()).dtype == torch.float32
    layer.weight = torch.nn.Parameter(integers(48, 64), requires_grad=False)
    assert same(layer(x), exact(x, layer.weight))


def test_a_weight_that_no_kind_serves_warns_once():
    layer, x = linear(64, 48), integers(3, 64)
    routed.install(layer)
    layer.weight = torch.nn.Parameter(integers(48, 128)[:, ::2], requires_grad=False)
    with pytest.warns(RuntimeWarning, match="its own method"):
        assert same(layer(x), torch.nn.functional.linear(x, layer.weight))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)


def test_shared_layers_and_weights():
    tree = torch.nn.ModuleList([linear(64, 48), linear(64, 48)])
    tree.append(tree[0])  # the same layer twice
    tree[1].weight = tree[0].weight
    report = routed.install(tree)
    assert (report.count, report.bytes) == (2, 2 * 48 * 64)
    x, shared = integers(2, 64), tree[0].weight
    tree[1].weight = torch.nn.Parameter(integers(48, 64), requires_grad=False)
    for layer in tree:
        assert same(layer(x), exact(x, layer.weight))
    assert tree[0].weight is shared and routed.install(tree).new == 0


def test_tied_embeddings():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(48, 64, dtype=BF16).requires_grad_(False)
            self.lm_head = linear(64, 48)
            self.lm_head.weight = self.embed.weight

    model, x = Tied(), integers(2, 64)
    routed.install(model, rows=(2,))
    model.embed.weight.copy_(integers(48, 64))
    assert same(model.lm_head(x), exact(x, model.embed.weight))
    assert model.lm_head.weight is model.embed.weight


class Adapter(torch.nn.Module):
    """A LoRA of zeros around a linear."""

    def __init__(self, base):
        super().__init__()
        self.base, self.a, self.b = base, linear(64, 8), linear(8, 48)
        self.b.weight.zero_()

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize("before", [True, False])
def test_adapters(before):
    layer, x = linear(64, 48), integers(3, 64)
    wanted = exact(x, layer.weight)
    model = torch.nn.ModuleDict({"layer": layer})
    if before:
        routed.install(model)
    model["layer"] = Adapter(layer)
    if not before:
        routed.install(model)
    assert same(model["layer"](x), wanted)
    assert runs(layer._twostep.plan) == 1
    routed.uninstall(model)
    assert type(layer) is torch.nn.Linear and same(model["layer"](x), wanted)


def test_copies_and_pickles_have_their_own_plans():
    model, x = Mlp(), integers(4, 64)
    wanted = model(x)
    routed.install(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.gate_up.weight.mul_(2)
        assert same(model(x), wanted)
        assert twin.gate_up._twostep is not model.gate_up._twostep
        assert same(twin.gate_up(x), exact(x, twin.gate_up.weight))
        assert routed.uninstall(twin).count == 2 and type(twin.gate_up) is torch.nn.Linear


def test_copies_keep_the_options():
    model = Mlp()
    routed.install(model, options=twostep.Options(strict=True))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.gate_up._twostep.options == twostep.Options(strict=True)


def test_a_second_install_follows_its_options():
    model = Mlp()
    first = routed.install(model)
    second = routed.install(model, rows=(4,), options=twostep.Options(strict=True))
    assert (first.count, second.count, second.new) == (2, 2, 0)
    assert model.gate_up._twostep.options.strict
    x = integers(4, 64)
    assert same(model.gate_up(x), exact(x, model.gate_up.weight))


def test_a_wrapped_forward_is_left_and_still_runs():
    model, x = Mlp(), integers(4, 64)
    routed.install(model)
    layer, inner = model.gate_up, model.gate_up.forward
    layer.forward = lambda value: inner(value) * 2
    report = routed.uninstall(model)
    assert (report.count, report.left) == (1, ["gate_up"])
    assert same(layer(x), exact(x, layer.weight) * 2)
    del layer.forward
    assert routed.uninstall(model).count == 1 and type(layer) is torch.nn.Linear
    assert same(inner(x), exact(x, layer.weight))  # a bound method that someone kept


def test_transforms_go_to_the_original():
    layer = torch.nn.Sequential(linear(64, 32))
    x, tangent = integers(4, 64), integers(4, 64)
    routed.install(layer)
    before = runs(layer[0]._twostep.plan) if layer[0]._twostep.plan else 0
    with torch.autograd.forward_ad.dual_level():
        dual = layer(torch.autograd.forward_ad.make_dual(x, tangent))
        assert same(torch.autograd.forward_ad.unpack_dual(dual).tangent, torch.nn.functional.linear(tangent, layer[0].weight))
    assert torch.func.vmap(layer)(x.unsqueeze(1)).shape == (4, 1, 32)
    with torch.autocast(DEVICE.split(":")[0], dtype=torch.float16):
        assert layer(x).dtype is torch.float16
    plan = layer[0]._twostep.plan
    assert (runs(plan) if plan else 0) == before


def test_an_uninstalled_tree_is_freed():
    model = Mlp()
    routed.install(model)
    watch = weakref.ref(model.gate_up)
    plan = weakref.ref(model.gate_up._twostep)
    del model
    gc.collect()
    assert watch() is None and plan() is None


def test_strict_skips_nothing_on_the_cpu_and_rows_do_not_depend_on_m():
    model = torch.nn.Sequential(linear(192, 128))
    report = routed.install(model, rows=(1, 64), options=twostep.Options(strict=True))
    assert report.count == 1
    x = torch.randn(64, 192).to(BF16)
    whole = model(x)
    for m in (1, 7, 33):
        assert same(model(x[:m]), whole[:m].contiguous())


# ---- A framework whose linears have methods


class _Unquantised:
    def create_weights(self, layer, n):
        layer.made = n

    def process_weights_after_loading(self, layer):
        layer.loaded = True

    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


@pytest.fixture
def framework(monkeypatch):
    """vLLM's classes, as far as install looks at them."""
    for name, cls in (("linear", "UnquantizedLinearMethod"), ("vocab_parallel_embedding", "UnquantizedEmbeddingMethod")):
        module = types.ModuleType(name)
        setattr(module, cls, type(cls, (_Unquantised,), {}))
        monkeypatch.setitem(sys.modules, f"vllm.model_executor.layers.{name}", module)
    layers = sys.modules["vllm.model_executor.layers.linear"]

    class Layer(torch.nn.Module):
        def __init__(self, k, n, method=layers.UnquantizedLinearMethod):
            super().__init__()
            self.weight = torch.nn.Parameter(integers(n, k), requires_grad=False)
            self.quant_method = method()

        def forward(self, x):
            return self.quant_method.apply(self, x), None

    return types.SimpleNamespace(Layer=Layer, method=layers.UnquantizedLinearMethod)


def test_methods_of_a_framework(framework):
    other = type("Fp8LinearMethod", (framework.method,), {})
    model = torch.nn.ModuleDict({"a": framework.Layer(64, 48), "b": framework.Layer(64, 48, other)})
    original, x = model["a"].quant_method, integers(3, 64)
    report = routed.install(model, rows=(3,))
    assert report.count == 1 and "Fp8LinearMethod" in report.layers[1].reason
    method = model["a"].quant_method
    assert isinstance(method, framework.method) and isinstance(method, routed.DraftLinear)
    assert same(model["a"](x)[0], exact(x, model["a"].weight)) and runs(method.plan) == 1
    # All else reaches the original: its hooks, its attributes, both ways.
    method.create_weights(model["a"], 5), method.process_weights_after_loading(model["a"])
    assert model["a"].made == 5 and model["a"].loaded
    method.mark = 3
    original.other = 4
    assert original.mark == 3 and method.other == 4 and method.create_weights == original.create_weights
    twin = copy.deepcopy(model)
    assert isinstance(twin["a"].quant_method, framework.method) and same(twin["a"](x)[0], model["a"](x)[0])
    routed.uninstall(model)
    assert model["a"].quant_method is original


def test_a_method_that_someone_replaced_since_is_left(framework):
    model = torch.nn.ModuleDict({"a": framework.Layer(64, 48)})
    routed.install(model)
    mine = model["a"].quant_method = framework.method()
    report = routed.uninstall(model)
    assert (report.count, report.left) == (0, ["a"]) and model["a"].quant_method is mine


# ---- Tracing


def test_fake_tensors_and_symbolic_rows_give_one_operator():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    layer = linear(64, 48)
    routed.install(layer)
    for mode in ("fake", "symbolic", "real"):
        graph = make_fx(lambda x: layer(x), tracing_mode=mode, _allow_non_fake_inputs=True)(integers(5, 64)).graph
        ours = [node for node in graph.nodes if "twostep" in str(node.target)]
        assert len(ours) == 1
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 3, 128, dtype=BF16)[..., ::2]
        out = layer(x)
        assert out.shape == (2, 3, 48) and out.is_contiguous() and out.dtype == BF16


def test_compiled_and_exported_have_the_bits_of_eager():
    model = Mlp()
    routed.install(model)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    exported = torch.export.export(model, (integers(4, 64),),
                                   dynamic_shapes=({0: torch.export.Dim("m", min=2, max=128)},)).module()
    for m in (4, 7, 64, 100):
        x = integers(m, 64)
        wanted = model(x)
        assert same(compiled(x), wanted) and same(exported(x), wanted)
    layer = model.gate_up  # in a graph, too, the weight is that of the call
    x = integers(4, 64)
    layer.weight.data = integers(256, 64)
    assert same(torch.compile(layer, backend="aot_eager")(x), exact(x, layer.weight))


def test_layers_share_a_compiled_function():
    model = torch.nn.ModuleList([linear(64, 64) for _ in range(12)])
    routed.install(model)
    torch._dynamo.reset()
    step = torch.compile(lambda layer, x: layer(x), backend="aot_eager", fullgraph=True)
    for layer in model:
        x = integers(3, 64)
        assert same(step(layer, x), exact(x, layer.weight))


def test_the_operators_declare_what_they_do():
    weight, x = integers(48, 64), integers(3, 64)
    torch.library.opcheck(torch.ops.twostep.linear, (x, weight))
    out = torch.empty(3, 48, dtype=BF16)
    torch.library.opcheck(torch.ops.twostep.linear_out, (x, weight), {"out": out})
    torch.ops.twostep.linear_out(x, weight, out=out)
    assert same(out, exact(x, weight))


def test_a_traced_call_runs_the_plan_of_its_layer():
    layer, x = linear(64, 48), integers(3, 64)
    routed.install(layer, options=twostep.Options(strict=True))
    plan = layer._twostep.plan
    compiled = torch.compile(layer, backend="aot_eager")
    for count in range(3):
        assert same(compiled(x), exact(x, layer.weight)) and runs(plan) == count + 1
        if count == 0:
            layer.weight.data = integers(48, 64)
        else:
            layer.weight = torch.nn.Parameter(integers(48, 64), requires_grad=False)
    assert layer._twostep.plan is plan and plan.stats()["rebinds"] == 2


# ---- draft_logits


class Drafter(torch.nn.Module):
    def __init__(self, head, vocab=None, **processor):
        super().__init__()
        self.lm_head = head
        fields = dict(org_vocab_size=vocab or head.weight.shape[0], soft_cap=None, scale=1.0, logits_as_input=False,
                      head_dtype=None)
        self.logits_processor = types.SimpleNamespace(**{**fields, **processor})
        self.originals = 0

    def compute_logits(self, hidden):
        self.originals += 1
        return torch.zeros(hidden.shape[0], 7, dtype=torch.float32)


def test_logits_are_cut_capped_and_scaled():
    hidden = integers(3, 64)
    model = Drafter(linear(64, 1024), 1001)
    model.lm_head.weight.copy_(integers(1024, 64))
    model.lm_head.weight[1001:] = 1e38
    wanted = exact(hidden, model.lm_head.weight[:1001])
    out = routed.draft_logits(model, hidden)
    assert same(out, wanted) and out.is_contiguous() and out.argmax(-1).max() < 1001
    kept = out.clone()
    model.logits_processor.soft_cap, model.logits_processor.scale = 30.0, 0.5
    capped = routed.draft_logits(model, hidden)
    exact_cap = 0.5 * 30.0 * torch.tanh(wanted.double() / 30.0)
    assert ((capped.double() - exact_cap).abs() <= exact_cap.abs() * (2**-8 + 2**-19)).all()
    model.logits_processor.soft_cap = None
    assert same(routed.draft_logits(model, hidden), (wanted.float() * 0.5).to(BF16))
    assert same(out, kept) and model.originals == 0


def test_the_current_head_is_used_on_every_call():
    model, hidden = Drafter(linear(64, 48)), integers(2, 64)
    first, second = model.lm_head, linear(64, 80)
    for head in (first, second, first):
        model.lm_head = head
        model.logits_processor.org_vocab_size = head.weight.shape[0]
        head.weight.copy_(integers(*head.weight.shape))
        assert same(routed.draft_logits(model, hidden), exact(hidden, head.weight))
    first.weight.data = integers(48, 64)
    assert same(routed.draft_logits(model, hidden), exact(hidden, first.weight))
    first.weight.data = integers(64, 64)
    model.logits_processor.org_vocab_size = 64
    assert same(routed.draft_logits(model, hidden), exact(hidden, first.weight))
    first.weight.data = integers(96, 64)  # more rows, the same vocabulary
    assert same(routed.draft_logits(model, hidden), exact(hidden, first.weight[:64]))


@pytest.mark.parametrize("head_dtype, dtype, original", [
    (None, BF16, 0), (BF16, BF16, 0), (torch.float32, BF16, 1), (torch.float16, BF16, 1), (None, torch.float32, 1)])
def test_head_dtypes(head_dtype, dtype, original):
    model = Drafter(linear(64, 48, dtype=dtype), head_dtype=head_dtype)
    out = routed.draft_logits(model, integers(2, 64))
    assert model.originals == original and out.dtype == (torch.float32 if original else BF16)


def test_hidden_of_any_stride_gives_logits():
    model = types.SimpleNamespace(lm_head=linear(64, 48))
    model.lm_head.weight.copy_(integers(48, 64))
    hidden = integers(64, 3).t()
    assert same(routed.draft_logits(model, hidden), exact(hidden, model.lm_head.weight))
    one = integers(1, 64).expand(3, 64)
    assert same(routed.draft_logits(model, one), exact(one, model.lm_head.weight))


def test_what_goes_to_compute_logits(refuses):
    head = linear(64, 48)
    for model, hidden in ((Drafter(head), integers(1, 2, 64)), (Drafter(head), integers(2, 64).float()),
                          (Drafter(head, logits_as_input=True), integers(2, 64))):
        routed.draft_logits(model, hidden)
        assert model.originals == 1
    sharded = Drafter(head)
    head.tp_size = 2
    routed.draft_logits(sharded, integers(2, 64))
    assert sharded.originals == 1
    with refuses("unsupported"):
        routed.draft_logits(types.SimpleNamespace(lm_head=linear(64, 48)), integers(2, 64).float())


def test_a_sharded_head_is_gathered_on_every_call(refuses, monkeypatch):
    shards = [linear(64, 48) for _ in range(3)]
    for head in shards:
        head.weight.copy_(integers(48, 64))
        head.tp_size = 3
    hidden, calls = integers(5, 64), []
    whole = torch.cat([exact(hidden, head.weight) for head in shards], 1)

    def gather(shard):  # what rank 0 gives, and the two others
        assert same(shard, whole[: len(shard), :48])
        calls.append(len(shard))
        return torch.cat([shard, whole[: len(shard), 48:]], 1)

    model = Drafter(shards[0], 130)
    assert routed.prepare_draft_logits(model, (1, 5)) == {1: KIND, 5: KIND} and not calls
    out = routed.draft_logits(model, hidden, gather)
    assert same(out.contiguous(), whole[:, :130]) and out.stride(1) == 1
    model.logits_processor.soft_cap, model.logits_processor.scale = 30.0, 0.5
    wanted = 15.0 * torch.tanh(whole[:, :130].double() / 30.0)
    capped = routed.draft_logits(model, hidden, gather)
    assert ((capped.double() - wanted).abs() <= wanted.abs() * (2**-8 + 2**-19)).all()
    assert routed.draft_logits(model, hidden[:0], gather).shape == (0, 130) and calls == [5, 5, 0]

    # A plan that fails here alone: this rank gathers too, what the head's own method gives.
    def failed(*_):
        raise twostep.Error("failed", "bad_layout")

    model.logits_processor.soft_cap, model.logits_processor.scale = None, 1.0
    with monkeypatch.context() as patch:
        patch.setattr(routed, "_plain_logits", failed)
        assert same(routed.draft_logits(model, hidden, gather).contiguous(), whole[:, :130])
    assert model.originals == 0 and calls == [5, 5, 0, 5]

    model.logits_processor.org_vocab_size = 145
    with refuses("invalid_argument") as refusal:
        routed.draft_logits(model, hidden, gather)
    assert "3 shards of 48 rows" in refusal.error.value and "145" in refusal.error.accepted
    shards[0].num_added_embeddings = 2
    routed.draft_logits(model, hidden, gather)
    assert model.originals == 1


def test_other_heads_run_their_own_method(framework):
    hidden = integers(2, 64)
    biased = linear(64, 48, bias=True)
    model = Drafter(biased, 40, scale=0.5)
    assert same(routed.draft_logits(model, hidden), (biased(hidden)[:, :40].float() * 0.5).to(BF16))

    embedding = sys.modules["vllm.model_executor.layers.vocab_parallel_embedding"].UnquantizedEmbeddingMethod
    head = framework.Layer(64, 48, embedding)
    assert same(routed.draft_logits(Drafter(head), hidden), exact(hidden, head.weight))

    class Fp8:
        def apply(self, layer, x, bias=None):
            return exact(x, layer.weight) if layer.bf16 else x.float()

    head = framework.Layer(64, 48, Fp8)
    head.bf16 = True
    assert same(routed.draft_logits(Drafter(head), hidden), exact(hidden, head.weight))
    head.bf16 = False
    model = Drafter(head)
    assert routed.draft_logits(model, hidden).dtype == torch.float32 and model.originals == 1


def test_no_rows():
    assert routed.draft_logits(Drafter(linear(64, 48)), integers(0, 64)).shape == (0, 48)


@pytest.mark.skipif(DEVICE != "cpu", reason="NumPy is on the CPU")
def test_python_numpy_and_torch_have_the_same_bits():
    weight, x = torch.randn(48, 192).to(BF16), torch.randn(3, 192).to(BF16)
    layer = linear(192, 48)
    layer.weight.copy_(weight)
    routed.install(layer)
    out = np.zeros((3, 48), np.uint16)
    bits = lambda t: twostep.view(t.view(torch.int16).numpy().view(np.uint16), "bf16")  # noqa: E731
    twostep.DraftGemm(bits(weight)).run(bits(x), twostep.view(out, "bf16"))
    assert np.array_equal(layer(x).view(torch.int16).numpy().view(np.uint16), out)
