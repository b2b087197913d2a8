"""The two steps of a forward and of a backward, before an exchange and behind it; and a context as they take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from kda_core._bind import build_request
from kda_core.distributed._exchange import apply, at, resolve_group, scattered
from kda_core.distributed._halves import Chosen, choose
from kda_core.request import DATA, Edges, ForwardResult, Request


class Tables(NamedTuple):
    """Rows of a context's tables, as ``Edges`` takes them; pairs are for a forward and a backward.

    Attributes:
        sends: also for a forward whose backward is to come: then the fragments whose matrices it needs come behind.
    """

    bounds: Tensor
    places: tuple[Tensor, Tensor]
    sources: tuple[Tensor, Tensor]
    sends: tuple[Tensor, Tensor, Tensor]


def tables(fragments: Tensor, slots: Tensor) -> Tables:
    rows = fragments[:, :-1].unbind()
    both = slots[:2]
    return Tables(fragments[0], (rows[1], rows[2]), (rows[3], rows[4]), (both[0], both[1], both.flatten()))


class Shared(NamedTuple):
    """A context as operators take it; the names are those of ``ContextParallel``, or of its ``Cells``.

    Attributes:
        tables: where a context has made them for all calls.
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
    tables: Tables | None = None

    @property
    def group(self) -> Any:
        return resolve_group(self.group_name)

    def is_alone(self) -> bool:
        """Whether no fragment ever goes on in another range."""
        return not self.grid and self.slots.shape[0] == 4 and self.group.size() == 1

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
            own |= {
                m: t.narrow(1, at, rows).contiguous() for m in (*DATA, "grad_o") if (t := getattr(r, m)) is not None
            }
            if r.cu_seqlens_cpu is not None:
                own["cu_seqlens_cpu"] = r.cu_seqlens_cpu[i]
            tables = self._replace(fragments=self.fragments[i], slots=self.slots[:, i * n : (i + 1) * n], cells=())
            found.append((build_request({**vars(r), **own}), tables))
            at += rows
        return found

    def local(self, r: Request) -> Request:
        """The call of this rank's fragments, as a plain one without states."""
        B, rows = self.dense or 1, {}
        if B != r.B:
            T = r.B * r.T // B
            rows = {n: t.reshape(B, T, *t.shape[2:]) for n in (*DATA, "grad_o") if (t := getattr(r, n)) is not None}
        own: dict[str, Any] = {"initial_state": None, "grad_final_state": None, "state_v_first": False}
        bounds = None if self.dense else self.fragments[0] if self.tables is None else self.tables.bounds
        own |= {"cu_seqlens": bounds, "cp_context": None}
        if self.dense or not r.return_intermediate_states:
            own["cu_seqlens_cpu"] = None
        return build_request({**vars(r), **rows, **own})

    def chosen(self, r: Request, name: str | None, known: Chosen | None = None) -> tuple[Chosen, Request]:
        """Who serves the call of this rank's fragments, and that call.

        Args:
            name: the backend that was asked for, or None.
            known: who served a call of the same metadata.
        """
        call = self.local(r)
        if known is None:
            return choose(call, name, self.is_alone(), not self.grid), call
        known.again(call)
        return known, call

    def chosen_parts(self, r: Request, name: str | None) -> list[tuple[Chosen, Request]]:
        """The same for each call of ``parts``."""
        return [s.chosen(q, name) for q, s in self.parts(r)]

    def no_states(self, r: Request) -> Tensor:
        """[N, HV, K, V], zeros."""
        return r.q.new_zeros(self.sequences, r.HV, r.K, r.V, dtype=r.compute_dtype)

    def of_slots(self, t: Tensor, backward: bool) -> Tensor:
        """The values of the fragment that each slot sends, out of those of all fragments."""
        return t if self.dense else t.index_select(0, self.slots[int(backward)])

    def spread(self, came: Tensor, backward: bool) -> Tensor:
        """States that came for the slots [S, HV, K, V], at the starts (ends) of fragments [F, HV, K, V], else zeros."""
        if self.dense:
            return came
        return scattered(came, self.slots[3 if backward else 2], self.fragments.shape[1] - 1)

    def _all_or_none(self, ends: bool) -> bool | None:
        """Whether every fragment f begins (ends) sequence f, or none does; None: the tables say which."""
        if self.grid or self.dense != self.sequences or self.slots.shape[1] != self.dense:
            return None
        return self.slots.shape[0] - self.before == 4 if ends else not self.before

    def of_sequences(self, states: Tensor, ends: bool) -> Tensor | None:
        """States of all sequences [N, HV, K, V] at the fragments that begin (end) them, else zeros; None: all zeros."""
        known = self._all_or_none(ends)
        if known is None:
            return at(states, self.fragments[1 + ends, :-1])
        return states.clone(memory_format=torch.contiguous_format) if known else None

    def to_sequences(self, states: Tensor, ends: bool) -> Tensor:
        """The inverse: zeros for sequences that begin (end) elsewhere."""
        known = self._all_or_none(ends)
        if known is None:
            return scattered(states, self.fragments[1 + ends, :-1], self.sequences)
        return states if known else torch.zeros_like(states)

    def edges(self, r: Request, given: Tensor | None, backward: bool, matrices: Tensor | None = None) -> Edges:
        """How hooks are told of all that this class does otherwise; ``given``: states of all sequences, K first."""
        t = self.tables or tables(self.fragments, self.slots)
        if given is not None and self._all_or_none(backward) is False:
            given = None
        results = None if self._all_or_none(not backward) else t.places[not backward]
        sends = None if self.dense else t.sends[1 if backward else 2 * r.save_for_backward]
        return Edges(given, t.places[backward], sends, t.sources[backward], results, self.sequences, matrices)

    def final(self, r: Request, states: Tensor) -> Tensor:
        """Final states as the caller wants them, of this rank's."""
        return like_callers(r, self.summed(states), r.state_dtype)

    def summed(self, states: Tensor) -> Tensor:
        """The sum over ranks, where every rank has every final state."""
        if self.gather:
            dist.all_reduce(states, group=self.group)
        return states


