"""The Triton kernels of a layer in Triton's interpreter, beside the core's torch code in float64.

The interpreter must be chosen before triton is imported: a child process (this file, run as a script) does the work.
"""

from __future__ import annotations

import json
import sys

import installed
import interpreted
import pytest
import torch
from layer_steps import DRAFTS, STEPS, drafts_with_records, expected, step
from toys import Watcher

pytestmark = pytest.mark.end_to_end

installed.need_package("triton")

ROUNDING = {torch.float32: 4e-6, torch.float16: 1e-3}
"""Relative error of a result: some tens of float32's roundings; float16's one, at most 2^-11 of each number."""

CONVOLUTIONS = {
    # name: (B, T, W, bias, initial state, bounds of packed sequences)
    "one token": (3, 1, 4, False, True, None),
    "past a slot": (1, 130, 4, True, True, None),
    "whole slots, no state": (1, 128, 2, True, False, None),
    "five taps": (1, 70, 5, False, True, None),
    "packed": (1, 160, 4, True, True, [0, 0, 1, 3, 68, 68, 131, 150]),
    "packed on slots": (1, 131, 4, False, True, [0, 64, 130]),
    "packed, no state": (1, 7, 3, False, False, [0, 2, 7]),
}


WITHOUT_SILU = ("one token", "packed, no state")
HALF = ("one token", "past a slot", "packed, no state")
"""Cases in float16."""

LAYER = 4
"""Allowed errors of a whole layer, in those of one kernel: some kernels stand behind each other."""


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def results(function, tensors: list, seed: int) -> list[torch.Tensor]:
    """Results and gradients for random gradients of the results."""
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in tensors]
    found = [y for y in function(*leaves) if y is not None]
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in found]
    return [*found, *torch.autograd.grad(found, [t for t in leaves if t is not None], grads)]


def widened(tensors: list) -> list:
    return [t if t is None else t.double() for t in tensors]


def convolution(backend: str, name: str, dtype: torch.dtype) -> list[float]:
    """Errors of one case in units of the allowed ones; a state that is advanced in place has a share as well."""
    from kda_core.nn import short_convolution

    B, T, W, bias, state, bounds = CONVOLUTIONS[name]
    D, N = 37, B if bounds is None else len(bounds) - 1
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    torch.manual_seed(0)
    # A part of a wider tensor, as of one projection for q, k and v.
    wide = torch.randn(B, T, D + 11).to(dtype)
    given = [wide[..., 5 : 5 + D], torch.randn(D, W), torch.randn(D) if bias else None]
    given.append(torch.randn(N, W - 1, D).to(dtype) if state else None)
    if bounds is not None and bounds[-1] < T:
        given[0][:, bounds[-1] :] = torch.nan
    errors = []
    for silu in (True, False) if name in WITHOUT_SILU and dtype == torch.float32 else (True,):

        def run(*tensors, own=backend, silu=silu):
            return short_convolution(*tensors, True, cu_seqlens=cu_seqlens, silu=silu, backend=own)

        expected = results(lambda *t, run=run: run(*t, own="reference"), widened(given), 1)
        errors += [relative(a, e) for a, e in zip(results(run, given, 1), expected, strict=True)]
        if state:
            own = given[3].clone()
            y, final = short_convolution(*given[:3], own, True, True, cu_seqlens, silu, backend)
            errors += [relative(y, expected[0]), relative(own, expected[1]), 0.0 if final is own else 1.0]
    return [e / ROUNDING[dtype] for e in errors]


def parts(backend: str, dtype: torch.dtype) -> list[float]:
    """The output in three parts, as of a layer: their gradients lie apart."""
    from kda_core.nn._convolution import convolve

    torch.manual_seed(0)
    given = [torch.randn(2, 5, 1100).to(dtype), torch.randn(1100, 4), None, torch.randn(2, 3, 1100).to(dtype)]
    flags = {"output_final_state": True, "inplace_final_state": False, "silu": True}
    shapes = ((6, 100), (3, 100), (200,))
    actual, expected = (
        results(lambda *t, own=own: [*(c := convolve(*t, None, flags, shapes, own))[0], c[1]], tensors, 1)
        for own, tensors in ((backend, given), ("reference", widened(given)))
    )
    assert [tuple(t.shape[2:]) for t in actual[:3]] == list(shapes)
    return [relative(a, e) / ROUNDING[dtype] for a, e in zip(actual, expected, strict=True)]


