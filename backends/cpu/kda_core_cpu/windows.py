"""Windows: the rows of a run of chunk steps, copied between the caller's tensors and scratch memory.

All chunks of a window (step-major, then sequence, then head) are one batch [Z = pairs·heads, C, ·] for every
computation that does not depend on the state; a pair is one (sequence, step). Rows past a sequence's end are padding
and are filled with neutral values (q = k = v = β = 0, decay 1).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kda_core.request import Request
from kda_core_cpu.sequences import Group


class Window:
    """The chunks of steps [i0, i1) of a group.

    Rows are strided views if the window is a box of the batch (a dense layout, or one packed sequence), else they are
    indexed; either way a row of [K] is read once, with any strides.

    Attributes:
        alive: pairs of every step.
        rows: of a chunk, C.
        Z: number of chunks, pairs times heads.
        shape: [Z, C], the dimensions before the channels.
    """

    def __init__(self, group: Group, i0: int, i1: int) -> None:
        self.group, self.i0, self.i1 = group, i0, i1
        self.heads, self.rows = group.heads, group.chunk
        self.alive = group.alive[i0:i1]
        self.pairs = sum(self.alive)
        self.Z = self.pairs * group.n_heads
        self.shape = (self.Z, self.rows)
        self._box = self._found_box()
        self._rows = self._found_rows() if self._box is None else None

    def by_step(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """For every step, its chunks of each of ``tensors`` [Z, ...]."""
        sizes = [pairs * self.group.n_heads for pairs in self.alive]
        return list(zip(*(x.split(sizes) for x in tensors), strict=True))

    def _pair_index(self) -> tuple[Tensor, Tensor]:
        """Sequence and step of every pair."""
        alive = torch.tensor(self.alive, device="cpu")
        order = torch.cat([torch.arange(n, device="cpu") for n in self.alive])
        return self.group.ids[order], torch.arange(self.i0, self.i1, device="cpu").repeat_interleave(alive)

    @functools.cached_property
    def _chunks(self) -> slice | Tensor:
        """Positions of the pairs in per-chunk results [B·NT, ...]: a slice if they follow one another."""
        sequence, step = self._pair_index()
        sequences = self.group.sequences
        index = sequences.first_chunk[sequence] + step * self.rows // sequences.chunk_size
        first = int(index[0])
        return slice(first, first + self.pairs) if bool((index.diff() == 1).all()) else index

    def put_chunks(self, x: Tensor, record: Tensor, first: int = 0) -> None:
        """Store ``x`` [chunks, ...], those from pair number ``first`` on, in ``record`` [B·NT, HV, ...], cut to fit."""
        rows = x.unflatten(0, (-1, self.group.n_heads))
        if rows.shape[-2:] != record.shape[-2:]:
            rows = rows[..., : record.shape[-2], : record.shape[-1]]
        places, last = self._chunks, first + len(rows)
        if isinstance(places, slice):
            record[places.start + first : places.start + last, self.heads] = rows
        else:
            record[places[first:last], self.heads] = rows.to(record.dtype)

    def get_chunks(self, record: Tensor, scratch: Tensor) -> Tensor:
        """The window's chunks [Z, ...] of ``record``: a view where they lie together, else loaded into ``scratch``."""
        rows = record[self._chunks, self.heads]
        if isinstance(self._chunks, slice) and rows.shape[1] == record.shape[1]:
            return rows.flatten(0, 1)
        return scratch.view_as(rows).copy_(rows).view_as(scratch)

    def _found_box(self) -> tuple[slice, int, int, int] | None:
        """(batch rows, first token, whole chunks, rows of a last partial chunk), or None when rows are scattered."""
        group, sequences = self.group, self.group.sequences
        if self.alive[0] == 1:
            i = int(group.ids[0])
            batch = int(sequences.batch[i])
            rows = slice(batch, batch + 1)
        elif not sequences.packed and group.span is not None:
            i, rows = group.span.start, group.span
        else:
            return None
        tokens = min(int(sequences.length[i]) - self.i0 * group.chunk, len(self.alive) * group.chunk)
        return rows, int(sequences.start[i]) + self.i0 * group.chunk, *divmod(tokens, group.chunk)

    def _found_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Batch row [pairs, 1], token [pairs, C], padding mask [pairs, C], rows without padding (None: all)."""
        sequences, chunk = self.group.sequences, self.group.chunk
        sequence, step = self._pair_index()
        offset = (step * chunk)[:, None] + torch.arange(chunk, device="cpu")
        padding = offset >= sequences.length[sequence][:, None]
        # A padding row reads its own sequence's first row and is then overwritten: no neighbour leaks in.
        token = sequences.start[sequence][:, None] + offset.masked_fill(padding, 0)
        real = (~padding).flatten().nonzero().squeeze(1) if bool(padding.any()) else None
        return sequences.batch[sequence][:, None], token, padding, real

    def view(self, x: Tensor, dtype: torch.dtype, shared: int = 1) -> None:
        """None: copying a window's rows is cheap, so views are not looked for."""

    def load(self, x: Tensor, into: Tensor, shared: int = 1) -> Tensor:
        """Copy the window's rows of ``x`` [B, T, HV/shared, D] to ``into`` [Z, C, D], any strides and dtypes.

        ``shared`` value heads read each head of ``x``; padding rows and additional channels become zero.
        """
        loaded, D = into, x.shape[-1]
        if D < into.shape[-1]:
            into[..., D:] = 0
            into = into[..., :D]
        heads = slice(self.group.heads.start // shared, self.group.heads.stop // shared)
        target = into.unflatten(0, (self.pairs, heads.stop - heads.start, shared))
        if self._rows is not None:
            batch, token, _, _ = self._rows
            found = x[0, :, heads][token] if self.group.sequences.packed else x[:, :, heads][batch, token]
            target.copy_(found.transpose(1, 2).unsqueeze(2))
        else:
            rows, t, whole, part = self._box
            C = self.group.chunk
            target = target.unflatten(0, (len(self.alive), -1))
            target[:whole].copy_(self._body(x, shared).unsqueeze(3))
            if part:
                tail = x[rows, t + whole * C : t + whole * C + part, heads]
                target[whole, :, :, :, :part].copy_(tail.transpose(1, 2).unsqueeze(2))
        self.pad(into, 0.0)
        return loaded

    def lift(self, x: Tensor, scratch: Tensor, shared: int = 1) -> Tensor:
        """The window's rows as a view [..., C, D] of ``x``, read-only, or ``load`` them into ``scratch`` [Z, C, D].

        In both cases ``scratch`` can be viewed in the shape of the result.
        """
        alike = x.dtype == scratch.dtype and x.shape[-1] == scratch.shape[-1] and x.stride(-1) == 1
        if not alike or self._box is None or self._box[3]:
            return self.load(x, scratch, shared)
        body = self._body(x, shared)
        return body if shared == 1 else body.unsqueeze(3).expand(-1, -1, -1, shared, -1, -1)

    def _body(self, x: Tensor, shared: int) -> Tensor:
        """The whole chunks of a box, [steps, batch rows, heads, C, D]."""
        rows, t, whole, _ = self._box
        heads = slice(self.group.heads.start // shared, self.group.heads.stop // shared)
        body = x[rows, t : t + whole * self.rows, heads].unflatten(1, (whole, self.rows))
        return body.permute(1, 0, 3, 2, 4)

    def pad(self, x: Tensor, value: float) -> None:
        """Fill the padding rows of ``x`` [Z, C, D]."""
        if self._rows is not None:
            _, _, padding, real = self._rows
            if real is not None:
                x.unflatten(0, (self.pairs, -1)).masked_fill_(padding[:, None, :, None], value)
        elif self._box[3]:
            x.unflatten(0, (len(self.alive), -1))[self._box[2], :, self._box[3] :] = value

    def store(self, x: Tensor, into: Tensor, shared: int = 1) -> None:
        """Copy the real rows of ``x`` [Z/shared, C, D or more] to their places in ``into`` [B, T, heads, D]."""
        x = x[..., : into.shape[-1]]
        heads = slice(self.group.heads.start // shared, self.group.heads.stop // shared)
        source = x.unflatten(0, (self.pairs, -1))
        if self._rows is not None:
            batch, token, _, real = self._rows
            found, batch = source.transpose(1, 2).flatten(0, 1), batch.expand_as(token).flatten()
            token = token.flatten()
            if real is not None:
                found, batch, token = found[real], batch[real], token[real]
            into[:, :, heads].index_put_((batch, token), found.to(into.dtype))
            return
        rows, t, whole, part = self._box
        C = self.group.chunk
        source = source.unflatten(0, (len(self.alive), -1))
        self._body(into, shared).copy_(source[:whole])
        if part:
            tail = into[rows, t + whole * C : t + whole * C + part, heads]
            tail.transpose(1, 2).copy_(source[whole, :, :, :part])


class TokenWindow:
    """One token of every sequence, the rows of a decoding step: a light ``Window`` of [N·HV, ·].

    Attributes:
        pairs: one for every sequence; ``rows``: 1 of each.
        Z: number of rows, pairs times heads.
        shape: [Z], the dimensions before the channels.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.pairs, self.heads = request, request.N, slice(0, request.HV)
        self.Z, self.rows = self.pairs * self.heads.stop, 1
        self.shape = (self.Z,)

    def _tokens(self, x: Tensor) -> Tensor:
        """[N, heads, D] of ``x`` [B, T, heads, D]."""
        return x[:, 0] if self.request.cu_seqlens is None else x[0, : self.pairs]

    def view(self, x: Tensor, dtype: torch.dtype, shared: int = 1) -> Tensor | None:
        """The rows of ``x`` as a contiguous view [N·HV, D], or None if there is none."""
        if shared > 1 or x.dtype != dtype:
            return None
        if not x.is_contiguous():
            x = self._tokens(x)
            if not x.is_contiguous():
                return None
        elif self.pairs < x.shape[0] * x.shape[1]:
            x = x[0, : self.pairs]
        return x.view(self.Z, x.shape[-1])

    def load(self, x: Tensor, into: Tensor, shared: int = 1) -> Tensor:
        """Copy the rows of ``x`` [B, T, HV/shared, D] to ``into`` [N·HV, D]."""
        into.view(self.pairs, -1, shared, x.shape[-1]).copy_(self._tokens(x).unsqueeze(2))
        return into

    def pad(self, x: Tensor, value: float) -> None:
        """No row is padding."""

    def store(self, x: Tensor, into: Tensor) -> None:
        """Copy the rows of ``x`` [N·HV, D] to their places in ``into`` [B, T, HV, D]."""
        self._tokens(into).copy_(x.view(self.pairs, -1, x.shape[-1]))
