"""Cores that a process may use, by its affinity and its containers' quotas, and the threads of the tests."""

from __future__ import annotations

import os
from types import SimpleNamespace

import cores
import pytest
import torch
from thread_limit import limit_threads


@pytest.mark.parametrize(
    ("quota", "expected"),
    [(None, 6), ("max 100000\n", 6), ("290000 100000\n", 2), ("50000 100000\n", 1), ("6400000 100000\n", 6)],
)
def test_the_smaller_of_affinity_and_quota_and_never_none(monkeypatch, tmp_path, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert cores.usable_cores(tmp_path / "cpu.max") == expected


@pytest.mark.parametrize(
    ("workers", "set_by_user", "expected"), [(None, None, 8), (3, None, 2), (16, None, 1), (3, "5", None)]
)
def test_tests_run_no_more_threads_than_cores(monkeypatch, workers, set_by_user, expected):
    """Eight cores; a run that only starts workers, or whose user has decided, is left alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(64)
    # Set and deleted through the fixture, which then restores what this run had.
    monkeypatch.setenv("OMP_NUM_THREADS", set_by_user or "")
    if set_by_user is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    config = SimpleNamespace(getoption=lambda name, default: None)
    if workers is not None:
        config.workerinput = {"workercount": workers}
    try:
        limit_threads(config, cores=8)
        assert torch.get_num_threads() == (expected or 64)
    finally:
        torch.set_num_threads(before)
    assert os.environ["OMP_NUM_THREADS"] == (set_by_user or str(expected))


def test_a_run_that_starts_workers_leaves_the_threads_to_them(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    limit_threads(SimpleNamespace(getoption=lambda name, default: 4))
    assert "OMP_NUM_THREADS" not in os.environ


def test_threads_of_this_run_do_not_spin():
    assert "OMP_WAIT_POLICY" in os.environ
