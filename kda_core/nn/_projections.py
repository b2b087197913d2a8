"""A layer's projections: a product for each large weight, one for all small ones, the gates', and the output's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kda_core._loaded import Backend
from kda_core._signature import is_plain
from kda_core._torch_private import autocasts, cat, has_global_hooks
from kda_core.nn._convolution import GRADIENTS, in_parts
from kda_core.nn._dispatch import backend_for, is_eager
from kda_core.nn._norm import GatedRMSNorm, NormedProduct, gated_rms_norm
from kda_core.nn._once import differentiable_once
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
        parts: (heads, channels) of q, k and v.
        cu_seqlens, backend: as in ``short_convolution``.
    """

    weights: Sequence[Tensor]
    parts: Sequence[Sequence[int]]
    cu_seqlens: Tensor | None
    backend: str | None


def project(
    x: Tensor, layers: Projections, channels: tuple[int, int], convolutions: Convolutions | None = None
) -> tuple[Tensor | Sequence[Tensor], Tensor, Tensor, Tensor]:
    """``x`` [B, T, D] through a layer's projections.

    Returns:
        q, k and v side by side [B, T, channels]; decay input [B, T, HV, K], beta [B, T, HV] and gate [B, T, HV, V],
        where ``channels`` is (K, V). With ``convolutions``, where a backend serves them and a gradient is needed, q, k
        and v come convolved, as three tensors [B, T, heads, channels].

    The host limits a layer's step, and a node of autograd takes as long as a kernel: eager calls with gradients are one
    node with all their views. The products of q, k and v write into parts of one tensor, so that no weight is copied
    and what follows is one launch; backwards they add up in one gradient of x. Layers that are more than a product
    (hooks, adapters, quantised or distributed weights), and layers under a compiler, are called one by one.
    """
    weights: list[Any] = [*map(product_weight, list(layers)[:-1]), product_weight(layers.gate_out, biased=True)]
    if any(w is None for w in weights) or not is_eager(x, bias := layers.gate_out.bias, *weights):
        # Rows, because torch's linear layers take fewer steps for two dimensions, and add a bias on the way.
        batch, x = x.shape[:2], x.flatten(0, 1)
        decay, gate = layers.decay_out(layers.decay_in(x)), layers.gate_out(layers.gate_in(x))
        mixed = torch.cat([layers.q(x), layers.k(x), layers.v(x)], -1)
        return _shaped((mixed, decay, layers.beta(x), gate), batch, channels)
    tensors = [x, bias, *weights]
    dtype = _autocast_dtype(x)
    if dtype is not None:
        tensors = [t.to(dtype) for t in tensors]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        own = None if convolutions is None else _served(tensors[0], tensors[2:5], convolutions)
        *first, decay, beta, gate = _Project.apply(own, channels, *tensors, *(() if own is None else own.weights))
        return first[0] if own is None else first, decay, beta, gate
    x, bias, *weights = tensors
    results = _products(x.flatten(0, 1), bias, Projections(*weights), torch.cat(weights[3:6]))[0]
    return _shaped(results, x.shape[:2], channels)


COUNT = len(Projections._fields)


