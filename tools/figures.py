"""Tables and plots of the documentation, from the measurements in ``docs/data``.

    python tools/figures.py            # write the tables into the pages and the plots into docs/images
    python tools/figures.py --check    # change nothing; status 1, with the names, when something is out of date

A table stands in a page between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. The files in ``docs/data`` are
what the benchmarks write with ``--json``; put a new measurement in the place of an old one and run this script.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
DATA = DOCS / "data"
IMAGES = DOCS / "images"
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md")))
OURS, FLA = "kda_core", "fla"
CALLS = {"training": "training step", "inference": "prefill"}
GIB = 2**30
SLOT = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.S)

Row = dict[str, Any]


def read(name: str) -> dict[str, Any]:
    """A measurement, by the name of its file."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def median(row: Row, name: str) -> float | None:
    """Median milliseconds of an implementation, or None where it was not timed."""
    found = row["ms"].get(name)
    return None if found is None else found["median"]


def milliseconds(value: float | None) -> str:
    """Three significant digits; empty where nothing was measured."""
    if value is None:
        return ""
    return f"{value:.3g}"


def digits(value: float | None) -> str:
    """The same with the zeros at the end, so that the figures of a column are alike."""
    return "" if value is None else f"{value:#.3g}".rstrip(".")


def ratio(row: Row) -> str:
    """How many times fla's time is ours; empty where fla was not timed."""
    theirs, ours = median(row, FLA), median(row, OURS)
    return "" if theirs is None or ours is None else f"{theirs / ours:.1f}×"


def shape(row: Row) -> str:
    """B, T, H, K of a row."""
    s = row["shape"]
    packed = f", packed in {len(s['lengths'])}" if s["lengths"] else ""
    return f"{s['B']}, {s['T']}, {s['H']}, {s['K']}{packed}"


def machine(name: str) -> str:
    """What a measurement was made with, as a sentence."""
    found = read(name)
    versions = [f"{n} {found[n]}" for n in ("torch", "triton", "flash-linear-attention", "transformers") if n in found]
    return f"{found['device']}; {', '.join(versions)}; {found['date']}."


def span(values: list[float], unit: str = "") -> str:
    """One value, or the least and the largest."""
    low, high = milliseconds(min(values)), milliseconds(max(values))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def headline_figures() -> str:
    """The three figures of the first screen: a training step, a prefill, a step's memory."""
    lines = []
    for mode, call in (("training", "Training step"), ("inference", "Prefill")):
        parts = []
        for gate in ("bounded", "softplus"):
            rows = [row for row in read("headline")["rows"] if (row["mode"], row["gate"]) == (mode, gate)]
            ours = span([row["ms"][OURS]["median"] for row in rows], " ms")
            text = f"{ours} with the {gate} gate"
            if rivals := [row for row in rows if FLA in row["ms"]]:
                theirs = span([row["ms"][FLA]["median"] for row in rivals], " ms")
                ratios = [round(row["ms"][FLA]["median"] / row["ms"][OURS]["median"], 1) for row in rivals]
                text += f" (fla 0.6: {theirs}, {span(ratios)} times as long)"
            parts.append(text)
        lines.append(f"- **{call}**: {', '.join(parts)}.")
    rows = [row["peak"] for row in read("training")["rows"] if "peak" in row]
    shares = [round(peak[OURS] / peak[FLA], 2) for peak in rows]
    lines.append(f"- **Peak memory of a training step**: {span(shares)} of fla's.")
    return "\n".join(lines)


def headline() -> str:
    """A training step and a prefill with everything in the operator."""
    rows = [
        [
            f"{CALLS[row['mode']]}, {row['gate']} gate, {row['decay']} decays",
            milliseconds(median(row, OURS)),
            milliseconds(median(row, FLA)),
            ratio(row),
        ]
        for row in read("headline")["rows"]
        if row["gate"] in ("bounded", "softplus")
    ]
    return table(["call", "kda_core ms", "fla ms", "fla / kda_core"], rows)


def beside_fla(name: str) -> str:
    """Times and memory of every shape."""
    rows = []
    for row in read(name)["rows"]:
        peak = row.get("peak", {})
        memory = [f"{peak[n] / GIB:.2f}" if n in peak else "" for n in (OURS, FLA)]
        times = [digits(median(row, n)) for n in (OURS, FLA)]
        rows.append([shape(row), *times, ratio(row), digits(row.get("floor")), *memory])
    header = ["B, T, H, K", "kda_core ms", "fla ms", "fla / kda_core", "floor ms", "kda_core GiB", "fla GiB"]
    return table(header, rows)


