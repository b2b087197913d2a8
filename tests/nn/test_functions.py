"""The short convolution and the gated RMS norm: the core's torch code, and what backends' hooks are asked for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from toys import Toy, installed

from kda_core.capabilities import Unavailable
from kda_core.errors import BackendNotFound, UnsupportedCall
from kda_core.hookspecs import hookimpl
from kda_core.nn import KDACache, gated_rms_norm, short_convolution
from kda_core.request import BackwardResult, ForwardResult

DOUBLE = {"dtype": torch.float64}
BOUNDS = [0, 0, 1, 3, 9, 9, 14]
"""Sequences shorter than the filter, longer ones, and empty ones; two rows stand behind the last."""


def drawn(*shapes, **options):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, **options) for shape in shapes]


def by_conv1d(x, weight, bias, state):
    """One sequence [T, D] through torch's convolution: the output and the final state."""
    rows = torch.cat([state, x])
    # A row more, since torch refuses fewer rows than taps.
    z = F.conv1d(F.pad(rows.t(), (1, 0))[None], weight[:, None], bias, groups=x.shape[1])[0].t()[1:]
    return F.silu(z), rows[len(rows) - state.shape[0] :]


@pytest.mark.parametrize("W", [2, 4, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_the_convolution_equals_torchs(W: int, packed: bool):
    D, lengths = 6, [b - a for a, b in pairwise(BOUNDS)] if packed else [16, 16]
    x, weight, bias, state = drawn((2, 16, D), (D, W), (D,), (len(lengths), W - 1, D), **DOUBLE)
    x = x[:1] if packed else x
    cu_seqlens = torch.tensor(BOUNDS) if packed else None
    y, final = short_convolution(x, weight[:, None], bias, state, True, cu_seqlens=cu_seqlens)
    parts = x[0, : BOUNDS[-1]].split(lengths) if packed else x.unbind()
    expected = [by_conv1d(part, weight, bias, s) for part, s in zip(parts, state, strict=True)]
    torch.testing.assert_close(final, torch.stack([f for _, f in expected]))
    ys = torch.cat([y for y, _ in expected])
    torch.testing.assert_close(y.flatten(0, 1)[: len(ys)], ys)
    assert not y.flatten(0, 1)[len(ys) :].any()


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor(BOUNDS)])
@pytest.mark.parametrize("with_state", [False, True])
def test_gradients_of_the_convolution(cu_seqlens: torch.Tensor | None, with_state: bool):
    x, weight, bias, state = drawn((1, 16, 3), (3, 4), (3,), (1 if cu_seqlens is None else 6, 3, 3), **DOUBLE)
    tensors = [t.requires_grad_() for t in (x, weight, bias, *([state] if with_state else []))]

    def run(x, weight, bias, state=None):
        return short_convolution(x, weight, bias, state, True, cu_seqlens=cu_seqlens)

    assert torch.autograd.gradcheck(run, tensors)


def test_gradients_of_the_norm():
    x, gate, weight = (t.requires_grad_() for t in drawn((2, 3, 5), (2, 3, 5), (5,), **DOUBLE))
    assert torch.autograd.gradcheck(gated_rms_norm, (x, gate, weight))


def test_the_norm_equals_torchs():
    x, gate, weight = drawn((2, 3, 8), (2, 3, 8), (8,))
    expected = F.rms_norm(x, (8,), weight, eps=0.1) * gate.sigmoid()
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 0.1), expected)
    assert gated_rms_norm(x[:0], gate[:0], weight).shape == (0, 3, 8)


def test_half_precision_is_rounded_once():
    x, weight, gate = drawn((1, 40, 8), (8, 4), (1, 40, 8))
    half = x.bfloat16()
    y, _ = short_convolution(half, weight)
    torch.testing.assert_close(y, short_convolution(half.float(), weight)[0].bfloat16(), rtol=0, atol=0)
    n = gated_rms_norm(half, gate, weight[:, 0])
    torch.testing.assert_close(n, gated_rms_norm(half.float(), gate, weight[:, 0]).bfloat16(), rtol=0, atol=0)


def test_the_state_is_advanced_in_place():
    x, weight, state = drawn((2, 5, 6), (6, 4), (2, 3, 6))
    expected, final = short_convolution(x, weight, initial_state=state, output_final_state=True)
    for t in range(5):
        y, same = short_convolution(x[:, t : t + 1], weight, None, state, True, True)
        assert same is state
        torch.testing.assert_close(y, expected[:, t : t + 1])
    torch.testing.assert_close(state, final)


