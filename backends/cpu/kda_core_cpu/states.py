"""Reads and writes the states of a call.

Inside the backend a state is [K, V] in the compute dtype; V-first tensors are seen through a transposed view.
A pool is indexed only with the slots that a call uses, so that no other slot's content can leak in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kda_core.request import Request
from kda_core_cpu.choose import walks_v_first
from kda_core_cpu.sequences import token_counts
from kda_core_cpu.workspace import Workspace


@dataclass(frozen=True)
class PoolRows:
    """Which slots of the pool the sequences use; the core has checked their values.

    Attributes:
        slot: [N] slot that is read first, and written last when there is no table; -1: the sequence is skipped,
            touches no slot and has zero output.
        table: [N][1+S] slot to write after each token, -1 for none; or None.
        last: [N] slot to write after the last token, -1 for none, where it is not the one that is read; or None.
        apart: states are read from a copy, in which some are zero, and not where they are written.
    """

    slot: list[int]
    table: list[list[int]] | None = None
    last: list[int] | None = None
    apart: bool = False

    @classmethod
    def of(cls, request: Request) -> PoolRows | None:
        """The slots of ``request``; None when its states are dense."""
        if not request.inplace_final_state:
            return None
        if request.ssm_state_indices is None:
            return cls(list(range(request.N)))
        rows = _rows(request.ssm_state_indices, request.pad_slot_id)
        first = [row[0] for row in rows]
        if request.num_accepted_tokens is not None:
            first = [row[count - 1] for row, count in zip(rows, request.num_accepted_tokens.tolist(), strict=True)]
        other, table = request.final_state_indices, None
        targets = rows if other is None else _rows(other, request.pad_slot_id)
        if request.writes_every_token:
            table = targets
        if request.has_initial_state is None and request.update_state and other is None:
            return cls(first, table)
        # A sequence without tokens writes nothing, not even what it starts from.
        lengths = token_counts(request).tolist()
        last = first if other is None else [row[0] for row in targets]
        last = [slot if length else -1 for slot, length in zip(last, lengths, strict=True)]
        return cls(first, table, last, apart=True)

    def gathered(self, request: Request, pool: Tensor) -> Tensor:
        """[N, HV, K, V] states that the sequences start from, out of ``pool`` [slots, HV, K, V]."""
        slots = torch.tensor(self.slot, dtype=torch.long, device="cpu")
        read = slots >= 0
        if request.has_initial_state is not None:
            read &= request.has_initial_state
        found = pool.new_zeros(len(slots), *pool.shape[1:])
        found[read] = pool[slots[read]]
        return found

    @property
    def skipped(self) -> Tensor | None:
        """[N] bool, or None when no sequence is skipped."""
        return torch.tensor(self.slot, device="cpu") < 0 if min(self.slot, default=0) < 0 else None


class States:
    """Reads the initial and writes the final states of lanes: some heads of some sequences, [lanes, K, V]."""

    def __init__(self, request: Request, pool: PoolRows | None = None) -> None:
        self.dtype = request.compute_dtype
        self.pool = pool
        self._table = None if pool is None else pool.table
        K, V = self.shape = (request.K, request.V)
        self.v_first = walks_v_first(request)
        self._strides = (K * V, 1, K) if self.v_first else (K * V, V, 1)
        self.result: Tensor | None = None
        self.initial = None if request.initial_state is None else key_first(request.initial_state, request)
        written = request.written_states
        self.home: Tensor | None = None if written is None else key_first(getattr(request, written), request)
        # Whether a sequence's old states lie where its new ones are written.
        self.at_home = pool is not None and not pool.apart
        if pool is not None and pool.apart and self.initial is not None:
            self.initial = pool.gathered(request, self.initial)
        if request.output_final_state and pool is None:
            self.result = torch.empty(request.state_shape, dtype=request.state_dtype, device="cpu")
            self.home = key_first(self.result, request)

    def read(self, ids: list[int], heads: slice, into: Tensor) -> Tensor:
        """Copy the states before the first token of sequences ``ids`` to ``into`` [lanes, K or more, V or more].

        Additional channels become zero.
        """
        source, (K, V) = self.source(ids, heads), self.shape
        if source is None or into.shape != source.shape:
            into.zero_()
        if source is not None:
            into[:, :K, :V] = source
        return into

    def source(self, ids: list[int], heads: slice) -> Tensor | None:
        """The states before the first token in their stored dtype, maybe a view; None when they are zero."""
        if self.initial is None:
            return None
        view = self.view(ids, heads)
        if view is not None:
            return view
        return self.initial[torch.tensor(self._read(ids), device="cpu"), heads].flatten(0, 1)

    def view(self, ids: list[int], heads: slice) -> Tensor | None:
        """A view of the stored states before the first token, or None if there is none."""
        return None if self.initial is None else _view(self.initial, self._read(ids), heads)

    def in_place(self, ids: list[int], heads: slice) -> Tensor | None:
        """A view of the memory for the last states of ``ids``, if it has the layout of ``scratch``, else None.

        With one layout a sequence's bits do not depend on the rest of the batch.
        """
        if self.home is None or self.home.dtype != self.dtype or self._table is not None:
            return None
        view = _view(self.home, self._written(ids), heads)
        return view if view is not None and view.stride() == self._strides else None

    def scratch(self, workspace: Workspace, lanes: int) -> Tensor:
        """Memory for the states of ``lanes`` lanes, in the layout and order of dimensions of a fresh final state."""
        K, V = self.shape
        return workspace("S", lanes, V, K).transpose(1, 2) if self.v_first else workspace("S", lanes, K, V)

    def write(self, ids: list[int], heads: slice, states: Tensor) -> None:
        """Store the states [lanes, K or more, V or more] after the last token."""
        if self.home is not None and self._table is None:
            K, V = self.shape
            _put(self.home, self._written(ids), heads, states[:, :K, :V])

    def write_token(self, ids: list[int], heads: slice, states: Tensor, token: int) -> None:
        """Store the states after token number ``token`` in its slots; does nothing unless every token has one."""
        if self._table is None or self.home is None:
            return
        _put(self.home, [self._table[i][token] for i in ids], heads, states)

    def _read(self, ids: list[int]) -> list[int]:
        """Where the states of ``ids`` before the first token lie in ``initial``."""
        return ids if self.pool is None or self.pool.apart else [self.pool.slot[i] for i in ids]

    def _written(self, ids: list[int]) -> list[int]:
        """Where those after the last token lie in ``home``; -1: nowhere."""
        if self.pool is None:
            return ids
        slots = self.pool.slot if self.pool.last is None else self.pool.last
        return [slots[i] for i in ids]


class Checkpoints:
    """Writes the states after every so many tokens to slots of a pool."""

    def __init__(self, request: Request) -> None:
        self.every, self.shape = request.checkpoint_every, (request.K, request.V)
        self.home = key_first(getattr(request, request.checkpoint_states), request)
        rows = _rows(request.checkpoint_indices, request.pad_slot_id)
        counts = (token_counts(request) // self.every).tolist()
        self.rows = [row[:count] for row, count in zip(rows, counts, strict=True)]

    @classmethod
    def of(cls, request: Request, pool: PoolRows | None) -> Checkpoints | None:
        return None if pool is None or request.checkpoint_indices is None else cls(request)

    def put(self, ids: list[int], heads: slice, states: Tensor, tokens: int) -> None:
        """Store the states [lanes, K or more, V or more] after so many tokens, where they are asked for."""
        if tokens % self.every:
            return
        column, (K, V) = tokens // self.every - 1, self.shape
        slots = [self.rows[i][column] if column < len(self.rows[i]) else -1 for i in ids]
        _put(self.home, slots, heads, states[:, :K, :V])


def _rows(table: Tensor, pad_slot_id: int) -> list[list[int]]:
    """[N][W] slots of a table [N] or [N, W]; -1 for none."""
    rows = (table[:, None] if table.dim() == 1 else table).tolist()
    return [[-1 if slot < 0 or slot == pad_slot_id else slot for slot in row] for row in rows]


def _put(home: Tensor, index: list[int], heads: slice, states: Tensor) -> None:
    """``home[index, heads]`` ← [lanes, K, V]; states with a negative index are dropped."""
    if min(index, default=0) < 0:
        kept = [i for i, slot in enumerate(index) if slot >= 0]
        states = states.unflatten(0, (len(index), -1))[kept].flatten(0, 1)
        index = [index[i] for i in kept]
    if not index:
        return
    view = _view(home, index, heads)
    if view is None:
        home[torch.tensor(index, device="cpu"), heads] = states.unflatten(0, (len(index), -1)).to(home.dtype)
    else:
        view.copy_(states)


def _view(states: Tensor, index: list[int], heads: slice) -> Tensor | None:
    """``states[index, heads]`` as [lanes, K, V] without a copy, or None where strides forbid it."""
    first, n, HV = index[0], len(index), states.shape[1]
    if first < 0:
        return None
    every_head = heads.stop - heads.start == HV
    if n == 1:
        return states[first] if every_head else states[first, heads]
    if not every_head or states.stride(0) != HV * states.stride(1) or index != list(range(first, first + n)):
        return None
    return states[first : first + n].flatten(0, 1)


def key_first(states: Tensor, request: Request) -> Tensor:
    """View stored states as [..., K, V]."""
    return states.transpose(-1, -2) if request.state_v_first else states
