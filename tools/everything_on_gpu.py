"""Every test of a backend that needs a GPU, in parallel on all GPUs of a machine.

    python tools/everything_on_gpu.py --backend nvidia --minutes 30 --out found
    python tools/everything_on_gpu.py --backend amd --foreign-device --minutes 30 --out found-amd

The conformance kit in both tiers, the backend's own tests that need a GPU, and compute-sanitizer, where it is
installed, over ``sanitized_calls.py``. Compiling kernels takes most of the time: an hour and more of a dozen cores. The
program stops after ``--minutes``; called again with the same folder it continues. It needs pytest-xdist, and the wheels
of the core and the backend. The folder keeps a log of every job and its outcomes (``noted.py``). Exit status 0:
everything passed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import noted

HERE = Path(__file__).resolve().parent
KIT = ("-p", "kda_core.testing.plugin", "--pyargs", "kda_core.testing.suite")
TESTS = HERE.parent / "tests"
OWN = {
    "nvidia": (
        "test_nvidia_hopper.py",
        "test_nvidia_prepare_hopper.py",
        "test_nvidia_gradients_hopper.py",
        "test_nvidia_step.py",
        "test_nvidia_accuracy.py",
    )
}
VISIBLE = "CUDA_VISIBLE_DEVICES"  # ROCm honours it, too
PARTS = 6
"""Processes of each tool of compute-sanitizer."""

SANITIZER_OPTIONS = {"memcheck": ("--report-api-errors", "no")}
"""A failed allocation is no error of a kernel: torch tries again or raises."""

CLEAN = re.compile(r"=========( COMPUTE-SANITIZER| Target application returned an error|.* SUMMARY: 0 .*)?\s*")
"""Lines of compute-sanitizer that are no findings; its program ends with an error when calls are left."""

RACE = re.compile(r"========= (?:Error: Race reported between|    and) \w+ access at \w+\+0x\w+ in (\w+\.py):(\d+)")
"""A line of racecheck about one access of a hazard."""

LAST_CALL = 60
"""No call begins under a sanitizer in these last seconds: one call may take that long."""

MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**28)}
"""glibc keeps freed memory of the oracle's large tensors; else every operation gets new pages, which are cleared."""

GRACE = 15
"""Seconds that an interrupted job has to end by itself."""


@dataclass(frozen=True)
class Job:
    """Tests, or calls under a sanitizer, in a separate process.

    Attributes:
        arguments: of pytest, or of ``sanitized_calls.py`` if there is a ``tool`` of compute-sanitizer.
        share: of the machine's cores, for workers of pytest.
        most: workers at most: large tests fill a GPU's memory.
        gpus: how many it sees, if the machine has as many.
    """

    name: str
    arguments: tuple[str, ...]
    share: float = 0.0
    most: int = 1000
    gpus: int = 1
    tool: str = ""


def jobs(backend: str, foreign: bool, sanitizer: bool) -> list[Job]:
    """All jobs of a backend, the longest first."""
    flag = ("--foreign-device",) if foreign else ()
    kit = (*KIT, f"--backend={backend}", *flag)
    found = [
        Job("thorough", (*kit, "-m", "slow", "-k", "thorough"), 0.5),
        Job("fast", (*kit, "-k", "not random"), 0.35, gpus=2),
        Job("slow", (*kit, "-m", "slow", "-k", "not thorough and not gradient_offsets and not many_"), 0.2, most=6),
        # The oracle takes minutes of one core for each of them, so they begin early.
        Job("many", (*kit, "-m", "slow", "-k", "many_"), 0.2, most=4),
        # Each of them takes gigabytes, and minutes of compiling.
        Job("gradient_offsets", (*kit, "-m", "slow", "-k", "gradient_offsets"), most=1),
        Job("random", (*kit, "-k", "random"), 0.2),
    ]
    if backend in OWN and not foreign:
        found.append(Job("own", tuple(str(TESTS / backend / name) for name in OWN[backend]), 0.1))
    for tool in ("memcheck", "racecheck") if sanitizer else ():
        for i in range(1, PARTS + 1):
            # The tools share compiled kernels.
            order = ("--last-first",) if tool == "racecheck" else ()
            arguments = ("--backend", backend, *flag, "--part", f"{i}/{PARTS}", *order)
            found.append(Job(f"{tool}_{i}", arguments, tool=tool))
    return found


def command(job: Job, notes: Path, cores: int, seconds: float) -> list[str]:
    """The command line of a job."""
    if job.tool:
        sanitizer = ["compute-sanitizer", "--tool", job.tool, *SANITIZER_OPTIONS.get(job.tool, ())]
        ending = ["--notes", str(notes), "--seconds", str(max(seconds - LAST_CALL, 0))]
        return [*sanitizer, sys.executable, str(HERE / "sanitized_calls.py"), *job.arguments, *ending]
    workers = max(1, min(job.most, int(job.share * cores)))
    parallel = ["-n", str(workers), "--dist", "worksteal"]
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "noted", *parallel, *job.arguments]


def visible_gpus(count: int) -> list[str]:
    """Names of the GPUs that the caller may use, as child processes get them."""
    given = os.environ.get(VISIBLE)
    return given.split(",")[:count] if given else [str(i) for i in range(count)]


def visible(job: Job, index: int, gpus: Sequence[str]) -> str:
    """The GPUs that a job sees: jobs go round them."""
    return ",".join(gpus[(index + i) % len(gpus)] for i in range(min(job.gpus, len(gpus))))


