"""Threads of a run of the tests."""

from __future__ import annotations

import os

import pytest


def limit_threads(config: pytest.Config, cores: int | None = None) -> None:
    """Workers of pytest-xdist times threads, those of child processes too: no more than the cores that may be used."""
    import torch
    from cores import usable_cores

    worker = getattr(config, "workerinput", None)
    starts_workers = worker is None and config.getoption("numprocesses", None)
    if starts_workers or "OMP_NUM_THREADS" in os.environ:
        return
    threads = max(1, (cores or usable_cores()) // (1 if worker is None else worker["workercount"]))
    torch.set_num_threads(min(threads, torch.get_num_threads()))
    os.environ["OMP_NUM_THREADS"] = str(threads)
