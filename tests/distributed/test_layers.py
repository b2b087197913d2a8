"""A layer whose rows lie on several ranks: the rows ahead of a convolution, and the layer as a whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import SIZES
from whole_calls import assembled, assert_close, normal, worst

from kda_core.distributed import build_cp_context
from kda_core.nn import KDACache, KimiDeltaAttention, short_convolution

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
    parts = ranks.run(size, "convolution_step", x, weight, grad, context, False)
    leaf, taps = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = short_convolution(leaf, taps, cu_seqlens=None if cu is None else torch.tensor(cu))[0]
    y.backward(grad)
    expected = {"o": y.detach(), "dq": leaf.grad, "dA_log": taps.grad}
    assert_close(parts, expected, 1e-13)


@pytest.mark.end_to_end
def test_a_compiled_convolution(ranks):
    x, weight, grad = normal(1, 20, 5), normal(5, 4, seed=4), normal(1, 20, 5, seed=5)
    both = [ranks.run(2, "convolution_step", x, weight, grad, {"tokens": 20}, how) for how in (False, True)]
    for a, b in zip(*both, strict=True):
        assert worst(b, {n: a[n] for n in ("o", "dq", "dA_log")})[0] < 1e-14


LAYER = {"hidden_size": 12, "head_dim": 8, "num_heads": 2, "num_v_heads": 4}


@pytest.mark.parametrize("options", [{}, {"conv_bias": True}, {"use_short_conv": False}])
@pytest.mark.parametrize(
    ("size", "context"),
    [(2, {"tokens": 40, "batch": 2}), (3, {"tokens": 40, "layout": "zigzag"}), (4, {"cu_seqlens": [0, 2, 2, 38]})],
)
def test_a_layer(ranks, size, context, options):
    B, T = context.get("batch", 1), context.get("tokens", 38)
    cu = context.get("cu_seqlens")
    x, grad, options = normal(B, T, 12), normal(B, T, 12, seed=5), {**LAYER, **options}
    parts = ranks.run(size, "layer_step", x, grad, context, options)
    torch.manual_seed(0)
    layer, leaf = KimiDeltaAttention(**options).double(), x.clone().requires_grad_()
    y = layer(leaf, cu_seqlens=None if cu is None else torch.tensor(cu))
    y.backward(grad)
    expected = {"o": y.detach(), "dq": leaf.grad} | {f"d {n}": p.grad for n, p in layer.named_parameters()}
    assert_close(parts, expected, 1e-12)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.end_to_end)])
def test_fsdp_in_mixed_precision_with_activation_checkpointing(ranks, size):
    """Recomputing changes no bit, and gradients are as close to float64's as those of one process."""
    x, grad, context = normal(1, 40, 12).float(), normal(1, 40, 12, seed=5).float(), {"tokens": 40}
    torch.manual_seed(0)
    layers = [KimiDeltaAttention(**LAYER).double() for _ in range(2)]
    leaf = y = x.double().requires_grad_()
    for layer in layers:
        y = y + layer(y)
    y.backward(grad.double())
    expected = {"o": y.detach(), "dq": leaf.grad}
    for i, layer in enumerate(layers):
        expected |= {f"d {i} {n}": p.grad for n, p in layer.named_parameters()}
    both = [ranks.run(size, "fsdp_step", x, grad, context, LAYER, how) for how in (False, True)]
    for a, b in zip(*both, strict=True):
        assert a.keys() == b.keys() == {*expected, "ranges"}
        assert all(torch.equal(a[n], b[n]) for n in expected)
    alone = ranks.run(1, "fsdp_step", x, grad, context, LAYER, True)
    for name, t in expected.items():
        ours, theirs = (worst(assembled(parts, {name: t}), {name: t})[0] for parts in (both[1], alone))
        assert ours < 2 * theirs + 2**-8, name
        assert ours < 0.1, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens: does not go with cp_context"),
        ({"attention_mask": torch.ones(1, 9)}, "attention_mask: does not go with cp_context"),
        ({"cache": KDACache()}, "cache: does not go with cp_context"),
        ({}, "cp_context: expected conv1d_kernel_size=4, got 3"),
    ],
)
def test_what_a_layer_refuses_beside_a_context(arguments, message):
    layer = KimiDeltaAttention(**LAYER)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        context = build_cp_context(tokens=9, conv1d_kernel_size=3)
        with pytest.raises(ValueError, match=message):
            layer(torch.zeros(1, 9, 12), **arguments, cp_context=context)
    finally:
        dist.destroy_process_group()
