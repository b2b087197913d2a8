"""From a request to flat work: sequences, groups of lanes, budgets and scratch memory.

A lane is one sequence with one value head. Sequences are ordered from the longest to the shortest and cut
into chunks of C rows, so that the lanes that are still alive at chunk step i are a prefix of all lanes.
A group is a block of lanes whose states stay in cache while its sequences are walked; a window (windows.py)
is a run of its chunk steps. Peak memory of a call is its results, the states of one group and the scratch of
one window, whatever T is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kda_core.lazy_attribute import lazy_attribute
from kda_core.request import Request

Call = TypeVar("Call")
Result = TypeVar("Result")

_LANE_BUDGET = 1 << 19
"""State elements (lanes·K·V) of one group: 2 MiB of fp32, what two cores hold in their second-level caches."""

_STEP_BUDGET = 1 << 21
"""The same of a decoding step, which walks its states three times and not once more for every token to come: 8 MiB of
fp32 stay in a third-level cache.

Measured at K = V = 128 on two cores: half of it costs 10% at 256 lanes, for the calls; twice costs 15% at 1,024."""

_WINDOW_BUDGET = 1 << 18
"""Elements of one [rows, K] operand of one window (1 MiB of fp32; about twelve such operands are live at once).

Measured at K = V = 128 on two cores: half of it costs 10%, for the calls; twice gains nothing."""

_MIN_CHUNK = 16

_PRODUCT_DIM = 8
"""Head dimensions of the chunk form's products are multiples of this."""

_CPU = torch.device("cpu")
"""As an object: torch reads its name anew in every call."""

_VECTOR_LOOP = 64
"""Elements that divide evenly over torch's vector loops (two registers of up to 16 elements) in each of two threads."""


def plainly(compute: Callable[[Call], Result], request: Call) -> Result:
    """Run a hook's work where neither autograd nor autocast of the caller touches its arithmetic."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return plainly(compute, request)
    if torch.is_grad_enabled():
        with torch.no_grad():
            return compute(request)
    return compute(request)


class Workspace:
    """Scratch memory of one call, reused by every window; a buffer is named and grows to its largest use."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[str, dict[tuple[int, ...], Tensor]] = {}

    def __call__(self, name: str, *shape: int, zero: bool = False) -> Tensor:
        """A contiguous tensor of ``shape`` with stale content; with ``zero``, a buffer is zero when it is new."""
        views = self._views.get(name)
        if views is None:
            views = self._views[name] = {}
        view = views.get(shape)
        if view is not None:
            return view
        numel = math.prod(shape)
        whole = _whole_vectors(numel)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < whole:
            views.clear()
            buffer = self._buffers[name] = (torch.zeros if zero else torch.empty)(whole, dtype=self.dtype, device=_CPU)
        view = views[shape] = (buffer if buffer.numel() == numel else buffer[:numel]).view(shape)
        return view


def with_slack(scratch: Tensor) -> Tensor:
    """A scratch tensor, flat, with what lies behind it up to a multiple of the widest vector loop.

    torch computes the last few elements of a tensor with another exp than the rest. Elementwise functions run on
    this view instead, so that a row's bits do not depend on how many rows there are.
    """
    return scratch.as_strided((_whole_vectors(scratch.numel()),), (1,))


