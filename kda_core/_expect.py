"""Expectations of the checks of arguments: each raises TypeError or ValueError naming the argument and what came."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.masked import is_masked_tensor
from torch.nn.parameter import Parameter, is_lazy

from kda_core.request import DATA, Request

DATA_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_STEPS = 10_000


def fail(argument: str, expected: str, actual: str) -> NoReturn:
    raise ValueError(f"{argument}: expected {expected}, got {actual}")


def shape_of(t: Tensor) -> str:
    return str(list(t.shape))


def names_of(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def tensor(name: str, t: Any, dtypes: Sequence[torch.dtype], device: torch.device | None = None, why: str = "") -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(t).__name__}")
    dense(name, t)
    if t.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {names_of(dtypes)}{why}, got {names_of((t.dtype,))}")
    if device is not None and t.device != device:
        fail(name, f"a tensor on {device}, where q is", f"one on {t.device}")


def dense(name: str, t: Tensor) -> None:
    if t.is_nested:
        hint = " (pack its sequences one behind the other, with cu_seqlens)" if name in DATA else ""
        raise TypeError(f"{name}: expected a dense (strided) tensor, got a nested one with layout {t.layout}{hint}")
    if t.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense (strided) tensor, got layout {t.layout}")
    if t.is_quantized:
        raise TypeError(f"{name}: expected a dense (strided) tensor, got a quantized one of {names_of((t.dtype,))}")
    if type(t) is Tensor:
        return
    if hasattr(t, "device_mesh"):
        raise TypeError(
            f"{name}: expected a plain tensor, as q is, got a DTensor; make DTensors of all, or pass its to_local()"
        )
    if is_lazy(t):
        raise TypeError(f"{name}: expected a tensor, got a parameter that has not been initialised")
    if is_masked_tensor(t):
        raise TypeError(f"{name}: expected a dense (strided) tensor, got a masked one")


def shape(name: str, t: Tensor, expected: tuple[int, ...], symbols: str) -> None:
    if tuple(t.shape) != expected:
        fail(name, f"shape {symbols} = {list(expected)}", shape_of(t))


def flag(name: str, value: Any) -> None:
    """Raise unless ``value`` is a bool: an option that merely counts as true or false may be another argument's."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")


def int64(name: str, value: Any) -> None:
    integer(name, value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        fail(name, "a number of 64 bits", f"{value}")


def number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")


def is_normal(value: float, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` holds a number with full precision: it neither overflows nor is subnormal."""
    limits = torch.finfo(dtype)
    return limits.tiny <= abs(value) <= limits.max


def normal_range(dtype: torch.dtype) -> str:
    limits = torch.finfo(dtype)
    return f"of a size from {limits.tiny:.2g} to {limits.max:.2g}, as {names_of((dtype,))} holds it"


def no_overlap(name: str, t: Tensor) -> None:
    """Refuse a tensor as a place to write to where elements share memory."""
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if size > 1 and stride == 0:
            fail(name, "memory of its own for every element", f"an expanded tensor with strides {tuple(t.stride())}")
    if type(t) in (Tensor, Parameter) and meets_itself(t):  # sizes of traced tensors may be symbols
        fail(name, "memory of its own for every element", f"overlapping ones with strides {tuple(t.stride())}")


def own_memory(tensors: Mapping[str, Any], written: Iterable[str]) -> None:
    """Refuse arguments that are written to and share memory with another one; those that are no tensors are passed."""
    others = {n: (t, b := t.data_ptr(), b + extent(t)) for n, t in tensors.items() if type(t) in (Tensor, Parameter)}
    for name in written:
        if name not in others:
            continue
        target, first, last = others.pop(name)
        for other, (t, begin, end) in others.items():
            if begin < last and first < end and t.device == target.device and share_memory(target, t):
                same = target.data_ptr() == t.data_ptr()
                fail(name, "memory of its own", f"the memory of {other}" if same else f"memory that {other} overlaps")


def rows(name: str, t: Tensor) -> None:
    """Refuse a tensor as a place to write to unless its last dimension is contiguous and no elements share memory."""
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        fail(name, "a contiguous last dimension", f"strides {tuple(t.stride())}")
    no_overlap(name, t)


def state_dtypes(r: Request) -> tuple[torch.dtype, ...]:
    """Dtypes that states of a call may have."""
    return (*STATE_DTYPES, torch.float64) if r.q.dtype == torch.float64 else STATE_DTYPES


# Two tensors share a byte where a sum of strides, each times a number below its size, falls on a given difference. The
# search is exact; it gives up after many steps, which only unusual strides take, and then finds nothing.


def extent(t: Tensor | None) -> int:
    """Bytes from the first element to behind the last one; 0 without elements."""
    return 0 if t is None else _extent(t.element_size(), t.shape, t.stride())


@functools.lru_cache(maxsize=1024)
def _extent(size: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return 0 if 0 in shape else size * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether some byte belongs to both tensors (of one device)."""
    begins = a.data_ptr(), b.data_ptr()
    distance = begins[1] - begins[0]
    # Tensors on the meta device begin at 0.
    if not all(begins) or not a.numel() or not b.numel() or not (-extent(b) < distance < extent(a)):
        return False
    return _meet(distance, a.element_size(), _steps(a), b.element_size(), _steps(b))


def meets_itself(t: Tensor) -> bool:
    """Whether two elements lie in the same place."""
    steps = _steps(t) if t.numel() else ()
    reach = 0
    for step, most in sorted(steps):
        if step <= reach:
            break
        reach += step * most
    else:
        # Every step leaves what smaller ones reach behind it, as those of most tensors do.
        return False
    # Two places are equal where a sum of steps, each times a difference of two indices, is zero. Take the first of the
    # differences that are not zero as positive; all are shifted so that none is negative.
    for i, (step, most) in enumerate(steps):
        target = sum(s * n for s, n in steps[i + 1 :]) - step
        if _reaches([(step, most - 1), *((s, 2 * n) for s, n in steps[i + 1 :])], target, target):
            return True
    return False


def _steps(t: Tensor) -> tuple[tuple[int, int], ...]:
    """(stride in bytes, largest index) of every dimension with more than one element."""
    size = t.element_size()
    return tuple((s * size, n - 1) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1)


@functools.lru_cache(maxsize=1024)
def _meet(distance: int, size: int, steps: tuple, other_size: int, other_steps: tuple) -> bool:
    """``share_memory`` for tensors that begin ``distance`` bytes apart."""
    # Places of the other tensor are counted from its last one down, so that all terms are positive.
    target = distance + sum(step * most for step, most in other_steps)
    return _reaches([*steps, *other_steps], target - size + 1, target + other_size - 1)


def _reaches(terms: Iterable[tuple[int, int]], low: int, high: int) -> bool:
    """Whether some sum of step times n, with n from 0 to its largest value, lies from ``low`` to ``high``."""
    merged: Counter[int] = Counter()
    for step, most in terms:
        merged[step] += most
    ordered = sorted(merged.items(), reverse=True)
    # Largest sums of the terms from each one on.
    rests = [*itertools.accumulate((step * most for step, most in reversed(ordered)), initial=0)][::-1]
    left = MOST_STEPS

    def search(i: int, low: int, high: int) -> bool:
        nonlocal left
        left -= 1
        if left < 0 or low > rests[i] or high < 0:
            return False
        if low <= 0 or high >= rests[i]:
            return True
        step, most = ordered[i]
        fewest = max(0, -((rests[i + 1] - low) // step))
        return any(
            search(i + 1, low - n * step, high - n * step) for n in range(min(most, high // step), fewest - 1, -1)
        )

    return search(0, low, high)
