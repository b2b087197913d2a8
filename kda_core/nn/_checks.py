"""Checks of the layer's functions: each error names the argument, and says what was expected and what came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kda_core import _expect


def expect_tensor(name: str, value: Any, rank: int | None = None) -> None:
    """A floating tensor, of a rank."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {value.dtype}")
    if rank is not None and value.dim() != rank:
        raise ValueError(f"{name}: expected {rank} dimensions, got shape {list(value.shape)}")


def expect_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """A tensor of this shape."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(value.shape)}")


def expect_convolution(D: int, N: int, **named: Any) -> None:
    """A convolution's weight [D, W], bias [D] and states [N, W - 1, D], in this order, by the names that a call has."""
    (of_weight, weight), (of_bias, bias), (of_state, state) = named.items()
    expect_tensor(of_weight, weight, 2)
    W = weight.shape[1]
    expect_shape(of_weight, weight, (D, W))
    if W < 2:
        raise ValueError(f"{of_weight}: expected at least two taps, got {W}")
    for name, value, shape in ((of_bias, bias, (D,)), (of_state, state, (N, W - 1, D))):
        if value is not None:
            expect_tensor(name, value, len(shape))
            expect_shape(name, value, shape)


def expect_same_device(x: Tensor, others: Mapping[str, Tensor | None]) -> None:
    """Tensors on the device of x."""
    for name, value in others.items():
        if value is not None and value.device != x.device:
            raise ValueError(f"{name}: expected {x.device}, the device of x, got {value.device}")


def expect_eps(name: str, value: Any) -> None:
    """A finite number of at least 0."""
    _expect.number(name, value)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value}")
