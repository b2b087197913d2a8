"""A layer that keeps more of its forward."""

from __future__ import annotations

import pytest
import torch
from toys import Watcher

from kda_core.nn import KDACache, KimiDeltaAttention


@pytest.mark.parametrize("cached", [False, True])
def test_the_operator_is_told_what_to_keep(cached: bool):
    torch.manual_seed(0)
    layers = [KimiDeltaAttention(24, head_dim=8, num_heads=2, disable_recompute=kept) for kept in (False, True)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 40, 24)
    with Watcher() as requests:
        for layer in layers:
            layer(x, cache=KDACache() if cached else None).square().sum().backward()
    forwards = [r.disable_recompute for r in requests if r.grad_o is None]
    assert forwards == [False, True]
    for one, other in zip(*(layer.parameters() for layer in layers), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
