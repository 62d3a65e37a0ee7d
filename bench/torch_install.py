"""A drafter-shaped module tree in PyTorch, before and after twostep.torch.install, on one H200.

    python3 bench/torch_install.py --json rows.jsonl

One JSON line for each question: host time of an eager linear against torch.mm's; time of install on 40 linears with a warm
cache; five layers of K3.1 at TP8 (7 rows) replayed as one CUDA graph. Between two linears runs a kernel of torch, so the
chain is the isolated one of `twostep bench draft-layer`; the time of the graph without its linears is taken off.
"""

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path

import torch

import twostep
import twostep.torch

HIDDEN, Q_LORA, Q_B, O_IN, INNER = 7168, 1536, 2304, 1536, 1792  # K3.1 at TP8
QKV_A = 2112


def linear(k, n):
    layer = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
    layer.weight.normal_(0, k**-0.5)
    return layer


class Layer(torch.nn.Module):
    """The linears of a draft layer, each on the result of the one before, with one small kernel between them."""

    def __init__(self):
        super().__init__()
        self.qkv_a, self.q_b, self.o_proj = linear(HIDDEN, QKV_A), linear(Q_LORA, Q_B), linear(O_IN, HIDDEN)
        self.gate_up, self.down = linear(HIDDEN, 2 * INNER), linear(INNER, HIDDEN)

    def forward(self, x):
        q = self.q_b(torch.tanh(self.qkv_a(x)[:, :Q_LORA]))
        x = x + self.o_proj(torch.tanh(q[:, :O_IN]))
        gate = self.gate_up(torch.tanh(x))
        return x + self.down(torch.tanh(gate[:, :INNER]))


class Without(torch.nn.Module):
    """A linear that is not run: its result lies there."""

    def __init__(self, layer, rows):
        super().__init__()
        self.out = torch.zeros(rows, layer.out_features, dtype=torch.bfloat16, device="cuda")

    def forward(self, x):
        return self.out


def replay_us(model, x, replays=40):
    """Median microseconds of one replay; five warm ones are dropped. Returns it and the result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = model(x)
    samples = []
    for _ in range(replays + 5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1000)
    samples = sorted(samples[5:])
    spread = (samples[len(samples) // 10], samples[-len(samples) // 10])
    return statistics.median(samples), spread, out.clone()


def drafter(rows):
    model = torch.nn.Sequential(*(Layer() for _ in range(5)))
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    before, before_spread, wanted = replay_us(model, x)
    eager = model(x)
    report = twostep.torch.install(model, rows=(rows,))
    after, after_spread, got = replay_us(model, x)
    compiled = torch.compile(model, mode="reduce-overhead")
    for _ in range(4):
        traced = compiled(x).clone()
    difference = ((got - wanted).float().norm() / wanted.float().norm()).item()
    assert difference < 2e-2, f"the installed tree is {difference} off"
    assert torch.equal(model(x), got), "eager and replay differ"
    fused = ((traced - got).float().norm() / got.float().norm()).item()  # inductor fuses the small kernels its own way
    assert fused < 2e-2, f"the compiled tree is {fused} off"
    assert twostep.torch.uninstall(model).count == report.count
    assert torch.equal(model(x), eager)
    for layer in model:
        for name, child in list(layer.named_children()):
            setattr(layer, name, Without(child, rows))
    small, _, _ = replay_us(model, x)
    kinds = {}
    for line in report.layers:
        kinds.setdefault(line.kinds[rows], []).append(line.name)
    return {"what": "drafter module", "model": "k3.1", "tp": 8, "layers": 5, "rows": rows, "linears": report.count,
            "bytes": report.bytes, "chain": "isolated, kernels of torch between", "l2": "cold", "graph": True,
            "small_kernels_us": small, "torch_us": before, "torch_p10_p90_us": before_spread, "twostep_us": after,
            "twostep_p10_p90_us": after_spread, "linears_torch_us": before - small, "linears_twostep_us": after - small,
            "kinds": {kind: len(names) for kind, names in kinds.items()}, "relative_difference": difference}


def host_us(call, calls=2000, repeats=9):
    """Median microseconds of host time per call, the queue never full: the GPU is faster than the host here."""
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls // 10):
            call()
        samples.append((time.perf_counter() - begin) / (calls // 10) * 1e6)
    return statistics.median(samples)


def eager(n, k, rows):
    layer, x = linear(k, n), torch.randn(rows, k, device="cuda").bfloat16()
    weight, out = layer.weight.t(), torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        module = host_us(lambda: layer(x))
        mm = host_us(lambda: torch.mm(x, weight))
        twostep.torch.install(layer, rows=(rows,))
        method, plan = layer._twostep, layer._twostep.plan
        return {"what": "eager host time", "n": n, "k": k, "rows": rows, "kind": plan.kind(rows), "torch_mm_us": mm,
                "apply_us": host_us(lambda: method.apply(layer, x)), "run_us": host_us(lambda: plan.run(x, out)),
                "torch_linear_us": module, "installed_linear_us": host_us(lambda: layer(x))}


def install(rows):
    shapes = [(QKV_A, HIDDEN), (Q_B, Q_LORA), (HIDDEN, O_IN), (2 * INNER, HIDDEN), (HIDDEN, INNER)] * 8
    seconds = []
    for _ in range(3):  # the first fills the caches
        model = torch.nn.ModuleList([linear(k, n) for n, k in shapes])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        report = twostep.torch.install(model, rows=rows)
        seconds.append(time.perf_counter() - begin)
    return {"what": "install", "linears": report.count, "rows": list(rows), "first_s": seconds[0], "warm_s": seconds[-1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, help="file to write")
    parser.add_argument("--rows", type=int, default=7)
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    noted = root / "commit"  # of a source tree without git
    commit = noted.read_text().strip() if noted.exists() else subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=7"], cwd=root, capture_output=True, text=True).stdout.strip()
    origin = {"commit": commit, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "torch": torch.__version__,
              "device": torch.cuda.get_device_name(), "driver": twostep.info()["driver"],
              "cublaslt": twostep.info()["cublaslt"], "nvrtc": twostep.info()["nvrtc"].split(" ")[0]}
    with open(arguments.json, "w", encoding="utf-8") as file, torch.no_grad():
        for row in (install((7, 8)), eager(2304, 1536, 8), eager(7168, 1536, 8), drafter(arguments.rows)):
            print(json.dumps({**row, "origin": origin}), file=file, flush=True)
            print(json.dumps(row))


if __name__ == "__main__":
    main()
