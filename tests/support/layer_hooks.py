"""A backend for the functions around the operator in a layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from toys import Toy

from kda_core.hookspecs import hookimpl
from kda_core.nn import gated_rms_norm, short_convolution
from kda_core.request import BackwardResult, ForwardResult


class Hooked(Toy):
    """A backend with nothing but the hooks of a layer: the core's torch code, counted."""

    calls = ()

    @hookimpl
    def kda_core_short_convolution_forward(self, request):
        self.calls += ("convolution",)
        return ForwardResult(*self._convolved(request))

    @hookimpl
    def kda_core_short_convolution_backward(self, request):
        self.calls += ("convolution backward",)
        leaves = [t.detach().requires_grad_() for t in (request.x, request.weight)]
        grads = [t for t in (request.grad_output, request.grad_second, request.grad_third) if t is not None]
        assert not request.parts or tuple(t.shape[2] for t in grads) == request.parts
        assert not any(t.is_neg() for t in grads)
        with torch.enable_grad():
            y, _ = self._convolved(replace(request, x=leaves[0], weight=leaves[1]))
        return BackwardResult(
            dict(zip(("x", "weight"), torch.autograd.grad(y, leaves, torch.cat(grads, -1)), strict=True))
        )

    def _convolved(self, r):
        return short_convolution(r.x, r.weight, cu_seqlens=r.cu_seqlens, backend="reference")

    @hookimpl
    def kda_core_gated_rms_norm_forward(self, request):
        self.calls += ("norm",)
        return self._normed(request)

    @hookimpl
    def kda_core_gated_rms_norm_backward(self, request):
        self.calls += ("norm backward",)
        assert not request.grad_output.is_neg()
        leaves = {n: getattr(request, n).detach().requires_grad_() for n in ("x", "gate", "weight")}
        with torch.enable_grad():
            y = self._normed(replace(request, **leaves))
        grads = torch.autograd.grad(y, leaves.values(), request.grad_output)
        return BackwardResult(dict(zip(leaves, grads, strict=True)))

    def _normed(self, r):
        return gated_rms_norm(r.x, r.gate, r.weight, r.eps, "reference")
