"""Wrong backends and small calls of them, for tests of checked_calls()."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from kda_core._plugins import registry


@contextmanager
def registered(mutant):
    """The name of a backend for as long as the block runs."""
    backend = mutant()
    assert registry.register(backend).state == "loaded"
    try:
        yield backend.name
    finally:
        registry.unregister(backend.name)


def inputs(B=2, T=70, H=2, HV=4, K=16, V=8, grad=False):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    made = {
        "q": normal(B, T, H, K),
        "k": torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
        "v": normal(B, T, HV, V),
        "g": -torch.rand(B, T, HV, K, generator=generator),
        "beta": torch.rand(B, T, HV, generator=generator),
    }
    return {name: t.requires_grad_(grad) for name, t in made.items()}
