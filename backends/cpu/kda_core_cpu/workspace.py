"""Memory of a call: output, scratch, products into it; elementwise functions whose bits are those of any size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kda_core.request import Request

_CPU = torch.device("cpu")
"""An object, because torch parses a device's name in every call."""

_VECTOR_LOOP = 64
"""Elements that divide evenly over torch's vector loops (two registers of up to 16 elements) in each of two threads."""


class Workspace:
    """Scratch memory of one call, reused by every window; a buffer is named and grows to its largest use."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[str, dict[tuple[int, ...], Tensor]] = {}

    def __call__(self, name: str, *shape: int, zero: bool = False) -> Tensor:
        """A contiguous tensor of ``shape`` with stale content; with ``zero``, a buffer is zero when it is new."""
        views = self._views.get(name)
        if views is None:
            views = self._views[name] = {}
        view = views.get(shape)
        if view is not None:
            return view
        numel = math.prod(shape)
        whole = _whole_vectors(numel)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < whole:
            views.clear()
            buffer = self._buffers[name] = (torch.zeros if zero else torch.empty)(whole, dtype=self.dtype, device=_CPU)
        view = views[shape] = (buffer if buffer.numel() == numel else buffer[:numel]).view(shape)
        return view


def empty_output(request: Request) -> Tensor:
    """The tensor for o, with any content."""
    shape = (request.B, request.T, request.HV, request.V)
    return torch.empty(shape, dtype=request.q.dtype, device=request.q.device) if request.out is None else request.out


def with_slack(scratch: Tensor) -> Tensor:
    """A scratch tensor, flat, with the memory behind it up to a multiple of the widest vector loop.

    torch computes the last few elements of a tensor with another exp than the rest. Elementwise functions run on
    this view instead, so that a row's bits do not depend on the number of rows.
    """
    return scratch.as_strided((_whole_vectors(scratch.numel()),), (1,))


def product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Batched a·b; torch.bmm writes ``out`` once more before MKL does, up to half the time of small matrices."""
    return out.baddbmm_(a, b, beta=0)


def _whole_vectors(numel: int) -> int:
    return -(-numel // _VECTOR_LOOP) * _VECTOR_LOOP
