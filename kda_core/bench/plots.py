"""Plots of measurements (``kda bench --json``): speed beside a peer, and errors by length and dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kda_core.bench.decode import bandwidth
from kda_core.bench.peers import OURS
from kda_core.bench.session import Row
from kda_core.bench.speed_report import speedup
from kda_core.bench.workload import MODES

FORMATS = (".png", ".svg", ".pdf")
WIDTH = 5.5
"""Inches of a panel."""
DRAWN = frozenset((*MODES, "decode", "accuracy"))
"""Suites that have plots."""
OUTPUTS = ("o", "final_state", "gradients")


def draw(content: dict[str, Any], file: Path) -> None:
    """Draw the rows to a file; its suffix gives the format. One strip for speed, one for each kind of accuracy.
    Raises:
        ValueError: there is nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in content["rows"] if row["suite"] in MODES and OURS in row.get("implementations", {})]
    by_length = [row for row in content["rows"] if row.get("by_length") and OURS in row["implementations"]]
    suites = [suite for suite in MODES if any(r["suite"] == suite for r in timed)]
    kinds = list(dict.fromkeys(map(_kind, by_length)))
    steps = [row for row in content["rows"] if row["suite"] == "decode" and row["sizes"]["T"] == 1]
    steps = [row for row in steps if OURS in row.get("implementations", {})]
    states = list(dict.fromkeys(row["state"] for row in steps))
    if not (suites or kinds or states):
        raise ValueError("plot: expected rows of speed, of decoding steps or of accuracy by length, got none")
    heights = [_speed_height(timed)] * bool(suites) + [4.0] * bool(states) + [4.0] * len(kinds)
    across = max(len(suites), len(states), len(OUTPUTS) if kinds else 0)
    figure = pyplot.figure(figsize=(WIDTH * across, sum(heights)), layout="constrained")
    strips = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if suites:
        _speed(strips.pop(0), suites, timed)
    if states:
        _decode(strips.pop(0), states, steps, content["copy_bytes_per_second"])
    for kind, strip in zip(kinds, strips, strict=True):
        _lengths(strip, kind, [row for row in by_length if _kind(row) == kind])
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _regime(row: Row) -> str:
    return f"{row['gate']} gate, {row['decay']} decays" if row["gate"] != "given" else f"{row['decay']} decays given"


def _speed_height(rows: list[Row]) -> float:
    most = max((len({r["shape"] for r in rows if r["suite"] == suite}) for suite in MODES), default=0)
    return 1.6 + most * (0.2 + 0.12 * len({_regime(row) for row in rows}))


def _peer(rows: list[Row]) -> str | None:
    """The peer that most rows have."""
    names = [name for row in rows for name in row["implementations"] if name != OURS]
    return max(dict.fromkeys(names), key=names.count, default=None)


def _speed(strip: Any, suites: list[str], rows: list[Row]) -> None:
    """A panel a suite, a colour a gate and decay: speed-up over a peer, or milliseconds without a peer."""
    panels = strip.subplots(1, len(suites), squeeze=False)[0]
    regimes = list(dict.fromkeys(map(_regime, rows)))
    height = 0.8 / len(regimes)
    handles = {}
    for panel, suite in zip(panels, suites, strict=True):
        own = [row for row in rows if row["suite"] == suite]
        peer, shapes = _peer(own), list(dict.fromkeys(row["shape"] for row in own))
        for i, regime in enumerate(regimes):
            at, values = [], []
            for row in own:
                value = speedup(row, peer) if peer else row["implementations"][OURS]["ms"]["median"]
                if _regime(row) == regime and value is not None:
                    at.append(shapes.index(row["shape"]) + height * (i - (len(regimes) - 1) / 2))
                    values.append(value)
            handles[regime] = bars = panel.barh(at, values, height, color=f"C{i}")
            panel.bar_label(bars, fmt="%.1f" if peer else "%.3g", fontsize=6, padding=2)
        panel.set_yticks(range(len(shapes)), [shape.replace(":", "\n") for shape in shapes], fontsize="small")
        panel.invert_yaxis()
        panel.margins(x=0.08)
        if peer:
            panel.axvline(1.0, color="gray", linewidth=0.8)
        else:
            panel.set_xscale("log")
        panel.set(title=suite, xlabel=f"times faster than {peer}" if peer else "ms")
    strip.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize="small")


