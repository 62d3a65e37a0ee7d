"""torch.mm on the shapes of `twostep bench gemm`, by its protocol: one CUDA graph over rotating weights.

    python3 bench/torch_mm.py --shape 7168,1536 --rows 1,8,64,128 --json rows.jsonl

One JSON line for each shape and row count: microseconds per product, median of 15 replays. For the comparison of
draft-gemm 8.1: our cuBLAS path against the framework's.
"""

import argparse
import json
import statistics

import torch


def time_mm(n, k, rows):
    """Microseconds of torch.mm(x [rows, k], weight.t()) with cold L2."""
    copies = max(5, -(-240_000_000 // (2 * n * k)))
    launches = max(copies, 24 // copies * copies)
    weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(copies)]
    x = torch.randn(rows, k, device="cuda").bfloat16()
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)

    def products():
        for i in range(launches):
            torch.mm(x, weights[i % copies].t(), out=out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        products()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    samples = []
    for _ in range(18):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1000 / launches)
    return statistics.median(samples[3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", required=True, help="N,K; may be repeated")
    parser.add_argument("--rows", default="1,8,64,128,512,2048")
    parser.add_argument("--json", required=True, help="file to write")
    arguments = parser.parse_args()
    with open(arguments.json, "w", encoding="utf-8") as file:
        for shape in arguments.shape:
            n, k = (int(part) for part in shape.split(","))
            for rows in (int(part) for part in arguments.rows.split(",")):
                row = {"what": "torch.mm", "torch": torch.__version__, "device": torch.cuda.get_device_name(),
                       "n": n, "k": k, "rows": rows, "us": round(time_mm(n, k, rows), 3)}
                print(json.dumps(row), file=file)
                print(f"({n}, {k}) rows {rows}: {row['us']:.2f} us")


if __name__ == "__main__":
    main()
