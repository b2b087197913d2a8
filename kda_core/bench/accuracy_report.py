"""Tables of the suite ``accuracy``, for the terminal and as Markdown, from the rows of the JSON."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kda_core.bench.peers import OURS
from kda_core.bench.session import Row

BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"
WORSE = 1.1
"""More than this times the other's error counts as worse: two right kernels round differently."""


def _outputs(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(o for row in rows for x in row["implementations"].values() for o in x["errors"]))


def _names(row: Row) -> list[str]:
    return [*row["implementations"], *row["left_out"]]


def cell(row: Row, name: str, output: str) -> tuple[str, bool]:
    """An error, and whether it is ours and worse than all others'."""
    found = row["implementations"].get(name)
    if found is None:
        return "fails", False
    error = found["errors"].get(output)
    if not isinstance(error, float):
        return error or "", bool(error)
    others = [x["errors"].get(output) for n, x in row["implementations"].items() if n != OURS]
    numbers = [x for x in others if isinstance(x, float)]
    return f"{error:.1e}", name == OURS and bool(numbers) and error > WORSE * min(numbers)


def tables(rows: list[Row], content: dict[str, Any]) -> list[Table]:
    """The errors, and where ours are the larger ones."""
    outputs = _outputs(rows)
    title = f"accuracy: |x - r| / |r| against float64; bold: more than {WORSE} times the other's"
    table = Table("case", "", *outputs, title=title, title_justify="left")
    for row in rows:
        for i, name in enumerate(_names(row)):
            cells = [f"[bold]{text}[/]" if worse else text for text, worse in (cell(row, name, o) for o in outputs)]
            table.add_row(escape(row["case"]) if i == 0 else "", name, *cells)
        if "failed" in row:
            table.add_row(escape(row["case"]), OURS, "fails")
    larger = Table("case", "output", "ratio", "ratio of the draws", title="ours is the larger in", title_justify="left")
    for line in compared(rows):
        larger.add_row(*line)
    return [table, larger] if larger.row_count else [table]


def compared(rows: list[Row], other: str = "fla") -> list[tuple[str, str, str, str]]:
    """Outputs whose error exceeds the other's: by how much, in how many draws, and how significant that is."""
    found = []
    for row in rows:
        if not {OURS, other} <= row["implementations"].keys():
            continue
        ours, theirs = (row["implementations"][name] for name in (OURS, other))
        for output, error in ours["errors"].items():
            means = (error, theirs["errors"][output])
            pairs = [(a[output], b[output]) for a, b in zip(ours["draws"], theirs["draws"], strict=True)]
            # The JSON spells NaN and infinity as strings; the table of errors shows them.
            numbers = all(isinstance(x, float) and x > 0 for pair in [means, *pairs] for x in pair)
            if numbers and means[0] > means[1]:
                logs = [math.log(a / b) for a, b in pairs]
                ratio = f"{math.exp(statistics.mean(logs)):.3f}"
                if len(logs) > 1:
                    ratio += f" ± {statistics.stdev(logs) / math.sqrt(len(logs)):.3f}"
                found.append((row["case"], output, f"{means[0] / means[1]:.3f}", ratio))
    return found


def markdown(content: dict[str, Any]) -> str:
    """Both tables in Markdown, one line a case and implementation; our error in bold if it is the largest.

    Raises:
        ValueError: there is no row of this suite.
    """
    rows = [row for row in content["rows"] if row["suite"] == "accuracy"]
    if not rows:
        raise ValueError("markdown: expected rows of the suite accuracy, got none")
    outputs = _outputs(rows)
    environment = content["environment"]
    versions = ", ".join(f"{n} {v}" for n, v in environment["versions"].items())
    draws = max((len(x["draws"]) for row in rows for x in row["implementations"].values()), default=1)
    several = f"; root mean square of {draws} draws" if draws > 1 else ""
    lines = [f"{environment['device']}; {versions}; backend `{environment['backend']}`{several}.", ""]
    lines += ["| case | dtype | | " + " | ".join(outputs) + " |", "|---|---|---|" + "---|" * len(outputs)]
    for row in rows:
        for i, name in enumerate(_names(row)):
            what = f"{row['case']} | {row['dtype']}" if i == 0 else " | "
            cells = [f"**{text}**" if worse else text for text, worse in (cell(row, name, o) for o in outputs)]
            lines.append(f"| {what} | {name} | " + " | ".join(cells) + " |")
    if found := compared(rows):
        head = "| ours is the larger in | output | root mean squares | geometric mean of the draws, standard error |"
        lines += ["", head, "|---|---|---|---|", *("| " + " | ".join(line) + " |" for line in found)]
    return "\n".join(lines)


def write(file: Path, text: str) -> None:
    """Put ``text`` between the markers of a Markdown file.

    Raises:
        ValueError: the file lacks them.
    """
    content = file.read_text()
    if content.count(BEGIN) != 1 or content.count(END) != 1:
        raise ValueError(f"markdown: expected {BEGIN} and {END} once each in {file}")
    before, rest = content.split(BEGIN)
    file.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
