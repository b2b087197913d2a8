"""A forward and a backward in two halves: a backend's own hooks, or plain calls of a backend that has none."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kda_core._bind import build_request
from kda_core._loaded import Backend
from kda_core._plugins import registry
from kda_core.capabilities import Feature
from kda_core.distributed._exchange import apply, at, scattered
from kda_core.errors import UnsupportedCall
from kda_core.request import BackwardResult, Begun, Edges, ForwardResult, Request, TensorSpec


def changed(r: Request, **values: Any) -> Request:
    """``replace(r, ...)`` of a call with the same signature, memo included."""
    values = {**vars(r), **values}
    memo = values.pop("memo", None)  # under a compiler requests are made by their initialiser, which takes none
    found = build_request(values)
    found.__dict__["memo"] = memo
    return found


def _within(memo: dict[Any, Any] | None, key: Any) -> dict[Any, Any] | None:
    """The memo of requests that are made of those that have this one."""
    return None if memo is None else memo.setdefault(key, {})


class Hooks:
    """The hooks of a backend that declares ``Feature.CONTEXT_PARALLEL``; requests have ``Edges``, or as ``request``."""

    all_matrices = False

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @staticmethod
    def request(r: Request) -> Request:
        """That of hooks which know fragments alone."""
        needs = r.needs_grad
        if "initial_state" in needs:
            # A backward that is asked for the states' gradients alone still says that it is one.
            needs = needs - {"initial_state"} or frozenset({"beta"})
        return changed(r, initial_state=None, cp_context=True, needs_grad=needs, memo=_within(r.memo, Hooks))

    def saved_spec(self, r: Request) -> tuple[TensorSpec, ...]:
        return self.backend.saved_specs(self.request(r))

    def begin(self, r: Request) -> Begun:
        hook = "kda_core_chunk_begin_backward" if r.needs_grad else "kda_core_chunk_begin"
        begun, memo = self.backend.result(hook, r), {} if r.memo is None else r.memo
        if hook not in memo:
            self.backend.check_begun(r, begun)
            memo[hook] = True
        return begun

    begin_backward = begin

    def finish(self, r: Request, kept: tuple[Tensor, ...], starts: Tensor | None) -> ForwardResult:
        result = self.backend.call("kda_core_chunk_finish", request=r, kept=kept, starts=starts)
        if r.memo is None or ForwardResult not in r.memo or type(result) is not ForwardResult:
            self.backend.check_forward(r, result)
        return result

    def finish_backward(self, r: Request, kept: tuple[Tensor, ...], ends: Tensor | None) -> dict[str, Tensor]:
        result = self.backend.call("kda_core_chunk_finish_backward", request=r, kept=kept, ends=ends)
        seen = r.memo is not None and (BackwardResult, r.needs_grad) in r.memo
        if not seen or type(result) is not BackwardResult or not r.needs_grad <= result.grads.keys():
            self.backend.check_gradients(r, result, r.memo)
        return result.grads


class PlainCalls:
    """The same by plain calls: a forward for the transitions, one for the results; two backwards.

    Nothing but final states, which backends keep in float32, tells what a fragment does to a state. Requests have any
    initial state of the right shape.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @staticmethod
    def request(r: Request) -> Request:
        states = r.q.new_empty(r.N, r.HV, r.K, r.V, dtype=r.compute_dtype)
        return changed(r, initial_state=states, cp_context=None)

    def saved_spec(self, r: Request) -> tuple[TensorSpec, ...]:
        states = TensorSpec((r.N, r.HV, r.K, r.V), r.compute_dtype)
        return (*self.backend.saved_specs(r), states)

    def begin(self, r: Request) -> Begun:
        lead = (r.N, r.HV, r.K)
        unit = torch.eye(r.K, dtype=r.compute_dtype, device=r.device).expand(*lead, r.K)
        zeros = unit.new_zeros(*lead, r.V)
        none = r.v.new_zeros(*r.v.shape[:-1], r.K)
        try:
            both = self._last(r, torch.cat([r.v, none], -1), torch.cat([zeros, unit], -1))
            additions, matrices = both.split((r.V, r.K), -1)
        except UnsupportedCall:  # the backend does not take so many value channels
            additions, matrices = self._last(r, r.v, zeros), self._last(r, none, unit.contiguous())
        return Begun(matrices, additions, ())

    def _last(self, r: Request, values: Tensor, states: Tensor) -> Tensor:
        asked = changed(
            r, v=values, initial_state=states, output_final_state=True, save_for_backward=False,
            disable_recompute=False, return_intermediate_states=False, intermediate_states_dtype=None, memo=None,
        )  # fmt: skip
        return cast(Tensor, registry.choose(asked, self.backend.info.name).forward(asked).final_state)

    def finish(self, r: Request, kept: tuple[Tensor, ...], starts: Tensor | None) -> ForwardResult:
        found = self.backend.forward(changed(r, initial_state=starts))
        if not r.save_for_backward:
            return found
        return ForwardResult(found.o, found.final_state, found.h, (*found.saved, cast(Tensor, starts)))

    def begin_backward(self, r: Request) -> Begun:
        *saved, starts = r.saved
        if r.grad_o is None:
            return Begun(None, torch.zeros_like(starts), ())
        asked = changed(
            r, saved=tuple(saved), initial_state=starts, grad_final_state=None, needs_grad=frozenset({"initial_state"})
        )
        return Begun(None, self.backend.backward(asked)["initial_state"], ())

    def finish_backward(self, r: Request, kept: tuple[Tensor, ...], ends: Tensor | None) -> dict[str, Tensor]:
        *saved, starts = r.saved
        return self.backend.backward(changed(r, saved=tuple(saved), initial_state=starts, grad_final_state=ends))


