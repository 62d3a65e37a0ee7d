#!/usr/bin/env python3
"""The performance tables of README.md, from tactics/h200.json, the newest *-kda.jsonl and the newest row of each
case in *-draft.jsonl of bench/results/h200.

With --check: exit 1 unless README.md holds them."""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- table: scripts/readme_table.py {} -->", "<!-- end of table -->"
LAYERS = [  # K3.1 at TP8; g_proj exists in checkpoints with an output gate
    ("q_b", 2304, 1536), ("o_proj", 7168, 1536), ("g_proj", 1536, 7168), ("down", 7168, 1792), ("qkv_a", 2112, 7168),
    ("context_kv", 2880, 7168), ("gate_up", 3584, 7168), ("lm_head", 20480, 7168), ("context_proj shard", 896, 35840)]
ROWS = (8, 16, 32, 64)


def verdict(entry):
    """win, tie or loss of ours: a tie is a difference within the larger of the two spreads."""
    gain = entry["cublas_us"] - entry["warp_us"]
    if abs(gain) <= max(entry["warp_spread_us"], entry["cublas_spread_us"]):
        return "tie"
    return "win" if gain > 0 else "loss"


def cell(entry):
    ours, cublas = f"{entry['warp_us']:.2f}", f"{entry['cublas_us']:.2f}"
    return {"win": f"**{ours}** / {cublas}", "loss": f"{ours} / **{cublas}**", "tie": f"{ours} / {cublas}"}[verdict(entry)]


def counts(entries):
    verdicts = [verdict(entry) for entry in entries]
    words = (("win", "wins"), ("tie", "ties"), ("loss", "losses"))
    return ", ".join(f"{verdicts.count(one)} {one if verdicts.count(one) == 1 else many}" for one, many in words)


