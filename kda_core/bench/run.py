"""Runs the tasks of the chosen suites with a progress bar, and writes tables, JSON and plots."""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kda_core.bench import accuracy, accuracy_report, command, plots, shapes, warm
from kda_core.bench import session as sessions
from kda_core.bench.session import Session
from kda_core.bench.suites import SUITES, Suite


def run(options: argparse.Namespace) -> int:
    """Run the options; returns the exit status.

    Raises:
        ValueError: options that exclude each other or have unknown values.
    """
    _check_files(options)
    if options.read:
        _check_nothing_is_measured(options)
        content = sessions.read(options.read)
        show(content)
        _write_pages(content, options)
        return 0
    chosen = _chosen(options)
    if options.one_config:
        if list(chosen) != ["accuracy"]:
            raise ValueError("--one-config: slows peers down, so it goes with the suite accuracy alone")
        accuracy.take_first_configurations()
    session = sessions.open_session(options, any(suite.peers for suite in chosen.values()))
    command.fill_defaults(options, session.gpu)
    if options.list:
        _list(session)
        return 0
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.compile:
        for suite in chosen.values():
            if suite.warm is not None:
                suite.warm(session)
        return 0
    for name, reason in session.left_out.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    if options.warm or options.warm_only:
        warm.warm(session, chosen)
    if options.warm_only:
        return 0
    try:
        _measure(session, chosen)
    finally:
        # An error or Ctrl-C ends the run but keeps its rows.
        if session.rows:
            show(session.content())
    missed = _pages_missed(session, options)
    missed += [line for suite in chosen.values() for line in suite.missed(session.rows, session)]
    missed += [f"{_name(row)}: {row['failed']}" for row in session.rows if "failed" in row]
    print(*missed, sep="\n", file=sys.stderr, end="\n" if missed else "")
    return command.EXIT_FAILED if missed else 0


def _write_pages(content: dict[str, Any], options: argparse.Namespace) -> None:
    if options.plot:
        plots.draw(content, options.plot)
    if options.markdown:
        accuracy_report.write(options.markdown, accuracy_report.markdown(content))


def _pages_missed(session: Session, options: argparse.Namespace) -> list[str]:
    """Write Markdown and plots; a failure is reported and does not lose the rows of a long run."""
    try:
        _write_pages(session.content(), options)
    except ValueError as error:
        return [str(error)]
    return []


def _check_files(options: argparse.Namespace) -> None:
    """Check that the output files can be written, before anything is measured."""
    for file in options.read or ():
        if not file.is_file():
            raise ValueError(f"from: expected a file, got {file}")
    if options.markdown is not None and not options.markdown.is_file():
        raise ValueError(f"markdown: expected a file with markers, got {options.markdown}")
    for name in ("json", "plot"):
        file = getattr(options, name)
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"{name}: expected a file in a folder that is there, got {file}")
    if options.plot is not None and options.plot.suffix not in plots.FORMATS:
        raise ValueError(f"plot: expected a name that ends in {', '.join(plots.FORMATS)}, got {options.plot}")
    if options.set and options.shapes:
        raise ValueError("--set, --shapes: expected one of the two, got both")
    if (options.retune or options.jobs) and not (options.warm or options.warm_only):
        raise ValueError(f"--{'retune' if options.retune else 'jobs'}: needs --warm or --warm-only")


def _check_nothing_is_measured(options: argparse.Namespace) -> None:
    """Check that no option asks for a measurement together with --from."""
    common = ("suites", "list", "backend", "device", "peers", "threads", "quick", "json")
    stray = [name for name in common if getattr(options, name)] + sorted(command.written(options) - {"markdown"})
    if stray:
        raise ValueError(f"--from measures nothing, so it takes no {', '.join(stray).replace('_', '-')}")


