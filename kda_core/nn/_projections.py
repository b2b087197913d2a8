"""All projections of a layer's input: a product for each large weight, one for all small ones, and the gates'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kda_core._loaded import Backend
from kda_core.nn._convolution import GRADIENTS, in_parts
from kda_core.nn._dispatch import backend_for, is_eager
from kda_core.request import ShortConvolutionRequest


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


class Convolutions(NamedTuple):
    """The convolutions that follow q, k and v, without a state.

    Attributes:
        weights: of q, k and v, [D, 1, W].
        batch: B and T.
        parts: (heads, channels) of q, k and v.
        cu_seqlens, backend: as in ``short_convolution``.
    """

    weights: Sequence[Tensor]
    batch: Sequence[int]
    parts: Sequence[Sequence[int]]
    cu_seqlens: Tensor | None
    backend: str | None


def project(
    x: Tensor, layers: Projections, convolutions: Convolutions | None = None
) -> tuple[Tensor | Sequence[Tensor], Tensor, Tensor, Tensor]:
    """``x`` [R, D] through a layer's projections: q, k and v side by side; decay input, beta and gate: [R, channels].

    With ``convolutions``, where a backend serves them and a gradient is needed, q, k and v come convolved, as three
    tensors [B, T, heads, channels]: the host limits a layer's step, and a node of its own takes as long as a kernel.

    The products of q, k and v write into parts of one tensor, so that no weight is copied and what follows is one
    launch; backwards they add up in one gradient of x. Layers that are more than a product (hooks, adapters, quantised
    or distributed weights), and layers under a compiler, are called one by one.
    """
    weights: list[Any] = [getattr(layer, "weight", None) for layer in layers]
    bias: Any = getattr(layers.gate_out, "bias", None)
    if not all(map(_is_product, layers, (*[None] * 7, bias))) or not is_eager(x, bias, *weights):
        decay, gate = layers.decay_out(layers.decay_in(x)), layers.gate_out(layers.gate_in(x))
        return torch.cat([layers.q(x), layers.k(x), layers.v(x)], -1), decay, layers.beta(x), gate
    kind = x.device.type
    tensors = [x, bias, *weights]
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        tensors = [t.to(torch.get_autocast_dtype(kind)) for t in tensors]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        own = None if convolutions is None else _served(tensors[0], tensors[2:5], convolutions)
        *first, decay, beta, gate = _Project.apply(own, *tensors, *(() if own is None else own.weights))
        return first[0] if own is None else first, decay, beta, gate
    mixed, decay, beta, gate = _products(tensors[0], tensors[1], Projections(*tensors[2:]))[0]
    return mixed, decay, beta, gate


COUNT = len(Projections._fields)


def _is_product(layer: nn.Module, bias: Tensor | None) -> bool:
    """Whether a call of the layer is nothing but a product with its weight, and this bias."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return type(layer) is nn.Linear and layer.bias is bias and not hooks


class _Served(NamedTuple):
    """Convolutions that a backend serves: with the memo of its calls, and memory [B, T, D] for what they read."""

    backend: Backend
    memo: dict
    mixed: Tensor
    weights: Sequence[Tensor]
    parts: Sequence[Sequence[int]]
    cu_seqlens: Tensor | None

    def request(self, mixed: Tensor, weight: Tensor, **more: Any) -> ShortConvolutionRequest:
        return ShortConvolutionRequest(x=mixed, weight=weight, cu_seqlens=self.cu_seqlens, memo=self.memo, **more)


def _served(x: Tensor, weights: Sequence[Tensor], c: Convolutions) -> _Served | None:
    mixed = x.new_empty(*c.batch, sum(t.shape[0] for t in weights))
    if not mixed.numel():
        return None
    others = (*c.weights, c.cu_seqlens)
    own, memo = backend_for("short_convolution", mixed, others, ("of projections", *c.parts), c.backend)
    return None if own is None else _Served(own, memo, mixed, c.weights, c.parts, c.cu_seqlens)


def _products(
    x: Tensor, bias: Tensor, w: Projections, mixed: Tensor | None = None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """The results of ``project``, the first in ``mixed``, and the inputs of both gates' second products."""
    large = [t.shape[0] for t in w[:3]]
    if mixed is None:
        mixed = x.new_empty(x.shape[0], sum(large))
    for weight, part in zip(w, mixed.split(large, 1), strict=False):
        torch.mm(x, weight.t(), out=part)
    small = [t.shape[0] for t in w[3:6]]
    decay, gate, beta = (x @ torch.cat(w[3:6]).t()).split(small, 1)
    return (mixed, decay @ w.decay_out.t(), beta, torch.addmm(bias, gate, w.gate_out.t())), (decay, gate)


class _Project(torch.autograd.Function):
    """``_products`` and the convolutions that a backend serves, with a backward."""

    @staticmethod
    def forward(ctx: Any, own: _Served | None, x: Tensor, bias: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        w = Projections(*weights[:COUNT])
        if own is None:
            results, low = _products(x, bias, w)
            ctx.save_for_backward(x, *low, *weights)
        else:
            results, low = _products(x, bias, w, own.mixed.flatten(0, 1))
            weight = torch.cat([*own.weights]).squeeze(1)
            found = own.backend.result("kda_core_short_convolution_forward", own.request(own.mixed, weight))
            ctx.save_for_backward(x, *low, *w, own.mixed, weight)
            results = (*in_parts(found.o, own.parts), *results[1:])
            # What is saved must not live longer than autograd lets it.
            own = own._replace(mixed=x.new_empty(0), weights=())
        ctx.own = own
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        x, decay, gate, *kept = ctx.saved_tensors
        w = Projections(*kept[:COUNT])
        of_x, of_bias, *needed = ctx.needs_input_grad[1:]
        needs = Projections(*needed[:COUNT])
        *first, grad_decay, grad_beta, grad_gate = grads
        sizes = [t.shape[0] for t in w]
        of_convolutions: Sequence[Tensor | None] = ()
        if ctx.own is None:
            grad_mixed = first[0]
        else:
            given = dict(zip(GRADIENTS, [t.flatten(2) for t in first], strict=True))
            request = ctx.own.request(
                *kept[COUNT:], parts=tuple(sizes[:3]), **given, needs_grad=frozenset({"x", "weight"})
            )
            found = ctx.own.backend.result("kda_core_short_convolution_backward", request).grads
            grad_mixed = found["x"].flatten(0, 1)
            of_convolutions = found["weight"].unsqueeze(1).split(sizes[:3])
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
        of_weights = [part.t() @ x if wanted else None for part, wanted in zip(parts, needs, strict=False)]
        of_weights += (small.t() @ x).split(sizes[3:6]) if any(needs[3:6]) else [None] * 3
        of_weights.append(grad_decay.t() @ decay if needs.decay_out else None)
        of_weights.append(grad_gate.t() @ gate if needs.gate_out else None)
        return None, grad, grad_gate.sum(0) if of_bias else None, *of_weights, *of_convolutions
