"""Compile the kernels of a run in parallel processes, before the run.

A peer's autotuners compile and time dozens of configurations of every kernel: minutes a shape. Here every shape has a
process that runs each call once and exits. Compiled kernels and the autotuners' choices stay in the caches on disk.
Choices that were timed beside other processes may not be the best; ``--retune`` lets the timed process choose again,
which takes about twenty seconds for each number of heads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from kda_core.bench import fresh_process, speed
from kda_core.bench.session import Session

if TYPE_CHECKING:
    from kda_core.bench.suites import Suite

FORGET_CHOICES = {"FLA_CACHE_RESULTS": "0"}
"""With this variable fla keeps compiled kernels on disk, but no choice of an autotuner."""


def commands(session: Session, chosen: Mapping[str, Suite]) -> list[list[str]]:
    """A command line for every shape of the suites that compile anything."""
    options = session.options
    peers = ",".join(peer.name for peer in session.peers) or "none"
    common = ["--compile", "--device", str(session.device), "--peers", peers]
    for name in ("backend", "dtype", "gate_dtype"):
        if (value := getattr(options, name)) is not None:
            common += ["--" + name.replace("_", "-"), value]
    found = []
    for suite, description in chosen.items():
        if description.warm is None:
            continue
        # No kernel depends on the decays' values, and gates share most kernels.
        for shape in dict.fromkeys(p.shape for p in speed.problems(suite, session)):
            line = [sys.executable, "-m", "kda_core.bench", suite, "--shapes", str(shape)]
            found.append([*line, "--gate", ",".join(options.gate), "--decay", options.decay[0], *common])
    return found


def warm(session: Session, chosen: Mapping[str, Suite]) -> None:
    """Run every command, ``--jobs`` at a time; a failed one is reported, and its kernels compile in the run."""
    lines = commands(session, chosen)
    jobs = session.options.jobs or os.cpu_count() or 1
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(FORGET_CHOICES if session.options.retune else {})}
    console = Console(stderr=True)
    with ThreadPoolExecutor(jobs) as executor, Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"compiling, {jobs} processes", total=len(lines))
        futures = {executor.submit(fresh_process.run, line, environment): line for line in lines}
        for done in as_completed(futures):
            progress.advance(bar)
            try:
                done.result()
            except fresh_process.ProcessFailed as error:
                print(f"compiling {' '.join(futures[done][3:6])}: {error}", file=sys.stderr)
    if not console.is_terminal:
        print(f"compiled for {len(lines)} shapes, {jobs} processes at a time", file=sys.stderr, flush=True)
