"""Whether tensors share memory, from addresses, strides and sizes: a call must not write where it still reads.

Two tensors share a byte where a sum of strides, each times a number below its size, falls on a given difference. The
search is exact; it gives up after many steps, which only unusual strides take, and then finds nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable

from torch import Tensor

MOST_STEPS = 10_000


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
