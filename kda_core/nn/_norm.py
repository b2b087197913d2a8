"""The gated RMS norm of a layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kda_core._checks import python_value
from kda_core._loaded import Backend
from kda_core.nn._checks import expect_eps, expect_same_device, expect_shape, expect_tensor
from kda_core.nn._dispatch import backend_for
from kda_core.nn._once import differentiable_once
from kda_core.request import GatedNormRequest


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-5, backend: str | None = None) -> Tensor:
    """RMS norm over the last dimension, times a weight and the sigmoid of a gate: behind the operator in a KDA layer.

    ``x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)``, in float32 (float64 for float64 x). Source: Kimi Linear,
    arXiv 2510.26692, section 4.

    Args:
        x: [..., D], floating, any strides.
        gate: shape of x, any floating dtype: logits.
        weight: [D], any floating dtype.
        eps: at least 0.
        backend: name of a backend, as in ``chunk_kda``.

    Returns:
        Shape and dtype of x.

    Raises:
        ValueError, TypeError: a wrong shape, device, value or type.
        UnsupportedCall, BackendNotFound, BrokenBackend: as ``chunk_kda``, for a backend that was asked for.
    """
    eps = python_value(eps)
    _check(x, gate, weight, eps)
    return norm(x, gate, weight, eps, backend)


def norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, backend: str | None) -> Tensor:
    """``gated_rms_norm`` of checked arguments."""
    own, memo = backend_for("gated_rms_norm", x, (gate, weight), (eps,), backend) if x.numel() else (None, None)
    if own is None:
        return in_torch(x, gate, weight, eps)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, gate, weight)):
        return NormedProduct.apply(own, memo, eps, x, gate, weight, None)
    request = GatedNormRequest(x=x, gate=gate, weight=weight, eps=eps, memo=memo)
    return own.result("kda_core_gated_rms_norm_forward", request)


class GatedRMSNorm(nn.RMSNorm):
    """``gated_rms_norm`` as a module. A layer calls it where hooks wait for that, and otherwise reads its weight."""

    eps: float

    def __init__(self, channels: int, eps: float = 1e-5, **factory: Any) -> None:
        super().__init__(channels, eps, **factory)

    def forward(self, x: Tensor, gate: Tensor, backend: str | None = None) -> Tensor:  # type: ignore[override]
        return gated_rms_norm(x, gate, self.weight, self.eps, backend)


def _check(x: Any, gate: Any, weight: Any, eps: Any) -> None:
    expect_tensor("x", x)
    expect_tensor("gate", gate)
    expect_tensor("weight", weight, 1)
    if not x.dim():
        raise ValueError("x: expected at least one dimension, got a scalar")
    expect_shape("gate", gate, x.shape)
    expect_shape("weight", weight, x.shape[-1:])
    expect_same_device(x, {"gate": gate, "weight": weight})
    expect_eps("eps", eps)


def in_torch(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    # These return at once where the dtype stays; to() takes as long as a small operator.
    widen = Tensor.double if x.dtype == torch.float64 else Tensor.float
    rows = widen(x)
    scale = rows.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (rows * scale * widen(weight) * torch.sigmoid(widen(gate))).type_as(x)


class NormedProduct(torch.autograd.Function):
    """A backend's norm, and a product of all channels of a token with the weight of a projection, unless it is None."""

    @staticmethod
    def forward(
        ctx: Any, own: Backend, memo: dict, eps: float, x: Tensor, gate: Tensor, norm: Tensor, weight: Tensor | None
    ) -> Tensor:
        request = GatedNormRequest(x=x, gate=gate, weight=norm, eps=eps, memo=memo)
        y = own.result("kda_core_gated_rms_norm_forward", request)
        ctx.call = own, memo, eps
        if weight is None:
            ctx.save_for_backward(x, gate, norm)
            return y
        rows = y.flatten(2).flatten(0, 1)
        ctx.save_for_backward(x, gate, norm, weight, rows)
        return torch.mm(rows, weight.t()).view(*x.shape[:2], -1)

    @staticmethod
    @differentiable_once("gated_rms_norm")
    def backward(ctx: Any, saved: Sequence[Tensor], grad: Tensor) -> tuple:
        x, gate, norm, *product = saved
        own, memo, eps = ctx.call
        *needed, of_weight = ctx.needs_input_grad[3:]
        names = ("x", "gate", "weight")
        needs = frozenset(itertools.compress(names, needed))
        grad_weight, grads = None, {}
        if product:
            weight, rows = product
            grad = grad.flatten(0, 1)
            grad_weight = torch.mm(grad.t(), rows) if of_weight else None
        if needs:
            grad = torch.mm(grad, weight).view(x.shape) if product else grad
            request = GatedNormRequest(
                x=x, gate=gate, weight=norm, eps=eps, memo=memo, grad_output=grad, needs_grad=needs
            )
            grads = own.result("kda_core_gated_rms_norm_backward", request).grads
        return None, None, None, *(grads[name] if name in needs else None for name in names), grad_weight
