"""Device functions that split float32 numbers into 16-bit parts, so that matrix units multiply all of their digits."""

import triton
import triton.language as tl


@triton.jit
def _upper_half(y):
    """The float32 whose sign, exponent and first seven fraction bits are y's and whose other bits are zero.

    It is a bfloat16 already, so that the conversion can be the packed one; rounding to nearest and back is not.
    """
    return (y.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def nearest(y, STEP: tl.constexpr):
    """Finite y rounded to a float32 whose bits below STEP, a power of two, are zero. (NaN may become 0.)"""
    return ((y.to(tl.int32, bitcast=True) + STEP // 2) & -STEP).to(tl.float32, bitcast=True)


@triton.jit
def split(y, TERMS: tl.constexpr, UNIT: tl.constexpr = 1.0):
    """Split float32 into three 16-bit parts that add up to it, the first TERMS of them as well as so many can.

    bfloat16 parts: two give 16 bits, three all. A y in float16's unit (``decay.FLOAT16_UNIT`` times log2 decays) has
    float16 parts, of which two give 23 bits, and there is no third. TERMS = 1 leaves float32, and no parts. A part that
    is not used costs nothing.
    """
    if TERMS == 1:
        parts = y, y, y
    elif UNIT != 1.0:
        high = nearest(y, 8192)
        low = (y - high).to(tl.float16)
        parts = high.to(tl.float16), low, low
    else:
        high = _upper_half(y)
        rest = y - high
        # Two parts are better with the second rounded; for the first of three, cutting takes an instruction less.
        middle = nearest(rest, 65536) if TERMS == 2 else _upper_half(rest)
        parts = high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)
    return parts


@triton.jit
def two_parts(x, dtype: tl.constexpr):
    """``x`` in ``dtype`` and, for 16-bit types, the rest of it in ``dtype``: 16 bits of bfloat16, 22 of float16."""
    if dtype == tl.bfloat16:
        high, low, _ = split(x, 2)
    else:
        high = x.to(dtype)
        low = (x - high.to(tl.float32)).to(dtype)
    return high, low


@triton.jit
def exact_product(a, b):
    """a · b from ``split(.., 3)`` of each: 24 bits. Products below them are left out; small ones come first."""
    c = tl.dot(a[2], b[0])
    c = tl.dot(a[0], b[2], c)
    c = tl.dot(a[1], b[1], c)
    c = tl.dot(a[1], b[0], c)
    c = tl.dot(a[0], b[1], c)
    return tl.dot(a[0], b[0], c)
