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


def project(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, Tensor]:
    """``x`` [..., D] through several linear layers: (results of the first LARGE, results of the others), side by side.

    The products write into parts of one tensor, so that no weight is copied and what follows is one launch; backwards
    they add up in one gradient of x. Layers that are more than a product (hooks, adapters, quantised or distributed
    weights), and layers under a compiler, are called one by one.
    """
    weights: list[Any] = [getattr(layer, "weight", None) for layer in layers]
    if not all(map(_is_product, layers)) or not is_eager(x, *weights):
        made = [layer(x) for layer in layers]
        return torch.cat(made[:LARGE], -1), torch.cat(made[LARGE:], -1)
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        x, *weights = (t.to(torch.get_autocast_dtype(kind)) for t in (x, *weights))
    rows = x.reshape(-1, x.shape[-1])
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights))
    large, small = _Projections.apply(rows, *weights) if differentiable else _products(rows, weights)
    return large.view(*x.shape[:-1], -1), small.view(*x.shape[:-1], -1)


def _is_product(layer: nn.Module) -> bool:
    """Whether a call of the layer is nothing but a product with its weight."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return type(layer) is nn.Linear and layer.bias is None and not hooks


def _products(rows: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    sizes = [w.shape[0] for w in weights[:LARGE]]
    large = rows.new_empty(rows.shape[0], sum(sizes))
    for weight, part in zip(weights, large.split(sizes, 1), strict=False):
        torch.mm(rows, weight.t(), out=part)
    return large, rows @ torch.cat([*weights[LARGE:]]).t()


class _Projections(torch.autograd.Function):
    """``_products`` with a backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, *weights)
        return _products(rows, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_large: Tensor, grad_small: Tensor) -> tuple:
        rows, *weights = ctx.saved_tensors
        sizes = [w.shape[0] for w in weights]
        parts = [*grad_large.split(sizes[:LARGE], 1), *grad_small.split(sizes[LARGE:], 1)]
        wanted, *of_weights = ctx.needs_input_grad
        grad = None
        if wanted:
            grad = grad_small @ torch.cat(weights[LARGE:])
            for part, weight in zip(parts[:LARGE], weights, strict=False):
                grad.addmm_(part, weight)
        small = grad_small.t() @ rows if any(of_weights[LARGE:]) else None
        found = [part.t() @ rows if needed else None for part, needed in zip(parts[:LARGE], of_weights, strict=False)]
        found += [None] * (len(weights) - LARGE) if small is None else small.split(sizes[LARGE:])
        return (grad, *found)