def decoding() -> str:
    """Steps over a pool."""
    rows = [
        [
            f"{row['state']}, {row['layout']}",
            str(row["N"]),
            f"{row['us'][OURS]:.1f}",
            f"{row['us'][FLA]:.1f}",
            f"{row['us'][FLA] / row['us'][OURS]:.1f}×",
            f"{row['of_large_copy']:.0%}",
        ]
        for row in read("decoding")["rows"]
    ]
    return table(["pool", "sequences", "kda_core µs", "fla µs", "fla / kda_core", "of a copy's bandwidth"], rows)


def prompts() -> str:
    """Short prompts by both functions."""
    names = ("fused_recurrent_kda", "chunk_kda")
    rows = []
    for row in read("prompts")["rows"]:
        best = min(names, key=lambda n: row["us"][n])
        cells = [f"**{row['us'][n]:.1f}**" if n == best else f"{row['us'][n]:.1f}" for n in names]
        rows.append([str(row["N"]), str(row["T"]), *cells])
    return table(["sequences", "tokens each", *(f"`{n}` µs" for n in names)], rows)


def cpu() -> str:
    """The CPU backend beside torch implementations of others."""
    rows = [[row["call"], row["kda_core"], row["best"], row["fallback"]] for row in read("cpu")["rows"]]
    return table(["call", "kda_core", "best of the others", "transformers' fallback"], rows)


def accuracy() -> str:
    """Errors of every case beside fla's, on a GPU."""
    rows = read("accuracy")["rows"]
    outputs = list(dict.fromkeys(o for row in rows for o in row["errors"][OURS]))
    lines = [
        [
            row["case"] if name == OURS else "",
            row["dtype"] if name == OURS else "",
            name,
            *(f"{found[o]:.1e}" if o in found else "" for o in outputs),
        ]
        for row in rows
        for name, found in row["errors"].items()
    ]
    return table(["case", "dtype", "", *outputs], lines)


