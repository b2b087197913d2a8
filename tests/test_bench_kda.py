"""``benchmarks/bench_kda.py`` runs, and writes what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import installed
import pytest

installed.need_package("rich")
installed.need_backend("cpu")

pytestmark = pytest.mark.end_to_end

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "bench_kda.py"


def test_cpu_run(tmp_path):
    """Every mode on the CPU: a table, and rows with times and a floor in the JSON."""
    file = tmp_path / "kda.json"
    options = ["--device", "cpu", "--shapes", "1,64,2,16", "--seconds", "0.01", "--json", file]
    child = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    rows = json.loads(file.read_text())["rows"]
    assert [row["mode"] for row in rows] == ["inference", "forward", "training", "kept"]
    assert all(row["ms"]["kda_core"]["median"] > 0 and row["floor"] > 0 for row in rows)
    assert "1, 64, 2, 16" in child.stdout


def test_stopped_run(tmp_path):
    """What was measured before an error, here of a shape that there is not, is in the JSON and in the table."""
    file = tmp_path / "kda.json"
    options = ["--device", "cpu", "--modes", "forward", "--shapes", "1,64,2,16", "1,-64,2,16", "--seconds", "0.01"]
    line = [sys.executable, SCRIPT, *options, "--json", file]
    child = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 1
    assert "-64" in child.stderr.splitlines()[-1]
    assert [row["shape"]["T"] for row in json.loads(file.read_text())["rows"]] == [64]
    assert "1, 64, 2, 16" in child.stdout
