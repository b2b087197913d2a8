"""Suite ``memory``: how far one forward on a CPU raises the resident set of a fresh process, by implementation.

A small call before it loads everything that is loaded lazily. The figures come from /proc, so on Linux only. On a GPU
the suites that measure time also measure memory.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kda_core.bench import fresh_process, peers
from kda_core.bench.session import Row, Session, Task
from kda_core.bench.shapes import Shape
from kda_core.bench.workload import Problem, Work

DEFAULT = Shape(1, 4096, 8, 128)
QUICK = Shape(1, 64, 2, 32)
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def tasks(session: Session) -> list[Task]:
    """One task a shape."""
    if session.device.type != "cpu" or not RESET.exists():
        raise ValueError(f"suites: memory is measured on CPUs under Linux, got {session.device} on {sys.platform}")
    shapes = session.options.shapes or [QUICK if session.options.quick else DEFAULT]
    return [Task(f"memory {shape}", functools.partial(measure, shape, session)) for shape in shapes]


def measure(shape: Shape, session: Session) -> Row:
    """One row."""
    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for peer in session.implementations:
        if reason := peer.refuses(_problem(shape)):
            left_out[peer.name] = reason
            continue
        told = {"peer": peer.name, "backend": session.options.backend, "shape": asdict(shape)}
        try:
            grown = fresh_process.measure("memory", told | {"threads": torch.get_num_threads()})
            found[peer.name] = {"grown_bytes": grown}
        except fresh_process.ProcessFailed as error:
            left_out[peer.name] = str(error)
    row: Row = {"suite": "memory", "shape": str(shape), "tokens_and_heads": shape.B * shape.T * shape.HV}
    row |= {"implementations": found, "left_out": left_out}
    return row | ({"failed": left_out.pop(peers.OURS)} if peers.OURS in left_out else {})


def _problem(shape: Shape) -> Problem:
    return Problem("inference", shape, "given", "random", torch.float32, torch.float32)


def child(options: dict[str, Any]) -> int:
    """In a fresh process: the bytes that one forward adds to the resident set."""
    torch.set_num_threads(options["threads"])
    known = {peer.name: peer for peer in [peers.Ours(options["backend"]), *peers.every_peer()]}
    peer, sizes = known[options["peer"]], options["shape"] | {"lengths": tuple(options["shape"]["lengths"])}
    device = torch.device("cpu")
    small = Shape(1, peers.CHUNK, sizes["H"], sizes["K"], sizes["V"], sizes["HV"])
    peer.prepare(Work(_problem(small), device))()
    call = peer.prepare(Work(_problem(Shape(**sizes)), device))
    # 5 resets the peak (proc(5)), which importing may have raised above the call's.
    RESET.write_text("5")
    before = _status("VmRSS")
    kept = call()
    grown = _status("VmHWM") - before
    del kept
    return grown


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{STATUS} has no {name}")


def tables(rows: list[Row], content: dict[str, Any]) -> list[Any]:
    """One line an implementation."""
    from rich.table import Table

    columns = ("B,T,H,K", "", "MiB beside the inputs", "bytes a token and head", "× ours")
    table = Table(*columns, title="memory: one forward in a fresh process", title_justify="left")
    for row in rows:
        first = row["shape"]
        ours = row["implementations"].get(peers.OURS)
        for name, found in row["implementations"].items():
            grown = found["grown_bytes"]
            each = f"{grown / row['tokens_and_heads']:.0f}"
            ratio = "" if name == peers.OURS or not ours else f"{grown / max(ours['grown_bytes'], 1):.1f}"
            table.add_row(first, name, f"{grown / 2**20:.0f}", each, ratio)
            first = ""
        if "failed" in row:
            table.add_row(first, peers.OURS, "fails")
    return [table]