class Forward(NamedTuple):
    """A forward's results: this rank's part, and tensors for the backward; ``chosen`` of calls of cells is None."""

    result: ForwardResult
    matrices: Tensor | None
    saved: tuple[Tensor, ...]
    chosen: Chosen | None


def k_first(r: Request, states: Tensor) -> Tensor:
    """A caller's states as [N, HV, K, V]."""
    return states.mT if r.state_v_first else states


def like_callers(r: Request, states: Tensor, dtype: torch.dtype) -> Tensor:
    return k_first(r, states).to(dtype).contiguous()


class _Step:
    """One call's forward or backward, on the backend of that name or the one that is chosen.

    Args:
        known: what was chosen, for tensors of the same metadata.
        given: states (gradients of final states), [N, HV, K, V], or None.

    Attributes:
        matrices: what a forward keeps for its backward.
        edges: what hooks are told of given states and tables, if they take it.
        request: what hooks or plain calls get.
        own: otherwise given states (gradients of final states) where a fragment begins (ends) its sequence, else zeros;
            None: none is given.
    """

    backward: bool

    def __init__(
        self, r: Request, s: Shared, name: str | None, known: Chosen | None, given: Tensor | None, matrices: Any = None
    ) -> None:
        chosen, call = s.chosen(r, name, known)
        self.r, self.s, self.chosen, self.matrices = r, s, chosen, matrices
        self.kept: tuple[Tensor, ...] = ()
        self.edges = self.own = None
        if chosen.by_edges:
            self.edges = s.edges(r, given, self.backward, matrices)
        elif given is not None:
            self.own = s.of_sequences(given.to(r.compute_dtype), self.backward)
        self.request = chosen.halves.request(call, self.edges)

    def sent(self, both: Tensor) -> Tensor:
        """The matrices and additions of our slots, with given states in these."""
        if self.own is not None:
            K = both.shape[-2]
            apply(both[..., :K], self.s.of_slots(self.own, self.backward), both[..., K:])
        return both

    def placed(self, came: Tensor | None) -> Tensor:
        """The states at the fragments' starts (gradients at their ends), [F, HV, K, V]: what came, and the given."""
        r = self.r
        if came is not None:
            return came if self.own is None else came.add_(self.own)
        if self.own is not None:
            return self.own
        return r.q.new_zeros(self.s.fragments.shape[1] - 1, r.HV, r.K, r.V, dtype=r.compute_dtype)


