"""Levels of hierarchical reference points inside a tile: which rows each involves.

The same as ``to_reference`` and ``straddles`` of triton_lib, for a level that need not be known when the kernel is
compiled: where registers are few, levels are a loop, so that one level's products are alive at a time.
"""

import triton
import triton.language as tl


@triton.jit
def straddles(r, log2_b):
    """Pairs of rows of one 2b-block, b = 2^log2_b, the first in its second half and the second in its first."""
    half = (r >> log2_b).to(tl.int32)
    return (half[:, None] >> 1 == half[None, :] >> 1) & (half[:, None] > half[None, :])


@triton.jit
def to_reference(r, log2_b):
    """Rows between r and the last row of the first half of r's 2b-block."""
    half = (r >> log2_b).to(tl.int32)
    up_to = (half & 1 == 1)[:, None] & (r[None, :] <= r[:, None])
    behind = (half & 1 == 0)[:, None] & (r[None, :] > r[:, None])
    return (up_to | behind) & (half[:, None] == half[None, :])
