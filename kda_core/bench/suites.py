"""The suites: what ``kda bench`` can measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kda_core.bench import accuracy, accuracy_report, busy, decode, first_call, memory, router, speed, speed_report
from kda_core.bench.session import Row, Session, Task

Report = Callable[[list[Row], dict[str, Any]], list[Any]]


def no_verdict(rows: list[Row], session: Session) -> list[str]:
    """A suite without limits of its own."""
    return []


@dataclass(frozen=True)
class Suite:
    """A group of rows that share a measurement and a table.

    Attributes:
        what: a line for --list.
        options: names of the options that only some suites read and this one does.
        tasks: its rows still to be measured.
        report: tables (rich) of rows read from JSON, given the environment.
        warm: compiles what the rows need, or None.
        missed: a line for every limit that the rows exceed.
        default: measured when no suite is named.
        peers: compares with peers.
    """

    what: str
    options: frozenset[str]
    tasks: Callable[[Session], list[Task]]
    report: Report
    warm: Callable[[Session], None] | None = None
    missed: Callable[[list[Row], Session], list[str]] = no_verdict
    default: bool = False
    peers: bool = True


_CHOICES = ("shapes", "set", "gate", "decay", "dtype", "gate_dtype")
_FIGURES = ("seconds", "graph", "profile", "errors")
SPEED_OPTIONS = frozenset((*_CHOICES, *_FIGURES, "warm", "warm_only", "jobs", "retune", "compile"))


def _speed(mode: str, what: str, default: bool) -> Suite:
    return Suite(
        what, SPEED_OPTIONS, partial(speed.tasks, mode), speed_report.tables, partial(speed.warm, mode), default=default
    )


SUITES: dict[str, Suite] = {
    "training": _speed("training", "forward and backward of chunk_kda, everything in the operator", True),
    "inference": _speed("inference", "chunk_kda with states in and out, everything in the operator", True),
    "decode": Suite(
        "a decoding step over a pool of states; prefill of short sequences",
        frozenset(("sizes", "heads")),
        decode.tasks,
        decode.tables,
        default=True,
    ),
    "accuracy": Suite(
        "errors of every output and gradient against the float64 oracle",
        frozenset(("only", "draws", "one_config", "markdown")),
        accuracy.tasks,
        accuracy_report.tables,
    ),
    "memory": Suite(
        "what a forward on a CPU adds to the memory of a fresh process",
        frozenset(("shapes",)),
        memory.tasks,
        memory.tables,
    ),
    "busy": Suite(
        "the CPU backend while other programs take the cores, by threads and by how OpenMP waits",
        frozenset(),
        busy.tasks,
        busy.tables,
    ),
    "router": Suite(
        "what the core adds to a call and to the import of torch",
        frozenset(("calls", "batches", "processes", "call_limit_us", "import_limit_ms")),
        router.tasks,
        router.tables,
        missed=router.missed,
        peers=False,
    ),
    "first-call": Suite(
        "seconds of the first call of a process, with nothing compiled",
        frozenset(("shapes", "calls")),
        first_call.tasks,
        first_call.tables,
        peers=False,
    ),
    "forward": _speed("forward", "the forward of a training step alone", False),
    "kept": _speed("kept", "a training step with disable_recompute: memory for speed", False),
}