def test_rows_behind_the_last_sequence_may_hold_anything():
    x, weight = drawn((1, 16, 6), (6, 4))
    bounds = torch.tensor([0, 5, 10])
    expected = short_convolution(x, weight, cu_seqlens=bounds)[0][:, :10]
    x[:, 10:] = torch.nan
    weight.requires_grad_()
    y, _ = short_convolution(x, weight, cu_seqlens=bounds)
    torch.testing.assert_close(y[:, :10], expected)
    y.sum().backward()
    assert not y[:, 10:].any()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": [1]}, TypeError, "x: expected a tensor, got list"),
        ({"x": torch.ones(1, 4, 6, dtype=torch.int64)}, TypeError, "x: expected a floating dtype"),
        ({"x": torch.ones(4, 6)}, ValueError, "x: expected 3 dimensions"),
        ({"weight": torch.ones(5, 4)}, ValueError, r"weight: expected shape \[6, 4\], got \[5, 4\]"),
        ({"weight": torch.ones(6, 1)}, ValueError, "weight: expected at least two taps"),
        ({"bias": torch.ones(5)}, ValueError, "bias: expected shape"),
        ({"initial_state": torch.ones(1, 4, 6)}, ValueError, r"initial_state: expected shape \[1, 3, 6\]"),
        ({"initial_state": torch.ones(1, 3, 6, device="meta")}, ValueError, "initial_state: expected cpu"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, TypeError, "cu_seqlens: expected an int32 or int64"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens: expected boundaries from 0 to at most T = 4"),
        ({"cu_seqlens": torch.tensor([0, 3, 1])}, ValueError, "cu_seqlens: expected boundaries"),
        ({"x": torch.ones(2, 4, 6), "cu_seqlens": torch.tensor([0, 3])}, ValueError, "cu_seqlens: .* with B = 1"),
        ({"silu": "yes"}, TypeError, "silu: expected"),
        ({"inplace_final_state": True}, ValueError, "inplace_final_state: needs an initial_state"),
        ({"backend": "toaster"}, BackendNotFound, "toaster"),
    ],
)
def test_bad_arguments_of_the_convolution(changes: dict, error: type, text: str):
    with pytest.raises(error, match=text):
        short_convolution(**({"x": torch.ones(1, 4, 6), "weight": torch.ones(6, 4)} | changes))


def test_writing_a_state_is_not_differentiable():
    x, weight, state = drawn((1, 4, 6), (6, 4), (1, 3, 6))
    with pytest.raises(ValueError, match="inplace_final_state: is not differentiable"):
        short_convolution(x, weight.requires_grad_(), initial_state=state, inplace_final_state=True)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"gate": torch.ones(2, 5)}, ValueError, r"gate: expected shape \[2, 4\]"),
        ({"weight": torch.ones(5)}, ValueError, "weight: expected shape"),
        ({"weight": torch.ones(4, device="meta")}, ValueError, "weight: expected cpu"),
        ({"eps": -1.0}, ValueError, "eps: expected a finite number"),
        ({"eps": "small"}, TypeError, "eps: expected a number"),
        ({"x": torch.ones(())}, ValueError, "x: expected at least one dimension"),
    ],
)
def test_bad_arguments_of_the_norm(changes: dict, error: type, text: str):
    with pytest.raises(error, match=text):
        gated_rms_norm(**({"x": torch.ones(2, 4), "gate": torch.ones(2, 4), "weight": torch.ones(4)} | changes))


def test_numpys_scalars_are_taken_for_pythons():
    x, weight, state = drawn((1, 4, 6), (6, 4), (1, 3, 6))
    flags = {"output_final_state": np.True_, "inplace_final_state": np.True_, "silu": np.False_}
    y, final = short_convolution(x, weight, initial_state=state.clone(), **{n: bool(flag) for n, flag in flags.items()})
    torch.testing.assert_close(short_convolution(x, weight, initial_state=state, **flags), (y, final))
    eps = np.float32(0.25)
    assert torch.equal(gated_rms_norm(x, x, weight[:, 0], eps), gated_rms_norm(x, x, weight[:, 0], 0.25))
    KDACache(crop_calls=np.int64(1)).crop(np.int64(0))


class Layered(Toy):
    """A backend with hooks for a layer, which answer with marked results."""

    @hookimpl
    def kda_core_short_convolution_forward(self, request):
        self.requests.append(request)
        return ForwardResult(o=torch.full_like(request.x, 3))

    @hookimpl
    def kda_core_short_convolution_backward(self, request):
        self.requests.append(request)
        return BackwardResult({n: torch.full_like(getattr(request, n), 5) for n in request.needs_grad})


@pytest.fixture
def layered():
    with installed(toy := Layered("layered")):
        toy.requests = []
        yield toy


def test_a_backends_hooks_serve_its_calls(layered: Layered):
    x, weight = drawn((1, 4, 6), (6, 4))
    y, _ = short_convolution(x, weight.requires_grad_(), backend="layered")
    assert (y == 3).all()
    y.sum().backward()
    assert (weight.grad == 5).all()
    forward, backward = layered.requests
    assert backward.needs_grad == {"weight"}
    assert forward.memo is backward.memo
    # It has no hooks of the norm, and declares no float64: the core's code serves those.
    assert (gated_rms_norm(x, x, weight[:, 0].new_ones(6), backend="layered") != 3).any()
    assert (short_convolution(x.double(), weight, backend="layered")[0] != 3).any()
    # So it does where another code must be differentiated or traced.
    assert (torch.func.vmap(lambda x: short_convolution(x, weight, backend="layered")[0])(x[None]) != 3).any()


def test_a_backend_that_cannot_serve_the_device_is_refused():
    x, weight = drawn((1, 4, 6), (6, 4))
    out_of_order = Layered("layered", availability=Unavailable("out of order"))
    with installed(out_of_order), pytest.raises(UnsupportedCall, match=r"'layered' cannot .*: out of order"):
        short_convolution(x, weight, backend="layered")


def test_hooks_are_not_given_negative_views(layered: Layered):
    """Decoding kernels took beta and the states of the convolution with the wrong sign."""
    x, weight = drawn((1, 4, 6), (6, 4))

    def negative(t: torch.Tensor) -> torch.Tensor:
        return torch.complex(t, -t).conj().imag

    expected, _ = short_convolution(x, weight, backend="cpu")
    for given in ((negative(x), weight), (x, negative(weight))):
        y, _ = short_convolution(*given, backend="layered")
        torch.testing.assert_close(y, expected)
    assert not layered.requests