class ByFragments:
    """The same for ``Edges`` by hooks or plain calls that know fragments alone: states are placed here.

    Given states at the fragments come first of the tensors that a first half keeps.

    Args:
        all_matrices: whether the backward is given the matrices of all fragments, for the gradient of initial states,
            and not of those alone that it sends.
    """

    def __init__(self, inner: Hooks | PlainCalls, all_matrices: bool) -> None:
        self.inner, self.all_matrices = inner, all_matrices

    def saved_spec(self, r: Request) -> tuple[TensorSpec, ...]:
        return self.inner.saved_spec(self.inner.request(r))

    def begin(self, r: Request) -> Begun:
        """As hooks; ``additions`` are the matrices for a backward that is to come."""
        matrices, additions, kept = self.inner.begin(self.inner.request(r))
        every = cast(Tensor, matrices) if additions is None else torch.cat([cast(Tensor, matrices), additions], -1)
        sends, given, matrices = r.cp_context.sends, _given(r), every
        if r.save_for_backward and sends is not None:
            sends, behind = sends.chunk(2)
            matrices = every[..., : r.K]
            matrices = matrices.contiguous() if self.all_matrices else matrices.index_select(0, behind)
        return Begun(_with_given(r, _of(every, sends), given, sends), matrices, cast(Any, (given, *kept)))

    def finish(self, r: Request, kept: tuple[Tensor, ...], starts: Tensor | None) -> ForwardResult:
        found = self.inner.finish(self.inner.request(r), kept[1:], _entered(r, starts, kept))
        final = None if found.final_state is None else _of_sequences(r, found.final_state)
        return ForwardResult(found.o, final, found.h, found.saved)

    def begin_backward(self, r: Request) -> Begun:
        sends, given = r.cp_context.sends, _given(r)
        matrices, additions, kept = self.inner.begin_backward(self.inner.request(r))
        whole = matrices is not None or self.all_matrices
        if matrices is None:
            matrices = r.cp_context.matrices[..., : r.K].mT
        sent = torch.cat([_of(matrices, sends) if whole else matrices, _of(cast(Tensor, additions), sends)], -1)
        return Begun(_with_given(r, sent, given, sends), None, cast(Any, (given, matrices, additions, *kept)))

    def finish_backward(self, r: Request, kept: tuple[Tensor, ...], ends: Tensor | None) -> dict[str, Tensor]:
        ends = _entered(r, ends, kept)
        grads = dict(self.inner.finish_backward(self.inner.request(r), kept[3:], ends))
        if "initial_state" in r.needs_grad:
            found = grads["initial_state"] if "initial_state" in grads else apply(kept[1], ends, kept[2])
            grads["initial_state"] = _of_sequences(r, found)
        return grads


def _of(t: Tensor, sends: Tensor | None) -> Tensor:
    return t if sends is None else t.index_select(0, sends)


def _given(r: Request) -> Tensor | None:
    """The given states at the fragments that start their sequences, [F, HV, K, V], else zeros."""
    given, places = r.cp_context.given, r.cp_context.places
    return None if given is None else at(given.to(r.compute_dtype), places)


def _with_given(r: Request, sent: Tensor, given: Tensor | None, sends: Tensor | None) -> Tensor:
    """The sent part, with given states in its additions."""
    if given is not None:
        apply(sent[..., : r.K], _of(given, sends), sent[..., r.K :])
    return sent


def _entered(r: Request, came: Tensor | None, kept: tuple[Any, ...]) -> Tensor:
    """The states at the fragments' starts (gradients at their ends), [F, HV, K, V]: what came, and the given."""
    given, sources = kept[0] if kept else _given(r), r.cp_context.sources
    if came is None:
        zeros = (r.N, r.HV, r.K, r.V)
        return r.q.new_zeros(zeros, dtype=r.compute_dtype) if given is None else given
    came = came if sources is None else at(came[..., -r.V :], sources)
    return came if given is None else came.add_(given)


def _of_sequences(r: Request, states: Tensor) -> Tensor:
    e = r.cp_context
    return states if e.results is None else scattered(states, e.results, e.sequences)


class Chosen(NamedTuple):
    """Who serves a call, and how.

    Attributes:
        halves: hooks or plain calls.
        memo: of the plain call.
        halves_memo: of requests in halves.
        alone: whether nothing has to be exchanged, so that plain calls serve without a first half.
    """

    halves: Hooks | ByFragments
    memo: dict[Any, Any] | None
    halves_memo: dict[Any, Any] | None
    alone: bool


def choose(call: Request, name: str | None, alone: bool, edges: bool, all_matrices: bool) -> Chosen:
    """The backend of a plain call without states, and whether its hooks or plain calls serve it.

    Args:
        call: becomes what the backend was chosen for, whose tensors have their signs resolved.
        edges: whether hooks that take ``Edges`` are to be given them.
        all_matrices: of ``ByFragments``.
    """
    if not alone:
        backend = registry.choose(call, name)
        memo = {} if call.memo is None else call.memo
        if PlainCalls not in memo:
            declared = Feature.CONTEXT_PARALLEL in backend.info.capabilities.features
            memo[PlainCalls] = declared and backend.rejection(Hooks.request(call)) is None
        if memo[PlainCalls] and edges and backend.info.capabilities.edges:
            return Chosen(Hooks(backend), call.memo, _within(call.memo, Edges), False)
        if memo[PlainCalls]:
            return Chosen(ByFragments(Hooks(backend), all_matrices), call.memo, call.memo, False)
    call.__dict__.update(vars(PlainCalls.request(call)), memo=None)
    backend = registry.choose(call, name)
    return Chosen(ByFragments(PlainCalls(backend), all_matrices), call.memo, call.memo, alone)
