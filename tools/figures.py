"""Tables and plots of the documentation, from the measurements in ``docs/data``.

    python tools/figures.py            # write the tables into the pages and the plots into docs/images
    python tools/figures.py --check    # change nothing; status 1, with the names, when something is out of date

A table is in a page between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. The files in ``docs/data`` are
those that the programs in ``benchmarks`` write (schema 1): replace an old measurement with a new one and run this
script. docs/performance.md has the command lines.
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

SCHEMA = 1
OURS, FLA, CHUNK, COPY = "kda_core", "fla", "chunk_kda", "copy"
RAW_GATES = ("bounded", "softplus")
CALLS = {"training": "training step", "inference": "prefill"}
HEADLINE_SHAPE = "1,8192,96,128"
GIB = 2**30
SLOT = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.S)
OUR_COLOR, OTHER_COLOR = "#3f51b5", "#b0b0b0"

Row = dict[str, Any]


def read(name: str) -> dict[str, Any]:
    """A measurement, by the name of its file in ``docs/data``, or by its path without ".json"."""
    content = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    if content.get("schema") != SCHEMA:
        raise ValueError(f"docs/data/{name}.json: expected schema {SCHEMA}, got {content.get('schema')!r}")
    return content


def rows_of(name: str, *suites: str) -> list[Row]:
    """The rows of some suites in which ours ran."""
    return [r for r in read(name)["rows"] if r["suite"] in suites and OURS in r.get("implementations", {})]


def headline_rows() -> list[Row]:
    """A training step and a prefill of one shape, with everything in the operator."""
    found = rows_of("headline", *CALLS)
    chosen = [row for row in found if row["gate"] in RAW_GATES and row["shape"] == HEADLINE_SHAPE]
    missing = {(s, g) for s in CALLS for g in RAW_GATES} - {(row["suite"], row["gate"]) for row in chosen}
    if missing:
        raise ValueError(
            f"docs/data/headline.json: expected rows of {HEADLINE_SHAPE} for {sorted(missing)}, found none"
        )
    return chosen


def errors_of(row: Row, name: str) -> dict[str, float]:
    """Errors by result; the JSON spells numbers that are not finite."""
    return {n: float(x) for n, x in row["implementations"][name]["errors"].items()}


def median(row: Row, name: str, key: str = "ms") -> float | None:
    """Median milliseconds of an implementation ("device_ms": without the host), or None where it was not timed."""
    found = row["implementations"].get(name, {}).get(key)
    return None if found is None else found["median"]


def others(rows: list[Row]) -> list[str]:
    return [n for n in dict.fromkeys(n for row in rows for n in row["implementations"]) if n not in (OURS, COPY)]


def ratio(row: Row, name: str) -> float | None:
    """Another implementation's time over ours."""
    theirs, ours = median(row, name), median(row, OURS)
    return None if theirs is None or ours is None else theirs / ours


def short(value: float | None) -> str:
    """At most three significant digits; empty where nothing was measured."""
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def digits(value: float | None) -> str:
    """Three significant digits or three decimals, the same for a whole column."""
    if value is None or value >= 1000:
        return short(value)
    return f"{value:.3f}" if value < 1 else f"{value:#.3g}".rstrip(".")


def microseconds(milliseconds: float | None) -> str:
    """A step's time with one decimal, or with a thousands separator."""
    if milliseconds is None:
        return ""
    return f"{1e3 * milliseconds:.1f}" if milliseconds < 1 else f"{1e3 * milliseconds:,.0f}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}×"


