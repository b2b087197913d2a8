"""Device functions for a chunk's squares: pairs of rows, and the inverse of a unit lower triangular block, by block
doubling.

X ← X − X·L_b·X, where X holds the inverses of the diagonal b-blocks and L_b is L restricted to the lower-left b×b
blocks of the 2b-blocks. Unlike the Neumann product (I − L)(I + L²)(I + L⁴)…, whose terms cancel when keys repeat, every
step is a true block inverse.

Pairs have hierarchical reference points: level j has the pairs of rows that lie in different halves of the same block
of 2b rows, b = 2^j. Their reference point is the last row of the block's first half: no decay to or from it has an
exponent above 0. ``r`` and ``s`` are numbers of rows that broadcast against each other, [R, 1] and [1, S] for instance.
j may be known when the kernel is compiled, or count a loop, so that one level's products are alive at a time.
"""

import triton
import triton.language as tl

from kda_core.triton_lib.parts import exact_product, split


@triton.jit
def to_reference(r, s, j):
    """Whether row s lies between row r and the reference point of r's block."""
    return (r >> j == s >> j) & tl.where((r >> j) & 1 == 1, s <= r, s > r)


@triton.jit
def apart(r, s, j):
    """Whether rows r and s are a pair of the level, in either order."""
    return (r >> j) ^ 1 == s >> j


@triton.jit
def straddles(r, s, j: tl.constexpr):
    """Whether rows r and s are a pair of the level, with r in the second half.

    For a known j only: written with divisions it takes fewer registers than ``apart`` and a comparison, or shifts.
    """
    return (r // (2 << j) == s // (2 << j)) & (r // (1 << j) > s // (1 << j))


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    # One exit: Triton 3.6 compiles what follows a return in a branch that is known at compile time.
    if PRECISION == "exact":
        product = exact_product(split(a, 3), split(b, 3))
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product


@triton.jit
def _doubled(X, L, r, s, j: tl.constexpr, PRECISION: tl.constexpr):
    """One doubling: from the inverses of the blocks of b = 2^j rows to those of 2b."""
    L_b = tl.where(straddles(r[:, None], s[None, :], j), L, 0.0)
    return X - _product(_product(X, L_b, PRECISION), X, PRECISION)


@triton.jit
def inverse_16(L, r, s, PRECISION: tl.constexpr):
    """(I + L)⁻¹ for a 16×16 float32 L; only its part below the diagonal is read.

    Args:
        L: [16, 16] float32.
        r, s: tl.arange(0, 16).
        PRECISION: "tf32"; "tf32x3" for 22 bits; "bf16x6" or "ieee" for float32 accuracy; "exact" for all 24 bits from
            products of bfloat16.
    """
    X = tl.where(r[:, None] == s[None, :], 1.0, 0.0) - tl.where(straddles(r[:, None], s[None, :], 0), L, 0.0)
    X = _doubled(X, L, r, s, 1, PRECISION)
    X = _doubled(X, L, r, s, 2, PRECISION)
    return _doubled(X, L, r, s, 3, PRECISION)


@triton.jit
def add_pairs(left_q, left_k, right, m, el, DOT: tl.constexpr):
    """Add left_q · rightᵀ to m and left_k · rightᵀ to el."""
    right = tl.trans(right)
    return tl.dot(left_q, right, m, input_precision=DOT), tl.dot(left_k, right, el, input_precision=DOT)


@triton.jit
def store_square(p_square, b00, b10, b11, C: tl.constexpr):
    """Store a lower triangular 32×32 matrix from its 16×16 blocks."""
    dtype = p_square.dtype.element_ty
    tl.store(p_square, b00.to(dtype))
    tl.store(p_square + 16, tl.zeros([16, 16], dtype))
    tl.store(p_square + 16 * C, b10.to(dtype))
    tl.store(p_square + 16 * C + 16, b11.to(dtype))
