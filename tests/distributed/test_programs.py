"""Programs that torchrun starts: the example's losses in any combination, and the benchmark's rows."""

from __future__ import annotations

import json
import sys

import pytest
from environments import ROOT, run

pytestmark = pytest.mark.end_to_end

RUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    file = tmp_path_factory.mktemp("losses") / "one.json"
    run(sys.executable, ROOT / "examples" / "train_parallel.py", "--steps", 8, "--json", file)
    losses = json.loads(file.read_text())["losses"]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    return file


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, ["--cp", 2]), (2, ["--cp", 2, "--layout", "zigzag", "--fsdp"]), (2, ["--tp", 2]),
        (4, ["--tp", 2, "--fsdp"]), (4, ["--cp", 2, "--tp", 2]), (4, ["--cp", 2, "--tp", 2, "--fsdp"]),
        (4, ["--cp", 2, "--fsdp"]),
    ],
)  # fmt: skip
def test_losses_are_those_of_one_process(one_process, processes, options):
    program = ROOT / "examples" / "train_parallel.py"
    said = run(*RUN, processes, program, "--steps", 8, *options, "--expect", one_process)
    assert "largest difference" in said


WAYS = [(1, []), (2, ["--tp", 2]), (2, ["--cp", 2, "--fsdp"]), (4, ["--cp", 2, "--tp", 2, "--fsdp"]), (4, ["--tp", 4])]


def test_checkpoints_are_read_by_other_numbers_of_ranks(one_process, tmp_path):
    """Each way goes on where the one before it ended; its step has the loss of one process."""
    for i, (processes, options) in enumerate([*WAYS, *WAYS[1::-1]]):
        program = [ROOT / "examples" / "train_parallel.py", "--steps", 1, "--expect", one_process]
        folders = ["--save", tmp_path / str(i), *(["--load", tmp_path / str(i - 1)] if i else [])]
        start = [sys.executable] if processes == 1 else [*RUN, processes]
        said = run(*start, *program, *options, *folders)
        assert f"step {i + 1}: loss" in said
        assert "largest difference" in said


def test_the_benchmark_has_a_row_for_each_way(tmp_path):
    file = tmp_path / "rows.json"
    program = ROOT / "benchmarks" / "parallel.py"
    run(*RUN, 2, program, "--device", "cpu", "--shapes", "64x2x8", "--rounds", 1, "--json", file)
    rows = json.loads(file.read_text())["rows"]
    ways = {(row["mode"], row["way"]) for row in rows}
    for mode in ("training", "prefill"):
        assert {(mode, way) for way in ("ideal", "kda_core", "zigzag", "cells", "heads", "whole")} <= ways
        assert {(f"host {mode}", way) for way in ("plain", "kda_core", "zigzag")} <= ways
    errors = [row for row in rows if row["mode"] == "errors"]
    assert len(errors) == 3
    assert all(row["repeats"] and row["compiled"] and max(row["errors"].values()) < 1e-5 for row in errors)
