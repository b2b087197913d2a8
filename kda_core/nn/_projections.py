"""Projections of one input by several weights: a product for each large weight, and one for all small ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kda_core.nn._dispatch import is_eager

LARGE = 3
"""Weights that have a product of their own: of q, k and v."""


def project(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """``x`` [R, D] through several linear layers: results of the first LARGE side by side, then each of the others.

    The products of the first write into parts of one tensor, so that no weight is copied and what follows is one
    launch; backwards they add up in one gradient of x. Layers that are more than a product (hooks, adapters, quantised
    or distributed weights), and layers under a compiler, are called one by one.
    """
    weights: list[Any] = [getattr(layer, "weight", None) for layer in layers]
    if not all(map(_is_product, layers)) or not is_eager(x, *weights):
        made = [layer(x) for layer in layers]
        return torch.cat(made[:LARGE], -1), *made[LARGE:]
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        x, *weights = (t.to(torch.get_autocast_dtype(kind)) for t in (x, *weights))
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights))
    return _Projections.apply(x, *weights) if differentiable else _products(x, weights)


def _is_product(layer: nn.Module) -> bool:
    """Whether a call of the layer is nothing but a product with its weight."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return type(layer) is nn.Linear and layer.bias is None and not hooks


def _products(rows: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    sizes = [w.shape[0] for w in weights]
    large = rows.new_empty(rows.shape[0], sum(sizes[:LARGE]))
    for weight, part in zip(weights, large.split(sizes[:LARGE], 1), strict=False):
        torch.mm(rows, weight.t(), out=part)
    return large, *(rows @ torch.cat([*weights[LARGE:]]).t()).split(sizes[LARGE:], 1)


class _Projections(torch.autograd.Function):
    """``_products`` with a backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows, *weights)
        return _products(rows, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_large: Tensor, *grads: Tensor) -> tuple:
        rows, *weights = ctx.saved_tensors
        sizes = [w.shape[0] for w in weights]
        parts, small = grad_large.split(sizes[:LARGE], 1), torch.cat(grads, 1)
        wanted, *of_weights = ctx.needs_input_grad
        grad = None
        if wanted:
            grad = small @ torch.cat(weights[LARGE:])
            for part, weight in zip(parts, weights, strict=False):
                grad.addmm_(part, weight)
        found = [part.t() @ rows if needed else None for part, needed in zip(parts, of_weights, strict=False)]
        if any(of_weights[LARGE:]):
            return grad, *found, *(small.t() @ rows).split(sizes[LARGE:])
        return grad, *found, *[None] * len(grads)
