"""A layer whose rows lie on several ranks: the rows ahead of a convolution, and the layer as a whole."""

from __future__ import annotations

import pytest
import torch
from ranks import SIZES
from whole_calls import assembled, worst

from kda_core.nn import short_convolution

JOBS = "rank_jobs:"


def normal(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHORT_ONES = [[(0, 1)], [(1, 2)], [(2, 3), (7, 9)], [(3, 7)]]
CONTEXTS = [
    *((size, {"tokens": 9, "batch": 2, "layout": layout}) for size in SIZES for layout in ("contiguous", "zigzag")),
    (4, {"tokens": 9, "layout": SHORT_ONES}),
    (3, {"cu_seqlens": [0, 0, 4, 5, 5, 21], "tokens": 24}),
    (3, {"cu_seqlens": [0, 2, 21], "tokens": 21, "layout": "zigzag"}),
]


@pytest.mark.parametrize(("size", "context"), CONTEXTS)
def test_a_convolution_reads_the_rows_ahead(ranks, size, context):
    """Also those of several ranks, where fragments are shorter than the convolution's reach."""
    B, T, D = context.get("batch", 1), context["tokens"], 5
    x, weight, grad = normal(B, T, D), normal(D, 4, seed=4), normal(B, T, D, seed=5)
    cu = context.get("cu_seqlens")
    if cu is not None:
        grad[:, cu[-1] :] = 0
    parts = ranks.run(size, JOBS + "convolution_step", x, weight, grad, context, False)
    leaf, taps = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = short_convolution(leaf, taps, cu_seqlens=None if cu is None else torch.tensor(cu))[0]
    y.backward(grad)
    expected = {"o": y.detach(), "dq": leaf.grad, "dA_log": taps.grad}
    error, name = worst(assembled(parts, expected), expected)
    assert error < 1e-13, name


def test_a_compiled_convolution(ranks):
    x, weight, grad = normal(1, 20, 5), normal(5, 4, seed=4), normal(1, 20, 5, seed=5)
    both = [ranks.run(2, JOBS + "convolution_step", x, weight, grad, {"tokens": 20}, how) for how in (False, True)]
    for a, b in zip(*both, strict=True):
        assert worst(b, {n: a[n] for n in ("o", "dq", "dA_log")})[0] < 1e-14
