"""Settings that ``checked_calls`` hands to the kit."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_ELEMENTS = 2**26
"""At K = V = 128 one head over 4,096 tokens: seconds of a core, and half a gigabyte."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckSettings:
    """The arguments of ``checked_calls``."""

    warn: bool = False
    dump: str | None = None
    elements: int = DEFAULT_ELEMENTS