def gemm_table():
    data = json.loads((ROOT / "tactics/h200.json").read_text(encoding="utf-8"))
    entries = {(e["n"], e["k"], e["rows"]): e for e in data["entries"]}
    shown = [entries[n, k, rows] for _, n, k in LAYERS for rows in ROWS]
    drivers = sorted({e["measured"]["driver"] for e in shown})
    lines = [
        f"{data['gpu']}, driver {'; '.join(drivers)}; early chain, cold L2; microseconds, our kernel / cuBLASLt, the faster "
        f"in bold, neither in a tie. Our kernel: {counts(shown)} here; {counts(entries.values())} over all {len(entries)} "
        "measured shapes and row counts. Where it is slower, `DraftGemm` runs cuBLASLt and says so.", "",
        "| linear (N, K) | read limit | " + " | ".join(f"M = {rows}" for rows in ROWS) + " |",
        "| --- " * (2 + len(ROWS)) + "|"]
    for name, n, k in LAYERS:
        cells = [cell(entries[n, k, rows]) for rows in ROWS]
        lines.append(f"| {name} ({n}, {k}) | {entries[n, k, 8]['limit_us']:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


KDA_REQUESTS = (1, 8, 32, 128)


def newest_rows(kind):
    """Of the newest file, and its path."""
    files = {}
    for path in (ROOT / "bench/results/h200").glob(f"*-{kind}.jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        files[max(row["origin"]["date"] for row in rows)] = (rows, path.relative_to(ROOT))
    return files[max(files)]


def kda_table():
    rows, path = newest_rows("kda")
    rows = [r for r in rows if r["case"].get("state_mode", "slots") == "slots"]
    by_key = {(r["case"]["tokens"], r["case"]["heads"], r["case"]["requests"]): r for r in rows}
    machine = rows[0]["machine"]
    rates = {r["case"]["tokens"]: r["limit"]["gb_per_s"] / 1000 for r in rows}
    held = sum(row["verdict"] == "holds" for row in rows)
    lines = [
        f"{machine['device']}, driver {machine['driver']}; cold caches, F_B product included; microseconds per layer call, "
        f"share of the floor: the bytes at the rate of their mix of reads and writes, {rates[1]:.2f} TB/s in decode and "
        f"{rates[8]:.2f} in verify, measured in the same run. {held} of {len(rows)} keys are within 1.12 floors + 4 us "
        f"(decode) or + 5 us (verify) ([rows]({path})).", "",
        "| step | heads | " + " | ".join(f"B = {b}" for b in KDA_REQUESTS) + " |",
        "| --- " * (2 + len(KDA_REQUESTS)) + "|"]
    for tokens, step in ((1, "decode"), (8, "verify, 8 tokens")):
        for heads in sorted({key[1] for key in by_key}):
            cells = [f"{r['time']['median_us']:.1f} ({r['percent_of_limit']:.0f} %)"
                     for r in (by_key[tokens, heads, b] for b in KDA_REQUESTS)]
            lines.append(f"| {step} | {heads} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draft_rows():
    """The newest row of each case, with the path of its file."""
    newest = {}
    for path in sorted((ROOT / "bench/results/h200").glob("*-draft.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            case = tuple(row["case"][key] for key in ("model", "tp", "rank", "requests", "context", "draft_tokens"))
            if case not in newest or row["origin"]["date"] > newest[case][0]["origin"]["date"]:
                newest[case] = (row, path.relative_to(ROOT))
    return [newest[case] for case in sorted(newest, key=lambda case: (-case[1], case[4], case[3], case[0] != "k3.1"))]


def draft_table():
    found = draft_rows()
    rows = [row for row, _ in found]
    paths = ", ".join(f"[rows]({path})" for path in sorted({path for _, path in found}))
    machine = rows[0]["machine"]
    assert len({(row["machine"]["device"], row["machine"]["driver"]) for row in rows}) == 1, "rows of several machines"
    torch = next((r["baseline"] for r in rows if r.get("baseline_time")), None)
    told = f" PyTorch: the same modules in one graph, in the same run ({torch})." if torch else ""
    lines = [
        f"{machine['device']}, driver {machine['driver']}; one GPU as one rank, one captured graph, cold L2; microseconds. The "
        "limit is a graph of kernels that only read the same bytes with the same edges, in the same run; weights, W2 and cache "
        f"rows are counted ({paths}).{told}", "",
        f"| step | requests | context | MB | block pass and sampling |{' PyTorch |' if torch else ''} limit | ratio "
        "| ingest, 8 rows a request | its ratio |",
        "| --- " * (10 if torch else 9) + "|"]
    for r in rows:
        case, ingest = r["case"], r["ingest"]
        time, limit = r["time"]["median_us"], r["limit"]["median_us"]
        of_ingest = ingest["time"]["median_us"]
        of_torch = (r.get("baseline_time") or {}).get("median_us")
        in_torch = (f"| {of_torch:.0f} " if of_torch else "| - ") if torch else ""
        lines.append(f"| {case['model']}, rank {case['rank']} of {case['tp']}, {case['draft_tokens']} drafts | {case['requests']} "
                     f"| {case['context']} | {r['bytes'] / 1e6:.0f} | {time:.0f} {in_torch}| {limit:.0f} "
                     f"| {time / limit:.2f} "
                     f"| {of_ingest:.1f} | {of_ingest / ingest['limit']['median_us']:.2f} |")
    return "\n".join(lines)


def main():
    readme = ROOT / "README.md"
    text = current = readme.read_text(encoding="utf-8")
    for name, table in (("gemm", gemm_table), ("kda", kda_table), ("draft", draft_table)):
        begin = BEGIN.format(name)
        head, rest = current.split(begin)
        current = f"{head}{begin}\n{table()}\n{END}{rest.split(END, 1)[1]}"
    if "--check" not in sys.argv:
        readme.write_text(current, encoding="utf-8")
    elif current != text:
        sys.exit("README.md: a table is not that of its data; run scripts/readme_table.py")


if __name__ == "__main__":
    main()
