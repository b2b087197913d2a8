"""Device functions for the inverse of a unit lower triangular block, by block doubling.

X ← X − X·L_b·X, where X holds the inverses of the diagonal b-blocks and L_b is L restricted to the lower-left b×b
blocks of the 2b-blocks. Unlike the Neumann product (I − L)(I + L²)(I + L⁴)…, whose terms cancel when keys repeat, every
step is a true block inverse.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.decay import split, straddles


@triton.jit
def double(X, L, r, s, b: tl.constexpr, PRECISION: tl.constexpr):
    """One doubling: from the inverses of the b-blocks to those of the 2b-blocks."""
    L_b = tl.where(straddles(r, s, b), L, 0.0)
    return X - tl.dot(tl.dot(X, L_b, input_precision=PRECISION), X, input_precision=PRECISION)


@triton.jit
def inverse_16(L, r, s, PRECISION: tl.constexpr):
    """(I + L)⁻¹ for a 16×16 float32 L; only its part below the diagonal is read.

    Args:
        L: [16, 16] float32.
        r, s: tl.arange(0, 16).
        PRECISION: "tf32"; "tf32x3" for 22 bits; "bf16x6" or "ieee" for float32 accuracy.
    """
    X = tl.where(r[:, None] == s[None, :], 1.0, 0.0) - tl.where(straddles(r, s, 1), L, 0.0)
    X = double(X, L, r, s, 2, PRECISION)
    X = double(X, L, r, s, 4, PRECISION)
    return double(X, L, r, s, 8, PRECISION)


@triton.jit
def two_parts(a, dtype: tl.constexpr):
    """``a`` in ``dtype`` and, for 16-bit types, what that leaves of it.

    An inverse rounded to 16 bits is an error in all that its rows write: final states and dv show it, up to twice
    their other errors.
    """
    if dtype == tl.bfloat16:
        a, rest, _ = split(a, 2)
    else:
        whole = a
        a = whole.to(dtype)
        rest = (whole - a.to(tl.float32)).to(dtype)
    return a, rest
