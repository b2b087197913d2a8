"""A context as operators take it: its tables, and the calls of a rank's fragments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kda_core._bind import build_request
from kda_core.distributed._exchange import resolve_group
from kda_core.distributed._halves import Chosen, choose
from kda_core.request import DATA, Request

_PLAIN = {"initial_state": None, "grad_final_state": None, "state_v_first": False, "cp_context": None}


class Tables(NamedTuple):
    """Rows of a context's tables as requests take them.

    Attributes:
        bounds: ``cu_seqlens``; None: sequences are dense.
        edges: fields of ``Edges`` between ``given`` and ``matrices``: of a forward, of one whose backward is to come
            (the fragments whose matrices that needs come behind those that are sent), and of a backward.
        no_given: whether no fragment begins its sequence, and whether none ends it.
    """

    bounds: Tensor | None
    edges: tuple[tuple[Any, Any, Any, Any, int], ...]
    no_given: tuple[bool, bool]


class Shared(NamedTuple):
    """A context as operators take it; the names are those of ``ContextParallel``, or of its ``Cells``.

    Attributes:
        before: rows of slots that are joined forward.
        padded: whether a chain of slots may be shorter than the longest.
        known_tables: ``Tables``, or those of each cell; None: they are made in every call.
    """

    fragments: Tensor
    slots: Tensor
    chain: Tensor | None
    group_name: str
    before: int
    sequences: int
    dense: int
    gather: bool
    padded: bool
    grid: int
    cells: Sequence[int]
    known_tables: Any = None

    @property
    def group(self) -> Any:
        return resolve_group(self.group_name)

    def is_alone(self) -> bool:
        """Whether no fragment ever goes on in another range."""
        return not self.grid and self.slots.shape[0] == 4 and self.group.size() == 1

    def with_tables(self) -> Shared:
        """The same with the tables of all calls."""
        known = [self.of_cell(i).known_tables for i in range(len(self.cells))] if self.grid else self.tables()
        return self._replace(known_tables=known)

    def tables(self) -> Tables:
        if self.known_tables is not None:
            return self.known_tables
        bounds, *rows = self.fragments.unbind()
        begins, ends, ahead, behind = (row[:-1] for row in rows)
        # Dense sequences of a cell receive their states in their own order.
        ahead, behind = (None, None) if self.grid and self.dense else (ahead, behind)  # type: ignore[assignment]
        last, first, both = (None,) * 3 if self.dense else (*self.slots[:2], self.slots[:2].flatten())
        # Every fragment f begins (ends) sequence f, or none does; otherwise the tables say which.
        simple = not self.grid and self.dense == self.sequences == self.slots.shape[1]
        all_begin, all_end = simple and not self.before, simple and self.slots.shape[0] - self.before == 4
        final, initial, N = None if all_end else ends, None if all_begin else begins, self.sequences
        edges = (begins, last, ahead, final, N), (begins, both, ahead, final, N), (ends, first, behind, initial, N)
        return Tables(None if self.dense else bounds, edges, (simple and not all_begin, simple and not all_end))

    def parts(self, r: Request) -> list[tuple[Request, Shared]]:
        """The calls that this rank makes: the caller's own, or one for each of its cells."""
        if not self.grid:
            return [(r, self)]
        assert self.chain is not None
        found, at, last = [], 0, self.chain.shape[1] - 1
        saved = len(r.saved) // max(len(self.cells), 1)
        short = r.T - self.grid * (len(self.cells) - 1)
        for i, cell in enumerate(self.cells):
            rows = short if cell == last else self.grid
            own: dict[str, Any] = {"saved": r.saved[i * saved : (i + 1) * saved]}
            own |= {m: t.narrow(1, at, rows).contiguous() for m, t in rows_of(r)}
            if r.cu_seqlens_cpu is not None:
                own["cu_seqlens_cpu"] = r.cu_seqlens_cpu[i]
            found.append((build_request({**vars(r), **own}), self.of_cell(i)))
            at += rows
        return found

    def of_cell(self, i: int) -> Shared:
        """The same for the i-th of this rank's cells alone."""
        n = self.dense or 1
        s = self._replace(
            fragments=self.fragments[i], slots=self.slots[:, i * n : (i + 1) * n], cells=(),
            known_tables=self.known_tables and self.known_tables[i],
        )  # fmt: skip
        return s if self.known_tables else s._replace(known_tables=s.tables())

    def local(self, r: Request) -> Request:
        """The call of this rank's fragments, as a plain one without states."""
        values = {**vars(r), **_PLAIN, "cu_seqlens": self.tables().bounds}
        B = self.dense or 1
        if B != r.B:
            values |= {n: t.reshape(B, r.B * r.T // B, *t.shape[2:]) for n, t in rows_of(r)}
        if self.dense or not r.return_intermediate_states:
            values["cu_seqlens_cpu"] = None
        return build_request(values)

    def chosen(self, r: Request, name: str | None) -> tuple[Chosen, Request]:
        """Who serves the call of this rank's fragments, and that call; ``name``: the backend that was asked for."""
        call = self.local(r)
        return choose(call, name, self.is_alone(), not self.grid, r.initial_state is not None), call

    def no_states(self, r: Request) -> Tensor:
        """[N, HV, K, V], zeros."""
        return r.q.new_zeros(self.sequences, r.HV, r.K, r.V, dtype=r.compute_dtype)

    def summed(self, states: Tensor) -> Tensor:
        """The sum over ranks, where every rank has every final state."""
        if self.gather:
            dist.all_reduce(states, group=self.group)
        return states

    def final(self, r: Request, states: Tensor) -> Tensor:
        """Final states as the caller wants them, of this rank's."""
        return like_callers(r, self.summed(states), r.state_dtype)


def rows_of(r: Request) -> list[tuple[str, Tensor]]:
    """The tensors of a request that have a row for each token, by name."""
    return [(n, t) for n in (*DATA, "grad_o") if (t := getattr(r, n)) is not None]


def k_first(r: Request, states: Tensor) -> Tensor:
    """A caller's states as [N, HV, K, V]."""
    return states.mT if r.state_v_first else states


def like_callers(r: Request, states: Tensor, dtype: torch.dtype) -> Tensor:
    return k_first(r, states).to(dtype).contiguous()