def errors_by_length() -> str:
    """Errors of o and of the worst gradient, on the CPU."""
    rows = []
    for row in read("errors_by_length")["rows"]:
        found = row["errors"]
        gradients = {name: error for name, error in found.items() if name.startswith("d")}
        worst = max(gradients, key=lambda n: gradients[n])
        cells = [f"{found['o']:.1e}", f"{found['final_state']:.1e}", f"{gradients[worst]:.1e} ({worst})"]
        rows.append([row["decay"], row["dtype"], str(row["T"]), *cells])
    return table(["decays", "dtype", "T", "o", "final_state", "largest gradient"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "headline-figures": headline_figures,
    "headline": headline,
    "headline-machine": lambda: machine("headline"),
    "training": lambda: beside_fla("training"),
    "training-machine": lambda: machine("training"),
    "inference": lambda: beside_fla("inference"),
    "inference-machine": lambda: machine("inference"),
    "decoding": decoding,
    "decoding-machine": lambda: machine("decoding"),
    "prompts": prompts,
    "cpu": cpu,
    "cpu-machine": lambda: machine("cpu"),
    "accuracy": accuracy,
    "errors-by-length": errors_by_length,
}


def filled(page: str) -> str:
    """The text of a page with every table as the data give it."""
    return SLOT.sub(lambda m: f"{m[1]}\n{TABLES[m['name']]()}\n\n{m[3]}", page)


def times(figure: Any) -> None:
    """Milliseconds of the headline's calls, ours above fla's."""
    rows = [row for row in read("headline")["rows"] if row["gate"] in ("bounded", "softplus")][::-1]
    axes = figure.subplots()
    for name, offset, color in ((OURS, 0.2, "#3f51b5"), (FLA, -0.2, "#b0b0b0")):
        timed = [(i, row["ms"][name]["median"]) for i, row in enumerate(rows) if name in row["ms"]]
        axes.barh([i + offset for i, _ in timed], [ms for _, ms in timed], height=0.38, color=color, label=name)
        for i, ms in timed:
            axes.text(ms, i + offset, f" {milliseconds(ms)}", va="center", fontsize=8)
    labels = [f"{CALLS[row['mode']]}\n{row['gate']} gate, {row['decay']} decays" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_xlabel("milliseconds (less is better)")
    axes.legend(loc="lower right", fontsize=8)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def ratios(figure: Any, name: str) -> None:
    """How many times fla's time is ours, one bar a shape, with both times."""
    rows = [row for row in read(name)["rows"] if FLA in row["ms"]][::-1]
    axes = figure.subplots()
    for i, row in enumerate(rows):
        ours, theirs = row["ms"][OURS]["median"], row["ms"][FLA]["median"]
        axes.barh(i, theirs / ours, height=0.6, color="#3f51b5")
        axes.text(theirs / ours, i, f" {milliseconds(ours)} ms, fla {milliseconds(theirs)} ms", va="center", fontsize=8)
    axes.axvline(1.0, color="#808080", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [shape(row) for row in rows], fontsize=8)
    axes.set(xlabel="fla's time over kda_core's (more is better)", ylabel="B, T, H, K")
    axes.margins(x=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def errors_by_case(figure: Any) -> None:
    """Error of o and of every gradient, ours over fla's."""
    rows = [row for row in read("accuracy")["rows"] if row["dtype"] != "fp32"]
    axes = figure.subplots()
    outputs = list(dict.fromkeys(o for row in rows for o in row["errors"][OURS]))
    for i, row in enumerate(rows[::-1]):
        ours, theirs = row["errors"][OURS], row["errors"][FLA]
        axes.scatter([ours[o] / theirs[o] for o in outputs if o in ours], [i] * len(ours), s=14, color="#3f51b5")
    axes.axvline(1.0, color="#808080", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['case']} ({row['dtype']})" for row in rows[::-1]], fontsize=8)
    axes.set(xscale="log", xlabel="error of each result over fla's (left of 1 is better)")
    axes.spines[["top", "right"]].set_visible(False)


def errors_over_length(figure: Any) -> None:
    """Error of o and of the worst gradient against T, one panel a kind of decay."""
    rows = read("errors_by_length")["rows"]
    decays = list(dict.fromkeys(row["decay"] for row in rows))
    colors = {"float32": "#3f51b5", "float16": "#00897b", "bfloat16": "#d84315"}
    panels = figure.subplots(1, len(decays), sharey=True, squeeze=False)[0]
    for panel, decay in zip(panels, decays, strict=True):
        for dtype, color in colors.items():
            chosen = [row for row in rows if (row["decay"], row["dtype"]) == (decay, dtype)]
            lengths = [row["T"] for row in chosen]
            worst = [max(e for n, e in row["errors"].items() if n.startswith("d")) for row in chosen]
            panel.loglog(lengths, [row["errors"]["o"] for row in chosen], "o-", color=color, label=f"{dtype}, o")
            panel.loglog(lengths, worst, "x--", color=color, label=f"{dtype}, worst gradient")
        panel.set(title=f"{decay} decays", xlabel="tokens")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("relative error")
    panels[-1].legend(fontsize=7)


PLOTS: dict[str, tuple[str, Callable[[Any], None], tuple[float, float]]] = {
    "headline": ("headline", times, (7.0, 3.2)),
    "training": ("training", lambda figure: ratios(figure, "training"), (7.0, 3.4)),
    "inference": ("inference", lambda figure: ratios(figure, "inference"), (7.0, 3.6)),
    "errors_by_case": ("accuracy", errors_by_case, (7.0, 3.6)),
    "errors_by_length": ("errors_by_length", errors_over_length, (7.5, 3.4)),
}
"""By name: the measurement, what draws it, and the size in inches."""


def digest(data: str) -> str:
    """What ties a plot to its data: renderers differ between versions, numbers do not."""
    return hashlib.sha256((DATA / f"{data}.json").read_bytes()).hexdigest()[:16]


def draw(name: str) -> None:
    """Write a plot, with the digest of its data."""
    import matplotlib
    from matplotlib.figure import Figure

    data, drawn, size = PLOTS[name]
    with matplotlib.rc_context({"svg.hashsalt": "kda_core", "svg.fonttype": "path"}):
        figure = Figure(figsize=size, layout="constrained")
        drawn(figure)
        metadata = {"Date": None, "Creator": None, "Description": f"data {digest(data)}"}
        figure.savefig(IMAGES / f"{name}.svg", metadata=metadata, facecolor="white")


def stale() -> Iterator[str]:
    """Pages and plots that are not what the data give."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            yield str(page.relative_to(DOCS.parent))
    for name, (data, _, _) in PLOTS.items():
        image = IMAGES / f"{name}.svg"
        if not image.exists() or f"data {digest(data)}" not in image.read_text(encoding="utf-8"):
            yield str(image.relative_to(DOCS.parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, name what is out of date")
    if parser.parse_args().check:
        names = list(stale())
        print(*(f"{name} is not what docs/data gives: run python tools/figures.py" for name in names), sep="\n")
        return bool(names)
    IMAGES.mkdir(exist_ok=True)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(filled(text), encoding="utf-8")
    for name in PLOTS:
        draw(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
