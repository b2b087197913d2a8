"""Device functions for decays inside a tile of 16 rows, on matrix units, without a gather and without overflow.

Every exponent that a tile needs (decay since the tile's start, decay to its end, decay to a reference row) is a sum of
log decays over rows that row r selects, that is, a product of a 16×16 matrix of zeros and ones with the [16, BK]
block of log2 decays. Such sums have terms of one sign, so they neither cancel nor turn inf − inf into NaN, and their
result comes in the layout in which the matrix unit wants q and k scaled.
"""

import math

import triton
import triton.language as tl

TILE = tl.constexpr(16)

BOUND = tl.constexpr(-5.0)
"""Least natural-log decay of a row for which the bounded form below holds."""

BOUNDED_LOG2_DECAY = tl.constexpr(BOUND.value / math.log(2))

BOUNDED_SHIFT = tl.constexpr(float(round(-8 * BOUNDED_LOG2_DECAY.value)))
"""With decays of at least BOUND a row, sums over a tile lie in [−115.5, 0] in log2 units; shifted by half of that,
2^(x + shift) and its reciprocal both stay within 2^±58, far from the ends of what bf16 and fp32 can hold."""

BOUNDED_SCALE = tl.constexpr(2.0**BOUNDED_SHIFT.value)
"""2^BOUNDED_SHIFT."""


@triton.jit
def _upper_half(y):
    """The float32 whose sign, exponent and first seven fraction bits are y's and whose other bits are zero.

    It is a bfloat16 already, so that the conversion can be the packed one; rounding to nearest and back is not.
    """
    return (y.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def split(y, TERMS: tl.constexpr):
    """Split float32 into TERMS bfloat16 parts that add up to it to 16 bits (2) or in full (3); 1 leaves float32."""
    if TERMS == 1:
        return y, y, y
    high = _upper_half(y)
    rest = y - high
    if TERMS == 2:
        return high.to(tl.bfloat16), rest.to(tl.bfloat16), rest.to(tl.bfloat16)
    middle = _upper_half(rest)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def chained_sum(select, parts, TERMS: tl.constexpr, START: tl.constexpr = 0.0):
    """``selected_sum`` in one accumulator, large parts first: of three, each small one may lose 2⁻²⁵ of the sum."""
    total = tl.full(parts[0].shape, START, tl.float32)
    if TERMS == 1:
        return tl.dot(select.to(tl.float32), parts[0], total, input_precision="ieee")
    ones = select.to(tl.bfloat16)
    total = tl.dot(ones, parts[0], total)
    total = tl.dot(ones, parts[1], total)
    if TERMS == 3:
        total = tl.dot(ones, parts[2], total)
    return total


@triton.jit
def selected_sum(select, parts, TERMS: tl.constexpr, START: tl.constexpr = 0.0):
    """START plus the sum over rows s of y[s, c] where select[r, s]: [16, BK] float32, ``parts = split(y, TERMS)``.

    A matrix unit may cut every number that it adds at about the 25th bit of the largest. Sums of three parts are to be
    float32's own, so that the small ones are added up among themselves, and what they come to is added by an
    instruction that rounds.
    """
    if TERMS != 3:
        return chained_sum(select, parts, TERMS, START)
    ones = select.to(tl.bfloat16)
    total = tl.dot(ones, parts[0]) + tl.dot(ones, parts[1], tl.dot(ones, parts[2]))
    return total + START if START != 0.0 else total


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
