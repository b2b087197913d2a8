"""The two steps of a forward and of a backward, before an exchange and behind it; and a context as they take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kda_core._bind import build_request
from kda_core.distributed._exchange import resolve_group
from kda_core.distributed._halves import Chosen, choose
from kda_core.request import DATA, Edges, ForwardResult, Request


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
        known_tables: where a context has made them for all calls.
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
    known_tables: Tables | None = None

    @property
    def group(self) -> Any:
        return resolve_group(self.group_name)

    def is_alone(self) -> bool:
        """Whether no fragment ever goes on in another range."""
        return not self.grid and self.slots.shape[0] == 4 and self.group.size() == 1

    def tables(self) -> Tables:
        if self.known_tables is not None:
            return self.known_tables
        bounds, begins, ends, ahead, behind = self.fragments.unbind()
        begins, ends, ahead, behind = (row[:-1] for row in (begins, ends, ahead, behind))
        both = self.slots[:2]
        sends = (None,) * 3 if self.dense else (both[0], both.flatten(), both[1])
        # Every fragment f begins (ends) sequence f, or none does; otherwise the tables say which.
        simple = not self.grid and self.dense == self.sequences == self.slots.shape[1]
        all_begin, all_end = simple and not self.before, simple and self.slots.shape[0] - self.before == 4
        results = None if all_end else ends, None if all_begin else begins
        edges = (
            (begins, sends[0], ahead, results[0], self.sequences),
            (begins, sends[1], ahead, results[0], self.sequences),
            (ends, sends[2], behind, results[1], self.sequences),
        )
        return Tables(None if self.dense else bounds, edges, (simple and not all_begin, simple and not all_end))

    def parts(self, r: Request) -> list[tuple[Request, Shared]]:
        """The calls that this rank makes: the caller's own, or one for each of its cells."""
        if not self.grid:
            return [(r, self)]
        assert self.chain is not None
        found, n, at, last = [], self.dense or 1, 0, self.chain.shape[1] - 1
        saved = len(r.saved) // max(len(self.cells), 1)
        short = r.T - self.grid * (len(self.cells) - 1)
        for i, cell in enumerate(self.cells):
            rows = short if cell == last else self.grid
            own: dict[str, Any] = {"saved": r.saved[i * saved : (i + 1) * saved]}
            own |= {m: t.narrow(1, at, rows).contiguous() for m, t in _rows(r)}
            if r.cu_seqlens_cpu is not None:
                own["cu_seqlens_cpu"] = r.cu_seqlens_cpu[i]
            s = self._replace(fragments=self.fragments[i], slots=self.slots[:, i * n : (i + 1) * n], cells=())
            found.append((build_request({**vars(r), **own}), s._replace(known_tables=s.tables())))
            at += rows
        return found

    def local(self, r: Request) -> Request:
        """The call of this rank's fragments, as a plain one without states."""
        values = {**vars(r), "initial_state": None, "grad_final_state": None, "state_v_first": False}
        values["cp_context"], values["cu_seqlens"] = None, self.tables().bounds
        B = self.dense or 1
        if B != r.B:
            values |= {n: t.reshape(B, r.B * r.T // B, *t.shape[2:]) for n, t in _rows(r)}
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


def _rows(r: Request) -> list[tuple[str, Tensor]]:
    return [(n, t) for n in (*DATA, "grad_o") if (t := getattr(r, n)) is not None]


def k_first(r: Request, states: Tensor) -> Tensor:
    """A caller's states as [N, HV, K, V]."""
    return states.mT if r.state_v_first else states


def like_callers(r: Request, states: Tensor, dtype: torch.dtype) -> Tensor:
    return k_first(r, states).to(dtype).contiguous()


class Step:
    """One call's forward, or backward: ``begin``, what ranks exchange, and ``finish`` or ``finish_backward``.

    Args:
        name: the backend that was asked for, or None.
        known: what was chosen, for tensors of the same metadata.
        given: states (gradients of final states), [N, HV, K, V], or None.
        backward: whether ``r`` has ``saved``, ``grad_o`` and ``needs_grad``.

    Attributes:
        matrices: what a forward keeps for its backward.
        request: what the halves get.
    """

    def __init__(
        self, r: Request, s: Shared, name: str | None, known: Chosen | None, given: Tensor | None,
        matrices: Tensor | None = None, backward: bool = False,
    ) -> None:  # fmt: skip
        self.r, self.s, self.matrices, self.backward = r, s, matrices, backward
        self.chosen, self.request = s.chosen(r, name) if known is None else (known, s.local(r))
        t = s.tables()
        edges = Edges(
            None if t.no_given[backward] else given, *t.edges[2 if backward else r.save_for_backward], matrices
        )
        self.request.__dict__.update(cp_context=edges, memo=self.chosen.halves_memo)
        self.kept: tuple[Tensor, ...] = ()

    def begin(self) -> Tensor:
        """The slots' transitions, [S, HV, K, K + V]: matrices, and additions with the given states in them."""
        halves = self.chosen.halves
        begun = halves.begin_backward(self.request) if self.backward else halves.begin(self.request)
        sent, matrices, self.kept = begun
        assert sent is not None
        if self.r.save_for_backward and not self.backward:
            if matrices is None:  # behind what is sent
                sent, matrices = (sent, sent) if self.s.dense else sent.chunk(2)
            self.matrices = matrices
        return sent

    def finish(self, came: Tensor | None) -> ForwardResult:
        """This call's part; of a cell, with parts of the final states of all sequences, [N, HV, K, V]."""
        r, s = self.r, self.s
        found = self.chosen.halves.finish(self.request, self.kept, came)
        o, final, h = found.o, found.final_state, found.h
        if final is not None and not s.grid:
            final = s.final(r, final)
        if h is not None:
            h = like_callers(r, h.reshape(r.B, -1, *h.shape[2:]), r.h_dtype)
        if self.request.B != r.B:
            o = o.view(r.B, r.T, r.HV, r.V)
        return ForwardResult(o, final, h, found.saved)

    def finish_backward(self, came: Tensor | None) -> dict[str, Tensor]:
        """This call's part of the gradients, that of the initial states for all sequences, [N, HV, K, V]."""
        r = self.r
        grads = self.chosen.halves.finish_backward(self.request, self.kept, came)
        if self.request.B != r.B:
            grads = {**grads, **{n: grads[n].view(getattr(r, n).shape) for n in r.needs_grad.intersection(DATA)}}
        return grads
