"""Jobs side by side that go on where an earlier call stopped, on the CPU backend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import everything_on_gpu
import installed
import pytest
from everything_on_gpu import KIT, Job

installed.need_backend("cpu")
installed.need_package("xdist", "pytest-xdist")

SMALL = Job("small", (*KIT, "--backend=cpu", "-k", "test_beta"))


def call(out: Path, *arguments: str, job: Job = SMALL) -> int:
    return everything_on_gpu.main(["--backend", "cpu", "--out", str(out), *arguments], lambda *facts: [job])


@pytest.mark.end_to_end
def test_goes_on_where_it_stopped(capsys, tmp_path: Path):
    assert call(tmp_path, "--minutes", "0.001") == 1
    assert "stopped" in capsys.readouterr().out
    assert call(tmp_path) == 0
    assert "passed or skipped: right" in capsys.readouterr().out
    passed = (tmp_path / "small.passed").read_text().splitlines()
    assert len(passed) == len(set(passed)) > 3
    # As if the last of them had not been run.
    (tmp_path / "small.passed").write_text("".join(f"{name}\n" for name in passed[:-1]))
    (tmp_path / "small.done").unlink()
    assert call(tmp_path) == 0
    assert sorted((tmp_path / "small.passed").read_text().splitlines()) == sorted(passed)
    # Nothing is left: nothing runs.
    size = (tmp_path / "small.log").stat().st_size
    assert call(tmp_path) == 0
    assert (tmp_path / "small.log").stat().st_size == size


@pytest.mark.end_to_end
def test_what_failed_is_run_again(capsys, tmp_path: Path):
    file = tmp_path / "test_two.py"
    file.write_text("import os\n\ndef test_a(): pass\n\ndef test_b(): assert os.path.exists('mended')\n")
    job = Job("two", (str(file),))
    assert call(tmp_path, job=job) == 1
    assert "1 passed or skipped: exit status 1" in capsys.readouterr().out
    (tmp_path / "mended").touch()
    assert call(tmp_path, job=job) == 0
    assert (tmp_path / "two.passed").read_text().splitlines() == ["test_two.py::test_a", "test_two.py::test_b"]


@pytest.mark.end_to_end
def test_what_is_stopped_has_not_failed(tmp_path: Path):
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
    job = Job("waits", (str(file),))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert call(tmp_path, "--minutes", "0.15", job=job) == 1
    finally:
        signal.signal(signal.SIGINT, handler)
    pid = int(began.read_text())
    assert not (tmp_path / "waits.passed").exists()
    assert "FAILED" not in (tmp_path / "waits.log").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


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
    names = [job.name for job in everything_on_gpu.jobs("nvidia", False)]
    assert len(names) == len(set(names))
    assert {"thorough", "fast", "slow", "own"} <= set(names)
    foreign = everything_on_gpu.jobs("amd", True)
    assert all("--foreign-device" in job.arguments for job in foreign)
    assert "own" not in {job.name for job in foreign}
    for job in everything_on_gpu.jobs("nvidia", False):
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
    jobs = everything_on_gpu.jobs("cpu", False)
    assert sorted(name for job in jobs for name in collected(*job.arguments)) == sorted(everything)


def test_a_name_that_no_job_has(tmp_path: Path):
    with pytest.raises(SystemExit):
        call(tmp_path, "--only", "nothing")
