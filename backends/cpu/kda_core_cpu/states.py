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
from kda_core_cpu.workspace import Workspace


@dataclass(frozen=True)
class PoolRows:
    """Which slots of the pool the sequences use; the core has checked their values.

    Attributes:
        slot: [N] slot that is read first, and written last when there is no table; -1: the sequence is skipped,
            touches no slot and has zero output.
        table: [N][1+S] slot to write after each token, -1 for none; or None.
    """

    slot: list[int]
    table: list[list[int]] | None = None

    @classmethod
    def of(cls, request: Request) -> PoolRows | None:
        """The slots of ``request``; None when its states are dense."""
        if not request.inplace_final_state:
            return None
        if request.ssm_state_indices is None:
            return cls(list(range(request.N)))
        pad = request.pad_slot_id
        indices = request.ssm_state_indices
        rows = (indices[:, None] if indices.dim() == 1 else indices).tolist()
        table = [[-1 if slot < 0 or slot == pad else slot for slot in row] for row in rows]
        if request.num_accepted_tokens is None:
            first = [row[0] for row in table]
        else:
            first = [row[count - 1] for row, count in zip(table, request.num_accepted_tokens.tolist(), strict=True)]
        every_token = request.ssm_state_indices.dim() == 2 and request.ssm_state_indices.shape[1] > 1
        return cls(first, table if every_token else None)

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
        self.home: Tensor | None = self.initial if pool is not None else None
        if request.output_final_state and pool is None:
            self.result = torch.empty(request.state_shape, dtype=request.state_dtype, device="cpu")
            self.home = key_first(self.result, request)

    def read(self, ids: list[int], heads: slice, into: Tensor) -> Tensor:
        """Copy the states before the first token of sequences ``ids`` to ``into`` [lanes, K or more, V or more].

        Additional channels become zero.
        """
        source = self.source(ids, heads)
        if source is None:
            return into.zero_()
        if into.shape == source.shape:
            return into.copy_(source)
        K, V = self.shape
        into.zero_()[:, :K, :V] = source
        return into

    def source(self, ids: list[int], heads: slice) -> Tensor | None:
        """The states before the first token in their stored dtype, maybe a view; None when they are zero."""
        if self.initial is None:
            return None
        view = self.view(ids, heads)
        if view is not None:
            return view
        return self.initial[torch.tensor(self._index(ids), device="cpu"), heads].flatten(0, 1)

    def view(self, ids: list[int], heads: slice) -> Tensor | None:
        """A view of the stored states before the first token, or None if there is none."""
        return None if self.initial is None else _view(self.initial, self._index(ids), heads)

    def in_place(self, ids: list[int], heads: slice) -> Tensor | None:
        """A view of the memory for the last states of ``ids``, if it has the layout of ``scratch``, else None.

        With one layout a sequence's bits do not depend on the rest of the batch.
        """
        if self.home is None or self.home.dtype != self.dtype or self._table is not None:
            return None
        view = _view(self.home, self._index(ids), heads)
        return view if view is not None and view.stride() == self._strides else None

    def scratch(self, workspace: Workspace, lanes: int) -> Tensor:
        """Memory for the states of ``lanes`` lanes, in the layout and order of dimensions of a fresh final state."""
        K, V = self.shape
        return workspace("S", lanes, V, K).transpose(1, 2) if self.v_first else workspace("S", lanes, K, V)

    def write(self, ids: list[int], heads: slice, states: Tensor) -> None:
        """Store the states [lanes, K or more, V or more] after the last token."""
        if self.home is not None and self._table is None:
            K, V = self.shape
            _put(self.home, self._index(ids), heads, states[:, :K, :V])

    def write_token(self, ids: list[int], heads: slice, states: Tensor, token: int) -> None:
        """Store the states after token number ``token`` in its slots; does nothing unless every token has one."""
        if self._table is None or self.home is None:
            return
        slots = [self._table[i][token] for i in ids]
        kept = [i for i, slot in enumerate(slots) if slot >= 0]
        if len(kept) < len(slots):
            states = states.unflatten(0, (len(ids), -1))[kept].flatten(0, 1)
        _put(self.home, [slots[i] for i in kept], heads, states)

    def _index(self, ids: list[int]) -> list[int]:
        return ids if self.pool is None else [self.pool.slot[i] for i in ids]


def _put(home: Tensor, index: list[int], heads: slice, states: Tensor) -> None:
    """``home[index, heads]`` ← [lanes, K, V]."""
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
    every_head = heads.stop - heads.start == HV
    if n == 1:
        return states[first] if every_head else states[first, heads]
    if not every_head or states.stride(0) != HV * states.stride(1) or index != list(range(first, first + n)):
        return None
    return states[first : first + n].flatten(0, 1)


def key_first(states: Tensor, request: Request) -> Tensor:
    """View stored states as [..., K, V]."""
    return states.transpose(-1, -2) if request.state_v_first else states
