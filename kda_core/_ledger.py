"""Records of the router: how each backend was loaded, and what each says to a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kda_core.capabilities import BackendInfo

State = Literal["loaded", "broken", "incompatible", "conflict"]
Status = Literal["chosen", "accepted", "refused", "unavailable", "not installed", "broken"]


def said_by(error: BaseException) -> str:
    """The type and text of an error of a backend's, whose text may be an error, too."""
    try:
        return f"{type(error).__name__}: {error}"
    # Its __str__ is foreign code that may raise anything; the type alone says enough.
    except Exception:
        return type(error).__name__


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The outcome of loading one entry point, or of registering one plugin by hand.

    Attributes:
        name: the backend's name, or the entry point's when the backend could not say.
        distribution: name and version of the wheel, or "" when it was registered by hand.
        entry_point: ``module:attribute``.
        state: "loaded", or why it is not.
        reason: for users; "" when loaded.
        info: the backend's identity card, when it could be read.
    """

    name: str
    distribution: str
    entry_point: str
    state: State
    reason: str = ""
    info: BackendInfo | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One backend's answer about one call."""

    backend: str
    status: Status
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective of a call with ``cp_context``; every rank passes as much.

    Attributes:
        direction: "forward" or "backward".
        collective: "all_gather" or "all_reduce".
        ranks: of the group.
        nbytes: that each rank passes to the collective: an all_gather sends them to every other rank.
        tensors: what they are.
    """

    direction: Literal["forward", "backward"]
    collective: Literal["all_gather", "all_reduce"]
    ranks: int
    nbytes: int
    tensors: str

    def __str__(self) -> str:
        return (
            f"{self.direction}: {self.collective} among {self.ranks} ranks, {self.nbytes:,} bytes of each: "
            f"{self.tensors}"
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of ``explain``: a verdict for every known backend, and which one would be chosen.

    Attributes:
        op: the public function that was asked about.
        chosen: name of the backend that would serve the call, or None.
        verdicts: one for each known backend, best priority first.
        transfers: what a call with ``cp_context`` sends, in order.
    """

    op: str
    chosen: str | None
    verdicts: tuple[Verdict, ...]
    transfers: tuple[Transfer, ...] = ()

    def __str__(self) -> str:
        head = f"{self.op}: " + (f"served by {self.chosen!r}" if self.chosen else "no backend can serve this call")
        lines = [f"  {v.backend}: {v.status}" + (f" ({v.reason})" if v.reason else "") for v in self.verdicts]
        return "\n".join([head, *lines, *(f"  {t}" for t in self.transfers)])
