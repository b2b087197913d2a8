"""A forward and a backward of this rank's fragments: begin, exchange, finish."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from kda_core.distributed._exchange import applied, at, join, scattered
from kda_core.distributed._halves import Chosen, choose
from kda_core.request import DATA, ForwardResult, Request, build_request

resolve_group: Any = dist.distributed_c10d._resolve_process_group
"""Private in torch (2.7 to 2.13): a process group by its name, which is a constant of a compiled graph."""


class Shared(NamedTuple):
    """A context as operators take it; the names are those of ``ContextParallel``."""

    fragments: Tensor
    slots: Tensor
    group_name: str
    before: int
    sequences: int
    dense: int
    gather: bool
    padded: bool

    @property
    def group(self) -> Any:
        return resolve_group(self.group_name)

    def is_alone(self) -> bool:
        """Whether no fragment ever goes on in another range."""
        return self.slots.shape[0] == 4 and self.group.size() == 1

    def local(self, r: Request) -> Request:
        """The call of this rank's fragments, as a plain one without states."""
        B, rows = self.dense or 1, {}
        if B != r.B:
            T = r.B * r.T // B
            rows = {n: t.reshape(B, T, *t.shape[2:]) for n in (*DATA, "grad_o") if (t := getattr(r, n)) is not None}
        own: dict[str, Any] = {"initial_state": None, "grad_final_state": None, "state_v_first": False}
        own |= {"cu_seqlens": None if self.dense else self.fragments[0], "cp_context": None}
        if self.dense or not r.return_intermediate_states:
            own["cu_seqlens_cpu"] = None
        return build_request({**vars(r), **rows, **own})

    def states(self, r: Request) -> Tensor:
        """[F, HV, K, V], zeros."""
        return r.q.new_zeros(self.fragments.shape[1] - 1, r.HV, r.K, r.V, dtype=r.compute_dtype)

    def of_slots(self, t: Tensor, backward: bool) -> Tensor:
        """Of values for each fragment those for the fragment that each slot sends."""
        return t if self.dense else t.index_select(0, self.slots[int(backward)])

    def exchange(self, r: Request, matrices: Tensor, additions: Tensor, own: Tensor | None, backward: bool) -> Tensor:
        """The states at the fragments' starts (gradients at their ends), [F, HV, K, V]; one collective.

        Args:
            matrices, additions: of the slots.
            own: [F, HV, K, V], given initial states (gradients of final states) where a fragment begins (ends) its
                sequence, otherwise zeros; None: none is given.
        """
        if own is not None:
            additions = applied(matrices, self.of_slots(own, backward), additions)
        rows = self.slots
        received = rows[4 + self.before :] if backward else rows[4 : 4 + self.before]
        came = join(matrices, additions, received, self.group, self.padded)
        if came is None:
            return self.states(r) if own is None else own
        if self.dense:
            return came if own is None else came.add_(own)
        found = self.states(r) if own is None else own
        padded = torch.cat([found, found[:1]])  # the last place takes what no fragment needs
        return padded.index_copy_(0, self.slots[3 if backward else 2], came)[:-1]

    def summed(self, states: Tensor) -> Tensor:
        """The sum over ranks, where every rank has every final state."""
        if self.gather:
            dist.all_reduce(states, group=self.group)
        return states


class Forward(NamedTuple):
    """What a forward returns: this rank's part, and what the backward needs."""

    result: ForwardResult
    matrices: Tensor
    saved: tuple[Tensor, ...]
    chosen: Chosen


def _k_first(r: Request, states: Tensor | None) -> Tensor | None:
    """A caller's states as [N, HV, K, V] in the dtype of state arithmetic."""
    if states is None:
        return None
    return (states.mT if r.state_v_first else states).to(r.compute_dtype)


def _like_callers(r: Request, states: Tensor, dtype: torch.dtype) -> Tensor:
    return (states.mT if r.state_v_first else states).to(dtype).contiguous()


def forward(r: Request, s: Shared, name: str | None) -> Forward:
    """Run a call whose tensors are the caller's, on the backend of that name or the one that is chosen."""
    chosen = choose(s.local(r), name, s.is_alone())
    call, halves = chosen.request, chosen.halves
    own = None if r.initial_state is None else at(_k_first(r, r.initial_state), s.fragments[1, :-1], s.states(r))
    matrices = None
    kept: tuple[Tensor, ...] = ()
    if chosen.alone:
        states = s.states(r) if own is None else own
    else:
        every, additions, kept = halves.begin(call)
        every = cast(Tensor, every)
        states = s.exchange(r, s.of_slots(every, False), s.of_slots(additions, False), own, False)
        if r.save_for_backward:
            matrices = (every if keeps_all(r, s) else s.of_slots(every, True)).contiguous()
        del every, additions
    found = halves.finish(call, kept, states)
    o, final, h = found.o, found.final_state, found.h
    if final is not None:
        final = _like_callers(r, s.summed(scattered(final, s.fragments[2, :-1], s.sequences)), r.state_dtype)
    if h is not None:
        h = _like_callers(r, h.reshape(r.B, -1, *h.shape[2:]), r.h_dtype)
    if call.B != r.B:
        o = o.view(r.B, r.T, r.HV, r.V)
    return Forward(ForwardResult(o, final, h), r.q.new_empty(0) if matrices is None else matrices, found.saved, chosen)


def keeps_all(r: Request, s: Shared) -> bool:
    """Whether the backward needs the matrices of all fragments: for the gradient of the initial states."""
    return bool(s.dense) or r.initial_state is not None


def backward(
    r: Request, s: Shared, name: str | None, matrices: Tensor, known: Chosen | None = None
) -> dict[str, Tensor]:
    """Run its backward: ``r`` has ``saved``, ``grad_o``, ``grad_final_state`` and ``needs_grad``.

    Args:
        known: what the forward chose, for tensors of the same metadata.
    """
    call = s.local(r)
    chosen = choose(call, name, s.is_alone()) if known is None else known.again(call)
    call, halves = chosen.request, chosen.halves
    given = _k_first(r, r.grad_final_state)
    if s.gather and r.output_final_state:
        zeros = None if given is not None else r.q.new_zeros(s.sequences, r.HV, r.K, r.V, dtype=r.compute_dtype)
        given = s.summed(given.clone() if zeros is None else zeros)  # type: ignore[union-attr]
    own = None if given is None else at(given, s.fragments[2, :-1], s.states(r))
    kept: tuple[Tensor, ...] = ()
    if chosen.alone:
        states = s.states(r) if own is None else own
    else:
        every, additions, kept = halves.begin_backward(call)
        whole = every is not None or keeps_all(r, s)
        matrices = matrices.mT if every is None else every
        sent = s.of_slots(matrices, True) if whole else matrices
        states = s.exchange(r, sent, s.of_slots(additions, True), own, True)
    grads = dict(halves.finish_backward(call, kept, states))
    if "initial_state" in r.needs_grad:
        found = grads.get("initial_state")
        if found is None:
            found = applied(matrices, states, additions)
        state = scattered(found, s.fragments[1, :-1], s.sequences)
        grads["initial_state"] = _like_callers(r, state, r.initial_state.dtype)  # type: ignore[union-attr]
    if call.B != r.B:
        grads |= {n: grads[n].view(getattr(r, n).shape) for n in r.needs_grad.intersection(DATA)}
    return grads
