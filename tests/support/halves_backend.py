"""A backend with hooks in halves for the ranks' CPUs: the CPU backend's own calls, held to what ``Begun`` demands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kda_core_cpu.plugin as cpu
import torch

from kda_core.capabilities import Feature
from kda_core.hookspecs import hookimpl
from kda_core.request import BackwardResult, Begun, Edges, ForwardResult, Request, TensorSpec

COUNT = {"begin": 0, "finish": 0, "begin_backward": 0, "finish_backward": 0}


def _plain(r: Request, **values: Any) -> Request:
    assert r.cp_context is True
    assert r.initial_state is r.grad_final_state is r.out is None
    assert "initial_state" not in r.needs_grad
    return replace(r, cp_context=None, **values)


def _states(r: Request, width: int) -> torch.Tensor:
    return torch.zeros(r.N, r.HV, r.K, width, dtype=r.compute_dtype)


class HalvesBackend:
    """Serves by its hooks what has no intermediate states; says otherwise that it does not."""

    name = "halves"

    @hookimpl
    def kda_core_backend(self):
        info = cpu.kda_core_backend()
        features = info.capabilities.features | {Feature.CONTEXT_PARALLEL}
        return replace(
            info, name=self.name, priority=None, capabilities=replace(info.capabilities, features=features, closed={})
        )

    @hookimpl
    def kda_core_reject(self, request):
        return "no h in halves" if getattr(request, "cp_context", None) and request.return_intermediate_states else None

    @hookimpl
    def kda_core_saved_spec(self, request):
        if request.cp_context is None:
            return cpu.kda_core_saved_spec(request)
        states = TensorSpec((request.N, request.HV, request.K, request.V), request.compute_dtype)
        return (states, *cpu.kda_core_saved_spec(_plain(request)))

    @hookimpl
    def kda_core_chunk_begin(self, request):
        COUNT["begin"] += 1
        r = _plain(request, save_for_backward=False, output_final_state=True)
        additions = cpu.kda_core_chunk_forward(replace(r, initial_state=_states(r, r.V))).final_state
        unit = _states(r, r.K) + torch.eye(r.K, dtype=r.compute_dtype)
        nothing = r.v.new_zeros(*r.v.shape[:-1], r.K)
        matrices = cpu.kda_core_chunk_forward(replace(r, v=nothing, initial_state=unit)).final_state
        return Begun(matrices, additions, (torch.ones(3),))

    @hookimpl
    def kda_core_chunk_finish(self, request, kept, starts):
        COUNT["finish"] += 1
        assert starts.is_contiguous()
        assert torch.equal(kept[0], torch.ones(3))
        found = cpu.kda_core_chunk_forward(_plain(request, initial_state=starts))
        saved = (starts, *found.saved) if request.save_for_backward else ()
        return ForwardResult(found.o, found.final_state, found.h, saved)

    @hookimpl
    def kda_core_chunk_begin_backward(self, request):
        COUNT["begin_backward"] += 1
        starts, *saved = request.saved
        if request.grad_o is None:
            return Begun(None, torch.zeros_like(starts), (starts,))
        needs = frozenset({"initial_state"})
        asked = _plain(request, saved=tuple(saved), initial_state=starts, needs_grad=needs)
        return Begun(None, cpu.kda_core_chunk_backward(asked).grads["initial_state"], (starts,))

    @hookimpl
    def kda_core_chunk_finish_backward(self, request, kept, ends):
        COUNT["finish_backward"] += 1
        (starts,) = kept
        asked = _plain(request, saved=request.saved[1:], initial_state=starts, grad_final_state=ends)
        return BackwardResult(cpu.kda_core_chunk_backward(asked).grads)


def _padded(t: torch.Tensor) -> torch.Tensor:
    """States of every number, zeros at the last one more."""
    return torch.cat([t, t.new_zeros(1, *t.shape[1:])])


def _own(e: Edges, like: torch.Tensor) -> torch.Tensor:
    """The given states where fragments start their sequences."""
    return torch.zeros_like(like) if e.given is None else _padded(e.given.to(like))[e.places]


def _entered(e: Edges, came: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    states = _own(e, like)
    if came is None:
        return states
    came = came[..., -like.shape[-1] :]
    return states + (came if e.sources is None else _padded(came)[e.sources.clamp(max=len(came))])


def _of_sequences(e: Edges, states: torch.Tensor) -> torch.Tensor:
    if e.results is None:
        return states
    return states.new_zeros(e.sequences + 1, *states.shape[1:]).index_copy_(0, e.results, states)[:-1]


class EdgesBackend(HalvesBackend):
    """The same with ``Edges``, done as ``kda_core.request.Edges`` says."""

    name = "edges"

    @hookimpl
    def kda_core_backend(self):
        info = super().kda_core_backend()
        return replace(info, name=self.name, capabilities=replace(info.capabilities, edges=True))

    @hookimpl
    def kda_core_chunk_begin(self, request):
        e = request.cp_context
        matrices, additions, kept = super().kda_core_chunk_begin(replace(request, cp_context=True))
        both = torch.cat([matrices, additions + matrices @ _own(e, additions)], -1)
        return Begun(both if e.sends is None else both[e.sends], None, kept)

    @hookimpl
    def kda_core_chunk_finish(self, request, kept, starts):
        e = request.cp_context
        starts = _entered(e, starts, _states(request, request.V))
        found = super().kda_core_chunk_finish(replace(request, cp_context=True), kept, starts)
        final = found.final_state
        return replace(found, final_state=None if final is None else _of_sequences(e, final))

    @hookimpl
    def kda_core_chunk_begin_backward(self, request):
        e, needs = request.cp_context, request.needs_grad - {"initial_state"}
        asked = replace(request, cp_context=True, needs_grad=needs)
        _, additions, kept = super().kda_core_chunk_begin_backward(asked)
        matrices, own = e.matrices[..., : request.K].mT, _own(e, additions)
        sent = slice(None) if e.sends is None else e.sends
        return Begun(torch.cat([matrices, additions[sent] + matrices @ own[sent]], -1), None, kept)

    @hookimpl
    def kda_core_chunk_finish_backward(self, request, kept, ends):
        e = request.cp_context
        COUNT["finish_backward"] += 1
        (starts,) = kept
        asked = replace(
            request, cp_context=None, saved=request.saved[1:], initial_state=starts,
            grad_final_state=_entered(e, ends, starts),
        )  # fmt: skip
        grads = dict(cpu.kda_core_chunk_backward(asked).grads)
        if "initial_state" in grads:
            grads["initial_state"] = _of_sequences(e, grads["initial_state"])
        return BackwardResult(grads)


# Everything else is the CPU backend's; pluggy finds what a class has.
for _name in vars(cpu):
    if _name.startswith("kda_core_") and not hasattr(HalvesBackend, _name):
        setattr(HalvesBackend, _name, staticmethod(getattr(cpu, _name)))
