"""Cores that a process may use, by its affinity and its containers' quotas, and the threads of the tests."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from thread_limit import limit_threads

from kda_core import cores


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def mounted(tmp_path):
    """Calls ``cpu_quota`` on made-up control groups."""

    def quota(membership):
        (tmp_path / "membership").write_text(membership)
        return cores.cpu_quota(tmp_path / "groups", tmp_path / "membership")

    quota.groups = tmp_path / "groups"
    return quota


def test_without_control_groups_there_is_no_quota(mounted, tmp_path):
    assert mounted("0::/") is None
    assert cores.cpu_quota(tmp_path / "missing", tmp_path / "missing too") is None


def test_version_2_the_narrowest_group_on_the_way_counts(mounted):
    group(mounted.groups / "user", cpu__max="150000 100000\n")
    group(mounted.groups / "user" / "job", cpu__max="max 100000\n")
    assert mounted("0::/user/job\n") == 1.5
    group(mounted.groups / "user" / "job", cpu__max="40000 100000\n")
    assert mounted("0::/user/job\n") == 0.4
    assert mounted("0::/elsewhere\n") is None


def test_version_2_within_a_container_its_group_is_the_root(mounted):
    group(mounted.groups, cpu__max="300000 100000\n")
    assert mounted("0::/../../host/path\n") == 3


def test_version_1(mounted):
    group(mounted.groups / "cpu,cpuacct" / "job", cpu__cfs_quota_us="250000\n", cpu__cfs_period_us="100000\n")
    assert mounted("4:memory:/job\n3:cpu,cpuacct:/job\n") == 2.5
    group(mounted.groups / "cpu,cpuacct" / "job", cpu__cfs_quota_us="-1\n")
    assert mounted("3:cpu,cpuacct:/job\n") is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 6), (2.9, 2), (0.5, 1), (64.0, 6)])
def test_the_smaller_of_affinity_and_quota_and_never_none(monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert cores.usable_cores() == expected


def test_this_machine_has_as_many_cores_as_it_may_use():
    assert 1 <= cores.usable_cores() <= os.cpu_count()


@pytest.mark.parametrize(
    ("workers", "set_by_user", "expected"), [(None, None, 8), (3, None, 2), (16, None, 1), (3, "5", None)]
)
def test_tests_run_no_more_threads_than_cores(monkeypatch, workers, set_by_user, expected):
    """Eight cores; a run that only starts workers, or whose user has decided, is left alone."""
    asked = []
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    # Set and deleted through the fixture, which then restores what this run had.
    monkeypatch.setenv("OMP_NUM_THREADS", set_by_user or "")
    if set_by_user is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    config = SimpleNamespace(getoption=lambda name, default: None)
    if workers is not None:
        config.workerinput = {"workercount": workers}
    limit_threads(config)
    assert asked == ([] if expected is None else [expected])
    assert os.environ["OMP_NUM_THREADS"] == (set_by_user or str(expected))


def test_a_run_that_starts_workers_leaves_the_threads_to_them(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    limit_threads(SimpleNamespace(getoption=lambda name, default: 4))
    assert "OMP_NUM_THREADS" not in os.environ


def test_threads_of_this_run_do_not_spin():
    assert "OMP_WAIT_POLICY" in os.environ