def span(values: list[float], unit: str = "") -> str:
    """One value, or the least and the largest."""
    low, high = short(min(values)), short(max(values))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, without columns in which no row has anything."""
    kept = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]
    lines = [[cells[i] for i in kept] for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def label(row: Row) -> str:
    """B, T, H, K of a row, and the rest of its shape."""
    s = row["sizes"]
    text = f"{s['B']}, {s['T']}, {s['H']}, {s['K']}"
    text += f", V = {s['V']}" if s["V"] != s["K"] else ""
    text += f", HV = {s['HV']}" if s["HV"] != s["H"] else ""
    return text + (f", packed in {s['N']}" if "packed" in row["shape"] else "")


def machine(name: str) -> str:
    """Machine, versions, days and commits of a measurement, as a sentence."""
    content = read(name)
    environment = content["environment"]
    versions = [f"{n} {v}" for n, v in environment["versions"].items() if n not in (OURS, "driver")]
    runs: dict[tuple[str, str], set[str]] = {}
    for row in content["rows"]:
        day, commit = (row.get(n, environment.get(n)) or "" for n in ("date", "commit"))
        runs.setdefault((day, commit), set()).add(row["suite"])
    days = []
    for (day, commit), suites in sorted(runs.items()):
        which = f"{' and '.join(sorted(suites))} " if len(runs) > 1 else ""
        days.append(which + day + (f", commit {commit[:7]}" if commit else ""))
    return f"{environment['device']}; {', '.join(versions)}; {'; '.join(days)}."


def headline_figures() -> str:
    """The figures of the first screen in a sentence, then a training step, a prefill and a step's memory."""
    faster, lines = {}, []
    for suite, call in CALLS.items():
        ratios = [ratio(row, FLA) for row in headline_rows() if row["suite"] == suite]
        faster[suite] = span([round(r, 1) for r in ratios if r])
        parts = []
        for gate in RAW_GATES:
            rows = [row for row in headline_rows() if (row["suite"], row["gate"]) == (suite, gate)]
            text = f"{span([median(row, OURS) or 0.0 for row in rows], ' ms')} with the {gate} gate"
            if theirs := [(median(row, FLA) or 0.0, ratio(row, FLA) or 0.0) for row in rows if median(row, FLA)]:
                longer = span([round(r, 1) for _, r in theirs])
                text += f" (fla: {span([ms for ms, _ in theirs], ' ms')}, {longer} times as long)"
            parts.append(text)
        lines.append(f"- **{call.capitalize()}**: {', '.join(parts)}.")
    peaks = [
        [row["implementations"].get(n, {}).get("peak_bytes") for n in (OURS, FLA)]
        for row in headline_rows()
        if row["suite"] == "training"
    ]
    peaks = [pair for pair in peaks if all(pair)]
    shares = span([round(ours / theirs, 2) for ours, theirs in peaks])
    both = [span([round(size / GIB, 2) for size in sizes], " GiB") for sizes in zip(*peaks, strict=True)]
    lines.append(f"- **Peak memory of a training step**: {both[0]} (fla: {both[1]}).")
    first = f"A training step is {faster['training']} times as fast as fla's, a prefill {faster['inference']} times,"
    return "\n".join([f"**{first} in {shares} of the memory.**", "", *lines])


Cells = tuple[list[str], list[list[str]]]  # The header of a table, and its rows


def beside(rows: list[Row], first: dict[str, Callable[[Row], str]], spelled: Callable[..., str], unit: str) -> Cells:
    """The rows' names, the times of all implementations, and the peers' over ours."""
    peers = others(rows)
    body = [
        [
            *(cell(row) for cell in first.values()),
            *(spelled(median(row, n)) for n in (OURS, *peers)),
            *(times(ratio(row, n)) for n in peers),
        ]
        for row in rows
    ]
    return [*first, *(f"{n} {unit}" for n in (OURS, *peers)), *(f"{n} / {OURS}" for n in peers)], body


def speed(name: str, suite: str) -> str:
    rows = rows_of(name, suite)

    def gate(row: Row) -> str:
        return f"{row['gate']}, {row['decay']}" if row["gate"] in RAW_GATES else "given"

    first = {"B, T, H, K": label, "gate, decays": gate}
    header, body = beside(rows, first, digits, "ms")
    names = (OURS, *others(rows))
    for row, cells in zip(rows, body, strict=True):
        peaks = [row["implementations"].get(n, {}).get("peak_bytes") for n in (OURS, FLA)]
        cells += [digits(median(row, n, "device_ms")) for n in names]
        cells += [digits(row.get("floor_ms")), *(f"{size / GIB:.2f}" if size else "" for size in peaks)]
    return table([*header, *(f"{n} replayed ms" for n in names), "floor ms", f"{OURS} GiB", "fla GiB"], body)


def headline() -> str:
    first = {"call": lambda row: f"{CALLS[row['suite']]}, {row['gate']} gate, {row['decay']} decays"}
    return table(*beside(headline_rows(), first, short, "ms"))


def decoding(name: str) -> str:
    rows = [row for row in rows_of(name, "decode") if row["sizes"]["T"] == 1]
    copy = read(name).get("copy_bytes_per_second")
    first = {"pool": lambda row: f"{row['state']}, {row['layout']}", "sequences": lambda row: str(row["sizes"]["N"])}
    header, body = beside(rows, first, microseconds, "µs")
    for row, cells in zip(rows, body, strict=True):
        known = copy and "bytes" in row
        cells.append(f"{1e3 * row['bytes'] / (median(row, OURS) or 0.0) / copy:.0%}" if known else "")
    return table([*header, "of a copy's bandwidth"], body)


