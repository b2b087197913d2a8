"""Facts of the chips that choices follow from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """Facts of a device.

    Attributes:
        arch: 90 for sm_90.
        multiprocessors: how many there are.
        interpreted: Triton's interpreter stands in for the chip; it runs no kernel written in Gluon, and its products
            are exact.
    """

    arch: int
    multiprocessors: int
    interpreted: bool = False

    @property
    def major(self) -> int:
        return self.arch // 10

    @property
    def name(self) -> str:
        return f"sm_{self.arch}"

    @property
    def descriptors(self) -> bool:
        """Whether tiles are loaded through descriptors (sm_90 and later)."""
        return self.arch >= 90

    @property
    def hopper(self) -> bool:
        """Whether kernels written in Gluon for Hopper run."""
        return self.arch == 90 and not self.interpreted

    @property
    def overlaps(self) -> bool:
        """Whether a kernel may start before the one ahead of it ends (programmatic dependent launch)."""
        return self.descriptors and not self.interpreted

    def load(self, programs: int) -> float:
        """How full ``programs`` of one kernel make the chip: programs for each multiprocessor."""
        return programs / self.multiprocessors


SHARED_LIMIT = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""KiB of shared memory that one program may use, by architecture (CUDA C++ Programming Guide, compute capabilities)."""

_MULTIPROCESSORS = {80: 108, 86: 84, 87: 16, 89: 142, 90: 132, 100: 148, 103: 160, 110: 20, 120: 188, 121: 48}

CHIPS = {arch: Chip(arch, count) for arch, count in _MULTIPROCESSORS.items()}
"""The largest chip of each architecture."""

INTERPRETED = Chip(90, 132, interpreted=True)
"""The interpreter stands in for a Hopper chip, so that descriptors are exercised."""
