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
def _upper_half(y):
    """The float32 whose sign, exponent and first seven fraction bits are y's and whose other bits are zero.

    It is a bfloat16 already, so that the conversion can be the packed one; rounding to nearest and back is not.
    """
    return (y.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(y, STEP: tl.constexpr):
    """Finite y rounded to a float32 whose bits below STEP, a power of two, are zero. (NaN may become 0.)"""
    return ((y.to(tl.int32, bitcast=True) + STEP // 2) & -STEP).to(tl.float32, bitcast=True)


@triton.jit
def split(y, TERMS: tl.constexpr, UNIT: tl.constexpr = 1.0):
    """Split float32 into three 16-bit parts that add up to it, the first TERMS of them as well as so many can.

    bfloat16 parts: two give 16 bits, three all. A y in float16's unit (``FLOAT16_UNIT`` times log2 decays) has float16
    parts, of which two give 23 bits, and there is no third. 1 leaves float32, and no parts. A part that nobody uses
    costs nothing.
    """
    if TERMS == 1:
        parts = y, y, y
    elif UNIT != 1.0:
        high = _nearest(y, 8192)
        low = (y - high).to(tl.float16)
        parts = high.to(tl.float16), low, low
    else:
        high = _upper_half(y)
        rest = y - high
        # What is rounded is the better for two, what is cut off takes an instruction less.
        middle = _nearest(rest, 65536) if TERMS == 2 else _upper_half(rest)
        parts = high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)
    return parts


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

    Of float16 parts it is the sum of y / FLOAT16_UNIT.

    A matrix unit may cut every number that it adds at about the 25th bit of the largest. Sums of three parts are to be
    float32's own, so that the small ones are added up among themselves, and what they come to is added by an
    instruction that rounds.
    """
    if TERMS != 3:
        return chained_sum(select, parts, TERMS, START)
    weights = _weights(select, parts[0])
    total = tl.dot(weights, parts[0]) + tl.dot(weights, parts[1], tl.dot(weights, parts[2]))
    return total + START if START != 0.0 else total


@triton.jit
def whole_sum(parts, TERMS: tl.constexpr):
    """The sum over all rows, in each row, for ``parts = split(y, TERMS)``: not of two bfloat16 parts, but of three.

    It multiplies a state, in chunk after chunk; the other sums make factors that are rounded to 16 bits.
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


@triton.jit
def to_reference(r, s, b: tl.constexpr):
    """Rows between r and the last row of the first half of r's 2b-block (hierarchical reference point)."""
    second = (r // b) % 2 == 1
    between = tl.where(second[:, None], s[None, :] <= r[:, None], s[None, :] > r[:, None])
    return between & (r[:, None] // b == s[None, :] // b)


@triton.jit
def straddles(r, s, b: tl.constexpr):
    """Pairs (r, s) of one 2b-block with r in its second half and s in its first."""
    return (r[:, None] // (2 * b) == s[None, :] // (2 * b)) & (r[:, None] // b > s[None, :] // b)