def prompts() -> str:
    """Short prompts by both functions; the faster one in bold."""
    body = []
    for row in rows_of("decode", "decode"):
        if row["sizes"]["T"] == 1 or median(row, CHUNK) is None:
            continue
        both = [median(row, n) or 0.0 for n in (OURS, CHUNK)]
        cells = [f"**{microseconds(ms)}**" if ms == min(both) else microseconds(ms) for ms in both]
        body.append([str(row["sizes"]["N"]), str(row["sizes"]["T"]), *cells])
    return table(["sequences", "tokens each", "`fused_recurrent_kda` µs", "`chunk_kda` µs"], body)


def accuracy(name: str = "accuracy") -> str:
    """Errors of every case beside the peers'."""
    rows = [row for row in rows_of(name, "accuracy") if not row["by_length"]]
    outputs = list(dict.fromkeys(o for row in rows for o in errors_of(row, OURS)))
    body = []
    for row in rows:
        for name in row["implementations"]:
            found = errors_of(row, name)
            first = [row["case"], row["dtype"]] if name == OURS else ["", ""]
            body.append([*first, name, *(f"{found[o]:.1e}" if o in found else "" for o in outputs)])
    return table(["case", "dtype", "implementation", *outputs], body)


def length_rows() -> list[tuple[str, Row]]:
    """Rows of errors by length with the kind of their decays: a case is called "4096 tokens, KIND, float32"."""
    found = rows_of("errors_by_length", "accuracy")
    return [(row["case"].split(", ")[1], row) for row in found if row["by_length"]]


def worst_gradient(errors: dict[str, float]) -> tuple[str, float]:
    """The gradient with the largest error."""
    return max(((n, e) for n, e in errors.items() if n.startswith("d")), key=lambda pair: pair[1])


def errors_by_length() -> str:
    """Errors of o, of the final state and of the worst gradient."""
    body = []
    for kind, row in length_rows():
        errors = errors_of(row, OURS)
        name, worst = worst_gradient(errors)
        cells = [f"{errors['o']:.1e}", f"{errors['final_state']:.1e}", f"{worst:.1e} ({name})"]
        body.append([kind, row["dtype"], str(row["sizes"]["T"]), *cells])
    return table(["decays", "dtype", "T", "o", "final_state", "largest gradient"], body)


TABLES: dict[str, Callable[[], str]] = {
    "headline-figures": headline_figures,
    "headline": headline,
    "headline-machine": lambda: machine("headline"),
    "training": lambda: speed("headline", "training"),
    "inference": lambda: speed("headline", "inference"),
    "training-given": lambda: speed("given", "training"),
    "given-machine": lambda: machine("given"),
    "inference-more": lambda: speed("speed", "inference"),
    "speed-machine": lambda: machine("speed"),
    "decoding": lambda: decoding("decode"),
    "decoding-machine": lambda: machine("decode"),
    "prompts": prompts,
    "cpu-training": lambda: speed("cpu", "training"),
    "cpu-inference": lambda: speed("cpu", "inference"),
    "cpu-decoding": lambda: decoding("cpu"),
    "cpu-machine": lambda: machine("cpu"),
    "accuracy": accuracy,
    "accuracy-machine": lambda: machine("accuracy"),
    "errors-by-length": errors_by_length,
    "errors-by-length-machine": lambda: machine("errors_by_length"),
}


def filled(page: str) -> str:
    """The text of a page with its tables made anew from the data."""
    return SLOT.sub(lambda m: f"{m[1]}\n{TABLES[m['name']]()}\n\n{m[3]}", page)


