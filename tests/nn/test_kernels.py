"""A whole layer on the Triton kernels, in Triton's interpreter, beside the float64 oracle. The kit has its parts.

The interpreter must be chosen before triton is imported: a child process (this file, run as a script) does the work.
"""

from __future__ import annotations

import json
import sys

import installed
import interpreted
import pytest
import torch
from toys import Watcher

pytestmark = pytest.mark.end_to_end

installed.need_package("triton")

ROUNDING = 1.6e-5
"""Relative error of a result: some kernels stand behind each other."""


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def layer(backend: str, bound: float | None) -> list[float]:
    """Errors of output and gradients of a layer with padding."""
    from kda_core.nn import KimiDeltaAttention

    torch.manual_seed(0)
    m, x = KimiDeltaAttention(16, head_dim=16, num_heads=1, lower_bound=bound), torch.randn(2, 20, 16)
    leaves = [x.requires_grad_(), *m.parameters()]
    mask = torch.stack([torch.arange(20) >= 7, torch.arange(20) < 9])
    found = []
    for m.backend in (backend, "reference"):
        y = m(x, mask)
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    return [relative(a, e) for a, e in zip(*found, strict=True)]


def launched(backend: str) -> int:
    """How often a hook ran, and not the core's own code."""
    from kda_core.nn import short_convolution

    with Watcher() as requests:
        short_convolution(torch.ones(1, 2, 3), torch.ones(3, 4), backend=backend)
    return len(requests)


def main(backend: str) -> None:
    print(json.dumps({"errors": [layer(backend, bound) for bound in (None, -5.0)], "launched": launched(backend)}))


@pytest.mark.parametrize("backend", ["nvidia", "amd"])
def test_a_layer(backend: str):
    installed.need_backend(backend)
    found = interpreted.printed(__file__, backend)
    assert found["launched"] == 1
    assert max(map(max, found["errors"])) <= ROUNDING


if __name__ == "__main__":
    main(*sys.argv[1:])
