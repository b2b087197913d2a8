"""A forward and a backward in two halves: a backend's own hooks, or plain calls of a backend that has none."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kda_core import _results
from kda_core._bind import build_request
from kda_core._loaded import Backend
from kda_core._plugins import registry
from kda_core.capabilities import Feature
from kda_core.errors import UnsupportedCall
from kda_core.request import BackwardResult, Begun, Edges, ForwardResult, Request, TensorSpec


def changed(r: Request, **values: Any) -> Request:
    """``replace(r, ...)`` of a call with the same signature, memo included."""
    found = build_request({**vars(r), **values})
    found.__dict__["memo"] = r.memo
    return found


def hook_request(r: Request, edges: Edges | None = None) -> Request:
    """The request that hooks in halves are given: without states, marked, with a memo of its own; it becomes ``r``."""
    needs, memo = r.needs_grad, r.memo
    if edges is None and "initial_state" in needs:
        # A backward that is asked for the states' gradients alone still says that it is one.
        needs = needs - {"initial_state"} or frozenset({"beta"})
    memo = None if memo is None else memo.setdefault(Halves if edges is None else Edges, {})
    r.__dict__.update(initial_state=None, cp_context=edges or True, needs_grad=needs, memo=memo)
    return r


class Halves:
    """The hooks of a backend that declares ``Feature.CONTEXT_PARALLEL``; they get what ``request`` makes of a call."""

    request = staticmethod(hook_request)

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def saved_spec(self, r: Request) -> tuple[TensorSpec, ...]:
        return self.backend.saved_specs(hook_request(changed(r)))

    def begin(self, r: Request) -> Begun:
        return self._begun("kda_core_chunk_begin", r)

    def finish(self, r: Request, kept: tuple[Tensor, ...], starts: Tensor | None) -> ForwardResult:
        result = self.backend.call("kda_core_chunk_finish", request=r, kept=kept, starts=starts)
        if r.memo is None or ForwardResult not in r.memo or type(result) is not ForwardResult:
            _results.check_forward(self.backend.info.name, r, result)
        return result

    def begin_backward(self, r: Request) -> Begun:
        return self._begun("kda_core_chunk_begin_backward", r)

    def finish_backward(self, r: Request, kept: tuple[Tensor, ...], ends: Tensor | None) -> dict[str, Tensor]:
        result = self.backend.call("kda_core_chunk_finish_backward", request=r, kept=kept, ends=ends)
        seen = r.memo is not None and (BackwardResult, r.needs_grad) in r.memo
        if not seen or type(result) is not BackwardResult or not r.needs_grad <= result.grads.keys():
            _results.check_gradients(self.backend.info.name, r, result, r.memo)
        return result.grads

    def _begun(self, hook: str, r: Request) -> Begun:
        begun = self.backend.result(hook, r)
        if r.memo is None or hook not in r.memo:
            _results.check_begun(self.backend.info.name, r, begun)
            if r.memo is not None:
                r.memo[hook] = True
        return begun


class PlainCalls:
    """The same by plain calls: a forward for the transitions, one for the results; two backwards.

    Nothing but final states, which backends keep in float32, tells what a fragment does to a state. Requests have any
    initial state of the right shape.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @staticmethod
    def request(r: Request, edges: Edges | None = None) -> Request:
        return r

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
        options = {"save_for_backward": False, "return_intermediate_states": False, "disable_recompute": False}
        given = {"v": values, "initial_state": states, "output_final_state": True, "intermediate_states_dtype": None}
        asked = build_request({**vars(r), **given, **options})
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


class Chosen(NamedTuple):
    """Who serves a call, and how.

    Attributes:
        halves: hooks or plain calls.
        memo: of the plain call.
        alone: whether nothing has to be exchanged, so that plain calls serve without a first half.
        by_edges: whether hooks are given ``Edges``.
    """

    halves: Halves | PlainCalls
    memo: dict[Any, Any] | None
    alone: bool
    by_edges: bool = False

    def keeps_all(self, r: Request, dense: int) -> bool:
        """Whether the backward needs the matrices of all fragments: for the gradient of the initial states."""
        return bool(dense) or (r.initial_state is not None and not self.by_edges)

    def again(self, call: Request) -> None:
        """Make a call of the same signature what ``choose`` makes of it."""
        if isinstance(self.halves, PlainCalls):
            _add_states(call)
        call.__dict__["memo"] = self.memo


def choose(call: Request, name: str | None, alone: bool, edges: bool) -> Chosen:
    """The backend of a plain call without states, and whether its hooks or plain calls serve it.

    The call gets its memo, and states of the right metadata if plain calls serve it, which replace them.

    Args:
        edges: whether hooks that take ``Edges`` are to be given them.
    """
    if not alone:
        backend = registry.choose(call, name)
        known = None if call.memo is None else call.memo.get(PlainCalls)
        if known is None:
            declared = Feature.CONTEXT_PARALLEL in backend.info.capabilities.features
            known = declared and backend.rejection(hook_request(changed(call))) is None
            if call.memo is not None:
                call.memo[PlainCalls] = known
        if known:
            return Chosen(Halves(backend), call.memo, False, edges and backend.info.capabilities.edges)
    _add_states(call)
    call.__dict__["memo"] = None
    backend = registry.choose(call, name)
    return Chosen(PlainCalls(backend), call.memo, alone)


def _add_states(call: Request) -> None:
    states = call.q.new_empty(call.N, call.HV, call.K, call.V, dtype=call.compute_dtype)
    call.__dict__["initial_state"] = states
