"""The number of cores that this process may keep busy: the most threads that are useful (docs/cpu.md)."""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = QUOTA) -> int:
    """Cores that the process may run on, and that its container's CPU quota pays for; at least 1.

    ``os.cpu_count()`` counts those of the whole machine, and torch's default number of threads knows no quota.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    try:
        time, period = map(int, quota.read_text().split())
    except (OSError, ValueError):  # no such file, or no limit: "max"
        return allowed
    return max(1, min(allowed, time // period))