def run(todo: Sequence[Job], out: Path, gpus: Sequence[str], cores: int, seconds: float) -> None:
    """Run jobs in parallel, and note the exit status of those that end in time."""
    end = time.monotonic() + seconds
    running = []
    for index, job in enumerate(todo):
        notes = _notes(job, out)
        fixed = {noted.VARIABLE: str(notes), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment = MEMORY | os.environ | fixed
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        if gpus:
            environment[VISIBLE] = visible(job, index, gpus)
        # Outside the checkout, whose kda_core would hide the wheel's.
        place = {"cwd": out, "env": environment, "start_new_session": True}
        with (out / f"{job.name}.log").open("a") as log:
            line = command(job, notes, cores, seconds)
            running.append((notes, subprocess.Popen(line, stdout=log, stderr=log, **place)))
    stopped = []
    for notes, process in running:
        try:
            noted.write(notes, {"status": process.wait(max(end - time.monotonic(), 0))})
        except subprocess.TimeoutExpired:
            # Interrupt only the started process: a worker with an interrupted compiler would report a failed test.
            process.send_signal(signal.SIGINT)
            stopped.append(process)
    last = time.monotonic() + GRACE
    for process in stopped:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(last - time.monotonic(), 0))
        with suppress(ProcessLookupError):  # its group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _notes(job: Job, out: Path) -> Path:
    return out / f"{job.name}.jsonl"


def dispatch_lines(backend: str) -> set[tuple[str, int]]:
    """(file, line) of the code by which Triton hands a backend's kernels out to their warps, where they specialise.

    Idle warps read what to do next from a shared byte, which racecheck reports for kernels whose partitions share
    nothing, too (docs/notes/nvidia.md). That code has the line of the kernel's ``def``, of ``warp_specialize`` or of
    the statement after it; what a partition does has lines of its own.
    """
    spec = importlib.util.find_spec(f"kda_core_{backend}")
    found = set()
    for folder in spec.submodule_search_locations or [] if spec else []:
        for file in Path(folder).glob("*.py"):
            for kernel in ast.walk(ast.parse(file.read_text())):
                if isinstance(kernel, ast.FunctionDef):
                    found |= {(file.name, line) for line in _dispatch(kernel)}
    return found


def _dispatch(kernel: ast.FunctionDef) -> set[int]:
    statements = sorted(node.lineno for node in ast.walk(kernel) if isinstance(node, ast.stmt))
    lines: set[int] = set()
    for node in ast.walk(kernel):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warp_specialize"):
            after = [line for line in statements if line > node.end_lineno][:1]
            lines |= {kernel.lineno, node.lineno, *after}
    return lines


def findings(log: Path, dispatch: Collection[tuple[str, int]] = ()) -> int:
    """Lines of a sanitizer's findings in a log, also of one that was stopped; none of hazards between ``dispatch``."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    found = [line for line in lines if line.startswith("=========") and not CLEAN.fullmatch(line)]
    # A hazard is its first access and each one that it has been seen with.
    hazards = [match.groups() for line in found if (match := RACE.match(line))]
    if not hazards or any((file, int(line)) not in dispatch for file, line in hazards):
        return len(found)
    return sum(not RACE.match(line) and not line.startswith("========= RACECHECK SUMMARY") for line in found)


def summary(job: Job, out: Path, dispatch: Collection[tuple[str, int]] = ()) -> tuple[str, bool]:
    """A line on a job's state, and whether it has ended and passed; ``dispatch`` as in ``findings``."""
    notes = noted.read(_notes(job, out))
    outcomes = {note["test"]: note["outcome"] for note in notes if "test" in note}
    counts = {kind: list(outcomes.values()).count(kind) for kind in ("passed", "failed", "skipped")}
    left = next((note["collected"] for note in notes if "collected" in note), len(outcomes)) - len(outcomes)
    statuses = [note["status"] for note in notes if "status" in note]
    found = findings(out / f"{job.name}.log", dispatch) if job.tool else 0
    right = bool(outcomes) and not counts["failed"] and not left and statuses[-1:] == [0] and not found
    numbers = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    ending = "right" if right else f"exit status {statuses[-1]}" if statuses else "stopped"
    ending = f"{found} lines of findings" if found else ending
    return f"{job.name:18s} {numbers}, {left} left: {ending}", right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--foreign-device", action="store_true", help="run it on a device that it is not made for")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--out", type=Path, required=True, help="folder of logs and outcomes; goes on from those there")
    parser.add_argument("--only", nargs="+", default=[], metavar="JOB", help="only jobs whose names begin so")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="workers altogether, about")
    chosen = parser.parse_args()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell ignores interrupts for its background jobs. The jobs here would inherit that and not end when told to.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    gpus = visible_gpus(torch.cuda.device_count())
    sanitizer = shutil.which("compute-sanitizer") is not None
    if not sanitizer:
        print("compute-sanitizer is not installed: its jobs are left out")
    todo = jobs(chosen.backend, chosen.foreign_device, sanitizer)
    todo = [job for job in todo if not chosen.only or job.name.startswith(tuple(chosen.only))]
    if not todo:
        parser.error(f"--only: no job begins with {' or '.join(chosen.only)}")
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    dispatch = dispatch_lines(chosen.backend)
    run([job for job in todo if not summary(job, out, dispatch)[1]], out, gpus, chosen.cores, 60 * chosen.minutes)
    found = [summary(job, out, dispatch) for job in todo]
    print(*(line for line, _ in found), sep="\n")
    return 0 if all(right for _, right in found) else 1


if __name__ == "__main__":
    sys.exit(main())
