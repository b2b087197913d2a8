"""Triton's interpreter with products of 16-bit operands as Hopper's matrix unit does them.

The interpreter, and the kit's correction of it, add exactly or in float32. The unit aligns the products of 16 (k = 16)
and the accumulator to the largest of them, cuts each at the 25th bit from its leading one, adds exactly and cuts the
result to float32. With this model a prompt's final state has the error that an H200 gave it, 6.2e-6
(docs/notes/accuracy.md).
It changes the interpreter for the whole process: for scripts of tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from kda_core.testing.interpreter import DEPTH, correct_arithmetic

KEPT_BITS = 25
"""Bits of the largest summand, from its leading one down, below which the others are cut off."""


def _value(operand: Any) -> np.ndarray:
    if operand.dtype.scalar == tl.bfloat16:
        return (operand.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return operand.data.astype(np.float64)


def _exponent(x: np.ndarray) -> np.ndarray:
    """Exponent of the leading bit; of zero, so little that it counts for nothing."""
    return np.where(x == 0, -2000, np.frexp(np.abs(x))[1] - 1)


def _cut_to_float32(x: np.ndarray) -> np.ndarray:
    rounded = x.astype(np.float32)
    too_large = np.abs(rounded.astype(np.float64)) > np.abs(x)
    return np.where(too_large, np.nextafter(rounded, np.float32(0)), rounded)


def multiply(a: np.ndarray, b: np.ndarray, accumulator: np.ndarray) -> np.ndarray:
    """accumulator + a · b for finite [M, K], [K, N] of at most 11 significant bits and [M, N] float32."""
    total = accumulator.astype(np.float64)
    for k in range(0, a.shape[1], DEPTH):
        left, right = a[:, k : k + DEPTH], b[k : k + DEPTH]
        products = left[:, :, None] * right[None, :, :]
        largest = (_exponent(left)[:, :, None] + _exponent(right)[None]).max(1)
        step = np.ldexp(1.0, np.maximum(np.maximum(largest, _exponent(total)) - KEPT_BITS + 1, -1000))
        whole = np.trunc(products / step[:, None]).sum(1) + np.trunc(total / step)
        total = _cut_to_float32(whole * step).astype(np.float64)
    return total.astype(np.float32)


def emulate() -> None:
    """Let the interpreter multiply so, with all else as the kit corrects it."""
    correct_arithmetic()

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if a.dtype.scalar not in (tl.bfloat16, tl.float16):
            raise NotImplementedError(f"products of {a.dtype.scalar}")
        return interpreter.TensorHandle(multiply(_value(a), _value(b), d.data), d.dtype.scalar)

    builder: Any = interpreter.InterpreterBuilder
    builder.create_dot = create_dot
