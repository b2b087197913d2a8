"""Programs of several ranks end: exit code 0, and nothing on stderr. ``KDA_EXITS`` is how many times (10)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from environments import ROOT

pytestmark = pytest.mark.end_to_end

RANKS = 2


def ended(*program: str, seconds: float = 120) -> list[tuple[int, str, str]]:
    """Run a program on each rank: exit code, stdout and stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, *program], env={**os.environ, **place, "RANK": str(rank)}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(started, said, strict=True)]


BEGIN = """
import datetime, torch, torch.distributed as dist, kda_core
from kda_core.distributed import build_cp_context
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=SECONDS))
context = build_cp_context(tokens=8)
q = torch.randn(1, 4, 1, 8, requires_grad=True)
"""
STEP = """
kda_core.chunk_kda(q, q, q, -q.detach().abs(), torch.rand(1, 4, 1), cp_context=context)[0].sum().backward()
dist.destroy_process_group()
"""
RAISES = """
k = q[..., :7] if dist.get_rank() else q
kda_core.chunk_kda(q, k, q, -q.detach().abs(), torch.rand(1, 4, 1), cp_context=context)
"""
EXAMPLE = str(ROOT / "examples" / "train_parallel.py"), "--cp", "2", "--steps", "1"


HELD = f"""
import sys, weakref
sys.path.insert(0, {str(ROOT / "examples")!r})
import torch.distributed as dist, train_parallel
groups = []
class Processes(train_parallel.Processes):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        groups.append(weakref.ref(dist.group.WORLD))
train_parallel.Processes = Processes
train_parallel.main(["--cp", "2", "--steps", "1"])
print([group() for group in groups])
"""


def test_the_example_leaves_no_group_behind():
    """The threads of a group that lives on may abort the interpreter at its end."""
    for code, said, errors in ended("-c", HELD):
        assert said.endswith("[None]\n"), (said, errors)
        assert code == 0, errors


@pytest.mark.parametrize(("program", "share"), [(EXAMPLE, 5), (("-c", BEGIN.replace("SECONDS", "60") + STEP), 1)])
def test_ranks_end_cleanly_every_time(program, share):
    for run in range(int(os.environ.get("KDA_EXITS", "10")) // share):
        for rank, (code, said, errors) in enumerate(ended(*program)):
            assert (code, errors) == (0, ""), f"run {run}, rank {rank}: {said}{errors}"


def test_the_other_ranks_end_by_the_groups_timeout_where_one_raises():
    (first, _, waited), (second, _, raised) = ended("-c", BEGIN.replace("SECONDS", "3") + RAISES, seconds=60)
    assert first
    assert second
    assert "ValueError: k: expected" in raised
    assert "ValueError" not in waited
    assert "RuntimeError" in waited
