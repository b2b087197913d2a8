"""Reads and writes the states of a call.

Inside the backend a state is [K, V] in the compute dtype; V-first tensors are seen through a transposed view.
A pool is indexed only with the slots that a call uses, so that no other slot's content can leak in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_core.request import Request
from kda_core_cpu.choose import sums_rows, walks_v_first
from kda_core_cpu.sequences import token_counts
from kda_core_cpu.workspace import Workspace


class States:
    """Reads the initial and writes the final states of lanes: some heads of some sequences, [lanes, K, V].

    Attributes:
        slot: ``first_slots``, or None without a pool; what is skipped has zero output.
        table: [N][1+S] slot to write after each token, -1 for none; or None.
        sums_rows: as ``choose.sums_rows``.
        at_home: whether a sequence's old states lie where its new ones are written.
        result: the final states that the call returns, or None.
        checkpoints: [N][...] slots of the checkpoints, -1 for none; or None.
    """

    def __init__(self, request: Request) -> None:
        self.dtype = request.compute_dtype
        K, V = self.shape = (request.K, request.V)
        self.v_first = walks_v_first(request)
        self.sums_rows = sums_rows(self.dtype, K, V, self.v_first)
        self._strides = (K * V, 1, K) if self.v_first else (K * V, V, 1)
        self.slot: list[int] | None = None
        self.table: list[list[int]] | None = None
        self.result: Tensor | None = None
        self.checkpoints: list[list[int]] | None = None
        self.at_home = request.inplace_final_state
        self.initial = None if request.initial_state is None else key_first(request.initial_state, request)
        written = request.written_states
        self.home: Tensor | None = None if written is None else key_first(getattr(request, written), request)
        # Where states lie in ``initial`` and in ``home``; -1: nowhere. None: those of sequence n are number n.
        self._read: list[int] | None = None
        self._written: list[int] | None = None
        if request.inplace_final_state:
            self._find_slots(request)
        elif request.output_final_state:
            self.result = torch.empty(request.state_shape, dtype=request.state_dtype, device="cpu")
            self.home = key_first(self.result, request)
        if request.inplace_final_state and request.checkpoint_indices is not None:
            self._every = request.checkpoint_every
            self._checkpoint_home = key_first(getattr(request, request.checkpoint_states), request)
            rows = _rows(request.checkpoint_indices, request.pad_slot_id)
            counts = (token_counts(request) // self._every).tolist()
            self.checkpoints = [row[:count] for row, count in zip(rows, counts, strict=True)]

    def _find_slots(self, request: Request) -> None:
        """Look up the slots of a pool; the core has checked their values."""
        self.slot = self._read = self._written = first_slots(request)
        if request.writes_every_token:
            self.table = _rows(request.written_slots, request.pad_slot_id)
        other = request.final_state_indices
        if request.has_initial_state is None and request.update_state and other is None:
            return
        # States are read from a copy, in which some are zero. A sequence without tokens writes nothing.
        lengths = token_counts(request).tolist()
        last = self.slot if other is None else [row[0] for row in _rows(other, request.pad_slot_id)]
        self._written = [slot if length else -1 for slot, length in zip(last, lengths, strict=True)]
        self._read, self.at_home = None, False
        if self.initial is not None:
            slots = torch.tensor(self.slot, dtype=torch.long, device="cpu")
            read = slots >= 0
            if request.has_initial_state is not None:
                read &= request.has_initial_state
            found = self.initial.new_zeros(len(slots), *self.initial.shape[1:])
            found[read] = self.initial[slots[read]]
            self.initial = found

    @property
    def skipped(self) -> Tensor | None:
        """[N] bool, or None when no sequence is skipped."""
        return torch.tensor(self.slot, device="cpu") < 0 if self.slot and min(self.slot) < 0 else None

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
        index = _at(self._read, ids)
        view = _view(self.initial, index, heads)
        return self.initial[torch.tensor(index, device="cpu"), heads].flatten(0, 1) if view is None else view

    def in_place(self, ids: list[int], heads: slice) -> Tensor | None:
        """A view of the memory for the last states of ``ids``, if it has the layout of ``scratch``, else None.

        With one layout a sequence's bits do not depend on the rest of the batch.
        """
        if self.home is None or self.home.dtype != self.dtype or self.table is not None:
            return None
        view = _view(self.home, _at(self._written, ids), heads)
        return view if view is not None and view.stride() == self._strides else None

    def scratch(self, workspace: Workspace, lanes: int) -> Tensor:
        """Memory for the states of ``lanes`` lanes, in the layout and order of dimensions of a fresh final state."""
        K, V = self.shape
        return workspace("S", lanes, V, K).transpose(1, 2) if self.v_first else workspace("S", lanes, K, V)

    def write(self, ids: list[int], heads: slice, states: Tensor) -> None:
        """Store the states [lanes, K or more, V or more] after the last token."""
        if self.home is not None and self.table is None:
            K, V = self.shape
            _put(self.home, _at(self._written, ids), heads, states[:, :K, :V])

    def write_token(self, ids: list[int], heads: slice, states: Tensor, token: int) -> None:
        """Store the states after token number ``token`` in its slots; does nothing unless every token has one."""
        if self.table is None or self.home is None:
            return
        _put(self.home, [self.table[i][token] for i in ids], heads, states)

    def write_checkpoint(self, ids: list[int], heads: slice, states: Tensor, tokens: int) -> None:
        """Store the states [lanes, K or more, V or more] after so many tokens, where they are asked for."""
        if self.checkpoints is None or tokens % self._every:
            return
        column, (K, V) = tokens // self._every - 1, self.shape
        rows = [self.checkpoints[i] for i in ids]
        slots = [row[column] if column < len(row) else -1 for row in rows]
        _put(self._checkpoint_home, slots, heads, states[:, :K, :V])


def first_slots(request: Request) -> list[int]:
    """[N] slot of a pool that each sequence reads; -1: the sequence is skipped and touches none."""
    if request.ssm_state_indices is None:
        return list(range(request.N))
    rows = _rows(request.ssm_state_indices, request.pad_slot_id)
    if request.num_accepted_tokens is None:
        return [row[0] for row in rows]
    return [row[count - 1] for row, count in zip(rows, request.num_accepted_tokens.tolist(), strict=True)]


def _at(places: list[int] | None, ids: list[int]) -> list[int]:
    return ids if places is None else [places[i] for i in ids]


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
