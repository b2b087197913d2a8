"""Jobs side by side that go on where an earlier call stopped, on the CPU backend."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import everything_on_gpu
import installed
import noted
import pytest
from everything_on_gpu import KIT, Job

installed.need_backend("cpu")
installed.need_package("xdist", "pytest-xdist")

SMALL = Job("small", (*KIT, "--backend=cpu", "-k", "test_beta"))


def call(monkeypatch, out: Path, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["everything_on_gpu.py", "--backend", "cpu", "--out", str(out), *arguments])
    return everything_on_gpu.main()


def note(path: Path, *notes: dict) -> None:
    path.write_text("".join(json.dumps(n) + "\n" for n in notes))


@pytest.mark.end_to_end
def test_goes_on_where_it_stopped(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setattr(everything_on_gpu, "jobs", lambda *facts: [SMALL])
    assert call(monkeypatch, tmp_path, "--minutes", "0.001") == 1
    assert "stopped" in capsys.readouterr().out
    assert call(monkeypatch, tmp_path) == 0
    assert " 0 left: right" in capsys.readouterr().out
    notes = noted.read(tmp_path / "small.jsonl")
    passed = [n["test"] for n in notes if n.get("outcome") == "passed"]
    assert len(passed) == len(set(passed)) > 3
    # As if the last of them had not been run.
    note(tmp_path / "small.jsonl", *(n for n in notes if n.get("test") != passed[-1] and "status" not in n))
    assert call(monkeypatch, tmp_path) == 0
    again = noted.read(tmp_path / "small.jsonl")
    assert [n["test"] for n in again if n.get("outcome") == "passed"] == passed
    # Nothing is left: nothing runs.
    size = (tmp_path / "small.log").stat().st_size
    assert call(monkeypatch, tmp_path) == 0
    assert (tmp_path / "small.log").stat().st_size == size


@pytest.mark.end_to_end
def test_what_is_stopped_has_not_failed(monkeypatch, tmp_path: Path):
    """A test that waits for a program of its own, as for a compiler, when the time is over; and all of it ends.

    A shell lets what it puts into the background ignore interrupts; ptxas does not.
    """
    file, began = tmp_path / "test_waits.py", tmp_path / "began"
    program = (
        "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL);"
        f"open({str(began)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    )
    line = f"subprocess.run([sys.executable, '-c', {program!r}], check=True)"
    file.write_text(f"import subprocess, sys\n\ndef test_waits():\n    {line}\n")
    monkeypatch.setattr(everything_on_gpu, "jobs", lambda *facts: [Job("waits", (str(file),))])
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert call(monkeypatch, tmp_path, "--minutes", "0.15") == 1
    finally:
        signal.signal(signal.SIGINT, handler)
    pid = int(began.read_text())
    assert [note for note in noted.read(tmp_path / "waits.jsonl") if "outcome" in note or "status" in note] == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


RIGHT = ({"collected": 2}, {"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "skipped"}, {"status": 0})


def test_what_counts_as_right(tmp_path: Path):
    job = Job("one", ())
    file = tmp_path / "one.jsonl"
    assert not everything_on_gpu.summary(job, tmp_path)[1]
    note(file, *RIGHT)
    assert everything_on_gpu.summary(job, tmp_path) == (
        f"{'one':18s} 1 passed, 0 failed, 1 skipped, 0 left: right",
        True,
    )
    note(file, *RIGHT[:2], RIGHT[3])
    assert "1 left" in everything_on_gpu.summary(job, tmp_path)[0]
    assert not everything_on_gpu.summary(job, tmp_path)[1]
    note(file, *RIGHT[:3], {"test": "b", "outcome": "failed"}, {"status": 0})
    assert not everything_on_gpu.summary(job, tmp_path)[1]
    note(file, *RIGHT[:3], {"status": 1})
    assert not everything_on_gpu.summary(job, tmp_path)[1]
    # A test that failed and passed when it was run again.
    note(file, {"test": "a", "outcome": "failed"}, {"status": 1}, *RIGHT)
    assert everything_on_gpu.summary(job, tmp_path)[1]


def test_a_full_gpu_is_no_finding_of_memcheck(tmp_path: Path):
    """Two processes of a run on an H200 had 150 lines each on allocations that torch was refused."""
    memcheck, racecheck = (
        everything_on_gpu.command(Job("one", (), tool=tool), tmp_path / "one.jsonl", 1, 1.0)
        for tool in ("memcheck", "racecheck")
    )
    assert memcheck[:5] == ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no"]
    assert "--report-api-errors" not in racecheck


@pytest.mark.parametrize(
    ("log", "lines"),
    [
        ("========= COMPUTE-SANITIZER\n  0.1 s  a: right\n========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= COMPUTE-SANITIZER\n========= \n========= Target application returned an error\n", 0),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("========= RACECHECK SUMMARY: 10 hazards displayed (10 errors, 0 warnings)\n", 1),
        (
            "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 4 bytes\n=========     at f+0x10\n",
            2,
        ),
        ("========= Error: Race reported between Read access at f+0xf0 in f.py:24\n", 1),
    ],
)
def test_what_a_sanitizer_found_counts_even_if_it_was_stopped(tmp_path: Path, log: str, lines: int):
    (tmp_path / "one.log").write_text(log)
    note(tmp_path / "one.jsonl", *RIGHT)
    assert everything_on_gpu.findings(tmp_path / "one.log") == lines
    assert everything_on_gpu.summary(Job("one", (), tool="memcheck"), tmp_path)[1] == (not lines)


KERNEL = """\
@jit
def kernel(x):
    if x:
        gl.warp_specialize(
            [(one, (x,)), (two, (x,))],
            [1],
        )
    else:
        y = gl.warp_specialize([(one, (x,))], [1])

    store(x)


