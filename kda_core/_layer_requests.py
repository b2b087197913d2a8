"""Requests of the functions around the operator in a layer (``kda_core.nn``); ``request`` has them for backends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class ShortConvolutionRequest:
    """One checked call of ``kda_core.nn.short_convolution``, forward or backward. D channels, W taps.

    Attributes:
        x: [B, T, D], neither B, T nor D 0; any strides.
        weight: [D, W]; W >= 2.
        bias: [D] or None.
        initial_state: [N, W - 1, D], any strides, or None.
        cu_seqlens: [N + 1] or None.
        silu: whether SiLU follows.
        output_final_state: the final state is asked for.
        inplace_final_state: write it over ``initial_state``; then the result's ``final_state`` is None.
        parts: sizes of two or three parts of the channels, each with a gradient of its own backwards; (): one of all.
        grad_output, grad_second, grad_third: backward only: [B, T, part's size].
        grad_final_state: backward only: [N, W - 1, D] or None.
        needs_grad: backward only: names among "x", "weight", "bias", "initial_state".
        memo: as in ``Request``.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    silu: bool = True
    output_final_state: bool = False
    inplace_final_state: bool = False
    parts: tuple[int, ...] = ()
    grad_output: Tensor | None = None
    grad_second: Tensor | None = None
    grad_third: Tensor | None = None
    grad_final_state: Tensor | None = None
    needs_grad: frozenset[str] = frozenset()
    memo: dict[Any, Any] | None = field(default=None)

    @property
    def device(self) -> torch.device:
        return self.x.device


@dataclass(frozen=True, eq=False, kw_only=True)
class GatedNormRequest:
    """One checked call of ``kda_core.nn.gated_rms_norm``, forward or backward.

    Attributes:
        x, gate: [..., D], of one shape without a 0; any strides.
        weight: [D].
        eps: added to the mean of squares.
        grad_output: backward only: shape of x.
        needs_grad: backward only: names among "x", "gate", "weight".
        memo: as in ``Request``.
    """

    x: Tensor
    gate: Tensor
    weight: Tensor
    eps: float
    grad_output: Tensor | None = None
    needs_grad: frozenset[str] = frozenset()
    memo: dict[Any, Any] | None = field(default=None)

    @property
    def device(self) -> torch.device:
        return self.x.device
