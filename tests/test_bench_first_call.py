"""``benchmarks/bench_first_call.py`` runs, and counts what was compiled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import installed
import pytest

installed.need_backend("cpu")

pytestmark = pytest.mark.end_to_end

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "bench_first_call.py"


def test_cpu_run():
    """Both processes and the steps after them on the CPU, whose backend compiles nothing."""
    options = ["--device", "cpu", "--shape", "1,70,2,16", "--calls", "3"]
    child = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    lines = child.stdout.splitlines()[1:]
    assert [line.strip().split(":")[0] for line in lines[:2]] == ["forward", "forward and backward"]
    assert all(line.endswith("for 0 kernels") for line in lines[:2])
    assert lines[2:] == [f"  3 steps with random {kind} afterwards compiled 0" for kind in ("T", "packings")]
