"""A layer in the loops that people write around it: what surrounds it changes no result."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import toys
from layer_hooks import Hooked

from kda_core.nn import KDACache, KimiDeltaAttention, gated_rms_norm, short_convolution


@pytest.mark.parametrize("hooked", [False, True])
def test_a_backward_in_autocast_of_a_forward_outside(hooked: bool):
    """It computes in the dtypes of its forward; without hooks the output projection, a layer of torch's, does not."""
    torch.manual_seed(0)
    layer, x = KimiDeltaAttention(24, head_dim=8, num_heads=2), torch.randn(2, 20, 24, requires_grad=True)
    leaves = [x, *layer.parameters()]
    toy = Hooked("hooked", priority=1, features=(), dtypes=(torch.float32,))
    with toys.installed(toy) if hooked else nullcontext():
        expected = torch.autograd.grad(layer(x).square().sum(), leaves)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                loss = layer(x).square().sum()
            found = torch.autograd.grad(loss, leaves)
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours - wanted).norm() <= (0 if hooked else 2**-7) * wanted.norm()


@pytest.mark.parametrize("hooked", [False, True])
def test_weights_of_another_16_bit_dtype_than_autocast(hooked: bool):
    """In it torch's ``cat`` takes such tensors neither alone nor together."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(24, head_dim=8, num_heads=2, conv_bias=not hooked, dtype=torch.bfloat16)
    exact, x = copy.deepcopy(layer).float(), torch.randn(2, 20, 24)
    expected = exact(x)
    expected.square().sum().backward()
    toy = Hooked("hooked", priority=1, features=(), dtypes=(torch.float16,))
    cache = KDACache(crop_calls=1)
    with torch.autocast("cpu", torch.float16):
        with toys.installed(toy) if hooked else nullcontext():
            y = layer(x)
            y.float().square().sum().backward()
        with torch.no_grad():
            first = [layer(x[:, :12], cache=cache), layer(x[:, 12:], cache=cache)]
            cache.crop(15)
            cached = torch.cat([*first, layer(x[:, 15:], cache=cache)], 1)
    # Some ten roundings to float16 in a row.
    bound = 10 * 2**-12
    for found in (y, cached[:, :20], cached[:, 20:]):
        wanted = expected[:, -found.shape[1] :]
        assert (found - wanted).norm() < bound * wanted.norm()
    for (name, ours), theirs in zip(layer.named_parameters(), exact.parameters(), strict=True):
        # The gradient of a bfloat16 weight is bfloat16.
        assert (ours.grad - theirs.grad).norm() < (bound + 2**-9) * theirs.grad.norm(), name


@pytest.mark.parametrize("hooked", [False, True])
def test_a_penalty_of_gradients_is_refused(hooked: bool):
    """``torch.autograd.grad`` asks for some leaves only, and would leave the penalty out."""
    torch.manual_seed(0)
    layer, x = KimiDeltaAttention(24, head_dim=8, num_heads=2), torch.randn(2, 20, 24, requires_grad=True)
    toy = Hooked("hooked", priority=1, features=(), dtypes=(torch.float32,))
    with toys.installed(toy) if hooked else nullcontext():
        loss = layer(x).sum()
        # Without hooks torch differentiates the norm twice.
        for part in (x, layer.b_proj.weight, *[layer.o_norm.weight] * hooked):
            (grad,) = torch.autograd.grad(loss, part, create_graph=True)
            with pytest.raises(RuntimeError, match="double backward is not supported"):
                torch.autograd.grad(loss + grad.square().sum(), layer.q_proj.weight, retain_graph=True)


def test_gradients_that_are_negative_views():
    """A backend reads memory, where their signs do not stand."""
    toy = Hooked("hooked", priority=1, features=(), dtypes=(torch.float32,))
    torch.manual_seed(0)
    x, weight = torch.randn(1, 9, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    grad = torch.randn(1, 9, 6)
    norm = torch.ones(6, requires_grad=True)
    with toys.installed(toy):
        for y, leaves in ((short_convolution(x, weight)[0], (x, weight)), (gated_rms_norm(x, x, norm), (x, norm))):
            found = torch.autograd.grad(y, leaves, torch._neg_view(grad), retain_graph=True)
            torch.testing.assert_close(found, torch.autograd.grad(y, leaves, -grad))
    assert [name for name in toy.calls if "backward" in name] == ["convolution backward"] * 2 + ["norm backward"] * 2
