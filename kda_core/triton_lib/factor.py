"""Device functions for a state's decay in one step, exact for slow channels and for fast ones.

d, rounded to float32, has an error of up to 3e-8; a constant decay repeats it in every step. A channel that keeps most
of its state therefore adds (d − 1) times its state. One that loses most of it takes d: S + (d − 1)⊙S would be off by
3e-8 of the old state, however little of it is left.
"""

import math

import triton
import triton.language as tl

from kda_core.triton_lib.gate import LN_2

SERIES_REACH = tl.constexpr(0.5)
"""|log2 decay| below which d − 1 comes from the series; beyond it 2^y − 1 loses at most two bits."""

NOTHING = tl.constexpr(2.0**-100)
"""So little of x that x less it is x."""

_C2, _C3, _C4, _C5, _C6, _C7 = (tl.constexpr(1 / math.factorial(n)) for n in range(2, 8))


@triton.jit
def decay_minus_one(y):
    """2^y − 1 in float32, y <= 0, to a few units in the last place of the result."""
    x = y * LN_2
    # Seven terms: the next one is below 2⁻²⁵ of the sum for |x| up to ln(2) / 2.
    series = tl.fma(x, _C7, _C6)
    series = tl.fma(series, x, _C5)
    series = tl.fma(series, x, _C4)
    series = tl.fma(series, x, _C3)
    series = tl.fma(series, x, _C2)
    series = tl.fma(series, x, 1.0)
    return tl.where(tl.abs(y) < SERIES_REACH, series * x, tl.exp2(y) - 1.0)


@triton.jit
def step_decay(y, lost, SIGNED: tl.constexpr):
    """The decay of a step as ``multiplied`` takes it, y <= 0 its log2, and what rounding took from it.

    Without SIGNED it is 2^y rounded, and ``lost`` was taken from the decays before it: the error of a slow channel goes
    into the next step's decay, so that a constant one does not drift, and a state is multiplied once. 1 + expm1 has the
    digits that 2^y lost, and the rounded sum less 1 is exact down to 1/2. A faster channel keeps nothing for long.
    """
    if SIGNED:
        d = decay_factor(y)
    else:
        exact = decay_minus_one(y) + lost
        slow = exact + 1.0
        d = tl.where(y < -1.0, tl.exp2(y), slow)
        lost = tl.where(y < -1.0, 0.0, exact - (slow - 1.0))
    return d, lost


@triton.jit
def multiplied(x, d, SIGNED: tl.constexpr):
    """x times a decay, of ``decay_factor`` if SIGNED."""
    if SIGNED:
        x = decayed(x, d)
    else:
        x = x * d
    return x


@triton.jit
def decay_factor(y):
    """The factor that ``decayed`` takes, y <= 0 the log2 decay: 2^y − 1 down to y = −1, and below it 2^y.

    Its sign tells which: 2^y − 1 is not zero here, but so small that it changes nothing.
    """
    slow = tl.minimum(decay_minus_one(y), -NOTHING, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(y < -1.0, tl.exp2(y), slow)


@triton.jit
def decayed(x, factor):
    """x times the decay, rounded once."""
    return tl.fma(x, factor, tl.where(factor < 0.0, x, 0.0))
