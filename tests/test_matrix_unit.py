"""Sums of decays from three parts are float32's own on a matrix unit that cuts what it adds (``matrix_unit.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.skipif(find_spec("kda_core_nvidia") is None or find_spec("triton") is None, reason="needs kernels"),
]

FURTHEST = 2.0**-23
"""From the sum, relative to it or to 1: half of float32's last place, and as much for the parts that are added."""


def errors() -> dict[str, float]:
    """Errors of sums of up to 16 decays, by function and decay, in a process where Triton interprets."""
    global tl, selected_sum, split, through, interval_sum, split3  # a kernel sees no names of the function round it
    import matrix_unit
    import torch
    import triton
    import triton.language as tl
    from kda_core_nvidia.backward_levels import interval_sum, split3

    from kda_core.triton_lib.decay import selected_sum, split, through

    @triton.jit
    def forward(x, y):
        r = tl.arange(0, 16)
        at = r[:, None] * 16 + r[None, :]
        tl.store(y + at, selected_sum(through(r, r), split(tl.load(x + at), 3), 3))

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
        exact = x.double().cumsum(0)
        for name, kernel in (("selected_sum", forward), ("interval_sum", backward)):
            y = torch.empty_like(x)
            kernel[(1,)](x, y)
            found[f"{name} {gamma}"] = ((y - exact) / exact.abs().clamp_min(1)).abs().max().item()
    return found


def test_sums_of_three_parts():
    """Large parts first, and each small one lost up to 2⁻²⁵ of the sum: an H200's final states had it."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8
    assert {name: error for name, error in found.items() if error > FURTHEST} == {}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(json.dumps(errors()))
