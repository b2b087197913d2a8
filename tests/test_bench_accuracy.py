"""``benchmarks/accuracy.py``: what it measures on the CPU, and its tables."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import installed
import pytest

installed.need_backend("cpu")

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "accuracy.py"


@pytest.fixture(scope="module")
def accuracy():
    spec = importlib.util.spec_from_file_location("accuracy", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def row(accuracy):
    """Makes a row of results from the errors of every draw."""

    def made(case: str, ours: list[dict], theirs: list[dict] | str) -> dict:
        draws = {"kda_core": ours, "fla": theirs}
        errors = {n: x if isinstance(x, str) else accuracy._root_mean_square(x) for n, x in draws.items()}
        return {"case": case, "dtype": "bf16", "errors": errors, "draws": draws}

    return made


@pytest.mark.end_to_end
def test_cpu_run(accuracy, tmp_path: Path):
    """Two draws of a case, to a file, and read from it again."""
    file, page = tmp_path / "found.json", tmp_path / "page.md"
    page.write_text(f"before\n{accuracy.BEGIN}\nold\n{accuracy.END}\nafter\n")
    common = ["--backend", "cpu", "--device", "cpu", "--draws", "2", "--only", "given decay, float32"]
    assert accuracy.main([*common, "--json", str(file), "--write", str(page)]) == 0
    found = json.loads(file.read_text())["rows"][0]
    assert set(found["errors"]["kda_core"]) == {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state"}
    assert all(0 < error < 1e-6 for draw in found["draws"]["kda_core"] for error in draw.values())
    first = page.read_text()
    assert "given decay, float32 | fp32 | kda_core" in first
    assert "old" not in first
    assert (first.startswith("before\n"), first.endswith("\nafter\n")) == (True, True)
    assert accuracy.main(["--read", str(file), "--write", str(page)]) == 0
    assert page.read_text() == first


def test_the_larger_errors_are_named(accuracy, row):
    ours = [{"o": 1e-3, "dq": 2.2e-3}, {"o": 1e-3, "dq": 2e-3}]
    theirs = [{"o": 2e-3, "dq": 2e-3}, {"o": 2e-3, "dq": 2e-3}]
    rows = [row("one", ours, theirs), row("two", ours, "fails")]
    lines = accuracy.larger(rows).splitlines()
    # The geometric mean of 1.1 and 1, whose logarithms lie 0.095 apart: a standard error of half of that.
    assert lines[2:] == ["| one | bf16 | dq | 1.051 | 1.049 ± 0.048 |"]
    assert accuracy.larger([row("one", theirs, theirs)]) == ""
    table = accuracy.table(rows)
    assert "| one | bf16 | kda_core | 1.0e-03 | 2.1e-03 |" in table
    assert "fails" in table
    worse = accuracy.table([row("one", [{"o": 3e-3}], [{"o": 2e-3}])])
    assert "**3.0e-03**" in worse
