"""Plots out of what ``kda bench --json`` wrote."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from kda_core.bench.peers import OURS
from kda_core.bench.session import Row
from kda_core.bench.speed_report import speedup
from kda_core.bench.workload import MODES

FORMATS = (".png", ".svg", ".pdf")


def draw(content: dict[str, Any], file: Path) -> None:
    """Draw the rows to a file whose name says the format.

    Raises:
        ValueError: there is nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = content["rows"]
    suites = [suite for suite in MODES if any(row["suite"] == suite for row in rows)]
    by_length = [row for row in rows if row.get("by_length")]
    drawn: list[tuple[float, Any]] = [
        (_height(rows, suite), partial(_speed, suite=suite, rows=rows)) for suite in suites
    ]
    for case in dict.fromkeys(_kind(row) for row in by_length):
        chosen = [row for row in by_length if _kind(row) == case]
        drawn += [(4.0, partial(_lengths, case=case, output=o, rows=chosen)) for o in ("o", "final_state", "gradients")]
    if not drawn:
        raise ValueError("plot: expected rows of training or inference, or of accuracy by length, got none")
    across = min(len(drawn), 3) if by_length else len(drawn)
    down = -(-len(drawn) // across)
    size = (5.5 * across, down * max(height for height, _ in drawn))
    figure, panels = pyplot.subplots(down, across, figsize=size, squeeze=False)
    for panel in panels.flat[len(drawn) :]:
        panel.set_visible(False)
    for panel, (_, draw_panel) in zip(panels.flat, drawn, strict=False):
        draw_panel(panel)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _height(rows: list[Row], suite: str) -> float:
    return 1.5 + 0.22 * max(len(_bars(rows, suite)[0]), 5)


def _kind(row: Row) -> str:
    """What a case by length is besides its length and dtype: "4096 tokens, KIND, bfloat16"."""
    return row["case"].split(", ")[1]


def _lengths(panel: Any, case: str, output: str, rows: list[Row]) -> None:
    """Error over the number of tokens: a colour a dtype, a line style an implementation."""
    names = list(dict.fromkeys(name for row in rows for name in row["implementations"]))
    for i, dtype in enumerate(dict.fromkeys(row["dtype"] for row in rows)):
        for name in names:
            points = [
                (row["sizes"]["T"], _error(row["implementations"][name]["errors"], output))
                for row in rows
                if row["dtype"] == dtype and name in row["implementations"]
            ]
            line = "-" if name == OURS else "--"
            panel.plot(*zip(*points, strict=True), line, color=f"C{i}", marker="o", label=f"{name}, {dtype}")
    panel.set(title=f"{case}: {output}", xlabel="tokens", ylabel="relative error", xscale="log", yscale="log")
    panel.legend(fontsize="xx-small")


def _error(errors: dict[str, Any], output: str) -> float:
    """The error of an output, or the largest of the gradients; NaN where one is no number."""
    if output != "gradients":
        return float(errors[output])
    return max(float(x) for n, x in errors.items() if n.startswith("d"))


def _bars(rows: list[Row], suite: str) -> tuple[list[Row], str | None]:
    """The rows that can be drawn, and the peer beside which: the one that most of them have."""
    own = [row for row in rows if row["suite"] == suite and OURS in row.get("implementations", {})]
    counts: dict[str, int] = {}
    for row in own:
        for name in row["implementations"]:
            if name != OURS:
                counts[name] = counts.get(name, 0) + 1
    return own, max(counts, key=lambda n: counts[n], default=None)


def _speed(panel: Any, suite: str, rows: list[Row]) -> None:
    """Bars: how many times faster than the peer, a colour a gate and decay; without a peer milliseconds."""
    own, peer = _bars(rows, suite)
    regimes = list(dict.fromkeys((row["gate"], row["decay"]) for row in own))
    found = list(dict.fromkeys(row["shape"] for row in own))
    height = 0.8 / max(len(regimes), 1)
    for i, regime in enumerate(regimes):
        at, values = [], []
        for row in own:
            value = speedup(row, peer) if peer else row["implementations"][OURS]["ms"]["median"]
            if (row["gate"], row["decay"]) == regime and value is not None:
                at.append(found.index(row["shape"]) + height * (i - (len(regimes) - 1) / 2))
                values.append(value)
        bars = panel.barh(at, values, height, label=f"{regime[0]}, {regime[1]}")
        panel.bar_label(bars, fmt="%.1f" if peer else "%.2f", fontsize=6, padding=2)
    panel.set_yticks(range(len(found)), found, fontsize="small")
    panel.invert_yaxis()
    if peer:
        panel.axvline(1.0, color="gray", linewidth=0.8)
    else:
        panel.set_xscale("log")
    panel.set(title=suite, xlabel=f"times faster than {peer}" if peer else "ms")
    panel.legend(fontsize="x-small", loc="best")
