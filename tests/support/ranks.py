"""A pool of gloo processes, started once and reused: jobs run on the first W of them.

The processes are forked off a server that has imported torch and kda_core, which takes a second for all of them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import tempfile
import traceback
from datetime import timedelta
from typing import Any

SIZES = (1, 2, 3, 4, 8)
TIMEOUT = 30
"""Seconds until a rank that waits for another gives up."""


MESH = ((0, 1), (2, 3), (0, 2), (1, 3))
"""Rows, then columns of a mesh of ranks 0 to 3."""
PAIRS: dict[tuple[int, int], Any] = {}
"""In the processes of a pool: the groups of ``MESH``."""


class RankFailed(Exception):
    """A job raised on a rank; the text has the traceback."""


class Ranks:
    """Processes of ranks 0 to 7, with a group of the first W for each W of ``SIZES``.

    They start with the first job, and again after one that has failed.
    """

    def __init__(self, *modules: str, size: int = max(SIZES), patience: float = TIMEOUT) -> None:
        """``modules`` are imported once for all ``size`` processes, which answer within ``patience`` seconds."""
        self._modules, self._size, self._patience = modules, size, patience
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self.broken = False

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "kda_core.distributed", "kda_core_cpu.plugin", *self._modules])
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._size, self._patience, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, size: int, job: str, *arguments: Any) -> list[Any]:
        """Run ``job`` (a function of rank_jobs, or "module:function") on ranks 0 to size - 1.

        Returns:
            function(group, rank, *arguments) of each.

        Raises:
            RankFailed: with the tracebacks of the ranks that raised.
        """
        found = self.attempt(size, job, *arguments)
        failed = [f"rank {r}: {text}" for r, (ok, text) in enumerate(found) if not ok]
        if failed:
            raise RankFailed("\n".join(failed))
        return [value for _, value in found]

    def attempt(self, size: int, job: str, *arguments: Any) -> list[tuple[bool, Any]]:
        """The same; for each rank (True, result) or (False, traceback)."""
        if self.broken:
            self.close()
        if not self._processes:
            self._start()
        for pipe in self._pipes[:size]:
            pipe.send_bytes(pickle.dumps((size, job, arguments)))
        found = []
        for rank, pipe in enumerate(self._pipes[:size]):
            if not pipe.poll(self._patience + 15):
                self.broken = True
                raise RankFailed(f"rank {rank} of {size} did not answer in {job}")
            found.append(pickle.loads(pipe.recv_bytes()))
        # A collective may be half done.
        self.broken = self.broken or not all(ok for ok, _ in found)
        return found

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(None))
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._pipes, self._processes, self.broken = [], [], False


def _serve(rank: int, ranks: int, patience: float, folder: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    timeout = timedelta(seconds=patience)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
    groups = {size: dist.new_group(list(range(size))) for size in SIZES if size <= ranks}
    for pair in MESH:
        PAIRS[pair] = dist.new_group(list(pair))
    while True:
        asked = pickle.loads(pipe.recv_bytes())
        if asked is None:
            break
        size, job, arguments = asked
        module, _, name = job.rpartition(":")
        try:
            answer = True, getattr(importlib.import_module(module or "rank_jobs"), name)(groups[size], rank, *arguments)
        except BaseException:  # the parent raises it, SystemExit too: a rank without an answer would hang it
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()
