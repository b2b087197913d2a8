"""Plots out of what ``kda bench --json`` wrote."""

from __future__ import annotations

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

    suites = [suite for suite in MODES if any(row["suite"] == suite for row in content["rows"])]
    if not suites:
        raise ValueError("plot: expected rows of training or inference, got none")
    heights = [max(len(_bars(content["rows"], suite)[0]), 4) for suite in suites]
    figure, panels = pyplot.subplots(
        1, len(suites), figsize=(6.5 * len(suites), 1.5 + 0.28 * max(heights)), squeeze=False
    )
    for panel, suite in zip(panels[0], suites, strict=True):
        _speed(panel, suite, content["rows"])
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


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