def _whole_vectors(numel: int) -> int:
    return -(-numel // _VECTOR_LOOP) * _VECTOR_LOOP


def rows_per_chunk(request: Request) -> int:
    """Rows of one chunk: ``chunk_size``, or a smaller power of two when every sequence fits one.

    What ``disable_recompute`` saves has ``chunk_size`` rows, because its shape must follow from metadata alone.
    """
    longest = request.T if request.cu_seqlens is None else int(token_counts(request).amax()) if request.N else 0
    if request.disable_recompute or longest >= request.chunk_size:
        return request.chunk_size
    return min(request.chunk_size, max(_MIN_CHUNK, 1 << max(0, longest - 1).bit_length()))


def token_counts(request: Request) -> Tensor:
    """[N] tokens of every sequence, int64."""
    if request.cu_seqlens is None:
        return torch.full((request.N,), request.T, dtype=torch.long, device="cpu")
    return (request.cu_seqlens if request.cu_seqlens_cpu is None else request.cu_seqlens_cpu).long().diff()


def chunk_bound(request: Request) -> int:
    """Chunks of one batch row: exact for dense layouts, an upper bound from metadata alone for packed ones."""
    if request.cu_seqlens is None:
        return (request.T + request.chunk_size - 1) // request.chunk_size
    return request.T // request.chunk_size + request.N


@dataclass(frozen=True)
class Sequences:
    """Where the sequences of a request lie, by sequence; index tensors are int64.

    Attributes:
        batch: batch row of its tokens.
        start: first token within that row.
        length: tokens; zero for a skipped row of a pool.
        first_chunk: its first chunk in per-chunk results flattened to [B·NT, ...].
        chunks: NT, chunks of a batch row.
        ids: the sequences that have work or a state to carry, longest first.
        packed: all of them lie in batch row 0.
    """

    batch: Tensor
    start: Tensor
    length: Tensor
    first_chunk: Tensor
    chunks: int
    ids: Tensor
    packed: bool

    @classmethod
    def of(cls, request: Request, chunk: int, skip: Tensor | None = None) -> Sequences:
        """Lay out ``request`` in chunks of ``chunk`` rows; ``skip`` [N] marks rows that must not be touched."""
        N, length = request.N, token_counts(request)
        counts = (length + chunk - 1) // chunk
        first_chunk = counts.cumsum(0) - counts
        packed = request.cu_seqlens is not None
        if packed:
            start, batch, chunks = (
                length.cumsum(0) - length,
                torch.zeros(N, dtype=torch.long, device="cpu"),
                int(counts.sum()),
            )
            ids = length.argsort(descending=True, stable=True)
        else:
            start, batch, chunks = (
                torch.zeros(N, dtype=torch.long, device="cpu"),
                torch.arange(N, device="cpu"),
                -(-request.T // chunk),
            )
            ids = batch
        if skip is not None:
            length = length.masked_fill(skip, 0)
            ids = ids[~skip[ids]]
        return cls(batch, start, length, first_chunk, chunks, ids, packed)


@dataclass(frozen=True)
class Group:
    """A block of lanes: sequences ``ids`` (longest first) with value heads ``heads``.

    ``alive[i]`` is the number of its sequences that have a chunk at step i.
    """

    sequences: Sequences
    ids: Tensor
    heads: slice
    chunk: int
    alive: list[int]

    @property
    def n_heads(self) -> int:
        return self.heads.stop - self.heads.start

    @lazy_attribute
    def span(self) -> slice | None:
        """The sequences as a slice when they are neighbours in order, else None."""
        first, n = int(self.ids[0]), len(self.ids)
        neighbours = n == 1 or bool((self.ids == torch.arange(first, first + n, device="cpu")).all())
        return slice(first, first + n) if neighbours else None

    def rows_of(self, x: Tensor) -> Tensor:
        """[n, heads, ...] of ``x`` [N, HV, ...]: a view when the sequences are neighbours, else a copy."""
        return x[self.ids if self.span is None else self.span, self.heads]

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


def product_dims(request: Request) -> tuple[int, int]:
    """K and V of the chunk form's products: those of ``request``, with channels of zeros up to a multiple of 8.

    MKL computes a member of a batched product with rows of an odd length, or of very few elements, in another order
    when it lies elsewhere in the batch or alone. A sequence's bits would depend on what it is packed with.
    """
    K, V = (-(-d // _PRODUCT_DIM) * _PRODUCT_DIM for d in (request.K, request.V))
    return K, V


def lane_budget(K: int, V: int, step: bool = False) -> int:
    """Lanes whose states [K, V] stay in cache together, for a run of tokens or for one ``step``."""
    return max(1, (_STEP_BUDGET if step else _LANE_BUDGET) // (K * V))


def lane_groups(sequences: Sequences, request: Request, chunk: int, lanes: int) -> Iterator[Group]:
    """Cut all lanes into groups of about ``lanes``; the value heads of one query head stay together."""
    shared = request.HV // request.H
    heads = shared * min(request.H, max(1, lanes // shared))
    count = max(1, lanes // heads)
    for ids in sequences.ids.split(count):
        if len(ids) == 0:
            continue
        chunks = (sequences.length[ids] + chunk - 1) // chunk
        steps = int(chunks[0])
        alive = (len(ids) - chunks.bincount(minlength=steps + 1).cumsum(0)[:steps]).tolist()
        for h in range(0, request.HV, heads):
            yield Group(sequences, ids, slice(h, min(h + heads, request.HV)), chunk, alive)


def window_budget(K: int, V: int, chunk: int) -> int:
    """Chunks of ``chunk`` rows of a window."""
    return max(1, _WINDOW_BUDGET // (chunk * max(K, V)))
