"""All projections of a layer's input: a product for each large weight, one for all small ones, and the gates'."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kda_core.nn._dispatch import is_eager


class Projections(NamedTuple):
    """A layer's projections, or results of theirs."""

    q: Any
    k: Any
    v: Any
    decay_in: Any
    gate_in: Any
    beta: Any
    decay_out: Any
    gate_out: Any


def project(x: Tensor, layers: Projections) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``x`` [R, D] through a layer's projections: q, k and v side by side; decay input, beta and gate: [R, channels].

    The products of q, k and v write into parts of one tensor, so that no weight is copied and what follows is one
    launch; backwards they add up in one gradient of x. Layers that are more than a product (hooks, adapters, quantised
    or distributed weights), and layers under a compiler, are called one by one.
    """
    weights: list[Any] = [getattr(layer, "weight", None) for layer in layers]
    bias: Any = getattr(layers.gate_out, "bias", None)
    if not all(map(_is_product, layers, (*[None] * 7, bias))) or not is_eager(x, bias, *weights):
        decay, gate = layers.decay_out(layers.decay_in(x)), layers.gate_out(layers.gate_in(x))
        return torch.cat([layer(x) for layer in layers[:3]], -1), decay, layers.beta(x), gate
    kind = x.device.type
    tensors = [x, bias, *weights]
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        tensors = [t.to(torch.get_autocast_dtype(kind)) for t in tensors]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        mixed, decay, beta, gate = _Project.apply(*tensors)
    else:
        mixed, decay, beta, gate = _products(tensors[0], tensors[1], Projections(*tensors[2:]))[0]
    return mixed, decay, beta, gate


def _is_product(layer: nn.Module, bias: Tensor | None) -> bool:
    """Whether a call of the layer is nothing but a product with its weight, and this bias."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return type(layer) is nn.Linear and layer.bias is bias and not hooks


def _products(x: Tensor, bias: Tensor, w: Projections) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """The results of ``project``, and the inputs of both gates' second products."""
    large = [t.shape[0] for t in w[:3]]
    mixed = x.new_empty(x.shape[0], sum(large))
    for weight, part in zip(w, mixed.split(large, 1), strict=False):
        torch.mm(x, weight.t(), out=part)
    small = [t.shape[0] for t in w[3:6]]
    decay, gate, beta = (x @ torch.cat(w[3:6]).t()).split(small, 1)
    return (mixed, decay @ w.decay_out.t(), beta, torch.addmm(bias, gate, w.gate_out.t())), (decay, gate)


class _Project(torch.autograd.Function):
    """``_products`` with a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        results, low = _products(x, bias, Projections(*weights))
        ctx.save_for_backward(x, *low, *weights)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mixed: Tensor, grad_decay: Tensor, grad_beta: Tensor, grad_gate: Tensor) -> tuple:
        x, decay, gate, *weights = ctx.saved_tensors
        w = Projections(*weights)
        of_x, of_bias, *needed = ctx.needs_input_grad
        needs = Projections(*needed)
        sizes = [t.shape[0] for t in weights]
        parts = grad_mixed.split(sizes[:3], 1)
        small = x.new_empty(x.shape[0], sum(sizes[3:6]))
        low_decay, low_gate, low_beta = small.split(sizes[3:6], 1)
        torch.mm(grad_decay, w.decay_out, out=low_decay)
        torch.mm(grad_gate, w.gate_out, out=low_gate)
        low_beta.copy_(grad_beta)
        grad = None
        if of_x:
            grad = small @ torch.cat(w[3:6])
            for part, weight in zip(parts, w, strict=False):
                grad.addmm_(part, weight)
        found = [part.t() @ x if wanted else None for part, wanted in zip(parts, needs, strict=False)]
        found += (small.t() @ x).split(sizes[3:6]) if any(needs[3:6]) else [None] * 3
        found.append(grad_decay.t() @ decay if needs.decay_out else None)
        found.append(grad_gate.t() @ gate if needs.gate_out else None)
        return grad, grad_gate.sum(0) if of_bias else None, *found