def norm(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[float]:
    from kda_core.nn import gated_rms_norm

    torch.manual_seed(0)
    given = [*torch.randn(2, *shape).to(dtype), torch.randn(shape[-1])]
    given[1] = given[1].mT.contiguous().mT
    actual, expected = (
        results(lambda *t, own=own: [gated_rms_norm(*t, 0.01, own)], tensors, 1)
        for own, tensors in ((backend, given), ("reference", widened(given)))
    )
    return [relative(a, e) / ROUNDING[dtype] for a, e in zip(actual, expected, strict=True)]


def layer(backend: str, bound: float | None) -> list[float]:
    """Output and gradients of a whole layer with padding, beside the float64 oracle's in float32."""
    from kda_core.nn import KimiDeltaAttention

    torch.manual_seed(0)
    m, x = KimiDeltaAttention(16, head_dim=16, num_heads=1, lower_bound=bound), torch.randn(2, 20, 16)
    leaves = [x.requires_grad_(), *m.parameters()]
    mask = torch.stack([torch.arange(20) >= 7, torch.arange(20) < 9])
    found = []
    for m.backend in (backend, "reference"):
        y = m(x, mask)
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    return [relative(a, e) / (LAYER * ROUNDING[torch.float32]) for a, e in zip(*found, strict=True)]


def decode(backend: str, name: str) -> list[float]:
    """Output and both states of a decoding step."""
    from kda_core.nn import kda_decode_step

    call = step(name)
    right = expected(call)
    found = kda_decode_step(**call, backend=backend), call["state"], call["conv_state"]
    return [relative(a, e) / (8 * torch.finfo(e.dtype).eps) for a, e in zip(found, right, strict=True)]


def launched(backend: str) -> bool:
    """Whether the hooks ran, and not the core's own code."""
    from kda_core.nn import short_convolution

    with Watcher() as requests:
        short_convolution(torch.ones(1, 2, 3), torch.ones(3, 4), backend=backend)
    return len(requests) == 1


def main(backend: str) -> None:
    found = {}
    for dtype in ROUNDING:
        for name in CONVOLUTIONS if dtype == torch.float32 else HALF:
            found[f"{name}, {dtype}"] = convolution(backend, name, dtype)
        found[f"parts, {dtype}"] = parts(backend, dtype)
        for shape in ((3, 5, 128), (70, 33), (2, 20, 2, 200)):
            found[f"norm {shape}, {dtype}"] = norm(backend, shape, dtype)
    found |= {f"layer, bound {bound}": layer(backend, bound) for bound in (None, -5.0)}
    found |= {f"step, {name}": decode(backend, name) for name in STEPS}
    for name in DRAFTS:
        pairs = drafts_with_records(name, backend)
        found[f"drafts with records, {name}"] = [0.0 if torch.equal(a, e) else 2.0 for a, e in pairs]
    found["hooks"] = [0.0 if launched(backend) else 2.0]
    print(json.dumps(found))


@pytest.mark.parametrize("backend", ["nvidia", "amd"])
def test_kernels(backend: str):
    """Forward and backward; every part of every result within rounding."""
    installed.need_backend(backend)
    found = interpreted.printed(__file__, backend)
    assert len(found) == 3 + len(CONVOLUTIONS) + len(HALF) + 4 * len(ROUNDING) + len(STEPS) + len(DRAFTS)
    assert {name: errors for name, errors in found.items() if not max(errors) <= 1} == {}


if __name__ == "__main__":
    main(*sys.argv[1:])