def _decode(strip: Any, states: list[str], rows: list[Row], copy: float) -> None:
    """A panel a dtype of the pool: bandwidth over that of a large copy, over the number of sequences."""
    # Steps of other heads and channels move other amounts of bytes: draw the most common.
    kinds = [(row["sizes"]["H"], row["sizes"]["K"]) for row in rows]
    H, K = max(dict.fromkeys(kinds), key=kinds.count)
    rows = [row for row, kind in zip(rows, kinds, strict=True) if kind == (H, K)]
    handles = {}
    for panel, state in zip(strip.subplots(1, len(states), squeeze=False)[0], states, strict=True):
        own = [row for row in rows if row["state"] == state]
        for i, layout in enumerate(dict.fromkeys(row["layout"] for row in own)):
            names = dict.fromkeys(name for row in own for name in row["implementations"])
            for style, name in zip(("-", "--", ":", "-."), names, strict=False):
                points = [
                    (row["sizes"]["N"], 100 * bandwidth(row, name) / copy)
                    for row in own
                    if row["layout"] == layout and name in row["implementations"]
                ]
                if points:
                    (line,) = panel.plot(*zip(*points, strict=True), style, color=f"C{i}", marker="o", markersize=4)
                    handles[f"{name}, {layout}"] = line
        sizes = sorted({row["sizes"]["N"] for row in own})
        panel.set(title=f"a step, {state} pool, H = {H}, K = {K}", xlabel="sequences N", xscale="log")
        panel.set_xticks(sizes, list(map(str, sizes)))
        panel.set_xticks([], minor=True)
        panel.set_ylabel("bandwidth, % of a large copy")
        panel.axhline(100, color="gray", linewidth=0.5)
    strip.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize="small")


def _kind(row: Row) -> str:
    """KIND of a case that is named "4096 tokens, KIND, bfloat16"."""
    return row["case"].split(", ")[1]


def _lengths(strip: Any, kind: str, rows: list[Row]) -> None:
    """A panel an output: error over the number of tokens, a colour a dtype, a line style an implementation."""
    names = list(dict.fromkeys(name for row in rows for name in row["implementations"]))
    tokens = sorted({row["sizes"]["T"] for row in rows})
    handles = {}
    for panel, output in zip(strip.subplots(1, len(OUTPUTS)), OUTPUTS, strict=True):
        for i, dtype in enumerate(dict.fromkeys(row["dtype"] for row in rows)):
            for style, name in zip(("-", "--", ":", "-."), names, strict=False):
                points = [
                    (row["sizes"]["T"], _error(row["implementations"][name]["errors"], output))
                    for row in rows
                    if row["dtype"] == dtype and name in row["implementations"]
                ]
                if points:
                    (line,) = panel.plot(*zip(*points, strict=True), style, color=f"C{i}", marker="o", markersize=4)
                    handles[f"{name}, {dtype}"] = line
        panel.set(title=f"{kind}: {output}", xlabel="tokens", ylabel="relative error", xscale="log", yscale="log")
        panel.set_xticks(tokens, list(map(str, tokens)))
        panel.set_xticks([], minor=True)
        panel.grid(axis="y", linewidth=0.3)
    strip.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize="small")


def _error(errors: dict[str, Any], output: str) -> float:
    """The error of an output, or the largest of the gradients; NaN where one is no number."""
    if output != "gradients":
        return float(errors[output])
    return max(float(x) for n, x in errors.items() if n.startswith("d"))
