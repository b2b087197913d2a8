"""Wrong backends and small calls of them, for tests of checked_calls()."""

from __future__ import annotations

from contextlib import contextmanager

from example_arguments import drawn
from toys import installed


@contextmanager
def registered(mutant):
    """The name of a backend for as long as the block runs."""
    with installed(mutant()) as name:
        yield name


def inputs(B=2, T=70, H=2, HV=4, K=16, V=8, grad=False):
    return drawn(grad, B=B, T=T, H=H, HV=HV, K=K, V=V)
