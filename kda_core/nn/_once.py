"""Backwards of the layer's autograd functions, which have no backward of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from kda_core import _torch_private
from kda_core._autograd import check_gradients
from kda_core.errors import NO_DOUBLE_BACKWARD


def differentiable_once(name: str) -> Callable[[Callable[..., tuple]], Callable[..., tuple]]:
    """Let a function ``(ctx, kept, *grads)`` be the backward of one called ``name``; ``kept`` are its saved tensors.

    It runs in the dtypes of its forward, in a region of autocast as well, and gets no negative views. Gradients of its
    results raise an error. With torch's ``once_differentiable`` they do so where all leaves are asked, and are left out
    in silence by ``torch.autograd.grad``: nothing leads from the results to a leaf.
    """

    def decorated(backward: Callable[..., tuple]) -> Callable[..., tuple]:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Tensor | None) -> tuple:
            # Read once: under activation checkpointing a second look at saved tensors is an error.
            kept = ctx.saved_tensors
            if not torch.compiler.is_compiling():
                check_gradients(name, grads, True)
            own: Sequence[Any] = [None if grad is None else grad.resolve_neg() for grad in grads]
            kind = own[0].device.type
            watched, autocasts = torch.is_grad_enabled(), _torch_private.autocasts(kind)
            if not watched and not autocasts:  # as in most steps, which the host limits
                return backward(ctx, kept, *own)
            with torch.no_grad(), _torch_private.without_autocast(kind):
                found = backward(ctx, kept, *own)
            if not watched:
                return found
            results = iter(_Once.apply(name, len(found), *found, *kept, *grads))
            return tuple([None if t is None else next(results) for t in found])

        return run

    return decorated


class _Once(torch.autograd.Function):
    """Gradients that depend on what they were computed from."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple([t.detach() for t in tensors[:count] if t is not None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(NO_DOUBLE_BACKWARD.format(op=ctx.name))
