#!/usr/bin/env python3
"""The performance table of README.md, from tactics/h200.json. With --check: exit 1 unless README.md holds it."""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- table: scripts/readme_table.py -->", "<!-- end of table -->"
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


def table():
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


def main():
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    current = f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"
    if "--check" not in sys.argv:
        readme.write_text(current, encoding="utf-8")
    elif current != text:
        sys.exit("README.md: the table is not that of tactics/h200.json; run scripts/readme_table.py")


if __name__ == "__main__":
    main()
