"""Which rank holds which rows, what a rank sends of them and what it needs of others; numbers on the host.

Ranks hold ranges of the global rows; a range cut at the boundaries of sequences gives fragments. A fragment that goes
on elsewhere is the last one of its range, one that comes from elsewhere the first. So a rank has one slot for each
range: it sends the transition of the last fragment (backwards: of the first) and needs a state for the first (the
last).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kda_core._expect import fail

Range = tuple[int, int]
LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of rows of one sequence on one rank.

    Attributes:
        sequence: its number.
        start, end: its global rows; equal for a sequence without rows.
        begins, ends: whether it holds the beginning and the end of its sequence.
    """

    sequence: int
    start: int
    end: int
    begins: bool
    ends: bool


class Layout:
    """The rows of all ranks, and the fragments of one.

    Args:
        bounds: [N + 1] global boundaries of the sequences, from 0.
        ranges: for every rank, its ranges of global rows in the order of its tensors, none of them empty.
        rank: this one.

    Raises:
        ValueError: boundaries or ranges that cannot be.

    Attributes:
        slots: ranges of the rank that has most of them.
        rows: of this rank.
        of_slot: this rank's fragments of each slot, in the order of its rows.
    """

    def __init__(self, bounds: Sequence[int], ranges: Sequence[Sequence[Range]], rank: int) -> None:
        self.bounds, self.rank = tuple(bounds), rank
        self.ranges = [list(own) for own in ranges]
        self.slots = max(1, *(len(own) for own in self.ranges))
        # Slots of all ranks are counted through.
        numbered = ((a, b, r * self.slots + s) for r, own in enumerate(self.ranges) for s, (a, b) in enumerate(own))
        self._places = sorted(numbered)
        self.rows = sum(b - a for a, b in self.ranges[rank])
        self._check()
        self.of_slot = [self._cut(a, b) for a, b in self.ranges[rank]]
        self.of_slot += [[] for _ in range(self.slots - len(self.of_slot))]
        if not self._places and not rank:  # no rows at all: the first rank has the sequences
            self.of_slot = [[Fragment(n, 0, 0, True, True) for n in range(len(self.bounds) - 1)]]
        self.fragments = [f for own in self.of_slot for f in own]

    def _check(self) -> None:
        bounds, end, at = self.bounds, self.bounds[-1] if self.bounds else 0, 0
        if not bounds or bounds[0] != 0 or list(bounds) != sorted(bounds):
            fail("cu_seqlens", "boundaries from 0, not decreasing", short(bounds))
        for a, b, n in self._places:
            if a != at:
                r = n // self.slots
                what = f"rows {at} to {a} are on no rank" if a > at else f"rows {a} to {min(at, b)} are on two ranks"
                raise ValueError(
                    f"layout: expected every row on one rank; {what} (rank {r} holds {short(self.ranges[r])})"
                )
            at = b
        if at < end:
            fail("layout", f"all {end} rows of cu_seqlens", f"ranges that end at {at}")
        for r, own in enumerate(self.ranges):
            if any(before > end > a for (_, before), (a, _) in itertools.pairwise(own)):
                rows = f"the rows behind the last boundary {end} at the end of a rank's rows"
                fail("layout", rows, f"{short(own)} on rank {r}")

    def _cut(self, start: int, end: int) -> list[Fragment]:
        """The fragments of a range. A sequence without rows goes with the row before it, or with the first one."""
        found = []
        # From the sequences that end at the range's start to those that begin at its end.
        low_n, high_n = bisect.bisect_left(self.bounds, start) - 1, bisect.bisect_right(self.bounds, end)
        for n in range(max(low_n, 0), min(high_n, len(self.bounds) - 1)):
            a, b = self.bounds[n], self.bounds[n + 1]
            low, high = max(a, start), min(b, end)
            if low < high or (a == b and (start < a <= end or a == start == 0)):
                found.append(Fragment(n, low, high, low == a, high == b))
        return found

    def chains(self, slot: int) -> tuple[list[int], list[int]]:
        """The slots of all ranks with the rows before a slot's first fragment in its sequence, the farthest first.

        And the same behind its last fragment.
        """
        if not self.of_slot[slot]:
            return [], []
        first, last = self.of_slot[slot][0], self.of_slot[slot][-1]
        low, high = self.bounds[first.sequence], self.bounds[last.sequence + 1]
        ahead = [n for a, b, n in self._places if low < b and a < first.start]
        return ahead, [n for a, _, n in reversed(self._places) if last.end <= a < high]

    def longest(self) -> tuple[int, int]:
        """Lengths of the longest chains ahead and behind that any boundaries make."""
        last = len(self._places) - 1
        own = [i for i, (_, _, n) in enumerate(self._places) if n // self.slots == self.rank]
        return max(own, default=0), last - min(own, default=last)

    def tails(self, width: int) -> tuple[list[int], list[int]]:
        """The rows ahead of each range within its first row's sequence, for short convolutions.

        Returns:
            the last ``width`` local rows of each of this rank's slots; and for the ``width`` rows ahead of each slot of
            all ranks, oldest first, their places among the tails of all ranks. Rows that are not there: one past all.
        """
        own, at = [], 0
        for s in range(self.slots):
            a, b = self.ranges[self.rank][s] if s < len(self.ranges[self.rank]) else (0, 0)
            own += [at + max(b - a - j, 0) if b - a >= j else self.rows for j in range(width, 0, -1)]
            at += b - a
        starts = [a for a, _, _ in self._places]
        none = len(self.ranges) * self.slots * width
        sources = [none] * none
        for a, _, n in self._places:
            begin = self.bounds[bisect.bisect_right(self.bounds, a) - 1] if a < self.bounds[-1] else a
            for j in range(1, min(width, a - begin) + 1):
                _, end, theirs = self._places[bisect.bisect_right(starts, a - j) - 1]
                sources[(n + 1) * width - j] = (theirs + 1) * width - (end - a + j)
        return own, sources


def split(layout: str, rows: int, ranks: int) -> list[list[Range]]:
    """Ranges of every rank: "contiguous", or "zigzag", where rank r holds parts r and 2 W - 1 - r of 2 W."""
    parts = ranks if layout == "contiguous" else 2 * ranks
    each = [*itertools.pairwise(rows * i // parts for i in range(parts + 1))]
    return [[each[r]] if layout == "contiguous" else [each[r], each[parts - 1 - r]] for r in range(ranks)]


def layout_of_positions(positions: Tensor) -> tuple[str | None, Tensor]:
    """Tell how rows are laid out over ranks by the positions of their tokens in documents, for ``build_cp_context``.

    Args:
        positions: of every rank, gathered: [W, B, T / W], integers on the CPU. A document begins with 0.

    Returns:
        "contiguous" or "zigzag", None where neither puts every token behind the one before it; and whether a document
        starts at a token, [B, T] in the order of the sequence.
    """
    ranks, B, rows = positions.shape
    whole = starts = positions.new_empty(B, ranks * rows)
    for layout in LAYOUTS:
        ranges = itertools.chain.from_iterable(split(layout, ranks * rows, ranks))
        whole[:, torch.cat([torch.arange(a, b) for a, b in ranges])] = positions.transpose(0, 1).flatten(1)
        starts = whole == 0
        starts[:, 0] = True
        # Both may hold, where documents end with all parts: then both are right.
        if bool((starts[:, 1:] | (whole.diff() == 1)).all()):
            return layout, starts
    return None, starts


def joined(ranges: Sequence[Range]) -> list[Range]:
    """Neighbours become one range, empty ones none."""
    found: list[Range] = []
    for a, b in ranges:
        if not 0 <= a <= b:
            fail("layout", "ranges (start, end) of rows with 0 <= start <= end", f"({a}, {b})")
        if found and found[-1][1] == a:
            found[-1] = (found[-1][0], b)
        elif a < b:
            found.append((a, b))
    return found


def tables(
    slots: Sequence[Sequence[Fragment]], most: int, N: int, sources: Sequence[Sequence[int]], none: int
) -> tuple[list[int], list[tuple[int, int, int, int]]]:
    """Tables of some slots' fragments, for kernels and for the exchange.

    Args:
        slots: fragments of each slot.
        most: F.
        N: number of sequences; it also stands for none.
        sources: for each slot the places of the states that come for it, forward and backward.
        none: the place that stands for none.

    Returns:
        five rows of F + 1: boundaries of fragments, sequences that they begin, and that they end, empty ones up to F,
        then where the states lie that they receive, forward and backward; and for each slot its last and first
        fragment, and those that need received states, or F.
    """
    cut: list[Fragment] = []
    columns, received = [], [[none] * (most + 1) for _ in range(2)]
    for own, froms in zip(slots, sources, strict=True):
        first, last = len(cut), len(cut) + len(own) - 1
        cut += own
        needs = (most if own[0].begins else first, most if own[-1].ends else last) if own else (most, most)
        columns.append((last, first, *needs) if own else (0, 0, *needs))
        for row, place, source in zip(received, needs, froms, strict=True):
            row[place] = source if place < most else none
    rest = most - len(cut)
    cu = [*itertools.accumulate((f.end - f.start for f in cut), initial=0)]
    begins, ends = [f.sequence if f.begins else N for f in cut], [f.sequence if f.ends else N for f in cut]
    absent = [N] * (rest + 1)
    return [*cu, *cu[-1:] * rest, *begins, *absent, *ends, *absent, *received[0], *received[1]], columns


def short(values: Sequence) -> str:
    text = ", ".join(map(str, values[:8]))
    return f"[{text}{', …' if len(values) > 8 else ''}]"
