"""Sequences, chunks and lanes of a request.

A lane is one sequence with one value head. Sequences are ordered from the longest to the shortest and cut
into chunks of C rows, so that the lanes that are still alive at chunk step i are a prefix of all lanes.
A group is a block of lanes whose states stay in cache while its sequences are walked; a window (windows.py)
is a run of its chunk steps. Peak memory of a call is its results, the states of one group and the scratch of
one window; it does not depend on T.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kda_core.request import Request


def token_counts(request: Request) -> Tensor:
    """[N] tokens of every sequence, int64."""
    if request.cu_seqlens is None:
        return torch.full((request.N,), request.T, dtype=torch.long, device="cpu")
    return (request.cu_seqlens if request.cu_seqlens_cpu is None else request.cu_seqlens_cpu).long().diff()


def has_one_token_each(request: Request) -> bool:
    """Whether every sequence has one token, and lies behind the one before it."""
    if request.cu_seqlens is None:
        return request.T == 1
    return request.cu_seqlens.tolist() == list(range(request.N + 1))


class Sequences:
    """Places of a request's sequences; index tensors are int64, one element a sequence.

    Attributes:
        batch: batch row of its tokens.
        start: first token within that row.
        length: tokens; zero for a skipped row of a pool.
        first_chunk: its first chunk of ``chunk_size`` rows in per-chunk results flattened to [B·NT, ...].
        chunk_size: distance of the per-chunk results, in rows.
        ids: the sequences that have work or a state to carry, longest first.
        packed: all of them lie in batch row 0.
    """

    def __init__(self, request: Request, skip: Tensor | None = None) -> None:
        """Lay out ``request``; ``skip`` [N] marks rows that must not be touched."""
        self.length = length = token_counts(request)
        self.chunk_size, self.packed = request.chunk_size, request.cu_seqlens is not None
        counts = (length + self.chunk_size - 1) // self.chunk_size
        self.first_chunk = counts.cumsum(0) - counts
        if self.packed:
            self.start, self.batch = length.cumsum(0) - length, torch.zeros_like(length)
            self.ids = length.argsort(descending=True, stable=True)
        else:
            self.start, self.batch = torch.zeros_like(length), torch.arange(request.N, device="cpu")
            self.ids = self.batch
        if skip is not None:
            self.length = length.masked_fill(skip, 0)
            self.ids = self.ids[~skip[self.ids]]


@dataclass(frozen=True)
class Group:
    """A block of lanes: sequences ``ids`` (longest first) with value heads ``heads``.

    ``span``: the sequences as a slice when they are neighbours in order, else None. ``alive[i]`` is the number of its
    sequences that have a chunk at step i.
    """

    sequences: Sequences
    ids: Tensor
    span: slice | None
    heads: slice
    chunk: int
    alive: list[int]

    @property
    def n_heads(self) -> int:
        return self.heads.stop - self.heads.start

    def windows(self, budget: int) -> list[tuple[int, int]]:
        """Cut the steps into windows [i0, i1) of at most ``budget`` chunks (but at least one step) each."""
        cuts, i0, size = [], 0, 0
        for i, alive in enumerate(self.alive):
            chunks = alive * self.n_heads
            if i > i0 and size + chunks > budget:
                cuts.append((i0, i))
                i0, size = i, 0
            size += chunks
        if self.alive:
            cuts.append((i0, len(self.alive)))
        return cuts


def lane_groups(sequences: Sequences, request: Request, chunk: int, lanes: int) -> Iterator[Group]:
    """Cut all lanes into groups of about ``lanes``; the value heads of one query head stay together."""
    shared = request.HV // request.H
    heads = shared * min(request.H, max(1, lanes // shared))
    count = max(1, lanes // heads)
    for ids in sequences.ids.split(count):
        if len(ids) == 0:
            continue
        chunks = (sequences.length[ids] + chunk - 1) // chunk
        first, steps = int(ids[0]), int(chunks[0])
        neighbours = len(ids) == 1 or bool((ids.diff() == 1).all())
        span = slice(first, first + len(ids)) if neighbours else None
        alive = (len(ids) - chunks.bincount(minlength=steps + 1).cumsum(0)[:steps]).tolist()
        for h in range(0, request.HV, heads):
            yield Group(sequences, ids, span, slice(h, min(h + heads, request.HV)), chunk, alive)