def _shaped(
    results: Sequence[Tensor], batch: Sequence[int], channels: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of projections of rows, as ``project`` returns them."""
    mixed, decay, beta, gate = results
    # The heads at hand: with tensor parallelism a layer has some of them.
    K, V = channels
    HV = beta.shape[-1]
    mixed, beta = mixed.view(*batch, mixed.shape[-1]), beta.view(*batch, HV)
    return mixed, decay.view(*batch, HV, K), beta, gate.view(*batch, HV, V)


_READ = ("__call__", "forward", "weight", "bias")


def is_bare(layer: Any, kind: type[nn.Module]) -> bool:
    """Whether a call of a layer runs the forward of that class and nothing else, no hook of its own or of all.

    A subclass may change anything but the call and the parameters, as those of torchtitan do.
    """
    own = type(layer)
    same = own is kind or (
        issubclass(own, kind) and all(getattr(own, n, None) is getattr(kind, n, None) for n in _READ)
    )
    if not same:
        return False
    if "forward" in layer.__dict__ or has_global_hooks():  # accelerate's replace forward
        return False
    return not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def product_weight(layer: Any, biased: bool = False) -> Tensor | None:
    """The weight of a layer whose call is nothing but a product with it, with a bias or without; None of others."""
    if not is_bare(layer, nn.Linear):
        return None
    own = layer._parameters
    return own.get("weight") if (own.get("bias") is not None) == biased else None


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which a product of x runs where autocast is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if x.dtype != torch.float64 and autocasts(kind) else None


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
    mixed = x.new_empty(*x.shape[:2], sum([t.shape[0] for t in weights]))
    if not mixed.numel():
        return None
    others = (*c.weights, c.cu_seqlens)
    own, memo = backend_for("short_convolution", mixed, others, ("of projections", *c.parts), c.backend)
    return None if own is None else _Served(own, memo, mixed, c.weights, c.parts, c.cu_seqlens)


def _products(
    x: Tensor, bias: Tensor, w: Projections, small: Tensor, mixed: Tensor | None = None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Projections of rows, the first in ``mixed``, and the inputs of both gates' second products.

    Args:
        small: the weights ``decay_in``, ``gate_in`` and ``beta`` behind one another.
    """
    large = [t.shape[0] for t in w[:3]]
    if mixed is None:
        mixed = x.new_empty(x.shape[0], sum(large))
    for weight, part in zip(w, mixed.split_with_sizes(large, 1), strict=False):
        torch.mm(x, weight.t(), out=part)
    decay, gate, beta = torch.mm(x, small.t()).split_with_sizes([t.shape[0] for t in w[3:6]], 1)
    return (mixed, torch.mm(decay, w.decay_out.t()), beta, torch.addmm(bias, gate, w.gate_out.t())), (decay, gate)


class _Project(torch.autograd.Function):
    """``_products`` and the convolutions that a backend serves, with a backward."""

    @staticmethod
    def forward(
        ctx: Any, own: _Served | None, channels: tuple[int, int], x: Tensor, bias: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        w = Projections(*weights[:COUNT])
        small = torch.cat(w[3:6])
        rows = x.flatten(0, 1)
        if own is None:
            results, low = _products(rows, bias, w, small)
            mixed, *others = _shaped(results, x.shape[:2], channels)
            ctx.save_for_backward(rows, *low, small, *w)
            results = (mixed, *others)
        else:
            results, low = _products(rows, bias, w, small, own.mixed.flatten(0, 1))
            _, *others = _shaped(results, x.shape[:2], channels)
            weight = cat(own.weights).squeeze(1)
            found = own.backend.result("kda_core_short_convolution_forward", own.request(own.mixed, weight))
            ctx.save_for_backward(rows, *low, small, *w, own.mixed, weight)
            results = (*in_parts(found.o, own.parts), *others)
            # Saved tensors must not live longer than autograd lets them.
            own = own._replace(mixed=x.new_empty(0), weights=())
        ctx.own, ctx.shape = own, x.shape
        return results

    @staticmethod
    @differentiable_once("KimiDeltaAttention")
    def backward(ctx: Any, saved: Sequence[Tensor], *grads: Tensor) -> tuple:
        rows, decay, gate, narrow_weights, *kept = saved
        w = Projections(*kept[:COUNT])
        of_x, of_bias, *needed = ctx.needs_input_grad[2:]
        needs = Projections(*needed[:COUNT])
        *first, grad_decay, grad_beta, grad_gate = grads
        grad_decay, grad_gate = grad_decay.flatten(2).flatten(0, 1), grad_gate.flatten(2).flatten(0, 1)
        sizes = [t.shape[0] for t in w]
        large, narrow = sizes[:3], sizes[3:6]
        of_convolutions: Sequence[Tensor | None] = ()
        if ctx.own is None:
            grad_mixed = first[0].flatten(0, 1)
        else:
            given = dict(zip(GRADIENTS, [t.flatten(2) for t in first], strict=True))
            request = ctx.own.request(*kept[COUNT:], parts=tuple(large), **given, needs_grad=_OF_CONVOLUTION)
            found = ctx.own.backend.result("kda_core_short_convolution_backward", request).grads
            grad_mixed = found["x"].flatten(0, 1)
            of_convolutions = found["weight"].unsqueeze(1).split_with_sizes(large)
        small = rows.new_empty(rows.shape[0], sum(narrow))
        low_decay, low_gate, low_beta = small.split_with_sizes(narrow, 1)
        torch.mm(grad_decay, w.decay_out, out=low_decay)
        torch.mm(grad_gate, w.gate_out, out=low_gate)
        low_beta.copy_(grad_beta.flatten(0, 1))
        grad = None
        if of_x:
            grad = torch.mm(small, narrow_weights)
            for part, weight in zip(grad_mixed.split_with_sizes(large, 1), w, strict=False):
                grad.addmm_(part, weight)
            grad = grad.view(ctx.shape)
        of_weights = _of_weights(grad_mixed, rows, large, needs[:3])
        of_weights += _of_weights(small, rows, narrow, needs[3:6])
        of_weights.append(torch.mm(grad_decay.t(), decay) if needs.decay_out else None)
        of_weights.append(torch.mm(grad_gate.t(), gate) if needs.gate_out else None)
        return None, None, grad, grad_gate.sum(0) if of_bias else None, *of_weights, *of_convolutions


_OF_CONVOLUTION = frozenset({"x", "weight"})


def _of_weights(grad: Tensor, rows: Tensor, sizes: list[int], needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of weights of products of the same rows, in one product where all are needed."""
    if all(needs):
        return [*torch.mm(grad.t(), rows).split_with_sizes(sizes)]
    parts = grad.split_with_sizes(sizes, 1)
    return [torch.mm(part.t(), rows) if wanted else None for part, wanted in zip(parts, needs, strict=True)]


def normed_projection(x: Tensor, gate: Tensor, norm: Any, layer: Any, backend: str | None) -> Tensor:
    """``gated_rms_norm`` of x [B, T, HV, V], and a layer's projection of all its channels: [B, T, D].

    Where a backend serves the norm and a gradient is needed, both are one node of autograd.
    """
    bare = is_bare(norm, GatedRMSNorm)
    weight = product_weight(layer) if bare and not torch.compiler.is_compiling() else None
    if x.numel() and weight is not None and is_plain(weight) and torch.is_grad_enabled():
        weight = weight.to(_autocast_dtype(x) or weight.dtype)
        given = x, gate, norm.weight, weight
        if weight.dtype == x.dtype and any(t.requires_grad for t in given):
            own, memo = backend_for("gated_rms_norm", x, given[1:3], (norm.eps,), backend)
            if own is not None:
                return NormedProduct.apply(own, memo, norm.eps, *given)
    y = gated_rms_norm(x, gate, norm.weight, norm.eps, backend) if bare else norm(x, gate, backend=backend)
    return layer(y.flatten(2).flatten(0, 1)).unflatten(0, x.shape[:2])
