"""From rows of `twostep bench --json` to pictures and one self-contained HTML page.

gemm.png: time over read limit for each shape and row count, ours and cuBLAS. kda.png: time over floor for each number of
heads and requests. A file may hold rows of both; of rows of one case the last counts. docs/measurement.md says what a row is.
"""

import base64
import html
import json
from pathlib import Path

from twostep.error import refuse

OURS, THEIRS = "#0b6e4f", "#b5651d"


def read_rows(paths):
    """(gemm rows, kda rows of state mode slots), without strict and without warm ones. Raises Error: data_error."""
    gemm, kda = {}, {}
    for path in paths:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                case, protocol = row["case"], row["protocol"]
                if row["choice"].get("kind") == "kda":
                    if case.get("state_mode", "slots") == "slots":
                        kda[case["tokens"], case["heads"], case["requests"]] = row
                elif protocol["l2"] == "cold" and not row["choice"].get("strict"):
                    gemm[protocol["chain"], case["layer"], case["n"], case["k"], case["rows"]] = row
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                refuse("data_error", "report", f"{path}:{number}", repr(error),
                       "rows of `twostep bench gemm --json` and `bench kda --json`")
    return list(gemm.values()), list(kda.values())


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        refuse("unavailable", "report", "matplotlib", "absent", "installed", "pip install 'twostep[report]'")
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _grouped(rows, key):
    groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _style(axes, title, ticks):
    axes.set_title(title, fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.tick_params(axis="y", labelsize=8)
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _save(plt, figure, grid, title, path):
    grid[0, 0].legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_gemm(rows, path, chain="early"):
    """One small picture for each shape: rows against time over the read limit of the same chain."""
    plt = _pyplot()
    rows = [row for row in rows if row["protocol"]["chain"] == chain]
    shapes = sorted(_grouped(rows, lambda r: (r["case"]["layer"], r["case"]["n"], r["case"]["k"])).items(),
                    key=lambda item: item[0][1] * item[0][2])
    columns = min(5, len(shapes))
    figure, grid = plt.subplots(-(-len(shapes) // columns), columns, squeeze=False, sharey=True,
                                figsize=(2.4 * columns, 2.1 * -(-len(shapes) // columns)))
    for axes in grid.flat[len(shapes):]:
        axes.axis("off")
    for axes, ((layer, n, k), points) in zip(grid.flat, shapes):
        points.sort(key=lambda r: r["case"]["rows"])
        xs = [r["case"]["rows"] for r in points]
        for field, color, label in (("baseline_time", THEIRS, "cuBLASLt"), ("time", OURS, "twostep")):
            axes.plot(xs, [r[field]["median_us"] / r["limit"]["median_us"] for r in points], "o-", color=color,
                      label=label, markersize=3, linewidth=1.2)
        _style(axes, f"{layer} ({n}, {k})", [x for x in xs if x in (1, 8, 16, 32, 64)])
    for axes in grid[-1]:
        axes.set_xlabel("rows", fontsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel("time / read limit", fontsize=8)
    _save(plt, figure, grid, f"{rows[0]['machine']['device']}: BF16 linears by rows, {chain} chain, cold L2; 1 is a kernel "
                             "that only reads the weight", path)


def draw_kda(rows, path):
    """Decode and verify: requests against time over floor, a line for each number of heads."""
    plt = _pyplot()
    steps = sorted(_grouped(rows, lambda r: r["case"]["tokens"]).items())
    figure, grid = plt.subplots(1, len(steps), squeeze=False, sharey=True, figsize=(4.4 * len(steps), 3))
    shades = plt.get_cmap("viridis")
    for axes, (tokens, of_step) in zip(grid.flat, steps):
        heads = sorted(_grouped(of_step, lambda r: r["case"]["heads"]).items())
        for i, (count, points) in enumerate(heads):
            points.sort(key=lambda r: r["case"]["requests"])
            axes.plot([r["case"]["requests"] for r in points],
                      [r["time"]["median_us"] / r["limit"]["floor_us"] for r in points], "o-", markersize=3, linewidth=1.2,
                      color=shades(0.85 * i / max(1, len(heads) - 1)), label=f"{count} heads")
        _style(axes, "decode" if tokens == 1 else f"verify, {tokens} tokens",
               sorted({r["case"]["requests"] for r in of_step}))
        axes.set_yscale("log", base=2)
        axes.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axes.set_xlabel("requests", fontsize=8)
    grid[0, 0].set_ylabel("time / floor", fontsize=8)
    _save(plt, figure, grid, f"{rows[0]['machine']['device']}: KDA core, cold caches; 1 is the bytes at the measured rate "
                             "of their mix of reads and writes", path)


def _table(header, lines):
    def cells(tag, values):
        return "".join(f"<{tag}>{html.escape(str(value))}</{tag}>" for value in values)

    body = "".join(f"<tr>{cells('td', line)}</tr>" for line in lines)
    return f"<table><tr>{cells('th', header)}</tr>{body}</table>"


def _gemm_table(rows):
    rows = sorted(rows, key=lambda r: (r["protocol"]["chain"], r["case"]["n"] * r["case"]["k"], r["case"]["rows"]))
    return _table(
        ["chain", "layer", "N", "K", "M", "kind", "us", "p10 - p90", "read limit", "cuBLASLt", "verdict"],
        [[r["protocol"]["chain"], r["case"]["layer"], r["case"]["n"], r["case"]["k"], r["case"]["rows"],
          r["choice"]["kind"], f"{r['time']['median_us']:.2f}", f"{r['time']['p10_us']:.2f} - {r['time']['p90_us']:.2f}",
          f"{r['limit']['median_us']:.2f}", f"{r['baseline_time']['median_us']:.2f}", r["verdict"]] for r in rows])


def _kda_table(rows):
    rows = sorted(rows, key=lambda r: (r["case"]["tokens"], r["case"]["heads"], r["case"]["requests"]))
    return _table(
        ["tokens", "heads", "requests", "us", "p10 - p90", "floor", "bar", "verdict"],
        [[r["case"]["tokens"], r["case"]["heads"], r["case"]["requests"], f"{r['time']['median_us']:.2f}",
          f"{r['time']['p10_us']:.2f} - {r['time']['p90_us']:.2f}", f"{r['limit']['floor_us']:.2f}",
          f"{r['bar_us']:.2f}", r["verdict"]] for r in rows])


def _origins(rows):
    seen = {(r["origin"]["commit"], r["origin"]["command"], r["machine"]["device"], r["machine"]["driver"]) for r in rows}
    return "".join(f"<p>{html.escape(f'{device}, driver {driver}; commit {commit}; {command}')}</p>"
                   for commit, command, device, driver in sorted(seen))


STYLE = ("body{font:14px system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em}img{max-width:100%}"
         "table{border-collapse:collapse;font-size:12px}td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #ddd}"
         "p{color:#555;margin:.3em 0}")


def write_report(paths, out):
    """Writes gemm.png, kda.png (of what there are rows for) and report.html into the folder `out`; returns their paths."""
    gemm, kda = read_rows(paths)
    if not gemm and not kda:
        refuse("data_error", "report", "rows", "none", "rows of `twostep bench gemm` or `bench kda`, cold and not strict")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    written, parts = [], []
    for title, rows, draw, table in (("DraftGemm", gemm, draw_gemm, _gemm_table), ("PreparedKda", kda, draw_kda, _kda_table)):
        if not rows:
            continue
        pictures = []
        if draw is draw_gemm:
            chains = sorted({r["protocol"]["chain"] for r in rows})
            pictures = [(out / f"gemm{'' if chain == 'early' else '-' + chain}.png", {"chain": chain}) for chain in chains]
        else:
            pictures = [(out / "kda.png", {})]
        parts.append(f"<h2>{title}</h2>{_origins(rows)}")
        for path, options in pictures:
            draw(rows, path, **options)
            written.append(path)
            data = base64.b64encode(path.read_bytes()).decode("ascii")
            parts.append(f'<img alt="{title}" src="data:image/png;base64,{data}">')
        parts.append(table(rows))
    page = out / "report.html"
    page.write_text("<!doctype html><html lang=en><meta charset=utf-8><title>twostep</title>"
                    f"<style>{STYLE}</style><h1>twostep</h1>{''.join(parts)}</html>\n", encoding="utf-8")
    return [*written, page]