def draw_headline(figure: Any) -> None:
    """Milliseconds of the headline's calls, ours above fla's."""
    rows = headline_rows()[::-1]
    axes = figure.subplots()
    for name, offset, color in ((OURS, 0.2, OUR_COLOR), (FLA, -0.2, OTHER_COLOR)):
        timed = [(i, ms) for i, row in enumerate(rows) if (ms := median(row, name)) is not None]
        axes.barh([i + offset for i, _ in timed], [ms for _, ms in timed], height=0.38, color=color, label=name)
        for i, ms in timed:
            axes.text(ms, i + offset, f" {short(ms)}", va="center", fontsize=8)
    labels = [f"{CALLS[row['suite']]}\n{row['gate']} gate, {row['decay']} decays" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_xlabel("milliseconds (less is better)")
    axes.legend(loc="lower right", fontsize=8)
    axes.margins(x=0.12)


def draw_ratios(figure: Any, suite: str) -> None:
    """How many times fla's time is ours, one bar a row with random decays, with both times."""
    rows = [row for row in rows_of("headline", suite) if median(row, FLA) is not None and row["decay"] == "random"]
    rows.reverse()
    axes = figure.subplots()
    for i, row in enumerate(rows):
        factor = ratio(row, FLA) or 0.0
        text = f" {digits(median(row, OURS))} ms, fla {digits(median(row, FLA))} ms"
        axes.barh(i, factor, height=0.6, color=OUR_COLOR)
        axes.text(factor, i, text, va="center", fontsize=8)
    axes.axvline(1.0, color="#808080", linewidth=0.8)
    kinds = {(row["gate"], row["decay"]) for row in rows}
    labels = [label(row) + (f"\n{row['gate']} gate" if len(kinds) > 1 else "") for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set(xlabel="fla's time over kda_core's (more is better)", ylabel="B, T, H, K")
    axes.margins(x=0.3)


def draw_errors_by_case(figure: Any) -> None:
    """Error of every result, ours over fla's, one line of dots a case. fla multiplies float32 in tf32: left out."""
    rows = [row for row in rows_of("accuracy", "accuracy") if not row["by_length"] and row["dtype"] != "float32"]
    rows = [row for row in rows if FLA in row["implementations"]][::-1]
    axes = figure.subplots()
    for i, row in enumerate(rows):
        ours, theirs = errors_of(row, OURS), errors_of(row, FLA)
        axes.scatter([error / theirs[o] for o, error in ours.items()], [i] * len(ours), s=14, color=OUR_COLOR)
    axes.axvline(1.0, color="#808080", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['case']} ({row['dtype']})" for row in rows], fontsize=8)
    axes.set(xscale="log", xlabel="error of each result over fla's (left of 1 is better)")


def draw_errors_by_length(figure: Any) -> None:
    """Error of o and of the worst gradient against T, one panel a kind of decays."""
    found = length_rows()
    kinds = list(dict.fromkeys(kind for kind, _ in found))
    colors = {"float32": OUR_COLOR, "float16": "#00897b", "bfloat16": "#d84315"}
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        for dtype, color in colors.items():
            rows = [row for k, row in found if (k, row["dtype"]) == (kind, dtype)]
            lengths = [row["sizes"]["T"] for row in rows]
            errors = [errors_of(row, OURS) for row in rows]
            panel.loglog(lengths, [e["o"] for e in errors], "o-", color=color, label=f"{dtype}, o")
            worst = [worst_gradient(e)[1] for e in errors]
            panel.loglog(lengths, worst, "x--", color=color, label=f"{dtype}, worst gradient")
        panel.set(title=kind, xlabel="tokens")
    panels[0].set_ylabel("relative error")
    panels[-1].legend(fontsize=7)


PLOTS: dict[str, tuple[str, Callable[[Any], None], tuple[float, float]]] = {
    "headline": ("headline", draw_headline, (7.0, 3.8)),
    "training": ("headline", lambda figure: draw_ratios(figure, "training"), (7.0, 4.4)),
    "inference": ("headline", lambda figure: draw_ratios(figure, "inference"), (7.0, 5.6)),
    "errors_by_case": ("accuracy", draw_errors_by_case, (7.0, 3.6)),
    "errors_by_length": ("errors_by_length", draw_errors_by_length, (7.5, 3.4)),
}
"""By name: the measurement, what draws it, and the size in inches."""


def digest(data: str) -> str:
    """A digest of a plot's data; the SVG itself differs between versions of matplotlib."""
    return hashlib.sha256((DATA / f"{data}.json").read_bytes()).hexdigest()[:16]


def draw(name: str) -> None:
    """Write a plot, with the digest of its data."""
    import matplotlib
    from matplotlib.figure import Figure

    data, drawn, size = PLOTS[name]
    style = {"svg.hashsalt": "kda_core", "svg.fonttype": "path", "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        drawn(figure)
        metadata = {"Date": None, "Creator": None, "Description": f"data {digest(data)}"}
        figure.savefig(IMAGES / f"{name}.svg", metadata=metadata, facecolor="white")


def stale() -> Iterator[str]:
    """Pages and plots that differ from the data."""
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
