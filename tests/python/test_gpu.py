"""What only a GPU shows: kinds, streams, graphs, compilation, 64-bit offsets. Run test_torch.py there as well:
TWOSTEP_TEST_DEVICE=cuda:0 python3 -m pytest tests/python"""

import threading
import time
import types
import warnings

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import twostep  # noqa: E402
import twostep.torch as routed  # noqa: E402

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _on_the_gpu():
    torch.manual_seed(7)
    with torch.no_grad(), torch.device("cuda"):
        yield
    torch.cuda.synchronize()


def integers(*shape):
    return torch.randint(-4, 5, shape).to(BF16)


def linear(k, n):
    layer = torch.nn.Linear(k, n, bias=False, dtype=BF16).requires_grad_(False)
    layer.weight.copy_(integers(n, k))
    return layer


def exact(x, weight):
    return (x.double() @ weight.double().t()).to(BF16)


def captured(step):
    """A graph of step() and its result, recorded after one eager run on the same stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step()
    return graph, out


@pytest.mark.parametrize("n, k", [(48, 192), (2304, 1536), (17, 129)])
def test_every_row_count_is_exact_and_on_its_kind(n, k):
    weight = integers(n, k)
    gemm = twostep.DraftGemm(weight)
    for m in range(73):
        x, out = integers(m, k), torch.full((m, n), float("nan"), dtype=BF16)
        kind = gemm.prepare(m)
        gemm.run(x, out)
        assert torch.equal(out, exact(x, weight)), m
        assert kind == gemm.kind(m) == gemm.kind(x, out) or m == 0
        if m and n == 48:
            assert kind == ("warp" if m <= 64 else "cublas")
    if n == 17:
        assert gemm.why_code(8) == "n_not_multiple_of_16" and gemm.stats()["fallback_by_code"]["n_not_multiple_of_16"]


def test_the_current_stream_is_the_default():
    weight, out = integers(48, 64), torch.empty(4, 48, dtype=BF16)
    gemm = twostep.DraftGemm(weight)
    gemm.prepare(4)
    x, late = torch.zeros(4, 64, dtype=BF16), integers(4, 64)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(late)
        gemm.run(x, out)
    side.synchronize()
    assert torch.equal(out, exact(late, weight))
    for stream in (side, side.cuda_stream, None):
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        gemm.run(x, out, stream=stream)
        torch.cuda.synchronize()
        assert torch.equal(out, exact(late, weight))


def test_other_threads_run_while_prepare_compiles(tmp_path):
    weight, ticks, done = integers(1008, 4032), 0, threading.Event()  # a shape that no cache has seen
    gemm = twostep.DraftGemm(weight)

    def tick():
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.002)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    for m in (8, 16, 32, 64):
        gemm.prepare(m)
    took = time.perf_counter() - begin
    done.set()
    thread.join()
    if gemm.stats()["compiles"]:
        assert ticks > took / 0.002 / 10


def test_the_callers_device_stays_current():
    layer = linear(64, 48)
    routed.install(layer, rows=(3,))
    before = torch.cuda.current_device()
    layer(integers(3, 64))
    with pytest.raises(twostep.Error):
        layer._twostep.plan.run(integers(3, 64).cpu(), torch.empty(3, 48, dtype=BF16))
    assert torch.cuda.current_device() == before


def test_operands_on_the_cpu_are_refused():
    gemm = twostep.DraftGemm(integers(48, 64))
    with pytest.raises(twostep.Error) as caught:
        gemm.run(integers(3, 64).cpu(), torch.empty(3, 48, dtype=BF16))
    assert caught.value.code == "wrong_device"


def test_graphs_of_an_installed_tree_replay_new_data_and_weights_written_in_place():
    model = torch.nn.Sequential(linear(64, 256), torch.nn.Hardtanh(-4, 4), linear(256, 64))
    routed.install(model, rows=(8,))
    x = integers(8, 64)
    graph, out = captured(lambda: model(x))
    for _ in range(3):
        x.copy_(integers(8, 64))
        model[0].weight.copy_(integers(256, 64))
        graph.replay()
        torch.cuda.synchronize()
        hidden = exact(x, model[0].weight).clamp(-4, 4)
        assert torch.equal(out, exact(hidden, model[2].weight))
    assert model[0]._twostep.plan.captured_addresses() == [model[0].weight.data_ptr()]
    assert model[0]._twostep.plan.stats()["warp_runs"] >= 2


def test_an_unprepared_row_count_under_capture_is_recorded_on_cublas():
    layer, x = linear(64, 48), integers(20, 64)
    routed.install(layer, rows=(8,))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, exact(x, layer.weight)) and layer._twostep.plan.stats()["capture_misses"] == 1


def test_another_shape_under_capture_runs_the_original_and_warns_once():
    layer, x = linear(64, 48), integers(8, 64)
    routed.install(layer, rows=(8,))
    layer.weight = torch.nn.Parameter(integers(80, 64), requires_grad=False)
    torch.nn.functional.linear(x, layer.weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.cuda.graph(graph):
            out = layer(x)
            out = layer(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, exact(x, layer.weight)) and layer._twostep.capture_misses == 2
    assert len([w for w in caught if "twostep" in str(w.message)]) == 1
    assert torch.equal(layer(x), exact(x, layer.weight)) and layer._twostep.plan.n == 80  # eager: a new plan


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_has_the_bits_of_eager(mode):
    model = torch.nn.Sequential(linear(1536, 2304), torch.nn.Hardtanh(-4, 4), linear(2304, 1536))
    routed.install(model, rows=(7, 8))
    torch._dynamo.reset()
    compiled = torch.compile(model, mode=mode)
    for m in (7, 8, 7):
        for _ in range(4):  # the first runs warm a graph up and record it
            x = integers(m, 1536)
            hidden = exact(x, model[0].weight).clamp(-4, 4)
            assert torch.equal(compiled(x), exact(hidden, model[2].weight))
    assert model[0]._twostep.plan.stats()["warp_runs"] > 0


def test_a_pinned_row_count_shows_in_kind():  # G47
    layer, x = linear(1536, 2304), torch.randn(7, 1536).to(BF16)
    routed.install(layer, rows=(7,))
    plan = layer._twostep.plan
    first, second = layer(x), layer(x)
    assert torch.equal(first, second) and plan.kind(7) == "warp"
    plan.pin(7, "cublas")
    torch.testing.assert_close(layer(x), first, rtol=2e-2, atol=0.5)
    assert plan.kind(7) == "cublas" and plan.why_code(7) == "pinned"


def test_strict_rows_do_not_depend_on_m_and_what_it_cannot_serve_is_skipped():
    model = torch.nn.ModuleList([linear(1536, 2304), linear(129, 17)])
    report = routed.install(model, rows=(1, 64), options=twostep.Options(strict=True))
    assert [line.installed for line in report.layers] == [True, False] and "16" in report.layers[1].reason
    x = torch.randn(64, 1536).to(BF16)
    whole = model[0](x)
    for m in (1, 7, 9, 33):
        assert torch.equal(model[0](x[:m]), whole[:m])


def test_the_low_level_kernel_and_packed_weights():
    weight, x, out = integers(2304, 1536), integers(8, 1536), torch.empty(8, 2304, dtype=BF16)
    facts = twostep.info()["gpus"][0]
    tactic = twostep.warp_tactic(8, 2304, 1536, facts)
    kernel = twostep.PreparedWarpSplitK(weight, {8: tactic})
    assert torch.equal(kernel.run(x, out), exact(x, weight)) and len(kernel.keys()) == 1
    with pytest.raises(twostep.Error) as caught:
        kernel.run(integers(9, 1536), torch.empty(9, 2304, dtype=BF16))
    assert caught.value.code == "not_prepared"
    packed = twostep.pack_weight(weight, twostep.Tactic())
    gemm = twostep.DraftGemm(packed)
    assert packed.bytes == 2 * 2304 * 1536 and gemm.prepare(8) == "warp"
    assert torch.equal(gemm.run(x, out), exact(x, weight))
    weight.copy_(integers(2304, 1536))
    gemm.weights_updated()
    assert torch.equal(gemm.run(x, out), exact(x, weight))


def test_logits_in_a_graph_follow_the_head_and_are_the_callers():
    head = linear(512, 1024)
    model = types.SimpleNamespace(lm_head=head, logits_processor=types.SimpleNamespace(
        org_vocab_size=1001, soft_cap=30.0, scale=0.5, logits_as_input=False, head_dtype=None))
    hidden = integers(3, 512)
    graph, out = captured(lambda: routed.draft_logits(model, hidden))
    for _ in range(3):
        hidden.copy_(integers(3, 512))
        head.weight.copy_(integers(1024, 512))
        graph.replay()
        torch.cuda.synchronize()
        wanted = 15.0 * torch.tanh(exact(hidden, head.weight[:1001]).double() / 30.0)
        assert out.shape == (3, 1001)
        assert ((out.double() - wanted).abs() <= wanted.abs() * (2**-8 + 2**-19)).all()


def test_the_logits_stage_rounds_once():  # G45
    logits = torch.arange(-120, 120, 0.25).to(BF16)[None]
    out = torch.empty_like(logits)
    for cap, scale in ((30.0, 0.5), (0.1, 1.7), (None, 0.3)):
        twostep.LogitsStage("cuda:0", soft_cap=cap, scale=scale).run(logits, out)
        exact_value = logits.double()
        exact_value = scale * (cap * torch.tanh(exact_value / cap) if cap else exact_value)
        near = [(exact_value * (1 + e)).float().to(BF16) for e in (-(2**-20), 0, 2**-20)]
        assert ((out == near[0]) | (out == near[1]) | (out == near[2])).all()


def test_offsets_of_the_logits_stage_are_64_bit():  # G13
    rows, cols = 15408, 151936
    free, _ = torch.cuda.mem_get_info()
    if free < 2.2 * 2 * rows * cols:
        pytest.skip("needs 10 GB")
    logits = torch.zeros(rows, cols, dtype=BF16)
    logits[-1] = integers(cols)
    wanted = logits[-1] * 0.5
    twostep.LogitsStage("cuda:0", scale=0.5).run(logits, logits)
    assert torch.equal(logits[-1], wanted) and not logits[:-1].any()


def test_kda_in_a_graph_equals_eager():
    heads, d, tokens, requests = 12, 1536, 4, 3
    stride = twostep.kda_row_stride(heads)
    layer = types.SimpleNamespace(
        num_heads=heads, head_dim=128, conv1d=types.SimpleNamespace(weight=torch.randn(3 * d, 1, 4) * 0.5, bias=None),
        f_b_proj=types.SimpleNamespace(weight=(torch.randn(d, 128) * 0.09).to(BF16)), A_log=torch.rand(heads),
        dt_bias=torch.randn(d) * 0.3, o_norm=types.SimpleNamespace(weight=torch.ones(128), eps=1e-5), gate_lower_bound=-5.0)
    core = twostep.PreparedKda.from_module(layer, {(requests, tokens): stride})
    slots = torch.arange(1, 1 + requests * tokens, dtype=torch.int32).view(requests, tokens)
    accepted = torch.tensor([1, 2, 4], dtype=torch.int32)
    projected = torch.randn(requests * tokens, stride).to(BF16)
    results = []
    for graphed in (False, True):
        torch.manual_seed(1)
        conv = torch.randn(1 + requests * tokens, 2 + tokens, 3 * d).to(BF16)
        state = torch.randn(1 + requests * tokens, heads, 128, 128) * 0.1
        core.prepare((conv, state))
        out = torch.full((requests * tokens, d), float("nan"), dtype=BF16)
        step = lambda: core.run(projected, out, caches=(conv, state), slots=slots, accepted=accepted)  # noqa: E731
        if graphed:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            graph.replay()
        else:
            step()
        torch.cuda.synchronize()
        results.append((out, conv, state))
    assert all(torch.equal(a, b) for a, b in zip(*results)) and results[0][0].isfinite().all()
    assert core.kernel((requests, tokens)).startswith("kda-h12-q4")


def test_other_gpu_frameworks_by_dlpack():
    cupy = pytest.importorskip("cupy")
    counters = cupy.zeros(4, dtype=cupy.int32)
    view = twostep.view(counters)
    assert (view.device, view.shape, view.address) == ("cuda:0", [4], counters.data.ptr)
