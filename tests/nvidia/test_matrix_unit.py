"""Sums of decays are float32's own, or next to it, on a matrix unit that cuts what it adds (``matrix_unit.py``)."""

from __future__ import annotations

import json

import installed
import interpreted
import pytest

pytestmark = pytest.mark.end_to_end

installed.need_backend("nvidia")
installed.need_package("triton")

FURTHEST = 2.0**-23
"""From the sum, relative to it or to 1: half of float32's last place, and as much for the parts that are added."""


def errors() -> dict[str, float]:
    """Errors of sums of up to 16 decays, by function and decay, in a process where Triton interprets."""
    # A kernel sees no names of the function round it.
    global tl, FLOAT16_UNIT, selected_sum, split, through, whole_sum, interval_sum, split3
    import matrix_unit
    import torch
    import triton
    import triton.language as tl
    from kda_core_nvidia.backward_levels import interval_sum, split3

    from kda_core.triton_lib.decay import FLOAT16_UNIT, selected_sum, through, whole_sum
    from kda_core.triton_lib.parts import split

    @triton.jit
    def forward(x, y):
        r = tl.arange(0, 16)
        at = r[:, None] * 16 + r[None, :]
        tl.store(y + at, selected_sum(through(r, r), split(tl.load(x + at), 3), 3))

    @triton.jit
    def float16(x, y):
        r = tl.arange(0, 16)
        at = r[:, None] * 16 + r[None, :]
        parts = split(tl.load(x + at) * FLOAT16_UNIT, 2, FLOAT16_UNIT)
        tl.store(y + at, selected_sum(through(r, r), parts, 2))

    @triton.jit
    def whole(x, y):
        r = tl.arange(0, 16)
        at = r[:, None] * 16 + r[None, :]
        tl.store(y + at, whole_sum(split(tl.load(x + at), 2), 2))

    @triton.jit
    def backward(x, y):
        r = tl.arange(0, 16)
        at = r[None, :] * 16 + r[:, None]
        hi, mid, lo = split3(tl.load(x + at), tl.float32)
        tl.store(y + at, interval_sum(hi, mid, lo, r[:, None] <= r[None, :], 3))

    matrix_unit.emulate()
    found = {}
    for gamma in (-2.0, -0.5, -0.05, -0.003):
        x = torch.full((16, 16), gamma / torch.tensor(2.0, dtype=torch.float64).log().item())
        sums = x.double().cumsum(0)
        kernels = {"selected_sum": forward, "float16": float16, "whole_sum": whole, "interval_sum": backward}
        for name, kernel in kernels.items():
            exact = sums[-1:] if kernel is whole else sums
            y = torch.empty_like(x)
            kernel[(1,)](x, y)
            found[f"{name} {gamma}"] = ((y - exact) / exact.abs().clamp_min(1)).abs().max().item()
    return found


def test_sums_of_parts():
    """Large parts first, and each small one lost up to 2⁻²⁵ of the sum: an H200's final states had it."""
    found = interpreted.printed(__file__)
    assert len(found) == 16
    assert {name: error for name, error in found.items() if error > FURTHEST} == {}


if __name__ == "__main__":
    print(json.dumps(errors()))
