"""Every test of a backend that needs a GPU, in parallel on all GPUs of a machine.

    python tools/everything_on_gpu.py --backend nvidia --minutes 30 --out found
    python tools/everything_on_gpu.py --backend amd --foreign-device --minutes 30 --out found-amd

The conformance kit in both tiers, and the backend's own tests that need a GPU. Compiling kernels takes most of the
time: an hour and more of a dozen cores. The program stops after ``--minutes``; called again with the same folder it
leaves out what has passed. It needs pytest-xdist, and the wheels of the core and the backend. The folder keeps each
job's log and the names of its tests that passed or were skipped. Exit status 0: everything passed.

This file is also the pytest plugin that notes and leaves out these tests.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
KIT = ("-p", "kda_core.testing.plugin", "--pyargs", "kda_core.testing.suite")
OWN = {
    "nvidia": (
        "hopper", "prepare_hopper", "gradients_hopper", "segments_hopper", "several_hopper", "invariant", "kept_states",
        "step", "draft", "layer_step", "accuracy", "halves", "decode",
    )
}  # fmt: skip
"""Names of a backend's own test files that need a GPU, without ``test_nvidia_``."""

PASSED = "KDA_PASSED"
"""The variable that names the file of a job's passed tests."""

VISIBLE = "CUDA_VISIBLE_DEVICES"  # ROCm honours it, too
MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**28)}
"""glibc keeps freed memory of the oracle's large tensors; else every operation gets new pages, which are cleared."""

GRACE = 15
"""Seconds that an interrupted job has to end by itself."""


@dataclass(frozen=True)
class Job:
    """Tests in a separate process.

    Attributes:
        arguments: of pytest.
        share: of the machine's cores, for workers of pytest.
        most: workers at most: large tests fill a GPU's memory.
        gpus: how many it sees, if the machine has as many.
    """

    name: str
    arguments: tuple[str, ...]
    share: float = 0.0
    most: int = 1000
    gpus: int = 1


def jobs(backend: str, foreign: bool) -> list[Job]:
    """All jobs of a backend, the longest first."""
    kit = (*KIT, f"--backend={backend}", *["--foreign-device"] * foreign)
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
        tests = HERE.parent / "tests" / backend
        found.append(Job("own", tuple(str(tests / f"test_{backend}_{name}.py") for name in OWN[backend]), 0.1))
    return found


def _passed(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _name(nodeid: str) -> str:
    """A test by its file's name without the folder: an installed suite may move."""
    return nodeid.rsplit("/", 1)[-1]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    before = set(_passed(Path(os.environ[PASSED])))
    # A run without a test fails.
    left = [item for item in items if _name(item.nodeid) not in before] or items[-1:]
    if len(left) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = left


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # pytest-xdist's workers send their reports to the process that writes them.
    done = report.passed if report.when == "call" else report.skipped
    if done and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[PASSED]).open("a") as file:
            file.write(_name(report.nodeid) + "\n")


def visible_gpus(count: int) -> list[str]:
    """Names of the GPUs that the caller may use, as child processes get them."""
    given = os.environ.get(VISIBLE)
    return given.split(",")[:count] if given else [str(i) for i in range(count)]


def visible(job: Job, index: int, gpus: Sequence[str]) -> str:
    """The GPUs that a job sees: jobs go round them."""
    return ",".join(gpus[(index + i) % len(gpus)] for i in range(min(job.gpus, len(gpus))))


def run(todo: Sequence[Job], out: Path, gpus: Sequence[str], cores: int, seconds: float) -> dict[str, int | None]:
    """Run jobs in parallel; pytest's exit status of each by its name, None for those that were stopped."""
    end = time.monotonic() + seconds
    running = {}
    for index, job in enumerate(todo):
        fixed = {PASSED: str(out / f"{job.name}.passed"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment = MEMORY | os.environ | fixed
        environment.pop("PYTEST_XDIST_WORKER", None)  # of a run that started this one
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        if gpus:
            environment[VISIBLE] = visible(job, index, gpus)
        workers = max(1, min(job.most, int(job.share * cores)))
        line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "everything_on_gpu"]
        line += ["-n", str(workers), "--dist", "worksteal", *job.arguments]
        with (out / f"{job.name}.log").open("a") as log:
            # Outside the checkout, whose kda_core would hide the wheel's.
            place = {"cwd": out, "env": environment, "start_new_session": True}
            running[job.name] = subprocess.Popen(line, stdout=log, stderr=log, **place)
    statuses: dict[str, int | None] = dict.fromkeys(running)
    for name, process in running.items():
        try:
            statuses[name] = process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            # Interrupt only the started process: a worker with an interrupted compiler would report a failed test.
            process.send_signal(signal.SIGINT)
    last = time.monotonic() + GRACE
    for process in (running[name] for name, status in statuses.items() if status is None):
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(last - time.monotonic(), 0))
        with suppress(ProcessLookupError):  # its group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return statuses


def main(arguments: list[str] | None = None, jobs: Callable[[str, bool], list[Job]] = jobs) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--foreign-device", action="store_true", help="run it on a device that it is not made for")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--out", type=Path, required=True, help="folder of logs and outcomes; goes on from those there")
    parser.add_argument("--only", nargs="+", default=[], metavar="JOB", help="only jobs whose names begin so")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="workers altogether, about")
    chosen = parser.parse_args(arguments)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell ignores interrupts for its background jobs. The jobs here would inherit that and not end when told to.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    todo = jobs(chosen.backend, chosen.foreign_device)
    todo = [job for job in todo if not chosen.only or job.name.startswith(tuple(chosen.only))]
    if not todo:
        parser.error(f"--only: no job begins with {' or '.join(chosen.only)}")
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    done = {job.name: out / f"{job.name}.done" for job in todo}
    left = [job for job in todo if not done[job.name].exists()]
    statuses = run(left, out, visible_gpus(torch.cuda.device_count()), chosen.cores, 60 * chosen.minutes)
    for job in todo:
        status = statuses.get(job.name, 0)
        if status == 0:
            done[job.name].touch()
        ending = {0: "right", None: "stopped"}.get(status, f"exit status {status}")
        print(f"{job.name:18s} {len(_passed(out / f'{job.name}.passed'))} passed or skipped: {ending}")
    return 0 if all(file.exists() for file in done.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
