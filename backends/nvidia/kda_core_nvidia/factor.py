"""Device functions for a state's decay in one step, exact for slow channels and for fast ones.

Slow ones take d − 1 (``triton_lib.factor`` says why). A channel that loses most of its state takes d: S + (d − 1)⊙S
would be off by 3e-8 of the old state, however little of it is left.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.factor import decay_minus_one

NOTHING = tl.constexpr(2.0**-100)
"""So little of x that x less it is x."""


@triton.jit
def decay_factor(y):
    """What ``decayed`` multiplies with, y <= 0 the log2 decay: 2^y − 1 down to y = −1, and below it 2^y.

    Its sign tells which: 2^y − 1 is not zero here, but so small that it changes nothing.
    """
    slow = tl.minimum(decay_minus_one(y), -NOTHING, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(y < -1.0, tl.exp2(y), slow)


@triton.jit
def decayed(x, factor):
    """x times the decay, rounded once."""
    return tl.fma(x, factor, tl.where(factor < 0.0, x, 0.0))
