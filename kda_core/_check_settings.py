"""Settings that ``checked_calls`` hands to the kit."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_ELEMENTS = 2**26
"""At K = V = 128 one head over 4,096 tokens: seconds of a core, and half a gigabyte."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckSettings:
    """Settings of ``checked_calls``.

    Attributes:
        warn: warn (``CheckWarning``) rather than raise ``CheckFailed``.
        dump: file that the first call which fails is written to, or None.
        elements: state elements (tokens times value heads times K times V) that the reference computes for one call;
            larger calls are compared in a sample.
    """

    warn: bool = False
    dump: str | None = None
    elements: int = DEFAULT_ELEMENTS
