"""The short convolution of a layer: depthwise, causal, with SiLU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kda_core import _expect
from kda_core._checks import python_value
from kda_core._loaded import Backend
from kda_core.nn._checks import expect_convolution, expect_same_device, expect_tensor
from kda_core.nn._dispatch import backend_for, is_eager
from kda_core.nn._once import differentiable_once
from kda_core.request import ShortConvolutionRequest


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    silu: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution over the last W tokens, then SiLU: the one before the operator in a KDA layer.

    ``z[t] = bias + sum_j weight[:, j] * x[t - (W - 1) + j]`` and ``y = z * sigmoid(z)``, in float32, or float64
    for float64 x. Source: Kimi Linear, arXiv 2510.26692, section 4. Symbols: B batch, T tokens, D channels, W taps,
    N sequences (B, or len(cu_seqlens) - 1).

    Args:
        x: [B, T, D], floating, any strides.
        weight: [D, W] or [D, 1, W], W >= 2, any floating dtype.
        bias: [D] or None.
        initial_state: [N, W - 1, D], any floating dtype: the inputs before the first token, oldest first; None: zeros.
        output_final_state: also return the last W - 1 inputs of each sequence.
        inplace_final_state: write them over ``initial_state``; not differentiable.
        cu_seqlens: [N + 1], int32 or int64, on the device of x: boundaries of packed sequences (B = 1), as in
            ``chunk_kda``. Rows behind the last boundary may hold anything; their output and gradients are zero.
        silu: whether SiLU follows.
        backend: name of a backend, as in ``chunk_kda``.

    Returns:
        ``(y, final_state)``: y [B, T, D] in the dtype of x; final_state [N, W - 1, D] in the dtype of the initial state
        (default: of x), ``initial_state`` itself when that was written, None unless ``output_final_state``.

    Raises:
        ValueError: a wrong shape, device or combination.
        TypeError: a wrong type or dtype.
        UnsupportedCall, BackendNotFound, BrokenBackend: as ``chunk_kda``, for a backend that was asked for.
    """
    flags = {"output_final_state": output_final_state, "inplace_final_state": inplace_final_state, "silu": silu}
    flags = {name: python_value(value) for name, value in flags.items()}
    for name, value in flags.items():
        _expect.flag(name, value)
    if isinstance(weight, Tensor) and weight.dim() == 3:
        weight = weight.squeeze(1)
    _check(x, weight, bias, initial_state, cu_seqlens)
    if flags["inplace_final_state"]:
        if initial_state is None:
            raise ValueError("inplace_final_state: needs an initial_state")
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias, initial_state)):
            raise ValueError("inplace_final_state: is not differentiable; detach the inputs, or use torch.no_grad()")
    (y,), final = convolve(x, weight, bias, initial_state, cu_seqlens, flags, (x.shape[2:],), backend)
    return y, final


class ShortConvolution(nn.Conv1d):
    """``short_convolution`` as a module. A layer calls it where hooks wait for that, and otherwise reads its weight."""

    def forward(self, x: Tensor, initial_state: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        return short_convolution(x, self.weight, self.bias, initial_state, **options)


MAX_TAPS = 8
"""Taps up to which backends' hooks are asked: they hold as many rows in registers."""


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None,
    flags: dict[str, bool], parts: Sequence[Sequence[int]], backend: str | None,
) -> tuple[Sequence[Tensor], Tensor | None]:  # fmt: skip
    """``short_convolution`` of checked arguments, with its output in up to three parts.

    Args:
        parts: shapes of the parts' channels, which follow each other: (D,) or (heads, channels). Their gradients need
            not be put together for a backend.
    """
    tensors = (x, weight, bias, state, cu_seqlens)
    sizes = [math.prod(part) for part in parts]
    own, memo = None, None
    if x.numel() and weight.shape[1] <= MAX_TAPS:
        options = (*flags.values(), *sizes)
        own, memo = backend_for("short_convolution", x, tensors[1:], options, backend)
    inplace = flags["inplace_final_state"]
    final: Tensor | None
    if own is None:
        y, last = in_torch(*tensors, flags["silu"], flags["output_final_state"] or inplace)
        if last is not None:
            last = last.to(x.dtype if state is None else state.dtype)
            if inplace and state is not None:
                last = state.copy_(last)
        final = last if flags["output_final_state"] else None
    elif not inplace and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        *found, final = _Convolution.apply(own, memo, flags, parts, *tensors)
        return found, final
    else:
        result = own.result("kda_core_short_convolution_forward", _request(tensors, flags, memo))
        y, final = result.o, state if inplace and flags["output_final_state"] else result.final_state
    return in_parts(y, parts), final


def in_parts(y: Tensor, parts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of y [B, T, D]: the parts of its channels, each [B, T, *part]."""
    split = y.split([math.prod(part) for part in parts], -1) if len(parts) > 1 else (y,)
    return [t.unflatten(-1, part) if len(part) > 1 else t for t, part in zip(split, parts, strict=True)]


def _check(x: Any, weight: Any, bias: Any, state: Any, cu_seqlens: Any) -> None:
    expect_tensor("x", x, 3)
    B, T, D = x.shape
    N = B if cu_seqlens is None else sequences(cu_seqlens, B, T)
    expect_convolution(D, N, weight=weight, bias=bias, initial_state=state)
    expect_same_device(x, {"weight": weight, "bias": bias, "initial_state": state, "cu_seqlens": cu_seqlens})


def sequences(cu_seqlens: Any, B: int, T: int) -> int:
    """The number of packed sequences; raises for boundaries that are none."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        found = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens: expected an int32 or int64 tensor, got {found}")
    if B != 1 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected [N + 1] with B = 1, got {list(cu_seqlens.shape)} with B = {B}")
    if cu_seqlens.device.type == "cpu" and is_eager(cu_seqlens):
        bounds = cu_seqlens.tolist()
        if bounds != sorted(bounds) or bounds[0] != 0 or bounds[-1] > T:
            raise ValueError(f"cu_seqlens: expected boundaries from 0 to at most T = {T}, not decreasing")
    return cu_seqlens.shape[0] - 1


