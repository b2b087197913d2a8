"""From a request to flat work: lanes, windows, scratch memory and states.

A lane is one sequence with one value head. Sequences are ordered from the longest to the shortest and cut
into chunks of C rows, so that the lanes that are still alive at chunk step i are a prefix of all lanes.
A group is a block of lanes whose states stay in cache while its sequences are walked. A window is a run of
chunk steps of one group: all its chunks (step-major, then sequence, then head) are one batch
[Z = pairs·heads, C, ·] of everything that does not depend on the state; a pair is one (sequence, step).

Rows past a sequence's end are padding: they are filled so that they change nothing (q = k = v = β = 0, decay 1).
Peak memory of a call is its results plus the scratch of one window, whatever T is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from kda_core.request import Request

Call = TypeVar("Call")
Result = TypeVar("Result")

_LANE_BUDGET = 1 << 19
"""State elements (lanes·K·V) of one group: 2 MiB of fp32, what two cores hold in their second-level caches."""

_WINDOW_BUDGET = 1 << 18
"""Elements of one [rows, K] operand of one window (1 MiB of fp32; about twelve such operands are live at once).

Measured at K = V = 128 on two cores: half of it costs 10%, for the calls; twice gains nothing."""

_MIN_CHUNK = 16

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
        views = self._views.setdefault(name, {})
        view = views.get(shape)
        if view is not None:
            return view
        numel = _whole_vectors(math.prod(shape))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel:
            views.clear()
            buffer = self._buffers[name] = (torch.zeros if zero else torch.empty)(numel, dtype=self.dtype)
        view = views[shape] = buffer[: math.prod(shape)].view(shape)
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
        return torch.full((request.N,), request.T, dtype=torch.long)
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
            start, batch, chunks = length.cumsum(0) - length, torch.zeros(N, dtype=torch.long), int(counts.sum())
            ids = length.argsort(descending=True, stable=True)
        else:
            start, batch, chunks = torch.zeros(N, dtype=torch.long), torch.arange(N), -(-request.T // chunk)
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

    @cached_property
    def span(self) -> slice | None:
        """The sequences as a slice when they are neighbours in order, else None."""
        first, n = int(self.ids[0]), len(self.ids)
        neighbours = n == 1 or bool((self.ids == torch.arange(first, first + n)).all())
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

    def window(self, i0: int, i1: int) -> Window:
        """The chunks of steps [i0, i1)."""
        return Window(self, i0, i1)


def lane_budget(request: Request) -> int:
    """Lanes whose states stay in cache together."""
    return max(1, _LANE_BUDGET // (request.K * request.V))


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


def window_budget(request: Request, chunk: int) -> int:
    """Chunks of a window."""
    return max(1, _WINDOW_BUDGET // (chunk * max(request.K, request.V)))


@dataclass(frozen=True)
class Window:
    """The chunks of steps [i0, i1) of a group, and how rows travel between them and the caller's tensors.

    Rows are taken as strided views where the window is a box of the batch (a dense layout, or one packed
    sequence), else through an index; either way a row of [K] is read once, whatever the caller's strides are.
    """

    group: Group
    i0: int
    i1: int
    steps: list[slice] = field(init=False)
    pairs: int = field(init=False)

    def __post_init__(self) -> None:
        steps, pair = [], 0
        for alive in self.group.alive[self.i0 : self.i1]:
            steps.append(slice(pair, pair + alive))
            pair += alive
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "pairs", pair)

    @property
    def heads(self) -> slice:
        return self.group.heads

    @property
    def rows(self) -> int:
        """Rows of a chunk."""
        return self.group.chunk

    @property
    def Z(self) -> int:
        """Chunks of the window: pairs times heads."""
        return self.pairs * self.group.n_heads

    def lanes(self, step: int) -> slice:
        """The chunks of the window's ``step``-th step within [Z, ...]."""
        pairs, heads = self.steps[step], self.group.n_heads
        return slice(pairs.start * heads, pairs.stop * heads)

    @cached_property
    def _pair_index(self) -> tuple[Tensor, Tensor]:
        """Sequence and step of every pair."""
        alive = torch.tensor([s.stop - s.start for s in self.steps])
        order = torch.cat([torch.arange(n) for n in alive.tolist()])
        return self.group.ids[order], torch.arange(self.i0, self.i1).repeat_interleave(alive)

    @cached_property
    def chunk_index(self) -> Tensor:
        """Position of every pair in per-chunk results [B·NT, ...]."""
        sequence, step = self._pair_index
        return self.group.sequences.first_chunk[sequence] + step

    @cached_property
    def first_of_run(self) -> int | None:
        """The first pair's position there when all pairs follow one another, else None."""
        index = self.chunk_index
        return int(index[0]) if bool((index.diff() == 1).all()) else None

    @cached_property
    def _box(self) -> tuple[slice, int, int, int] | None:
        """(batch rows, first token, whole chunks, rows of a last partial chunk), or None when rows are scattered."""
        group, sequences = self.group, self.group.sequences
        first = self.steps[0].stop
        if first == 1:
            i = int(group.ids[0])
            batch = int(sequences.batch[i])
            rows = slice(batch, batch + 1)
        elif not sequences.packed and group.span is not None:
            i, rows = group.span.start, group.span
        else:
            return None
        tokens = min(int(sequences.length[i]) - self.i0 * group.chunk, len(self.steps) * group.chunk)
        return rows, int(sequences.start[i]) + self.i0 * group.chunk, *divmod(tokens, group.chunk)

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Batch row [pairs, 1], token [pairs, C], which are padding [pairs, C], and the rows that are not, or None."""
        sequences, chunk = self.group.sequences, self.group.chunk
        sequence, step = self._pair_index
        offset = (step * chunk)[:, None] + torch.arange(chunk)
        padding = offset >= sequences.length[sequence][:, None]
        # A padding row reads its own sequence's first row and is overwritten, so that no neighbour leaks in.
        token = sequences.start[sequence][:, None] + offset.masked_fill(padding, 0)
        real = (~padding).flatten().nonzero().squeeze(1) if bool(padding.any()) else None
        return sequences.batch[sequence][:, None], token, padding, real

    def load(self, x: Tensor, into: Tensor, pad: float | None = 0.0, shared: int = 1) -> Tensor:
        """Copy the window's rows of ``x`` [B, T, heads·/shared, D] to ``into`` [Z, C, D], any strides and dtypes.

        ``shared`` value heads read each head of ``x``; padding rows become ``pad`` (None: left to the caller).
        """
        heads = slice(self.group.heads.start // shared, self.group.heads.stop // shared)
        target = into.unflatten(0, (self.pairs, heads.stop - heads.start, shared))
        if self._box is None:
            batch, token, _, _ = self._rows
            rows = x[0, :, heads][token] if self.group.sequences.packed else x[:, :, heads][batch, token]
            target.copy_(rows.transpose(1, 2).unsqueeze(2))
        else:
            rows, t, whole, part = self._box
            C = self.group.chunk
            target = target.unflatten(0, (len(self.steps), -1))
            body = x[rows, t : t + whole * C, heads].unflatten(1, (whole, C))
            target[:whole].copy_(body.permute(1, 0, 3, 2, 4).unsqueeze(3))
            if part:
                tail = x[rows, t + whole * C : t + whole * C + part, heads]
                target[whole, :, :, :, :part].copy_(tail.transpose(1, 2).unsqueeze(2))
        if pad is not None:
            self.pad(into, pad)
        return into

    def pad(self, x: Tensor, value: float) -> None:
        """Fill the padding rows of ``x`` [Z, C, D]."""
        if self._box is None:
            _, _, padding, real = self._rows
            if real is not None:
                x.unflatten(0, (self.pairs, -1)).masked_fill_(padding[:, None, :, None], value)
        elif self._box[3]:
            x.unflatten(0, (len(self.steps), -1))[self._box[2], :, self._box[3] :] = value

    def store(self, x: Tensor, into: Tensor, shared: int = 1) -> None:
        """Copy the real rows of ``x`` [Z/shared, C, D] to their places in ``into`` [B, T, heads, D]."""
        heads = slice(self.group.heads.start // shared, self.group.heads.stop // shared)
        source = x.unflatten(0, (self.pairs, -1))
        if self._box is None:
            batch, token, _, real = self._rows
            rows, batch = source.transpose(1, 2).flatten(0, 1), batch.expand_as(token).flatten()
            token = token.flatten()
            if real is not None:
                rows, batch, token = rows[real], batch[real], token[real]
            into[:, :, heads].index_put_((batch, token), rows.to(into.dtype))
            return
        rows, t, whole, part = self._box
        C = self.group.chunk
        source = source.unflatten(0, (len(self.steps), -1))
        body = into[rows, t : t + whole * C, heads].unflatten(1, (whole, C))
        body.permute(1, 0, 3, 2, 4).copy_(source[:whole])
        if part:
            tail = into[rows, t + whole * C : t + whole * C + part, heads]
            tail.transpose(1, 2).copy_(source[whole, :, :, :part])


@dataclass(frozen=True)
class TokenWindow:
    """One token of every sequence, the rows of a decoding step: a light ``Window`` of [N·HV, 1, ·]."""

    request: Request

    @classmethod
    def of(cls, request: Request) -> TokenWindow | None:
        """The window of ``request``, or None unless each of its sequences has one token."""
        if request.cu_seqlens is None:
            return cls(request) if request.T == 1 and request.N else None
        one_each = request.N and bool((token_counts(request) == 1).all())
        return cls(request) if one_each else None

    @property
    def heads(self) -> slice:
        return slice(0, self.request.HV)

    @property
    def rows(self) -> int:
        return 1

    @property
    def pairs(self) -> int:
        return self.request.N

    @property
    def Z(self) -> int:
        return self.pairs * self.request.HV

    def _tokens(self, x: Tensor) -> Tensor:
        """[N, heads, D] of ``x`` [B, T, heads, D]."""
        return x[:, 0] if self.request.cu_seqlens is None else x[0, : self.pairs]

    def load(self, x: Tensor, into: Tensor, pad: float | None = 0.0, shared: int = 1) -> Tensor:
        into.view(self.pairs, -1, shared, x.shape[-1]).copy_(self._tokens(x).unsqueeze(2))
        return into

    def pad(self, x: Tensor, value: float) -> None:
        """No row is padding."""

    def store(self, x: Tensor, into: Tensor) -> None:
        self._tokens(into).copy_(x.view(self.pairs, -1, x.shape[-1]))
