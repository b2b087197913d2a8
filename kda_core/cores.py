"""The number of cores that this process may keep busy: the most threads that are useful (docs/cpu.md)."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores that the process may run on, and that its container's CPU quota pays for; at least 1.

    ``os.cpu_count()`` counts those of the whole machine, and torch's default number of threads knows no quota.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, allowed if quota is None else min(allowed, math.floor(quota)))


def cpu_quota(cgroups: Path = CGROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """Cores' worth of time that control groups (version 1 or 2) allow the process, or None where they set no limit.

    Args:
        cgroups: where their file system is mounted.
        membership: the file that says which groups the process is in.
    """
    found = [q for group in _groups(cgroups, membership) if (q := _quota_of(group)) is not None]
    return min(found, default=None)


def _groups(cgroups: Path, membership: Path) -> list[Path]:
    """The process's group and those that it lies in. In a container its own may be the root of what is mounted."""
    groups = [cgroups, cgroups / "cpu", cgroups / "cpu,cpuacct"]
    for line in _read(membership).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups
        parts = Path(path.lstrip("/")).parts
        groups += [root.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
    return groups


def _quota_of(group: Path) -> float | None:
    limit = _read(group / "cpu.max").split() or [
        _read(group / "cpu.cfs_quota_us").strip(),
        _read(group / "cpu.cfs_period_us").strip(),
    ]
    try:
        time, period = (int(x) for x in limit[:2])
    except ValueError:  # "max", or files that are not there
        return None
    return time / period if time > 0 and period > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such group, or no right to look
        return ""