def _chosen(options: argparse.Namespace) -> dict[str, Suite]:
    if unknown := [name for name in options.suites if name not in SUITES]:
        raise ValueError(f"suites: expected some of {', '.join(SUITES)}, got {', '.join(unknown)}")
    names = options.suites or [name for name, suite in SUITES.items() if suite.default]
    chosen = {name: SUITES[name] for name in dict.fromkeys(names)}
    if options.plot and not set(chosen) & plots.DRAWN:
        raise ValueError(f"plot: expected one of the suites {', '.join(sorted(plots.DRAWN))}, got {', '.join(chosen)}")
    read = {name for suite in chosen.values() for name in suite.options}
    if stray := sorted(command.written(options) - read):
        flags = ", ".join("--" + name.replace("_", "-") for name in stray)
        raise ValueError(f"{flags}: read by none of the suites {', '.join(chosen)}")
    return chosen


def _measure(session: Session, chosen: dict[str, Suite]) -> None:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks = [task for suite in chosen.values() for task in suite.tasks(session)]
    if not tasks:
        raise ValueError(f"suites: {', '.join(chosen)}: no row to measure on {session.device}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(tasks))
        for task in tasks:
            progress.update(bar, description=task.label)
            row = task.run()
            session.rows.append(row)
            if session.options.json:
                session.write(session.options.json)
            if not console.is_terminal:
                print(f"{len(session.rows)}/{len(tasks)} {task.label}: {_line(row)}", file=sys.stderr, flush=True)
            progress.advance(bar)


def _name(row: dict[str, Any]) -> str:
    return " ".join(str(row[n]) for n in ("suite", "shape", "gate", "decay", "case") if n in row)


def _line(row: dict[str, Any]) -> str:
    """A row in a few words, for output without a progress bar."""
    if "failed" in row:
        return row["failed"]
    if "added_us" in row:
        return f"{row['added_us']:.2f} µs added"
    if "processor_ms" in row:
        return f"{statistics.median(row['processor_ms']):.1f} ms"
    if "seconds" in row:
        return f"{row['seconds']:.1f} s for {row['kernels']} kernels"
    parts = [f"{name} {_figure(x)}" for name, x in row.get("implementations", {}).items()]
    left_out = [f"{name}: {reason}" for name, reason in row.get("left_out", {}).items()]
    return ", ".join(parts) + (f" (left out: {'; '.join(left_out)})" if left_out else "")


def _figure(found: dict[str, Any]) -> str:
    if "grown_bytes" in found:
        return f"{found['grown_bytes'] / 2**20:.0f} MiB"
    return f"{found['ms']['median']:.3f} ms" if "ms" in found else f"{found['errors']['o']:.1e}"


def show(content: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(width=None if sys.stdout.isatty() else command.WIDTH)
    environment = content["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    facts = f"{environment['device']}, backend {environment['backend']}; {versions}"
    console.print(f"{facts}; a copy moves {content['copy_bytes_per_second'] / 1e9:.0f} GB/s", highlight=False)
    for name, suite in SUITES.items():
        if rows := [row for row in content["rows"] if row["suite"] == name]:
            for table in suite.report(rows, content):
                console.print(table)
    for name, reason in content["left_out"].items():
        console.print(f"left out: {name}: {reason}", highlight=False, markup=False)


def _list(session: Session) -> None:
    console = Console(width=None if sys.stdout.isatty() else command.WIDTH)
    table = Table("suite", "measures", "rows here", title="suites", title_justify="left")
    for name, suite in SUITES.items():
        try:
            rows = str(len(suite.tasks(session)))
        except ValueError as error:
            rows = str(error)
        table.add_row(name + (" (default)" if suite.default else ""), suite.what, rows)
    console.print(table)
    table = Table("set", "suite", "shapes B,T,H,K", title="shapes", title_justify="left")
    for name in shapes.SETS if session.gpu else ("headline",):
        for mode, training in (("training", True), ("inference", False)):
            found = shapes.named(name, training, session.gpu)
            table.add_row(name, mode, "  ".join(map(str, found)) or "none")
    console.print(table)
    table = Table("peer", "version or reason", title="peers", title_justify="left")
    for peer in session.peers:
        table.add_row(peer.name, peer.version())
    for name, reason in session.left_out.items():
        table.add_row(name, f"left out: {reason}")
    console.print(table)
