"""A call's tensors and options in the form in which kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

from kda_core.request import Request

LEAST_BOUNDED_DECAY = -5.0
"""Least natural-log decay of a row for which the bounded form of decays holds (``decay.BOUNDED_SHIFT``)."""


def gate_kind(request: Request) -> str:
    """The kernels' name of a request's gate: "none", "softplus" or "bounded"."""
    if not request.use_gate_in_kernel:
        return "none"
    return "softplus" if request.lower_bound is None else "bounded"


def decays_bounded(request: Request) -> bool:
    """Whether each row's log decay is known, or promised, to be at least −5, in a dtype that can use it.

    The bounded form has exponents up to ±58: 2^58 does not fit float16, and costs float32 five of its bits.
    """
    if request.q.dtype != torch.bfloat16:
        return False
    if request.lower_bound is not None and request.lower_bound < LEAST_BOUNDED_DECAY:
        return False
    return request.safe_gate or gate_kind(request) == "bounded"


def has_contiguous_rows(x: Tensor) -> bool:
    """Whether kernels can read and write ``x`` itself: its last dimension is contiguous."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def rows_contiguous(x: Tensor) -> Tensor:
    """``x``, copied only when its last dimension is not contiguous (kernels take every other stride)."""
    return x if has_contiguous_rows(x) else x.contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    """A small tensor of parameters or boundaries, contiguous."""
    return None if x is None else x.contiguous()


def batch_strides(*tensors: Tensor) -> tuple[int, tuple[int, ...]]:
    """(unit, batch strides in units): the unit is 8 elements if it divides all strides, so that kernels see alignment.

    Strides of a batch of one are not used: they are 0.
    """
    if tensors[0].shape[0] <= 1:
        return 8, (0,) * len(tensors)
    unit = 1 if any(x.stride(0) % 8 for x in tensors) else 8
    return unit, tuple(x.stride(0) // unit for x in tensors)


def state_strides(state: Tensor | None, v_first: bool) -> tuple[int, int, int, int]:
    """Strides of a state by (sequence, head, K, V); zeros without a state."""
    if state is None:
        return 0, 0, 0, 0
    s_n, s_h, s_row, s_last = state.stride()
    return (s_n, s_h, s_last, s_row) if v_first else (s_n, s_h, s_row, s_last)
