"""Programs of several ranks end: exit code 0, and nothing on stderr. ``KDA_EXITS`` is how many runs (10)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from environments import ROOT

pytestmark = pytest.mark.end_to_end

RANKS = 2


def test_a_training_run_ends_cleanly_every_time():
    program = [sys.executable, str(ROOT / "examples" / "train_parallel.py"), "--cp", "2", "--steps", "1"]
    for run in range(int(os.environ.get("KDA_EXITS", "10"))):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen(
                program, env={**os.environ, **place, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        try:
            ended = [process.communicate(timeout=120) for process in started]
        finally:
            for process in started:
                process.kill()
        for rank, (process, (said, errors)) in enumerate(zip(started, ended, strict=True)):
            assert (process.returncode, errors) == (0, ""), f"run {run}, rank {rank}: {said}{errors}"
        assert "step 1: loss" in ended[0][0]
