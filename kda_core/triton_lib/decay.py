"""Device functions for decays inside a tile of 16 rows, on matrix units, without a gather and without overflow.

Every exponent that a tile needs (decay since the tile's start, decay to its end, decay to a reference row) is a sum of
log decays over rows that row r selects, that is, a product of a 16×16 matrix of zeros and ones with the [16, BK]
block of log2 decays. Such sums have terms of one sign, so they neither cancel nor turn inf − inf into NaN, and their
result comes in the layout in which the matrix unit wants q and k scaled.
"""

import math

import triton
import triton.language as tl

from kda_core.triton_lib.arguments import LEAST_BOUNDED_DECAY

TILE = tl.constexpr(16)

BOUNDED_LOG2_DECAY = tl.constexpr(LEAST_BOUNDED_DECAY / math.log(2))

BOUNDED_SHIFT = tl.constexpr(float(round(-8 * BOUNDED_LOG2_DECAY.value)))
"""With decays of at least LEAST_BOUNDED_DECAY a row, sums over a tile lie in [−115.5, 0] in log2 units. Shifted by half
of that, 2^(x + shift) and its reciprocal both stay within 2^±58, far from the ends of what bf16 and fp32 can hold."""

BOUNDED_SCALE = tl.constexpr(2.0**BOUNDED_SHIFT.value)
"""2^BOUNDED_SHIFT."""

FLOAT16_UNIT = tl.constexpr(64.0)
"""Parts in float16 are of this times the log2 decay, so that small ones keep their bits (``gate.FLOAT16_FLOOR``)."""


@triton.jit
def _weights(select, parts):
    """``select`` as the left operand of a product with a part."""
    if parts.dtype == tl.float16:
        return tl.where(select, 1.0 / FLOAT16_UNIT, 0.0).to(tl.float16)
    return select.to(parts.dtype)


@triton.jit
def chained_sum(select, parts, TERMS: tl.constexpr, START: tl.constexpr = 0.0):
    """``selected_sum`` in one accumulator; of three bfloat16 parts, each small one may lose 2⁻²⁵ of the sum."""
    total = tl.full(parts[0].shape, START, tl.float32)
    weights = _weights(select, parts[0])
    if TERMS == 1:
        return tl.dot(weights, parts[0], total, input_precision="ieee")
    if parts[0].dtype == tl.float16:
        # Small parts first: to a large sum they would be added one by one, and cut off.
        return tl.dot(weights, parts[0], tl.dot(weights, parts[1], total))
    total = tl.dot(weights, parts[0], total)
    total = tl.dot(weights, parts[1], total)
    if TERMS == 3:
        total = tl.dot(weights, parts[2], total)
    return total


@triton.jit
def selected_sum(select, parts, TERMS: tl.constexpr, START: tl.constexpr = 0.0):
    """START plus the sum over rows s of y[s, c] where select[r, s]: [16, BK] float32, ``parts = split(y, ..)``.

    With float16 parts it is the sum of y / FLOAT16_UNIT.

    A matrix unit may cut every number that it adds at about the 25th bit of the largest. Sums of three parts must be as
    exact as float32: the small parts are summed by themselves, and an instruction that rounds adds that sum.
    """
    if TERMS != 3:
        return chained_sum(select, parts, TERMS, START)
    weights = _weights(select, parts[0])
    total = tl.dot(weights, parts[0]) + tl.dot(weights, parts[1], tl.dot(weights, parts[2]))
    return total + START if START != 0.0 else total


@triton.jit
def whole_sum(parts, TERMS: tl.constexpr):
    """The sum over all rows, in each row, for ``parts = split(y, TERMS)``; of three bfloat16 parts where TERMS is 2.

    Its power multiplies a state in every chunk. The other sums make factors that are rounded to 16 bits.
    """
    r = tl.arange(0, 16)
    everything = (r[:, None] + r[None, :]) >= 0
    return selected_sum(everything, parts, 3 if TERMS == 2 and parts[0].dtype == tl.bfloat16 else TERMS)


@triton.jit
def through(r, s):
    """Rows up to and including r: decay since the tile's start."""
    return s[None, :] <= r[:, None]


@triton.jit
def after(r, s):
    """Rows after r: decay from r to the tile's end."""
    return s[None, :] > r[:, None]
