"""Cells of a grid of rows, each a call of its own, so that bits do not depend on which rank makes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kda_core._expect import fail
from kda_core.distributed._layout import Layout, Range, short, tables

GRID = 4096
"""Rows of a cell: summaries of 32 heads of 128 channels are then 1 KiB a row."""


class Cells:
    """The cells of a grid, each of which is a call of its own: the tables of a context with ``deterministic_degree``.

    Args:
        numbers: of the cells of each rank, in the order of its rows; ``own``: those of this rank.
        grid: rows of a cell, without the last one.
        rows: of all cells.
        batch: sequences that are laid out alike.
        dense: ``batch`` where these are all sequences for good, or 0.
        most: F, or None.

    Attributes:
        fragments: [P, 5, F + 1], for each of them as ``ContextParallel.fragments`` for a rank.
        slots: [2, most cells of a rank x slots of a cell], as the first rows of ``ContextParallel.slots``.
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
        N, n, places = len(bounds) - 1, self.dense or 1, max(map(len, self.numbers))
        starts = range(0, max(self.rows, 1), self.grid)
        shifts = [self.rows * b for b in range(self.batch if self.rows else 1)]
        ranges = [(a + s, min(a + self.grid, self.rows) + s) for a in starts for s in shifts]
        slots = Layout(bounds, [ranges], 0).of_slot
        each = [slots[i : i + n] for i in range(0, len(slots), n)]
        largest = max(sum(map(len, of)) for of in each)
        if self.most is None:
            self.most = self.dense or 1 << max(largest - 1, 0).bit_length()
        F = self.most
        if largest > F:
            fail("fragments", f"at least {largest} for a cell of {self.grid} rows", f"{F}")
        came = [(i, i) for i in range(n)]
        made = [tables(each[c], F, N, came, n) for c in self.own]
        cut = [x for by_fragment, _ in made for x in by_fragment]
        columns = [column[:2] for _, edges in made for column in edges]
        columns += [(0, 0)] * (places * n - len(columns))
        sends = [x for row in zip(*columns, strict=True) for x in row]
        place = {c: r * places + i for r, own in enumerate(self.numbers) for i, c in enumerate(own)}
        through = [int(all(len(s) == 1 and not (s[0].begins or s[0].ends) for s in of)) for of in each]
        chain = [*(place[c] for c in range(len(each))), *through]
        self._values, host, parts = moved((cut, sends, chain), self._values, device)
        shape = len(self.own), 5, F + 1
        self.cu_seqlens_cpu = host[: len(cut)].view(shape)[:, 0]
        self.fragments, self.slots, self.chain = parts[0].view(shape), parts[1].view(2, -1), parts[2].view(2, -1)


@torch.inference_mode(False)  # a context that is made in inference mode may serve training, too
def moved(
    lists: Sequence[list[int]], into: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Tables by one transfer on the device, in memory that a refreshed context keeps for graphs which read it.

    Returns:
        that memory, its values on the host, and each table on the device.
    """
    host = torch.tensor([x for values in lists for x in values], device="cpu")
    if device.type == "cuda":
        host = host.pin_memory()
    if into is None:
        into = torch.empty_like(host, device=device)
    into.copy_(host, non_blocking=True)
    return into, host, into.split([*map(len, lists)])


def on_grid(ranges: Sequence[Sequence[Range]], rows: int, grid: int) -> list[list[int]]:
    """Numbers of the cells of ``grid`` rows that each rank holds, in the order of its rows.

    Raises:
        ValueError: ranges that do not begin and end with a cell.
    """
    for r, own in enumerate(ranges):
        off = [(a, b) for a, b in own if a % grid or (b % grid and b != rows)]
        if off:
            cells = f"grid={grid} rows with deterministic_degree (multiples of {grid}, or the last row {rows})"
            fail("layout", f"ranges of whole cells of {cells}", f"{short(off)} on rank {r}")
    found = [[cell for a, b in own for cell in range(a // grid, -(-b // grid))] for own in ranges]
    if not rows:  # one cell without rows: the first rank has the sequences
        found[0] = [0]
    return found