class ForwardStep(_Step):
    """A forward of one call."""

    backward = False

    def __init__(self, r: Request, s: Shared, name: str | None, known: Chosen | None = None) -> None:
        super().__init__(r, s, name, known, None if r.initial_state is None else k_first(r, r.initial_state))

    def begin(self) -> Tensor:
        """The slots' transitions, [S, HV, K, K + V]: matrices, and additions with the given states in them."""
        r, s = self.r, self.s
        every, additions, self.kept = self.chosen.halves.begin(self.request)
        every = cast(Tensor, every) if additions is None else torch.cat([cast(Tensor, every), additions], -1)
        if s.dense and r.save_for_backward:
            self.matrices = every  # few: additions as well
        elif self.edges is not None and r.save_for_backward:
            every, self.matrices = every.chunk(2)
        elif r.save_for_backward:
            matrices = every[..., : r.K]
            self.matrices = matrices.contiguous() if self.chosen.keeps_all(r, s.dense) else s.of_slots(matrices, True)
        return every if self.edges is not None else self.sent(s.of_slots(every, False))

    def finish(self, came: Tensor | None) -> Forward:
        """This call's part, with the final states of all sequences that end in it, [N, HV, K, V]."""
        r, s = self.r, self.s
        starts = came if self.edges is not None else self.placed(came)
        found = self.chosen.halves.finish(self.request, self.kept, starts)
        o, final, h = found.o, found.final_state, found.h
        if final is not None:
            final = final if self.edges is not None else s.to_sequences(final, True)
            final = final if s.grid else s.final(r, final)  # cells have parts of it
        if h is not None:
            h = like_callers(r, h.reshape(r.B, -1, *h.shape[2:]), r.h_dtype)
        if self.request.B != r.B:
            o = o.view(r.B, r.T, r.HV, r.V)
        return Forward(ForwardResult(o, final, h), self.matrices, found.saved, self.chosen)


class BackwardStep(_Step):
    """A backward of one call; ``r`` has ``saved``, ``grad_o`` and ``needs_grad``."""

    backward = True
    additions: Tensor | None = None

    def begin(self) -> Tensor:
        """The same backwards."""
        r, s = self.r, self.s
        every, self.additions, self.kept = self.chosen.halves.begin_backward(self.request)
        if self.edges is not None:
            return cast(Tensor, every)
        whole = every is not None or self.chosen.keeps_all(r, s.dense)
        self.matrices = self.matrices[..., : r.K].mT if every is None else every
        sent = s.of_slots(self.matrices, True) if whole else self.matrices
        return self.sent(torch.cat([sent, s.of_slots(cast(Tensor, self.additions), True)], -1))

    def finish(self, came: Tensor | None) -> dict[str, Tensor]:
        """This call's part of the gradients, that of the initial states for all sequences, [N, HV, K, V]."""
        r, s = self.r, self.s
        states = came if self.edges is not None else self.placed(came)
        grads = dict(self.chosen.halves.finish_backward(self.request, self.kept, states))
        if "initial_state" in r.needs_grad and self.edges is None:
            found = grads.get("initial_state")
            if found is None:
                found = apply(self.matrices, cast(Tensor, states), cast(Tensor, self.additions))
            grads["initial_state"] = s.to_sequences(found, False)
        if self.request.B != r.B:
            grads |= {n: grads[n].view(getattr(r, n).shape) for n in r.needs_grad.intersection(DATA)}
        return grads