def in_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None, silu: bool,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``short_convolution`` in torch, for any device: y, and with ``keep`` the final state in the compute dtype."""
    # These return at once where the dtype stays; to() takes as long as a small operator.
    widen = Tensor.double if x.dtype == torch.float64 else Tensor.float
    reach, T = weight.shape[1] - 1, x.shape[1]
    taps, inputs = widen(weight).unbind(1), widen(x)
    state = None if state is None else widen(state)
    if cu_seqlens is None:
        final, real = None, None
        if T == 1 and state is not None and not keep:
            seen = [*state.unsqueeze(2).unbind(1), inputs]
        else:
            padded = F.pad(inputs, (0, 0, reach, 0)) if state is None else torch.cat([state, inputs], dim=1)
            seen = [padded[:, j : j + T] for j in range(reach + 1)]
            final = padded[:, T:].clone() if keep else None
    else:
        seen, final, real = _packed(inputs[0], state, cu_seqlens, reach, keep)
    z = seen[0] * taps[0]
    for rows, tap in zip(seen[1:], taps[1:], strict=True):
        z = torch.addcmul(z, rows, tap)
    z = z if bias is None else z + widen(bias)
    y = (F.silu(z) if silu else z).type_as(x)
    return y if real is None else y.where(real[:, None], 0), final


def _packed(
    x: Tensor, state: Tensor | None, cu_seqlens: Tensor, reach: int, keep: bool
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Rows ``reach``, ..., 1 and 0 before each row of its sequence, each [1, T, D]; the final state; rows in use."""
    T, N = x.shape[0], cu_seqlens.shape[0] - 1
    bounds = cu_seqlens.long()
    rows = torch.arange(T, device=x.device)
    if N == 0:
        return [torch.zeros_like(x)[None]] * (reach + 1), x.new_empty(0, reach, x.shape[1]), rows < 0
    sequence = torch.searchsorted(bounds, rows, right=True) - 1
    real = sequence < N
    # Anything may stand behind the last sequence, NaN too.
    x = x.where(real[:, None], 0)
    position = rows - bounds[sequence]
    owner = sequence.clamp(max=N - 1)
    seen = []
    for lag in range(reach, 0, -1):
        before = F.pad(x, (0, 0, lag, 0))[:T]
        outside = 0 if state is None else state[owner, (position - lag + reach).clamp(0, reach - 1)]
        seen.append(before.where((position >= lag)[:, None], outside)[None])
    if not keep:
        return [*seen, x[None]], None, real  # what a compiler need not see puts no limits on N
    # Numbers into the initial state's rows followed by the sequence's.
    places = (bounds.diff()[:, None] + torch.arange(reach, device=x.device)).long()
    within = F.pad(x, (0, 0, 0, 1))[(bounds[:-1, None] + places - reach).clamp(0, T)]
    outside = 0 if state is None else state.gather(1, places.clamp(max=reach - 1)[..., None].expand_as(state))
    return [*seen, x[None]], within.where((places >= reach)[..., None], outside), real


def _request(tensors: Sequence[Any], flags: dict[str, bool], memo: Any, **more: Any) -> ShortConvolutionRequest:
    named = dict(zip(("x", "weight", "bias", "initial_state", "cu_seqlens"), tensors, strict=True))
    return ShortConvolutionRequest(**named, memo=memo, **flags, **more)  # type: ignore[arg-type]


_DIFFERENTIABLE = ("x", "weight", "bias", "initial_state")
GRADIENTS = ("grad_output", "grad_second", "grad_third")
_BEFORE = 4
"""Arguments of ``_Convolution`` ahead of the tensors."""


class _Convolution(torch.autograd.Function):
    """A backend's convolution."""

    @staticmethod
    def forward(
        ctx: Any, backend: Backend, memo: dict, flags: dict[str, bool], parts: Sequence, *tensors: Tensor | None
    ) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.call = backend, memo, flags, parts
        result = backend.result("kda_core_short_convolution_forward", _request(tensors, flags, memo))
        return *in_parts(result.o, parts), result.final_state

    @staticmethod
    @differentiable_once("short_convolution")
    def backward(ctx: Any, saved: Sequence[Tensor | None], *grads: Any) -> tuple:
        backend, memo, flags, parts = ctx.call
        *given, grad_final = grads
        needed = ctx.needs_input_grad[_BEFORE:]
        needs = frozenset(n for n, wanted in zip(_DIFFERENTIABLE, needed, strict=False) if wanted)
        gradients = dict(zip(GRADIENTS, [grad.flatten(2) for grad in given], strict=False))
        sizes = tuple(map(math.prod, parts)) if len(parts) > 1 else ()
        more = {"parts": sizes, **gradients, "grad_final_state": grad_final, "needs_grad": needs}
        request = _request(saved, flags, memo, **more)
        found = backend.result("kda_core_short_convolution_backward", request).grads
        return (*[None] * _BEFORE, *(found[n] if n in needs else None for n in _DIFFERENTIABLE), None)
