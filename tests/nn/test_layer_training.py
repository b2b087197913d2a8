"""A layer in the loops that people write around it: what surrounds it changes no result."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import toys
from layer_hooks import Hooked

from kda_core.nn import KimiDeltaAttention


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
