"""Calls around the operator in a layer, where a backend has hooks for them: convolution, gated norm, decoding step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_core._plugins import registry
from kda_core.capabilities import Feature
from kda_core.nn import gated_rms_norm, kda_decode_step, short_convolution
from kda_core.nn._convolution import convolve
from kda_core.nn._dispatch import HOOKS
from kda_core.testing.cases import BF16, FP16, FP32
from kda_core.testing.inputs import same_bits
from kda_core.testing.layer_steps import DRAFTS, STEPS, drafts_with_records, expected, step
from kda_core.testing.subject import Subject

ROUNDING = {FP32: 4e-6, FP16: 1e-3, BF16: 8e-3}
"""Relative error of a result: some tens of float32's roundings; one of a 16-bit type, at most 2^-11 or 2^-8."""

DTYPES = pytest.mark.parametrize("dtype", ROUNDING, ids=["float32", "float16", "bfloat16"])

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
IN_16_BITS = ("one token", "past a slot", "packed, no state")

PARTS = ((6, 100), (3, 100), (200,))
"""Heads and channels of the parts of a convolution's output, as of a layer: their gradients lie apart."""

Tensors = Sequence[Tensor | None]


def _needs_hook(kda: Subject, function: str, dtype: torch.dtype = FP32) -> None:
    if not hasattr(registry.named(kda.name).plugin, HOOKS[function]):
        pytest.skip(f"{kda.name} has no hook {HOOKS[function]}: the core's own code serves")
    if not kda.takes(dtype):
        pytest.skip(f"{kda.name} does not take {dtype}")


def _results(function: Callable[..., Any], tensors: Tensors) -> list[Tensor]:
    """Results, and gradients for random gradients of the results."""
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in tensors]
    found = [y for y in function(*leaves) if y is not None]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(y.shape, generator=generator).to(y) for y in found]
    gradients = torch.autograd.grad(found, [t for t in leaves if t is not None], grads)
    return [*(y.detach() for y in found), *gradients]


def _expect(kda: Subject, function: Callable[..., Any], tensors: Tensors, dtype: torch.dtype) -> list[Tensor]:
    """Compare a function's results and gradients with the core's in float64, which it returns; the bits repeat."""
    exact = _results(lambda *t: function(*t, "reference"), [t if t is None else t.double() for t in tensors])
    own = [t if t is None else t.to(kda.device) for t in tensors]
    found, again = (_results(lambda *t: function(*t, kda.name), own) for _ in range(2))
    for i, (x, right, other) in enumerate(zip(found, exact, again, strict=True)):
        _expect_near(x, right, ROUNDING[dtype], f"result or gradient {i}")
        assert same_bits(x, other), f"result or gradient {i}: other bits when the call was made again"
    return exact


def _expect_near(x: Tensor, right: Tensor, most: float, what: str) -> None:
    error = float((x.cpu().double() - right.double()).norm() / right.double().norm().clamp_min(1e-30))
    assert error <= most, f"{what}: relative error {error:.1e}, expected at most {most:.1e}"


CALLS = [(name, dtype, True) for dtype in ROUNDING for name in (CONVOLUTIONS if dtype == FP32 else IN_16_BITS)]
CALLS += [(name, FP32, False) for name in WITHOUT_SILU]


@pytest.mark.parametrize(("name", "dtype", "silu"), CALLS)
def test_convolution(kda, name: str, dtype: torch.dtype, silu: bool):
    """Results and gradients; NaN behind packed sequences; a state that is advanced in place."""
    _needs_hook(kda, "short_convolution", dtype)
    B, T, W, bias, state, bounds = CONVOLUTIONS[name]
    D, N = 37, B if bounds is None else len(bounds) - 1
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    torch.manual_seed(0)
    # A part of a wider tensor, as of one projection for q, k and v.
    x = torch.randn(B, T, D + 11).to(dtype)[..., 5 : 5 + D]
    if bounds is not None:
        x[:, bounds[-1] :] = torch.nan
    given = [x, torch.randn(D, W), torch.randn(D) if bias else None]
    given.append(torch.randn(N, W - 1, D).to(dtype) if state else None)

    def run(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, backend: str, inplace: bool = False) -> Any:
        packed = None if cu_seqlens is None else cu_seqlens.to(x.device)
        return short_convolution(x, weight, bias, state, True, inplace, packed, silu, backend)

    exact = _expect(kda, run, given, dtype)
    if state:
        *others, own = (t if t is None else t.to(kda.device) for t in given)
        for place in (torch.stack([own, own], -1)[..., 0], own):  # with strides, and contiguous
            y, final = run(*others, place, kda.name, True)
            assert final is place
            _expect_near(y, exact[0], ROUNDING[dtype], "y")
            _expect_near(place, exact[1], ROUNDING[dtype], "the state")


@DTYPES
def test_convolution_into_parts(kda, dtype: torch.dtype):
    """q, k and v of a layer as tensors of their own."""
    _needs_hook(kda, "short_convolution", dtype)
    torch.manual_seed(0)
    given = [torch.randn(2, 5, 1100).to(dtype), torch.randn(1100, 4), None, torch.randn(2, 3, 1100).to(dtype)]
    flags = {"output_final_state": True, "inplace_final_state": False, "silu": True}

    def run(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, backend: str) -> Any:
        parts, final = convolve(x, weight, bias, state, None, flags, PARTS, backend)
        assert [tuple(t.shape[2:]) for t in parts] == list(PARTS)
        return *parts, final

    _expect(kda, run, given, dtype)


@DTYPES
@pytest.mark.parametrize("eps", [0.01, 0.0])
@pytest.mark.parametrize("shape", [(3, 5, 128), (70, 33), (2, 20, 2, 200)], ids=str)
def test_gated_norm(kda, shape: tuple[int, ...], eps: float, dtype: torch.dtype):
    """Results and gradients; the gate with other strides than x. Without eps a row of zeros has no norm."""
    _needs_hook(kda, "gated_rms_norm", dtype)
    torch.manual_seed(0)
    x, gate = torch.randn(2, *shape).to(dtype)
    given = [x, gate.mT.contiguous().mT, torch.randn(shape[-1])]
    _expect(kda, lambda x, gate, weight, backend: [gated_rms_norm(x, gate, weight, eps, backend)], given, dtype)


@pytest.mark.parametrize("name", STEPS)
def test_decoding_step(kda, name: str):
    """Output and both states beside dense calls of the parts, one sequence and token at a time, in float64."""
    call = step(name)
    _needs_hook(kda, "decode_step", call["mixed_qkv"].dtype)
    right = expected(call)
    call = {n: t.to(kda.device) if isinstance(t, Tensor) else t for n, t in call.items()}
    found = kda_decode_step(**call, backend=kda.name), call["state"], call["conv_state"]
    for what, x, exact in zip(("o", "state", "conv_state"), found, right, strict=True):
        _expect_near(x, exact, 8 * torch.finfo(x.dtype).eps, what)


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_of_a_layer_with_records(kda, name: str):
    """Drafts that are committed by the next call have the bits of drafts with a slot for every token."""
    _needs_hook(kda, "decode_step", step(name)["mixed_qkv"].dtype)
    if not kda.declares(Feature.DRAFT_RECORDS):
        pytest.skip(f"{kda.name} does not declare DRAFT_RECORDS: the core's own code serves")
    for i, (found, plain) in enumerate(drafts_with_records(name, kda.name, str(kda.device))):
        assert same_bits(found, plain), f"result {i}"
