"""The common part of the programs: options, rows and their JSON file, CUDA graphs, and child processes.

The JSON is rewritten after every row, so that a run that is cut off keeps its rows. ``tools/figures.py`` reads it.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

import kda_core
from kda_core import _cli
from kda_core._bench import Run, device_for, take_turns

SCHEMA = 1  # Version of the JSON; raised when a field changes its meaning
OURS = "kda_core"
HERE = Path(__file__).parent
WARM_TURNS = 2

Row = dict[str, Any]  # One measurement, ready for JSON; "suite" names its program, "failed" says why there is none

IDENTITY = ("suite", "shape", "case", "gate", "decay", "dtype", "backward")  # Fields by which a row is told from others
PROGRAM = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""Runs the program whose file and arguments follow."""


class Parser(argparse.ArgumentParser):
    """A parser of the program in a file, by its docstring, with the common options; an error is one line."""

    def __init__(self, program: str, text: str) -> None:
        super().__init__(prog=Path(program).name, description=text.split("\n\n")[0])
        self.add_argument("--backend", help="backend of kda_core; default: the one that it chooses")
        self.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
        self.add_argument("--json", type=Path, metavar="FILE", help="write all rows to this file, after every row")
        self.add_argument(
            "--append", action="store_true", help="keep the rows that the file has, but those that return"
        )

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)

    def parse(self, arguments: list[str] | None = None) -> argparse.Namespace:
        """The options, ``device`` as a torch.device; exits where nothing could be measured or written."""
        options = self.parse_args(arguments)
        # A child process that only compiles writes nothing.
        file = options.json = None if getattr(options, "part", None) else options.json
        if file is not None and file.exists() and not file.is_file():
            self.error(f"--json: expected a file, got {file}")
        try:
            if file is not None:
                tempfile.TemporaryFile(dir=file.absolute().parent).close()
            options.device = device_for(options.device, options.backend)
        except OSError as error:
            self.error(f"--json: {error}")
        except ValueError as error:
            self.error(str(error))
        options.earlier = {"rows": []}
        if options.append and file is not None and file.exists():
            try:
                options.earlier = json.loads(file.read_text(encoding="utf-8"))
                options.earlier["environment"]["versions"], options.earlier["rows"]
            except (ValueError, KeyError, TypeError):
                self.error(f"--append: expected a file with rows, got {file}")
        return options


def positive(text: str) -> float:
    """A number above 0, for argparse."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    return number


def count(text: str) -> int:
    """A whole number above 0, for argparse."""
    return int(positive(str(int(text))))


class Rows:
    """The rows of a run and of the file that it adds to, in memory and in the JSON file; and the exit status.

    Args:
        options: what ``Parser.parse`` returned. versions: of the peers. content: further fields of the JSON.
    """

    def __init__(self, options: argparse.Namespace, versions: Mapping[str, str] | None = None, **content: Any) -> None:
        self.file, self.status = options.json, 0
        self.rows: list[Row] = options.earlier["rows"]
        before = options.earlier.get("environment", {})
        found = before.get("versions", {}) | {OURS: kda_core.__version__, "torch": torch.__version__}
        found |= {"triton": _cli.version_of("triton"), "driver": _driver()} | dict(versions or {})
        environment = {
            "device": _cli.device_name(options.device),
            "date": datetime.date.today().isoformat(),
            "commit": _commit(),
            "backend": options.backend or _served_by(options.device),
            "versions": {n: v for n, v in found.items() if v is not None},
        }
        # Rows of earlier runs keep their day and commit.
        self.run = {n: environment[n] for n in ("date", "commit")}
        for row in self.rows:
            row |= {n: row.get(n, before.get(n)) for n in self.run}
        self.content: dict[str, Any] = {"schema": SCHEMA, "environment": environment, **content}
        facts = f"{environment['device']}, backend {environment['backend']}, commit {environment['commit'][:12]}"
        print(facts, ", ".join(f"{n} {v}" for n, v in environment["versions"].items()), sep="\n", flush=True)

    def add(self, row: Row, *lines: str) -> None:
        """Print a row and write the file."""
        row |= self.run
        same = [i for i, earlier in enumerate(self.rows) if all(earlier.get(n) == row.get(n) for n in IDENTITY)]
        self.rows[slice(same[0], same[0] + 1) if same else slice(len(self.rows), None)] = [row]
        if "failed" in row:
            self.status = 1
            lines = (*lines, f"  failed: {row['failed']}")
        lines = (*lines, *(f"  without {name}: {why}" for name, why in row.get("left_out", {}).items()))
        print(*lines, sep="\n", flush=True)
        if self.file is not None:
            # Through a file beside it, so that a stopped run leaves a complete one.
            text = json.dumps(self.content | {"rows": self.rows}, indent=1, allow_nan=False)
            beside = self.file.with_name(self.file.name + ".part")
            beside.write_text(text + "\n", encoding="utf-8")
            beside.replace(self.file)


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", HERE, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _served_by(device: torch.device) -> str:
    """The backend that a plain call on the device goes to; "none" when nothing serves it."""
    x = torch.zeros(1, 1, 1, 64, device=device)
    return kda_core.explain(x, x, x, x, x[..., 0]).chosen or "none"


def summary(times: list[float]) -> dict[str, Any]:
    """Median, 10th and 90th percentile and count."""
    tenths = statistics.quantiles(times, n=10) if len(times) > 1 else times
    return {"median": statistics.median(times), "p10": tenths[0], "p90": tenths[-1], "count": len(times)}


def median(row: Row, name: str, key: str = "ms") -> float | None:
    found = row.get("implementations", {}).get(name, {}).get(key)
    return None if found is None else found["median"]


def number(x: float) -> str:
    """About three digits."""
    return f"{x:.3f}" if x < 10 else f"{x:.1f}" if x < 1000 else f"{x:,.0f}"


def capture(run: Callable[[], Any], device: torch.device, **options: Any) -> Run:
    """Replays of a CUDA graph of one call, which must have run before: autotuners cannot be captured."""
    # The capture runs on another stream, which does not wait for the inputs.
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, **options):
        kept = run()
    torch.cuda.synchronize(device)

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def elapsed(run: Run) -> float:
    """Milliseconds of a run on a GPU, which is waited for."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def by_turns(runs: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """The results of every run, one after the other in each turn; the first two turns do not count."""
    found = [[run() for run in runs.values()] for _ in range(WARM_TURNS + turns)][WARM_TURNS:]
    return dict(zip(runs, map(list, zip(*found, strict=True)), strict=True))


@functools.cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy: the faster of a memcpy and an elementwise kernel."""
    source = torch.ones((2**31 if device.type == "cuda" else 2**25) // 4, device=device)
    target = torch.empty_like(source)
    runs: dict[str, Run] = {"memcpy": lambda: target.copy_(source), "kernel": lambda: torch.abs(source, out=target)}
    return 2 * source.nbytes / (1e-3 * min(map(statistics.median, take_turns(runs, device, 0.1).values())))


class ChildFailed(Exception):
    """A child process ended with an error; the message is the last line that it wrote."""


def child(code: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """The last line that a program of another process prints; raises ``ChildFailed``.

    The process is isolated: it starts in an empty folder and imports from this process's path, so that no file in the
    working folder takes a module's place.
    """
    path = [entry for entry in sys.path if os.path.isabs(entry)]
    line = [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {path!r}\n{code}", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ChildFailed((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return (done.stdout.splitlines() or [""])[-1]