@jit
def plain(x):
    store(x)
"""
HAZARD = """\
========= Error: Race reported between Read access at kernel+0xf0 in kernels.py:2
=========     and Write access at kernel+0x2ee0 in kernels.py:{} [157 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_hazards_of_a_dispatch_between_warps(monkeypatch, tmp_path: Path):
    package = tmp_path / "kda_core_made_up"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernels.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    dispatch = everything_on_gpu.dispatch_lines("made_up")
    assert dispatch == {("kernels.py", line) for line in (2, 4, 9, 11)}
    assert everything_on_gpu.dispatch_lines("that_is_not_installed") == set()
    log = tmp_path / "one.log"
    for line, found in ((2, 0), (4, 0), (11, 0), (5, 3), (15, 3)):
        log.write_text(HAZARD.format(line))
        assert everything_on_gpu.findings(log, dispatch) == found
        assert everything_on_gpu.findings(log) == 3
    # One hazard elsewhere, and all of them are shown.
    log.write_text(HAZARD.format(11) + HAZARD.format(12))
    assert everything_on_gpu.findings(log, dispatch) == 6
    # Another tool's finding beside them.
    log.write_text("========= Invalid __global__ read of size 4 bytes\n" + HAZARD.format(11))
    assert everything_on_gpu.findings(log, dispatch) == 1


def test_jobs_go_round_the_gpus():
    one, two = Job("one", ()), Job("two", (), gpus=2)
    assert [everything_on_gpu.visible(one, i, "0123") for i in range(5)] == ["0", "1", "2", "3", "0"]
    assert everything_on_gpu.visible(two, 3, "0123") == "3,0"
    assert everything_on_gpu.visible(two, 5, "0") == "0"


def test_only_the_gpus_that_the_caller_may_use(monkeypatch):
    monkeypatch.delenv(everything_on_gpu.VISIBLE, raising=False)
    assert everything_on_gpu.visible_gpus(2) == ["0", "1"]
    monkeypatch.setenv(everything_on_gpu.VISIBLE, "3,GPU-1f")
    assert everything_on_gpu.visible_gpus(2) == ["3", "GPU-1f"]
    assert everything_on_gpu.visible_gpus(0) == []


def test_a_backend_has_its_own_jobs():
    names = [job.name for job in everything_on_gpu.jobs("nvidia", False, True)]
    assert len(names) == len(set(names))
    assert {"thorough", "fast", "slow", "own", "memcheck_1", "racecheck_4"} <= set(names)
    foreign = everything_on_gpu.jobs("amd", True, False)
    assert all("--foreign-device" in job.arguments for job in foreign)
    assert not {"own", "memcheck_1"} & {job.name for job in foreign}
    for job in everything_on_gpu.jobs("nvidia", False, False):
        if job.name == "own":
            assert all(Path(name).exists() for name in job.arguments)


@pytest.mark.end_to_end
def test_every_test_of_the_kit_is_in_one_job(tmp_path: Path):
    def collected(*arguments: str) -> list[str]:
        line = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *arguments]
        found = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
        return [name for name in found.stdout.splitlines() if "::" in name]

    everything = collected(*KIT, "--backend=cpu", "-m", "slow or not slow")
    assert len(everything) > 700
    jobs = everything_on_gpu.jobs("cpu", False, False)
    assert sorted(name for job in jobs for name in collected(*job.arguments)) == sorted(everything)


def test_a_name_that_no_job_has(monkeypatch, tmp_path: Path):
    with pytest.raises(SystemExit):
        call(monkeypatch, tmp_path, "--only", "nothing")
