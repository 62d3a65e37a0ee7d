"""What the chains of this folder share: timed replays, and lines of JSON as `twostep bench --chain PYTHON` asks and reads
them. It hands the text to the chain as the module `torch_chain`."""

import json
import os
import statistics
import sys

WARMUP, KEPT = 3, 15


def replayed(graph, before=lambda: None):
    """Microseconds of each replay of a CUDA graph after the warm-up; `before` is enqueued ahead of each, and not timed."""
    import torch
    samples = []
    for _ in range(WARMUP + KEPT):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1000)
    return samples[WARMUP:]


def told(what, samples):
    """The answer with these times in it."""
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return {"what": what, "median_us": statistics.median(samples), "p10_us": tenths[0], "p90_us": tenths[-1],
            "kept": KEPT, "dropped": WARMUP}


def serve(load, answer):
    """load(device) once, then a line for each of stdin: answer(request), or why there is none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    missing = None
    try:
        load(sys.argv[1] if len(sys.argv) > 1 else "0")
    except Exception as error:  # also of a torch without a GPU
        missing = f"{type(error).__name__}: {error}"
    for line in sys.stdin:
        try:
            said = {"failure": missing} if missing else answer(json.loads(line))
        except Exception as error:
            said = {"failure": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)
