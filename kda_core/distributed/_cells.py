"""Cells of a grid of rows, each a call of its own, so that bits do not depend on which rank makes it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kda_core.distributed._layout import Fragment, Layout, Range, short

GRID = 4096
"""Rows of a cell: summaries of 32 heads of 128 channels are then 1 KiB a row."""


class Cells:
    """The cells of a grid, each of which is a call of its own: the tables of a context with ``deterministic_degree``.

    Args:
        numbers: of the cells of each rank, in the order of its rows.
        rank: this one.
        grid: rows of a cell, without the last one.
        rows: of all cells.
        batch: sequences that are laid out alike.
        dense: ``batch`` where these are all sequences for good, or 0.
        most: F, or None.

    Attributes:
        own: numbers of this rank's cells.
        fragments: [P, 3, F + 1], for each of them what ``ContextParallel.fragments`` has of a rank; F is the same for
            all cells.
        slots: [4, most cells of a rank x slots of a cell], as the first rows of ``ContextParallel.slots``.
        chain: [2, cells]: the place of a cell among those of all ranks, and whether a sequence goes through the cell.
    """

    def __init__(
        self, numbers: list[list[int]], rank: int, grid: int, rows: int, batch: int, dense: int, most: int | None
    ) -> None:
        self.numbers, self.grid, self.rows, self.batch, self.dense = numbers, grid, rows, batch, dense
        self.own, self.most = tuple(numbers[rank]), most
        self._values: Tensor | None = None

    def fill(self, bounds: Sequence[int], device: torch.device) -> None:
        """Set the tables for boundaries."""
        N, n, rows = len(bounds) - 1, self.dense or 1, self.rows
        count, places = sum(map(len, self.numbers)), max(map(len, self.numbers))
        starts = [(c * self.grid, min((c + 1) * self.grid, rows)) for c in range(count)]
        ranges = [(a + rows * b, e + rows * b) for a, e in starts for b in range(self.batch if rows else 1)]
        slots = Layout(bounds, [ranges], 0).of_slot
        each = [slots[c * n : (c + 1) * n] for c in range(count)]
        largest = max(sum(map(len, of)) for of in each)
        if self.most is None:
            self.most = self.dense or 1 << max(largest - 1, 0).bit_length()
        F = self.most
        if largest > F:
            raise ValueError(f"fragments: expected at least {largest} for a cell of {self.grid} rows, got {F}")
        cut = [table(cut_of([f for slot in each[c] for f in slot], N), F, N) for c in self.own]
        columns = [column for c in self.own for column in _edges(each[c], F)]
        columns += [(0, 0, F, F)] * (places * n - len(columns))
        place = {c: r * places + i for r, own in enumerate(self.numbers) for i, c in enumerate(own)}
        through = [int(all(len(s) == 1 and not (s[0].begins or s[0].ends) for s in of)) for of in each]
        tables = [x for t in cut for x in t], [x for row in zip(*columns, strict=True) for x in row]
        chain = [*(place[c] for c in range(count)), *through]
        cells = len(self.own)
        host, self._values = moved([*tables[0], *tables[1], *chain], self._values, device)
        self.cu_seqlens_cpu = host[: len(tables[0])].view(cells, 3, F + 1)[:, 0]
        first, second, last = self._values.split([*map(len, tables), len(chain)])
        self.fragments, self.slots, self.chain = first.view(cells, 3, F + 1), second.view(4, -1), last.view(2, count)


@torch.inference_mode(False)  # a context that is made in inference mode may serve training, too
def moved(values: list[int], into: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values on the host, and by one transfer on the device; a refreshed context keeps the memory that graphs read."""
    host = torch.tensor(values, device="cpu")
    if device.type == "cuda":
        host = host.pin_memory()
    if into is None:
        into = torch.empty_like(host, device=device)
    return host, into.copy_(host, non_blocking=True)


def table(cut: Sequence[tuple[int, int, int]], most: int, N: int) -> list[int]:
    """Three rows of F + 1: boundaries of fragments, sequences that they begin, and that they end; empty ones up to F.

    Args:
        cut: (rows, sequence that it begins or N, sequence that it ends or N) of each fragment.
        most: F.
        N: number of sequences.
    """
    rest = most - len(cut)
    cu = [*itertools.accumulate((rows for rows, _, _ in cut), initial=0)]
    begins, ends = ([f[i] for f in cut] + [N] * (rest + 1) for i in (1, 2))
    return [*cu, *cu[-1:] * rest, *begins, *ends]


def cut_of(fragments: Sequence[Fragment], N: int) -> list[tuple[int, int, int]]:
    """Fragments as ``table`` takes them."""
    return [(f.end - f.start, f.sequence if f.begins else N, f.sequence if f.ends else N) for f in fragments]


def _edges(slots: Sequence[Sequence[Fragment]], none: int) -> list[tuple[int, int, int, int]]:
    """For each slot of a cell: its last and first fragment, and those that need received states, or ``none``."""
    found, at = [], 0
    for cut in slots:
        first, last = at, at + len(cut) - 1
        at += len(cut)
        if cut:
            found.append((last, first, none if cut[0].begins else first, none if cut[-1].ends else last))
        else:
            found.append((0, 0, none, none))
    return found


def on_grid(ranges: Sequence[Sequence[Range]], rows: int, grid: int) -> list[list[int]]:
    """Numbers of the cells of ``grid`` rows that each rank holds, in the order of its rows.

    Raises:
        ValueError: ranges that do not begin and end with a cell.
    """
    for r, own in enumerate(ranges):
        off = [(a, b) for a, b in own if a % grid or (b % grid and b != rows)]
        if off:
            raise ValueError(
                f"layout: expected ranges of whole cells of grid={grid} rows with deterministic_degree (multiples of "
                f"{grid}, or the last row {rows}), got {short(off)} on rank {r}"
            )
    found = [[cell for a, b in own for cell in range(a // grid, -(-b // grid))] for own in ranges]
    if not rows:  # one cell without rows: the first rank has the sequences
        found[0] = [0]
    return found
