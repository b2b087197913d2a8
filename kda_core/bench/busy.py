"""Suite ``busy``: the CPU backend on busy cores, by number of threads and OpenMP's way to wait for work.

Busy loops (one process each) take the cores while a fresh process runs the calls; it is fresh because OpenMP reads its
variables when it is loaded. A figure is the median over several rounds of each round's median.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kda_core.bench import fresh_process
from kda_core.bench.session import Row, Session, Task

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
"""How a thread of libgomp waits for work: environment variables that it reads when it is loaded."""

OPENMP_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY")
THREADS = (1, 2, 4)
ROUNDS, SECONDS, LEAST = 2, 0.4, 3
QUICK = ("decoding step [1, 1, 4, 64]",)


def tasks(session: Session) -> list[Task]:
    """One task for each number of busy loops, way to wait and number of threads."""
    if session.device.type != "cpu":
        raise ValueError(f"suites: busy is measured on CPUs, got {session.device}")
    quick, threads = session.options.quick, session.options.threads
    return [
        Task(
            f"busy loops {loops}, {setting}, {count} threads", functools.partial(measure, loops, setting, count, quick)
        )
        for loops in ((1,) if quick else (0, os.cpu_count() or 1))
        for setting in SETTINGS
        for count in ((threads or 1,) if quick or threads else THREADS)
    ]


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run that many busy loops, one process each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def measure(loops: int, setting: str, threads: int, quick: bool) -> Row:
    """One row."""
    environment = {name: value for name, value in os.environ.items() if name not in OPENMP_VARIABLES}
    told = {"threads": threads, "names": QUICK if quick else None, "seconds": 0.01 if quick else SECONDS}
    row: Row = {"suite": "busy", "busy": loops, "threads": threads, "openmp": setting}
    try:
        with busy_loops(loops):
            variables = environment | SETTINGS[setting]
            rounds = [fresh_process.measure("busy", told, variables) for _ in range(1 if quick else ROUNDS)]
    except fresh_process.ProcessFailed as error:
        return row | {"failed": str(error)}
    return row | {"ms": {n: statistics.median(r[n] for r in rounds) for n in rounds[0]}, "rounds": rounds}


def child(options: dict[str, Any]) -> dict[str, float]:
    """In a fresh process: the median milliseconds of every call."""
    torch.set_num_threads(options["threads"])
    found = {}
    for name, call in calls().items():
        if options["names"] is not None and name not in options["names"]:
            continue
        call()
        times: list[float] = []
        end = time.perf_counter() + options["seconds"]
        while len(times) < LEAST or time.perf_counter() < end:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        found[name] = statistics.median(times)
    return found


def calls() -> dict[str, Callable[[], object]]:
    """The calls that are timed, by name."""
    torch.manual_seed(0)
    return {
        "forward [1, 512, 8, 128]": _forward(_inputs(1, 512, 8, 128)),
        "forward [2, 64, 4, 32]": _forward(_inputs(2, 64, 4, 32)),
        "training [1, 512, 8, 128]": _training(_inputs(1, 512, 8, 128)),
        "training [2, 64, 4, 32]": _training(_inputs(2, 64, 4, 32)),
        "decoding step [8, 1, 32, 128]": _decoding(_inputs(8, 1, 32, 128)),
        "decoding step [1, 1, 4, 64]": _decoding(_inputs(1, 1, 4, 64)),
    }


def _inputs(B: int, T: int, H: int, K: int) -> dict[str, torch.Tensor]:
    q, k, v = (torch.randn(B, T, H, K) for _ in range(3))
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, H, K))
    return {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v, "g": g, "beta": torch.rand(B, T, H)}


def _forward(x: dict[str, torch.Tensor]) -> Callable[[], object]:
    import kda_core

    def run() -> None:
        with torch.no_grad():
            kda_core.chunk_kda(**x, backend="cpu")

    return run


def _training(x: dict[str, torch.Tensor]) -> Callable[[], object]:
    import kda_core

    leaves = {name: t.requires_grad_() for name, t in x.items()}
    grad = torch.randn_like(x["v"])

    def run() -> None:
        o, _ = kda_core.chunk_kda(**leaves, backend="cpu")
        torch.autograd.grad(o, list(leaves.values()), grad)

    return run


def _decoding(x: dict[str, torch.Tensor]) -> Callable[[], object]:
    import kda_core

    N, _, H, K = x["q"].shape
    pool, slots = torch.randn(2 * N, H, K, K), torch.arange(0, 2 * N, 2)

    def run() -> None:
        with torch.no_grad():
            kda_core.fused_recurrent_kda(**x, initial_state=pool, ssm_state_indices=slots, backend="cpu")

    return run


def tables(rows: list[Row], content: dict[str, Any]) -> list[Any]:
    """One line a setting."""
    from rich.table import Table

    names = list(next((row["ms"] for row in rows if "ms" in row), {}))
    table = Table("busy loops", "threads", "OpenMP", *(f"{name} ms" for name in names), title_justify="left")
    table.title = "busy: the CPU backend while loops take the cores"
    for row in rows:
        cells = [f"{row['ms'][name]:.2f}" for name in names] if "ms" in row else [f"fails: {row['failed']}"]
        table.add_row(str(row["busy"]), str(row["threads"]), row["openmp"], *cells)
    return [table]
