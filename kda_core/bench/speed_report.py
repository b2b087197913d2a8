"""Tables of the suites that time ``chunk_kda``, from the rows of the JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from kda_core.bench.peers import OURS
from kda_core.bench.session import Row


def _number(x: Any, digits: int = 3) -> str:
    """Milliseconds with about three digits."""
    return f"{x:.{digits}f}" if x < 100 else f"{x:.0f}"


def speedup(row: Row, peer: str, key: str = "ms") -> float | None:
    """How many times slower the peer is."""
    found = row.get("implementations", {})
    if any(key not in found.get(name, {}) for name in (OURS, peer)):
        return None
    return found[peer][key]["median"] / found[OURS][key]["median"]


def _errors(errors: dict[str, Any]) -> tuple[str, str]:
    """The error of o, and that of the final state or the worst of the gradients."""

    def text(x: Any) -> str:
        return f"{x:.1e}" if isinstance(x, float) else str(x)

    others = {n: x for n, x in errors.items() if n != "o"}
    # The JSON spells NaN and infinity as strings: the worst errors.
    worst = max(others, key=lambda n: others[n] if isinstance(others[n], float) else float("inf"), default=None)
    return text(errors.get("o", "–")), "–" if worst is None else f"{text(others[worst])} {_SHORT.get(worst, worst)}"


_WORDS = ("B,T,H,K", "gate, decay (mean)", "")
_SHORT = {"final_state": "state"}


def _device_ms(found: dict[str, Any]) -> str:
    device = found["device_ms"]
    return _number(device["median"]) + ("" if device["how"] == "graph" else " Σ")


_OPTIONAL = {
    "device_ms": ("device ms", _device_ms),
    "of_matmul": ("of sgemm", lambda found: f"{found['of_matmul']:.0%}"),
    "peak_bytes": ("GiB", lambda found: f"{found['peak_bytes'] / 2**30:.2f}"),
}
"""Columns that not every machine measures: the key in the JSON, its title and its text."""


def tables(rows: list[Row], content: dict[str, Any]) -> list[Table | Text]:
    """One table a suite; under a row its peers."""
    found: list[Table | Text] = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        own = [row for row in rows if row["suite"] == suite]
        parts = [part for row in own for part in row.get("implementations", {}).values()]
        optional = [key for key in _OPTIONAL if any(key in part for part in parts)]
        table = Table(title=f"{suite}: {own[0]['what']}", title_justify="left")
        for name in (*_WORDS, "ms", "× ours", "floor", *(_OPTIONAL[key][0] for key in optional), "error o", "worst"):
            table.add_column(name, justify="left" if name in _WORDS else "right", overflow="fold")
        for row in own:
            _add(table, row, optional)
        found += [table, *_remarks(own)]
    return found


def _remarks(rows: list[Row]) -> list[Text]:
    """Notes below the table."""
    lines = []
    parts = [(name, part) for row in rows for name, part in row.get("implementations", {}).items()]
    if any("errors" in part for _, part in parts):
        lines.append("errors: |x - r| / |r| against float64 on some heads and tokens; worst: of the other results")
    lines += [f"no errors: {row['errors_failed']}" for row in rows if "errors_failed" in row]
    if any(part.get("device_ms", {}).get("how") == "sum of kernels" for _, part in parts):
        lines.append("Σ: the sum of the kernels; the call cannot be captured in a graph (the JSON says why)")
    lines += [f"{name}: {part['note']}" for name, part in parts if "note" in part]
    lines += [f"left out of some rows: {name}: {why}" for row in rows for name, why in row.get("left_out", {}).items()]
    lines += [_kernels(row) for row in rows if "kernels_ms" in row.get("implementations", {}).get(OURS, {})]
    return [Text(line) for line in dict.fromkeys(lines)]


def _kernels(row: Row) -> str:
    """Milliseconds of our kernels, the longest first."""
    found = row["implementations"][OURS]["kernels_ms"]
    split = ", ".join(f"{name[:32]} {ms:.3f}" for name, ms in found.items() if ms > SHORTEST_KERNEL)
    return f"{row['shape']} {row['gate']}, {row['decay']}: {split}"


SHORTEST_KERNEL = 0.002
"""Milliseconds below which a kernel is not shown."""


def _add(table: Table, row: Row, optional: list[str]) -> None:
    mean = row.get("mean_log_decay")
    gate = f"{row['gate']}, {row['decay']}" + ("" if mean is None else f" ({mean:.2g})")
    first = (row["shape"], gate)
    for name, found in row.get("implementations", {}).items():
        ratio = speedup(row, name)
        table.add_row(
            *first,
            name,
            _number(found["ms"]["median"]),
            "" if name == OURS or ratio is None else f"{ratio:.2f}",
            _number(row["floor_ms"]) if name == OURS else "",
            *(_OPTIONAL[key][1](found) if key in found else "–" for key in optional),
            *_errors(found.get("errors", {})),
        )
        first = ("", "")
    if "failed" in row:
        table.add_row(*first, OURS, "fails")
