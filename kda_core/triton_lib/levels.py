"""Device functions for hierarchical reference points: which rows a level of pairs involves.

Level j has the pairs of rows that lie in different halves of the same block of 2b rows, b = 2^j. Their reference point
is the last row of the block's first half: no decay to or from it has an exponent above 0.

``r`` and ``s`` are numbers of rows that broadcast against each other, [R, 1] and [1, S] for instance. j may be known
when the kernel is compiled, or count a loop, so that one level's products are alive at a time.
"""

import triton
import triton.language as tl


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
