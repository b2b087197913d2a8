"""A backend with hooks in halves for the ranks' CPUs: the CPU backend's own calls, held to what ``Begun`` demands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kda_core_cpu.plugin as cpu
import torch

from kda_core.capabilities import Feature
from kda_core.hookspecs import hookimpl
from kda_core.request import BackwardResult, Begun, ForwardResult, Request, TensorSpec

NAME = "halves"
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

    @hookimpl
    def kda_core_backend(self):
        info = cpu.kda_core_backend()
        features = info.capabilities.features | {Feature.CONTEXT_PARALLEL}
        return replace(
            info, name=NAME, priority=None, capabilities=replace(info.capabilities, features=features, closed={})
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


# Everything else is the CPU backend's; pluggy finds what a class has.
for _name in vars(cpu):
    if _name.startswith("kda_core_") and not hasattr(HalvesBackend, _name):
        setattr(HalvesBackend, _name, staticmethod(getattr(cpu, _name)))
